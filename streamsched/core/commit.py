"""Whether an assignment of a solution still holds: the last look before devices are given away.

Between the question and the answer a node may have died, a job may have been cancelled, another solution committed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .model import Job, JobState
from .on_nodes import why_not_on_nodes
from .problem import Assignment

if TYPE_CHECKING:
    from .cluster import ClusterState


def why_not_placeable(state: ClusterState, assignment: Assignment) -> str | None:
    """None when the assignment can be carried out as it stands; else why not. Looks only at the present state."""
    job = state.jobs.get(assignment.job_id)
    if job is None or job.state is not JobState.QUEUED:
        return f"job {assignment.job_id} is {job.state if job else 'not known'}"
    if job.attempt != assignment.attempt:
        return f"job {assignment.job_id}: solved for attempt {assignment.attempt}, it is at {job.attempt}"
    if job.not_before > state.now:
        return f"job {assignment.job_id} backs off"
    if not _is_the_gang(job, assignment):
        return f"job {assignment.job_id}: the assignment is not its gang"
    if state.quota_left(job.spec.tenant, job) < state.inventory.most_milli(job.spec):
        return f"job {assignment.job_id}: tenant {job.spec.tenant} is at its quota"
    return why_not_on_nodes(state, job, assignment)


def _is_the_gang(job: Job, assignment: Assignment) -> bool:
    wanted: Counter[int] = Counter()
    for gpus, workers in job.spec.chunks():
        wanted[gpus] += workers
    return Counter(gpus for _, gpus in assignment.workers) == wanted
