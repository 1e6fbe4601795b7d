"""The node side of the model: cells, and the way between concrete nodes and counts.

A *cell* is what the model has variables for: a group of nodes with its packing patterns, or, where a group has too
many patterns (cpu or memory bind and requests are diverse), a single node of it with its capacities written out as
rows. Both are exact. Of a group split into single nodes only as many are taken as there are workers that could go
there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamsched.core.problem import Assignment, Candidate

from .groups import Demand, Group, Slot, patterns
from .request import Request, requests_of
from .stock import Workers


@dataclass(frozen=True)
class Cell:
    """`patterns` None: one node, its capacities as rows."""

    group: Group
    node_ids: tuple[str, ...]
    slots: dict[Slot, int]
    """Workers that could take each slot, over the whole window."""
    patterns: list[dict[Slot, int]] | None

    @property
    def columns(self) -> int:
        """Node variables: one per pattern, or one that says whether the single node is used."""
        return 1 if self.patterns is None else len(self.patterns)


@dataclass
class Plan:
    """Values of the model's variables: what a MIP start and an answer have in common."""

    placed: set[int] = field(default_factory=set)
    """Indexes of demands."""
    workers: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(kind, cell) -> workers."""
    nodes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(cell, pattern) -> nodes."""


def cells_of(groups: list[Group], demands: list[Demand], patterns_max: int) -> list[Cell]:
    total: Counter[int] = Counter()
    for demand in demands:
        total.update(dict(demand.needs))
    cells = []
    for group in groups:
        slots: Counter[Slot] = Counter()
        for kind, slot in sorted(group.slot_of.items()):
            slots[slot] += total[kind]
        ways = patterns(slots, group, patterns_max)
        if ways is not None:
            cells.append(Cell(group, group.node_ids, dict(slots), ways))
        else:
            useful = group.node_ids[: slots.total()]
            cells += [Cell(group, (node_id,), dict(slots), None) for node_id in useful]
    return cells


def plan_of(
    assignments: Iterable[Assignment],
    candidates: dict[str, Candidate],
    kinds: list[Request],
    demands: list[Demand],
    cells: list[Cell],
) -> Plan:
    """Counts for concrete assignments of whole GPUs (the MIP start)."""
    plan = Plan()
    number = {kind: k for k, kind in enumerate(kinds)}
    index = {demand.job_id: j for j, demand in enumerate(demands)}
    on_node: dict[str, Counter[int]] = defaultdict(Counter)
    for assignment in assignments:
        plan.placed.add(index[assignment.job_id])
        needs = requests_of(candidates[assignment.job_id])
        flat = [number[request] for request, count in needs for _ in range(count)]
        for kind, (node_id, _) in zip(flat, assignment.workers, strict=True):
            on_node[node_id][kind] += 1
    cell_of = _cells_by_node(cells, on_node)
    for node_id, load in sorted(on_node.items()):
        c = cell_of[node_id]
        for kind, n in load.items():
            plan.workers[kind, c] += n
        plan.nodes[c, _pattern_above(cells[c], load)] += 1
    return plan


def _cells_by_node(cells: list[Cell], on_node: Iterable[str]) -> dict[str, int]:
    """The cell of each node in use. Nodes of a split group stand for each other: those in use take its first cells."""
    used = set(on_node)
    found: dict[str, int] = {}
    split: dict[int, list[int]] = defaultdict(list)
    for c, cell in enumerate(cells):
        if cell.patterns is None:
            split[id(cell.group)].append(c)
        else:
            found.update(dict.fromkeys(used.intersection(cell.node_ids), c))
    for members in split.values():
        nodes = sorted(used.intersection(cells[members[0]].group.node_ids))
        found.update(zip(nodes, members, strict=False))
    return found


def _pattern_above(cell: Cell, load: Counter[int]) -> int:
    """A pattern that the load of one node is a part of; there is one for every feasible load."""
    if cell.patterns is None:
        return 0
    slots: Counter[Slot] = Counter()
    for kind, n in load.items():
        slots[cell.group.slot_of[kind]] += n
    return next(p for p, way in enumerate(cell.patterns) if all(way.get(s, 0) >= n for s, n in slots.items()))


def expand(
    plan: Plan,
    candidates: dict[str, Candidate],
    kinds: list[Request],
    demands: list[Demand],
    cells: list[Cell],
) -> tuple[Assignment, ...]:
    """Concrete nodes for a plan: lowest node ids first, fullest patterns first, jobs in rank order."""
    seats: dict[int, list[str]] = {k: [] for k in range(len(kinds))}
    for c, cell in enumerate(cells):
        for kind, node_ids in _seats_in(c, cell, plan).items():
            seats[kind] += node_ids
    left = {kind: iter(node_ids) for kind, node_ids in seats.items()}
    number = {kind: k for k, kind in enumerate(kinds)}
    assignments = []
    for demand in sorted((demands[j] for j in plan.placed), key=lambda d: d.rank):
        candidate = candidates[demand.job_id]
        workers: Workers = tuple(
            (next(left[number[request]]), request.gpus)
            for request, count in requests_of(candidate)
            for _ in range(count)
        )
        assignments.append(
            Assignment(
                job_id=candidate.job_id,
                attempt=candidate.attempt,
                workers=workers,
                score=candidate.score,
            )
        )
    return tuple(assignments)


def _seats_in(c: int, cell: Cell, plan: Plan) -> dict[int, list[str]]:
    """kind -> node id of each of its workers in this cell."""
    waiting = {kind: plan.workers[kind, c] for kind in sorted(cell.group.slot_of) if plan.workers[kind, c]}
    if cell.patterns is None:
        return {kind: [cell.node_ids[0]] * n for kind, n in waiting.items()}
    seats: dict[int, list[str]] = {kind: [] for kind in waiting}
    node_ids = iter(cell.node_ids)
    order = sorted(range(len(cell.patterns)), key=lambda p: (-_gpus(cell.patterns[p]), p))  # type: ignore[index]
    for p in order:
        for _ in range(plan.nodes[c, p]):
            node_id = next(node_ids)
            room = Counter(cell.patterns[p])
            for kind in waiting:
                slot = cell.group.slot_of[kind]
                n = min(room[slot], waiting[kind])
                room[slot] -= n
                waiting[kind] -= n
                seats[kind] += [node_id] * n
    return seats


def _gpus(pattern: dict[Slot, int]) -> int:
    return sum(slot[0] * n for slot, n in pattern.items())
