"""What is free, while a window is being filled: the ledger under greedy, compaction and the objective.

Theory of operation. A `Shelf` is a run of untouched nodes of one class; only its first node (the lowest id) is ever
looked at. Taking something from that node cuts it off the shelf and gives it a record of its own (`Touched`). Both
are `Place`s, filed by (GPU type, free whole GPUs) and by (GPU type, free share) in heaps ordered by node id, so
that best fit looks at a few heap tops and never scans nodes: the cost of a window grows with its workers and
classes, not with the cluster.

Entries of the heaps are never removed in place: an entry is stale when its place has moved on (`stamp`). A gang is
all or nothing: what was taken for it is written to a log and put back when a worker finds no node.

The choice of a device for a share is the core's own (`core.node.Node.pick`): the fullest device with room, else an
idle one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from streamsched.core.model import WHOLE_GPU
from streamsched.core.problem import Candidate, NodeClass, Problem

from .request import NO_LIMIT, Request, is_share, requests_of, within

Workers = tuple[tuple[str, int], ...]
"""((node_id, GPUs), ...), as in `Assignment.workers`."""


class Place:
    """Free resources of the first node of a shelf, or of one touched node."""

    __slots__ = ("cpu_milli", "free", "gpu_type", "memory_mib", "node_id", "opened", "shares", "source", "stamp")

    def __init__(self, node_id: str, source: NodeClass) -> None:
        self.node_id = node_id
        self.source = source
        self.gpu_type = source.gpu_type
        self.shares = source.shares
        self.free = source.free_gpus
        self.cpu_milli = source.free_cpu_milli
        self.memory_mib = source.free_memory_mib
        self.opened = 0
        """Idle devices taken here in this window."""
        self.stamp = 0

    def admits(self, request: Request) -> bool:
        """CPU, memory and avoided nodes; GPUs are what the index is by."""
        return (
            within(request.cpu_milli, self.cpu_milli)
            and within(request.memory_mib, self.memory_mib)
            and self.node_id not in request.avoid_nodes
        )

    def devices_for(self, request: Request) -> int:
        """Workers that the idle devices take, or for shares the one device that the next share goes to."""
        if request.whole:
            return self.free // request.gpus
        at = bisect_left(self.shares, request.gpu_milli)
        return (self.shares[at] if at < len(self.shares) else WHOLE_GPU) // request.gpu_milli

    def room_for(self, request: Request) -> int:
        """The same, as far as cpu and memory go; at least the one that was admitted."""
        room = self.devices_for(request)
        if request.cpu_milli and self.cpu_milli != NO_LIMIT:
            room = min(room, self.cpu_milli // request.cpu_milli)
        if request.memory_mib and self.memory_mib != NO_LIMIT:
            room = min(room, self.memory_mib // request.memory_mib)
        return max(1, room)


class Shelf(Place):
    """Untouched, equal nodes; `node_id` is the first of those left."""

    __slots__ = ("_gone", "_ids", "_next", "_source")

    def __init__(self, node_ids: Sequence[str], source: NodeClass) -> None:
        self._ids = sorted(node_ids)
        self._next = 0
        self._gone: set[str] = set()
        self._source = source
        super().__init__(self._ids[0], source)

    @property
    def left(self) -> list[str]:
        return [n for n in self._ids[self._next :] if n not in self._gone]

    def cut(self, node_id: str) -> tuple[Touched, bool]:
        """One node as a record of its own, and whether the shelf has to be filed anew."""
        touched = Touched(node_id, self._source)
        self._gone.add(node_id)
        if node_id != self.node_id:
            return touched, False
        self.stamp += 1
        while self._next < len(self._ids) and self._ids[self._next] in self._gone:
            self._next += 1
        if self._next == len(self._ids):
            return touched, False
        self.node_id = self._ids[self._next]
        return touched, True


class Touched(Place):
    """One node on its own."""

    __slots__ = ()


Undo = tuple[Touched, int, tuple[int, ...], int, int, int]
Heap = list[tuple[str, int, int, Place]]


class Lot(NamedTuple):
    """Nodes with equal free resources, as the model sees them. -1: not a limit."""

    gpu_type: str
    free: int
    cpu_milli: int
    memory_mib: int
    node_ids: tuple[str, ...]
    nvlink: str = ""
    rack: str = ""
    zone: str = ""
    affinity_taken: tuple[str, ...] = ()


class Stock:
    """Free resources of all nodes of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._whole: dict[tuple[str, int], Heap] = {}
        self._share: dict[str, tuple[list[int], dict[int, Heap]]] = {}
        self._count: dict[str, Counter[int]] = {}
        self._touched: dict[str, Touched] = {}
        self._shelves: list[Shelf] = []
        self._entries = 0
        self._max_free = max((c.free_gpus for c in problem.classes), default=0)
        self._with_shares = any(is_share(c) for c in problem.candidates)
        self._shelf_of: dict[str, Shelf] = {}
        """By node id; filled when a node is first asked for by name."""
        named = {n for c in problem.candidates for n in c.avoid_nodes}
        for node_class in problem.classes:
            self._shelve(node_class, named)
        self._types = sorted(self._count)
        self._has_victim = {node_id for v in problem.victims for node_id, *_ in v.held}

    def place(self, candidate: Candidate, *, open_devices: bool = True) -> Workers | None:
        """Best fit for all workers of the candidate, or None and nothing taken.

        `open_devices` False: shares only go to devices that are partly used already.
        """
        chunks = requests_of(candidate)
        if not all(self._may_have(request, count) for request, count in chunks if request.whole):
            return None
        log: list[Undo] = []
        chosen: dict[int, list[tuple[str, int]]] = {}
        try:
            for index in sorted(range(len(chunks)), key=lambda i: -chunks[i][0].gpus):
                found = self._seat(*chunks[index], open_devices, log)
                if found is None:
                    self._put_back(log)
                    return None
                chosen[index] = found
        except Exception:
            self._put_back(log)
            raise
        return tuple(worker for index in range(len(chunks)) for worker in chosen[index])

    def _seat(self, request: Request, count: int, open_devices: bool, log: list[Undo]) -> list[tuple[str, int]] | None:
        """Nodes for so many equal workers. What is left of the best fit is the best fit for the next worker, so each
        look takes as many as go there."""
        seats: list[tuple[str, int]] = []
        while len(seats) < count:
            place = self._find(request, open_devices)
            if place is None:
                return None
            n = min(count - len(seats), place.room_for(request))
            seats += [(place.node_id, request.gpus)] * n
            self._take(place, request, n, log)
        return seats

    def put(self, candidate: Candidate, workers: Workers) -> None:
        """Take named nodes for the candidate's workers. What does not fit goes below zero: the caller checks."""
        flat = [request for request, count in requests_of(candidate) for _ in range(count)]
        pairs = zip(flat, (node_id for node_id, _ in workers), strict=True)
        for (request, node_id), equal in groupby(pairs):
            left = sum(1 for _ in equal)
            while left:
                place = self._by_name(node_id)
                n = max(1, min(left, place.devices_for(request)))
                self._take(place, request, n, [])
                left -= n

    def stranded_gpus(self) -> int:
        """Idle devices left on the nodes of which a device was taken: what the fragmentation term counts."""
        return sum(t.free for t in self._touched.values() if t.opened)

    def opened(self) -> list[str]:
        """Nodes of which an idle device was taken."""
        return [n for n, t in self._touched.items() if t.opened]

    def lots(self) -> Iterator[Lot]:
        """All nodes that have an idle device or a victim, in a fixed order."""
        for shelf in self._shelves:
            if shelf.left and (shelf.free or self._has_victim.intersection(shelf.left)):
                yield _lot(shelf, tuple(sorted(shelf.left)))
        for _, node in sorted(self._touched.items()):
            if node.free or node.node_id in self._has_victim:
                yield _lot(node, (node.node_id,))

    def left_on(self, node_id: str) -> tuple[int, int, int]:
        """(GPUs, cpu, memory) free on a node."""
        place = self._by_name(node_id)
        return place.free, place.cpu_milli, place.memory_mib

    # ── filing ─────────────────────────────────────────────────────────────────────────────────────

    def _shelve(self, node_class: NodeClass, named: set[str]) -> None:
        """A shelf per class, and one per node that some candidate avoids."""
        alone = named.intersection(node_class.node_ids) if named else set()
        rest: Sequence[str] = node_class.node_ids
        if alone:
            rest = [n for n in rest if n not in alone]
        self._count.setdefault(node_class.gpu_type, Counter())[node_class.free_gpus] += len(node_class.node_ids)
        for ids in ([rest] if rest else []) + [[n] for n in sorted(alone)]:
            shelf = Shelf(ids, node_class)
            self._shelves.append(shelf)
            self._file(shelf)

    def _file(self, place: Place) -> None:
        self._entries += 1
        entry = (place.node_id, self._entries, place.stamp, place)
        if place.free > 0:
            heapq.heappush(self._whole.setdefault((place.gpu_type, place.free), []), entry)
        if self._with_shares and place.shares:
            sizes, heaps = self._share.setdefault(place.gpu_type, ([], {}))
            for share in set(place.shares):
                if share not in heaps:
                    heaps[share] = []
                    insort(sizes, share)
                heapq.heappush(heaps[share], entry)

    # ── finding ────────────────────────────────────────────────────────────────────────────────────

    def _may_have(self, request: Request, count: int) -> bool:
        """A necessary condition, cheap: whether the idle devices alone would do."""
        for gpu_type in self._types:
            if request.allows(gpu_type):
                count -= sum(n * (free // request.gpus) for free, n in self._count[gpu_type].items())
        return count <= 0

    def _find(self, request: Request, open_devices: bool) -> Place | None:
        types = [t for t in self._types if request.allows(t)]
        if not request.whole:
            place = self._smallest_share(request, types)
            if place is not None or not open_devices:
                return place
        for free in range(request.gpus, self._max_free + 1):
            place = _lowest(request, (self._whole.get((t, free)) for t in types))
            if place is not None:
                return place
        return None

    def _smallest_share(self, request: Request, types: list[str]) -> Place | None:
        filed = [self._share[t] for t in types if t in self._share]
        sizes = sorted({s for sizes, _ in filed for s in sizes[bisect_left(sizes, request.gpu_milli) :]})
        for size in sizes:
            place = _lowest(request, (heaps.get(size) for _, heaps in filed))
            for filed_sizes, heaps in filed:
                if size in heaps and not heaps[size]:  # all its entries were stale
                    del heaps[size]
                    del filed_sizes[bisect_left(filed_sizes, size)]
            if place is not None:
                return place
        return None

    def _by_name(self, node_id: str) -> Place:
        if node_id in self._touched:
            return self._touched[node_id]
        if not self._shelf_of:
            self._shelf_of = {n: shelf for shelf in self._shelves for n in shelf.left}
        return self._own(self._shelf_of[node_id], node_id)

    # ── taking ─────────────────────────────────────────────────────────────────────────────────────

    def _take(self, place: Place, request: Request, n: int, log: list[Undo]) -> None:
        """Room for `n` equal workers; shares all from one device."""
        node = self._own(place)
        log.append((node, node.free, node.shares, node.cpu_milli, node.memory_mib, node.opened))
        taken = n * request.gpus if request.whole else self._take_share(node, n * request.gpu_milli, request.gpu_milli)
        if node.cpu_milli != NO_LIMIT:
            node.cpu_milli -= n * request.cpu_milli
        if node.memory_mib != NO_LIMIT:
            node.memory_mib -= n * request.memory_mib
        self._set_free(node, node.free - taken)
        node.opened += taken
        self._file(node)

    def _own(self, place: Place, node_id: str | None = None) -> Touched:
        """The record of one node, cut off its shelf when it is still on one (by default the shelf's first)."""
        if isinstance(place, Touched):
            return place
        assert isinstance(place, Shelf)
        touched, file_again = place.cut(node_id or place.node_id)
        if file_again:
            self._file(place)
        self._touched[touched.node_id] = touched
        return touched

    def _set_free(self, node: Touched, free: int) -> None:
        count = self._count[node.gpu_type]
        count[node.free] -= 1
        count[free] += 1
        node.free = free
        node.stamp += 1

    def _put_back(self, log: list[Undo]) -> None:
        while log:
            node, free, shares, cpu_milli, memory_mib, opened = log.pop()
            node.shares, node.cpu_milli, node.memory_mib, node.opened = shares, cpu_milli, memory_mib, opened
            self._set_free(node, free)
            self._file(node)

    def _take_share(self, node: Touched, milli: int, one: int) -> int:
        """Take it from the smallest share that suffices for one; returns the idle devices opened for it (0 or 1)."""
        shares = list(node.shares)
        index = bisect_left(shares, one)
        opened = index == len(shares)
        left = (WHOLE_GPU if opened else shares.pop(index)) - milli
        if left:
            insort(shares, left)
        node.shares = tuple(shares)
        return int(opened)


def _lot(place: Place, node_ids: tuple[str, ...]) -> Lot:
    source = place.source
    return Lot(
        gpu_type=place.gpu_type,
        free=place.free,
        cpu_milli=place.cpu_milli,
        memory_mib=place.memory_mib,
        node_ids=node_ids,
        nvlink=source.nvlink,
        rack=source.rack,
        zone=source.zone,
        affinity_taken=source.affinity_taken,
    )


def _lowest(request: Request, heaps: Iterable[Heap | None]) -> Place | None:
    """The place with the lowest node id that admits the request, of all heaps."""
    found = [entry for heap in heaps if heap and (entry := _first(request, heap))]
    return min(found)[3] if found else None


def _first(request: Request, heap: Heap) -> tuple[str, int, int, Place] | None:
    """The first entry whose place admits the request; stale ones are dropped on the way."""
    passed: Heap = []
    found = None
    while heap:
        entry = heap[0]
        if entry[2] != entry[3].stamp:
            heapq.heappop(heap)
            continue
        if entry[3].admits(request):
            found = entry
            break
        passed.append(heapq.heappop(heap))
    for entry in passed:
        heapq.heappush(heap, entry)
    return found
