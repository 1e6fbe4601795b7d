"""A large window as several smaller ones that can be solved at the same time; `solve_in_parts` joins their answers.

POP (Narayanan et al., "Solving Large-Scale Granular Resource Allocation Problems Efficiently with POP", SOSP 2021)
deals resources and clients out at random into k subproblems and joins their answers. Here nothing is random: nodes are
dealt out evenly by GPU type, jobs in rank order to the part that has most left of what they may use. What belongs
together stays together: nodes of a topology domain that some candidate asks for, nodes that one victim holds.

What a division loses: jobs that fit only on nodes of several parts (no part is made so small that a job which fits the
window fits none of them), and the choice between jobs that were dealt to different parts. `python -m benchmarks parts`
measures it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from streamsched.core.model import TopologyLevel
from streamsched.core.problem import Candidate, NodeClass, Problem

from .reasons import Judge
from .worth import rates

Node = tuple[str, NodeClass]


def split(problem: Problem, parts: int) -> tuple[Problem, ...]:
    """At most `parts` problems with every node, victim and candidate in exactly one of them; equal input, equal parts.

    Fewer when nodes cannot be told apart so often or when a candidate that fits the window would fit no part; one,
    then `problem` itself, when it cannot be divided. Candidates that do not fit the window are in the first.
    """
    units = _units(problem)
    fits_all = _Fits((problem,))
    for count in range(min(parts, len(units)), 1, -1):
        rooms = tuple(_part(problem, nodes) for nodes in _deal_nodes(units, count))
        dealt = _deal_candidates(problem, rooms, fits_all)
        if dealt is not None:
            divided = (msgspec.structs.replace(r, candidates=c) for r, c in zip(rooms, dealt, strict=True))
            return tuple(part for part in divided if part.candidates)
    return (problem,)


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _units(problem: Problem) -> list[list[Node]]:
    """Nodes that have to stay together, by their first."""
    levels = sorted({c.topology.level for c in problem.candidates if c.topology} - {TopologyLevel.NODE})
    nodes = {node_id: c for c in problem.classes for node_id in c.node_ids}
    together = _Together()
    for node_id, where in nodes.items():
        together.add(node_id)
        for level in levels:
            if domain := getattr(where, level.value):
                together.join(node_id, (level, domain))
    for victim in problem.victims:
        held = [node_id for node_id, *_ in victim.held if node_id in nodes]
        for node_id in held[1:]:
            together.join(held[0], node_id)
    units: dict[object, list[Node]] = defaultdict(list)
    for node_id in sorted(nodes):
        units[together.name_of(node_id)].append((node_id, nodes[node_id]))
    return list(units.values())


class _Together:
    """Disjoint sets (union-find with path halving)."""

    def __init__(self) -> None:
        self._above: dict[object, object] = {}

    def add(self, item: object) -> None:
        self._above.setdefault(item, item)

    def name_of(self, item: object) -> object:
        above = self._above
        while above[item] != item:
            above[item] = above[above[item]]
            item = above[item]
        return item

    def join(self, one: object, other: object) -> None:
        self.add(one)
        self.add(other)
        self._above[self.name_of(other)] = self.name_of(one)


def _deal_nodes(units: Sequence[Sequence[Node]], count: int) -> list[list[Node]]:
    """Largest unit first, each to the part that has least of its GPU types (longest processing time first)."""
    parts: list[list[Node]] = [[] for _ in range(count)]
    free: list[Counter[str]] = [Counter() for _ in range(count)]
    amounts = [_free_by_type(unit) for unit in units]
    order = sorted(range(len(units)), key=lambda u: (-sum(amounts[u].values()), u))
    for number in order:
        types = amounts[number]
        least = min(range(count), key=lambda p: (sum(free[p][t] for t in types), len(parts[p]), p))
        parts[least] += units[number]
        free[least] += types
    return parts


def _free_by_type(nodes: Iterable[Node]) -> Counter[str]:
    """GPU type -> free thousandths of devices; full nodes count a little, to be spread as well."""
    found: Counter[str] = Counter()
    for _, where in nodes:
        instances = sum(count for _, count in where.instances)
        found[where.gpu_type] += 1000 * where.free_gpus + sum(where.shares) + 100 * instances + 1
    return found


def _part(problem: Problem, nodes: Iterable[Node]) -> Problem:
    """The classes and victims of these nodes, no candidates yet."""
    here = {node_id for node_id, _ in nodes}
    kept = ((c, tuple(n for n in c.node_ids if n in here)) for c in problem.classes)
    return msgspec.structs.replace(
        problem,
        candidates=(),
        classes=tuple(msgspec.structs.replace(c, node_ids=ids) for c, ids in kept if ids),
        victims=tuple(v for v in problem.victims if any(node_id in here for node_id, *_ in v.held)),
    )


# ── candidates ───────────────────────────────────────────────────────────────────────────────────────────────────────


class _Fits:
    """Which of some problems a candidate fits alone, asked once per kind of candidate."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = problems
        self._judges: dict[tuple[int, tuple[str, ...]], Judge] = {}
        self._known: dict[Candidate, tuple[int, ...]] = {}

    def of(self, candidate: Candidate) -> tuple[int, ...]:
        kind = msgspec.structs.replace(candidate, job_id="", attempt=0, value=0.0, score=0.0)
        if kind not in self._known:
            self._known[kind] = tuple(n for n in range(len(self._problems)) if self._fits(n, candidate))
        return self._known[kind]

    def _fits(self, number: int, candidate: Candidate) -> bool:
        key = number, candidate.avoid_nodes  # a judge tells nodes apart by what its candidates avoid
        if key not in self._judges:
            self._judges[key] = Judge(msgspec.structs.replace(self._problems[number], candidates=(candidate,)))
        return self._judges[key].never_fits(candidate) is None


def _deal_candidates(problem: Problem, rooms: Sequence[Problem], fits_all: _Fits) -> list[tuple[Candidate, ...]] | None:
    """In rank order, each to the part with most left of the GPU types it may use; None if one fits no part."""
    fits = _Fits(rooms)
    left = [_free_by_type((n, c) for c in room.classes for n in c.node_ids) for room in rooms]
    dealt: list[list[Candidate]] = [[] for _ in rooms]
    for candidate in problem.candidates:
        able = fits.of(candidate)
        if not able and fits_all.of(candidate):
            return None
        most = max(able, key=lambda p: (sum(left[p][t] for t in rates(candidate, left[p])), -p), default=0)
        dealt[most].append(candidate)
        if able:
            _take(left[most], candidate)
    return [tuple(candidates) for candidates in dealt]


def _take(left: Counter[str], candidate: Candidate) -> None:
    """What it will use, in equal shares of the types it may use."""
    types = sorted(rates(candidate, left))
    share = 1 if candidate.gpu_milli == 1000 and not (candidate.gpu_memory_mib or candidate.mig_profile) else 0
    wanted = candidate.total_gpus * (1000 if share else min(candidate.gpu_milli, 500))
    for gpu_type in types:
        left[gpu_type] -= wanted // len(types)
