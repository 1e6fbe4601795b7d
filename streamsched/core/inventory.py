"""The nodes of a pool, filed by what they can give now and by what they could ever give.

Both indexes change only with the node that changed, so that a window costs the number of *classes*, not of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from msgspec.structs import replace

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
        """Of all nodes, whatever is the matter with them."""
        self.usable: Counter[Capability] = Counter()
        """Of those that can be given runs now."""
        self._members: dict[NodeKey, dict[str, None]] = {}
        self._sorted: dict[NodeKey, NodeClass] = {}
        self._capability_of: dict[str, tuple[Capability, bool]] = {}

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
        counted = capability_of(node), node.usable
        if self._capability_of.get(node_id) != counted:
            self._uncount(node_id)
            self._capability_of[node_id] = counted
            self.capabilities[counted[0]] += 1
            if node.usable:
                self.usable[counted[0]] += 1

    def remove(self, node_id: str) -> None:
        """Forget a node that can give nothing."""
        node = self.nodes.pop(node_id)
        if node.key is not None:
            raise BrokenInvariant(f"node {node_id} is to be forgotten but still offers something")
        self._uncount(node_id)

    def _uncount(self, node_id: str) -> None:
        before = self._capability_of.pop(node_id, None)
        if before is not None:
            capability, usable = before
            self.capabilities -= Counter({capability: 1})
            self.usable -= Counter({capability: int(usable)})

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
        return why_never(self.capabilities, spec)

    def classes_without(self, node_ids: Collection[str]) -> tuple[NodeClass, ...]:
        """`classes` as if these nodes had nothing to give."""
        out: dict[NodeKey, set[str]] = {}
        for node_id in node_ids:
            node = self.nodes.get(node_id)
            if node is not None and node.key is not None:
                out.setdefault(node.key, set()).add(node_id)
        if not out:
            return self.classes()
        return tuple(
            replace(c, node_ids=tuple(n for n in c.node_ids if n not in out[key])) if key in out else c
            for key, c in zip(sorted(self._members), self.classes(), strict=True)
            if len(out.get(key, ())) < len(c.node_ids)
        )

    def holds_without(self, spec: JobSpec, node_ids: Iterable[str]) -> bool:
        """Whether the nodes that can be used now, other than these, could hold the job if they were empty."""
        rest = self.usable - Counter(capability_of(node) for node in self._usable_of(node_ids))
        return why_never(rest, spec) is None

    def would_hold(self, spec: JobSpec, node_ids: Iterable[str]) -> bool:
        """Whether these nodes, as far as they can be used now, could hold the job if they were empty."""
        return why_never(Counter(capability_of(node) for node in self._usable_of(node_ids)), spec) is None

    def _usable_of(self, node_ids: Iterable[str]) -> Iterator[Node]:
        nodes = (self.nodes.get(node_id) for node_id in node_ids)
        return (node for node in nodes if node is not None and node.usable)


Request = tuple[object, ...]


def request_kind(spec: JobSpec) -> Request:
    """Jobs with equal kinds fit on the same nodes."""
    return (
        spec.gpus_per_worker,
        spec.workers,
        spec.remainder_gpus,
        spec.gpu_milli,
        spec.gpu_types,
        spec.cpu_milli,
        spec.memory_mib,
    )


def capability_of(node: Node) -> Capability:
    spec = node.spec
    return spec.gpu_type, node.record.capacity, spec.cpu_milli, spec.memory_mib


def why_never(capabilities: Counter[Capability], spec: JobSpec) -> str | None:
    types = [c for c in capabilities if not spec.gpu_types or c[0] in spec.gpu_types]
    if not types:
        wanted = " or ".join(spec.gpu_types) or "any type"
        return f"gpu_type: the pool has no {wanted} node"
    slots = sum(capabilities[c] * slots_when_empty(c, spec) for c in types)
    if slots < spec.workers:
        return _too_few(spec, types, slots)
    if (
        spec.remainder_gpus
        and slots == spec.workers
        and not any(remainder_fits_when_empty(c, spec, slots_when_empty(c, spec)) for c in types)
    ):
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


def slots_when_empty(capability: Capability, spec: JobSpec) -> int:
    """Workers of the job that an empty node with this capability takes."""
    _, gpus, cpu, memory = capability
    slots = gpus * (WHOLE_GPU // spec.gpu_milli) if spec.gpu_milli < WHOLE_GPU else gpus // spec.gpus_per_worker
    if cpu and spec.cpu_milli:
        slots = min(slots, cpu // spec.cpu_milli)
    if memory and spec.memory_mib:
        slots = min(slots, memory // spec.memory_mib)
    return slots


def remainder_fits_when_empty(capability: Capability, spec: JobSpec, used: int) -> bool:
    """Whether the smaller worker fits beside `used` full ones."""
    _, gpus, cpu, memory = capability
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
