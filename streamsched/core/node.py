"""One node: what it declared, whether it can be used, and who holds which of its devices.

The devices are accounted in integer thousandths, so that any sequence of taking and giving back is exact. Usage is
never stored: it is what the runs hold (`Run.allocations`), taken again when a state is loaded.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from msgspec import Struct

from . import mig
from .errors import BrokenInvariant
from .model import WHOLE_GPU, Allocation, JobSpec, NodeSpec, NodeState
from .room import NO_LIMIT, Room, share_milli, wants_share


class NodeRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored part of a node."""

    spec: NodeSpec
    state: NodeState = NodeState.UP
    capacity: int = 0
    """GPUs usable now; at most `spec.gpus`."""
    lost: bool = False
    """Silent for too long, or said to be gone; what an operator or a quarantine said of it (`state`) outlives that."""
    lost_at: float = 0.0
    """Since when it is lost."""
    until: float = 0.0
    """End of a quarantine, UTC epoch seconds."""
    refused: tuple[str, ...] = ()
    """Distinct jobs that it refused since a run last started on it."""


class _Partition:
    """A device under MIG that is not idle: its geometry and the instances of it in use."""

    __slots__ = ("geometry", "used")

    def __init__(self, geometry: mig.Geometry) -> None:
        self.geometry = geometry
        self.used: set[tuple[str, int]] = set()
        """(profile, number among its instances of that profile)."""

    def free(self, profile: str) -> list[int]:
        return [i for i in range(mig.count_in(self.geometry, profile)) if (profile, i) not in self.used]


class Node:
    """A node's record and its devices. Invariant: 0 <= free_milli[i] <= 1000.

    Free cpu and memory are below zero while a node holds more than it declares now."""

    __slots__ = (
        "_affinity",
        "_partitions",
        "_partly_used",
        "_used_devices",
        "free_cpu_milli",
        "free_memory_mib",
        "free_milli",
        "key",
        "record",
        "run_ids",
    )

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.free_milli: list[int] = [WHOLE_GPU] * record.spec.gpus
        self.free_cpu_milli = record.spec.cpu_milli
        self.free_memory_mib = record.spec.memory_mib
        self.run_ids: dict[str, int] = {}
        """placement_id -> allocations of that run here."""
        self.key: NodeKey | None = None
        """Where it is filed in the class index."""
        self._used_devices = 0
        self._partly_used = 0
        """Devices of which a part is free."""
        self._affinity: Counter[str] = Counter()
        """Workers here by their `anti_affinity` name."""
        self._partitions: dict[int, _Partition] = {}

    @property
    def node_id(self) -> str:
        return self.record.spec.node_id

    @property
    def spec(self) -> NodeSpec:
        return self.record.spec

    @property
    def usable(self) -> bool:
        return self.record.state is NodeState.UP and not self.record.lost

    def free_gpus(self) -> int:
        """Whole devices that can be given away now. A node that shrank while full gives none until enough are back."""
        capacity = self.record.capacity
        if not self._used_devices:
            return capacity
        idle = self.free_milli[:capacity].count(WHOLE_GPU)
        return max(0, min(idle, capacity - self._used_devices))

    def shares(self) -> tuple[int, ...]:
        """Free thousandths of the partly used devices, ascending; a device under MIG gives none."""
        if not self._used_devices or self.spec.mig or not self._partly_used:
            return ()
        devices = enumerate(self.free_milli[: self.record.capacity])
        return tuple(sorted(free for i, free in devices if 0 < free < WHOLE_GPU and i not in self._partitions))

    def instances(self) -> tuple[tuple[str, int], ...]:
        """(MIG profile, free instances) on the partitioned devices, ascending, none of 0."""
        if not self._partitions:
            return ()
        free: Counter[str] = Counter()
        for _, partition in self._open_partitions():
            for profile, _ in partition.geometry:
                free[profile] += len(partition.free(profile))
        return tuple(sorted((+free).items()))

    def _open_partitions(self) -> list[tuple[int, _Partition]]:
        """Partitioned devices that may take more: usable, with a geometry of what the node declares now."""
        geometries = mig.TABLES.get(self.spec.mig, ())
        return [(i, p) for i, p in self._partitions.items() if i < self.record.capacity and p.geometry in geometries]

    def affinity_taken(self) -> tuple[str, ...]:
        """`anti_affinity` names of the workers here, ascending."""
        return tuple(sorted(self._affinity)) if self._affinity else ()

    def room(self) -> Room:
        """What it gives now. It says nothing of whether the node can be used (`usable`)."""
        spec = self.spec
        return Room(
            gpu_type=spec.gpu_type,
            idle=self.free_gpus(),
            shares=self.shares(),
            instances=self.instances(),
            # An inventory that shrank below what is held leaves less than nothing; -1 would say "no limit".
            cpu_milli=max(0, self.free_cpu_milli) if spec.cpu_milli else NO_LIMIT,
            memory_mib=max(0, self.free_memory_mib) if spec.memory_mib else NO_LIMIT,
            gpu_memory_mib=spec.gpu_memory_mib,
            mig=spec.mig,
            affinity_taken=self.affinity_taken(),
        )

    def allocate(self, spec: JobSpec, gpus: int) -> Allocation:
        """Devices for one worker that fits: nothing is taken yet.

        Whole ones: the lowest idle. A share or an instance: on the fullest device that has room for it, of equal ones
        the lowest, else on the lowest idle one.
        """
        geometry: mig.Geometry = ()
        instance = 0
        devices: tuple[int, ...]
        if spec.mig_profile:
            milli = mig.MILLI[spec.mig_profile]
            device, geometry, instance = self._pick_instance(spec.mig_profile)
            devices = (device,)
        elif wants_share(spec):
            milli = share_milli(spec, self.spec.gpu_memory_mib)
            devices = (self._pick_share(milli),)
        else:
            milli = WHOLE_GPU
            devices = tuple(self._idle())[:gpus]
        return Allocation(
            node_id=self.node_id,
            gpus=devices,
            gpu_milli=milli,
            cpu_milli=spec.cpu_milli,
            memory_mib=spec.memory_mib,
            anti_affinity=spec.anti_affinity,
            mig_profile=spec.mig_profile,
            mig_geometry=geometry,
            mig_instance=instance,
        )

    def _idle(self) -> list[int]:
        return [i for i, free in enumerate(self.free_milli[: self.record.capacity]) if free == WHOLE_GPU]

    def _pick_share(self, milli: int) -> int:
        devices = enumerate(self.free_milli[: self.record.capacity])
        partly = [(free, i) for i, free in devices if milli <= free < WHOLE_GPU and i not in self._partitions]
        return min(partly)[1] if partly else self._idle()[0]

    def _pick_instance(self, profile: str) -> tuple[int, mig.Geometry, int]:
        """(device, its geometry, number of the instance)."""
        partly = [(self.free_milli[i], i) for i, p in self._open_partitions() if p.free(profile)]
        if partly:
            device = min(partly)[1]
            partition = self._partitions[device]
            return device, partition.geometry, partition.free(profile)[0]
        geometry = mig.opened(self.spec.mig, profile)
        if geometry is None:
            raise BrokenInvariant(f"node {self.node_id} has no MIG profile {profile}")
        return self._idle()[0], geometry, 0

    def take(self, placement_id: str, allocation: Allocation) -> None:
        """Give the devices of `allocation` to a run; raises BrokenInvariant when any of them is not free."""
        self._grow(max(allocation.gpus, default=-1) + 1)
        for index in allocation.gpus:
            left = self.free_milli[index] - allocation.gpu_milli
            if left < 0:
                raise BrokenInvariant(
                    f"GPU {index} of {self.node_id} given twice: {placement_id} and {[*self.run_ids]}"
                )
            self._take_instance(placement_id, index, allocation)
            before = self.free_milli[index]
            self._used_devices += before == WHOLE_GPU
            self._partly_used += (0 < left < WHOLE_GPU) - (0 < before < WHOLE_GPU)
            self.free_milli[index] = left
        self.free_cpu_milli -= allocation.cpu_milli
        self.free_memory_mib -= allocation.memory_mib
        if allocation.anti_affinity:
            self._affinity[allocation.anti_affinity] += 1
        self.run_ids[placement_id] = self.run_ids.get(placement_id, 0) + 1

    def _take_instance(self, placement_id: str, index: int, allocation: Allocation) -> None:
        """A device is either partitioned, and then into one geometry with every instance given once, or not."""
        partition = self._partitions.get(index)
        if not allocation.mig_profile:
            if partition is None:
                return
            raise BrokenInvariant(f"GPU {index} of {self.node_id} is partitioned, {placement_id} takes it as it is")
        if partition is None and self.free_milli[index] == WHOLE_GPU:
            partition = self._partitions[index] = _Partition(allocation.mig_geometry)
        profile, number = allocation.mig_profile, allocation.mig_instance
        same = partition is not None and partition.geometry == allocation.mig_geometry
        if partition is None or not same or number not in partition.free(profile):
            raise BrokenInvariant(f"GPU {index} of {self.node_id} has no {profile} number {number} for {placement_id}")
        partition.used.add((profile, number))

    def give_back(self, placement_id: str, allocation: Allocation) -> None:
        """Undo `take`."""
        for index in allocation.gpus:
            free = self.free_milli[index] + allocation.gpu_milli
            if free > WHOLE_GPU:
                raise BrokenInvariant(f"GPU {index} of {self.node_id} freed twice, last by {placement_id}")
            self._partly_used += (0 < free < WHOLE_GPU) - (0 < self.free_milli[index] < WHOLE_GPU)
            self.free_milli[index] = free
            self._used_devices -= free == WHOLE_GPU
            if allocation.mig_profile:
                self._partitions[index].used.remove((allocation.mig_profile, allocation.mig_instance))
                if free == WHOLE_GPU:
                    del self._partitions[index]
        self.free_cpu_milli += allocation.cpu_milli
        self.free_memory_mib += allocation.memory_mib
        if allocation.anti_affinity:
            self._affinity[allocation.anti_affinity] -= 1
            self._affinity = +self._affinity
        left = self.run_ids[placement_id] - 1
        if left:
            self.run_ids[placement_id] = left
        else:
            del self.run_ids[placement_id]

    def adopt(self, record: NodeRecord) -> None:
        """Replace the record; what runs hold stays held, also beyond a smaller new inventory."""
        self.free_cpu_milli += record.spec.cpu_milli - self.spec.cpu_milli
        self.free_memory_mib += record.spec.memory_mib - self.spec.memory_mib
        self.record = record
        self._grow(record.spec.gpus)

    def _grow(self, devices: int) -> None:
        self.free_milli.extend([WHOLE_GPU] * (devices - len(self.free_milli)))

    def class_key(self) -> NodeKey | None:
        """What makes nodes interchangeable in a window; None when it has nothing to give."""
        if not self.usable:
            return None
        room = self.room()
        if not room.idle and not room.shares and not room.instances:
            return None
        spec = self.spec
        return NodeKey(room=room, nvlink=spec.nvlink, rack=spec.rack, zone=spec.zone, capacity=self.record.capacity)


class NodeKey(NamedTuple):
    """Nodes with equal keys are interchangeable in a window. `capacity`: usable devices, free or not."""

    room: Room
    nvlink: str
    rack: str
    zone: str
    capacity: int
