"""From the queue to a window's problem: rank, leave out what cannot start now, cut to size.

A window is a pure question about the state; nothing here changes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from .chances import Chances
from .model import WHOLE_GPU, Job
from .problem import Candidate, Problem
from .room import wants_one_type

if TYPE_CHECKING:
    from .cluster import ClusterState


class Ranker(Protocol):
    """A priority rule. `scores` returns one finite number per job, higher first; ties go by order of arrival."""

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


def rank(state: ClusterState, ranker: Ranker, now: float) -> list[tuple[float, Job]]:
    """All queued jobs, best first: by priority class, then score, then order of arrival."""
    jobs = state.queued_jobs()
    scores = ranker.scores(jobs, state, now)
    return sorted(zip(scores, jobs, strict=True), key=lambda item: (-priority(state, item[1]), -item[0], item[1].seq))


def build(state: ClusterState, ranker: Ranker, number: int, now: float) -> Window:
    """The window's problem: the first `config.window_jobs` ranked jobs that could start now if they were alone."""
    chooser = _Chooser(state, now)
    ranking: list[Ranked] = []
    for score, job in rank(state, ranker, now):
        reason = chooser.why_not(job)
        if not reason:
            chooser.choose(score, job)
        ranking.append(Ranked(job.spec.job_id, score, reason))
    chosen = chooser.chosen
    problem = Problem(
        pool=state.pool,
        window=number,
        now=now,
        policy=ranker.name,
        candidates=tuple(
            _candidate(job, score, value, avoided(state, job, now))
            for (score, job), value in zip(chosen, _values(state, chosen), strict=True)
        ),
        classes=chooser.classes if chosen else (),
    )
    return Window(problem, tuple(ranking))


class _Chooser:
    """Takes candidates in rank order until the window is full."""

    def __init__(self, state: ClusterState, now: float) -> None:
        self._state = state
        self._now = now
        self.classes = state.inventory.classes_without(state.reserved)
        self._chances = Chances(self.classes)
        self._chances_without: dict[tuple[str, ...], Chances] = {}
        self._planned: dict[str, int] = {}
        self.chosen: list[tuple[float, Job]] = []

    def why_not(self, job: Job) -> str:
        """Empty when the job can be a candidate."""
        state, spec = self._state, job.spec
        if job.not_before > self._now:
            return f"backoff: {job.reason or 'refused'}"
        if len(self.chosen) == state.config.window_jobs:
            return f"outranked: {len(self.chosen)} jobs are ahead in this window"
        # Candidates of one tenant could all be placed: together they must stay within its quota.
        left = state.quota_left(spec.tenant, job) - self._planned.get(spec.tenant, 0)
        if left < state.inventory.most_milli(spec):
            return f"quota: tenant {spec.tenant} may hold {max(0.0, left) / WHOLE_GPU:g} more GPUs"
        reason = self._chances.why_not(spec) or self._why_not_elsewhere(job)
        if reason and job.reservation:
            return f"reserved: {len(job.reservation)} nodes are kept free for it and drain"
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

    def choose(self, score: float, job: Job) -> None:
        self.chosen.append((score, job))
        tenant = job.spec.tenant
        self._planned[tenant] = self._planned.get(tenant, 0) + self._state.inventory.most_milli(job.spec)


def priority(state: ClusterState, job: Job) -> int:
    """Number of the job's priority class; a name that is not configured counts as 0."""
    return state.config.priority_classes.get(job.priority_class or job.spec.priority_class, 0)


def avoided(state: ClusterState, job: Job, now: float) -> tuple[str, ...]:
    """Nodes that refused the job lately, while others could take it. If none could, all are asked again."""
    if not job.refused_by or now - job.queued_at >= state.config.backoff_max_s:
        return ()
    return job.refused_by if state.inventory.holds_without(job.spec, job.refused_by) else ()


def _values(state: ClusterState, chosen: Sequence[tuple[float, Job]]) -> list[float]:
    """What placing each is worth, in rank order.

    Per GPU the first of the window is worth twice the last, so that filling the cluster comes first and the order
    decides between jobs that compete for the same GPUs. Any job of a higher priority class is worth more than all of
    the lower classes together.
    """
    count = len(chosen)
    values = [
        max(1, job.spec.total_gpu_milli) / WHOLE_GPU * (2.0 - place / count) for place, (_, job) in enumerate(chosen)
    ]
    below = 0.0
    for _, places in groupby(reversed(range(count)), key=lambda place: priority(state, chosen[place][1])):
        block = list(places)
        scale = max(1.0, (below + 1.0) / min(values[place] for place in block)) if below else 1.0
        for place in block:
            values[place] *= scale
        below += math.fsum(values[place] for place in block)
    return values


def _candidate(
    job: Job, score: float, value: float, avoid_nodes: tuple[str, ...], learned: Mapping[str, float] | None = None
) -> Candidate:
    """`learned`: GPU type -> speed, for the types of which the job itself does not say it."""
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
        speeds=tuple(sorted({**(learned or {}), **spec.speeds}.items())),
        gpu_memory_mib=spec.gpu_memory_mib,
        mig_profile=spec.mig_profile,
        cpu_milli=spec.cpu_milli,
        memory_mib=spec.memory_mib,
        topology=spec.topology,
        anti_affinity=spec.anti_affinity,
        avoid_nodes=avoid_nodes,
    )
