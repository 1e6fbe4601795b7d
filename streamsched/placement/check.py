"""Is this solution allowed? Knows the problem and the solution, and nothing of how solutions are made.

Assignments are carried out in their order, each worker on the device that the core picks (for a share or a MIG
instance the fullest device with room, else an idle one). So they are replayed here in that order by that rule: one
pass, no search. Idle devices, cpu and memory are only summed: an assignment takes from what is free and from what the
victims of its `after` free, and there is a way to share these out if and only if no set of assignments needs more than
all that its members may take from (Hall).

It shares no code with greedy, the model or the core on purpose; of the core's MIG only the table is read.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from streamsched.core.mig import TABLES
from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Solution, Victim

_DEVICE = 1000
_RESOURCES = ("GPUs", "milli-cores", "MiB")


def check(problem: Problem, solution: Solution) -> list[str]:
    """Violations in words; empty when the solution can be carried out as it stands."""
    violations = []
    if solution.window != problem.window:
        violations.append(f"solution of window {solution.window} for window {problem.window}")
    ledger = _Ledger(problem)
    violations += _carry_out(problem, solution.assignments, ledger)[1]
    violations += ledger.needless_evictions() + _out_of_order(problem, solution)
    for job_id in dict.fromkeys(a.job_id for a in solution.assignments):
        if job_id in solution.unplaced:
            violations.append(f"job {job_id} is both placed and explained as unplaced")
    return violations


def _out_of_order(problem: Problem, solution: Solution) -> list[str]:
    """In strict order, who is placed behind one that is not."""
    if not problem.in_order:
        return []
    placed = {a.job_id for a in solution.assignments}
    order = list(dict.fromkeys(c.job_id for c in problem.candidates))
    first = next((at for at, job_id in enumerate(order) if job_id not in placed), len(order))
    return [f"job {j} is placed, job {order[first]} before it is not" for j in order[first:] if j in placed]


def sift(problem: Problem, assignments: Iterable[Assignment]) -> tuple[tuple[Assignment, ...], list[str]]:
    """The assignments that can be carried out in this order, and what is wrong with each of the others."""
    return _carry_out(problem, assignments, _Ledger(problem))


def _carry_out(
    problem: Problem, assignments: Iterable[Assignment], ledger: _Ledger
) -> tuple[tuple[Assignment, ...], list[str]]:
    candidates = {c.job_id: c for c in problem.candidates}
    classes, victims = ledger.classes, ledger.victims
    kept: dict[str, Assignment] = {}
    violations: list[str] = []
    for assignment in assignments:
        candidate = candidates.get(assignment.job_id)
        if candidate is None:
            violations.append(f"job {assignment.job_id} is not a candidate")
            continue
        found = [f"job {candidate.job_id} is placed more than once"] if candidate.job_id in kept else []
        found = found or _gang(candidate, assignment) + _nodes(candidate, assignment, classes)
        found = found or _together(candidate, assignment, classes) + _after(candidate, assignment, victims)
        found = found or ledger.carry_out(candidate, assignment)
        if found:
            violations += found
        else:
            kept[candidate.job_id] = assignment
    return tuple(kept.values()), violations


def _gang(candidate: Candidate, assignment: Assignment) -> list[str]:
    """All workers of the gang, each of its size, for the attempt that was asked for."""
    job_id, found = candidate.job_id, []
    if assignment.attempt != candidate.attempt:
        found.append(f"job {job_id}: attempt {assignment.attempt}, asked for {candidate.attempt}")
    wanted = [gpus for gpus, count in candidate.chunks for _ in range(count)]
    got = [gpus for _, gpus in assignment.workers]
    if wanted != got:
        found.append(f"job {job_id}: workers of {got} GPUs, asked for {wanted}")
    return found


def _nodes(candidate: Candidate, assignment: Assignment, nodes: Mapping[str, NodeClass]) -> list[str]:
    found = []
    for node_id in sorted({n for n, _ in assignment.workers}):
        if node_id not in nodes:
            found.append(f"job {candidate.job_id}: no node {node_id}")
        elif candidate.gpu_types and nodes[node_id].gpu_type not in candidate.gpu_types:
            found.append(
                f"job {candidate.job_id}: node {node_id} has {nodes[node_id].gpu_type},"
                f" asked for {' or '.join(candidate.gpu_types)}"
            )
        if node_id in candidate.avoid_nodes:
            found.append(f"job {candidate.job_id}: node {node_id} is to be avoided")
    return found


def _together(candidate: Candidate, assignment: Assignment, classes: Mapping[str, NodeClass]) -> list[str]:
    """One type where that is wanted, one domain where that is required, names apart."""
    found, where = [], f"job {candidate.job_id}"
    node_ids = [node_id for node_id, _ in assignment.workers]
    types = sorted({classes[node_id].gpu_type for node_id in node_ids})
    if candidate.one_type and len(types) > 1:
        found.append(f"{where}: workers on {' and '.join(types)}, asked for one type")
    if candidate.topology is not None and candidate.topology.required:
        level = candidate.topology.level.value
        domains = {node_id if level == "node" else getattr(classes[node_id], level) for node_id in node_ids}
        if len(domains) > 1 or "" in domains:
            found.append(f"{where}: workers in {sorted(domains)}, has to be within one {level}")
    if candidate.anti_affinity:
        crowded = sorted(node_id for node_id, count in Counter(node_ids).items() if count > 1)
        found += [f"{where}: several workers named {candidate.anti_affinity} on node {n}" for n in crowded]
    return found


def _after(candidate: Candidate, assignment: Assignment, victims: Mapping[str, Victim]) -> list[str]:
    """Known victims, each once, of a lower level, on its nodes; none for shares of devices."""
    found, where = [], f"job {candidate.job_id}"
    if assignment.after and _is_part(candidate):
        found.append(f"{where}: nobody makes room for shares of devices")
    node_ids = {node_id for node_id, _ in assignment.workers}
    for name, times in Counter(assignment.after).items():
        victim = victims.get(name)
        if times > 1:
            found.append(f"{where}: waits for {name} {times} times")
        if victim is None:
            found.append(f"{where}: waits for {name}, which is no victim")
            continue
        if victim.level >= candidate.level:
            found.append(f"{where}: of level {candidate.level}, waits for {name} of level {victim.level}")
        if node_ids.isdisjoint(node_id for node_id, *_ in victim.held):
            found.append(f"{where}: waits for {name}, which is on none of its nodes")
    return found


def _is_part(candidate: Candidate) -> bool:
    return bool(candidate.mig_profile or candidate.gpu_memory_mib) or candidate.gpu_milli < _DEVICE


class _Load(NamedTuple):
    """What one assignment takes of one node."""

    after: frozenset[str]
    """Victims here whose resources it may take."""
    keepers: frozenset[str]
    """Victims here that have to go because of its anti-affinity name."""
    needs: tuple[int, int, int]
    """Devices, cpu_milli, memory_mib."""


class _Node:
    """What was placed on one node."""

    __slots__ = ("instances", "loads", "names", "partly", "source")

    def __init__(self, source: NodeClass) -> None:
        self.source = source
        self.partly = sorted(source.shares)
        self.instances = Counter(dict(source.instances))
        self.loads: list[_Load] = []
        self.names: set[str] = set()

    def copy(self) -> _Node:
        other = _Node(self.source)
        other.partly, other.instances = [*self.partly], Counter(self.instances)
        other.loads, other.names = [*self.loads], {*self.names}
        return other

    def take_share(self, milli: int) -> int:
        """From the fullest device with room, else from an idle one; idle devices opened for it."""
        at = bisect_left(self.partly, milli)
        opened = at == len(self.partly)
        left = (_DEVICE if opened else self.partly.pop(at)) - milli
        if left:
            insort(self.partly, left)
        return int(opened)

    def take_instance(self, profile: str) -> int:
        """One that is there, else of an idle device, which becomes the geometry with the most of them."""
        opened = not self.instances[profile]
        if opened:
            self.instances.update(max(map(Counter, map(dict, TABLES[self.source.mig])), key=lambda g: g[profile]))
        self.instances[profile] -= 1
        return int(opened)

    def short_of(self, held: Mapping[str, tuple[int, int, int]], without: str = "") -> tuple[int, int, int] | None:
        """(resource, needed, there) of what the loads cannot be given, when all but `without` make room."""
        source = self.source
        free = (source.free_gpus, source.free_cpu_milli, source.free_memory_mib)
        afters = [load.after - {without} for load in self.loads]
        for r, limit in enumerate(free):
            if r and limit == -1:
                continue
            for waited_for in _unions(afters):
                needed = sum(load.needs[r] for load, a in zip(self.loads, afters, strict=True) if a <= waited_for)
                there = limit + sum(held[name][r] for name in waited_for)
                if needed and needed > there:
                    return r, needed, there
        return None


def _unions(sets: Iterable[frozenset[str]]) -> set[frozenset[str]]:
    """Of any of these sets, also of none."""
    found: set[frozenset[str]] = {frozenset()}
    for one in set(sets):
        found |= {one | other for other in found}
    return found


class _Ledger:
    """All nodes, as far as something was placed on them."""

    def __init__(self, problem: Problem) -> None:
        self.classes = {node_id: c for c in problem.classes for node_id in c.node_ids}
        self.victims = {v.placement_id: v for v in reversed(problem.victims)}
        self._held: dict[str, dict[str, tuple[int, int, int]]] = defaultdict(dict)
        """node_id -> victim -> what it holds there."""
        for name, victim in self.victims.items():
            for node_id, *amounts in victim.held:
                before = self._held[node_id].get(name, (0, 0, 0))
                self._held[node_id][name] = (before[0] + amounts[0], before[1] + amounts[1], before[2] + amounts[2])
        self._nodes: dict[str, _Node] = {}

    def carry_out(self, candidate: Candidate, assignment: Assignment) -> list[str]:
        """When it does not fit the nodes stay as they are."""
        workers: dict[str, list[int]] = defaultdict(list)
        for node_id, gpus in assignment.workers:
            workers[node_id].append(gpus)
        after: dict[str, _Node] = {}
        found = []
        for node_id, sizes in sorted(workers.items()):
            before = self._nodes.get(node_id)
            node = after[node_id] = before.copy() if before else _Node(self.classes[node_id])
            why = self._load(node, node_id, candidate, sizes, assignment.after)
            if why:
                found.append(f"job {candidate.job_id}: node {node_id}{why}")
        if not found:
            self._nodes.update(after)
        return found

    def _load(
        self, node: _Node, node_id: str, candidate: Candidate, sizes: list[int], waits_for: tuple[str, ...]
    ) -> str:
        """Put workers of these sizes on a node; why they do not fit, else empty."""
        held, name = self._held.get(node_id, {}), candidate.anti_affinity
        here = frozenset(held).intersection(waits_for)
        keepers: frozenset[str] = frozenset()
        if name and name in node.source.affinity_taken:
            keepers = frozenset(v for v in held if self.victims[v].anti_affinity == name)
        if name and (name in node.names or (name in node.source.affinity_taken and not (keepers and keepers <= here))):
            return f" has a worker named {name} already"
        node.names.add(name)
        devices, why = _devices(node, candidate, sizes)
        if why:
            return why
        needs = (devices, candidate.cpu_milli * len(sizes), candidate.memory_mib * len(sizes))
        node.loads.append(_Load(here, keepers, needs))
        short = node.short_of(held)
        if short is None:
            return ""
        r, needed, there = short
        if r == 0 and _is_part(candidate):
            return f" has no device with {_part(candidate, node.source)}"
        return f": {needed} {_RESOURCES[r]} of {there}"

    def needless_evictions(self) -> list[str]:
        """Victims without which all that was carried out would fit as well."""
        on: dict[str, set[str]] = defaultdict(set)
        for node_id, node in self._nodes.items():
            for name in {name for load in node.loads for name in load.after}:
                on[name].add(node_id)
        return [
            f"run {name} is evicted without need"
            for name, node_ids in sorted(on.items())
            if all(self._does_without(self._nodes[node_id], node_id, name) for node_id in node_ids)
        ]

    def _does_without(self, node: _Node, node_id: str, name: str) -> bool:
        kept_by_name = any(name in load.keepers for load in node.loads)
        return not kept_by_name and node.short_of(self._held[node_id], without=name) is None


def _devices(node: _Node, candidate: Candidate, sizes: list[int]) -> tuple[int, str]:
    """(idle devices that these workers take, why they cannot or empty)."""
    source = node.source
    if candidate.mig_profile:
        if not any(
            profile == candidate.mig_profile for geometry in TABLES.get(source.mig, ()) for profile, _ in geometry
        ):
            return 0, f" has no MIG profile {candidate.mig_profile}"
        return sum(node.take_instance(candidate.mig_profile) for _ in sizes), ""
    if not _is_part(candidate):
        return sum(sizes), ""
    if source.mig:
        return 0, " is under MIG and gives no shares"
    if candidate.gpu_memory_mib and not source.gpu_memory_mib:
        return 0, " declares no device memory"
    milli = _milli(candidate, source)
    if milli > _DEVICE:
        return 0, f" has no device with {_part(candidate, source)}"
    return sum(node.take_share(milli) for _ in sizes), ""


def _milli(candidate: Candidate, source: NodeClass) -> int:
    """Thousandths of one of the node's devices that a share takes, memory rounded up."""
    wanted = [candidate.gpu_milli] if candidate.gpu_milli < _DEVICE else []
    if candidate.gpu_memory_mib:
        wanted.append((_DEVICE * candidate.gpu_memory_mib + source.gpu_memory_mib - 1) // source.gpu_memory_mib)
    return max(wanted)


def _part(candidate: Candidate, source: NodeClass) -> str:
    if candidate.mig_profile:
        return f"a free instance {candidate.mig_profile}"
    return f"{_milli(candidate, source)} thousandths"
