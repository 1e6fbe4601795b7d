"""What the nodes of a pool could hold if they were empty: counted over the whole pool and by topology domain.

Kept up to date node by node. Domains with the same nodes in them are counted as one kind, so that judging a job costs
the number of different nodes and of different domains, not of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from . import mig
from .model import WHOLE_GPU, JobSpec, NodeSpec, TopologyLevel
from .node import Node
from .room import (
    NO_LIMIT,
    Room,
    allows,
    domain_of,
    gang_fits,
    gang_slots,
    required_level,
    share_milli,
    slots,
    wants_one_type,
)


class Capability(NamedTuple):
    """Of a node when it is empty. CPU and memory of 0: not a limit; device memory of 0: not declared."""

    gpu_type: str
    gpus: int
    cpu_milli: int = 0
    memory_mib: int = 0
    gpu_memory_mib: int = 0
    mig: str = ""

    def room(self) -> Room:
        return Room(
            gpu_type=self.gpu_type,
            idle=self.gpus,
            cpu_milli=self.cpu_milli or NO_LIMIT,
            memory_mib=self.memory_mib or NO_LIMIT,
            gpu_memory_mib=self.gpu_memory_mib,
            mig=self.mig,
        )


_T = TypeVar("_T")

Domain = tuple[TopologyLevel, str]
_DomainKind = tuple[tuple[Capability, int], ...]
"""(what, how many nodes), ascending: domains of equal kinds hold the same jobs."""
_NAMED_LEVELS = (TopologyLevel.NVLINK, TopologyLevel.RACK, TopologyLevel.ZONE)


def capability_of(node: Node) -> Capability:
    spec = node.spec
    return Capability(
        spec.gpu_type, node.record.capacity, spec.cpu_milli, spec.memory_mib, spec.gpu_memory_mib, spec.mig
    )


def domains_of(spec: NodeSpec) -> tuple[Domain, ...]:
    """Those that have a name."""
    named = ((level, domain_of(level, spec, spec.node_id)) for level in _NAMED_LEVELS)
    return tuple((level, name) for level, name in named if name)


class Capabilities:
    """Counters of nodes. `total`: of all of them."""

    def __init__(self) -> None:
        self.total: Counter[Capability] = Counter()
        self._domains: dict[Domain, Counter[Capability]] = {}
        self._kinds: dict[TopologyLevel, Counter[_DomainKind]] = {level: Counter() for level in _NAMED_LEVELS}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Capabilities) and vars(self) == vars(other)

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Capabilities:
        counted = cls()
        for node in nodes:
            counted.add(capability_of(node), domains_of(node.spec))
        return counted

    def add(self, capability: Capability, domains: Iterable[Domain]) -> None:
        self._count(capability, domains, 1)

    def remove(self, capability: Capability, domains: Iterable[Domain]) -> None:
        self._count(capability, domains, -1)

    def _count(self, capability: Capability, domains: Iterable[Domain], by: int) -> None:
        _add(self.total, capability, by)
        for domain in domains:
            kinds = self._kinds[domain[0]]
            held = self._domains.setdefault(domain, Counter())
            if held:
                _add(kinds, _kind(held), -1)
            _add(held, capability, by)
            if held:
                _add(kinds, _kind(held), 1)
            else:
                del self._domains[domain]

    def why_never(self, spec: JobSpec, without: Iterable[Node] = ()) -> str | None:
        """Why these nodes, less those named, could not hold the job if they were all empty; None when they could.

        Exact, by type and topology domain. Of several reasons the most general is told.
        """
        gone = [(capability_of(node), domains_of(node.spec)) for node in without]
        total = self.total - Counter(capability for capability, _ in gone) if gone else self.total
        allowed = [_Lot(c, count) for c, count in total.items() if allows(spec, c.gpu_type)]
        if not allowed:
            return f"gpu_type: the pool has no {' or '.join(spec.gpu_types) or 'any type'} node"
        if not gang_fits(_rooms(allowed), spec):
            return _too_few(spec, allowed)
        if not _fits_by_type(allowed, spec):
            best = max(gang_slots(_rooms(lots), spec) for lots in _by_type(allowed))
            return f"gpu_type: no single type has room for {_gang(spec)}, at best for {best}; mixed_types is not set"
        level = required_level(spec)
        if level is None:
            return None
        places = [
            [_Lot(c, count) for c, count in place if allows(spec, c.gpu_type)]
            for place in self._places(level, total, gone)
        ]
        if any(_fits_by_type(lots, spec) for lots in places):
            return None
        return _no_domain(spec, level, places)

    def most_milli(self, spec: JobSpec) -> int:
        """Thousandths of GPUs that the job takes at most, on whatever of these nodes it is placed.

        Only for a share by memory does that depend on the node.
        """
        if spec.mig_profile:
            return spec.workers * mig.MILLI.get(spec.mig_profile, WHOLE_GPU)
        if not spec.gpu_memory_mib:
            return spec.total_gpu_milli
        allowed = (c for c in self.total if allows(spec, c.gpu_type) and not c.mig)
        takes = (share_milli(spec, c.gpu_memory_mib) for c in allowed)
        return spec.workers * max((milli for milli in takes if milli <= WHOLE_GPU), default=WHOLE_GPU)

    def _places(
        self, level: TopologyLevel, total: Counter[Capability], gone: list[tuple[Capability, tuple[Domain, ...]]]
    ) -> Iterator[_DomainKind]:
        """What there is in each different domain of the level."""
        if level is TopologyLevel.NODE:
            yield from (((capability, 1),) for capability in total)
            return
        less: dict[Domain, Counter[Capability]] = {}
        for capability, domains in gone:
            for domain in domains:
                if domain[0] is level:
                    less.setdefault(domain, Counter())[capability] += 1
        kinds = Counter(self._kinds[level]) if less else self._kinds[level]
        for domain, taken in less.items():
            kinds[_kind(self._domains[domain])] -= 1
            kinds[_kind(self._domains[domain] - taken)] += 1
        yield from (kind for kind, count in kinds.items() if count > 0)


class _Lot(NamedTuple):
    capability: Capability
    nodes: int


def _add(counter: Counter[_T], key: _T, by: int) -> None:
    """Keeps no zeros, so that equal counts are equal counters."""
    left = counter[key] + by
    if left:
        counter[key] = left
    else:
        del counter[key]


def _kind(held: Counter[Capability]) -> _DomainKind:
    return tuple(sorted(held.items()))


def _rooms(lots: Iterable[_Lot]) -> list[tuple[Room, int]]:
    return [(lot.capability.room(), lot.nodes) for lot in lots]


def _by_type(lots: Iterable[_Lot]) -> list[list[_Lot]]:
    found: dict[str, list[_Lot]] = {}
    for lot in lots:
        found.setdefault(lot.capability.gpu_type, []).append(lot)
    return list(found.values())


def _fits_by_type(lots: list[_Lot], spec: JobSpec) -> bool:
    """Whether they hold the gang, on one type where it has to be one."""
    return any(gang_fits(_rooms(some), spec) for some in (_by_type(lots) if wants_one_type(spec) else [lots]))


# ── reasons ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _gang(spec: JobSpec) -> str:
    more = f" and the one of {spec.remainder_gpus} GPUs" if spec.remainder_gpus else ""
    return f"{spec.workers} worker{'s' * (spec.workers > 1)}{more}"


def _no_domain(spec: JobSpec, level: TopologyLevel, places: list[list[_Lot]]) -> str:
    if not any(places):
        return f"topology: no node that it may use names its {level} domain"
    parts = [some for lots in places for some in (_by_type(lots) if wants_one_type(spec) else [lots])]
    best = max(gang_slots(_rooms(some), spec) for some in parts)
    where = "node" if level is TopologyLevel.NODE else f"{level} domain"
    return f"topology: no {where} has room for {_gang(spec)}, the largest for {best}"


def _too_few(spec: JobSpec, lots: list[_Lot]) -> str:
    """The nodes together do not hold the gang: by which resource."""
    capabilities = [lot.capability for lot in lots]
    found = gang_slots(_rooms(lots), spec)
    if found >= spec.workers:
        if spec.anti_affinity:
            return f"anti_affinity: no node is left for the worker of {spec.remainder_gpus} GPUs"
        return f"gpus: no room for the worker of {spec.remainder_gpus} GPUs beside {spec.workers} full ones"
    why = _why_no_worker(spec, capabilities) if not any(slots(c.room(), spec) for c in capabilities) else None
    if why:
        return why
    if spec.anti_affinity:
        return f"anti_affinity: {spec.workers} nodes are needed, {found} could hold a worker"
    what = (
        f"mig: {spec.workers} instances of {spec.mig_profile}" if spec.mig_profile else f"gpus: {spec.workers} workers"
    )
    return f"{what} are needed, all nodes together could hold {found}"


def _why_no_worker(spec: JobSpec, capabilities: list[Capability]) -> str | None:
    """The resource of which no single node has enough for one worker; None when only several together are short."""
    with_devices = [c for c in capabilities if slots(c.room()._replace(cpu_milli=NO_LIMIT, memory_mib=NO_LIMIT), spec)]
    if not with_devices:
        return _why_no_devices(spec, capabilities)
    if spec.cpu_milli and all(c.cpu_milli and c.cpu_milli < spec.cpu_milli for c in with_devices):
        most = max(c.cpu_milli for c in with_devices)
        return f"cpu: a worker needs {spec.cpu_milli} milli-cores, the largest node has {most}"
    if spec.memory_mib and all(c.memory_mib and c.memory_mib < spec.memory_mib for c in with_devices):
        most = max(c.memory_mib for c in with_devices)
        return f"memory: a worker needs {spec.memory_mib} MiB, the largest node has {most}"
    return None


def _why_no_devices(spec: JobSpec, capabilities: list[Capability]) -> str:
    if spec.mig_profile:
        return f"mig: no node has devices for instances of {spec.mig_profile}"
    plain = [c for c in capabilities if not c.mig and c.gpus]
    most_memory = max((c.gpu_memory_mib for c in plain), default=0)
    if spec.gpu_memory_mib and plain and not most_memory:
        return "gpu_memory: no node declares the memory of its devices"
    if spec.gpu_memory_mib > most_memory and plain:
        return f"gpu_memory: a worker needs {spec.gpu_memory_mib} MiB of one device, the largest has {most_memory}"
    biggest = max(c.gpus for c in capabilities)
    if spec.gpus_per_worker > biggest:
        return f"gpus: a worker needs {spec.gpus_per_worker} GPUs, the largest node has {biggest}"
    return "gpus: devices under MIG are given whole or as instances, not in shares"
