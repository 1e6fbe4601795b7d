"""Simulated scheduling at a million jobs per second, for the search of policies: arrays in, arrays out.

No core, no events, no tenants: one cluster, jobs that run to their end, rules that are a number per job. What happens
at one moment, what "fits", best fit and the modes of backfilling are as in the simulator over the core, and
`tests/sim_reference.py` states them in plain Python. The loop itself is in `fast_kernel.py`.

`numba` is in the extra `fast`. The first call compiles for some seconds; the result is kept on disk where that is
possible (`NUMBA_CACHE_DIR`). The compiled loop runs without the GIL, so threads can search side by side.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import ModuleType
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from streamsched.errors import UserError
from streamsched.policy.formulas import FORMULAS, SEE_RUN_TIMES, SIZE_WEIGHT, TIMED, Jobs

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LEAST_ESTIMATE_S: Final = 1.0
"""Rules that divide by an estimate or take its logarithm see no less than this."""


LAS_LEVELS_GPU_S: Final = (300.0, 1_800.0, 7_200.0, 36_000.0, 200_000.0)
"""GPU-seconds at which a job goes to the next level."""


class Backfill(IntEnum):
    """What a pass does behind the first job in order that does not fit."""

    NONE = 0
    """The pass ends ("strict")."""
    SKIP = 1
    """The job is skipped, and so is every other one that does not fit; nothing is reserved."""
    EASY = 2
    """The nodes where it fits first, by estimated ends, are kept for it; others start elsewhere, or if they end in time
    (Lifka, JSSPP 1995; Mu'alem and Feitelson, IEEE TPDS 12(6), 2001)."""
    CONSERVATIVE = 3
    """So for every job in order that does not fit, as far as there are nodes that are kept for nobody."""


class Rule(IntEnum):
    """Order of the queue, by number; `Rule.named` takes names. Formulas and sources are in `policy.formulas`.

    A rule that is given true run times as estimates is an oracle.
    """

    FCFS = 0
    LCFS = 1
    SJF = 2
    SAF = 3
    SMALLEST = 4
    LARGEST = 5
    WFP3 = 6
    UNICEP = 7
    F1 = 8
    F2 = 9
    F3 = 10
    F4 = 11
    QSSF = 12
    MULTIFACTOR = 13

    @classmethod
    def named(cls, name: str) -> Self:
        """Raises UserError for a name that is none."""
        try:
            return cls[name.upper()]
        except KeyError:
            raise UserError(f"no rule {name!r}; there are {', '.join(rule.name.lower() for rule in cls)}") from None

    @property
    def by_estimate(self) -> bool:
        """The rule reads estimates of run times."""
        return self.name.lower() in SEE_RUN_TIMES

    @property
    def by_time(self) -> bool:
        """The order changes while jobs wait: a pass costs time in proportion to the queue."""
        return self.name.lower() in TIMED


class _TraceJob(Protocol):
    @property
    def submit_s(self) -> float: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def gpus(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Workload:
    """Jobs as arrays of equal length, by time of submission; equal moments in the order of arrival."""

    submit_s: Floats
    duration_s: Floats
    gpus: Ints
    estimate_s: Floats | None = None
    """What rules and EASY see of `duration_s`; None: nothing is known."""

    def __post_init__(self) -> None:
        """Raises ValueError when an array is not what it should be."""
        lengths = {len(a) for a in (self.submit_s, self.duration_s, self.gpus)}
        if self.estimate_s is not None:
            lengths.add(len(self.estimate_s))
            if not (np.isfinite(self.estimate_s).all() and (self.estimate_s >= 0).all()):
                raise ValueError("an estimate is negative or not finite")
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(f"arrays of one length above 0 expected, not {sorted(lengths)}")
        if not (np.isfinite(self.submit_s).all() and (np.diff(self.submit_s) >= 0).all()):
            raise ValueError("submit_s is not ascending and finite")
        if not (np.isfinite(self.duration_s).all() and (self.duration_s >= 0).all()):
            raise ValueError("a duration is negative or not finite")
        if (self.gpus < 1).any():
            raise ValueError("a job asks for less than one GPU")

    def __len__(self) -> int:
        return len(self.submit_s)

    @classmethod
    def of(cls, jobs: Iterable[_TraceJob], estimate: Callable[[_TraceJob], float] | None = None) -> Self:
        """From a trace's jobs (`loadgen.trace.read_trace(...).jobs`), which are in order of submission."""
        listed = list(jobs)
        return cls(
            np.array([job.submit_s for job in listed], np.float64),
            np.array([job.duration_s for job in listed], np.float64),
            np.array([job.gpus for job in listed], np.int64),
            None if estimate is None else np.array([estimate(job) for job in listed], np.float64),
        )

    def take(
        self, which: Ints | Bools | slice, *, submit_s: Floats | None = None, duration_s: Floats | None = None
    ) -> Workload:
        """These jobs, by number or marked; `submit_s`, `duration_s`: [job taken] instead of their own, s. Raises
        ValueError where that leaves no job, or jobs that are not in order of submission."""
        return Workload(
            self.submit_s[which] if submit_s is None else submit_s,
            self.duration_s[which] if duration_s is None else duration_s,
            self.gpus[which],
            None if self.estimate_s is None else self.estimate_s[which],
        )

    def with_true_estimates(self) -> Workload:
        """Estimates that are the run times: whatever orders or backfills by them is an oracle."""
        return self.with_estimates(self.duration_s)

    def with_estimates(self, estimate_s: Floats) -> Workload:
        return Workload(self.submit_s, self.duration_s, self.gpus, estimate_s)

    def with_noisy_estimates(self, sigma: float, seed: int) -> Workload:
        """Run times times exp(sigma * N(0, 1)), drawn for each job."""
        factor = np.exp(sigma * np.random.default_rng(seed).standard_normal(len(self)))
        return self.with_estimates(self.duration_s * factor)


class Stretches(NamedTuple):
    """Times in which jobs held their GPUs: one entry per stretch in each array."""

    job: Ints
    start_s: Floats
    end_s: Floats
    placed_at: Ints
    placed: Ints
    """Nodes of stretch i, worker by worker: placed[placed_at[i] : placed_at[i + 1]]."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of each job (arrays by job), and of the whole run."""

    start_s: Floats
    """The first start."""
    finish_s: Floats
    wait_s: Floats
    """Start - submit; with preemption finish - submit - duration, so that lost work and restarts count as waiting."""
    preemptions: Ints
    """How often each was evicted."""
    runs: Stretches
    placed_at: Ints
    placed: Ints
    """The last nodes of job j, worker by worker: placed[placed_at[j] : placed_at[j + 1]]."""
    queue_job_s: float
    """Integral of the number of waiting jobs over time."""
    busy_gpu_s: float
    """Integral of the number of occupied GPUs over time."""
    useful_gpu_s: float
    """GPU-seconds of work that was finished; less than `busy_gpu_s` where work was lost or repeated."""
    span_s: float
    """From the first submission to the last completion."""
    gpus: int
    """Of the cluster."""
    passes: int
    queue_max: int
    """Most jobs that waited after a pass."""

    @property
    def mean_wait_s(self) -> float:
        return float(self.wait_s.mean())

    @property
    def utilisation(self) -> float:
        """Useful GPU-seconds of all there were."""
        return self.useful_gpu_s / (self.gpus * self.span_s) if self.span_s > 0 else 0.0


def workers_of(gpus: Ints, node_gpus: Sequence[int]) -> Ints:
    """Nodes that each job needs. A "whole node" is the largest of the cluster (`loadgen.jobs.gang_of`)."""
    whole = max(node_gpus)
    return np.asarray(-(-gpus // whole), np.int64)


def fits_cluster(gpus: Ints, node_gpus: Sequence[int]) -> Bools:
    """Which jobs fit when nothing else runs; `simulate` refuses workloads with others."""
    sizes = np.sort(np.asarray(node_gpus, np.int64))
    whole = int(sizes[-1])
    count = int((sizes == whole).sum())
    smaller = int(sizes[-count - 1]) if count < len(sizes) else 0
    spare = count - gpus // whole
    return np.asarray((gpus <= whole) | (spare > 0) | ((spare == 0) & (gpus % whole <= smaller)), np.bool_)


def static_scores(rule: Rule, jobs: Workload) -> Floats:
    """[job] scores, higher first, of a rule that does not change with time (`policy.formulas`)."""
    if rule.by_time:
        raise ValueError(f"{rule.name} changes with time")
    known = _estimates(rule.name.lower(), jobs) if rule.by_estimate else np.zeros(len(jobs))
    seq, origin_s = np.arange(len(jobs), dtype=np.float64), float(jobs.submit_s[0])
    return -FORMULAS[rule.name.lower()](Jobs(seq, jobs.submit_s, known, jobs.gpus.astype(np.float64), origin_s), 0.0)


def timed_terms(rule: Rule, jobs: Workload, cluster_gpus: int) -> Floats:
    """[job] what a rule that changes with time adds to the term of the age (multifactor) or divides the wait by."""
    if rule is Rule.MULTIFACTOR:
        return SIZE_WEIGHT * (jobs.gpus / float(cluster_gpus))
    r = np.maximum(_estimates(rule.name.lower(), jobs), LEAST_ESTIMATE_S)
    return r * np.log2(jobs.gpus + 1.0) if rule is Rule.UNICEP else r


def simulate(
    jobs: Workload, node_gpus: Sequence[int], rule: Rule | Floats = Rule.FCFS, backfill: Backfill = Backfill.SKIP
) -> Outcome:
    """Run all jobs on nodes of `node_gpus` GPUs.

    `rule` is one of the numbered ones, or an array of scores [job], higher first, ties by order of arrival. Raises
    UserError when a job could never run, when estimates are needed and missing, and where numba is not installed;
    ValueError for arrays that do not match.
    """
    kernel = compiled("fast_kernel")
    _refuse_what_cannot_run(jobs, node_gpus)
    if backfill >= Backfill.EASY:
        _estimates(f"{backfill.name} backfilling", jobs)
    nothing = np.zeros(len(jobs))
    if isinstance(rule, Rule) and rule.by_time:
        numbers = {Rule.WFP3: kernel.BY_WFP3, Rule.UNICEP: kernel.BY_UNICEP, Rule.MULTIFACTOR: kernel.BY_MULTIFACTOR}
        number = numbers[rule]
        order, term = np.arange(len(jobs)), timed_terms(rule, jobs, sum(node_gpus))
    else:
        number, term = kernel.BY_RANK, nothing
        order = _order(static_scores(rule, jobs) if isinstance(rule, Rule) else rule, len(jobs))
    start, finish, placed_at, placed, sums = kernel.run(
        _floats(jobs.submit_s),
        _floats(jobs.duration_s),
        _ints(jobs.gpus),
        nothing if jobs.estimate_s is None else _floats(jobs.estimate_s),
        term,
        _ints(node_gpus),
        order,
        number,
        int(backfill),
    )
    preemptions = np.zeros(len(jobs), np.int64)
    runs = Stretches(np.arange(len(jobs)), start, finish, placed_at, placed)
    return _outcome(jobs, node_gpus, start, finish, start - jobs.submit_s, preemptions, runs, placed_at, placed, sums)


@dataclass(frozen=True, eq=False)
class Index:
    """An order by the service that jobs have had: rank = `table[kind of the job, level]`, lower first.

    A job's level is how many of `thresholds` its service has reached: GPU-seconds, or seconds of running where not
    `by_gpu_time`; lost work and restarts count too, as they are seen.
    """

    thresholds: Floats
    """[level] ascending, above 0."""
    table: Floats
    """[kind, level + 1]"""
    kind: Ints | None = None
    """[job]; None: all are of kind 0."""
    by_gpu_time: bool = True

    def __post_init__(self) -> None:
        if (np.diff(self.thresholds) <= 0).any() or (self.thresholds <= 0).any():
            raise ValueError("levels ascend from above 0")
        if self.table.ndim != 2 or self.table.shape[1] != len(self.thresholds) + 1 or np.isnan(self.table).any():
            raise ValueError(
                f"table: [kind, {len(self.thresholds) + 1}] numbers expected, not {self.table.shape} or NaN"
            )
        if self.kind is not None and len(self.kind) and not (0 <= self.kind.min() <= self.kind.max() < len(self.table)):
            raise ValueError("a kind is not in the table")


def las_index(levels_gpu_s: Sequence[float] = LAS_LEVELS_GPU_S) -> Index:
    """Least attained service with discrete levels (Gu et al., "Tiresias", NSDI 2019, section 3: 2D-LAS)."""
    return Index(np.asarray(levels_gpu_s, np.float64), np.arange(len(levels_gpu_s) + 1.0)[None, :])


@dataclass(frozen=True, slots=True)
class Preemption:
    """What being evicted costs, and how long a job may wait."""

    restart_s: float = 60.0
    """A job that runs again does nothing for so long."""
    checkpoint_s: float = 600.0
    """Work of a stretch up to a multiple of this is kept."""
    bound_s: float = math.inf
    """A job that has waited so long goes before all others, and nobody takes its place any more."""
    move_after_s: float = math.inf
    """A job that has run so long on one node may be stopped there and go on at once on another, whoever needs its
    place: so that free GPUs come together. Infinite: nobody is moved."""
    least_loss: bool = False
    """Of equal rank those are evicted first who lose least (work since the last checkpoint), not who came last."""

    def __str__(self) -> str:
        told = f"restart {self.restart_s:g} s, checkpoint {self.checkpoint_s:g} s"
        told += f", bound {self.bound_s:g} s" if self.bound_s < math.inf else ""
        told += ", least loss first" if self.least_loss else ""
        return told + (f", moved after {self.move_after_s:g} s" if self.move_after_s < math.inf else "")

    def __post_init__(self) -> None:
        costs = 0 <= self.restart_s < math.inf and 0 < self.checkpoint_s < math.inf
        if not (costs and self.bound_s >= 0 and self.move_after_s > 0):
            raise ValueError(
                "restart_s and bound_s are at least 0, checkpoint_s and move_after_s above 0, the costs finite"
            )


COSTS: Final = Preemption()
"""What every preemptive policy pays: 60 s for a restart, and the work since the last of the checkpoints of 10 min."""
BOUNDED: Final = replace(COSTS, bound_s=79_200.0)
MOVED: Final = replace(BOUNDED, move_after_s=1_800.0)
SPARING: Final = replace(MOVED, least_loss=True)
"""As in docs/policies.md: nobody waits for more than a day, jobs are moved, and who loses least is stopped."""


def simulate_index(jobs: Workload, node_gpus: Sequence[int], index: Index, preemption: Preemption = COSTS) -> Outcome:
    """Preemptive scheduling in the order of an index; no run times are seen.

    A waiting job that does not fit evicts running jobs of higher rank, the last in order first, and no more than it
    needs. Passes are at arrivals, completions, when a job reaches another rank, and when one has waited for the bound;
    whatever fits behind a job that does not is started. Errors as `simulate`. Costs O(queue + running) per job started:
    in heavy overload it is far from the speed of `simulate`.
    """
    rate = jobs.gpus.astype(np.float64) if index.by_gpu_time else np.ones(len(jobs))
    kind = np.zeros(len(jobs), np.int64) if index.kind is None else _ints(index.kind)
    if len(kind) != len(jobs):
        raise ValueError(f"kind: {len(jobs)} numbers expected, not {len(kind)}")
    nothing = np.zeros(0)
    return _preemptive(
        jobs, node_gpus, preemption, index.thresholds, rate, index.table, kind, nothing, np.zeros(len(jobs))
    )


def simulate_las(
    jobs: Workload,
    node_gpus: Sequence[int],
    levels_gpu_s: Sequence[float] = LAS_LEVELS_GPU_S,
    restart_s: float = COSTS.restart_s,
    checkpoint_s: float = COSTS.checkpoint_s,
) -> Outcome:
    """`simulate_index` by least attained service."""
    return simulate_index(jobs, node_gpus, las_index(levels_gpu_s), Preemption(restart_s, checkpoint_s))


def simulate_srtf(
    jobs: Workload, node_gpus: Sequence[int], preemption: Preemption = COSTS, by_gpu_time: bool = False
) -> Outcome:
    """Preemptive shortest remaining time first, by the estimates (SRPT: Schrage, Operations Research 16(3), 1968);
    `by_gpu_time`: remaining time x GPUs. With true estimates it is an oracle. Otherwise as `simulate_index`."""
    weight = jobs.gpus.astype(np.float64) if by_gpu_time else np.ones(len(jobs))
    kind = np.zeros(len(jobs), np.int64)
    return _preemptive(
        jobs,
        node_gpus,
        preemption,
        np.zeros(0),
        np.ones(len(jobs)),
        np.zeros((1, 1)),
        kind,
        weight,
        _estimates("shortest remaining time first", jobs),
    )


def _preemptive(
    jobs: Workload,
    node_gpus: Sequence[int],
    preemption: Preemption,
    thresholds: Floats,
    rate: Floats,
    table: Floats,
    kind: Ints,
    weight: Floats,
    estimate: Floats,
) -> Outcome:
    kernel = compiled("fast_kernel")
    _refuse_what_cannot_run(jobs, node_gpus)
    start, finish, preemptions, ran, began, ended, nodes, placed_at, placed, sums = kernel.run_index(
        _floats(jobs.submit_s),
        _floats(jobs.duration_s),
        _ints(jobs.gpus),
        _ints(node_gpus),
        _floats(thresholds),
        _floats(rate),
        _floats(table),
        _ints(kind),
        _floats(weight),
        _floats(estimate),
        float(preemption.bound_s),
        float(preemption.move_after_s),
        preemption.least_loss,
        float(preemption.restart_s),
        float(preemption.checkpoint_s),
    )
    wait = finish - jobs.submit_s - jobs.duration_s
    workers = np.diff(placed_at)[ran]
    runs = Stretches(ran, began, ended, np.concatenate([[0], np.cumsum(workers)]), nodes)
    return _outcome(jobs, node_gpus, start, finish, wait, preemptions, runs, placed_at, placed, sums)


def _outcome(
    jobs: Workload,
    node_gpus: Sequence[int],
    start: Floats,
    finish: Floats,
    wait: Floats,
    preemptions: Ints,
    runs: Stretches,
    placed_at: Ints,
    placed: Ints,
    sums: Floats,
) -> Outcome:
    return Outcome(
        start_s=start,
        finish_s=finish,
        wait_s=wait,
        preemptions=preemptions,
        runs=runs,
        placed_at=placed_at,
        placed=placed,
        queue_job_s=float(sums[0]),
        busy_gpu_s=float(sums[1]),
        useful_gpu_s=float((jobs.duration_s * jobs.gpus).sum()),
        span_s=float(finish.max() - jobs.submit_s[0]),
        gpus=sum(node_gpus),
        passes=int(sums[2]),
        queue_max=int(sums[3]),
    )


def compiled(name: str) -> ModuleType:
    """A module of compiled loops beside this one. Raises UserError where numba is missing."""
    try:
        return importlib.import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        raise UserError("the fast simulation needs numba: pip install 'streamsched[fast]'") from None


def _refuse_what_cannot_run(jobs: Workload, node_gpus: Sequence[int]) -> None:
    if not len(node_gpus) or min(node_gpus) < 1:
        raise UserError("a cluster needs at least one node, and each at least one GPU")
    fits = fits_cluster(jobs.gpus, node_gpus)
    if not fits.all():
        first = int(np.argmin(fits))
        raise UserError(
            f"{int((~fits).sum())} of {len(jobs)} jobs can never run on these nodes, the first is number {first} with"
            f" {int(jobs.gpus[first])} GPUs; leave them out (fits_cluster)"
        )


def _estimates(who: str, jobs: Workload) -> Floats:
    if jobs.estimate_s is None:
        raise UserError(
            f"{who} needs estimates of run times, and this workload has none (estimates: user, true or noisy)"
        )
    return jobs.estimate_s


def _order(scores: Floats, total: int) -> Ints:
    """Jobs by score, higher first, ties by arrival."""
    if scores.shape != (total,) or np.isnan(scores).any():
        raise ValueError(f"scores: {total} numbers expected, not {scores.shape} or NaN")
    return np.argsort(-scores, kind="stable").astype(np.int64)


def _floats(values: Floats) -> Floats:
    return np.ascontiguousarray(values, np.float64)


def _ints(values: Ints | Sequence[int]) -> Ints:
    return np.ascontiguousarray(values, np.int64)
