"""Predicted run times in the compiled simulation, from nothing but what has happened by then.

A schedule up to a moment follows from the jobs submitted by that moment. So time is gone through in epochs: at the
beginning of each, all jobs before it are simulated under the very policy that is looked at; those that have ended by
then are learned from (in the order of their ends), those that have begun and not ended count as censored, and the jobs
that come in the epoch are predicted. What is learned within an epoch is used from the next one on: a live scheduler
would know a little more.

What a policy takes from a job's survival curve (`Policy.read`) is asked once for each distinct curve and number of
GPUs, which is a *kind* of job.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from msgspec.structs import replace

from streamsched.policy import asrpt
from streamsched.policy.gittins import STEP_OCTAVES, in_steps
from streamsched.predict import Combination, Ending, Features, Finished
from streamsched.predict import curves as grid

from .fast import (
    COSTS,
    Backfill,
    Floats,
    Index,
    Ints,
    Outcome,
    Preemption,
    Rule,
    Workload,
    simulate,
    simulate_index,
)

DAY_S: Final = 86_400.0
LEVELS_S: Final = grid.EDGES_S[30 : 22 * grid.PER_OCTAVE + 1 : 3]
"""Service at which what is left is asked for again, s of running: two to an octave from 32 s to 49 days."""

HISTORY_JOBS: Final = 10_000
"""Before a slice: so many, its last ones, are learned from."""

Reading = Callable[[Floats, Ints], Floats]
"""([kind, edge] curves, [kind] GPUs) -> [kind, n]"""


@dataclass(frozen=True, eq=False)
class Foreseen:
    """What was read of each job's curve at its submission."""

    told: Floats
    """[kind, n]"""
    kind: Ints
    """[job]"""

    @property
    def first(self) -> Floats:
        """[job] the first number."""
        return np.asarray(self.told[self.kind, 0])


class _TraceJob(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def submit_s(self) -> float: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def ended_s(self) -> float: ...
    @property
    def gpus(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def clamped(self) -> bool: ...


def as_finished(job: _TraceJob) -> Finished:
    """What a predictor is told of a trace's job (`loadgen.trace.read_trace(...).jobs`) when it has ended there."""
    return Finished(
        features=Features(gpus=job.gpus, tenant=job.tenant, job_id=str(job.index), submitted_at=job.submit_s),
        run_s=job.duration_s,
        ending=Ending.CLAMPED if job.clamped else Ending.COMPLETED,
        ended_at=job.ended_s,
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that looks at predictions."""

    read: Reading
    run: Callable[[Workload, Foreseen], Outcome]
    """Has to be causal: what happens up to a moment follows from the jobs submitted by then."""


def foresee(
    jobs: Sequence[Finished],
    policy: Policy,
    history: Sequence[Finished] = (),
    epoch_s: float = DAY_S,
    frozen: bool = False,
    predictor: Combination | None = None,
) -> tuple[Outcome, Foreseen]:
    """The schedule of `jobs`, and what was foreseen of them.

    `jobs` in order of submission; their `ended_at` does not count, it follows from the schedule. `history`: jobs
    submitted before them, ended at `ended_at` wherever they ran. `frozen`: nothing is learned any more from when the
    first of `jobs` comes on. Raises ValueError for jobs out of order, and what `policy.run` raises.
    """
    past = _Past(predictor or Combination(), history)
    workload = workload_of(jobs)
    begins = float(workload.submit_s[0])
    past.replay(begins, epoch_s)
    kinds = _Kinds(policy.read)
    ends = np.full(len(jobs), math.inf)
    arrived = 0
    now = begins
    while arrived < len(jobs):
        if arrived:
            before = workload.take(slice(arrived))
            outcome = policy.run(before, kinds.foreseen())
            past.learn(jobs[:arrived], ends, outcome, now)
        last = int(np.searchsorted(workload.submit_s, now + epoch_s)) if not frozen else len(jobs)
        features = [job.features for job in jobs[arrived:last]]
        kinds.add(past.ask(features), workload.gpus[arrived:last])
        arrived, now = last, now + epoch_s
    return policy.run(workload, kinds.foreseen()), kinds.foreseen()


def foreseen_before(jobs: Sequence[Finished], history: Sequence[Finished], read: Reading) -> Foreseen:
    """What is read of the curves of `jobs` by what `history` has taught before the first of them comes: `foresee`,
    `frozen`, without a schedule. Raises ValueError for jobs out of order, or none."""
    workload, past, kinds = workload_of(jobs), _Past(Combination(), history), _Kinds(read)
    past.replay(float(workload.submit_s[0]), DAY_S)
    kinds.add(past.ask([job.features for job in jobs]), workload.gpus)
    return kinds.foreseen()


def workload_of(jobs: Sequence[Finished]) -> Workload:
    """Without estimates."""
    return Workload(
        np.array([job.features.submitted_at for job in jobs], np.float64),
        np.array([job.run_s for job in jobs], np.float64),
        np.array([job.features.gpus for job in jobs], np.int64),
    )


class _Past:
    """What the predictor has been told, in order."""

    def __init__(self, predictor: Combination, history: Sequence[Finished]) -> None:
        self._predictor = predictor
        self._by_submission = sorted(history, key=lambda job: job.features.submitted_at)
        self._by_end = sorted(history, key=lambda job: job.ended_at)
        self._submitted = 0
        self._ended = 0

    def replay(self, until: float, epoch_s: float) -> None:
        """History up to a moment, in the same epochs."""
        if not self._by_submission:
            return
        epochs = math.ceil((until - self._by_submission[0].features.submitted_at) / epoch_s)
        for back in range(epochs, 0, -1):
            now = until - back * epoch_s
            self._end_those_by(now)
            self._announce_those_before(now + epoch_s)
        self._end_those_by(until)

    def learn(self, jobs: Sequence[Finished], ends: Floats, outcome: Outcome, now: float) -> None:
        """`ends`: [job] when those ended that are known; what has ended since is written there."""
        fresh = np.flatnonzero((outcome.finish_s <= now) & np.isinf(ends[: len(jobs)]))
        of_history = self._those_ended_by(now)
        ended = [replace(jobs[i], ended_at=float(outcome.finish_s[i])) for i in fresh.tolist()]
        ends[fresh] = outcome.finish_s[fresh]
        for job in sorted([*of_history, *ended], key=lambda job: job.ended_at):
            self._predictor.observe(job)
        had = _had_by(outcome, now)
        here = np.flatnonzero((had > 0) & np.isinf(ends[: len(jobs)]))
        running = [(jobs[i].features, float(had[i])) for i in here.tolist()]
        running += [(job.features, now - (job.ended_at - job.run_s)) for job in self._by_end[self._ended :]]
        running = [(job, age) for job, age in running if age > 0]
        self._predictor.set_running([job for job, _ in running], [age for _, age in running])

    def ask(self, features: Sequence[Features]) -> Floats:
        """[job, edge] curves of jobs that are submitted now."""
        curves = self._predictor.curves(features)
        self._predictor.expect(features)
        return curves

    def _end_those_by(self, now: float) -> None:
        for job in self._those_ended_by(now):
            self._predictor.observe(job)

    def _those_ended_by(self, now: float) -> list[Finished]:
        first = self._ended
        while self._ended < len(self._by_end) and self._by_end[self._ended].ended_at <= now:
            self._ended += 1
        return self._by_end[first : self._ended]

    def _announce_those_before(self, moment: float) -> None:
        first = self._submitted
        listed = self._by_submission
        while self._submitted < len(listed) and listed[self._submitted].features.submitted_at < moment:
            self._submitted += 1
        self._predictor.expect([job.features for job in listed[first : self._submitted]])


def _had_by(outcome: Outcome, now: float) -> Floats:
    """[job] seconds for which it had run by then."""
    ran = np.clip(np.minimum(outcome.runs.end_s, now) - outcome.runs.start_s, 0.0, None)
    return np.asarray(np.bincount(outcome.runs.job, weights=ran, minlength=len(outcome.start_s)), np.float64)


class _Kinds:
    """Jobs of equal curves and GPUs, and what the policy read of each."""

    def __init__(self, read: Reading) -> None:
        self._read = read
        self._told: list[Floats] = []
        self._kind: list[Ints] = []
        self._count = 0

    def add(self, curves: Floats, gpus: Ints) -> None:
        """Of jobs that come next."""
        if not len(curves):
            return
        known: dict[tuple[bytes, int], int] = {}
        rows = zip((curve.tobytes() for curve in curves), gpus.tolist(), strict=True)
        kinds = np.array([known.setdefault(row, len(known)) for row in rows], np.int64)
        _, first = np.unique(kinds, return_index=True)
        self._told.append(self._read(curves[first], gpus[first]))
        self._kind.append(kinds + self._count)
        self._count += len(known)

    def foreseen(self) -> Foreseen:
        return Foreseen(np.concatenate(self._told), np.concatenate(self._kind))


# ── what is read of curves ───────────────────────────────────────────────────────────────────────────────────────────


def median_s(curves: Floats, gpus: Ints) -> Floats:
    """[kind, 1] of the run time."""
    return grid.remaining(curves, np.zeros(len(curves)), (0.5,))[0]


def mean_s(curves: Floats, gpus: Ints) -> Floats:
    """[kind, 1] of the run time."""
    return grid.remaining(curves, np.zeros(len(curves)), (0.5,))[1][:, None]


def median_and_spread(curves: Floats, gpus: Ints) -> Floats:
    """[kind, 2] median of the run time in s, and ln of the 95 % over the 5 % quantile, each of 1 s at least."""
    low, median, high = grid.remaining(curves, np.zeros(len(curves)), (0.05, 0.5, 0.95))[0].T
    spread = np.log(np.maximum(np.maximum(high, 1.0) / np.maximum(low, 1.0), 1.0))
    return np.column_stack([median, spread])


def gittins_per_gpu(curves: Floats, gpus: Ints) -> Floats:
    """[kind, level + 1] Gittins' rank (GPU-seconds for one completion) after so much service of `LEVELS_S`."""
    return _at_levels(curves, grid.gittins_s) * gpus[:, None]


def mean_left_per_gpu(curves: Floats, gpus: Ints) -> Floats:
    """[kind, level + 1] mean GPU-seconds that are left after so much service."""
    return _at_levels(curves, lambda curves, ages: grid.remaining(curves, ages, (0.5,))[1]) * gpus[:, None]


def median_left(curves: Floats, gpus: Ints) -> Floats:
    """[kind, level + 1] median seconds that are left after so much service: never "none", however long it has run."""
    return _at_levels(curves, lambda curves, ages: grid.remaining(curves, ages, (0.5,))[0][:, 0])


def coarse(read: Reading, octaves: float = STEP_OCTAVES) -> Reading:
    """Ranks in steps of so many octaves."""
    return lambda curves, gpus: in_steps(read(curves, gpus), octaves)


def _at_levels(curves: Floats, of: Callable[[Floats, Floats], Floats]) -> Floats:
    ages = np.concatenate([[0.0], LEVELS_S])
    return np.stack([of(curves, np.full(len(curves), age)) for age in ages], axis=1)


# ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def by_estimate(
    nodes: Sequence[int],
    rule: Rule,
    backfill: Backfill = Backfill.SKIP,
    read: Reading = median_s,
) -> Policy:
    """A rule, or backfilling, that goes by what was predicted at submission."""
    return Policy(read, lambda jobs, told: simulate(jobs.with_estimates(told.first), nodes, rule, backfill))


def by_service(nodes: Sequence[int], read: Reading, preemption: Preemption = COSTS) -> Policy:
    """Preemptive, by what is read at the service that each job has had (`gittins_per_gpu`, `median_left`, ...)."""

    def run(jobs: Workload, told: Foreseen) -> Outcome:
        return simulate_index(jobs, nodes, Index(LEVELS_S, told.told, told.kind, by_gpu_time=False), preemption)

    return Policy(read, run)


def by_virtual_machine(
    nodes: Sequence[int],
    read: Reading = median_s,
    preemption: Preemption | None = None,
    released: bool = False,
) -> Policy:
    """A-SRPT (`policy.asrpt`). Without `preemption` jobs run to their ends, as in the paper; `released`: and start no
    sooner than the virtual machine has completed them, which is for runs that are not stopped."""
    if released and preemption is not None:
        raise ValueError("A-SRPT with releases does not stop runs")

    def run(jobs: Workload, told: Foreseen) -> Outcome:
        due = asrpt.completions(jobs.submit_s, told.first * jobs.gpus, float(sum(nodes)))
        if preemption is not None:
            return simulate_index(jobs, nodes, Index(np.zeros(0), due[:, None], np.arange(len(jobs))), preemption)
        return _released(jobs, due, nodes) if released else simulate(jobs, nodes, -due)

    return Policy(read, run)


def _released(jobs: Workload, release_s: Floats, nodes: Sequence[int]) -> Outcome:
    """First released first served; waits count from the submission."""
    order = np.argsort(release_s, kind="stable")
    found = simulate(jobs.take(order, submit_s=release_s[order]), nodes)
    place = np.argsort(order, kind="stable")
    workers = np.diff(found.placed_at)[place]
    placed_at = np.concatenate([[0], np.cumsum(workers)])
    within = np.arange(placed_at[-1]) - np.repeat(placed_at[:-1], workers)
    start = found.start_s[place]
    return dataclasses.replace(
        found,
        start_s=start,
        finish_s=found.finish_s[place],
        wait_s=start - jobs.submit_s,
        runs=found.runs._replace(job=order),
        placed_at=placed_at,
        placed=found.placed[np.repeat(found.placed_at[:-1][place], workers) + within],
        queue_job_s=found.queue_job_s + float((release_s - jobs.submit_s).sum()),
        span_s=float(found.finish_s.max() - jobs.submit_s[0]),
    )
