"""What must hold of a whole state after every event. Costs the whole state: for tests, replays and recoveries."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .errors import BrokenInvariant
from .index import Index
from .inventory import Inventory
from .model import TERMINAL, WHOLE_GPU, Job, JobState, Run, RunState
from .node import Node

if TYPE_CHECKING:
    from .cluster import ClusterState

_RUN_STATES: dict[JobState, tuple[RunState, ...]] = {
    JobState.PLACED: (RunState.PLACED, RunState.LOST),
    JobState.RUNNING: (RunState.RUNNING, RunState.LOST),
    JobState.STOPPING: (RunState.STOPPING,),
    JobState.COMPLETED: (RunState.STOPPING,),  # another run of the job has completed
}
"""What the run that a job owns can be."""


def verify(state: ClusterState) -> None:
    """Raises BrokenInvariant, with the story of the job concerned."""
    for job in state.jobs.values():
        _verify_job(state, job)
    for run in state.runs.values():
        _verify_run(state, run)
    _verify_devices(state)
    _verify_tenants(state)
    _verify_index(state)
    _verify_inventory(state.inventory)


def _broken(state: ClusterState, job_id: str, what: str) -> BrokenInvariant:
    return BrokenInvariant(f"{what}\n{state.story(job_id)}")


def _verify_job(state: ClusterState, job: Job) -> None:
    job_id = job.spec.job_id
    run = state.runs.get(job.placement_id) if job.placement_id is not None else None
    has_run = job.state in (JobState.PLACED, JobState.RUNNING, JobState.STOPPING)
    if run is None and (has_run or job.placement_id is not None):
        raise _broken(state, job_id, f"job {job_id} is {job.state} without a run")
    if run is not None and not has_run and job.state not in TERMINAL:
        raise _broken(state, job_id, f"job {job_id} is {job.state} with a run")
    if run is not None and run.state not in _RUN_STATES.get(job.state, ()):
        raise _broken(state, job_id, f"job {job_id} is {job.state}, its run {run.state}")
    if (job.then is not None) != (job.state is JobState.STOPPING):
        raise _broken(state, job_id, f"job {job_id} is {job.state}, then {job.then}")
    if (job.ended_at is not None) != (job.state in TERMINAL):
        raise _broken(state, job_id, f"job {job_id} is {job.state}, ended at {job.ended_at}")
    if job.reservation and job.state is not JobState.QUEUED:
        raise _broken(state, job_id, f"job {job_id} is {job.state} and nodes are kept free for it")
    _verify_awaits(state, job)


def _verify_awaits(state: ClusterState, job: Job) -> None:
    job_id, awaits = job.spec.job_id, job.awaits
    if awaits and (not job.reservation or len(set(awaits)) < len(awaits)):
        raise _broken(state, job_id, f"job {job_id} waits for {awaits} to make room on {job.reservation}")
    for run in [state.runs[placement_id] for placement_id in awaits if placement_id in state.runs]:
        if run.stop_at is None or run.job_id == job_id:
            raise _broken(state, job_id, f"job {job_id} waits for run {run.placement_id}, which goes on")


def _verify_run(state: ClusterState, run: Run) -> None:
    job = state.jobs.get(run.job_id)
    if job is None or not run.allocations:
        raise _broken(state, run.job_id, f"run {run.placement_id} has no job or holds nothing")
    given_up = run.state is RunState.LOST and run.stop_at is not None
    if job.placement_id == run.placement_id and given_up:
        raise _broken(state, run.job_id, f"run {run.placement_id} is given up and still its job's")
    if job.placement_id != run.placement_id and run.stop_at is None:
        raise _broken(state, run.job_id, f"run {run.placement_id} is nobody's and goes on")
    if run.state is not RunState.LOST and (run.stop_at is None) == (run.state is RunState.STOPPING):
        raise BrokenInvariant(f"run {run.placement_id} is {run.state}, told to stop at {run.stop_at}")
    if run.given_up and (run.stop_at is None or (job.placement_id == run.placement_id and job.state not in TERMINAL)):
        raise _broken(state, run.job_id, f"run {run.placement_id} is given up and goes on")
    if (run.stop_at is None) != (run.stop_said_at is None):
        raise BrokenInvariant(f"run {run.placement_id}: to stop at {run.stop_at}, said at {run.stop_said_at}")


def _verify_devices(state: ClusterState) -> None:
    held = {node.node_id: [WHOLE_GPU] * len(node.free_milli) for node in state.inventory}
    cpu: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    for run in state.runs.values():
        for a in run.allocations:
            cpu[a.node_id] += a.cpu_milli
            memory[a.node_id] += a.memory_mib
            for gpu in a.gpus:
                held[a.node_id][gpu] -= a.gpu_milli
                if held[a.node_id][gpu] < 0:
                    raise _broken(state, run.job_id, f"GPU {gpu} of {a.node_id} has two owners")
    for node in state.inventory:
        left = (node.spec.cpu_milli - cpu[node.node_id], node.spec.memory_mib - memory[node.node_id])
        if (node.free_cpu_milli, node.free_memory_mib) != left:
            raise BrokenInvariant(f"node {node.node_id}: cpu or memory is not what the runs leave")
        _verify_node(node, held[node.node_id])
    _verify_rooms(state)


def _verify_rooms(state: ClusterState) -> None:
    """Whatever order the runs came in, what each node gives follows from what they hold."""
    anew = {node.node_id: Node(node.record) for node in state.inventory}
    for run in state.runs.values():
        for a in run.allocations:
            anew[a.node_id].take(run.placement_id, a)
    for node in state.inventory:
        if node.room() != anew[node.node_id].room():
            raise BrokenInvariant(f"node {node.node_id} gives {node.room()}, by the runs {anew[node.node_id].room()}")


def _verify_node(node: Node, free_milli: list[int]) -> None:
    if node.free_milli != free_milli or node.free_gpus() < 0:
        raise BrokenInvariant(f"node {node.node_id}: free {node.free_milli}, by the runs {free_milli}")
    if node.key != node.class_key():
        raise BrokenInvariant(f"node {node.node_id} is filed in a class that it has left")


def _verify_tenants(state: ClusterState) -> None:
    held: Counter[str] = Counter()
    for run in state.runs.values():
        if run.given_up:
            continue
        milli = sum(len(a.gpus) * a.gpu_milli for a in run.allocations)
        held[state.jobs[run.job_id].spec.tenant] += milli
    for tenant in held.keys() | state.tenants.keys():
        usage = state.usage(tenant)
        if usage.held_milli != held[tenant] or usage.usage_gpu_s < 0 or usage.as_of > state.now:
            raise BrokenInvariant(f"tenant {tenant}: {usage}, by the runs it is charged for {held[tenant]}")


def _verify_index(state: ClusterState) -> None:
    anew = Index()
    for job in state.jobs.values():
        anew.job(job)
    for run in state.runs.values():
        anew.run(run)
    for node in state.inventory:
        anew.node(node.record)
    state.index.verify(anew)


def _verify_inventory(inventory: Inventory) -> None:
    anew = Inventory()
    for node in inventory:
        anew.add(Node(node.record))
    if (inventory.capabilities, inventory.usable) != (anew.capabilities, anew.usable):
        raise BrokenInvariant("the inventory counts what its nodes do not have")
