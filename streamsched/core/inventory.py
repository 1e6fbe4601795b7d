"""The nodes of a pool, filed by what they can give now and by what they could ever give.

Both indexes change only with the node that changed, so that a window costs the number of *classes*, not of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .errors import BrokenInvariant
from .model import WHOLE_GPU, JobSpec
from .node import Node, NodeKey
from .problem import NodeClass

Capability = tuple[str, int, int, int]
"""(GPU type, GPUs, cpu_milli or 0, memory_mib or 0) of a node when it is empty."""


class Inventory:
    """`nodes` by id. Call `refile` after every change of a node."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.capabilities: Counter[Capability] = Counter()
        self._members: dict[NodeKey, dict[str, None]] = {}
        self._sorted: dict[NodeKey, NodeClass] = {}
        self._capability_of: dict[str, Capability] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def add(self, node: Node) -> None:
        self.nodes[node.node_id] = node
        self.refile(node)

    def refile(self, node: Node) -> None:
        """Bring both indexes up to date with `node`."""
        node_id, key = node.node_id, node.class_key()
        if key != node.key:
            if node.key is not None:
                members = self._members[node.key]
                del members[node_id]
                self._sorted.pop(node.key, None)
                if not members:
                    del self._members[node.key]
            if key is not None:
                self._members.setdefault(key, {})[node_id] = None
                self._sorted.pop(key, None)
            node.key = key
        capability = _capability(node)
        before = self._capability_of.get(node_id)
        if before != capability:
            if before is not None:
                self._uncount(before)
            self.capabilities[capability] += 1
            self._capability_of[node_id] = capability

    def remove(self, node_id: str) -> None:
        """Forget a node that can give nothing."""
        node = self.nodes.pop(node_id)
        if node.key is not None:
            raise BrokenInvariant(f"node {node_id} is to be forgotten but still offers something")
        self._uncount(self._capability_of.pop(node_id))

    def _uncount(self, capability: Capability) -> None:
        self.capabilities[capability] -= 1
        if not self.capabilities[capability]:
            del self.capabilities[capability]

    def classes(self) -> tuple[NodeClass, ...]:
        """The classes that have something to give, in a fixed order."""
        for key in self._members.keys() - self._sorted.keys():
            self._sorted[key] = _node_class(key, tuple(sorted(self._members[key])))
        return tuple(self._sorted[key] for key in sorted(self._sorted))

    def never_fits(self, spec: JobSpec) -> str | None:
        """Why no set of nodes of this inventory, all empty, could hold the job; None when one can.

        Exact for gangs of equal workers plus one smaller remainder: with every node filled with as many workers as it
        takes, the remainder needs either a spare slot or the room left beside full slots.
        """
        return _why_never(self.capabilities, spec)

    def holds_without(self, spec: JobSpec, node_ids: frozenset[str]) -> bool:
        """Whether the nodes in use now other than these could hold the job if they were empty; O(nodes)."""
        rest = Counter(_capability(n) for n in self.nodes.values() if n.usable and n.node_id not in node_ids)
        return _why_never(rest, spec) is None


def _capability(node: Node) -> Capability:
    spec = node.spec
    return spec.gpu_type, node.record.capacity, spec.cpu_milli, spec.memory_mib


def _why_never(capabilities: Counter[Capability], spec: JobSpec) -> str | None:
    types = [c for c in capabilities if not spec.gpu_types or c[0] in spec.gpu_types]
    if not types:
        wanted = " or ".join(spec.gpu_types) or "any type"
        return f"gpu_type: the pool has no {wanted} node"
    slots = sum(capabilities[c] * _slots(c, spec) for c in types)
    if slots < spec.workers:
        return _too_few(spec, types, slots)
    if spec.remainder_gpus and slots == spec.workers and not any(_remainder_fits(c, spec) for c in types):
        return f"gpus: no room for the worker of {spec.remainder_gpus} GPUs beside {spec.workers} full ones"
    return None


def _node_class(key: NodeKey, node_ids: tuple[str, ...]) -> NodeClass:
    gpu_type, free, shares, cpu, memory, nvlink, rack, zone, capacity = key
    return NodeClass(
        gpu_type=gpu_type,
        free_gpus=free,
        node_ids=node_ids,
        shares=shares,
        free_cpu_milli=cpu,
        free_memory_mib=memory,
        nvlink=nvlink,
        rack=rack,
        zone=zone,
        total_gpus=capacity,
    )


def _slots(capability: Capability, spec: JobSpec) -> int:
    """Workers of the job that an empty node with this capability takes."""
    _, gpus, cpu, memory = capability
    slots = gpus * (WHOLE_GPU // spec.gpu_milli) if spec.gpu_milli < WHOLE_GPU else gpus // spec.gpus_per_worker
    if cpu and spec.cpu_milli:
        slots = min(slots, cpu // spec.cpu_milli)
    if memory and spec.memory_mib:
        slots = min(slots, memory // spec.memory_mib)
    return slots


def _remainder_fits(capability: Capability, spec: JobSpec) -> bool:
    _, gpus, cpu, memory = capability
    used = _slots(capability, spec)
    return (
        gpus - used * spec.gpus_per_worker >= spec.remainder_gpus
        and (not cpu or cpu - used * spec.cpu_milli >= spec.cpu_milli)
        and (not memory or memory - used * spec.memory_mib >= spec.memory_mib)
    )


def _too_few(spec: JobSpec, types: list[Capability], slots: int) -> str:
    biggest = max(gpus for _, gpus, _, _ in types)
    if spec.gpus_per_worker > biggest:
        return f"gpus: a worker needs {spec.gpus_per_worker} GPUs, the largest node has {biggest}"
    if spec.cpu_milli and all(cpu and cpu < spec.cpu_milli for _, _, cpu, _ in types):
        return f"cpu: a worker needs {spec.cpu_milli} milli-cores, the largest node has {max(c[2] for c in types)}"
    if spec.memory_mib and all(memory and memory < spec.memory_mib for _, _, _, memory in types):
        return f"memory: a worker needs {spec.memory_mib} MiB, the largest node has {max(c[3] for c in types)}"
    return f"gpus: {spec.workers} workers are needed, all nodes together could hold {slots}"
