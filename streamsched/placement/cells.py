"""The node side of the model: cells and pools, and the way between concrete nodes and counts.

A *cell* is what the model has node variables for: a group of nodes with its packing patterns, or a single node with
its capacities written out as rows: where a group has too many patterns (cpu or memory bind and requests are diverse),
and where victims are. Both are exact. Of a group split into single nodes only as many are taken as there are workers
that could go there.

Workers are counted per pool of cells with patterns (`pools.py`), and per single node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamsched.core.problem import Assignment, Candidate

from .groups import Group, Slot, patterns
from .options import Demand, Option
from .pools import Pool, pools_of
from .request import requests_of
from .spots import Kind, Spot, Victims
from .stock import Workers


@dataclass(frozen=True)
class Cell:
    """`patterns` None: one node, its capacities as rows."""

    group: Group
    node_ids: tuple[str, ...]
    patterns: list[dict[Slot, int]] | None

    @property
    def columns(self) -> int:
        """Node variables: one per pattern, or one that says whether the single node is used."""
        return 1 if self.patterns is None else len(self.patterns)


@dataclass(frozen=True)
class Layout:
    """All that the model is about."""

    kinds: list[Kind]
    demands: list[Demand]
    cells: list[Cell]
    pools: list[Pool]
    victims: Victims

    @property
    def singles(self) -> list[int]:
        """Indexes of the cells that are one node."""
        return [c for c, cell in enumerate(self.cells) if cell.patterns is None]

    @property
    def size(self) -> int:
        """Variables of the model."""
        return (
            sum(len(demand.options) for demand in self.demands)
            + sum(cell.columns for cell in self.cells)
            + sum(len(pool.kinds) for pool in self.pools)
            + sum(len(self.cells[c].group.slot_of) + len(self.cells[c].group.held) for c in self.singles)
            + len(self.victims.all)
        )


@dataclass
class Plan:
    """Values of the model's variables: what a MIP start and an answer have in common."""

    chosen: set[tuple[int, int]] = field(default_factory=set)
    """(demand, option)."""
    pooled: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(kind, pool) -> workers."""
    single: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(kind, cell that is one node) -> workers."""
    nodes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(cell, pattern) -> nodes."""
    evicted: set[int] = field(default_factory=set)
    """Indexes of victims."""


def layout_of(
    kinds: list[Kind], demands: list[Demand], groups: list[Group], victims: Victims, patterns_max: int
) -> Layout:
    cells: list[Cell] = []
    known: dict[object, list[dict[Slot, int]] | None] = {}
    most = _Most(demands)
    for group in groups:
        if group.held:
            cells.append(Cell(group, group.node_ids, None))
            continue
        slots = most.per_slot(group.slot_of)
        key = (group.free, group.cpu_milli, group.memory_mib, tuple(sorted(slots.items())))
        if key not in known:
            known[key] = patterns(slots, group, patterns_max)
        ways = known[key]
        if ways is not None:
            cells.append(Cell(group, group.node_ids, ways))
        else:
            useful = group.node_ids[: sum(slots.values())]
            cells += [Cell(group, (node_id,), None) for node_id in useful]
    pools = pools_of((c, cell.group.gpu_type, cell.group.slot_of) for c, cell in enumerate(cells) if cell.patterns)
    return Layout(kinds, demands, cells, pools, victims)


class _Most:
    """How many workers could take each slot of a group, over the whole window."""

    def __init__(self, demands: list[Demand]) -> None:
        self._of_kind: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """(demand, option, workers)"""
        for j, demand in enumerate(demands):
            for o, option in enumerate(demand.options):
                for kind, count in option.needs:
                    self._of_kind[kind].append((j, o, count))
        self._known: dict[tuple[tuple[int, Slot], ...], dict[Slot, int]] = {}

    def per_slot(self, slot_of: dict[int, Slot]) -> dict[Slot, int]:
        key = tuple(sorted(slot_of.items()))
        if key not in self._known:
            workers: Counter[tuple[Slot, int, int]] = Counter()
            for kind, slot in key:
                for j, o, count in self._of_kind[kind]:
                    workers[slot, j, o] += count
            most: dict[tuple[Slot, int], int] = defaultdict(int)
            for (slot, j, _), count in workers.items():
                most[slot, j] = max(most[slot, j], count)
            total: Counter[Slot] = Counter()
            for (slot, _), count in most.items():
                total[slot] += count
            self._known[key] = dict(total)
        return self._known[key]


# ── from assignments to counts ─────────────────────────────────────────────────────────────────────────────────────


def plan_of(assignments: tuple[Assignment, ...], layout: Layout, spots: Iterable[Spot]) -> Plan:
    """Counts for concrete assignments of whole GPUs (the MIP start).

    Left out is what the model has no option for (a domain that was not offered).
    """
    plan = Plan()
    index = {demand.job_id: j for j, demand in enumerate(layout.demands)}
    on_node: dict[str, Counter[int]] = defaultdict(Counter)
    after: set[str] = set()
    used = {node_id for a in assignments for node_id, _ in a.workers}
    spot_of = {node_id: spot for spot in spots for node_id in used.intersection(spot.node_ids)}
    for assignment in assignments:
        j = index.get(assignment.job_id)
        if j is None:
            continue
        o = _option_taken(assignment.workers, layout, layout.demands[j], spot_of)
        if o is None:
            continue
        plan.chosen.add((j, o))
        after.update(assignment.after)
        for kind, node_id in _seated(assignment.workers, layout.demands[j].options[o]):
            on_node[node_id][kind] += 1
    plan.evicted = {v for v, victim in enumerate(layout.victims.all) if victim.placement_id in after}
    cell_of = _cells_by_node(layout.cells, on_node)
    pool_of = {(kind, c): q for q, pool in enumerate(layout.pools) for kind in pool.kinds for c in pool.cells}
    for node_id, load in sorted(on_node.items()):
        c = cell_of[node_id]
        cell = layout.cells[c]
        for kind, n in load.items():
            if cell.patterns is None:
                plan.single[kind, c] += n
            else:
                plan.pooled[kind, pool_of[kind, c]] += n
        plan.nodes[c, _pattern_above(cell, load)] += 1
    return plan


def _option_taken(workers: Workers, layout: Layout, demand: Demand, spot_of: dict[str, Spot]) -> int | None:
    """The best option that these workers make use of."""

    def suits(kind: Kind, node_id: str) -> bool:
        spot = spot_of.get(node_id)
        if spot is None or (kind.gpu_types and spot.gpu_type not in kind.gpu_types):
            return False
        return not kind.level or (bool(spot.domain(kind.level)) and kind.domain in ("", spot.domain(kind.level)))

    for o, option in enumerate(demand.options):
        if option.joined and len({node_id for node_id, _ in workers}) > 1:
            continue
        if all(suits(layout.kinds[k], node_id) for k, node_id in _seated(workers, option)):
            return o
    return None


def _seated(workers: Workers, option: Option) -> list[tuple[int, str]]:
    """(kind, node id) of each worker of the option."""
    if option.joined:
        return [(option.chunks[0][0], workers[0][0])]
    flat = [kind for kind, count in option.chunks for _ in range(count)]
    return [(kind, node_id) for kind, (node_id, _) in zip(flat, workers, strict=True)]


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


# ── from counts to assignments ─────────────────────────────────────────────────────────────────────────────────────


def expand(plan: Plan, candidates: dict[str, Candidate], layout: Layout) -> tuple[Assignment, ...]:
    """Concrete nodes for a plan: lowest node ids first, fullest patterns first, jobs in rank order.

    `Assignment.after` is left empty: what is freed for whom depends on the order (`evictions.py`).
    """
    seats = _Seats(plan, layout)
    chosen = dict(sorted(plan.chosen))
    assignments = []
    for j in sorted(chosen, key=lambda j: layout.demands[j].rank):
        demand, option = layout.demands[j], layout.demands[j].options[chosen[j]]
        candidate = candidates[demand.job_id]
        flat = [request.gpus for request, count in requests_of(candidate) for _ in range(count)]
        if option.joined:
            node_ids = [seats.take(option.chunks[0][0])] * len(flat)
        else:
            node_ids = [seats.take(kind) for kind, count in option.chunks for _ in range(count)]
        assignments.append(
            Assignment(
                job_id=candidate.job_id,
                attempt=candidate.attempt,
                workers=tuple(zip(node_ids, flat, strict=True)),
                score=candidate.score,
            )
        )
    return tuple(assignments)


class _Seats:
    """Node ids for the workers of each kind."""

    def __init__(self, plan: Plan, layout: Layout) -> None:
        slots: dict[tuple[int, Slot], list[str]] = {}
        for c, cell in enumerate(layout.cells):
            slots.update({(c, slot): ids[::-1] for slot, ids in _slots_in(c, cell, plan).items()})
        seats: dict[int, list[str]] = defaultdict(list)
        for q, pool in enumerate(layout.pools):  # inner pools first: their workers can go nowhere else
            free = [slots[c, pool.slot] for c in pool.cells if slots.get((c, pool.slot))]
            for kind in pool.kinds:
                for _ in range(plan.pooled[kind, q]):
                    while not free[0]:
                        free.pop(0)
                    seats[kind].append(free[0].pop())
        for (kind, c), n in sorted(plan.single.items()):
            seats[kind] += [layout.cells[c].node_ids[0]] * n
        self._left = {kind: iter(node_ids) for kind, node_ids in seats.items()}

    def take(self, kind: int) -> str:
        return next(self._left[kind])


def _slots_in(c: int, cell: Cell, plan: Plan) -> dict[Slot, list[str]]:
    """Node id of each slot of the chosen patterns."""
    found: dict[Slot, list[str]] = defaultdict(list)
    if cell.patterns is None:
        return found
    node_ids = iter(cell.node_ids)
    order = sorted(range(len(cell.patterns)), key=lambda p: (-_gpus(cell.patterns[p]), p))  # type: ignore[index]
    for p in order:
        for _ in range(plan.nodes[c, p]):
            node_id = next(node_ids)
            for slot, n in cell.patterns[p].items():
                found[slot] += [node_id] * n
    return found


def _gpus(pattern: dict[Slot, int]) -> int:
    return sum(slot[0] * n for slot, n in pattern.items())
