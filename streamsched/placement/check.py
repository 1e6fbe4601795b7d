"""Is this solution allowed? Knows the problem and the solution, and nothing of how solutions are made.

Assignments are carried out in their order, each worker on the device that the core picks (for a share the fullest
device with room, else an idle one). So they are replayed here in that order by that rule: one pass, no search.
It shares no code with greedy, the model or the core on purpose.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import groupby

from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Solution

_DEVICE = 1000


def check(problem: Problem, solution: Solution) -> list[str]:
    """Violations in words; empty when the solution can be carried out as it stands."""
    violations = []
    if solution.window != problem.window:
        violations.append(f"solution of window {solution.window} for window {problem.window}")
    _, found = sift(problem, solution.assignments)
    violations += found
    for job_id in dict.fromkeys(a.job_id for a in solution.assignments):
        if job_id in solution.unplaced:
            violations.append(f"job {job_id} is both placed and explained as unplaced")
    return violations


def sift(problem: Problem, assignments: Iterable[Assignment]) -> tuple[tuple[Assignment, ...], list[str]]:
    """The assignments that can be carried out in this order, and what is wrong with each of the others."""
    candidates = {c.job_id: c for c in problem.candidates}
    classes = {node_id: c for c in problem.classes for node_id in c.node_ids}
    nodes: dict[str, _Node] = {}
    kept: dict[str, Assignment] = {}
    violations: list[str] = []
    for assignment in assignments:
        candidate = candidates.get(assignment.job_id)
        if candidate is None:
            violations.append(f"job {assignment.job_id} is not a candidate")
            continue
        found = [f"job {candidate.job_id} is placed more than once"] if candidate.job_id in kept else []
        found = found or _gang(candidate, assignment) + _nodes(candidate, assignment, classes)
        found = found or _replay(candidate, assignment, classes, nodes)
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


def _nodes(candidate: Candidate, assignment: Assignment, nodes: dict[str, NodeClass]) -> list[str]:
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


class _Node:
    """What is left of one node."""

    __slots__ = ("cpu", "idle", "memory", "partly")

    def __init__(self, idle: int, partly: list[int], cpu: int, memory: int) -> None:
        self.idle, self.partly, self.cpu, self.memory = idle, partly, cpu, memory

    def copy(self) -> _Node:
        return _Node(self.idle, [*self.partly], self.cpu, self.memory)

    def take_share(self, milli: int) -> bool:
        """From the fullest device with room, else from an idle one; whether there was one."""
        at = bisect_left(self.partly, milli)
        if at < len(self.partly):
            left = self.partly.pop(at) - milli
        elif self.idle and milli <= _DEVICE:
            self.idle -= 1
            left = _DEVICE - milli
        else:
            return False
        if left:
            insort(self.partly, left)
        return True


def _replay(
    candidate: Candidate, assignment: Assignment, classes: dict[str, NodeClass], nodes: dict[str, _Node]
) -> list[str]:
    """Carry out one assignment on `nodes`; when it does not fit they stay as they are."""
    after: dict[str, _Node] = {}
    for node_id, workers in groupby(assignment.workers, key=lambda worker: worker[0]):
        source = classes[node_id]
        if node_id not in after:
            before = nodes.get(node_id)
            after[node_id] = before.copy() if before else _fresh(source)
        node = after[node_id]
        for _, gpus in workers:
            node.cpu -= candidate.cpu_milli
            node.memory -= candidate.memory_mib
            if candidate.gpu_milli == _DEVICE:
                node.idle -= gpus
            elif not node.take_share(candidate.gpu_milli):
                return [f"job {candidate.job_id}: node {node_id} has no device with {candidate.gpu_milli} thousandths"]
    found = []
    for node_id, node in sorted(after.items()):
        source, where = classes[node_id], f"job {candidate.job_id}: node {node_id}"
        if node.idle < 0:
            found.append(f"{where}: {source.free_gpus - node.idle} GPUs of {source.free_gpus}")
        if source.free_cpu_milli != -1 and node.cpu < 0 < candidate.cpu_milli:
            found.append(f"{where}: {source.free_cpu_milli - node.cpu} milli-cores of {source.free_cpu_milli}")
        if source.free_memory_mib != -1 and node.memory < 0 < candidate.memory_mib:
            found.append(f"{where}: {source.free_memory_mib - node.memory} MiB of {source.free_memory_mib}")
    if not found:
        nodes.update(after)
    return found


def _fresh(source: NodeClass) -> _Node:
    return _Node(source.free_gpus, sorted(source.shares), source.free_cpu_milli, source.free_memory_mib)
