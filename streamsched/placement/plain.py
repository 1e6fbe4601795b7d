"""Best fit for the plain case: whole devices of one type, nothing else asked for, nobody to make room.

The same answer as `Stock` gives, at a fraction of its cost: in most windows of most pools nothing else is asked.
`tests/property/test_placement_properties.py` holds the two to the same assignments.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from streamsched.core.model import WHOLE_GPU
from streamsched.core.problem import Assignment, Candidate, Problem

from .stock import Workers


def is_plain(problem: Problem) -> bool:
    """Whether `fill_plain` answers this problem."""
    classes = problem.classes
    return (
        not problem.victims
        and not problem.mix
        and len({c.gpu_type for c in classes}) <= 1
        and all(_asks_for_devices_alone(candidate) for candidate in problem.candidates)
    )


def _asks_for_devices_alone(c: Candidate) -> bool:
    return (
        c.gpu_milli == WHOLE_GPU
        and not (c.cpu_milli or c.memory_mib or c.gpu_memory_mib or c.gpu_types or c.avoid_nodes)
        and c.topology is None
        and not c.anti_affinity
        and not c.mig_profile
    )


def fill_plain(problem: Problem, candidates: Iterable[Candidate]) -> tuple[Assignment, ...]:
    """Candidates in order, each worker on the node with the fewest idle devices that suffice, then the lowest name;
    larger workers of a gang first, all of them or none. In strict order nothing after the first that does not fit."""
    nodes = _Nodes(problem)
    found: dict[str, Assignment] = {}
    for candidate in candidates:
        if candidate.job_id in found:
            continue
        workers = nodes.seat(candidate.chunks)
        if workers is not None:
            found[candidate.job_id] = Assignment(
                job_id=candidate.job_id, attempt=candidate.attempt, workers=workers, score=candidate.score
            )
        elif problem.in_order:
            break
    return tuple(found.values())


class _Nodes:
    """Node names by idle devices, each a heap."""

    def __init__(self, problem: Problem) -> None:
        self._by_idle: dict[int, list[str]] = {}
        for node_class in problem.classes:
            if node_class.free_gpus > 0:
                known = self._by_idle.get(node_class.free_gpus)
                # Names of a class ascend, so that they are a heap already.
                self._by_idle[node_class.free_gpus] = sorted((*(known or ()), *node_class.node_ids))
        self._sizes = sorted(self._by_idle)

    def seat(self, chunks: tuple[tuple[int, int], ...]) -> Workers | None:
        """Nodes for all workers, in the order of the chunks; or None and nothing taken."""
        taken: list[tuple[str, int, int]] = []
        seats: dict[int, list[tuple[str, int]]] = {}
        for i in sorted(range(len(chunks)), key=lambda i: -chunks[i][0]):
            gpus, count = chunks[i]
            own: list[tuple[str, int]] = []
            seats[i] = own
            while len(own) < count:
                idle = next((size for size in self._sizes if size >= gpus and self._by_idle[size]), 0)
                if not idle:
                    self._put_back(taken)
                    return None
                node_id = heappop(self._by_idle[idle])
                n = min(count - len(own), idle // gpus)
                own += [(node_id, gpus)] * n
                left = idle - n * gpus
                self._file(node_id, left)
                taken.append((node_id, idle, left))
        return tuple(worker for i in range(len(chunks)) for worker in seats[i])

    def _file(self, node_id: str, idle: int) -> None:
        if idle and idle not in self._by_idle:
            self._by_idle[idle] = []
            self._sizes = sorted(self._by_idle)
        if idle:
            heappush(self._by_idle[idle], node_id)

    def _put_back(self, taken: list[tuple[str, int, int]]) -> None:
        for node_id, idle, left in reversed(taken):
            if left:
                heap = self._by_idle[left]
                heap.remove(node_id)
                heap.sort()
            self._file(node_id, idle)
