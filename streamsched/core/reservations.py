"""Reservations: a job that has waited too long gets nodes that nobody else may use until it has started.

Run times are not known here, so there is no shadow time to backfill against (EASY: Lifka, JSSPP 1995): the reserved
nodes are left to drain. They are those with the most room already, and once chosen they stay chosen while they can be
used, so that the wait ends at the latest when the runs that are on them have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from .inventory import capability_of, remainder_fits_when_empty, slots_when_empty
from .model import Job, JobSpec
from .node import Node


def choose_nodes(job: Job, nodes: Iterable[Node], reserved: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes on which the whole gang fits once they are empty, those with most room now first; () when there are none.

    `reserved`: node -> job that it is reserved for already. Nodes that refused the job come last. Topology wishes are
    not looked at.
    """
    spec = job.spec
    usable = [
        node
        for node in nodes
        if node.usable and node.node_id not in reserved and (not spec.gpu_types or node.spec.gpu_type in spec.gpu_types)
    ]
    usable.sort(key=lambda node: (node.node_id in job.refused_by, -node.free_gpus(), node.node_id))
    chosen: dict[str, int] = {}
    left = spec.workers
    for node in usable:
        slots = min(left, slots_when_empty(capability_of(node), spec))
        if slots:
            chosen[node.node_id] = slots
            left -= slots
        if not left:
            break
    if left:
        return ()
    if spec.remainder_gpus:
        room = _room_for_remainder(spec, usable, chosen)
        if room is None:
            return ()
        chosen.setdefault(room, 0)
    return tuple(sorted(chosen))


def _room_for_remainder(spec: JobSpec, usable: Iterable[Node], chosen: Mapping[str, int]) -> str | None:
    """A node with room for the smaller worker, rather one that is chosen already."""
    for node in sorted(usable, key=lambda node: node.node_id not in chosen):
        if remainder_fits_when_empty(capability_of(node), spec, chosen.get(node.node_id, 0)):
            return node.node_id
    return None


def lay_out(spec: JobSpec, nodes: Iterable[Node]) -> tuple[tuple[str, int], ...] | None:
    """((node, GPUs), ...) for all workers on what these nodes have free now, None when the gang does not fit yet."""
    ordered = sorted(nodes, key=attrgetter("node_id"))
    workers: list[tuple[str, int]] = []
    held = dict.fromkeys((node.node_id for node in ordered), (0, 0))
    for gpus, count in spec.chunks():
        left = count
        for node in ordered:
            while left and _fits_beside(node, spec, gpus, *held[node.node_id]):
                taken_gpus, taken_workers = held[node.node_id]
                held[node.node_id] = (taken_gpus + gpus, taken_workers + 1)
                workers.append((node.node_id, gpus))
                left -= 1
        if left:
            return None
    return tuple(workers)


def _fits_beside(node: Node, spec: JobSpec, gpus: int, taken_gpus: int, taken_workers: int) -> bool:
    workers = taken_workers + 1
    return node.fits(taken_gpus + gpus, spec.gpu_milli, spec.cpu_milli * workers, spec.memory_mib * workers)
