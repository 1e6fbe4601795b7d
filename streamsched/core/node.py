"""One node: what it declared, whether it can be used, and who holds which of its devices.

The devices are accounted in integer thousandths, so that any sequence of taking and giving back is exact. Usage is
never stored: it is what the runs hold (`Run.allocations`), taken again when a state is loaded.
"""

from __future__ import annotations

from msgspec import Struct

from .errors import BrokenInvariant
from .model import WHOLE_GPU, Allocation, NodeSpec, NodeState


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


class Node:
    """A node's record and its devices. Invariant: 0 <= free_milli[i] <= 1000.

    Free cpu and memory are below zero while a node holds more than it declares now."""

    __slots__ = (
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
        idle = sum(1 for free in self.free_milli[:capacity] if free == WHOLE_GPU)
        return max(0, min(idle, capacity - self._used_devices))

    def shares(self) -> tuple[int, ...]:
        """Free thousandths of the partly used devices, ascending."""
        if not self._used_devices:
            return ()
        return tuple(sorted(free for free in self.free_milli[: self.record.capacity] if 0 < free < WHOLE_GPU))

    def fits(self, gpus: int, gpu_milli: int, cpu_milli: int, memory_mib: int) -> bool:
        """Whether this much can be placed here now; with `gpu_milli` < 1000, that many shares, each on one device."""
        if self.spec.cpu_milli and cpu_milli > max(0, self.free_cpu_milli):
            return False
        if self.spec.memory_mib and memory_mib > max(0, self.free_memory_mib):
            return False
        if gpu_milli == WHOLE_GPU:
            return self.free_gpus() >= gpus
        slots = sum(share // gpu_milli for share in self.shares()) + self.free_gpus() * (WHOLE_GPU // gpu_milli)
        return slots >= gpus

    def pick(self, gpus: int, gpu_milli: int) -> tuple[int, ...]:
        """Devices for one worker: the lowest idle ones, or for a share the fullest device that still has room."""
        devices = self.free_milli[: self.record.capacity]
        if gpu_milli == WHOLE_GPU:
            return tuple(i for i, free in enumerate(devices) if free == WHOLE_GPU)[:gpus]
        partly = [(free, i) for i, free in enumerate(devices) if gpu_milli <= free < WHOLE_GPU]
        if partly:
            return (min(partly)[1],)
        return (devices.index(WHOLE_GPU),)

    def take(self, placement_id: str, allocation: Allocation) -> None:
        """Give the devices of `allocation` to a run; raises BrokenInvariant when any of them is not free."""
        self._grow(max(allocation.gpus, default=-1) + 1)
        for index in allocation.gpus:
            left = self.free_milli[index] - allocation.gpu_milli
            if left < 0:
                raise BrokenInvariant(
                    f"GPU {index} of {self.node_id} given twice: {placement_id} and {[*self.run_ids]}"
                )
            self._used_devices += self.free_milli[index] == WHOLE_GPU
            self.free_milli[index] = left
        self.free_cpu_milli -= allocation.cpu_milli
        self.free_memory_mib -= allocation.memory_mib
        self.run_ids[placement_id] = self.run_ids.get(placement_id, 0) + 1

    def give_back(self, placement_id: str, allocation: Allocation) -> None:
        """Undo `take`."""
        for index in allocation.gpus:
            free = self.free_milli[index] + allocation.gpu_milli
            if free > WHOLE_GPU:
                raise BrokenInvariant(f"GPU {index} of {self.node_id} freed twice, last by {placement_id}")
            self.free_milli[index] = free
            self._used_devices -= free == WHOLE_GPU
        self.free_cpu_milli += allocation.cpu_milli
        self.free_memory_mib += allocation.memory_mib
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
        free, shares = self.free_gpus(), self.shares()
        if not free and not shares:
            return None
        spec = self.spec
        return (
            spec.gpu_type,
            free,
            shares,
            # An inventory that shrank below what is held leaves less than nothing; -1 would say "no limit".
            max(0, self.free_cpu_milli) if spec.cpu_milli else -1,
            max(0, self.free_memory_mib) if spec.memory_mib else -1,
            spec.nvlink,
            spec.rack,
            spec.zone,
            self.record.capacity,
        )


NodeKey = tuple[str, int, tuple[int, ...], int, int, str, str, str, int]
"""(type, free GPUs, shares, free cpu or -1, free memory or -1, nvlink, rack, zone, capacity)."""
