"""Reservations: a job that has waited too long gets nodes that nobody else may use until it has started.

Run times are not known here, so there is no shadow time to backfill against (EASY: Lifka, JSSPP 1995): the reserved
nodes are left to drain. They are those with the most room already, chosen anew at each window: one that comes free
elsewhere is taken at once. What is kept stays as free as it is, so the wait ends at the latest when the runs on the
nodes that are kept have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from .capability import capability_of
from .model import Job, JobSpec
from .node import Node
from .room import allows, domain_of, remainder_fits, required_level, slots, wants_one_type


def choose_nodes(job: Job, nodes: Iterable[Node], reserved: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes on which the whole gang fits once they are empty, those with most room now first; () when there are none.

    `reserved`: node -> job that it is reserved for already. Nodes that refused the job come last. All are of one type
    and in one domain where the job needs that: of several such choices the one with most room now. Topology wishes
    that are not required are not looked at.
    """
    spec = job.spec
    usable = [node for node in nodes if node.usable and node.node_id not in reserved]
    choices = [chosen for group in _groups(usable, spec) if (chosen := _choose_among(job, group))]
    return tuple(sorted(node.node_id for node in min(choices, key=lambda chosen: _wait_for(job, chosen), default=())))


def _wait_for(job: Job, chosen: list[Node]) -> tuple[int, int, int, str]:
    """Ascending: how many refused it, how many devices have to drain, how many are left beside it, the first's name."""
    refused = sum(node.node_id in job.refused_by for node in chosen)
    capacity = sum(node.record.capacity for node in chosen)
    busy = capacity - sum(node.free_gpus() for node in chosen)
    return refused, busy, capacity, min(node.node_id for node in chosen)


def _groups(nodes: Iterable[Node], spec: JobSpec) -> list[list[Node]]:
    """Nodes that it may use; where all its workers need one type or one domain, such nodes together."""
    level, one_type = required_level(spec), wants_one_type(spec)
    groups: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        domain = domain_of(level, node.spec, node.node_id) if level else ""
        if allows(spec, node.spec.gpu_type) and (domain or not level):
            groups.setdefault((domain, node.spec.gpu_type if one_type else ""), []).append(node)
    return list(groups.values())


def _choose_among(job: Job, group: list[Node]) -> list[Node]:
    spec = job.spec
    group.sort(key=lambda node: (node.node_id in job.refused_by, -node.free_gpus(), node.node_id))
    chosen: dict[str, int] = {}
    left = spec.workers
    for node in group:
        taken = min(left, slots(capability_of(node).room(), spec))
        if taken:
            chosen[node.node_id] = taken
            left -= taken
        if not left:
            break
    if left:
        return []
    if spec.remainder_gpus:
        room = _room_for_remainder(spec, group, chosen)
        if room is None:
            return []
        chosen.setdefault(room, 0)
    return [node for node in group if node.node_id in chosen]


def _room_for_remainder(spec: JobSpec, group: Iterable[Node], chosen: Mapping[str, int]) -> str | None:
    """A node with room for the smaller worker, rather one that is chosen already."""
    for node in sorted(group, key=lambda node: node.node_id not in chosen):
        if remainder_fits(capability_of(node).room(), spec, chosen.get(node.node_id, 0)):
            return node.node_id
    return None


def lay_out(spec: JobSpec, nodes: Iterable[Node]) -> tuple[tuple[str, int], ...] | None:
    """((node, GPUs), ...) for all workers on what these nodes have free now, the first nodes as far as they do; None
    when the gang does not fit yet."""
    layouts = (_lay_out_among(spec, group) for group in _groups(nodes, spec))
    return next((workers for workers in layouts if workers is not None), None)


def _lay_out_among(spec: JobSpec, group: Iterable[Node]) -> tuple[tuple[str, int], ...] | None:
    rooms = {node.node_id: node.room() for node in group}
    workers: list[tuple[str, int]] = []
    for node_id, room in rooms.items():
        workers += [(node_id, spec.gpus_per_worker)] * min(spec.workers - len(workers), slots(room, spec))
    if len(workers) < spec.workers:
        return None
    if spec.remainder_gpus:
        full = Counter(node_id for node_id, _ in workers)
        with_room = (node_id for node_id, room in rooms.items() if remainder_fits(room, spec, full[node_id]))
        rest = next(with_room, None)
        if rest is None:
            return None
        workers.append((rest, spec.remainder_gpus))
    return tuple(workers)
