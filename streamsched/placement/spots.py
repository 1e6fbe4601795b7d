"""The nodes of a window as the model looks at them, and how many workers one of them takes.

A *kind* is what one worker needs, with the restrictions of the option it belongs to (types, topology domain) and the
victims it may displace. A *spot* is a set of nodes with equal free resources; a node that a victim is on is a spot of
its own. Domain names that no candidate asks about are left out, so that nodes of many racks remain one spot.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from streamsched.core import mig
from streamsched.core.model import TopologyLevel
from streamsched.core.problem import Problem, Victim

from .request import NO_LIMIT, within
from .stock import Lot

WIDE_TO_NARROW = (TopologyLevel.ZONE, TopologyLevel.RACK, TopologyLevel.NVLINK)
"""Levels that have domains. `Spot.domains` is in this order."""
SOME_DOMAIN = "*"
"""Instead of a domain name that nobody asks for by name."""


class Kind(NamedTuple):
    """One worker of an option. Empty: no restriction."""

    gpus: int
    cpu_milli: int
    memory_mib: int
    gpu_types: tuple[str, ...] = ()
    level: str = ""
    """Topology level at which its node has to be in a domain."""
    domain: str = ""
    """Name of that domain; empty: any."""
    anti_affinity: str = ""
    tiers: int = 0
    """It may displace victims of the lowest so many of the levels that victims have."""
    gpu_memory_mib: int = 0
    avoid_nodes: tuple[str, ...] = ()
    share: bool = False
    """It stands for a share of a device: not under MIG."""
    mig_profile: str = ""
    """It stands for an instance of this profile."""


class Held(NamedTuple):
    """What one victim holds on one node."""

    victim: int
    """Index in `Victims.all`."""
    tier: int
    gpus: int
    cpu_milli: int
    memory_mib: int
    anti_affinity: str

    @property
    def amounts(self) -> tuple[int, int, int]:
        """(GPUs, cpu_milli, memory_mib)."""
        return self.gpus, self.cpu_milli, self.memory_mib


class Victims:
    """The victims of a problem that may be evicted, by index. None whose cost is more than `at_most`."""

    def __init__(self, problem: Problem, at_most: float = math.inf) -> None:
        known: dict[str, Victim] = {}
        for victim in problem.victims:
            if 0 <= victim.cost <= at_most and math.isfinite(victim.cost):
                known.setdefault(victim.placement_id, victim)
        self.all = list(known.values())
        self.levels = sorted({v.level for v in self.all})
        self.on: dict[str, tuple[Held, ...]] = {}
        """By node id."""
        on: dict[str, list[Held]] = defaultdict(list)
        for v, victim in enumerate(self.all):
            tier = self.levels.index(victim.level)
            for node_id, gpus, cpu_milli, memory_mib in victim.held:
                on[node_id].append(Held(v, tier, gpus, cpu_milli, memory_mib, victim.anti_affinity))
        self.on = {node_id: tuple(held) for node_id, held in on.items()}

    def tiers_below(self, level: int) -> int:
        """How many of the victims' levels are below that of a candidate."""
        return sum(1 for own in self.levels if own < level)


@dataclass(frozen=True)
class Spot:
    gpu_type: str
    free: int
    cpu_milli: int
    memory_mib: int
    gpu_memory_mib: int
    node_ids: tuple[str, ...]
    domains: tuple[str, str, str]
    """Names by `WIDE_TO_NARROW`; empty: in none, `SOME_DOMAIN`: in one that is not asked for by name."""
    taken: tuple[str, ...]
    """Anti-affinity names that have a worker on each of the nodes."""
    held: tuple[Held, ...]
    mig: str
    alone: str
    """The node's id where it is treated as one of its own (somebody avoids it, or a victim is on it)."""

    def domain(self, level: str) -> str:
        return self.domains[WIDE_TO_NARROW.index(TopologyLevel(level))]


def spots_of(lots: Iterable[Lot], problem: Problem, victims: Victims) -> list[Spot]:
    """One per lot, and one per node that somebody avoids or a victim is on."""
    special = {n for c in problem.candidates for n in c.avoid_nodes} | set(victims.on)
    spots = []
    for lot in lots:
        alone = [n for n in lot.node_ids if n in special] if special else []
        rest = tuple(n for n in lot.node_ids if n not in special) if alone else lot.node_ids
        base = Spot(
            gpu_type=lot.gpu_type,
            free=max(0, lot.free),
            cpu_milli=lot.cpu_milli,
            memory_mib=lot.memory_mib,
            gpu_memory_mib=lot.gpu_memory_mib,
            node_ids=rest,
            domains=(lot.zone, lot.rack, lot.nvlink),
            taken=lot.affinity_taken,
            held=(),
            mig=lot.mig,
            alone="",
        )
        if rest and base.free:
            spots.append(base)
        spots += [replace(base, node_ids=(n,), held=victims.on.get(n, ()), alone=n) for n in alone]
    return spots


def merged(spots: Iterable[Spot], rename: Callable[[int, str], str], names: frozenset[str]) -> list[Spot]:
    """Spots that are equal once domains are renamed (level index, name) and only `names` matter for anti-affinity."""
    members: dict[tuple[object, ...], list[Spot]] = defaultdict(list)
    for spot in spots:
        domains = tuple(rename(i, name) if name else "" for i, name in enumerate(spot.domains))
        taken = tuple(sorted(names.intersection(spot.taken)))
        key = (spot.gpu_type, spot.free, spot.cpu_milli, spot.memory_mib, spot.gpu_memory_mib, domains, taken, spot.mig)
        members[*key, spot.alone].append(spot)
    return [
        replace(
            same[0],
            node_ids=tuple(n for spot in same for n in spot.node_ids),
            domains=key[5],  # type: ignore[arg-type]
            taken=key[6],  # type: ignore[arg-type]
        )
        for key, same in sorted(members.items(), key=lambda item: item[0])
    ]


def room(kind: Kind, spot: Spot) -> int:
    """Workers of one kind that one node of the spot takes when nothing else is placed."""
    if kind.gpu_types and spot.gpu_type not in kind.gpu_types:
        return 0
    if kind.level:
        name = spot.domain(kind.level)
        if not name or (kind.domain and name != kind.domain):
            return 0
    if (kind.share and spot.mig) or (kind.mig_profile and not mig.per_device(spot.mig, kind.mig_profile)):
        return 0
    if kind.gpu_memory_mib > spot.gpu_memory_mib or (spot.alone and spot.alone in kind.avoid_nodes):
        return 0
    if kind.anti_affinity in spot.taken and kind.anti_affinity and not _can_free(kind, spot):
        return 0
    free, cpu_milli, memory_mib = limits(spot, kind.tiers)
    if not (kind.gpus <= free and within(kind.cpu_milli, cpu_milli) and within(kind.memory_mib, memory_mib)):
        return 0
    workers = 1 if kind.anti_affinity else free // kind.gpus
    if kind.cpu_milli and cpu_milli != NO_LIMIT:
        workers = min(workers, cpu_milli // kind.cpu_milli)
    if kind.memory_mib and memory_mib != NO_LIMIT:
        workers = min(workers, memory_mib // kind.memory_mib)
    return workers


def limits(spot: Spot, tiers: int) -> tuple[int, int, int]:
    """(GPUs, cpu, memory) of a node with all victims of the lowest `tiers` levels gone."""
    free, cpu_milli, memory_mib = spot.free, spot.cpu_milli, spot.memory_mib
    for held in spot.held:
        if held.tier < tiers:
            free += held.gpus
            cpu_milli += held.cpu_milli if cpu_milli != NO_LIMIT else 0
            memory_mib += held.memory_mib if memory_mib != NO_LIMIT else 0
    return free, cpu_milli, memory_mib


def _can_free(kind: Kind, spot: Spot) -> bool:
    """Whether victims keep the kind's anti-affinity name on the node, and all of them may go."""
    holders = [held for held in spot.held if held.anti_affinity == kind.anti_affinity]
    return bool(holders) and all(held.tier < kind.tiers for held in holders)
