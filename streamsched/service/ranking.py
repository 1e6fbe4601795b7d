"""The message of queue.rankings: every job that waits, with why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType

from streamsched.bus import codec
from streamsched.bus.messages import QueueRanking, RankedJob
from streamsched.core.cluster import ClusterState
from streamsched.core.model import Job, JobState


def queue_ranking(
    state: ClusterState,
    seq: int,
    now: float,
    unplaced: Mapping[str, str],
    limit: int,
    shadow: Mapping[str, float] = MappingProxyType({}),
) -> QueueRanking:
    """The queue in the order of the last window, then the jobs that no window asks for (held, can never fit).

    `unplaced`: what the last solution says of its candidates. `shadow`: scores of a model that is only compared. Of
    more than `limit` jobs the first are listed; half of the room is kept for those set aside, since a long queue is
    where a job that can never start is overlooked.
    """
    aside = state.set_aside()
    room = limit - min(len(aside), limit // 2)
    waiting = list(islice(_in_order(state, unplaced), room))
    waiting += [(job, 0.0, job.reason or job.state.value) for job in aside[: limit - len(waiting)]]
    believed = state.run_times.whole_s([job for job, _, _ in waiting])
    queued = state.waiting() + len(aside)
    return QueueRanking(
        pool=state.pool,
        time=now,
        epoch=state.epoch,
        seq=seq,
        policy=state.window.problem.policy if state.window is not None else state.config.policy,
        queued=queued,
        truncated=queued > len(waiting),
        jobs=tuple(
            RankedJob(
                job_id=job.spec.job_id,
                rank=rank,
                score=score,
                state=job.state.value,
                reason=reason,
                waited_s=max(0.0, now - job.queued_at),
                run_s=run_s,
                shadow_score=shadow.get(job.spec.job_id),
            )
            for rank, ((job, score, reason), run_s) in enumerate(zip(waiting, believed, strict=True), start=1)
        ),
    )


def bounded(make: Callable[[int], QueueRanking], limit: int, bytes_max: int) -> tuple[QueueRanking, bytes]:
    """What `make(limit)` gives and its encoding, with fewer jobs where that is longer than `bytes_max`.

    Ids and reasons are as long as their writers like, so a number of jobs alone bounds nothing.
    """
    while True:
        ranking = make(limit)
        encoded = codec.encode(ranking)
        if len(encoded) <= bytes_max or limit == 0:
            return ranking, encoded
        limit = min(len(ranking.jobs), limit) * bytes_max // len(encoded) * 9 // 10


def _in_order(state: ClusterState, unplaced: Mapping[str, str]) -> Iterator[tuple[Job, float, str]]:
    """Queued jobs as last ranked; those that came since follow, in order of arrival."""
    ranked = {}
    for entry in state.window.ranking if state.window is not None else ():
        job = state.jobs.get(entry.job_id)
        if job is not None and job.state is JobState.QUEUED:
            ranked[entry.job_id] = True
            yield job, entry.score, entry.reason or unplaced.get(entry.job_id, "outranked in this window")
    if len(ranked) < state.waiting():
        for job in state.queued_jobs():
            if job.spec.job_id not in ranked:
                yield job, 0.0, job.reason or "arrived after the last window"
