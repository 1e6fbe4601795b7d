"""Which victims greedy evicts for a candidate that found no room.

All victims that it may displace are tried first: when that does not let it in, nobody is evicted. Else the fewest that
do, cheapest per GPU first (by rank: the last in rank first), and of those again the ones that turn out not to be needed
are left alone. A candidate for one node is tried on each node of a victim as well. It must gain more than the evictions
cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from streamsched.core.model import TopologyLevel
from streamsched.core.problem import Candidate

from .freed import Amounts
from .request import is_share, requests_of, workers_of
from .stock import Log, Stock, Workers, needs_by_node
from .ways import Way

EFFORT_MAX = 20_000
"""Nodes looked at with a victim gone, summed over the tries of one window; beyond that nobody is evicted any more."""


class _Plan(NamedTuple):
    gain: float
    workers: Workers
    needs: dict[str, Amounts]
    names: set[str]


def make_room(stock: Stock, candidate: Candidate) -> tuple[Workers, tuple[str, ...]] | None:
    """Where the candidate goes and the victims that have to go first, taken from the stock; None: nothing is worth it.

    Shares of devices never have anybody evicted.
    """
    if is_share(candidate) or not stock.freed.below(candidate.level):
        return None
    planner = _Planner(stock, candidate)
    best = max(planner.plans(), key=lambda plan: plan.gain, default=None)
    if best is None or best.gain <= 0:
        return None
    return best.workers, stock.take_with(candidate, best.needs, best.names)


class _Planner:
    def __init__(self, stock: Stock, candidate: Candidate) -> None:
        self.stock, self.candidate = stock, candidate
        self.requests = requests_of(candidate)
        self.names = stock.freed.below(candidate.level)

    def plans(self) -> Iterable[_Plan]:
        """The best that is found for each way of placing the candidate."""
        best = 0.0
        for way in self.stock.ways(self.candidate, self.requests):
            if way.worth <= best:
                continue
            plan = self._plan(way)
            if plan is not None:
                best = max(best, plan.gain)
                yield plan

    def _plan(self, way: Way) -> _Plan | None:
        everybody = self._try(way, set(self.names))
        if everybody is None:
            return None
        found = [everybody, self._shortest(way)]
        if workers_of(self.candidate) == 1 or way.level is TopologyLevel.NODE:
            freed = self.stock.freed
            found += [
                self._try(way, set(freed.on[node_id]).intersection(self.names), [node_id])
                for node_id in freed.nodes(self.names)
            ]
        best = max((plan for plan in found if plan), key=lambda plan: plan.gain)
        return self._spare(way, best)

    def _shortest(self, way: Way) -> _Plan | None:
        """With as few victims as will do, cheapest per GPU first."""
        freed = self.stock.freed

        def dearness(name: str) -> tuple[float, str]:
            gpus = 1 if freed.by_rank else max(1, sum(gpus for _, gpus, _, _ in freed.victims[name].held))
            return freed.cost([name]) / gpus, name

        ordered = sorted(self.names, key=dearness)
        low, high, best = 0, len(ordered), None
        while low < high:
            middle = (low + high) // 2
            plan = self._try(way, set(ordered[:middle]))
            if plan is None:
                low = middle + 1
            else:
                high, best = middle, plan
        return best

    def _spare(self, way: Way, plan: _Plan) -> _Plan:
        """Without those that are not needed when the workers go elsewhere."""
        for name in self._dearest_first(plan.names):
            if name in plan.names and name not in self.stock.freed.evicted:
                plan = self._try(way, plan.names - {name}) or plan
        return plan

    def _try(self, way: Way, names: set[str], nodes: Sequence[str] | None = None) -> _Plan | None:
        """Place the candidate as if these victims were gone (from these nodes); nothing stays taken."""
        nodes = self.stock.freed.nodes(names) if nodes is None else nodes
        if self.stock.freed.effort > EFFORT_MAX:
            return None
        self.stock.freed.effort += 1 + len(nodes)
        log: Log = []
        try:
            for node_id in nodes:
                self.stock.enlarge(node_id, names, log)
            workers = self.stock.attempt(self.requests, way, log)
        finally:
            self.stock.put_back(log)
        if workers is None:
            return None
        needs = needs_by_node(self.candidate, workers)
        kept = self._needed(needs, names)
        return _Plan(way.worth - self.stock.freed.cost(kept), workers, needs, kept)

    def _needed(self, needs: dict[str, Amounts], names: set[str]) -> set[str]:
        """Those without which the workers would not fit where they are."""
        kept = {name for name in names if any(node_id in needs for node_id, *_ in self.stock.freed.victims[name].held)}
        for name in self._dearest_first(kept):
            fewer = kept - {name}
            if all(
                self.stock.suffices(node_id, need, self.candidate.anti_affinity, fewer)
                for node_id, need in needs.items()
            ):
                kept = fewer
        return kept

    def _dearest_first(self, names: Iterable[str]) -> list[str]:
        freed = self.stock.freed
        return sorted(names, key=lambda name: (-freed.cost([name]), name))
