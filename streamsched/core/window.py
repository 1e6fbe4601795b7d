"""From the queue to a window's problem: rank, leave out what cannot start now, cut to size.

A window is a pure question about the state; nothing here changes it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heapreplace, nlargest
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from .chances import Chances
from .inventory import Request, request_kind
from .model import BY_ARRIVAL, WHOLE_GPU, Job, JobSpec, JobState, Run, TopologyLevel, TopologyWish
from .preemption import (
    choose_victims,
    class_name,
    classes_after,
    classes_soon,
    full_classes,
    possible_victims,
    priority,
    takes_whole_devices,
    which_waited_too_long,
)
from .problem import Ask, Candidate, Problem, Victim
from .queue import Key, Line, LineKey, Ranker, is_static
from .room import wants_one_type
from .run_times import ran_s
from .shadow import shadow_of
from .words import some

if TYPE_CHECKING:
    from .cluster import ClusterState

__all__ = ["MIX_MAX", "Ranked", "Ranker", "Ranking", "Window", "build", "rank"]

_PROTECTED: Final = {"easy": 1, "conservative": 1_000_000_000}
"""By `SchedulerConfig.backfill`: for how many jobs without room nodes are kept free. Each has nodes of its own, so that
there are never more of them than nodes."""
_NO_SEATS: Final = "outranked: those before it that ask for the same take all the room there is"
_BY_RANK: Final = 0.5
"""What all stops together cost where the ranking decides: less than placing any job is worth."""
MIX_MAX = 32
"""Kinds of workers that a problem tells of: rarer ones hardly count."""


class Ranked(Struct, frozen=True):
    """A waiting job in the order of the last window. `reason` is empty for candidates; the solution tells theirs."""

    job_id: str
    score: float
    reason: str


Order = Iterable[tuple[Key, Job, LineKey | None]]
"""Waiting jobs, best first, each with its line (`core/queue.py`), None where it is looked at by itself."""


class Window:
    """What a window asks, and why the others are not in it."""

    def __init__(self, problem: Problem, chooser: _Chooser, order: Callable[[], Order]) -> None:
        self.problem = problem
        self.complete = chooser.asks_for_all
        """Whether all jobs that could start alone were asked for: when as many of them start as fit one after the
        other, no further window at this moment starts any."""
        self._chooser, self._order = chooser, order

    @property
    def ranking(self) -> Iterator[Ranked]:
        """The jobs that wait, in the order of this window. Made as it is read, of those that wait then; those that
        came since are left out."""
        for key, job, name in self._order():
            yield Ranked(job.spec.job_id, -key.score, self._chooser.told(key, job, name))


class Ranking:
    """Jobs in rank order, best first. Sorted as columns, and keys are made as they are read: in a queue of ten thousand
    few are looked at."""

    def __init__(self, jobs: Sequence[Job], priorities: Sequence[int] | None, scores: Sequence[float]) -> None:
        """`priorities`, `scores`: [job], more is better; ties go by order of arrival. None: all are 0."""
        self._jobs = jobs
        self._score = -np.asarray(scores, np.float64)
        arrivals = np.array(list(map(BY_ARRIVAL, jobs)), np.int64)
        if priorities is None:
            self._priority = np.zeros(len(jobs), np.int64)
            self._order = np.lexsort((arrivals, self._score))
        else:
            self._priority = -np.asarray(priorities, np.int64)
            self._order = np.lexsort((arrivals, self._score, self._priority))

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[tuple[int, Job]]:
        """With what `key` knows them by."""
        return ((place, self._jobs[place]) for place in self._order.tolist())

    def key(self, place: int) -> Key:
        return Key(int(self._priority[place]), float(self._score[place]), self._jobs[place].seq)

    def levels(self) -> dict[str, int]:
        """By job id, 0 for the last in rank. Those that are equal but for their arrival have one level, so that they do
        not take each other's place."""
        priority, score = self._priority[self._order], self._score[self._order]
        steps = (np.diff(priority) != 0) | (np.diff(score) != 0)
        behind = np.concatenate([[0], np.cumsum(steps)]).tolist() if len(self) else []
        return {
            self._jobs[place].spec.job_id: behind[-1] - before
            for place, before in zip(self._order.tolist(), behind, strict=True)
        }


def rank(state: ClusterState, ranker: Ranker, now: float, running: Sequence[Job] = ()) -> Ranking:
    """All queued jobs and these."""
    jobs = [*state.queued_jobs(), *running]
    classes = state.config.priority_classes
    scores = ranker.scores(jobs, state, now)
    if state.config.preempts_within_class:
        scores = _overdue_first(state, jobs, scores)
    priorities = [classes.get(class_name(job), 0) for job in jobs] if classes else None
    if priorities is not None and not any(priorities):
        priorities = None
    return Ranking(jobs, priorities, scores)


def _overdue_first(state: ClusterState, jobs: Sequence[Job], scores: Sequence[float]) -> Sequence[float]:
    """Those that have waited too long are above all others, and equal: the first to arrive goes first."""
    late = which_waited_too_long(state, jobs)
    if True not in late:
        return scores
    above = math.nextafter(max(scores), math.inf)
    return [above if overdue else score for overdue, score in zip(late, scores, strict=True)]


def build(state: ClusterState, ranker: Ranker, number: int, now: float) -> Window:
    """The window's problem: the first `config.window_jobs` ranked jobs that could start now if they were alone.

    Alone means: also without the runs that they may take the place of. Of jobs that ask for the same no more are taken
    than there is room for: another of them could only take the place of a better one.
    """
    state.queue.refresh(state, ranker, now)
    # With nodes kept by estimates nobody is stopped: who waits for victims would neither start nor be protected.
    may_stop = state.config.preempt != "off" and state.config.backfill not in _PROTECTED
    runs = possible_victims(state, now) if may_stop and _somebody_has_no_room(state) else []
    if not runs and is_static(ranker):
        chooser = _Chooser(state, ranker, now, {}, ())
        _look_at_lines(state, chooser)
        order: Callable[[], Order] = state.queue.in_order
        levels: dict[str, int] = {}
        victims: tuple[Victim, ...] = ()
    else:
        ranked, levels, victims = _order(state, ranker, now, runs)
        chooser = _Chooser(state, ranker, now, levels, victims)
        lines = {} if victims else state.queue.lines_now()
        if not victims:
            for name, line in state.queue.lines.items():
                chooser.may_open(name, line)
        _look_at_each(ranked, lines, chooser)
        order = partial(_still_waiting, state, ranked, lines)
    chosen = chooser.chosen
    victims = chooser.victims_of_chosen()
    values, costs = _values(state, [job for _, job in chosen], victims, levels)
    problem = Problem(
        pool=state.pool,
        window=number,
        now=now,
        policy=ranker.name,
        candidates=tuple(
            replace(
                _candidate(state, job, score, value, chooser.avoid(job), chooser.level(job)),
                topology=chooser.close.get(job.spec.job_id, job.spec.topology),
            )
            for (score, job), value in zip(chosen, values, strict=True)
        ),
        classes=chooser.classes + full_classes(state, victims) if chosen else (),
        victims=tuple(replace(victim, cost=cost) for victim, cost in zip(victims, costs, strict=True)),
        mix=_mix(state) if chosen else (),
        in_order=chooser.in_order,
        by_rank=state.config.preempt == "rank",
    )
    return Window(problem, chooser, order)


def _somebody_has_no_room(state: ClusterState) -> bool:
    """Else all that wait can start side by side, as far as counts tell, and nobody has to make room."""
    if state.queue.apart:
        return True
    chances, asked = state.chances(), 0
    for line in state.queue.lines.values():
        waiting = len(line.jobs)
        if not chances.fits(line.kind, line.spec) or (waiting > 1 and waiting > chances.seats(line.spec)):
            return True
        asked += waiting * state.inventory.most_milli(line.spec)
    return asked > WHOLE_GPU * sum(c.free_gpus * len(c.node_ids) for c in chances.classes)


def _look_at_lines(state: ClusterState, chooser: _Chooser) -> None:
    """In rank order, but for jobs of a line of which no more can be candidates."""
    queue = state.queue
    heads: list[tuple[Key, Iterator[tuple[Key, Job]], LineKey | None]] = []
    for job in queue.apart.values():
        key = queue.keys[job.spec.job_id]
        heads.append((key, iter(((key, job),)), None))
    for line_name, line in queue.lines.items():
        if chooser.may_open(line_name, line):
            heads.append((line.jobs.keys()[0], iter(line.jobs.items()), line_name))
    heapify(heads)
    while heads and not chooser.full:
        _, rest, name = heads[0]
        key, job = next(rest)
        following = next(rest, None) if chooser.look(key, job, name) else None
        if following is None:
            heappop(heads)
        else:
            heapreplace(heads, (following[0], chain((following,), rest), name))


def _look_at_each(ranked: Ranking, lines: Mapping[str, LineKey], chooser: _Chooser) -> None:
    for place, job in ranked:
        name = lines.get(job.spec.job_id)
        if job.state is not JobState.QUEUED or (name is not None and name in chooser.closed):
            continue
        if chooser.full:
            return
        chooser.look(ranked.key(place), job, name)


def _still_waiting(state: ClusterState, ranked: Ranking, lines: Mapping[str, LineKey]) -> Order:
    for place, job in ranked:
        if job.state is JobState.QUEUED and job.spec.job_id in state.index.queued:
            yield ranked.key(place), job, lines.get(job.spec.job_id)


def _order(
    state: ClusterState, ranker: Ranker, now: float, runs: Sequence[Run]
) -> tuple[Ranking, dict[str, int], tuple[Victim, ...]]:
    """All that are ranked, in order; levels by job id and the victims in ascending order of level, both empty without
    victims."""
    if not runs:
        return rank(state, ranker, now), {}, ()
    queued = state.queued_jobs()
    running = [state.jobs[run.job_id] for run in runs]
    if state.config.preempts_within_class:
        order = rank(state, ranker, now, running)
        levels = order.levels()
    else:
        order = rank(state, ranker, now)
        levels = {job.spec.job_id: priority(state, job) for job in [*queued, *running]}
    return order, levels, choose_victims(state, runs, queued, levels, now)


class _Chooser:
    """Takes candidates in rank order until the window is full."""

    def __init__(
        self,
        state: ClusterState,
        ranker: Ranker,
        now: float,
        levels: Mapping[str, int],
        victims: tuple[Victim, ...],
    ) -> None:
        self._state = state
        self._ranker = ranker
        self._now = now
        self._levels = levels
        self._victims = victims
        """In ascending order of level."""
        self._chances = state.chances()
        self.classes = self._chances.classes
        self._chances_without: dict[tuple[str, ...], Chances] = {}
        self._chances_after: dict[tuple[int, tuple[str, ...]], Chances] = {}
        """By the number of victims that have gone and the nodes to avoid."""
        soon = classes_soon(state, now) if victims else ()
        self._chances_soon = Chances(soon) if soon else None
        self._planned: dict[str, int] = {}
        self._blocks = False
        """Whether the job looked at last is held up by room alone."""
        self._delays = False
        """Whether it would start on nodes that are kept free for others."""
        self._first_blocked: tuple[Key, str] | None = None
        """Nobody after this job is a candidate: in strict order, and where what may start after it depends on what
        does before it."""
        self._strict = state.config.backfill == "none"
        self._to_protect = _PROTECTED.get(state.config.backfill, 0)
        """Jobs without room that others may not delay, beyond those that are protected by now."""
        self._kept: dict[str, tuple[float, str]] = {}
        """Node -> when a job without room starts there at the latest, and which."""
        self._left: dict[str, float | None] = {}
        """Remaining run times, s, once somebody has asked."""
        self._hopeless: set[tuple[Request, tuple[str, ...]]] = set()
        """What no time is known for."""
        self._seats: dict[LineKey, int] = {}
        """How many more of a line there is room for."""
        self.closed: dict[LineKey, str] = {}
        """Lines of which no more can be candidates, and why; empty where there is no room for one of them alone."""
        self._reasons: dict[str, str] = {}
        """Of jobs looked at by themselves."""
        self._taken: set[str] = set()
        self.short_of_quota = False
        self.chosen: list[tuple[float, Job]] = []
        self.close: dict[str, TopologyWish] = {}
        """Candidates that are to wait for a placement as close as this."""

    @property
    def full(self) -> bool:
        """No further job can be a candidate."""
        return len(self.chosen) == self._state.config.window_jobs or self._first_blocked is not None

    def may_open(self, name: LineKey, line: Line) -> bool:
        """Whether any job of the line may be a candidate; otherwise it need not be looked at, but where the first that
        may not holds up others."""
        if self._strict or self._to_protect:
            return True
        if self._chances.fits(line.kind, line.spec):
            return True
        self.closed[name] = ""
        return False

    def look(self, key: Key, job: Job, name: LineKey | None) -> bool:
        """Take the job if it can be a candidate; False when none that comes after it in its line need be looked at."""
        reason = self._why_not(job)
        if not reason and name is not None and self._seats.get(name) == 0:
            reason = _NO_SEATS
        if not reason:
            self._choose(-key.score, job)
            # Who waits for a close placement may leave its seat to the next of its line.
            return name is None or job.spec.job_id in self.close or self._one_seat_less(name, job.spec)
        if self._blocks and (self._strict or (self._to_protect and self.chosen)):
            self._first_blocked = key, job.spec.job_id
            self._reasons[job.spec.job_id] = reason
            return False
        if self._blocks and self._to_protect:
            reason = self._protect(job, reason)
            self._reasons[job.spec.job_id] = reason
            return True
        if name is None or self._delays or job.awaits or job.not_before > self._now:
            self._reasons[job.spec.job_id] = reason
            return True
        self.closed[name] = reason
        return False

    def _one_seat_less(self, name: LineKey, spec: JobSpec) -> bool:
        left = self._seats.get(name)
        self._seats[name] = left = (self._chances.seats(spec) if left is None else left) - 1
        if left or self._strict or self._to_protect:
            return True
        self.closed[name] = _NO_SEATS
        return False

    def _protect(self, job: Job, reason: str) -> str:
        """Keep the nodes free where the job can start first; nothing is stored, each window chooses anew."""
        if job.reservation:
            self._to_protect -= 1
            return reason
        refused_by = avoided(self._state, job, self._now)
        kind = request_kind(job.spec), refused_by
        hopeless = kind in self._hopeless
        shadow = None if hopeless else shadow_of(self._state, job, {*self._kept, *refused_by}, self._now)
        if shadow is None:
            self._hopeless.add(kind)  # ever fewer nodes are left
            self._to_protect -= self._state.config.backfill == "easy"
            return f"{reason}; no time is known at which it could start"
        self._to_protect -= 1
        self._kept.update(dict.fromkeys(shadow.nodes, (shadow.time, job.spec.job_id)))
        in_s = max(0.0, shadow.time - self._now)
        return f"{reason}; starts in {in_s:.0f} s on {some(shadow.nodes)} if runs end as said"

    @property
    def asks_for_all(self) -> bool:
        """Whether it takes every job that could start alone."""
        return self._state.config.backfill == "skip" and not self.full and not self.short_of_quota

    @property
    def in_order(self) -> bool:
        """Whether no candidate may start before another that ranks before it."""
        return self._strict or self._to_protect > 0

    def avoid(self, job: Job) -> tuple[str, ...]:
        """Nodes that refused it lately, and those that it would hold when others are to start there."""
        avoid = avoided(self._state, job, self._now)
        if not self._kept:
            return avoid
        left_s = self._left_s(job)
        end = math.inf if left_s is None else self._now + left_s
        return tuple(sorted({*avoid, *(node_id for node_id, (time, _) in self._kept.items() if end > time)}))

    def _left_s(self, job: Job) -> float | None:
        """Asked for all that wait at once: one by one it would take a predictor seconds."""
        if not self._left:
            waiting = self._state.queued_jobs()
            ran = [ran_s(each, self._state, self._now) for each in waiting]
            told = self._state.run_times.remaining_s(waiting, ran)
            self._left = {each.spec.job_id: left for each, left in zip(waiting, told, strict=True)}
        return self._left[job.spec.job_id]

    def told(self, key: Key, job: Job, name: LineKey | None) -> str:
        """Why a job that waited then is no candidate; empty for candidates."""
        job_id = job.spec.job_id
        if job_id in self._taken:
            return ""
        if job_id in self._reasons:
            return self._reasons[job_id]
        if self._first_blocked is not None and key > self._first_blocked[0]:
            return f"behind: job {self._first_blocked[1]} is before it and has no room now"
        if job.not_before > self._now:
            return f"backoff: {job.reason or 'refused'}"
        reason = None if name is None else self.closed.get(name)
        if reason == "":
            return self._chances.why_not(job.spec)
        return reason or f"outranked: {len(self.chosen)} jobs are ahead in this window"

    def _why_not(self, job: Job) -> str:
        """Empty when the job can be a candidate."""
        state, spec = self._state, job.spec
        self._blocks = self._delays = False
        if job.awaits:
            return job.reason
        if job.not_before > self._now:
            return f"backoff: {job.reason or 'refused'}"
        # Candidates of one tenant could all be placed: together they must stay within its quota.
        left = state.quota_left(spec.tenant, job) - self._planned.get(spec.tenant, 0)
        if left < state.inventory.most_milli(spec):
            self.short_of_quota = True
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
        avoid = self.avoid(job)
        if not avoid or not self._without(avoid).why_not(job.spec):
            return ""
        refused_by = avoided(self._state, job, self._now)
        self._delays = len(avoid) > len(refused_by)
        if not self._delays:
            return f"refused lately by {some(avoid)}: no other node has room now"
        before = sorted({job_id for _, job_id in self._kept.values()})
        return f"behind: it would delay {some(before)}, for which nodes are kept free"

    def _without(self, avoid: tuple[str, ...]) -> Chances:
        if avoid not in self._chances_without:
            classes = self._state.inventory.classes_without({*self._state.reserved, *avoid})
            self._chances_without[avoid] = Chances(classes)
        return self._chances_without[avoid]

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
        waits = job.spec.job_id in self.close  # and may start scattered in the end: nobody is stopped for that
        if not takes_whole_devices(job.spec) or self._could_start_soon(job) or waits:
            return self._victims[0].level
        return self._levels[job.spec.job_id]

    def _below(self, job: Job) -> int:
        """How many of the victims the job may take the place of; those are the first ones."""
        return bisect_left(self._victims, self.level(job), key=_level_of)

    def victims_of_chosen(self) -> tuple[Victim, ...]:
        """Those that some candidate may take the place of."""
        return self._victims[: max((self._below(job) for _, job in self.chosen), default=0)]

    def _choose(self, score: float, job: Job) -> None:
        self.chosen.append((score, job))
        self._taken.add(job.spec.job_id)
        close = _close(self._state, self._ranker, job, self._now)
        if close is not None:
            self.close[job.spec.job_id] = close
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
    classes = [priority(state, job) for job in chosen]
    if not victims and len(set(classes)) <= 1:
        return values, []
    if state.config.preempt == "rank":
        return values, _costs_by_rank(victims)
    better = [sum(levels[job.spec.job_id] > victim.level for job in chosen) for victim in victims]
    costs = [victim.cost * (2.0 - above / count) for victim, above in zip(victims, better, strict=True)]
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


def _costs_by_rank(victims: Sequence[Victim]) -> list[float]:
    """Each costs more than all that rank below it together: the last in rank is stopped first, as preemptive policies
    are published; of equals the one that loses least."""
    order = sorted(range(len(victims)), key=lambda place: (victims[place].level, victims[place].cost))
    costs = [0.0] * len(victims)
    for below, place in enumerate(order):
        costs[place] = max(_BY_RANK * 2.0 ** (below - len(order)), 1e-300)
    return costs


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
        anti_affinity=spec.anti_affinity,
        avoid_nodes=avoid_nodes,
        level=level,
    )


def _close(state: ClusterState, ranker: Ranker, job: Job, now: float) -> TopologyWish | None:
    """What the rule has a gang wait for, None where it may start anywhere: its own wish becomes a condition, unless no
    set of nodes could ever keep it. A gang without a wish is close on one node."""
    spec = job.spec
    wants = getattr(ranker, "wants_consolidation", None)
    close = spec.topology or (TopologyWish(level=TopologyLevel.NODE) if spec.workers > 1 else None)
    if wants is None or close is None or close.required or not wants(job, state, now):
        return None
    demanded = replace(close, required=True)
    return None if state.inventory.never_fits(replace(spec, topology=demanded)) else demanded


def _speeds(state: ClusterState, spec: JobSpec) -> tuple[tuple[str, float], ...]:
    """As the job says; where it says nothing, as learned."""
    return tuple(sorted((spec.speeds or state.index.speeds.of(spec)).items()))
