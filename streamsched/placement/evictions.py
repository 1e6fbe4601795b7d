"""Which victims really have to go, and for whom.

The model says who is placed where and who is evicted. From that follow here the fewest evictions that will do, the
order in which assignments are carried out (lower tiers first) and `Assignment.after` of each: on each node an
assignment takes what is free first, then what victims free. Lower tiers may use less than higher ones and are served
first, so whatever they take, the others find enough whenever there is enough for all (see `capacity` in `milp.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from streamsched.core.problem import Assignment, Candidate

from .request import NO_LIMIT, requests_of
from .spots import Held, Victims

Amounts = tuple[int, int, int]
"""(GPUs, cpu_milli, memory_mib)."""


class _Load(NamedTuple):
    """What one assignment takes on one node that victims are on."""

    job_id: str
    tiers: int
    needs: Amounts
    name: str
    """Its anti-affinity name where a victim keeps that name on the node, else empty."""


def settle(
    assignments: Iterable[Assignment],
    candidates: dict[str, Candidate],
    victims: Victims,
    evicted: set[int],
    free_on: Callable[[str], Amounts],
    taken_on: dict[str, tuple[str, ...]],
) -> tuple[Assignment, ...]:
    """Assignments of whole devices in the order in which they can be carried out, with `after`.

    `free_on`: what is free on a node beside these assignments and the victims. `taken_on`: anti-affinity names of a
    node's class.
    """
    ordered = sorted(assignments, key=lambda a: victims.tiers_below(candidates[a.job_id].level))
    nodes = {
        node_id: _Node(free_on(node_id), victims.on[node_id])
        for node_id in sorted({n for a in ordered for n, _ in a.workers})
        if any(held.victim in evicted for held in victims.on.get(node_id, ()))
    }
    for assignment in ordered:
        candidate = candidates[assignment.job_id]
        for node_id, needs in _needs(candidate, assignment).items():
            if node_id in nodes:
                name = candidate.anti_affinity if candidate.anti_affinity in taken_on.get(node_id, ()) else ""
                tiers = victims.tiers_below(candidate.level)
                nodes[node_id].loads.append(_Load(candidate.job_id, tiers, needs, name))
    kept = _fewest(nodes.values(), victims, evicted)
    after: dict[str, set[int]] = defaultdict(set)
    for node in nodes.values():
        node.share_out(kept, after)
    return tuple(
        msgspec.structs.replace(a, after=tuple(sorted(victims.all[v].placement_id for v in after[a.job_id])))
        for a in ordered
    )


def _needs(candidate: Candidate, assignment: Assignment) -> dict[str, Amounts]:
    """By node id."""
    gpus: Counter[str] = Counter()
    workers: Counter[str] = Counter()
    flat = [request for request, count in requests_of(candidate) for _ in range(count)]
    for request, (node_id, _) in zip(flat, assignment.workers, strict=True):
        gpus[node_id] += request.gpus
        workers[node_id] += 1
    return {n: (gpus[n], workers[n] * candidate.cpu_milli, workers[n] * candidate.memory_mib) for n in gpus}


def _fewest(nodes: Iterable[_Node], victims: Victims, evicted: set[int]) -> set[int]:
    """Without the evictions that are not needed, the dearest first."""
    nodes = list(nodes)
    kept = {v for v in evicted if any(held.victim == v for node in nodes for held in node.held)}
    for v in sorted(kept, key=lambda v: (-victims.all[v].cost, v)):
        if all(node.suffices(kept - {v}) for node in nodes):
            kept.remove(v)
    return kept


class _Node:
    def __init__(self, free: Amounts, held: tuple[Held, ...]) -> None:
        self.free, self.held = free, held
        self.loads: list[_Load] = []
        """Lower tiers first."""

    def suffices(self, evicted: set[int]) -> bool:
        """Whether all loads fit when these victims go."""
        gone = [held for held in self.held if held.victim in evicted]
        for tiers in {load.tiers for load in self.loads}:
            for r in range(3):
                used = sum(load.needs[r] for load in self.loads if load.tiers <= tiers)
                freed = sum(held.amounts[r] for held in gone if held.tier < tiers)
                if self.free[r] != NO_LIMIT and used and used > self.free[r] + freed:
                    return False
        return all(
            held.victim in evicted
            for load in self.loads
            if load.name
            for held in self.held
            if held.anti_affinity == load.name
        )

    def share_out(self, evicted: set[int], after: dict[str, set[int]]) -> None:
        """Write down for each load whose resources it takes."""
        gone = [held for held in self.held if held.victim in evicted]
        for load in self.loads:
            after[load.job_id].update(held.victim for held in gone if load.name and held.anti_affinity == load.name)
        for r in range(3):
            if self.free[r] == NO_LIMIT:
                continue
            free = max(0, self.free[r])
            left = {i: held.amounts[r] for i, held in enumerate(gone)}
            for load in self.loads:
                own = after[load.job_id]
                taken = min(free, load.needs[r])
                free -= taken
                missing = load.needs[r] - taken
                usable = [i for i, held in enumerate(gone) if held.tier < load.tiers]
                for i in sorted(usable, key=lambda i: (gone[i].victim not in own, gone[i].tier, i)):
                    taken = min(missing, left[i])
                    if taken:
                        left[i] -= taken
                        missing -= taken
                        own.add(gone[i].victim)
