"""How many workers of a job one node takes, and whether a set of nodes takes the whole gang.

One reckoning for a node as it is now, for a class of a window and for an empty node: all three become a `Room`.
Everything is in integers: shares in thousandths of a device, memory shares rounded up to the next thousandth.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from . import mig
from .model import WHOLE_GPU, JobSpec, TopologyLevel

NO_LIMIT = -1


class Room(NamedTuple):
    """What one node gives."""

    gpu_type: str
    idle: int
    """Devices that can be given away whole."""
    shares: tuple[int, ...] = ()
    """Free thousandths of the partly used devices."""
    instances: tuple[tuple[str, int], ...] = ()
    """(MIG profile, free instances) on the devices that are partitioned."""
    cpu_milli: int = NO_LIMIT
    memory_mib: int = NO_LIMIT
    gpu_memory_mib: int = 0
    mig: str = ""
    affinity_taken: tuple[str, ...] = ()


class Located(Protocol):
    """A node's specification or a class of nodes."""

    @property
    def nvlink(self) -> str: ...
    @property
    def rack(self) -> str: ...
    @property
    def zone(self) -> str: ...


def domain_of(level: TopologyLevel, where: Located, node: str) -> str:
    """The domain's name, empty when it has none. `node`: what the domain of level `node` is called."""
    match level:
        case TopologyLevel.NODE:
            return node
        case TopologyLevel.NVLINK:
            return where.nvlink
        case TopologyLevel.RACK:
            return where.rack
        case TopologyLevel.ZONE:
            return where.zone


def required_level(spec: JobSpec) -> TopologyLevel | None:
    return spec.topology.level if spec.topology is not None and spec.topology.required else None


def wants_one_type(spec: JobSpec) -> bool:
    """Whether all its workers have to be on one GPU type; a single worker is anyway."""
    return not spec.mixed_types and spec.workers + (spec.remainder_gpus > 0) > 1


def allows(spec: JobSpec, gpu_type: str) -> bool:
    """By the exact declared name: A100 is neither A100-80GB nor A10."""
    return not spec.gpu_types or gpu_type in spec.gpu_types


def wants_share(spec: JobSpec) -> bool:
    """A part of one device, by thousandths or memory; MIG instances are something else."""
    return not spec.mig_profile and (spec.gpu_milli < WHOLE_GPU or spec.gpu_memory_mib > 0)


def share_milli(spec: JobSpec, gpu_memory_mib: int) -> int:
    """Thousandths that a share takes of a device with so much memory; above 1000: it does not fit on one.

    The larger of the share of compute that was asked for and the share of memory, rounded up.
    """
    if not spec.gpu_memory_mib:
        return spec.gpu_milli
    if not gpu_memory_mib:
        return WHOLE_GPU + 1
    by_memory = -(-WHOLE_GPU * spec.gpu_memory_mib // gpu_memory_mib)
    return by_memory if spec.gpu_milli == WHOLE_GPU else max(spec.gpu_milli, by_memory)


def slots(room: Room, spec: JobSpec) -> int:
    """Full workers of the job that the node takes. Its GPU type is not looked at."""
    if spec.anti_affinity and spec.anti_affinity in room.affinity_taken:
        return 0
    found = _device_slots(room, spec)
    for free, wanted in ((room.cpu_milli, spec.cpu_milli), (room.memory_mib, spec.memory_mib)):
        if wanted and free != NO_LIMIT:
            found = min(found, free // wanted)
    return min(found, 1) if spec.anti_affinity else found


def _device_slots(room: Room, spec: JobSpec) -> int:
    if spec.mig_profile:
        ready = sum(free for profile, free in room.instances if profile == spec.mig_profile)
        return ready + room.idle * mig.per_device(room.mig, spec.mig_profile)
    if not wants_share(spec):
        return room.idle // spec.gpus_per_worker
    milli = share_milli(spec, room.gpu_memory_mib)
    # A device under MIG is given whole or as instances.
    if milli > WHOLE_GPU or room.mig:
        return 0
    return room.idle * (WHOLE_GPU // milli) + sum(share // milli for share in room.shares)


def remainder_fits(room: Room, spec: JobSpec, beside: int) -> bool:
    """Whether the smaller worker fits beside so many full ones of its gang."""
    if spec.anti_affinity and (beside or spec.anti_affinity in room.affinity_taken):
        return False
    return room.idle - beside * spec.gpus_per_worker >= spec.remainder_gpus and all(
        not wanted or free == NO_LIMIT or free - beside * wanted >= wanted
        for free, wanted in ((room.cpu_milli, spec.cpu_milli), (room.memory_mib, spec.memory_mib))
    )


def takes(room: Room, spec: JobSpec, workers: int, remainder: bool) -> bool:
    """Whether so many full workers and perhaps the smaller one fit on the node together."""
    return workers <= slots(room, spec) and (not remainder or remainder_fits(room, spec, workers))


def gang_slots(rooms: Iterable[tuple[Room, int]], spec: JobSpec) -> int:
    """Full workers that these take together; `rooms`: (room, nodes like this)."""
    return sum(count * slots(room, spec) for room, count in rooms)


def gang_fits(rooms: Iterable[tuple[Room, int]], spec: JobSpec) -> bool:
    """Whether the whole gang fits on these nodes, whatever their types and domains.

    Exact: with every node filled with as many full workers as it takes, the smaller one needs either a spare slot or
    the room left beside full slots.
    """
    rooms = list(rooms)
    total = gang_slots(rooms, spec)
    if total < spec.workers:
        return False
    if not spec.remainder_gpus or total > spec.workers:
        return True
    return any(count and remainder_fits(room, spec, slots(room, spec)) for room, count in rooms)
