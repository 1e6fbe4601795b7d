"""What victims hold, and what is left of what evicted ones freed.

An assignment that needs evictions takes what they free first, that of the highest level before that of lower ones:
the rest is then open to the most candidates. What remains of an evicted victim is open to candidates of a level above
the victim's, which then wait for it too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from streamsched.core.problem import Problem, Victim


class Amounts(NamedTuple):
    """Resources of one node."""

    gpus: int
    cpu_milli: int
    memory_mib: int

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(self.gpus + other.gpus, self.cpu_milli + other.cpu_milli, self.memory_mib + other.memory_mib)

    def minus(self, other: Amounts) -> Amounts:
        return Amounts(self.gpus - other.gpus, self.cpu_milli - other.cpu_milli, self.memory_mib - other.memory_mib)

    def least(self, other: Amounts) -> Amounts:
        return Amounts(*map(min, self, other))


NOTHING = Amounts(0, 0, 0)


class Freed:
    """The victims of a problem. Those whose cost is no finite number of at least 0 are never evicted."""

    def __init__(self, problem: Problem) -> None:
        self.victims: dict[str, Victim] = {}
        for victim in problem.victims:
            if math.isfinite(victim.cost) and victim.cost >= 0:
                self.victims.setdefault(victim.placement_id, victim)
        self.by_rank = problem.by_rank
        self.evicted: set[str] = set()
        self.effort = 0
        """Spent on looking for whom to evict; see `making_room.py`."""
        self.on: dict[str, list[str]] = defaultdict(list)
        """Node id -> victims there, highest level first: the order in which they are taken from."""
        self._left: dict[tuple[str, str], Amounts] = defaultdict(lambda: NOTHING)
        """(node id, victim) -> what nobody has taken of it."""
        for name, victim in sorted(self.victims.items(), key=lambda item: (-item[1].level, item[0])):
            for node_id, *amounts in victim.held:
                if name not in self.on[node_id]:
                    self.on[node_id].append(name)
                self._left[node_id, name] = self._left[node_id, name].plus(Amounts(*amounts))

    @property
    def most_gpus(self) -> int:
        """That victims hold on one node."""
        return max((sum(self._left[n, v].gpus for v in names) for n, names in self.on.items()), default=0)

    def below(self, level: int) -> list[str]:
        """Victims that a candidate of this level may displace, by name; also those that are evicted already."""
        return sorted(name for name, victim in self.victims.items() if victim.level < level)

    def cost(self, names: Iterable[str]) -> float:
        """Of evicting those of them that are not evicted yet."""
        return math.fsum(self.victims[name].cost for name in names if name not in self.evicted)

    def nodes(self, names: Iterable[str]) -> list[str]:
        return sorted({node_id for name in names for node_id, *_ in self.victims[name].held})

    def room(self, node_id: str, names: Collection[str]) -> Amounts:
        """What these victims would give on a node."""
        total = NOTHING
        for name in self.on.get(node_id, ()):
            if name in names:
                total = total.plus(self._left[node_id, name])
        return total

    def holders(self, node_id: str, anti_affinity: str) -> list[str]:
        """Victims that keep this anti-affinity name on the node."""
        return [v for v in self.on.get(node_id, ()) if self.victims[v].anti_affinity == anti_affinity]

    def take(self, node_id: str, need: Amounts, names: Collection[str]) -> tuple[Amounts, set[str]]:
        """Evict what is needed of `names` and take from them as far as it goes: (what is still needed, from whom)."""
        used: set[str] = set()
        for name in self.on.get(node_id, ()):
            if name not in names:
                continue
            got = need.least(self._left[node_id, name])
            if any(got):
                used.add(name)
                need = need.minus(got)
                self._left[node_id, name] = self._left[node_id, name].minus(got)
        self.evicted |= used
        return need, used

    def left_of_evicted(self, node_id: str) -> int:
        """GPUs that evictions freed on the node and nobody took."""
        return sum(self._left[node_id, v].gpus for v in self.on.get(node_id, ()) if v in self.evicted)
