"""What one worker of a candidate needs of a node, and whether a node's limits allow it."""

from __future__ import annotations

from typing import NamedTuple

from streamsched.core import mig
from streamsched.core.model import WHOLE_GPU
from streamsched.core.problem import Candidate, NodeClass

NO_LIMIT = -1
"""`free_cpu_milli` / `free_memory_mib` of a class in which that resource is not accounted."""


class Make(NamedTuple):
    """What the devices of a node are, free or not."""

    gpu_type: str
    gpu_memory_mib: int
    mig: str


def make_of(node: NodeClass) -> Make:
    return Make(node.gpu_type, node.gpu_memory_mib, node.mig)


class Request(NamedTuple):
    """One worker: whole GPUs, a share of one device, or one MIG instance. Empty `gpu_types`: any.

    A share takes `gpu_milli` thousandths, or of a device with memory M ceil(1000 * `gpu_memory_mib` / M) of them where
    that is more or `gpu_milli` is 1000.
    """

    gpus: int
    gpu_milli: int
    cpu_milli: int
    memory_mib: int
    gpu_types: tuple[str, ...]
    avoid_nodes: frozenset[str]
    anti_affinity: str = ""
    gpu_memory_mib: int = 0
    mig_profile: str = ""
    as_whole: bool = False
    """A share or an instance that is given a whole device, where it would fit: how the model sees it."""

    @property
    def whole(self) -> bool:
        return self.as_whole or not (self.mig_profile or self.gpu_memory_mib or self.gpu_milli < WHOLE_GPU)

    def allows(self, gpu_type: str) -> bool:
        """By the exact declared name: A100 is neither A100-80GB nor A10."""
        return not self.gpu_types or gpu_type in self.gpu_types

    def milli_of(self, make: Make) -> int:
        """Thousandths that a share takes of one of these devices; above 1000: more than there is."""
        if not self.gpu_memory_mib:
            return self.gpu_milli
        if not make.gpu_memory_mib:
            return WHOLE_GPU + 1
        by_memory = -(-WHOLE_GPU * self.gpu_memory_mib // make.gpu_memory_mib)
        return by_memory if self.gpu_milli >= WHOLE_GPU else max(self.gpu_milli, by_memory)

    def suits(self, make: Make) -> bool:
        """Whether an idle device of this make would do, its type aside."""
        if self.mig_profile:
            return mig.per_device(make.mig, self.mig_profile) > 0
        if self.gpu_memory_mib or self.gpu_milli < WHOLE_GPU:
            return not make.mig and self.milli_of(make) <= WHOLE_GPU
        return True

    def per_device(self, make: Make) -> int:
        """Shares or instances that one idle device gives, where it suits."""
        return mig.per_device(make.mig, self.mig_profile) if self.mig_profile else WHOLE_GPU // self.milli_of(make)


def is_share(candidate: Candidate) -> bool:
    """Whether its workers take less than whole devices, by thousandths, memory or MIG profile."""
    return bool(candidate.mig_profile or candidate.gpu_memory_mib or candidate.gpu_milli < WHOLE_GPU)


def workers_of(candidate: Candidate) -> int:
    return sum(count for _, count in candidate.chunks)


def requests_of(candidate: Candidate, *, as_whole: bool = False) -> list[tuple[Request, int]]:
    """(worker, how many of it) per chunk, in the order of `Candidate.chunks`."""
    worker = Request(
        gpus=0,
        gpu_milli=candidate.gpu_milli,
        cpu_milli=candidate.cpu_milli,
        memory_mib=candidate.memory_mib,
        gpu_types=tuple(sorted(set(candidate.gpu_types))),
        avoid_nodes=frozenset(candidate.avoid_nodes),
        anti_affinity=candidate.anti_affinity,
        gpu_memory_mib=candidate.gpu_memory_mib,
        mig_profile=candidate.mig_profile,
        as_whole=as_whole and is_share(candidate),
    )
    return [(worker._replace(gpus=gpus), count) for gpus, count in candidate.chunks]


def joined(requests: list[tuple[Request, int]]) -> Request:
    """All workers of a gang with whole devices as one worker, for one node."""
    workers = sum(count for _, count in requests)
    one = requests[0][0]
    return one._replace(
        gpus=sum(request.gpus * count for request, count in requests),
        cpu_milli=one.cpu_milli * workers,
        memory_mib=one.memory_mib * workers,
    )


def is_sane(candidate: Candidate) -> bool:
    """Whether the candidate asks for something at all; others are answered, not solved."""
    sizes = [gpus for gpus, _ in candidate.chunks]
    counts = [count for _, count in candidate.chunks]
    return (
        bool(sizes)
        and min(sizes) >= 1
        and min(counts) >= 1
        and 0 < candidate.gpu_milli <= WHOLE_GPU
        and candidate.cpu_milli >= 0
        and candidate.memory_mib >= 0
        and candidate.gpu_memory_mib >= 0
        and (max(sizes) == 1 or not is_share(candidate))
    )


def within(need: int, limit: int) -> bool:
    return limit == NO_LIMIT or need <= limit


def how_many(request: Request, node: NodeClass) -> int:
    """Workers of this request alone that one node of the class takes; 0 when its type is not acceptable.

    Exact: for equal shares the best packing is the greedy one, device by device.
    """
    if not request.allows(node.gpu_type) or (request.anti_affinity and request.anti_affinity in node.affinity_taken):
        return 0
    slots = device_slots(request, node)
    for need, limit in (
        (request.cpu_milli, node.free_cpu_milli),
        (request.memory_mib, node.free_memory_mib),
    ):
        if need and limit != NO_LIMIT:
            slots = min(slots, max(0, limit) // need)
    return min(slots, 1) if request.anti_affinity else slots


def device_slots(request: Request, node: NodeClass) -> int:
    """The same as far as devices go, whatever their type."""
    make = make_of(node)
    if not request.suits(make):
        return 0
    if request.whole:
        return max(0, node.free_gpus) // request.gpus
    slots = max(0, node.free_gpus) * request.per_device(make)
    if request.mig_profile:
        return slots + sum(free for profile, free in node.instances if profile == request.mig_profile)
    return slots + sum(share // request.milli_of(make) for share in node.shares)
