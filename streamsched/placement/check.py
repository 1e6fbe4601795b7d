"""Is this solution allowed? Knows the problem and the solution, and nothing of how solutions are made.

It shares no code with greedy or the model on purpose, and prefers being obvious to being fast.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache

from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Solution

_DEVICE = 1000


def check(problem: Problem, solution: Solution) -> list[str]:
    """Violations in words; empty when the solution can be carried out as it stands."""
    candidates = {c.job_id: c for c in problem.candidates}
    nodes = {node_id: c for c in problem.classes for node_id in c.node_ids}
    violations = []
    if solution.window != problem.window:
        violations.append(f"solution of window {solution.window} for window {problem.window}")
    violations += _jobs_twice(solution)
    loads: dict[str, list[tuple[Candidate, int]]] = defaultdict(list)
    for assignment in solution.assignments:
        candidate = candidates.get(assignment.job_id)
        if candidate is None:
            violations.append(f"job {assignment.job_id} is not a candidate")
            continue
        violations += _gang(candidate, assignment) + _nodes(candidate, assignment, nodes)
        for node_id, gpus in assignment.workers:
            loads[node_id].append((candidate, gpus))
    for node_id in sorted(loads.keys() & nodes.keys()):
        violations += _capacity(node_id, nodes[node_id], loads[node_id])
    return violations


def _jobs_twice(solution: Solution) -> list[str]:
    times = Counter(a.job_id for a in solution.assignments)
    twice = [f"job {job_id} is placed {n} times" for job_id, n in times.items() if n > 1]
    both = [f"job {j} is both placed and explained as unplaced" for j in times if j in solution.unplaced]
    return twice + both


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


def _capacity(node_id: str, node: NodeClass, load: list[tuple[Candidate, int]]) -> list[str]:
    found = []
    cpu = sum(c.cpu_milli for c, _ in load)
    memory = sum(c.memory_mib for c, _ in load)
    if node.free_cpu_milli != -1 and cpu > node.free_cpu_milli:
        found.append(f"node {node_id}: {cpu} milli-cores of {node.free_cpu_milli}")
    if node.free_memory_mib != -1 and memory > node.free_memory_mib:
        found.append(f"node {node_id}: {memory} MiB of {node.free_memory_mib}")
    whole = sum(gpus for c, gpus in load if c.gpu_milli == _DEVICE)
    shares = [c.gpu_milli for c, _ in load if c.gpu_milli != _DEVICE]
    if whole > node.free_gpus:
        found.append(f"node {node_id}: {whole} GPUs of {node.free_gpus}")
    elif not shares_fit(shares, [*node.shares, *[_DEVICE] * (node.free_gpus - whole)]):
        found.append(f"node {node_id}: shares {sorted(shares)} do not fit beside {whole} whole GPUs")
    return found


def shares_fit(shares: list[int], devices: list[int]) -> bool:
    """Whether every share can have its place on one device: exact bin packing by search.

    Largest share first, on each *distinct* amount of room once, remembering what failed; nodes have few devices.
    """
    order = tuple(sorted(shares, reverse=True))

    @cache
    def packs(index: int, room: tuple[int, ...]) -> bool:
        if index == len(order):
            return True
        if sum(order[index:]) > sum(room):
            return False
        share = order[index]
        for i, free in enumerate(room):
            if free >= share and (i == 0 or room[i - 1] != free):
                rest = (*room[:i], free - share, *room[i + 1 :])
                if packs(index + 1, tuple(sorted(rest))):
                    return True
        return False

    return packs(0, tuple(sorted(devices)))
