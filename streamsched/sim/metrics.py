"""Figures of a schedule: one definition for the core, the compiled path and whoever else gives starts and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .fast import Outcome, Workload
from .simulator import SimResult

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BOUND_S = 10.0
"""Run times below this count as this in the bounded slowdown (Feitelson et al., JSSPP 1997)."""


@dataclass(frozen=True, slots=True)
class Lines:
    """How things stood from each moment to the next."""

    time_s: Floats
    queued: Ints
    busy_gpus: Ints


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
        """GPU-seconds in use / (GPUs x time), from the first submission to the last: what comes after is the tail of
        the longest jobs, which says little of the scheduler."""
        first, last = float(np.min(self.submit_s, initial=np.inf)), float(np.max(self.submit_s, initial=-np.inf))
        times = np.clip(self.lines.time_s, first, last)
        if last <= first or len(times) < 2:
            return 0.0
        return float(np.sum(np.diff(times) * self.lines.busy_gpus[:-1])) / (self.cluster_gpus * (last - first))


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
            column([m.busy_gpus for m in result.moments], np.int64),
        ),
    )


def from_fast(workload: Workload, outcome: Outcome, ran: npt.NDArray[np.bool_], tenants: tuple[str, ...]) -> Schedule:
    """`workload` has all jobs, `outcome` is of those with `ran`; the others could never run."""

    def spread(values: Any, empty: Any) -> Any:
        whole = np.full(len(ran), empty)
        whole[ran] = values
        return whole

    return Schedule(
        submit_s=workload.submit_s,
        run_s=workload.duration_s,
        gpus=workload.gpus,
        start_s=spread(outcome.start_s, np.nan),
        finish_s=spread(outcome.finish_s, np.nan),
        preemptions=spread(outcome.preemptions, np.int64(0)),
        tenants=tenants,
        cluster_gpus=outcome.gpus,
        lines=_lines(workload.submit_s[ran], workload.gpus[ran], outcome),
    )


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
    """The figures of `summary.json`; means of nothing are 0."""
    wait, jct = schedule.wait_s, schedule.jct_s
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
        "preemptions": int(schedule.preemptions.sum()),
        "wall_s": wall_s,
    }


def _mean(values: Floats) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _percentile(values: Floats, q: float) -> float:
    """Of the values that there are (no interpolation)."""
    return float(np.percentile(values, q, method="inverted_cdf")) if len(values) else 0.0


def interval(values: Floats, seed: int = 1, draws: int = 1_000, share: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron 1979), over jobs in blocks of equal submission order.

    Waits of jobs that were submitted together go together, so whole blocks of about sqrt(n) jobs are drawn (Künsch,
    "The jackknife and the bootstrap for general stationary observations", 1989).
    """
    if len(values) < 2:
        return _mean(values), _mean(values)
    block = max(1, round(len(values) ** 0.5))
    sums = np.add.reduceat(values, np.arange(0, len(values), block))
    sizes = np.diff(np.append(np.arange(0, len(values), block), len(values)))
    chosen = np.random.default_rng(seed).integers(0, len(sums), size=(draws, len(sums)))
    means = sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1)
    low, high = np.percentile(means, [50 * (1 - share), 50 * (1 + share)])
    return float(low), float(high)
