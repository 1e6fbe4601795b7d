"""Why a candidate was not placed, for its owner: a code, then words.

Codes: invalid, type, avoided, affinity, share, mig, cpu, memory, gpus, one_type, topology, outranked; and from
`solve.py` window (beyond what one window handles) and failed (a bug). They are judged against the window's free
resources before anything was placed, with what all victims that the candidate may displace would free; `outranked`
means that the candidate alone would have fitted, or that no single resource is short.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import ge

import msgspec

from streamsched.core.model import TopologyLevel
from streamsched.core.problem import Candidate, NodeClass, Problem
from streamsched.core.room import domain_of

from .freed import Amounts, Freed
from .request import (
    NO_LIMIT,
    Request,
    device_slots,
    how_many,
    is_sane,
    is_share,
    joined,
    make_of,
    requests_of,
    workers_of,
)

Nodes = list[tuple[NodeClass, int]]
"""(equal nodes, how many of them); `node_ids` only where one of them is avoided or a victim is on it."""


def never_fits(problem: Problem, candidate: Candidate) -> str | None:
    """Why it would not fit even with all free resources of the window to itself; None when it may.

    For several candidates of one problem ask one `Judge`.
    """
    return Judge(problem).never_fits(candidate)


def outranked(problem: Problem, candidate: Candidate) -> str:
    """For a candidate that `never_fits` says nothing against."""
    if problem.victims:
        why = never_fits(msgspec.structs.replace(problem, victims=()), candidate)
        if why is not None:
            return f"outranked: would fit only where other runs make room, which are worth more; {why}"
    others = len(problem.candidates) - 1
    return f"outranked: would fit alone, but not beside what was placed of the window's {others} other jobs"


@dataclass
class _Inventory:
    """The nodes of a window, with what some victims would free."""

    kinds: list[NodeClass]
    """Nodes that differ, wherever they are; `node_ids` only of those that must be told apart."""
    classes: list[tuple[NodeClass, int, int]]
    """(class, number of its kind, nodes)."""
    domains: dict[TopologyLevel | None, dict[str, Counter[int]]] = field(default_factory=dict)
    """Level -> domain -> nodes by kind, as far as it was asked for. All nodes are in the domain "" of no level."""

    def by_domain(self, level: TopologyLevel | None) -> dict[str, Counter[int]]:
        if level not in self.domains:
            found: dict[str, Counter[int]] = defaultdict(Counter)
            for node_class, kind, count in self.classes:
                domain = "" if level is None else domain_of(level, node_class, "")
                if domain or level is None:
                    found[domain][kind] += count
            self.domains[level] = dict(found)
        return self.domains[level]

    def everywhere(self) -> Nodes:
        return [(self.kinds[kind], count) for kind, count in self.by_domain(None).get("", Counter()).items()]


class Judge:
    """Says what can never fit into a window.

    Looks at one chunk size at a time: a necessary condition, exact for gangs of equal workers.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._freed = Freed(problem)
        self._special = {n for c in problem.candidates for n in c.avoid_nodes} | set(self._freed.on)
        self._inventories: dict[int, _Inventory] = {}
        """By number of victims that may be displaced: they are those of lower levels."""

    def never_fits(self, candidate: Candidate) -> str | None:
        if not is_sane(candidate):
            return f"invalid: chunks {candidate.chunks} with {candidate.gpu_milli} thousandths of a device"
        level = candidate.topology.level if candidate.topology and candidate.topology.required else None
        workers = workers_of(candidate)
        if level is TopologyLevel.NODE and candidate.anti_affinity and workers > 1:
            return f"topology: {workers} workers on one node contradict the anti-affinity {candidate.anti_affinity}"
        needs = _summed(candidate)
        inventory = self._inventory(candidate)
        everywhere = inventory.everywhere()
        for request, count in needs:
            why = _why_not(request, count, everywhere)
            if why is not None:
                return why
        if level is TopologyLevel.NODE:
            return _why_not_on_one_node(candidate, everywhere)
        if level is None and not candidate.one_type:
            return None
        return _why_not_together(candidate, needs, inventory, level)

    def _inventory(self, candidate: Candidate) -> _Inventory:
        names = set() if is_share(candidate) else set(self._freed.below(candidate.level))
        if len(names) not in self._inventories:
            number: dict[tuple[object, ...], int] = {}
            kinds: list[NodeClass] = []
            classes = []
            for node_class, node_ids in self._told_apart():
                special = node_ids[0] in self._special
                own = self._without(node_class, node_ids[0], names) if special else node_class
                key = (*_what_it_has(own), node_ids[0] if special else "")
                if key not in number:
                    number[key] = len(kinds)
                    kinds.append(msgspec.structs.replace(own, node_ids=node_ids if special else ()))
                classes.append((own, number[key], len(node_ids)))
            self._inventories[len(names)] = _Inventory(kinds, classes)
        return self._inventories[len(names)]

    def _told_apart(self) -> Iterator[tuple[NodeClass, Sequence[str]]]:
        """(class, nodes of it): those that somebody avoids or a victim is on each alone."""
        for node_class in self._problem.classes:
            alone = self._special.intersection(node_class.node_ids) if self._special else set()
            rest = [n for n in node_class.node_ids if n not in alone] if alone else node_class.node_ids
            if rest:
                yield node_class, rest
            for node_id in sorted(alone):
                yield node_class, [node_id]

    def _without(self, node_class: NodeClass, node_id: str, names: set[str]) -> NodeClass:
        more: Amounts = self._freed.room(node_id, names)
        kept = tuple(
            name
            for name in node_class.affinity_taken
            if not (holders := self._freed.holders(node_id, name)) or not names.issuperset(holders)
        )
        cpu, memory = node_class.free_cpu_milli, node_class.free_memory_mib
        return msgspec.structs.replace(
            node_class,
            node_ids=(node_id,),
            free_gpus=node_class.free_gpus + more.gpus,
            free_cpu_milli=cpu if cpu == NO_LIMIT else cpu + more.cpu_milli,
            free_memory_mib=memory if memory == NO_LIMIT else memory + more.memory_mib,
            affinity_taken=kept,
        )


def _summed(candidate: Candidate) -> list[tuple[Request, int]]:
    """Equal workers together, also from several chunks."""
    counts: dict[Request, int] = {}
    for request, count in requests_of(candidate):
        counts[request] = counts.get(request, 0) + count
    return list(counts.items())


def _what_it_has(node: NodeClass) -> tuple[object, ...]:
    """All that matters of a class but where its nodes are."""
    return (
        make_of(node),
        node.free_gpus,
        node.shares,
        node.instances,
        node.free_cpu_milli,
        node.free_memory_mib,
        node.affinity_taken,
    )


def _why_not_together(
    candidate: Candidate, needs: list[tuple[Request, int]], inventory: _Inventory, level: TopologyLevel | None
) -> str | None:
    """On one type and within one domain, as far as that is asked for."""
    workers, kinds = workers_of(candidate), inventory.kinds
    room = [[how_many(r, node) if _is_open(r, node) else 0 for node in kinds] for r, _ in needs]
    counts = [count for _, count in needs]
    one_type = candidate.one_type and workers > 1
    best, most = "", -1
    for domain, nodes in sorted(inventory.by_domain(level).items()):
        seats: dict[str, list[int]] = defaultdict(lambda: [0] * len(needs))
        for kind, n in nodes.items():
            own = seats[kinds[kind].gpu_type if one_type else ""]
            for r, slots in enumerate(room):
                own[r] += slots[kind] * n
        for gpu_type, there in sorted(seats.items()):
            if all(map(ge, there, counts)):
                return None
            least = sum(map(min, there, counts))
            if least > most:
                best, most = " of ".join(filter(None, (domain, gpu_type))), least
    if level is not None and most < 0:
        return f"topology: no free node is in a {level.value}"
    code = "one_type" if level is None else "topology"
    within = " and ".join(
        (["on one type"] if one_type else []) + ([f"within one {level.value}"] if level is not None else [])
    )
    return f"{code}: needs {workers} workers {within}, {best} has room for {min(most, workers - 1)}"


def _room(request: Request, nodes: Nodes) -> int:
    return sum(how_many(request, node) * n for node, n in nodes if _is_open(request, node))


def _is_open(request: Request, node: NodeClass) -> bool:
    """Nodes that somebody avoids are told apart."""
    return not request.avoid_nodes or request.avoid_nodes.isdisjoint(node.node_ids)


def _why_not(request: Request, count: int, everywhere: Nodes) -> str | None:
    nodes = [(node, n) for node, n in everywhere if request.allows(node.gpu_type)]
    if not nodes:
        return f"type: no free node of type {_types(request)}"
    seats = _room(request, nodes)
    return None if seats >= count else _short_of(request, count, seats, [node for node, _ in nodes])


def _short_of(request: Request, count: int, seats: int, classes: list[NodeClass]) -> str:
    kind, of = _gpus(request), _types(request)
    if seats and not request.anti_affinity:
        return f"gpus: needs {count} workers with {kind} each on {of}, there is room for {seats}"
    if seats:
        name = request.anti_affinity
        return f"affinity: needs {count} nodes of {of} without a worker named {name}, there is room on {seats}"
    unsuited = _unsuited(request, classes)
    if unsuited is not None:
        return unsuited
    with_gpus = [c for c in classes if device_slots(request, c)]
    if not with_gpus:
        return _no_devices(request, classes)
    for code, unit, need, limits in (
        ("cpu", "milli-cores", request.cpu_milli, [c.free_cpu_milli for c in with_gpus]),
        ("memory", "MiB", request.memory_mib, [c.free_memory_mib for c in with_gpus]),
    ):
        if need and NO_LIMIT not in limits and max(limits) < need:
            return f"{code}: needs {need} {unit} beside {kind} on one node of {of}, best node has {max(limits)}"
    if request.anti_affinity and all(request.anti_affinity in c.affinity_taken for c in with_gpus):
        return f"affinity: each node that has {kind} of {of} has a worker named {request.anti_affinity} already"
    if all(how_many(request, c) == 0 for c in with_gpus):
        return f"cpu: no node of {of} has {request.cpu_milli} milli-cores and {request.memory_mib} MiB beside {kind}"
    return f"avoided: only nodes that refused it lately have {kind} of {of}"


def _unsuited(request: Request, classes: list[NodeClass]) -> str | None:
    """Why even an idle device would not do, on any of the nodes."""
    if any(request.suits(make_of(c)) for c in classes):
        return None
    of = _types(request)
    if request.mig_profile:
        return f"mig: no free node of {of} has the MIG profile {request.mig_profile}"
    if all(c.mig for c in classes):
        return f"share: needs {_gpus(request)}, all free nodes of {of} are under MIG"
    most = max(c.gpu_memory_mib for c in classes if not c.mig)
    if not most:
        return f"share: needs {request.gpu_memory_mib} MiB of a device, no free node of {of} declares device memory"
    return f"share: needs {request.gpu_memory_mib} MiB of a device of {of}, the largest has {most}"


def _no_devices(request: Request, classes: list[NodeClass]) -> str:
    kind, of = _gpus(request), _types(request)
    if request.whole:
        return f"gpus: needs {kind} on one node of {of}, best node has {max(c.free_gpus for c in classes)}"
    if request.mig_profile:
        return f"mig: no device of {of} has a free instance {request.mig_profile}, and none is idle"
    if request.gpu_memory_mib:
        free = [s * c.gpu_memory_mib // 1000 for c in classes if not c.mig for s in c.shares]
        return f"share: needs {kind} of {of}, the largest free share has {max(free, default=0)} MiB"
    share = max((s for c in classes if not c.mig for s in c.shares), default=0)
    return f"gpus: needs {kind} of {of}, the largest free share is {share}"


def _why_not_on_one_node(candidate: Candidate, everywhere: Nodes) -> str | None:
    requests, workers = requests_of(candidate), workers_of(candidate)
    request = requests[0][0]
    if workers == 1:
        return None
    nodes = [node for node, _ in everywhere if request.allows(node.gpu_type) and _is_open(request, node)]
    if request.whole:
        one = joined(requests)
        if any(how_many(one, node) for node in nodes):
            return None
        best = max((node.free_gpus for node in nodes), default=0)
        return (
            f"topology: needs {one.gpus} GPUs and the rest of {workers} workers on one node, best node has {best} GPUs"
        )
    best = max((how_many(request, node) for node in nodes), default=0)
    return None if best >= workers else f"topology: needs {workers} workers on one node, best node has room for {best}"


def _gpus(request: Request) -> str:
    if request.mig_profile:
        return f"a MIG instance {request.mig_profile}"
    if request.whole:
        return f"{request.gpus} free GPU{'s' if request.gpus > 1 else ''}"
    if request.gpu_memory_mib:
        return f"{request.gpu_memory_mib} MiB of a device"
    return f"{request.gpu_milli} thousandths of a device"


def _types(request: Request) -> str:
    return " or ".join(request.gpu_types) or "any type"
