"""Figures of a schedule: one definition for the core, the compiled path and whoever else gives starts and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .bootstrap import Bootstrap, Interval
from .fast import Outcome, Workload
from .simulator import SimResult, Stretch
from .timeline import Fragmentation, Runs, fragmentation, means
from .workload import is_share

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BOUND_S = 10.0
"""Run times below this count as this in the bounded slowdown (Feitelson et al., JSSPP 1997)."""

DAYS_LEAST = 10
"""Days of a slice from which on intervals are by whole days."""

TIME_BLOCKS = 25
"""Equal spans of time that are drawn for intervals of figures over time: of four weeks, each is a day."""


@dataclass(frozen=True, slots=True)
class Lines:
    """How things stood from each moment to the next."""

    time_s: Floats
    queued: Ints
    busy_gpus: npt.NDArray[np.int64] | Floats


@dataclass(frozen=True, slots=True)
class Schedule:
    """What became of jobs, one entry per job in each array. NaN times: it never ran. Seconds."""

    submit_s: Floats
    run_s: Floats
    gpus: Ints
    start_s: Floats
    """Of its first run."""
    finish_s: Floats
    preemptions: Ints
    tenants: tuple[str, ...]
    cluster_gpus: int
    lines: Lines
    runs: Runs | None = None
    """None: not kept, where jobs have shares of devices."""

    @property
    def first_s(self) -> float:
        """First submission."""
        return float(np.min(self.submit_s, initial=np.inf))

    @property
    def last_s(self) -> float:
        """Last submission. Figures over time end here: what comes after is the tail of the longest jobs, which says
        little of the scheduler."""
        return float(np.max(self.submit_s, initial=-np.inf))

    @property
    def ran(self) -> npt.NDArray[np.bool_]:
        return ~np.isnan(self.finish_s)

    @property
    def wait_s(self) -> Floats:
        """Completion - submission - run time, of those that ran: restarts and lost work count as waiting."""
        wait: Floats = np.maximum(0.0, (self.finish_s - self.submit_s - self.run_s)[self.ran])
        # Not rounded away by the sum and difference: a job that was never stopped waited from submission to start.
        once = self.preemptions[self.ran] == 0
        wait[once] = (self.start_s - self.submit_s)[self.ran][once]
        return wait

    @property
    def jct_s(self) -> Floats:
        """Job completion time: completion - submission."""
        return (self.finish_s - self.submit_s)[self.ran]

    @property
    def bounded_slowdown(self) -> Floats:
        """max(1, JCT / max(run time, 10 s))."""
        return np.maximum(1.0, self.jct_s / np.maximum(self.run_s[self.ran], BOUND_S))

    @property
    def gpu_utilisation(self) -> float:
        """GPU-seconds in use / (GPUs x time), from the first submission to the last."""
        return float(self.over_time(self.lines.time_s, self.lines.busy_gpus, 1)[0]) / self.cluster_gpus

    @property
    def fragmentation(self) -> Fragmentation | None:
        """None: not known."""
        return None if self.runs is None else fragmentation(self.runs, self.gpus, self.first_s)

    def over_time(self, time_s: Floats, values: npt.NDArray[Any], spans: int) -> Floats:
        """Means in equal spans from the first submission to the last; 0 where that is one moment."""
        if self.last_s <= self.first_s:
            return np.zeros(1)
        return means(time_s, values, np.linspace(self.first_s, self.last_s, spans + 1))


def from_core(result: SimResult) -> Schedule:
    jobs = result.jobs

    def column(values: list[Any], kind: Any = np.float64) -> Any:
        return np.array([np.nan if v is None else v for v in values], dtype=kind)

    return Schedule(
        submit_s=column([j.job.spec.submitted_at for j in jobs]),
        run_s=column([j.job.run_s for j in jobs]),
        gpus=column([j.job.spec.total_gpus for j in jobs], np.int64),
        start_s=column([j.first_start_s for j in jobs]),
        finish_s=column([j.finish_s for j in jobs]),
        preemptions=column([j.preemptions for j in jobs], np.int64),
        tenants=tuple(j.job.spec.tenant for j in jobs),
        cluster_gpus=result.gpus,
        lines=Lines(
            column([m.time_s for m in result.moments]),
            column([m.queued for m in result.moments], np.int64),
            column([m.busy_gpus for m in result.moments]),
        ),
        runs=None if any(is_share(j.job) for j in jobs) else _runs_of(result.stretches, result.node_gpus),
    )


def _runs_of(stretches: list[Stretch], node_gpus: list[int]) -> Runs:
    return Runs(
        node=np.array([s.node for s in stretches], dtype=np.int64),
        gpus=np.array([s.gpus for s in stretches], dtype=np.int64),
        start_s=np.array([s.start_s for s in stretches], dtype=np.float64),
        end_s=np.array([s.end_s for s in stretches], dtype=np.float64),
        node_gpus=np.array(node_gpus, dtype=np.int64),
    )


def from_fast(
    workload: Workload,
    outcome: Outcome,
    ran: npt.NDArray[np.bool_],
    tenants: tuple[str, ...],
    node_gpus: Sequence[int],
) -> Schedule:
    """`workload` has all jobs, `outcome` is of those with `ran`; the others could never run."""

    def spread(values: Any, empty: Any) -> Any:
        whole = np.full(len(ran), empty)
        whole[ran] = values
        return whole

    gpus = workload.gpus[ran]
    return Schedule(
        submit_s=workload.submit_s,
        run_s=workload.duration_s,
        gpus=workload.gpus,
        start_s=spread(outcome.start_s, np.nan),
        finish_s=spread(outcome.finish_s, np.nan),
        preemptions=spread(outcome.preemptions, np.int64(0)),
        tenants=tenants,
        cluster_gpus=outcome.gpus,
        lines=_lines(workload.submit_s[ran], gpus, outcome),
        runs=_runs(outcome, gpus, np.asarray(node_gpus, dtype=np.int64)),
    )


def _runs(outcome: Outcome, gpus: Ints, node_gpus: Ints) -> Runs:
    """Of each stretch whole nodes, and what is left on the last one."""
    runs = outcome.runs
    workers = np.diff(runs.placed_at)
    stretch = np.repeat(np.arange(len(runs.job)), workers)
    whole = int(node_gpus.max())
    each = np.full(len(stretch), whole, dtype=np.int64)
    each[runs.placed_at[1:] - 1] = gpus[runs.job] - (workers - 1) * whole
    return Runs(runs.placed, each, runs.start_s[stretch], runs.end_s[stretch], node_gpus)


def _lines(submit: Floats, gpus: Ints, outcome: Outcome) -> Lines:
    runs = outcome.runs
    again = runs.end_s < outcome.finish_s[runs.job]
    """Stretches after which the job waits."""
    moments, at = np.unique(np.concatenate([submit, runs.start_s, runs.end_s]), return_inverse=True)
    held = gpus[runs.job]
    queued, busy = np.zeros(len(moments), dtype=np.int64), np.zeros(len(moments), dtype=np.int64)
    np.add.at(queued, at, np.concatenate([np.ones_like(gpus), -np.ones_like(held), again.astype(np.int64)]))
    np.add.at(busy, at, np.concatenate([np.zeros_like(gpus), held, -held]))
    return Lines(moments, np.cumsum(queued), np.cumsum(busy))


def summary(schedule: Schedule, refused_rows: int, wall_s: float) -> dict[str, float | int]:
    """The figures of `summary.json`; means of nothing are 0, and what is not known is left out."""
    wait, jct = schedule.wait_s, schedule.jct_s
    broken = schedule.fragmentation
    shares = {} if broken is None else {
        "mean_fragmentation": float(schedule.over_time(broken.time_s, broken.partly, 1)[0]),
        "mean_expected_fragmentation": float(schedule.over_time(broken.time_s, broken.expected, 1)[0]),
    }  # fmt: skip
    return {
        "jobs": int(schedule.ran.sum()),
        "never_ran": int((~schedule.ran).sum()),
        "refused_rows": refused_rows,
        "mean_wait_s": _mean(wait),
        "p50_wait_s": _percentile(wait, 50),
        "p99_wait_s": _percentile(wait, 99),
        "max_wait_s": _percentile(wait, 100),
        "mean_jct_s": _mean(jct),
        "mean_bounded_slowdown": _mean(schedule.bounded_slowdown),
        "gpu_utilisation": schedule.gpu_utilisation,
        **shares,
        "fairness_jain": jain(by_tenant(schedule).mean_slowdown),
        "preemptions": int(schedule.preemptions.sum()),
        "wall_s": wall_s,
    }


def _mean(values: Floats) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _percentile(values: Floats, q: float) -> float:
    """Of the values that there are (no interpolation)."""
    return float(np.percentile(values, q, method="inverted_cdf")) if len(values) else 0.0


# ── tenants ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Tenants:
    """One entry per tenant of whose jobs at least one ran, by the GPU-seconds of their work, the most first."""

    names: tuple[str, ...]
    jobs: Ints
    """That ran."""
    gpu_s: Floats
    """Run time x GPUs of these, without what was lost."""
    mean_wait_s: Floats
    mean_slowdown: Floats
    """Bounded slowdown."""


def by_tenant(schedule: Schedule) -> Tenants:
    ran = schedule.ran
    names, of = np.unique(np.array(schedule.tenants, dtype=np.str_)[ran], return_inverse=True)

    def total(values: Floats) -> Floats:
        return np.bincount(of, weights=values, minlength=len(names)).astype(np.float64)

    jobs = np.bincount(of, minlength=len(names))
    gpu_s = total((schedule.run_s * schedule.gpus)[ran])
    order = np.argsort(-gpu_s, kind="stable")
    return Tenants(
        names=tuple(names[order].tolist()),
        jobs=jobs[order],
        gpu_s=gpu_s[order],
        mean_wait_s=(total(schedule.wait_s) / jobs)[order],
        mean_slowdown=(total(schedule.bounded_slowdown) / jobs)[order],
    )


def jain(values: Floats) -> float:
    """Fairness index (sum x)^2 / (n sum x^2) of Jain, Chiu and Hawe ("A quantitative measure of fairness and
    discrimination", DEC TR-301, 1984): 1 where all are equal, 1/n where one has everything; of nothing 0."""
    squares = float(np.sum(values * values))
    return float(np.sum(values)) ** 2 / (len(values) * squares) if squares > 0 else 0.0


# ── intervals ────────────────────────────────────────────────────────────────────────────────────────────────────────


def intervals(schedule: Schedule) -> dict[str, Interval]:
    """95 % bootstrap intervals of the figures of `summary`, by its keys.

    Of those over jobs, the jobs of whole days are drawn (`bootstrap.Bootstrap`), or blocks of sqrt(n) of a slice of
    less than `DAYS_LEAST` days; of those over time, `TIME_BLOCKS` equal spans. Queues hold together for longer than a
    day, and percentiles of few blocks are no t quantiles: where waits hold together for days the intervals are too
    narrow.
    None of the maximum: no draw exceeds the greatest value seen, and two of three have just that (Bickel and Freedman,
    "Some asymptotic theory for the bootstrap", 1981). None of Jain's index: drawing adds spread between the tenants, so
    that draws lie below the index itself.
    """
    found: dict[str, Interval] = {}
    wait = schedule.wait_s
    if len(wait) >= 2:
        jobs = Bootstrap(len(wait), starts=_days(schedule))
        drawn = {
            "mean_wait_s": jobs.means(wait),
            "p50_wait_s": jobs.percentiles(wait, 50),
            "p99_wait_s": jobs.percentiles(wait, 99),
            "mean_jct_s": jobs.means(schedule.jct_s),
            "mean_bounded_slowdown": jobs.means(schedule.bounded_slowdown),
        }
        found = {key: jobs.between(values) for key, values in drawn.items()}
    if schedule.last_s > schedule.first_s:
        times = Bootstrap(TIME_BLOCKS, block=1)
        for key, values in _spans(schedule).items():
            found[key] = times.between(times.means(values))
    return found


def _days(schedule: Schedule) -> Ints | None:
    """Places of the first jobs of each day, from the first submission on, among those that ran; None: too few days."""
    day = np.floor((schedule.submit_s[schedule.ran] - schedule.first_s) / 86_400.0)
    starts = np.flatnonzero(np.append(True, np.diff(day) != 0))
    return starts if len(starts) >= DAYS_LEAST else None


def _spans(schedule: Schedule) -> dict[str, Floats]:
    """Means in equal spans of the figures over time that are known."""
    found, lines, broken = {}, schedule.lines, schedule.fragmentation
    if len(lines.time_s):
        busy = schedule.over_time(lines.time_s, lines.busy_gpus, TIME_BLOCKS)
        found["gpu_utilisation"] = busy / schedule.cluster_gpus
    if broken is not None:
        found["mean_fragmentation"] = schedule.over_time(broken.time_s, broken.partly, TIME_BLOCKS)
        found["mean_expected_fragmentation"] = schedule.over_time(broken.time_s, broken.expected, TIME_BLOCKS)
    return found
