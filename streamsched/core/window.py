"""From the queue to a window's problem: rank, leave out what cannot start now, cut to size.

A window is a pure question about the state; nothing here changes it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct
from msgspec.structs import replace

from .chances import Chances
from .model import WHOLE_GPU, Job, JobSpec
from .preemption import (
    choose_victims,
    classes_after,
    classes_soon,
    full_classes,
    possible_victims,
    priority,
    takes_whole_devices,
)
from .problem import Ask, Candidate, Problem, Victim
from .room import wants_one_type

if TYPE_CHECKING:
    from .cluster import ClusterState

MIX_MAX = 32
"""Kinds of workers that a problem tells of: rarer ones hardly count."""


class Ranker(Protocol):
    """A priority rule. `scores` returns one finite number per job, higher first; ties go by order of arrival.

    Where runs may be preempted for jobs with better scores, it is asked for their jobs beside the waiting ones.
    """

    @property
    def name(self) -> str: ...

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> Sequence[float]: ...


class Ranked(Struct, frozen=True):
    """A waiting job in the order of the last window. `reason` is empty for candidates; the solution tells theirs."""

    job_id: str
    score: float
    reason: str


class Window(Struct, frozen=True):
    """What a window asks, and the whole order it was cut from."""

    problem: Problem
    ranking: tuple[Ranked, ...]


def rank(state: ClusterState, ranker: Ranker, now: float, running: Sequence[Job] = ()) -> list[tuple[float, Job]]:
    """All queued jobs and these, best first: by priority class, then score, then order of arrival."""
    jobs = [*state.queued_jobs(), *running]
    scores = ranker.scores(jobs, state, now)
    return sorted(zip(scores, jobs, strict=True), key=lambda item: (-priority(state, item[1]), -item[0], item[1].seq))


def build(state: ClusterState, ranker: Ranker, number: int, now: float) -> Window:
    """The window's problem: the first `config.window_jobs` ranked jobs that could start now if they were alone.

    Alone means: also without the runs that they may take the place of.
    """
    order, levels, victims = _order(state, ranker, now)
    chooser = _Chooser(state, now, levels, victims)
    ranking: list[Ranked] = []
    for score, job in order:
        reason = chooser.why_not(job)
        if not reason:
            chooser.choose(score, job)
        ranking.append(Ranked(job.spec.job_id, score, reason))
    chosen = chooser.chosen
    victims = chooser.victims_of_chosen()
    values, costs = _values(state, [job for _, job in chosen], victims, levels)
    problem = Problem(
        pool=state.pool,
        window=number,
        now=now,
        policy=ranker.name,
        candidates=tuple(
            _candidate(state, job, score, value, avoided(state, job, now), chooser.level(job))
            for (score, job), value in zip(chosen, values, strict=True)
        ),
        classes=chooser.classes + full_classes(state, victims) if chosen else (),
        victims=tuple(replace(victim, cost=cost) for victim, cost in zip(victims, costs, strict=True)),
        mix=_mix(state) if chosen else (),
        in_order=state.config.backfill == "none",
    )
    return Window(problem, tuple(ranking))


def _order(
    state: ClusterState, ranker: Ranker, now: float
) -> tuple[list[tuple[float, Job]], dict[str, int], tuple[Victim, ...]]:
    """The queue in order; levels by job id and the victims in ascending order of level, both empty without victims."""
    runs = possible_victims(state, now)
    if not runs:
        return rank(state, ranker, now), {}, ()
    queued = state.queued_jobs()
    running = [state.jobs[run.job_id] for run in runs]
    if state.config.preempt == "score":
        ranked = rank(state, ranker, now, running)
        places = {key: level for level, key in enumerate(sorted({_rank_key(state, item) for item in ranked}))}
        levels = {item[1].spec.job_id: places[_rank_key(state, item)] for item in ranked}
        apart = {job.spec.job_id for job in running}
        order = [item for item in ranked if item[1].spec.job_id not in apart]
    else:
        order = rank(state, ranker, now)
        levels = {job.spec.job_id: priority(state, job) for job in [*queued, *running]}
    return order, levels, choose_victims(state, runs, queued, levels, now)


def _rank_key(state: ClusterState, item: tuple[float, Job]) -> tuple[int, float]:
    """Higher is better; those with equal keys are equal and do not take each other's place."""
    score, job = item
    return priority(state, job), score


class _Chooser:
    """Takes candidates in rank order until the window is full."""

    def __init__(self, state: ClusterState, now: float, levels: Mapping[str, int], victims: tuple[Victim, ...]) -> None:
        self._state = state
        self._now = now
        self._levels = levels
        self._victims = victims
        """In ascending order of level."""
        self.classes = state.inventory.classes_without(state.reserved)
        self._chances = Chances(self.classes)
        self._chances_without: dict[tuple[str, ...], Chances] = {}
        self._chances_after: dict[tuple[int, tuple[str, ...]], Chances] = {}
        """By the number of victims that have gone and the nodes to avoid."""
        soon = classes_soon(state, now) if victims else ()
        self._chances_soon = Chances(soon) if soon else None
        self._planned: dict[str, int] = {}
        self._blocks = False
        """Whether the job looked at last is held up by room alone."""
        self._first_blocked = ""
        self.chosen: list[tuple[float, Job]] = []

    def why_not(self, job: Job) -> str:
        """Empty when the job can be a candidate."""
        if self._first_blocked:
            return f"behind: job {self._first_blocked} is before it and has no room now"
        reason = self._why_not_by_itself(job)
        if not reason or self._state.config.backfill == "skip":
            return reason
        if self._blocks:
            self._first_blocked = job.spec.job_id
        return reason

    def _why_not_by_itself(self, job: Job) -> str:
        state, spec = self._state, job.spec
        self._blocks = False
        if job.awaits:
            return job.reason
        if job.not_before > self._now:
            return f"backoff: {job.reason or 'refused'}"
        if len(self.chosen) == state.config.window_jobs:
            return f"outranked: {len(self.chosen)} jobs are ahead in this window"
        # Candidates of one tenant could all be placed: together they must stay within its quota.
        left = state.quota_left(spec.tenant, job) - self._planned.get(spec.tenant, 0)
        if left < state.inventory.most_milli(spec):
            return f"quota: tenant {spec.tenant} may hold {max(0.0, left) / WHOLE_GPU:g} more GPUs"
        self._blocks = True
        reason = self._chances.why_not(spec) or self._why_not_elsewhere(job)
        if reason and self._could_take_room(job):
            return ""
        if reason and job.reservation:
            return f"reserved: {len(job.reservation)} nodes are kept free for it and drain"
        if reason and self._victims and self._could_start_soon(job):
            return f"room is being made: {reason}"
        return reason

    def _why_not_elsewhere(self, job: Job) -> str:
        """A job that could start only where it is not to be placed must not take a place in the window."""
        avoid = avoided(self._state, job, self._now)
        if avoid and avoid not in self._chances_without:
            classes = self._state.inventory.classes_without({*self._state.reserved, *avoid})
            self._chances_without[avoid] = Chances(classes)
        if not avoid or not self._chances_without[avoid].why_not(job.spec):
            return ""
        return f"refused lately by {', '.join(avoid[:5])}: no other node has room now"

    def _could_take_room(self, job: Job) -> bool:
        """Whether it could start if all victims that it may take the place of had gone."""
        count = self._below(job)
        if not count:
            return False
        key = count, avoided(self._state, job, self._now)
        if key not in self._chances_after:
            self._chances_after[key] = Chances(classes_after(self._state, self._victims[:count], key[1]))
        return not self._chances_after[key].why_not(job.spec)

    def _could_start_soon(self, job: Job) -> bool:
        """Whether runs that are leaving already make room enough."""
        return self._chances_soon is not None and not self._chances_soon.why_not(job.spec)

    def level(self, job: Job) -> int:
        """At that of the lowest victim it may take nobody's place."""
        if not self._victims:
            return 0
        if not takes_whole_devices(job.spec) or self._could_start_soon(job):
            return self._victims[0].level
        return self._levels[job.spec.job_id]

    def _below(self, job: Job) -> int:
        """How many of the victims the job may take the place of; those are the first ones."""
        return bisect_left(self._victims, self.level(job), key=_level_of)

    def victims_of_chosen(self) -> tuple[Victim, ...]:
        """Those that some candidate may take the place of."""
        return self._victims[: max((self._below(job) for _, job in self.chosen), default=0)]

    def choose(self, score: float, job: Job) -> None:
        self.chosen.append((score, job))
        tenant = job.spec.tenant
        self._planned[tenant] = self._planned.get(tenant, 0) + self._state.inventory.most_milli(job.spec)


def _level_of(victim: Victim) -> int:
    return victim.level


def avoided(state: ClusterState, job: Job, now: float) -> tuple[str, ...]:
    """Nodes that refused the job lately, while others could take it. If none could, all are asked again."""
    if not job.refused_by or now - job.queued_at >= state.config.backoff_max_s:
        return ()
    return job.refused_by if state.inventory.holds_without(job.spec, job.refused_by) else ()


def _mix(state: ClusterState) -> tuple[tuple[Ask, int], ...]:
    if not state.index.sharing:
        return ()
    return tuple(nlargest(MIX_MAX, state.index.asked.items(), key=lambda item: (item[1], item[0])))


def _values(
    state: ClusterState, chosen: Sequence[Job], victims: Sequence[Victim], levels: Mapping[str, int]
) -> tuple[list[float], list[float]]:
    """What placing each is worth, in rank order, and what stopping each victim costs.

    Per GPU the first of the window is worth twice the last, so that filling the cluster comes first and the order
    decides between jobs that compete for the same GPUs. A victim counts as a job of its level would (`levels`, by job
    id), and more by what it loses. Any job of a higher priority class, waiting or running, is worth more than all of
    the lower classes together.
    """
    count = len(chosen)
    values = [
        max(1, state.inventory.most_milli(job.spec)) / WHOLE_GPU * (2.0 - place / count)
        for place, job in enumerate(chosen)
    ]
    better = [sum(levels[job.spec.job_id] > victim.level for job in chosen) for victim in victims]
    costs = [victim.cost * (2.0 - above / count) for victim, above in zip(victims, better, strict=True)]
    classes = [priority(state, job) for job in chosen]
    classes_of_victims = [priority(state, state.jobs[victim.job_id]) for victim in victims]
    below = 0.0
    for number in sorted({*classes, *classes_of_victims}):
        places = [place for place, own in enumerate(classes) if own == number]
        stops = [place for place, own in enumerate(classes_of_victims) if own == number]
        block = [*(values[place] for place in places), *(costs[place] for place in stops)]
        scale = max(1.0, (below + 1.0) / min(block)) if below else 1.0
        for place in places:
            values[place] *= scale
        for place in stops:
            costs[place] *= scale
        below += math.fsum(scale * worth for worth in block)
    return values, costs


def _candidate(
    state: ClusterState, job: Job, score: float, value: float, avoid_nodes: tuple[str, ...], level: int
) -> Candidate:
    spec = job.spec
    return Candidate(
        job_id=spec.job_id,
        attempt=job.attempt,
        chunks=spec.chunks(),
        value=value,
        score=score,
        gpu_milli=spec.gpu_milli,
        gpu_types=spec.gpu_types,
        one_type=wants_one_type(spec),
        speeds=_speeds(state, spec),
        gpu_memory_mib=spec.gpu_memory_mib,
        mig_profile=spec.mig_profile,
        cpu_milli=spec.cpu_milli,
        memory_mib=spec.memory_mib,
        topology=spec.topology,
        anti_affinity=spec.anti_affinity,
        avoid_nodes=avoid_nodes,
        level=level,
    )


def _speeds(state: ClusterState, spec: JobSpec) -> tuple[tuple[str, float], ...]:
    """As the job says; where it says nothing, as learned."""
    return tuple(sorted((spec.speeds or state.index.speeds.of(spec)).items()))
