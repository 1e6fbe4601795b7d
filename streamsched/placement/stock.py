"""What is free, while a window is being filled: the ledger under greedy, compaction and the objective.

Theory of operation. A `Shelf` is a run of untouched nodes of one class; only its first node (the lowest id) is ever
looked at. Taking something from that node cuts it off the shelf and gives it a record of its own (`Touched`). Both
are `Place`s, filed by (make of the devices, free whole GPUs), by (make, free share) and by (make, MIG profile) in
heaps ordered by node id, so that best fit looks at a few heap tops and never scans nodes: the cost of a window grows
with its workers and classes, not with the cluster. Where candidates care about topology, places are filed once more
under each domain that they are in, at the levels asked for.

Entries of the heaps are never removed in place: an entry is stale when its place has moved on (`stamp`). A gang is
all or nothing: what was taken for it is written to a log and put back when a worker finds no node. Places that do not
admit its workers (cpu, memory, names) are laid aside until the gang is done: they would not admit its others either.

The choice of a device for a share or an instance is the core's own (`core.node.Node.allocate`): the fullest device
with room, else an idle one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from msgspec.structs import replace

from streamsched.core import mig
from streamsched.core.model import WHOLE_GPU, TopologyLevel
from streamsched.core.problem import Candidate, NodeClass, Problem
from streamsched.core.room import domain_of

from .freed import Amounts, Freed
from .gradient import Gradient
from .request import NO_LIMIT, Make, Request, is_share, joined, make_of, requests_of, within, workers_of
from .ways import Way, ways_of

Workers = tuple[tuple[str, int], ...]
"""((node_id, GPUs), ...), as in `Assignment.workers`."""

Requests = list[tuple[Request, int]]
"""As of `requests_of`: (worker, how many of it) per chunk."""

Scope = tuple[str, str]
"""(level, domain): where to look. An empty domain: all nodes that are in one of that level."""

EVERYWHERE: Scope = ("", "")
_DOMAINS_TRIED = 64
"""Domains that one gang is tried in at most; those without enough idle devices do not count."""


class Place:
    """Free resources of the first node of a shelf, or of one touched node."""

    __slots__ = (
        "cpu_milli",
        "free",
        "instances",
        "make",
        "memory_mib",
        "names",
        "node_id",
        "opened",
        "scopes",
        "shares",
        "source",
        "stamp",
    )

    def __init__(self, node_id: str, source: NodeClass, make: int, scopes: tuple[Scope, ...]) -> None:
        self.node_id = node_id
        self.source = source
        self.make = make
        self.scopes = scopes
        self.shares = source.shares
        self.instances = source.instances
        self.free = source.free_gpus
        self.cpu_milli = source.free_cpu_milli
        self.memory_mib = source.free_memory_mib
        self.names = source.affinity_taken
        """Anti-affinity names of which no worker may come here."""
        self.opened = 0
        """Devices taken here in this window that were idle, or that evictions freed."""
        self.stamp = 0

    @property
    def count(self) -> int:
        """Nodes like this."""
        return 1

    def admits(self, request: Request) -> bool:
        """CPU, memory, avoided nodes and names; devices are what the index is by."""
        return (
            within(request.cpu_milli, self.cpu_milli)
            and within(request.memory_mib, self.memory_mib)
            and self.node_id not in request.avoid_nodes
            and not (request.anti_affinity and request.anti_affinity in self.names)
        )

    def instances_of(self, profile: str) -> int:
        return next((free for name, free in self.instances if name == profile), 0)

    def devices_for(self, request: Request, make: Make) -> int:
        """Workers that the idle devices take; for shares and instances those of the one device that is next."""
        if request.whole:
            return self.free // request.gpus
        if request.mig_profile:
            return self.instances_of(request.mig_profile) or request.per_device(make)
        milli = request.milli_of(make)
        at = bisect_left(self.shares, milli)
        return (self.shares[at] if at < len(self.shares) else WHOLE_GPU) // milli

    def room_for(self, request: Request, make: Make) -> int:
        """The same, as far as cpu, memory and names go; at least the one that was admitted."""
        if request.anti_affinity:
            return 1
        return max(1, self._by_limits(request, self.devices_for(request, make)))

    def copies_of(self, request: Request, make: Make) -> int:
        """Workers of this request alone that the node takes; `make` suits it."""
        if not self.admits(request):
            return 0
        if request.whole:
            slots = max(0, self.free) // request.gpus
        else:
            slots = max(0, self.free) * request.per_device(make) + self.instances_of(request.mig_profile)
            if not request.mig_profile:
                slots += sum(share // request.milli_of(make) for share in self.shares)
        return min(self._by_limits(request, slots), 1 if request.anti_affinity else slots)

    def _by_limits(self, request: Request, slots: int) -> int:
        if request.cpu_milli and self.cpu_milli != NO_LIMIT:
            slots = min(slots, self.cpu_milli // request.cpu_milli)
        if request.memory_mib and self.memory_mib != NO_LIMIT:
            slots = min(slots, self.memory_mib // request.memory_mib)
        return slots


class Shelf(Place):
    """Untouched, equal nodes; `node_id` is the first of those left."""

    __slots__ = ("_gone", "_ids", "_next")

    def __init__(self, node_ids: Sequence[str], source: NodeClass, make: int, scopes: tuple[Scope, ...]) -> None:
        self._ids = sorted(node_ids)
        self._next = 0
        self._gone: set[str] = set()
        super().__init__(self._ids[0], source, make, scopes)

    @property
    def left(self) -> list[str]:
        return [n for n in self._ids[self._next :] if n not in self._gone]

    @property
    def count(self) -> int:
        return len(self._ids) - len(self._gone)

    def cut(self, node_id: str) -> tuple[Touched, bool]:
        """One node as a record of its own, and whether the shelf has to be filed anew."""
        touched = Touched(node_id, self.source, self.make, self.scopes)
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


class _Before(NamedTuple):
    """What a node was before a step: enough to take it back."""

    node: Touched
    free: int
    shares: tuple[int, ...]
    instances: tuple[tuple[str, int], ...]
    cpu_milli: int
    memory_mib: int
    names: tuple[str, ...]
    opened: int


Log = list[_Before]
Entry = tuple[str, int, int, Place]
Heap = list[Entry]


class _Index:
    """The places of one scope. Their heaps are only filled when somebody searches it for the first time."""

    __slots__ = ("idle", "in_use", "instances", "places", "shares", "whole")

    def __init__(self) -> None:
        self.in_use = False
        self.places: list[Place] = []
        self.whole: dict[tuple[int, int], Heap] = {}
        """By (make, idle devices)."""
        self.shares: dict[int, tuple[list[int], dict[int, Heap]]] = {}
        """By make: free shares that there are, ascending, and the heap of each."""
        self.instances: dict[tuple[int, str], Heap] = {}
        """By (make, MIG profile)."""
        self.idle: Counter[tuple[int, int]] = Counter()
        """Nodes by (make, idle devices)."""


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
    gpu_memory_mib: int = 0
    mig: str = ""


class Stock:
    """Free resources of all nodes of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.freed = Freed(problem)
        self.makes = sorted({make_of(c) for c in problem.classes})
        self._number = {make: index for index, make in enumerate(self.makes)}
        self._index: dict[Scope, _Index] = {EVERYWHERE: _Index()}
        self._touched: dict[str, Touched] = {}
        self._shelves: list[Shelf] = []
        self._entries = 0
        self._max_free = max((c.free_gpus for c in problem.classes), default=0) + self.freed.most_gpus
        self._with_shares = any(is_share(c) and not c.mig_profile for c in problem.candidates)
        self._profiles = {c.mig_profile for c in problem.candidates if c.mig_profile}
        self._levels = sorted({c.topology.level for c in problem.candidates if c.topology} - {TopologyLevel.NODE})
        """Levels at which domains are told apart."""
        self._changed: list[Scope] = []
        """Scopes in the order in which idle devices there changed."""
        self._rooms: dict[tuple[str, tuple[int, ...], int, bool], tuple[int, dict[str, int]]] = {}
        """(level, makes, GPUs of a worker, one per node) -> (length of `_changed` then, room by domain)."""
        self._shelf_of: dict[str, Shelf] = {}
        """By node id; filled when a node is first asked for by name."""
        widest = max((len(c.shares) + c.free_gpus for c in problem.classes), default=0) + self.freed.most_gpus
        self._gradient = Gradient(problem.mix, self.makes, widest) if problem.mix else None
        named = {n for c in problem.candidates for n in c.avoid_nodes}
        for node_class in _without_idle_names(problem.classes, self._levels):
            self._shelve(node_class, named)

    # ── placing ────────────────────────────────────────────────────────────────────────────────────

    def place(self, candidate: Candidate, *, open_devices: bool = True, as_whole: bool = False) -> Workers | None:
        """Best fit for all workers of the candidate, or None and nothing taken.

        `open_devices` False: shares only go to devices that are partly used already. `as_whole`: each share takes a
        whole device.
        """
        requests = requests_of(candidate, as_whole=as_whole)
        log: Log = []
        try:
            for way in self.ways(candidate, requests):
                workers = self.attempt(requests, way, log, open_devices)
                if workers is not None:
                    return workers
        except Exception:
            self.put_back(log)
            raise
        return None

    def ways(self, candidate: Candidate, requests: Requests) -> list[Way]:
        """Best first; where it is to be on one type and several are as good, the type with the least idle devices."""
        ways = ways_of(candidate, requests[0][0], self.makes)
        if candidate.one_type and workers_of(candidate) > 1:
            idle = self._index[EVERYWHERE].idle
            devices: Counter[int] = Counter()
            for (make, free), n in idle.items():
                devices[make] += free * n
            ways.sort(key=lambda w: (-w.worth, w.level is None, sum(devices[make] for make in w.makes)))
        return ways

    def attempt(self, requests: Requests, way: Way, log: Log, open_devices: bool = True) -> Workers | None:
        """All workers of a gang in this way, written to `log`; or None and nothing taken."""
        workers = sum(count for _, count in requests)
        if not all(self._may_have(request, count, way.makes) for request, count in requests if request.whole):
            return None
        if way.level is None or (way.level is TopologyLevel.NODE and workers == 1):
            return self._seat_all(requests, way.makes, EVERYWHERE, open_devices, log)
        if way.level is TopologyLevel.NODE:
            return self._on_one_node(requests, way.makes, open_devices, log)
        if workers == 1:
            return self._seat_all(requests, way.makes, (way.level, ""), open_devices, log)
        for domain in self._domains(requests, way.makes, way.level)[:_DOMAINS_TRIED]:
            seated = self._seat_all(requests, way.makes, (way.level, domain), open_devices, log)
            if seated is not None:
                return seated
        return None

    def _seat_all(
        self, requests: Requests, makes: tuple[int, ...], scope: Scope, open_devices: bool, log: Log
    ) -> Workers | None:
        index = self._index.get(scope)
        if index is None:
            return None
        if not index.in_use:
            self._fill(index)
        mark, search = len(log), _Search(self, index, makes, open_devices)
        chosen: dict[int, list[tuple[str, int]]] = {}
        try:
            for i in sorted(range(len(requests)), key=lambda i: -requests[i][0].gpus):
                found = self._seat(*requests[i], search, log)
                if found is None:
                    self.put_back(log, mark)
                    return None
                chosen[i] = found
        finally:
            search.end()
        return tuple(worker for i in range(len(requests)) for worker in chosen[i])

    def _seat(self, request: Request, count: int, search: _Search, log: Log) -> list[tuple[str, int]] | None:
        """Nodes for so many equal workers. What is left of the best fit is the best fit for the next worker, so each
        look takes as many as go there."""
        seats: list[tuple[str, int]] = []
        while len(seats) < count:
            place = search.find(request)
            if place is None:
                return None
            n = min(count - len(seats), place.room_for(request, self.makes[place.make]))
            seats += [(place.node_id, request.gpus)] * n
            self._take(place, request, n, log)
        return seats

    def _on_one_node(self, requests: Requests, makes: tuple[int, ...], open_devices: bool, log: Log) -> Workers | None:
        flat = [request for request, count in requests for _ in range(count)]
        if flat[0].whole:
            seat = self._seat_all([(joined(requests), 1)], makes, EVERYWHERE, open_devices, log)
            return tuple((seat[0][0], request.gpus) for request in flat) if seat else None
        request, mark = flat[0], len(log)
        fitting = [
            (place.free, place.node_id, place)
            for place in self._places()
            if place.make in makes and place.copies_of(request, self.makes[place.make]) >= len(flat)
        ]
        if not fitting:
            return None
        place: Place = min(fitting, key=lambda found: found[:2])[2]
        node, before = self._own(place), place.free
        left = len(flat)
        while left:
            n = min(left, node.room_for(request, self.makes[node.make]))
            self._take(node, request, n, log)
            left -= n
        if not open_devices and node.free < before:
            self.put_back(log, mark)
            return None
        return tuple((node.node_id, request.gpus) for request in flat)

    def put(self, candidate: Candidate, workers: Workers, after: Sequence[str] = ()) -> None:
        """Take named nodes for the candidate's workers. What does not fit goes below zero: the caller checks.

        What the victims of `after` free is taken first.
        """
        flat = [request for request, count in requests_of(candidate) for _ in range(count)]
        if after and not is_share(candidate):
            known = set(after).intersection(self.freed.victims)
            self.take_with(candidate, needs_by_node(candidate, workers), known)
            return
        pairs = zip(flat, (node_id for node_id, _ in workers), strict=True)
        for (request, node_id), equal in groupby(pairs):
            left = sum(1 for _ in equal)
            while left:
                place = self._by_name(node_id)
                n = max(1, min(left, place.devices_for(request, self.makes[place.make])))
                self._take(place, request, n, [])
                left -= n

    # ── making room ────────────────────────────────────────────────────────────────────────────────

    def enlarge(self, node_id: str, names: set[str], log: Log) -> None:
        """Treat what these victims would free on a node as free, until the log is put back."""
        node = self._own(self._by_name(node_id), node_id)
        self._note(node, log)
        more = self.freed.room(node_id, names)
        node.names = tuple(n for n in node.names if not self._is_freed(node_id, n, names))
        self._grow(node, more)
        self._file(node)

    def suffices(self, node_id: str, need: Amounts, anti_affinity: str, names: set[str]) -> bool:
        """Whether a node takes this beside what it has to give once these victims are gone."""
        place, more = self._by_name(node_id), self.freed.room(node_id, names)
        return (
            need.gpus <= place.free + more.gpus
            and (
                place.cpu_milli == NO_LIMIT or not need.cpu_milli or need.cpu_milli <= place.cpu_milli + more.cpu_milli
            )
            and (
                place.memory_mib == NO_LIMIT
                or not need.memory_mib
                or need.memory_mib <= place.memory_mib + more.memory_mib
            )
            and (anti_affinity not in place.names or self._is_freed(node_id, anti_affinity, names))
        )

    def take_with(self, candidate: Candidate, needs: dict[str, Amounts], names: set[str]) -> tuple[str, ...]:
        """Take whole devices, from what these victims free first; those of them that it needs, in order."""
        used: set[str] = set()
        for node_id, need in needs.items():
            node = self._own(self._by_name(node_id), node_id)
            holders = self.freed.holders(node_id, candidate.anti_affinity) if candidate.anti_affinity else []
            if candidate.anti_affinity in node.source.affinity_taken:
                used.update(names.intersection(holders))
                self.freed.evicted |= used
            rest, helped = self.freed.take(node_id, self._limited(node, need), names)
            used |= helped
            self._grow(node, Amounts(-rest.gpus, -rest.cpu_milli, -rest.memory_mib))
            node.opened += need.gpus
            self._name(node, candidate.anti_affinity)
            self._file(node)
        return tuple(sorted(used))

    def _is_freed(self, node_id: str, anti_affinity: str, names: set[str]) -> bool:
        """Whether nobody but these victims keeps the name on the node, and nobody took it since."""
        node = self._by_name(node_id)
        holders = self.freed.holders(node_id, anti_affinity)
        taken_once = anti_affinity in node.source.affinity_taken and node.names.count(anti_affinity) == 1
        return taken_once and bool(holders) and names.issuperset(holders)

    def _limited(self, node: Place, need: Amounts) -> Amounts:
        """Without what is not accounted on the node."""
        return Amounts(
            need.gpus,
            0 if node.cpu_milli == NO_LIMIT else need.cpu_milli,
            0 if node.memory_mib == NO_LIMIT else need.memory_mib,
        )

    def _grow(self, node: Touched, more: Amounts) -> None:
        if node.cpu_milli != NO_LIMIT:
            node.cpu_milli += more.cpu_milli
        if node.memory_mib != NO_LIMIT:
            node.memory_mib += more.memory_mib
        self._set_free(node, node.free + more.gpus)

    # ── what is left ───────────────────────────────────────────────────────────────────────────────

    def stranded_gpus(self) -> int:
        """Idle devices left on the nodes of which a device was taken: what the fragmentation term counts."""
        return sum(t.free + self.freed.left_of_evicted(t.node_id) for t in self._touched.values() if t.opened)

    def opened(self) -> list[str]:
        """Nodes of which an idle device was taken."""
        return [n for n, t in self._touched.items() if t.opened]

    def left_on(self, node_id: str) -> tuple[int, int, int]:
        """(GPUs, cpu, memory) free on a node."""
        place = self._by_name(node_id)
        return place.free, place.cpu_milli, place.memory_mib

    def lots(self) -> Iterator[Lot]:
        """All nodes that have an idle device or a victim, in a fixed order."""
        victims = self.freed.on.keys()
        for shelf in self._shelves:
            if shelf.count and (shelf.free or not victims.isdisjoint(shelf.left)):
                yield _lot(shelf, tuple(sorted(shelf.left)))
        for _, node in sorted(self._touched.items()):
            if node.free or node.node_id in victims:
                yield _lot(node, (node.node_id,))

    def _places(self) -> Iterator[Place]:
        yield from (shelf for shelf in self._shelves if shelf.count)
        yield from self._touched.values()

    # ── filing ─────────────────────────────────────────────────────────────────────────────────────

    def _shelve(self, node_class: NodeClass, named: set[str]) -> None:
        """A shelf per class, and one per node that some candidate avoids."""
        alone = named.intersection(node_class.node_ids) if named else set()
        rest: Sequence[str] = node_class.node_ids
        if alone:
            rest = [n for n in rest if n not in alone]
        make = self._number[make_of(node_class)]
        scopes = self._scopes(node_class)
        indexes = [self._index_of(scope) for scope in scopes]
        for index in indexes:
            index.idle[make, node_class.free_gpus] += len(node_class.node_ids)
        for ids in ([rest] if rest else []) + [[n] for n in sorted(alone)]:
            shelf = Shelf(ids, node_class, make, scopes)
            self._shelves.append(shelf)
            for index in indexes:
                index.places.append(shelf)
            if self._gradient:
                self._gradient.add(shelf)

    def _index_of(self, scope: Scope) -> _Index:
        index = self._index.get(scope)
        if index is None:
            index = self._index[scope] = _Index()
        return index

    def _fill(self, index: _Index) -> None:
        index.in_use = True
        for place in index.places:
            if place.count:
                self._file_in(index, place)

    def _scopes(self, node_class: NodeClass) -> tuple[Scope, ...]:
        scopes = [EVERYWHERE]
        for level in self._levels:
            domain = domain_of(level, node_class, "")
            if domain:
                scopes += [(level, ""), (level, domain)]
        return tuple(scopes)

    def _file(self, place: Place) -> None:
        if self._gradient:
            self._gradient.touch(place)
        for scope in place.scopes:
            index = self._index[scope]
            if index.in_use:
                self._file_in(index, place)

    def _file_in(self, index: _Index, place: Place) -> None:
        self._entries += 1
        entry = (place.node_id, self._entries, place.stamp, place)
        if place.free > 0:
            heapq.heappush(index.whole.setdefault((place.make, place.free), []), entry)
        if self._with_shares and place.shares:
            sizes, heaps = index.shares.setdefault(place.make, ([], {}))
            for share in set(place.shares):
                if share not in heaps:
                    heaps[share] = []
                    insort(sizes, share)
                heapq.heappush(heaps[share], entry)
        if self._profiles:
            for profile, _ in place.instances:
                if profile in self._profiles:
                    heapq.heappush(index.instances.setdefault((place.make, profile), []), entry)

    # ── finding ────────────────────────────────────────────────────────────────────────────────────

    def _may_have(self, request: Request, count: int, makes: tuple[int, ...]) -> bool:
        """A necessary condition, cheap: whether the idle devices alone would do."""
        return _room(self._index[EVERYWHERE], request, makes) >= count

    def _domains(self, requests: Requests, makes: tuple[int, ...], level: TopologyLevel) -> list[str]:
        """Domains of the level that may have room for all workers, the one with the least room first."""
        if not requests[0][0].whole:
            rooms = [(self._share_rooms(requests[0][0], makes, level), sum(count for _, count in requests))]
        else:
            by_size = sorted(requests, key=lambda r: -r[0].gpus)
            rooms = [(self._whole_rooms(request, makes, level), count) for request, count in by_size]
        first, most = rooms[0]
        fitting = [domain for domain, room in first.items() if room >= most]
        for room, count in rooms[1:]:
            fitting = [domain for domain in fitting if room.get(domain, 0) >= count]
        return sorted(fitting, key=lambda d: (first[d], d))

    def _whole_rooms(self, request: Request, makes: tuple[int, ...], level: TopologyLevel) -> dict[str, int]:
        """Workers that the idle devices of each domain take. Kept, and only renewed where something changed."""
        key = (level.value, makes, request.gpus, bool(request.anti_affinity))
        seen, rooms = self._rooms.get(key, (-1, {}))
        scopes = self._index if seen < 0 else set(self._changed[seen:])
        for scope in scopes:
            if scope[0] == level and scope[1]:
                rooms[scope[1]] = _room(self._index[scope], request, makes)
        self._rooms[key] = (len(self._changed), rooms)
        return rooms

    def _share_rooms(self, request: Request, makes: tuple[int, ...], level: TopologyLevel) -> dict[str, int]:
        rooms: dict[str, int] = defaultdict(int)
        for place in self._places():
            domain = domain_of(level, place.source, "")
            if domain and place.make in makes:
                rooms[domain] += place.count * place.copies_of(request, self.makes[place.make])
        return rooms

    def _by_name(self, node_id: str) -> Place:
        if node_id in self._touched:
            return self._touched[node_id]
        if not self._shelf_of:
            self._shelf_of = {n: shelf for shelf in self._shelves for n in shelf.left}
        return self._own(self._shelf_of[node_id], node_id)

    # ── taking ─────────────────────────────────────────────────────────────────────────────────────

    def _take(self, place: Place, request: Request, n: int, log: Log) -> None:
        """Room for `n` equal workers; shares all from one device."""
        node = self._own(place)
        self._note(node, log)
        taken = n * request.gpus if request.whole else self._take_part(node, request, n)
        self._grow(node, Amounts(-taken, -n * request.cpu_milli, -n * request.memory_mib))
        node.opened += taken
        self._name(node, request.anti_affinity)
        self._file(node)

    def _note(self, node: Touched, log: Log) -> None:
        log.append(
            _Before(
                node, node.free, node.shares, node.instances, node.cpu_milli, node.memory_mib, node.names, node.opened
            )
        )

    def _name(self, node: Touched, anti_affinity: str) -> None:
        if anti_affinity:
            node.names = (*node.names, anti_affinity)

    def _own(self, place: Place, node_id: str | None = None) -> Touched:
        """The record of one node, cut off its shelf when it is still on one (by default the shelf's first)."""
        if isinstance(place, Touched):
            return place
        assert isinstance(place, Shelf)
        touched, file_again = place.cut(node_id or place.node_id)
        if file_again:
            self._file(place)
        self._touched[touched.node_id] = touched
        if self._gradient:
            self._gradient.touch(place)
            self._gradient.add(touched)
        for scope in touched.scopes:
            self._index[scope].places.append(touched)
        return touched

    def _set_free(self, node: Touched, free: int) -> None:
        if free != node.free:
            for scope in node.scopes:
                idle = self._index[scope].idle
                idle[node.make, node.free] -= 1
                idle[node.make, free] += 1
            self._changed += node.scopes[1:]
        node.free = free
        node.stamp += 1

    def put_back(self, log: Log, mark: int = 0) -> None:
        """Undo what was written to the log since it was so long."""
        while len(log) > mark:
            before = log.pop()
            node = before.node
            node.shares, node.instances, node.names = before.shares, before.instances, before.names
            node.cpu_milli, node.memory_mib, node.opened = before.cpu_milli, before.memory_mib, before.opened
            self._set_free(node, before.free)
            self._file(node)

    def _take_part(self, node: Touched, request: Request, n: int) -> int:
        """Shares or instances of one device; returns the idle devices opened for them (0 or 1)."""
        make = self.makes[node.make]
        if request.mig_profile:
            return _take_instances(node, make, request.mig_profile, n)
        one = request.milli_of(make)
        shares = list(node.shares)
        index = bisect_left(shares, one)
        opened = index == len(shares)
        left = (WHOLE_GPU if opened else shares.pop(index)) - n * one
        if left:
            insort(shares, left)
        node.shares = tuple(shares)
        return int(opened)


class _Search:
    """The looks for the workers of one gang in one scope."""

    def __init__(self, stock: Stock, index: _Index, makes: tuple[int, ...], open_devices: bool) -> None:
        self._stock, self._index, self._makes, self._open_devices = stock, index, makes, open_devices
        self._max_free = stock._max_free
        self._aside: list[tuple[Heap, Entry]] = []
        self._with_aside: set[int] = set()
        """`id` of the heaps from which something was laid aside."""

    def find(self, request: Request) -> Place | None:
        gradient = self._stock._gradient
        if gradient and self._index is self._stock._index[EVERYWHERE] and not request.mig_profile:
            return gradient.best(request, self._makes, lambda place: self._is_open(place, request))
        if not request.whole:
            place = self._instance(request) if request.mig_profile else self._smallest_share(request)
            if place is not None or not self._open_devices:
                return place
        whole = self._index.whole
        for free in range(request.gpus, self._max_free + 1):
            place = self._lowest(request, [heap for make in self._makes if (heap := whole.get((make, free)))])
            if place is not None:
                return place
        return None

    def _is_open(self, place: Place, request: Request) -> bool:
        if not place.admits(request):
            return False
        if self._open_devices or request.whole:
            return True
        return bool(place.shares) and place.shares[-1] >= request.milli_of(self._stock.makes[place.make])

    def end(self) -> None:
        """Back with what was laid aside."""
        for heap, entry in self._aside:
            heapq.heappush(heap, entry)

    def _instance(self, request: Request) -> Place | None:
        heaps = self._index.instances
        return self._lowest(request, [heap for make in self._makes if (heap := heaps.get((make, request.mig_profile)))])

    def _smallest_share(self, request: Request) -> Place | None:
        """Of all free shares that suffice, one of which the least is left."""
        left: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for make in self._makes:
            if make in self._index.shares:
                need = request.milli_of(self._stock.makes[make])
                sizes = self._index.shares[make][0]
                for size in sizes[bisect_left(sizes, need) :]:
                    left[size - need].append((make, size))
        for _, filed in sorted(left.items()):
            heaps = [self._index.shares[make][1][size] for make, size in filed]
            place = self._lowest(request, heaps)
            for (make, size), heap in zip(filed, heaps, strict=True):
                if not heap and id(heap) not in self._with_aside:  # all its entries were stale
                    sizes, by_size = self._index.shares[make]
                    del by_size[size]
                    del sizes[bisect_left(sizes, size)]
            if place is not None:
                return place
        return None

    def _lowest(self, request: Request, heaps: Iterable[Heap]) -> Place | None:
        """The place with the lowest node id that admits the request, of all heaps."""
        found = [entry for heap in heaps if (entry := self._first(request, heap))]
        return min(found)[3] if found else None

    def _first(self, request: Request, heap: Heap) -> Entry | None:
        """The first entry whose place admits the request; stale ones are dropped on the way."""
        while heap:
            entry = heap[0]
            if entry[2] != entry[3].stamp:
                heapq.heappop(heap)
            elif entry[3].admits(request):
                return entry
            else:
                self._aside.append((heap, heapq.heappop(heap)))
                self._with_aside.add(id(heap))
        return None


def _without_idle_names(classes: Sequence[NodeClass], levels: Sequence[TopologyLevel]) -> Iterable[NodeClass]:
    """Classes that only differ in domains of levels that nobody asks about become one."""
    same: dict[tuple[object, ...], list[NodeClass]] = defaultdict(list)
    for c in classes:
        domains = tuple(domain_of(level, c, "") for level in levels)
        limits = (c.free_cpu_milli, c.free_memory_mib)
        same[make_of(c), c.free_gpus, c.shares, c.instances, limits, c.affinity_taken, domains].append(c)
    for group in same.values():
        node_ids = tuple(n for c in group for n in c.node_ids)
        yield replace(group[0], node_ids=node_ids) if len(group) > 1 else group[0]


def needs_by_node(candidate: Candidate, workers: Workers) -> dict[str, Amounts]:
    """What whole workers on these nodes take of each."""
    needs: dict[str, Amounts] = {}
    for node_id, gpus in workers:
        one = Amounts(gpus, candidate.cpu_milli, candidate.memory_mib)
        needs[node_id] = needs[node_id].plus(one) if node_id in needs else one
    return needs


def _take_instances(node: Touched, make: Make, profile: str, n: int) -> int:
    free = Counter(dict(node.instances))
    opened = not free[profile]
    if opened:
        free.update(dict(mig.opened(make.mig, profile) or ()))
    free[profile] -= n
    node.instances = tuple(sorted((+free).items()))
    return int(opened)


def _room(index: _Index, request: Request, makes: tuple[int, ...]) -> int:
    """Workers that the idle devices of a scope take."""
    return sum(
        n * (1 if request.anti_affinity else free // request.gpus)
        for (make, free), n in index.idle.items()
        if free >= request.gpus and make in makes
    )


def _lot(place: Place, node_ids: tuple[str, ...]) -> Lot:
    source = place.source
    return Lot(
        gpu_type=source.gpu_type,
        free=place.free,
        cpu_milli=place.cpu_milli,
        memory_mib=place.memory_mib,
        node_ids=node_ids,
        nvlink=source.nvlink,
        rack=source.rack,
        zone=source.zone,
        affinity_taken=tuple(sorted(set(place.names))),
        gpu_memory_mib=source.gpu_memory_mib,
        mig=source.mig,
    )
