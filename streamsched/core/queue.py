"""The waiting jobs in rank order, kept so from event to event for rules whose scores never change.

Jobs that ask for the same are one *line*: what is short for one of them is short for all, and where there is room for
three of them no more than the first three can start. So a window asks once per line and looks at no more jobs than
could start, however many wait. (With `backfill` `easy` and `conservative` it depends on each job's estimate who may:
there it looks at all that fit.)

Jobs that something of their own holds up (nodes that refused them, a reservation, runs that make room for them) are
apart, and looked at one by one; those that back off are left alone until their time comes.

Nothing here is stored: it follows from the jobs, the configuration and the rule.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sortedcontainers import SortedDict

from .inventory import Request, request_kind
from .model import Job, JobSpec, JobState
from .preemption import priority
from .speeds import FAMILY

if TYPE_CHECKING:
    from .cluster import ClusterState


class Ranker(Protocol):
    """A priority rule. `scores` returns one finite number per job, higher first; ties go by order of arrival.

    Where runs may be preempted for jobs with better scores, it is asked for their jobs beside the waiting ones.

    An attribute `static` of True says that the score of a job follows from its specification, its place of arrival and
    what was believed of its run time at first: then each job is asked for once, and the queue is not sorted anew for
    each window.

    A method `wants_consolidation(job, state, now)` says of a waiting job that it had better wait for a close placement
    than start on scattered nodes now.
    """

    @property
    def name(self) -> str: ...

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> Sequence[float]: ...


def is_static(ranker: Ranker) -> bool:
    return bool(getattr(ranker, "static", False))


class Key(NamedTuple):
    """Lower is better: by priority class, then score, then order of arrival."""

    priority: int
    score: float
    seq: int
    """The first two are negated."""


LineKey = tuple[object, ...]


def line_key(state: ClusterState, spec: JobSpec) -> LineKey:
    """Equal for jobs between which no window and no solver can tell a difference but their rank and, with a quota, for
    jobs of one tenant."""
    policy = state.config.tenants.get(spec.tenant)
    return (
        request_kind(spec),
        spec.topology,
        tuple(sorted(spec.speeds.items())) if spec.speeds else (),
        spec.labels.get(FAMILY, ""),
        spec.tenant if policy is not None and policy.quota_gpus is not None else None,
    )


class Line:
    """Jobs that ask for the same, best first."""

    __slots__ = ("jobs", "kind", "spec")

    def __init__(self, spec: JobSpec, kind: Request) -> None:
        self.spec, self.kind = spec, kind
        """Of one of them: what they ask for."""
        self.jobs: SortedDict[Key, Job] = SortedDict()


class Queue:
    """`file` after each change of a job, `forget` when it is gone; `refresh` before it is looked at."""

    def __init__(self) -> None:
        self.lines: dict[LineKey, Line] = {}
        self.apart: dict[str, Job] = {}
        self.backing_off: dict[str, Job] = {}
        self.keys: dict[str, Key] = {}
        """Of all jobs that have been ranked."""
        self._lines_of: dict[str, LineKey] = {}
        self._new: dict[str, Job] = {}
        self._ends: list[tuple[float, str]] = []
        """Of backoffs, a heap; entries may be out of date."""
        self._made_for: tuple[object, ...] = ()

    def file(self, job: Job) -> None:
        job_id = job.spec.job_id
        if job.state is JobState.QUEUED:
            line = self._lines_of.get(job_id)
            if line is not None and _is_plain(job):
                key = self.keys[job_id]
                filed = self.lines[line].jobs
                before = filed[key]
                if before.priority_class == job.priority_class and before.not_before == job.not_before:
                    filed[key] = job
                    return
            self._take_out(job_id)
            self._new[job_id] = job
        else:
            self._take_out(job_id)

    def _take_out(self, job_id: str) -> None:
        self._new.pop(job_id, None)
        key = self.keys.pop(job_id, None)
        if key is None:
            return
        line = self._lines_of.pop(job_id, None)
        if line is not None:
            jobs = self.lines[line].jobs
            del jobs[key]
            if not jobs:
                del self.lines[line]
        else:
            self.apart.pop(job_id, None)
            self.backing_off.pop(job_id, None)

    def refresh(self, state: ClusterState, ranker: Ranker, now: float) -> None:
        """Rank what came since; everything, where another rule, configuration or source of run times is in force.

        With a rule that is not static the jobs of a line are in order of arrival.
        """
        made_for = (ranker, state.config, state.run_times)
        if not self._made_for or any(one is not other for one, other in zip(self._made_for, made_for, strict=True)):
            self._made_for = made_for
            self._start_again(state)
        while self._ends and self._ends[0][0] <= now:
            _, job_id = heapq.heappop(self._ends)
            job = self.backing_off.pop(job_id, None)
            if job is not None:
                del self.keys[job_id]
                self._new[job_id] = job
        if self._new:
            new = list(self._new.values())
            scores = ranker.scores(new, state, now) if is_static(ranker) else [0.0] * len(new)
            for job, score in zip(new, scores, strict=True):
                self._put(state, job, Key(-priority(state, job), -score, job.seq), now)
            self._new = {}

    def _start_again(self, state: ClusterState) -> None:
        for kept in (self.lines, self.apart, self.backing_off, self.keys, self._lines_of):
            kept.clear()
        self._ends.clear()
        self._new = {job_id: state.jobs[job_id] for job_id in state.index.queued}

    def _put(self, state: ClusterState, job: Job, key: Key, now: float) -> None:
        job_id = job.spec.job_id
        self.keys[job_id] = key
        if job.not_before > now:
            self.backing_off[job_id] = job
            heapq.heappush(self._ends, (job.not_before, job_id))
        elif not _is_plain(job):
            self.apart[job_id] = job
        else:
            name = line_key(state, job.spec)
            line = self.lines.get(name)
            if line is None:
                line = self.lines[name] = Line(job.spec, request_kind(job.spec))
            line.jobs[key] = job
            self._lines_of[job_id] = name

    def lines_now(self) -> dict[str, LineKey]:
        """The line of each job that is in one, as it is now."""
        return dict(self._lines_of)

    def in_order(self) -> Iterator[tuple[Key, Job, LineKey | None]]:
        """All that have been ranked, best first, lazily; with the line that a job is in."""
        own = sorted((self.keys[job_id], job) for job_id, job in [*self.apart.items(), *self.backing_off.items()])
        by_line = (
            zip(line.jobs.keys(), line.jobs.values(), _forever(name), strict=False) for name, line in self.lines.items()
        )
        yield from heapq.merge(((key, job, None) for key, job in own), *by_line, key=_first)


def _forever(name: LineKey) -> Iterator[LineKey]:
    while True:
        yield name


def _first(item: tuple[Key, Job, LineKey | None]) -> Key:
    return item[0]


def _is_plain(job: Job) -> bool:
    return not (job.refused_by or job.reservation or job.awaits)
