"""From a window to the few numbers its model is about: kinds of workers, groups of nodes.

A *kind* is what one worker needs (GPUs, cpu, memory, types, nodes to avoid). Workers of one kind are
interchangeable, also between jobs, so the model counts workers per kind and not per job.

A *group* is a set of nodes that the model need not tell apart: the same GPU type, idle devices, and kinds that fit
at all, and the same cpu and memory **where these can bind**. In most groups they cannot: no set of fitting kinds
that the devices can hold needs more than the node has. There all kinds with the same number of GPUs become one
*slot size*, and nodes that differ in cpu, memory or shares fall into one group. Thus the model has a few dozen
groups, however many nodes there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from streamsched.core.problem import Candidate

from .request import NO_LIMIT, Request, requests_of, within
from .stock import Lot

_LEAVES_PER_PATTERN = 10
"""The search for maximal patterns gives up when it sees more fillings than this for each pattern allowed."""

Slot = tuple[int, int, int]
"""(GPUs, cpu_milli, memory_mib) of a worker in a group; cpu and memory are 0 where they cannot bind."""


@dataclass(frozen=True)
class Demand:
    """A candidate in the model: how many workers of which kind it needs, all or none."""

    job_id: str
    rank: int
    value: float
    needs: tuple[tuple[int, int], ...]
    """((kind, workers), ...), kinds ascending."""


@dataclass(frozen=True)
class Group:
    """Equal nodes. `slot_of[kind]` is the slot a worker of that kind takes; kinds that do not fit are absent."""

    gpu_type: str
    free: int
    cpu_milli: int
    memory_mib: int
    node_ids: tuple[str, ...]
    slot_of: dict[int, Slot]


def demands_of(candidates: Iterable[Candidate]) -> tuple[list[Request], list[Demand]]:
    """Kinds, sorted, and what each candidate needs of them."""
    wanted = [(rank, c, requests_of(c)) for rank, c in enumerate(candidates)]
    kinds = sorted({r for _, _, needs in wanted for r, _ in needs}, key=_order)
    number = {kind: k for k, kind in enumerate(kinds)}
    demands = []
    for rank, candidate, needs in wanted:
        total: dict[int, int] = defaultdict(int)
        for request, count in needs:
            total[number[request]] += count
        demands.append(Demand(candidate.job_id, rank, candidate.value, tuple(sorted(total.items()))))
    return kinds, demands


def _order(request: Request) -> tuple[object, ...]:
    return (*request[:5], tuple(sorted(request.avoid_nodes)))


def groups_of(lots: Iterable[Lot], kinds: list[Request]) -> list[Group]:
    """The nodes on which at least one kind fits, in a fixed order."""
    members: dict[tuple[object, ...], list[Lot]] = defaultdict(list)
    slots: dict[tuple[object, ...], dict[int, Slot]] = {}
    for lot in lots:
        fitting = [k for k, kind in enumerate(kinds) if _fits(kind, lot)]
        if not fitting:
            continue
        cpu = _limit([(kinds[k].gpus, kinds[k].cpu_milli) for k in fitting], lot.free, lot.cpu_milli)
        memory = _limit([(kinds[k].gpus, kinds[k].memory_mib) for k in fitting], lot.free, lot.memory_mib)
        key = (lot.gpu_type, lot.free, cpu, memory, tuple(fitting))
        members[key].append(lot)
        slots[key] = {
            k: (
                kinds[k].gpus,
                kinds[k].cpu_milli if cpu != NO_LIMIT else 0,
                kinds[k].memory_mib if memory != NO_LIMIT else 0,
            )
            for k in fitting
        }
    return [
        Group(
            gpu_type=lots[0].gpu_type,
            free=lots[0].free,
            cpu_milli=key[2],  # type: ignore[arg-type]
            memory_mib=key[3],  # type: ignore[arg-type]
            node_ids=tuple(sorted(n for lot in lots for n in lot.node_ids)),
            slot_of=slots[key],
        )
        for key, lots in sorted(members.items())
    ]


def _fits(kind: Request, lot: Lot) -> bool:
    return (
        kind.gpus <= lot.free
        and kind.allows(lot.gpu_type)
        and within(kind.cpu_milli, lot.cpu_milli)
        and within(kind.memory_mib, lot.memory_mib)
        and not (len(lot.node_ids) == 1 and lot.node_ids[0] in kind.avoid_nodes)
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
    found: list[dict[Slot, int]] = []
    seen = 0

    def extend(index: int, free: int, cpu: int, memory: int, chosen: list[int]) -> bool:
        nonlocal seen
        if index == len(sizes):
            seen += 1
            if not can_grow(chosen, free, cpu, memory):
                found.append({s: n for s, n in zip(sizes, chosen, strict=True) if n})
            return len(found) <= at_most and seen <= _LEAVES_PER_PATTERN * at_most
        gpus, slot_cpu, slot_memory = sizes[index]
        most = min(slots[sizes[index]], _room(sizes[index], free, cpu, memory))
        return all(
            extend(index + 1, free - n * gpus, cpu - n * slot_cpu, memory - n * slot_memory, [*chosen, n])
            for n in range(most, -1, -1)
        )

    def can_grow(chosen: list[int], free: int, cpu: int, memory: int) -> bool:
        return any(n < slots[s] and _room(s, free, cpu, memory) for s, n in zip(sizes, chosen, strict=True))

    complete = extend(0, group.free, group.cpu_milli, group.memory_mib, [])
    return found if complete else None


def _room(slot: Slot, free: int, cpu: int, memory: int) -> int:
    """Workers of this slot that fit into what is left. Where a resource cannot bind the slot needs 0 of it."""
    gpus, slot_cpu, slot_memory = slot
    room = free // gpus
    if slot_cpu:
        room = min(room, cpu // slot_cpu)
    if slot_memory:
        room = min(room, memory // slot_memory)
    return room
