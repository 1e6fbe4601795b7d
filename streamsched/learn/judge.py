"""Learned priorities held to time: every policy on the same parts of a slice, against every rule, with intervals.

A slice of four weeks has three parts, by submission: policies are trained on the jobs of the first two weeks, chosen on
those of the third, and reported on those of the fourth. For each part the slice is simulated from its first job to the
part's last one, under the policy that is judged: the queue that the part begins with is the policy's own, and nothing
of a later part is seen. Then only the part's jobs count. Arrivals end with the part, so its last jobs meet less of a
queue than they would; that is so for every policy.

Nobody sees a true run time but those marked `Sees.TRUE`, the oracles. Predictions are `sim.foresight`'s: learned from
the jobs before the slice (`Sees.BEFORE`), or day by day from what had ended in the policy's own schedule
(`Sees.BY_DAY`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamsched.policy.expression import Expression
from streamsched.policy.gittins import LEVELS_GPU_S, in_steps
from streamsched.policy.network import Network
from streamsched.predict import Finished
from streamsched.sim import foresight, paper, scored
from streamsched.sim.bootstrap import Bootstrap, Interval
from streamsched.sim.fast import (
    BOUNDED,
    COSTS,
    MOVED,
    SPARING,
    Backfill,
    Floats,
    Index,
    Ints,
    Outcome,
    Preemption,
    Rule,
    Workload,
    las_index,
    simulate,
    simulate_index,
    simulate_srtf,
)
from streamsched.sim.foresight import Foreseen, Policy
from streamsched.sim.metrics import BOUND_S
from streamsched.sim.ranked import Ranking, Ranks

Bools = npt.NDArray[np.bool_]

DAY_S: Final = 86_400.0
WEEK_S: Final = 7 * DAY_S


# ── what is judged where ─────────────────────────────────────────────────────────────────────────────────────────────


class Part(StrEnum):
    TRAIN = "train"
    CHOOSE = "choose"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class Split:
    """Parts of a slice, by the times of submission; each from its edge on, up to the next one."""

    edges_s: tuple[float, float, float, float]

    def __post_init__(self) -> None:
        if not all(a < b for a, b in pairwise(self.edges_s)):
            raise ValueError("edges ascend")

    @classmethod
    def of_four_weeks(cls, start_s: float) -> Split:
        """Two weeks, one and one."""
        return cls((start_s, start_s + 2 * WEEK_S, start_s + 3 * WEEK_S, start_s + 4 * WEEK_S))

    def span(self, part: Part) -> tuple[float, float]:
        place = list(Part).index(part)
        return self.edges_s[place], self.edges_s[place + 1]

    def of(self, part: Part, submit_s: Floats) -> Bools:
        """[job] whether it is of the part."""
        first, last = self.span(part)
        return (submit_s >= first) & (submit_s < last)


class Regime(StrEnum):
    PLAIN = "without preemption"
    PREEMPTIVE = "with preemption"


class Sees(StrEnum):
    """What is known of run times."""

    NOTHING = "nothing"
    BEFORE = "before"
    """Learned from jobs before the slice, and no more."""
    BY_DAY = "by day"
    TRUE = "ORACLE"


Run = Callable[[Workload, Floats], Outcome]
"""(jobs with predicted run times as estimates, [job] spread of these) -> schedule. Has to be causal: what happens up to
a moment follows from the jobs submitted by then."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A policy that can be judged."""

    name: str
    run: Run
    regime: Regime = Regime.PLAIN
    sees: Sees = Sees.BEFORE
    learned: bool = False
    seed: int | None = None
    """Of its training."""


@dataclass(frozen=True, eq=False)
class Slice:
    """Jobs of a trace on a cluster, and those before them."""

    name: str
    jobs: Sequence[Finished]
    """By submission; run times are theirs, ends follow from the schedule."""
    history: Sequence[Finished]
    node_gpus: Sequence[int]
    split: Split
    weight: Floats | None = None
    """[job] what its waiting counts; None: 1."""

    @cached_property
    def foreseen(self) -> Foreseen:
        """[kind] (median s, spread, ranks of Gittins times GPUs at `foresight.LEVELS_S`), learned before the slice."""
        return foresight.foreseen_before(self.jobs, self.history, _all_readings)

    @cached_property
    def seen(self) -> Workload:
        """With the medians that were predicted before the slice as estimates."""
        return foresight.workload_of(self.jobs).with_estimates(self.foreseen.first)

    @cached_property
    def spread(self) -> Floats:
        """[job] ln of the 95 % over the 5 % quantile of the prediction."""
        return np.asarray(self.foreseen.told[self.foreseen.kind, 1])

    def until(self, part: Part) -> int:
        """Number of jobs that are submitted before the part's end."""
        return int(np.searchsorted(self.seen.submit_s, self.split.span(part)[1]))


def _all_readings(curves: Floats, gpus: Ints) -> Floats:
    return np.column_stack([foresight.median_and_spread(curves, gpus), foresight.gittins_per_gpu(curves, gpus)])


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Measure(StrEnum):
    MEAN_WAIT = "mean_wait_s"
    P50_WAIT = "p50_wait_s"
    P99_WAIT = "p99_wait_s"
    MAX_WAIT = "max_wait_s"
    WEIGHTED_WAIT = "weighted_wait_s"
    """Mean by weight."""
    WEIGHTED_WAIT_MAX = "weighted_wait_max_s"
    """Largest weight x wait."""
    MEAN_JCT = "mean_jct_s"
    SLOWDOWN = "mean_bounded_slowdown"
    UTILISATION = "utilisation"
    """GPU-seconds of work done within the part's time (lost work and restarts are none) of all there were."""
    PREEMPTIONS = "preemptions_per_job"


@dataclass(frozen=True, eq=False)
class Judged:
    """What one policy reaches on one part. Waits with preemption: completion - submission - run time.

    Intervals draw whole days of the part with replacement (`sim.bootstrap`), the same days for every policy of a part.
    Seven days are few: the quantiles are moved outwards as Student's t asks for (Hesterberg, "What teachers should know
    about the bootstrap", The American Statistician 69(4), 2015: expanded percentiles). Queues hold together for longer
    than a day, so the intervals are still rather too narrow. Maxima have none (see `sim.metrics.intervals`).
    """

    name: str
    regime: Regime
    sees: Sees
    values: Mapping[Measure, float]
    draws: Mapping[Measure, Floats]
    """[draw]; none where there is but one day."""
    days: int
    learned: bool = False
    seeds: tuple[int, ...] = ()
    """Of training, where there were several: `values` and `draws` are means over them."""
    least: Mapping[Measure, float] = field(default_factory=dict)
    most: Mapping[Measure, float] = field(default_factory=dict)
    """Over the seeds."""

    @property
    def oracle(self) -> bool:
        return self.sees is Sees.TRUE

    def interval(self, measure: Measure) -> Interval | None:
        """None where there is none."""
        return _between(self.draws[measure], self.days) if measure in self.draws else None


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two policies on the same days: below 0, the first one's figure is the lower."""

    value: float
    interval: Interval | None


def difference(one: Judged, other: Judged, measure: Measure) -> Difference:
    """`one` - `other`. Both have to be of the same part of the same slice."""
    value = one.values[measure] - other.values[measure]
    if measure not in one.draws:
        return Difference(value, None)
    return Difference(value, _between(one.draws[measure] - other.draws[measure], one.days))


def over_seeds(runs: Sequence[Judged]) -> Judged:
    """One row of the same policy trained several times. The interval is that of the mean over the seeds: it holds what
    other days would change, not what other seeds would, which least and most show."""
    first = runs[0]
    by_measure = {measure: [run.values[measure] for run in runs] for measure in first.values}
    return replace(
        first,
        values={measure: float(np.mean(values)) for measure, values in by_measure.items()},
        draws={m: np.asarray(np.mean([run.draws[m] for run in runs], axis=0)) for m in first.draws},
        seeds=tuple(seed for run in runs for seed in run.seeds),
        least={measure: min(values) for measure, values in by_measure.items()},
        most={measure: max(values) for measure, values in by_measure.items()},
    )


def lowest(rows: Iterable[Judged], measure: Measure = Measure.MEAN_WAIT) -> Judged:
    """Of equal ones the first by name. Raises ValueError where there is none."""
    return min(rows, key=lambda row: (row.values[measure], row.name))


def best_rule(rows: Iterable[Judged]) -> Judged:
    """By mean wait, of the rules that could be deployed. Raises ValueError where there is none."""
    return lowest(row for row in rows if not (row.oracle or row.learned))


def _between(draws: Floats, days: int) -> Interval:
    share = 2.0 * NormalDist().cdf(math.sqrt(days / (days - 1.0)) * _t_975(days - 1)) - 1.0
    low, high = np.percentile(draws, [50 * (1 - share), 50 * (1 + share)])
    return float(low), float(high)


def _t_975(freedom: int) -> float:
    """Quantile 0.975 of Student's t from 5 degrees of freedom on, to two digits (Abramowitz and Stegun, 26.7.5)."""
    z, n = NormalDist().inv_cdf(0.975), float(freedom)
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
    )
    return z + sum(terms)


DRAWS: Final = 2_000


class Judge:
    """Judges policies on the parts of one slice. What has been simulated once is kept."""

    def __init__(self, where: Slice, draws: int = DRAWS) -> None:
        self.where = where
        self._draws = draws
        self._kept: dict[tuple[Candidate, Part], Judged] = {}

    def judge(self, candidate: Candidate, part: Part) -> Judged:
        """Raises ValueError for a part without jobs, and what `candidate.run` raises."""
        if (candidate, part) not in self._kept:
            count = self.where.until(part)
            jobs = self.where.seen.take(slice(count))
            if not self.where.split.of(part, jobs.submit_s).any():
                raise ValueError(f"{self.where.name}: no job is submitted in the part {part}")
            outcome = candidate.run(jobs, self.where.spread[:count])
            self._kept[candidate, part] = self._figures(candidate, jobs, outcome, part)
        return self._kept[candidate, part]

    def _figures(self, candidate: Candidate, jobs: Workload, outcome: Outcome, part: Part) -> Judged:
        span, own = self.where.split.span(part), self.where.split.of(part, jobs.submit_s)
        weight = np.ones(len(jobs)) if self.where.weight is None else self.where.weight[: len(jobs)]
        of_jobs = {measure: values[own] for measure, values in _by_job(jobs, outcome).items()}
        wait, weight = of_jobs[Measure.MEAN_WAIT], weight[own]
        useful = useful_share(jobs, outcome, span)
        starts = _day_starts(jobs.submit_s[own], span[0])
        over_jobs = Bootstrap(len(wait), draws=self._draws, starts=starts)
        over_days = Bootstrap(len(useful), draws=self._draws, block=1)
        draws = {measure: over_jobs.means(values) for measure, values in of_jobs.items()}
        draws |= {measure: over_jobs.percentiles(wait, q) for measure, q in _PERCENTILES.items()}
        draws[Measure.WEIGHTED_WAIT] = over_jobs.means(weight * wait) / over_jobs.means(weight)
        draws[Measure.UTILISATION] = over_days.means(useful)
        values = {measure: float(values.mean()) for measure, values in of_jobs.items()}
        values |= {m: float(np.percentile(wait, q, method="inverted_cdf")) for m, q in _PERCENTILES.items()}
        values[Measure.WEIGHTED_WAIT] = float((weight * wait).sum() / weight.sum())
        values[Measure.MAX_WAIT], values[Measure.WEIGHTED_WAIT_MAX] = float(wait.max()), float((weight * wait).max())
        values[Measure.UTILISATION] = float(useful.mean())
        seeds = () if candidate.seed is None else (candidate.seed,)
        of, days = candidate, len(starts)
        return Judged(of.name, of.regime, of.sees, values, draws if days > 1 else {}, days, of.learned, seeds)


_PERCENTILES: Final = {Measure.P50_WAIT: 50.0, Measure.P99_WAIT: 99.0}


def _by_job(jobs: Workload, outcome: Outcome) -> dict[Measure, Floats]:
    """[job] of each measure that is a mean over jobs."""
    jct = outcome.finish_s - jobs.submit_s
    return {
        Measure.MEAN_WAIT: np.maximum(outcome.wait_s, 0.0),
        Measure.MEAN_JCT: jct,
        Measure.SLOWDOWN: np.maximum(1.0, jct / np.maximum(jobs.duration_s, BOUND_S)),
        Measure.PREEMPTIONS: outcome.preemptions.astype(np.float64),
    }


def _day_starts(submit_s: Floats, first_s: float) -> Ints:
    """Places of the first jobs of each day that has some; the first is 0."""
    day = np.floor((submit_s - first_s) / DAY_S)
    return np.flatnonzero(np.append(True, np.diff(day) != 0))


def useful_share(jobs: Workload, outcome: Outcome, span: tuple[float, float], costs: Preemption = COSTS) -> Floats:
    """[day] of the span: GPU-seconds of work that was kept, of all that the cluster had."""
    edges = np.append(np.arange(span[0], span[1], DAY_S), span[1])
    job, begin, end = _kept(outcome, costs)
    gpus = jobs.gpus[job]
    done = [
        float((np.clip(np.minimum(end, last) - np.maximum(begin, first), 0.0, None) * gpus).sum())
        for first, last in pairwise(edges.tolist())
    ]
    return np.asarray(np.array(done) / (outcome.gpus * np.diff(edges)))


def _kept(outcome: Outcome, costs: Preemption) -> tuple[Ints, Floats, Floats]:
    """Of each stretch (job, from, to) what was not lost: after the restart, up to its last checkpoint if it was
    stopped."""
    runs = outcome.runs
    order = np.lexsort((runs.start_s, runs.job))
    job, start, end = runs.job[order], runs.start_s[order], runs.end_s[order]
    other = np.diff(job) != 0
    begin = start + np.where(np.append(True, other), 0.0, costs.restart_s)
    worked = np.maximum(0.0, end - begin)
    saved = np.where(np.append(other, True), worked, np.floor(worked / costs.checkpoint_s) * costs.checkpoint_s)
    return job, begin, begin + saved


# ── learned policies ─────────────────────────────────────────────────────────────────────────────────────────────────


def by_network(
    name: str, network: Network, node_gpus: Sequence[int], seed: int | None = None, **limits: Any
) -> Candidate:
    """Without preemption, by a network's scores; `limits`: of `scored.Instance`."""

    def run(jobs: Workload, spread: Floats) -> Outcome:
        return scored.simulate_network(scored.Instance(jobs, node_gpus, spread=spread, **limits), network)

    return Candidate(name, run, learned=True, seed=seed)


def by_expression(
    name: str, expression: Expression, node_gpus: Sequence[int], seed: int | None = None, **limits: Any
) -> Candidate:
    """Without preemption, by an expression; `limits`: of `scored.Instance`."""

    def run(jobs: Workload, spread: Floats) -> Outcome:
        return scored.simulate_expression(scored.Instance(jobs, node_gpus, spread=spread, **limits), expression)

    return Candidate(name, run, learned=True, seed=seed)


def by_rank(
    name: str,
    ranking: Ranking,
    node_gpus: Sequence[int],
    preemption: Preemption = COSTS,
    levels_gpu_s: Sequence[float] = LEVELS_GPU_S,
    seed: int | None = None,
) -> Candidate:
    """With preemption, by ranks that change at `levels_gpu_s` of service. Jobs need estimates."""

    def run(jobs: Workload, spread: Floats) -> Outcome:
        if jobs.estimate_s is None:
            raise ValueError("ranks see predicted run times, and there are none")
        index = Ranks(scored.Instance(jobs, node_gpus, spread=spread), levels_gpu_s).table(ranking)
        return simulate_index(jobs, node_gpus, index, preemption)

    return Candidate(name, run, Regime.PREEMPTIVE, learned=True, seed=seed)


# ── baselines ────────────────────────────────────────────────────────────────────────────────────────────────────────

BACKFILLS: Final = (Backfill.NONE, Backfill.SKIP, Backfill.EASY, Backfill.CONSERVATIVE)


def rules(node_gpus: Sequence[int], backfills: Iterable[Backfill] = BACKFILLS) -> list[Candidate]:
    """Every rule with every way of backfilling. Where neither sees run times, `Sees.NOTHING`; else predicted ones."""
    return [_rule(node_gpus, rule, backfill) for backfill in backfills for rule in Rule]


def _rule(node_gpus: Sequence[int], rule: Rule, backfill: Backfill, true: bool = False) -> Candidate:
    told = rule.by_estimate or backfill >= Backfill.EASY
    sees = Sees.TRUE if true else Sees.BEFORE if told else Sees.NOTHING

    def run(jobs: Workload, spread: Floats) -> Outcome:
        return simulate(jobs.with_true_estimates() if true else jobs, node_gpus, rule, backfill)

    return Candidate(f"{rule.name.lower()}, {backfill.name.lower()}", run, sees=sees)


def virtual_machine(node_gpus: Sequence[int], preemption: Preemption | None = None, true: bool = False) -> Candidate:
    """A-SRPT by estimates."""
    policy = foresight.by_virtual_machine(node_gpus, preemption=preemption)

    def run(jobs: Workload, spread: Floats) -> Outcome:
        seen = jobs.duration_s if true else jobs.estimate_s
        assert seen is not None
        return policy.run(jobs, Foreseen(seen[:, None], np.arange(len(jobs))))

    regime = Regime.PLAIN if preemption is None else Regime.PREEMPTIVE
    return Candidate(_named("a-srpt", preemption), run, regime, Sees.TRUE if true else Sees.BEFORE)


def by_index(
    name: str, node_gpus: Sequence[int], index: Index, preemption: Preemption = COSTS, sees: Sees = Sees.NOTHING
) -> Candidate:
    """With preemption, by an index whose kinds, if any, are of the slice's jobs in order."""

    def run(jobs: Workload, spread: Floats) -> Outcome:
        kind = None if index.kind is None else index.kind[: len(jobs)]
        return simulate_index(jobs, node_gpus, replace(index, kind=kind), preemption)

    return Candidate(_named(name, preemption), run, Regime.PREEMPTIVE, sees)


def gittins_foreseen(where: Slice, preemption: Preemption, steps: bool = False) -> Candidate:
    """Gittins' rank per GPU of each job's own curve, predicted before the slice."""
    ranks = where.foreseen.told[:, 2:]
    index = Index(foresight.LEVELS_S, in_steps(ranks) if steps else ranks, where.foreseen.kind, by_gpu_time=False)
    return by_index("gittins in steps" if steps else "gittins", where.node_gpus, index, preemption, Sees.BEFORE)


def by_day(name: str, where: Slice, policy: Policy, regime: Regime = Regime.PLAIN) -> Candidate:
    """A policy by what is learned day by day in its own schedule. The slice is gone through once, when it is first
    run: what was foreseen of a job does not depend on later ones."""
    kept: list[Foreseen] = []

    def run(jobs: Workload, spread: Floats) -> Outcome:
        if not kept:
            kept.append(foresight.foresee(where.jobs, policy, where.history)[1])
        return policy.run(jobs, Foreseen(kept[0].told, kept[0].kind[: len(jobs)]))

    return Candidate(name, run, regime, Sees.BY_DAY)


def _named(name: str, preemption: Preemption | None) -> str:
    """With what is set of bound, moves, least loss."""
    if preemption is None:
        return name
    told = {"bound": preemption.bound_s < math.inf, "moves": preemption.move_after_s < math.inf}
    told["least loss"] = preemption.least_loss
    return ", ".join([name, *(word for word, is_so in told.items() if is_so)])


def plain_baselines(where: Slice) -> list[Candidate]:
    """Without preemption."""
    return [*rules(where.node_gpus), virtual_machine(where.node_gpus)]


def preemptive_baselines(where: Slice, by_class: Index) -> list[Candidate]:
    """`by_class`: Gittins' ranks by class of GPUs, from before the slice (`policy.gittins.table_before`)."""
    nodes, las = where.node_gpus, las_index()
    steps = replace(by_class, table=in_steps(by_class.table))
    return [
        *(by_index("las", nodes, las, preemption) for preemption in (COSTS, BOUNDED, MOVED, SPARING)),
        by_index("gittins by class", nodes, by_class, MOVED, Sees.BEFORE),
        by_index("gittins by class in steps", nodes, steps, SPARING, Sees.BEFORE),
        gittins_foreseen(where, MOVED),
        gittins_foreseen(where, SPARING, steps=True),
        virtual_machine(nodes, MOVED),
    ]


def baselines_by_day(where: Slice) -> list[Candidate]:
    """Those whose predictions are worth being renewed; each goes through the slice day by day, which takes minutes."""
    nodes = where.node_gpus
    steps = foresight.by_service(nodes, foresight.coarse(foresight.gittins_per_gpu), SPARING)
    plain = {
        f"{rule.name.lower()}, {backfill.name.lower()}": foresight.by_estimate(nodes, rule, backfill)
        for rule in (Rule.SJF, Rule.QSSF)
        for backfill in (Backfill.SKIP, Backfill.EASY)
    }
    return [
        *(by_day(name, where, policy) for name, policy in plain.items()),
        by_day(_named("gittins in steps", SPARING), where, steps, Regime.PREEMPTIVE),
    ]


def oracles(node_gpus: Sequence[int]) -> list[Candidate]:
    """By true run times: how far an order alone could get. No bounds."""
    pairs = [(rule, backfill) for rule in Rule if rule.by_estimate for backfill in (Backfill.SKIP, Backfill.EASY)]

    def srtf(preemption: Preemption, by_gpu_time: bool) -> Candidate:
        def run(jobs: Workload, spread: Floats) -> Outcome:
            return simulate_srtf(jobs.with_true_estimates(), node_gpus, preemption, by_gpu_time)

        name = _named("srtf x GPUs" if by_gpu_time else "srtf", preemption)
        return Candidate(name, run, Regime.PREEMPTIVE, Sees.TRUE)

    return [
        *(_rule(node_gpus, rule, backfill, true=True) for rule, backfill in [(Rule.FCFS, Backfill.EASY), *pairs]),
        virtual_machine(node_gpus, true=True),
        srtf(COSTS, by_gpu_time=False),
        srtf(SPARING, by_gpu_time=True),
        virtual_machine(node_gpus, MOVED, true=True),
    ]


# ── RLTune's protocol ────────────────────────────────────────────────────────────────────────────────────────────────

PROTOCOL_MEASURES: Final = (Measure.MEAN_WAIT, Measure.MEAN_JCT, Measure.SLOWDOWN)


@dataclass(frozen=True, eq=False)
class InProtocol:
    """One policy by RLTune's protocol (`sim.paper`), and the same jobs in one stream on the same cluster."""

    name: str
    sees: Sees
    batches: Mapping[Measure, Floats]
    """[batch] means, each batch on an empty cluster."""
    stream: Mapping[Measure, float]


def in_protocol(
    jobs: Workload, spread: Floats, candidates: Sequence[Candidate], size: int = paper.BATCH_JOBS
) -> list[InProtocol]:
    """All disjoint batches of `size` jobs in order. Jobs need predicted run times as estimates, and have to fit the
    cluster that the candidates are for. Raises UserError where there are less than two batches."""
    starts = paper.choose(len(jobs), size, None, 0).tolist()
    found = []
    for candidate in candidates:
        parts = [(jobs.take(slice(at, at + size)), spread[at : at + size]) for at in starts]
        by_batch = [_means(part, candidate.run(part, of_part)) for part, of_part in parts]
        batches = {measure: np.array([means[measure] for means in by_batch]) for measure in PROTOCOL_MEASURES}
        found.append(InProtocol(candidate.name, candidate.sees, batches, _means(jobs, candidate.run(jobs, spread))))
    return found


def change(of: InProtocol, base: InProtocol, measure: Measure) -> Difference:
    """Share by which the mean over batches is above that of `base`; the interval draws batches, the same for both.
    Raises ValueError where the mean of `base` is 0."""
    ones, others = of.batches[measure], base.batches[measure]
    if not others.any():
        raise ValueError(f"{base.name}: {measure} is 0 in all batches, and a share of it is nothing")
    drawn = Bootstrap(len(ones), draws=DRAWS, block=1)
    of_base = drawn.means(others)
    interval = drawn.between(drawn.means(ones) / of_base - 1.0) if of_base.all() else None
    return Difference(float(ones.mean() / others.mean()) - 1.0, interval)


def change_in_stream(of: InProtocol, base: InProtocol, measure: Measure) -> float:
    """So for the one stream, 0 where nobody waits under `base`; no interval: there is one stream."""
    return of.stream[measure] / base.stream[measure] - 1.0 if base.stream[measure] else 0.0


def _means(jobs: Workload, outcome: Outcome) -> dict[Measure, float]:
    by_job = _by_job(jobs, outcome)
    return {measure: float(by_job[measure].mean()) for measure in PROTOCOL_MEASURES}
