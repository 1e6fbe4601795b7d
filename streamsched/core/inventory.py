"""The nodes of a pool, filed by what they can give now and by what they could ever give.

Both indexes change only with the node that changed, so that a window costs the number of *classes*, not of nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from msgspec.structs import replace

from .capability import Capabilities, Capability, Domain, capability_of, domains_of
from .errors import BrokenInvariant
from .model import JobSpec
from .node import Node, NodeKey
from .problem import NodeClass
from .room import required_level

_Counted = tuple[Capability, tuple[Domain, ...], bool]
"""(what a node could hold, its domains, whether it can be used): as it was last counted."""


class Inventory:
    """`nodes` by id. Call `refile` after every change of a node."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.capabilities = Capabilities()
        """Of all nodes, whatever is the matter with them."""
        self.usable = Capabilities()
        """Of those that can be given runs now."""
        self.version = 0
        """Another number whenever a node gives something else than before."""
        self._members: dict[NodeKey, dict[str, None]] = {}
        self._sorted: dict[NodeKey, NodeClass] = {}
        self._counted: dict[str, _Counted] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def add(self, node: Node) -> None:
        self.nodes[node.node_id] = node
        self.refile(node)

    def refile(self, node: Node) -> None:
        """Bring both indexes up to date with `node`."""
        node_id, key = node.node_id, node.class_key()
        if key != node.key:
            self.version += 1
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
        counted = capability_of(node), domains_of(node.spec), node.usable
        if self._counted.get(node_id) != counted:
            self._uncount(node_id)
            self._counted[node_id] = counted
            capability, domains, usable = counted
            self.capabilities.add(capability, domains)
            if usable:
                self.usable.add(capability, domains)

    def remove(self, node_id: str) -> None:
        """Forget a node that can give nothing."""
        node = self.nodes.pop(node_id)
        if node.key is not None:
            raise BrokenInvariant(f"node {node_id} is to be forgotten but still offers something")
        self._uncount(node_id)

    def _uncount(self, node_id: str) -> None:
        before = self._counted.pop(node_id, None)
        if before is not None:
            capability, domains, usable = before
            self.capabilities.remove(capability, domains)
            if usable:
                self.usable.remove(capability, domains)

    def classes(self) -> tuple[NodeClass, ...]:
        """The classes that have something to give, in a fixed order."""
        for key in self._members.keys() - self._sorted.keys():
            self._sorted[key] = _node_class(key, tuple(sorted(self._members[key])))
        return tuple(self._sorted[key] for key in sorted(self._sorted))

    def never_fits(self, spec: JobSpec) -> str | None:
        """Why no set of nodes of this inventory, all empty, could hold the job; None when one can. Exact."""
        return self.capabilities.why_never(spec)

    def most_milli(self, spec: JobSpec) -> int:
        """Thousandths of GPUs that a tenant's quota must leave for the job."""
        return self.capabilities.most_milli(spec)

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
        return self.usable.why_never(spec, without=self._usable_of(node_ids)) is None

    def would_hold(self, spec: JobSpec, node_ids: Iterable[str]) -> bool:
        """Whether these nodes, as far as they can be used now, could hold the job if they were empty."""
        return Capabilities.of(self._usable_of(node_ids)).why_never(spec) is None

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
        spec.mixed_types,
        spec.gpu_memory_mib,
        spec.mig_profile,
        spec.cpu_milli,
        spec.memory_mib,
        required_level(spec),
        spec.anti_affinity,
    )


def _node_class(key: NodeKey, node_ids: tuple[str, ...]) -> NodeClass:
    room = key.room
    return NodeClass(
        gpu_type=room.gpu_type,
        free_gpus=room.idle,
        node_ids=node_ids,
        shares=room.shares,
        free_cpu_milli=room.cpu_milli,
        free_memory_mib=room.memory_mib,
        nvlink=key.nvlink,
        rack=key.rack,
        zone=key.zone,
        total_gpus=key.capacity,
        gpu_memory_mib=room.gpu_memory_mib,
        affinity_taken=room.affinity_taken,
        mig=room.mig,
        instances=room.instances,
    )
