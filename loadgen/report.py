"""What a replay came to: figures from the messages, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from streamsched.bus import messages as m
from streamsched.core.instructions import Place, Preempt
from streamsched.errors import UserError

from .fleet import DURATION_LABEL
from .history import Audit, History, RunRecord, runs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Waits and completion times are in trace seconds (real seconds times `speed`), latencies in real milliseconds.

    Wait: from submission to `started`; of a job with several runs, its completion time less its duration. Decision
    latency: from the arrival's Kafka timestamp to that of the job's first placement, so it includes waiting for GPUs.
    Utilisation: GPU-seconds held by runs, as a share of all GPUs from the first submission to the last completion.
    `solver`: windows with placements by solver status.
    """

    jobs: int
    completed: int
    refused_rows: int
    refused_by_kind: dict[str, int]
    clamped: int
    speed: float
    mean_wait_s: float | None
    p50_wait_s: float | None
    p99_wait_s: float | None
    max_wait_s: float | None
    mean_jct_s: float | None
    gpu_utilisation: float | None
    decision_latency_ms_p50: float | None
    decision_latency_ms_p99: float | None
    placements: int
    placements_per_s: float | None
    preemptions: int
    solver: dict[str, int]
    violations: int
    violations_by_kind: dict[str, int]
    violation_details: list[str]
    notes: list[str]
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def write(self, path: Path) -> None:
        try:
            path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"report {path}: {(error.strerror or str(error)).lower()}") from None


@dataclass(slots=True)
class JobTimes:
    """Kafka's times of one job, in real epoch seconds."""

    submitted_at: float
    duration_s: float | None
    """Real seconds; None when the arrival does not tell."""
    placed_at: float | None = None
    started_at: float | None = None
    completed_at: float | None = None
    runs: int = 0

    @property
    def jct_s(self) -> float | None:
        return None if self.completed_at is None else self.completed_at - self.submitted_at

    @property
    def wait_s(self) -> float | None:
        if self.completed_at is None:
            return None
        if self.runs > 1 and self.duration_s is not None:
            return max(0.0, self.completed_at - self.submitted_at - self.duration_s)
        return None if self.started_at is None else max(0.0, self.started_at - self.submitted_at)


def job_times(history: History, runs: Mapping[str, RunRecord]) -> dict[str, JobTimes]:
    times: dict[str, JobTimes] = {}
    for at, arrival in history.arrivals:
        times.setdefault(arrival.job_id, JobTimes(at, _duration_s(arrival)))
    for run in sorted(runs.values(), key=lambda run: run.placed_at):
        job = times.get(run.place.job_id)
        if job is None:
            continue
        job.runs += 1
        job.placed_at = run.placed_at if job.placed_at is None else job.placed_at
        if run.completed_at is not None and job.completed_at is None:
            job.started_at, job.completed_at = run.started_at, run.completed_at
    return times


def _duration_s(arrival: m.JobArrival) -> float | None:
    try:
        return float(arrival.labels[DURATION_LABEL])
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the messages do not tell about a replay."""

    jobs: int
    speed: float
    gpus: int
    wall_s: float
    clamped: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()


def summarise(history: History, audit: Audit, facts: RunFacts) -> Summary:
    runs = runs_of(history)
    jobs = job_times(history, runs)
    waits = _scaled([job.wait_s for job in jobs.values()], facts.speed)
    latencies = _scaled([j.placed_at - j.submitted_at for j in jobs.values() if j.placed_at is not None], 1000.0)
    return Summary(
        jobs=facts.jobs,
        completed=sum(job.completed_at is not None for job in jobs.values()),
        refused_rows=sum(facts.refused.values()),
        refused_by_kind=dict(sorted(facts.refused.items())),
        clamped=facts.clamped,
        speed=facts.speed,
        mean_wait_s=mean(waits),
        p50_wait_s=percentile(waits, 50),
        p99_wait_s=percentile(waits, 99),
        max_wait_s=max(waits, default=None),
        mean_jct_s=mean(_scaled([job.jct_s for job in jobs.values()], facts.speed)),
        gpu_utilisation=_utilisation(runs, jobs, facts.gpus),
        decision_latency_ms_p50=percentile(latencies, 50),
        decision_latency_ms_p99=percentile(latencies, 99),
        placements=len(runs),
        placements_per_s=_per_second([run.placed_at for run in runs.values()]),
        preemptions=sum(isinstance(placement.decision, Preempt) for _, placement in history.placements),
        solver=_solver_statuses(history),
        violations=audit.total,
        violations_by_kind=dict(sorted(audit.counts.items())),
        violation_details=list(audit.details),
        notes=list(facts.notes),
        wall_s=round(facts.wall_s, 3),
    )


def _scaled(values: Sequence[float | None], factor: float) -> list[float]:
    return [value * factor for value in values if value is not None]


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100.0
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _per_second(times: Sequence[float]) -> float | None:
    span = max(times) - min(times) if times else 0.0
    return len(times) / span if span > 0 else None


def _utilisation(runs: Mapping[str, RunRecord], jobs: Mapping[str, JobTimes], gpus: int) -> float | None:
    first = min((job.submitted_at for job in jobs.values()), default=None)
    last = max((job.completed_at for job in jobs.values() if job.completed_at is not None), default=None)
    if first is None or last is None or last <= first or gpus <= 0:
        return None
    held = math.fsum(
        len(allocation.gpus) * allocation.gpu_milli / 1000.0 * max(0.0, min(end, last) - max(start, first))
        for run in runs.values()
        for allocation, start, end in run.held(until=last)
    )
    return held / (gpus * (last - first))


def _solver_statuses(history: History) -> dict[str, int]:
    windows = {
        (placement.pool, placement.epoch, placement.decision.why.window): placement.decision.why.solver.value
        for _, placement in history.placements
        if isinstance(placement.decision, Place)
    }
    return dict(sorted(Counter(windows.values()).items()))


def table(summary: Summary, title: str = "replay") -> Table:
    rows = Table(title=title, show_header=False, title_justify="left")
    rows.add_column(style="bold")
    rows.add_column(justify="right")
    rows.add_row("jobs submitted / completed", f"{summary.jobs:,} / {summary.completed:,}")
    rows.add_row("refused rows", _counts(summary.refused_by_kind))
    if summary.clamped:
        rows.add_row("durations clamped", f"{summary.clamped:,}")
    rows.add_row(f"wait, trace s (speed {summary.speed:g})", _seconds(summary.mean_wait_s, " mean"))
    rows.add_row("  p50 / p99 / max", " / ".join(map(_seconds, _wait_percentiles(summary))))
    rows.add_row("completion time, trace s", _seconds(summary.mean_jct_s, " mean"))
    rows.add_row("GPU utilisation", "-" if summary.gpu_utilisation is None else f"{summary.gpu_utilisation:.1%}")
    latencies = (summary.decision_latency_ms_p50, summary.decision_latency_ms_p99)
    rows.add_row("decision latency, ms p50 / p99", " / ".join(map(_seconds, latencies)))
    rate = "" if summary.placements_per_s is None else f" ({summary.placements_per_s:,.1f}/s)"
    rows.add_row("placements", f"{summary.placements:,}{rate}")
    if summary.preemptions:
        rows.add_row("preemptions", f"{summary.preemptions:,}")
    rows.add_row("windows by solver status", _counts(summary.solver))
    style = "red" if summary.violations else "green"
    rows.add_row("violations", f"[{style}]{_counts(summary.violations_by_kind)}[/]")
    rows.add_row("wall time", f"{summary.wall_s:,.1f} s")
    return rows


def _wait_percentiles(summary: Summary) -> tuple[float | None, ...]:
    return summary.p50_wait_s, summary.p99_wait_s, summary.max_wait_s


def _seconds(value: float | None, suffix: str = "") -> str:
    return "-" if value is None else f"{value:,.1f}{suffix}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items()) or "none"
