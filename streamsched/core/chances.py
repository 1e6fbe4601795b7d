"""Whether a job could start now if it were alone, asked once per kind of request.

Exact, since what could not start would only take the place of another job in the window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .inventory import Request, request_kind
from .model import JobSpec, TopologyLevel
from .problem import NodeClass
from .room import (
    Room,
    allows,
    domain_of,
    gang_fits,
    gang_slots,
    required_level,
    wants_one_type,
    wants_share,
)


class _Lot(NamedTuple):
    room: Room
    nodes: int
    where: NodeClass


class Chances:
    """About the nodes of `classes`."""

    def __init__(self, classes: tuple[NodeClass, ...]) -> None:
        self.classes = classes
        self._lots = [_Lot(room_of(c), len(c.node_ids), c) for c in classes]
        self._most_idle = max((lot.room.idle for lot in self._lots), default=0)
        self._fits: dict[Request, bool] = {}
        self._known: dict[Request, str] = {}

    def why_not(self, spec: JobSpec) -> str:
        """Empty when it could start; else which resource is short."""
        kind = request_kind(spec)
        if self.fits(kind, spec):
            return ""
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = self._why_not(spec)
        return known

    def fits(self, kind: Request, spec: JobSpec) -> bool:
        """Whether it could start; `kind` is that of the request."""
        fits = self._fits.get(kind)
        if fits is None:
            fits = self._fits[kind] = self._fit(spec)
        return fits

    def seats(self, spec: JobSpec) -> int:
        """No more jobs that ask for this can start together; at least 1 where one can."""
        return gang_slots(_rooms(self._allowed(spec)), spec) // spec.workers

    def _fit(self, spec: JobSpec) -> bool:
        if not wants_share(spec) and not spec.mig_profile and spec.gpus_per_worker > self._most_idle:
            return False
        return any(gang_fits(group, spec) for group in _groups(self._allowed(spec), spec))

    def _allowed(self, spec: JobSpec) -> list[_Lot]:
        return [lot for lot in self._lots if allows(spec, lot.room.gpu_type)]

    def _why_not(self, spec: JobSpec) -> str:
        everything = _rooms(self._allowed(spec))
        if not gang_fits(everything, spec):
            return _short_of(spec, everything)
        level = required_level(spec)
        if level is not None:
            return f"topology: no {level} has room now for {_workers(spec)}"
        return f"gpu_type: no single type has room now for {_workers(spec)}"


def room_of(node_class: NodeClass) -> Room:
    """What each node of the class gives."""
    return Room(
        gpu_type=node_class.gpu_type,
        idle=node_class.free_gpus,
        shares=node_class.shares,
        instances=node_class.instances,
        cpu_milli=node_class.free_cpu_milli,
        memory_mib=node_class.free_memory_mib,
        gpu_memory_mib=node_class.gpu_memory_mib,
        mig=node_class.mig,
        affinity_taken=node_class.affinity_taken,
    )


def _rooms(lots: Iterable[_Lot]) -> list[tuple[Room, int]]:
    return [(lot.room, lot.nodes) for lot in lots]


def _groups(lots: list[_Lot], spec: JobSpec) -> Iterable[list[tuple[Room, int]]]:
    """The nodes on which all workers have to be together: of one domain and of one type, where that is asked for."""
    level, one_type = required_level(spec), wants_one_type(spec)
    groups: dict[tuple[str, str], list[tuple[Room, int]]] = {}
    for lot in lots:
        domain = domain_of(level, lot.where, lot.where.node_ids[0]) if level else ""
        if level and not domain:
            continue
        # A node is a domain of its own; those of a class are alike, so one speaks for all.
        count = 1 if level is TopologyLevel.NODE else lot.nodes
        groups.setdefault((domain, lot.room.gpu_type if one_type else ""), []).append((lot.room, count))
    return groups.values()


def _workers(spec: JobSpec) -> str:
    more = f" and 1 x {spec.remainder_gpus}" if spec.remainder_gpus else ""
    return f"{spec.workers} x {spec.gpus_per_worker}{more} GPUs"


def _short_of(spec: JobSpec, rooms: list[tuple[Room, int]]) -> str:
    slots = gang_slots(rooms, spec)
    if spec.mig_profile:
        return f"mig: {spec.workers} x {spec.mig_profile} needed, room now for {slots}"
    free = sum(room.idle * count for room, count in rooms)
    more = f" and 1 x {spec.remainder_gpus}" if spec.remainder_gpus else ""
    types = " or ".join(spec.gpu_types) or "any type"
    apart = ", each on a node without its like" if spec.anti_affinity else ""
    return (
        f"gpus: {spec.workers} x {spec.gpus_per_worker}{more} of {types} needed{apart}, "
        f"room now for {slots} ({free} GPUs free)"
    )
