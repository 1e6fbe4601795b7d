"""Whether an assignment can be carried out on the nodes that it names, as they are now."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .model import Job
from .problem import Assignment
from .room import allows, domain_of, required_level, takes, wants_one_type

if TYPE_CHECKING:
    from .cluster import ClusterState


def why_not_on_nodes(state: ClusterState, job: Job, assignment: Assignment) -> str | None:
    """None when it can; else why not. The assignment is known to be the job's gang."""
    return why_not_suitable(state, job, assignment) or why_no_room(state, job, assignment)


def why_not_suitable(state: ClusterState, job: Job, assignment: Assignment) -> str | None:
    """Whatever is free there: nodes that cannot be used, are kept for others, or are not what the job asks for."""
    spec, job_id = job.spec, assignment.job_id
    workers_on = Counter(node_id for node_id, _ in assignment.workers)
    types: set[str] = set()
    domains: set[str] = set()
    level = required_level(spec)
    for node_id, workers in workers_on.items():
        node = state.inventory.nodes.get(node_id)
        if node is None or not node.usable:
            return f"node {node_id} cannot be used now"
        if state.reserved.get(node_id, job_id) != job_id:
            return f"node {node_id} is kept free for job {state.reserved[node_id]}"
        if not allows(spec, node.spec.gpu_type):
            return f"node {node_id} has {node.spec.gpu_type}, job {job_id} wants {spec.gpu_types}"
        if spec.anti_affinity and workers > 1:
            return f"node {node_id} would have {workers} workers of {spec.anti_affinity}, job {job_id} wants them apart"
        types.add(node.spec.gpu_type)
        if level is not None:
            domain = domain_of(level, node.spec, node_id)
            if not domain:
                return f"node {node_id} names no {level}, job {job_id} needs one"
            domains.add(domain)
    if len(types) > 1 and wants_one_type(spec):
        return f"job {job_id} would be on {', '.join(sorted(types))}, it wants one type"
    if len(domains) > 1:
        return f"job {job_id} would be in {len(domains)} domains of level {level}, it needs one"
    return None


def why_no_room(state: ClusterState, job: Job, assignment: Assignment) -> str | None:
    """Of nodes that are suitable."""
    spec = job.spec
    workers_on = Counter(node_id for node_id, gpus in assignment.workers if gpus == spec.gpus_per_worker)
    rest_on = {node_id for node_id, gpus in assignment.workers if gpus != spec.gpus_per_worker}
    for node_id in dict.fromkeys(node_id for node_id, _ in assignment.workers):
        room = state.inventory.nodes[node_id].room()
        if spec.anti_affinity and spec.anti_affinity in room.affinity_taken:
            return f"node {node_id} has a worker of {spec.anti_affinity} already"
        if not takes(room, spec, workers_on[node_id], node_id in rest_on):
            return (
                f"node {node_id} has no room for {workers_on[node_id] + (node_id in rest_on)} workers of {spec.job_id}"
            )
    return None
