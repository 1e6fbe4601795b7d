"""What placement is measured against: the value of a placement, the best one by brute force, a plain model per node.

Written from the contract alone (`streamsched/core/problem.py`): nothing of the engine is used but the weight of a
stranded GPU. For whole devices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyomo.environ as pyo
from pyomo.contrib.appsi.solvers import Highs

from streamsched.core.model import TopologyLevel
from streamsched.core.problem import TOPOLOGY_BONUS, Ask, Assignment, Candidate, NodeClass, Problem, Victim
from streamsched.placement.objective import fragmentation_weight

UNLIMITED = 10**9


def mix_of(candidates: Iterable[Candidate]) -> tuple[tuple[Ask, int], ...]:
    """`Problem.mix` of a pool whose jobs ask for what these do."""
    asks = Counter(
        Ask(c.chunks[0][0], c.gpu_milli, c.gpu_memory_mib, c.cpu_milli, c.memory_mib, tuple(sorted(set(c.gpu_types))))
        for c in candidates
        if not c.mig_profile
    )
    return tuple(asks.most_common())


def types_of(p: Problem, job: Candidate) -> dict[str, float]:
    """Allowed GPU type -> speed."""
    speeds = dict(job.speeds)
    return {c.gpu_type: speeds.get(c.gpu_type, 1.0) for c in p.classes if c.gpu_type in (job.gpu_types or [c.gpu_type])}


def domain(level: TopologyLevel, node_id: str, node: NodeClass) -> str:
    return {
        TopologyLevel.NODE: node_id,
        TopologyLevel.NVLINK: node.nvlink,
        TopologyLevel.RACK: node.rack,
        TopologyLevel.ZONE: node.zone,
    }[level]


def within_one(level: TopologyLevel, nodes: Sequence[tuple[str, NodeClass]]) -> bool:
    names = {domain(level, node_id, node) for node_id, node in nodes}
    return len(names) == 1 and names != {""}


def worth(p: Problem, job: Candidate, nodes: Sequence[tuple[str, NodeClass]]) -> float | None:
    """Of the job with its workers on these nodes; None where it must not be so, whatever is free."""
    speeds = types_of(p, job)
    if any(node.gpu_type not in speeds or node_id in job.avoid_nodes for node_id, node in nodes):
        return None
    if job.one_type and len({node.gpu_type for _, node in nodes}) > 1:
        return None
    if job.anti_affinity and len({node_id for node_id, _ in nodes}) < len(nodes):
        return None
    value = job.value * min(speeds[node.gpu_type] for _, node in nodes) / max(speeds.values())
    if job.topology is None:
        return value
    kept = within_one(job.topology.level, nodes)
    if job.topology.required:
        return value if kept else None
    return value * (1 + TOPOLOGY_BONUS) if kept else value


def sizes(job: Candidate) -> list[int]:
    """GPUs of each worker."""
    return [gpus for gpus, count in job.chunks for _ in range(count)]


def nodes_of(p: Problem) -> dict[str, NodeClass]:
    return {n: c for c in p.classes for n in c.node_ids}


def value_of(p: Problem, assignments: Sequence[Assignment]) -> float:
    """The objective of a placement that is taken to be allowed."""
    nodes, jobs = nodes_of(p), {c.job_id: c for c in p.candidates}
    evicted = {name for a in assignments for name in a.after}
    total = -sum(v.cost for v in p.victims if v.placement_id in evicted)
    left = {n: c.free_gpus for n, c in nodes.items()}
    for victim in p.victims:
        for node_id, gpus, _, _ in victim.held:
            left[node_id] += gpus if victim.placement_id in evicted else 0
    for assignment in assignments:
        found = worth(p, jobs[assignment.job_id], [(n, nodes[n]) for n, _ in assignment.workers])
        assert found is not None
        total += found
        for node_id, gpus in assignment.workers:
            left[node_id] -= gpus
    used = {n for a in assignments for n, _ in a.workers}
    return total - fragmentation_weight(p) * sum(left[n] for n in used)


# ── brute force ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Seating:
    """One way to place one job: what it takes of each node (by number), and its worth."""

    worth: float
    takes: tuple[tuple[int, int, int, int], ...]
    """((node, GPUs, cpu, memory), ...)."""


def seatings(p: Problem, job: Candidate) -> list[Seating]:
    """All ways that differ, best first, whatever is free."""
    nodes = list(nodes_of(p).items())
    found: set[Seating] = set()
    choices = [itertools.combinations_with_replacement(range(len(nodes)), count) for _, count in job.chunks]
    for chosen in itertools.product(*choices):
        where = [i for chunk in chosen for i in chunk]
        value = worth(p, job, [nodes[i] for i in where])
        if value is None:
            continue
        takes = []
        for i in sorted(set(where)):
            gpus = sum(size for size, at in zip(sizes(job), where, strict=True) if at == i)
            takes.append((i, gpus, job.cpu_milli * where.count(i), job.memory_mib * where.count(i)))
        found.add(Seating(value, tuple(takes)))
    return sorted(found, key=lambda s: (-s.worth, s.takes))


def best_objective(p: Problem) -> float:
    """The optimum over every set of evictions and every way to seat every set of jobs."""
    ways = {c.job_id: seatings(p, c) for c in p.candidates}
    return max(_best_with(p, ways, evicted) for evicted in _subsets(p.victims))


def _subsets(victims: tuple[Victim, ...]) -> Iterator[tuple[Victim, ...]]:
    for count in range(len(victims) + 1):
        yield from itertools.combinations(victims, count)


def _best_with(p: Problem, ways: dict[str, list[Seating]], evicted: tuple[Victim, ...]) -> float:
    nodes = list(nodes_of(p).items())
    number = {node_id: i for i, (node_id, _) in enumerate(nodes)}
    weight, levels = fragmentation_weight(p), sorted({c.level for c in p.candidates})
    room: dict[tuple[int, int], list[int]] = {}
    for i, (_, c) in enumerate(nodes):
        limits = [UNLIMITED if free == -1 else free for free in (c.free_gpus, c.free_cpu_milli, c.free_memory_mib)]
        for level in levels:  # what jobs of this level and lower ones may take together
            room[i, level] = [*limits]
    freed = [c.free_gpus for _, c in nodes]
    for victim in evicted:
        for node_id, *held in victim.held:
            freed[number[node_id]] += held[0]
            for level in levels:
                if victim.level < level:
                    before = room[number[node_id], level]
                    room[number[node_id], level] = [a + b for a, b in zip(before, held, strict=True)]
    taken = [0] * len(nodes)
    names: set[tuple[int, str]] = set()

    def named_ok(job: Candidate, i: int) -> bool:
        if (i, job.anti_affinity) in names:
            return False
        if job.anti_affinity not in nodes[i][1].affinity_taken:
            return True
        holders = [
            v for v in p.victims if v.anti_affinity == job.anti_affinity and nodes[i][0] in [h[0] for h in v.held]
        ]
        return bool(holders) and all(v in evicted and v.level < job.level for v in holders)

    def fits(job: Candidate, seating: Seating) -> bool:
        return all(
            (not job.anti_affinity or named_ok(job, i))
            and all(
                not need or need <= left
                for level in levels
                if level >= job.level
                for need, left in zip(needs, room[i, level], strict=True)
            )
            for i, *needs in seating.takes
        )

    def take(job: Candidate, seating: Seating, sign: int) -> None:
        for i, *needs in seating.takes:
            taken[i] += sign * needs[0]
            for level in levels:
                if level >= job.level:
                    room[i, level] = [a - sign * b for a, b in zip(room[i, level], needs, strict=True)]
            if job.anti_affinity:
                (names.add if sign > 0 else names.discard)((i, job.anti_affinity))

    most = [max((s.worth for s in ways[c.job_id]), default=0.0) for c in p.candidates]
    best = -float("inf")

    def search(at: int, value: float) -> None:
        nonlocal best
        if value + sum(most[at:]) <= best:
            return
        if at == len(p.candidates):
            stranded = sum(free - used for free, used in zip(freed, taken, strict=True) if used)
            best = max(best, value - weight * stranded)
            return
        job = p.candidates[at]
        for seating in ways[job.job_id]:
            if fits(job, seating):
                take(job, seating, 1)
                search(at + 1, value + seating.worth)
                take(job, seating, -1)
        search(at + 1, value)

    search(0, -sum(v.cost for v in evicted))
    return best


# ── a plain model, node by node ──────────────────────────────────────────────────────────────────────────────────────


def plain_optimum(p: Problem) -> float:
    """The optimum of a model with a variable per way, worker size and node; proved by HiGHS with a gap of 0."""
    m = pyo.ConcreteModel()
    nodes, jobs = nodes_of(p), {c.job_id: c for c in p.candidates}
    ways = {(j, w): way for j, job in jobs.items() for w, way in enumerate(_ways(p, job))}
    seats = [
        (j, w, i, n)
        for (j, w), (_, where) in ways.items()
        for i, (gpus, _) in enumerate(jobs[j].chunks)
        for n in where
        if gpus <= nodes[n].free_gpus + sum(h[1] for v in p.victims for h in v.held if h[0] == n)
    ]
    m.choose = pyo.Var(list(ways), domain=pyo.Binary)
    m.seat = pyo.Var(seats, domain=pyo.NonNegativeIntegers)
    m.evict = pyo.Var([v.placement_id for v in p.victims], domain=pyo.Binary)
    m.used = pyo.Var(list(nodes), domain=pyo.Binary)
    m.stranded = pyo.Var(list(nodes), domain=pyo.NonNegativeReals)
    m.rows = pyo.ConstraintList()
    for j in jobs:
        _row(m, pyo.quicksum(m.choose[key] for key in ways if key[0] == j) <= 1)
    by_row: dict[tuple[str, int, int], list[Any]] = {}
    by_node: dict[str, list[tuple[Candidate, int, Any]]] = {n: [] for n in nodes}
    for j, w, i, n in seats:
        by_row.setdefault((j, w, i), []).append(m.seat[j, w, i, n])
        by_node[n].append((jobs[j], jobs[j].chunks[i][0], m.seat[j, w, i, n]))
    for j, w in ways:
        for i, (_, count) in enumerate(jobs[j].chunks):
            _row(m, pyo.quicksum(by_row.get((j, w, i), [])) - count * m.choose[j, w] == 0)
    for n, node in nodes.items():
        _node_rows(m, p, n, node, by_node[n])
    weight = fragmentation_weight(p)
    m.objective = pyo.Objective(
        expr=pyo.quicksum(value * m.choose[key] for key, (value, _) in ways.items())
        - pyo.quicksum(v.cost * m.evict[v.placement_id] for v in p.victims)
        - weight * pyo.quicksum(m.stranded[n] for n in nodes),
        sense=pyo.maximize,
    )
    solver = Highs()
    solver.config.mip_gap = 0.0
    solver.highs_options = {"mip_abs_gap": 0.0, "threads": 1}
    solver.solve(m)
    return float(pyo.value(m.objective))


def _row(m: Any, row: Any) -> None:
    """Rows without variables hold: what is free is not below zero."""
    if row is not True:
        m.rows.add(row)


def _ways(p: Problem, job: Candidate) -> Iterator[tuple[float, list[str]]]:
    """(worth, nodes): types no slower than one of them, or one type; in one domain or anywhere."""
    speeds = types_of(p, job)
    fastest = max(speeds.values(), default=1.0)
    sets = [({t}, s) for t, s in speeds.items()]
    if not job.one_type:
        sets = [({t for t, own in speeds.items() if own >= s}, s) for s in set(speeds.values())]
    for types, speed in sets:
        nodes = [(n, c) for n, c in nodes_of(p).items() if c.gpu_type in types and n not in job.avoid_nodes]
        value = job.value * speed / fastest
        if job.topology is None or not job.topology.required:
            yield value, [n for n, _ in nodes]
        if job.topology is None:
            continue
        level = job.topology.level
        for name in sorted({domain(level, n, c) for n, c in nodes} - {""}):
            bonus = 0.0 if job.topology.required else TOPOLOGY_BONUS
            yield value * (1 + bonus), [n for n, c in nodes if domain(level, n, c) == name]


def _node_rows(m: Any, p: Problem, n: str, node: NodeClass, seats: list[tuple[Candidate, int, Any]]) -> None:
    held = {v.placement_id: h[1:] for v in p.victims for h in v.held if h[0] == n}
    for r, free in enumerate((node.free_gpus, node.free_cpu_milli, node.free_memory_mib)):
        if free == -1:
            continue
        for level in sorted({job.level for job, _, _ in seats}):
            takes = [(gpus, job.cpu_milli, job.memory_mib)[r] * seat for job, gpus, seat in seats if job.level <= level]
            more = [
                held[v.placement_id][r] * m.evict[v.placement_id]
                for v in p.victims
                if v.placement_id in held and v.level < level
            ]
            _row(m, pyo.quicksum(takes) - pyo.quicksum(more) <= free)
    for name in sorted({job.anti_affinity for job, _, _ in seats if job.anti_affinity}):
        _row(m, pyo.quicksum(seat for job, _, seat in seats if job.anti_affinity == name) <= 1)
        if name in node.affinity_taken:
            holders = [v for v in p.victims if v.placement_id in held and v.anti_affinity == name]
            for job, _, seat in seats:
                if job.anti_affinity == name and not (holders and all(v.level < job.level for v in holders)):
                    _row(m, seat <= 0)
                elif job.anti_affinity == name:
                    for v in holders:
                        _row(m, seat - m.evict[v.placement_id] <= 0)
    most = node.free_gpus + sum(h[0] for h in held.values())
    taken = pyo.quicksum(gpus * seat for _, gpus, seat in seats)
    there = node.free_gpus + pyo.quicksum(h[0] * m.evict[name] for name, h in held.items())
    _row(m, taken - most * m.used[n] <= 0)
    _row(m, m.stranded[n] - (there - taken) + most * (1 - m.used[n]) >= 0)
