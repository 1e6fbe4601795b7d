"""What one worker of a candidate needs of a node, and whether a node's limits allow it."""

from __future__ import annotations

from typing import NamedTuple

from streamsched.core.model import WHOLE_GPU
from streamsched.core.problem import Candidate, NodeClass

NO_LIMIT = -1
"""`free_cpu_milli` / `free_memory_mib` of a class in which that resource is not accounted."""


class Request(NamedTuple):
    """One worker: whole GPUs, or `gpu_milli` thousandths of one device. Empty `gpu_types`: any."""

    gpus: int
    gpu_milli: int
    cpu_milli: int
    memory_mib: int
    gpu_types: tuple[str, ...]
    avoid_nodes: frozenset[str]
    anti_affinity: str = ""
    gpu_memory_mib: int = 0

    @property
    def whole(self) -> bool:
        return self.gpu_milli >= WHOLE_GPU

    def allows(self, gpu_type: str) -> bool:
        """By the exact declared name: A100 is neither A100-80GB nor A10."""
        return not self.gpu_types or gpu_type in self.gpu_types


def is_share(candidate: Candidate) -> bool:
    return candidate.gpu_milli < WHOLE_GPU


def requests_of(candidate: Candidate) -> list[tuple[Request, int]]:
    """(worker, how many of it) per chunk, in the order of `Candidate.chunks`."""
    avoid = frozenset(candidate.avoid_nodes)
    types = tuple(sorted(set(candidate.gpu_types)))
    return [
        (Request(gpus, candidate.gpu_milli, candidate.cpu_milli, candidate.memory_mib, types, avoid), count)
        for gpus, count in candidate.chunks
    ]


def is_sane(candidate: Candidate) -> bool:
    """Whether the candidate asks for something at all; others are answered, not solved."""
    sizes = [gpus for gpus, _ in candidate.chunks]
    counts = [count for _, count in candidate.chunks]
    share_of_one = candidate.gpu_milli == WHOLE_GPU or all(gpus == 1 for gpus in sizes)
    return (
        bool(sizes)
        and min(sizes) >= 1
        and min(counts) >= 1
        and 0 < candidate.gpu_milli <= WHOLE_GPU
        and candidate.cpu_milli >= 0
        and candidate.memory_mib >= 0
        and share_of_one
    )


def within(need: int, limit: int) -> bool:
    return limit == NO_LIMIT or need <= limit


def how_many(request: Request, node: NodeClass) -> int:
    """Workers of this request alone that one node of the class takes; 0 when its type is not acceptable.

    Exact: for equal shares the best packing is the greedy one, device by device.
    """
    if not request.allows(node.gpu_type):
        return 0
    if request.whole:
        slots = node.free_gpus // request.gpus
    else:
        slots = node.free_gpus * (WHOLE_GPU // request.gpu_milli)
        slots += sum(share // request.gpu_milli for share in node.shares)
    for need, limit in (
        (request.cpu_milli, node.free_cpu_milli),
        (request.memory_mib, node.free_memory_mib),
    ):
        if need and limit != NO_LIMIT:
            slots = min(slots, max(0, limit) // need)
    return max(0, slots)
