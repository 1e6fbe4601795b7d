"""Whether an assignment of a solution still holds: the last look before devices are given away.

Between the question and the answer a node may have died, a job may have been cancelled, another solution committed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .model import Job, JobState
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
    if state.quota_left(job.spec.tenant, job) < job.spec.total_gpu_milli:
        return f"job {assignment.job_id}: tenant {job.spec.tenant} is at its quota"
    return _why_not_on_nodes(state, job, assignment)


def _is_the_gang(job: Job, assignment: Assignment) -> bool:
    wanted: Counter[int] = Counter()
    for gpus, workers in job.spec.chunks():
        wanted[gpus] += workers
    return Counter(gpus for _, gpus in assignment.workers) == wanted


def _why_not_on_nodes(state: ClusterState, job: Job, assignment: Assignment) -> str | None:
    spec = job.spec
    gpus_on: Counter[str] = Counter()
    for node_id, gpus in assignment.workers:
        gpus_on[node_id] += gpus
    workers_on = Counter(node_id for node_id, _ in assignment.workers)
    for node_id, gpus in gpus_on.items():
        node = state.inventory.nodes.get(node_id)
        if node is None or not node.usable:
            return f"node {node_id} cannot be used now"
        if state.reserved.get(node_id, assignment.job_id) != assignment.job_id:
            return f"node {node_id} is kept free for job {state.reserved[node_id]}"
        if spec.gpu_types and node.spec.gpu_type not in spec.gpu_types:
            return f"node {node_id} has {node.spec.gpu_type}, job {assignment.job_id} wants {spec.gpu_types}"
        workers = workers_on[node_id]
        if not node.fits(gpus, spec.gpu_milli, spec.cpu_milli * workers, spec.memory_mib * workers):
            return f"node {node_id} has no room for {gpus} GPUs of job {assignment.job_id}"
    return None
