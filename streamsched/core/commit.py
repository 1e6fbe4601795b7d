"""Whether an assignment of a solution still holds: the last look before devices are given away.

Between the question and the answer a node may have died, a job may have been cancelled, another solution committed.
An assignment that needs runs to make room is looked at in the same way, as if those had gone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .model import Job, JobState
from .on_nodes import why_not_on_nodes
from .preemption import as_if_gone, may_outrank, takes_whole_devices, why_spared
from .problem import Assignment
from .reservations import lay_out

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


def why_no_room(state: ClusterState, assignment: Assignment) -> str | None:
    """None when the assignment could be carried out once the runs of `after` have gone, and they may be told to go.

    Those that are on their way out for another job already may be waited for as well.
    """
    job = state.jobs.get(assignment.job_id)
    if job is None or not takes_whole_devices(job.spec):
        return f"job {assignment.job_id}: nobody makes room for it"
    leaving = state.making_room()
    for placement_id in assignment.after:
        run = state.runs.get(placement_id)
        if run is None:
            return f"run {placement_id} has ended"
        spared = None if placement_id in leaving else why_spared(state, run, state.now)
        if spared is not None:
            return spared
        if not may_outrank(state, job, state.jobs[run.job_id]):
            return f"run {placement_id} is not of a lower priority class than job {assignment.job_id}"
    return _why_not_after(state, assignment, assignment.after)


def _why_not_after(state: ClusterState, assignment: Assignment, gone: tuple[str, ...]) -> str | None:
    """Also by the layout that it starts with once they have gone, which is made anew then."""
    with as_if_gone(state, gone):
        why = why_not_placeable(state, assignment)
        if why is None and layout_on_reserved(state, state.jobs[assignment.job_id], nodes_of(assignment)) is None:
            why = f"job {assignment.job_id} would not fit on the nodes of its assignment"
        return why


def needed_of(state: ClusterState, assignment: Assignment) -> tuple[str, ...]:
    """Those of `after` without which it would not fit; runs that are leaving anyway are kept rather than others."""
    leaving = state.making_room()
    needed = tuple(dict.fromkeys(assignment.after))
    for placement_id in sorted(needed, key=leaving.__contains__):
        rest = tuple(p for p in needed if p != placement_id)
        if _why_not_after(state, assignment, rest) is None:
            needed = rest
    return needed


def nodes_of(assignment: Assignment) -> tuple[str, ...]:
    return tuple(sorted({node_id for node_id, _ in assignment.workers}))


def layout_on_reserved(state: ClusterState, job: Job, node_ids: tuple[str, ...]) -> Assignment | None:
    """How the job can start on these nodes now; None when it cannot."""
    workers = lay_out(job.spec, (state.inventory.nodes[node_id] for node_id in node_ids))
    if workers is None:
        return None
    assignment = Assignment(job_id=job.spec.job_id, attempt=job.attempt, workers=workers)
    return assignment if why_not_placeable(state, assignment) is None else None


def _is_the_gang(job: Job, assignment: Assignment) -> bool:
    wanted: Counter[int] = Counter()
    for gpus, workers in job.spec.chunks():
        wanted[gpus] += workers
    return Counter(gpus for _, gpus in assignment.workers) == wanted
