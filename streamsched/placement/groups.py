"""From spots to groups of nodes that the model need not tell apart, and the ways to fill one of their nodes.

A *group* is a set of nodes with the same GPU type, idle devices, and kinds that fit at all, and the same cpu and
memory **where these can bind**. In most groups they cannot: no set of fitting kinds that the devices can hold needs
more than the node has. There all kinds with the same number of GPUs become one *slot size*, and nodes that differ in
cpu, memory or shares fall into one group. Thus the model has a few dozen groups, however many nodes there are. A
domain that some option names is told apart by the kinds that fit: its own.

A node that a victim is on is a group of its own when some kind that fits may displace the victim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from .request import NO_LIMIT
from .spots import Held, Kind, Spot, room

_LEAVES_PER_PATTERN = 10
"""The search for maximal patterns gives up when it sees more fillings than this for each pattern allowed."""

Slot = tuple[int, int, int, str]
"""(GPUs, cpu_milli, memory_mib, anti-affinity name) of a worker in a group; cpu and memory are 0 where they cannot
bind. Of a name there is at most one worker on a node."""


@dataclass(frozen=True)
class Group:
    """Equal nodes. `slot_of[kind]` is the slot a worker of that kind takes; kinds that do not fit are absent."""

    gpu_type: str
    free: int
    cpu_milli: int
    memory_mib: int
    node_ids: tuple[str, ...]
    slot_of: dict[int, Slot]
    held: tuple[Held, ...] = ()
    """What victims hold on the node (a single one) that a kind in `slot_of` may displace."""
    taken: tuple[str, ...] = ()
    """Anti-affinity names that such victims keep on the node."""


def groups_of(spots: Iterable[Spot], kinds: list[Kind]) -> list[Group]:
    """The nodes on which at least one kind fits, in a fixed order."""
    among = _Index(kinds)
    members: dict[tuple[str, int, int, int, tuple[int, ...]], list[Spot]] = defaultdict(list)
    alone: list[Group] = []
    for spot in spots:
        fitting = [k for k in among.kinds_for(spot) if room(kinds[k], spot)]
        if not fitting:
            continue
        tiers = max(kinds[k].tiers for k in fitting)
        held = tuple(h for h in spot.held if h.tier < tiers)
        if held:
            alone.append(_victims_node(spot, fitting, kinds, held))
            continue
        cpu = _limit([(kinds[k].gpus, kinds[k].cpu_milli) for k in fitting], spot.free, spot.cpu_milli)
        memory = _limit([(kinds[k].gpus, kinds[k].memory_mib) for k in fitting], spot.free, spot.memory_mib)
        members[spot.gpu_type, spot.free, cpu, memory, tuple(fitting)].append(spot)
    groups = []
    for (gpu_type, free, cpu, memory, fits), same in sorted(members.items(), key=lambda item: item[0]):
        slots = {k: _slot(kinds[k], cpu=cpu != NO_LIMIT, memory=memory != NO_LIMIT) for k in fits}
        node_ids = tuple(sorted(n for spot in same for n in spot.node_ids))
        groups.append(Group(gpu_type, free, cpu, memory, node_ids, slots))
    return groups + sorted(alone, key=lambda group: group.node_ids)


class _Index:
    """Kinds by what they ask of type and domain, so that a spot is only compared with those that may fit."""

    def __init__(self, kinds: list[Kind]) -> None:
        self._by_scope: dict[tuple[str, str], list[int]] = defaultdict(list)
        for k, kind in enumerate(kinds):
            self._by_scope[kind.level, kind.domain].append(k)
        self._levels = sorted({level for level, _ in self._by_scope if level})

    def kinds_for(self, spot: Spot) -> list[int]:
        found = list(self._by_scope.get(("", ""), ()))
        for level in self._levels:
            name = spot.domain(level)
            if name:
                found += self._by_scope.get((level, ""), ())
                found += self._by_scope.get((level, name), ())
        return sorted(found)


def _slot(kind: Kind, *, cpu: bool, memory: bool) -> Slot:
    return kind.gpus, kind.cpu_milli if cpu else 0, kind.memory_mib if memory else 0, kind.anti_affinity


def _victims_node(spot: Spot, fitting: list[int], kinds: list[Kind], held: tuple[Held, ...]) -> Group:
    """Limits as they are: what is free depends on who is evicted."""
    names = {h.anti_affinity for h in held}
    return Group(
        gpu_type=spot.gpu_type,
        free=spot.free,
        cpu_milli=spot.cpu_milli if spot.cpu_milli == NO_LIMIT else max(0, spot.cpu_milli),
        memory_mib=spot.memory_mib if spot.memory_mib == NO_LIMIT else max(0, spot.memory_mib),
        node_ids=spot.node_ids,
        slot_of={k: _slot(kinds[k], cpu=True, memory=True) for k in fitting},
        held=held,
        taken=tuple(name for name in spot.taken if name in names),
    )


def _limit(uses: list[tuple[int, int]], free: int, limit: int) -> int:
    """The limit as far as it matters: NO_LIMIT when no packing of the devices reaches it.

    Amounts are multiples of their greatest common divisor, so the limit is rounded down to one: it excludes the same
    packings, and nodes whose limits differ by less fall together.
    """
    if limit == NO_LIMIT:
        return NO_LIMIT
    most = [0] * (free + 1)
    for gpus in range(1, free + 1):
        most[gpus] = max([most[gpus - 1], *(most[gpus - g] + use for g, use in uses if g <= gpus)])
    if most[free] <= limit:
        return NO_LIMIT
    step = gcd(*(use for _, use in uses))
    return limit // step * step


def patterns(slots: dict[Slot, int], group: Group, at_most: int) -> list[dict[Slot, int]] | None:
    """All maximal ways to fill one node of the group; None when there are more than `at_most`.

    `slots`: how many workers could take each slot at most. A way is maximal when no further worker fits. Every
    feasible filling of a node is a part of a maximal one, so these suffice when slots may stay empty.
    """
    sizes = sorted(slots, reverse=True)
    named = [s for s, size in enumerate(sizes) if size[3]]
    rivals = {s: [other for other in named if sizes[other][3] == sizes[s][3]] for s in named}
    found: list[dict[Slot, int]] = []
    seen = 0

    def extend(index: int, free: int, cpu: int, memory: int, chosen: list[int]) -> bool:
        nonlocal seen
        if index == len(sizes):
            seen += 1
            if not can_grow(chosen, free, cpu, memory):
                found.append({s: n for s, n in zip(sizes, chosen, strict=True) if n})
            return len(found) <= at_most and seen <= _LEAVES_PER_PATTERN * at_most
        gpus, slot_cpu, slot_memory, name = sizes[index]
        most = min(slots[sizes[index]], _room(sizes[index], free, cpu, memory))
        if name:
            most = min(most, 1 - sum(chosen[s] for s in rivals[index] if s < index))
        return all(
            extend(index + 1, free - n * gpus, cpu - n * slot_cpu, memory - n * slot_memory, [*chosen, n])
            for n in range(most, -1, -1)
        )

    def can_grow(chosen: list[int], free: int, cpu: int, memory: int) -> bool:
        return any(
            chosen[s] < slots[size]
            and _room(size, free, cpu, memory)
            and not (size[3] and any(chosen[rival] for rival in rivals[s]))
            for s, size in enumerate(sizes)
        )

    complete = extend(0, group.free, group.cpu_milli, group.memory_mib, [])
    return found if complete else None


def _room(slot: Slot, free: int, cpu: int, memory: int) -> int:
    """Workers of this slot that fit into what is left. Where a resource cannot bind the slot needs 0 of it."""
    gpus, slot_cpu, slot_memory, _ = slot
    room = free // gpus
    if slot_cpu:
        room = min(room, cpu // slot_cpu)
    if slot_memory:
        room = min(room, memory // slot_memory)
    return room
