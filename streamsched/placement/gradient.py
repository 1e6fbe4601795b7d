"""Where a worker does least harm to what comes next: the fragmentation gradient, for pools that share devices.

After Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent"
(USENIX ATC'23), section 4. The fragmentation of a node for a kind of worker is the free GPU that this worker could not
use: all of it where the worker does not fit, else the devices that are too full for it. Expected over the mix of what
the pool's jobs ask for, it is what the gradient of a placement is the growth of. Where it hardly differs between nodes,
best fit decides, by the CPU and GPU that would be left: the gradient alone is zero on every node that is left as useful
as it was. `FIT_WEIGHT` was chosen on other draws of the openb trace than those of `benchmarks/fragmentation.py`.

One row per place of the stock, in NumPy; what is known of a row stays until its place changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streamsched.core.model import WHOLE_GPU
from streamsched.core.problem import Ask

from .request import NO_LIMIT, Make, Request

if TYPE_CHECKING:
    from .stock import Place

FIT_WEIGHT = 300.0
"""Thousandths of a GPU of fragmentation that one unit of best fit counts as."""
_UNLIMITED = 2**60
_ROWS = 64

Array = np.ndarray[Any, Any]


class Gradient:
    """Scores of places for workers. `devices`: the most that a node can have idle or partly used."""

    def __init__(self, mix: Sequence[tuple[Ask, int]], makes: Sequence[Make], devices: int) -> None:
        self._makes = makes
        asks = [_as_request(ask) for ask, _ in mix]
        total = sum(count for _, count in mix)
        self._asks = [(ask, count / total, self._milli_by_make(ask)) for ask, (_, count) in zip(asks, mix, strict=True)]
        self._places: list[Place] = []
        self._row: dict[int, int] = {}
        """By `id` of the place."""
        self._dirty: set[int] = set()
        self._free = np.zeros((_ROWS, max(1, devices)), dtype=np.int64)
        """[row, device] free thousandths; a device that is not there has none."""
        self._cpu = np.zeros(_ROWS, dtype=np.int64)
        self._memory = np.zeros(_ROWS, dtype=np.int64)
        self._make = np.zeros(_ROWS, dtype=np.int64)
        self._version = np.zeros(_ROWS, dtype=np.int64)
        self._scores: dict[Request, tuple[Array, Array]] = {}
        """(score, version of the row that it is for) by row; rows without room score infinity."""
        self._most: tuple[float, float] = (1.0, 1.0)
        """(cpu, thousandths of GPUs) of the largest row so far."""

    def add(self, place: Place) -> None:
        """A place that was not known; `touch` it whenever it changes."""
        row = len(self._places)
        if row == len(self._cpu):
            self._free = np.concatenate([self._free, np.zeros_like(self._free)])
            self._cpu, self._memory, self._make, self._version = (
                np.concatenate([known, np.zeros_like(known)])
                for known in (self._cpu, self._memory, self._make, self._version)
            )
        self._places.append(place)
        self._row[id(place)] = row
        self._make[row] = place.make
        self._dirty.add(row)

    def touch(self, place: Place) -> None:
        self._dirty.add(self._row[id(place)])

    def best(self, request: Request, makes: Sequence[int], admits: Callable[[Place], bool]) -> Place | None:
        """Of the places of these makes that have room, the best that admits the request; of equals the first node."""
        self._renew()
        scores = np.where(np.isin(self._make[: len(self._places)], makes), self._score(request), np.inf)
        while (least := scores.min(initial=np.inf)) < np.inf:
            equal = np.flatnonzero(scores == least)
            if fitting := [place for place in map(self._places.__getitem__, equal) if admits(place)]:
                return min(fitting, key=lambda place: place.node_id)
            scores[equal] = np.inf
        return None

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _renew(self) -> None:
        for row in self._dirty:
            place = self._places[row]
            devices = [*place.shares, *[WHOLE_GPU] * place.free] if place.count else []
            self._free[row] = 0
            self._free[row, : len(devices)] = devices[: self._free.shape[1]]
            self._cpu[row] = _UNLIMITED if place.cpu_milli == NO_LIMIT else place.cpu_milli
            self._memory[row] = _UNLIMITED if place.memory_mib == NO_LIMIT else place.memory_mib
            self._version[row] += 1
        if self._dirty:
            rows = np.fromiter(self._dirty, dtype=np.int64)
            cpu = self._cpu[rows]
            cpu_most, gpu_most = self._most
            limited = cpu[cpu < _UNLIMITED]
            cpu_most = max(cpu_most, float(limited.max())) if len(limited) else cpu_most
            self._most = cpu_most, max(gpu_most, float(self._free[rows].sum(axis=1).max()))
        self._dirty.clear()

    def _score(self, request: Request) -> Array:
        """By row: how much the expected fragmentation grows, and a little for what would be left."""
        count = len(self._places)
        scores, versions = self._scores.get(request, (np.zeros(0), np.zeros(0, dtype=np.int64)))
        if len(scores) < count:
            more = count - len(scores)
            scores = np.concatenate([scores, np.full(more, np.inf)])
            versions = np.concatenate([versions, np.full(more, -1)])
        stale = np.flatnonzero(versions != self._version[:count])
        if len(stale):
            scores[stale] = self._score_rows(request, stale)
            versions[stale] = self._version[stale]
        self._scores[request] = scores, versions
        return scores

    def _score_rows(self, request: Request, rows: Array) -> Array:
        milli = np.where(request.whole, WHOLE_GPU, self._milli_by_make(request)[self._make[rows]])
        scores = np.full(len(rows), np.inf)
        room = (self._free[rows] >= milli[:, None]).sum(axis=1) >= request.gpus
        room &= (self._cpu[rows] >= request.cpu_milli) & (self._memory[rows] >= request.memory_mib)
        if not room.any():
            return scores
        fitting, milli = rows[room], milli[room]
        free, cpu, memory = self._free[fitting], self._cpu[fitting], self._memory[fitting]
        makes = self._make[fitting]
        before = self._fragmentation(free, cpu, memory, makes)
        free = _taken(free, request.gpus, milli)
        cpu = np.where(cpu < _UNLIMITED, cpu - request.cpu_milli, cpu)
        memory = np.where(memory < _UNLIMITED, memory - request.memory_mib, memory)
        growth = self._fragmentation(free, cpu, memory, makes) - before
        cpu_most, gpu_most = self._most
        left = np.where(cpu < _UNLIMITED, cpu / cpu_most, 0.0) + free.sum(axis=1) / gpu_most
        # Rounded, so that equal nodes are equal whatever the order of the sums was.
        scores[room] = np.round(growth + FIT_WEIGHT * 0.5 * left, 6)
        return scores

    def _fragmentation(self, free: Array, cpu: Array, memory: Array, makes: Array) -> Array:
        """Expected fragmentation of rows, thousandths of a GPU."""
        total = free.sum(axis=1)
        expected = np.zeros(len(free))
        for ask, share, by_make in self._asks:
            milli = by_make[makes]
            usable = free >= milli[:, None]
            fits = (usable.sum(axis=1) >= ask.gpus) & (cpu >= ask.cpu_milli) & (memory >= ask.memory_mib)
            expected += share * np.where(fits, total - (free * usable).sum(axis=1), total)
        return expected

    def _milli_by_make(self, request: Request) -> Array:
        """Thousandths of one device that the worker takes on each make; above 1000 where it may not be."""
        return np.array(
            [
                (WHOLE_GPU if request.whole else request.milli_of(make))
                if request.allows(make.gpu_type) and request.suits(make)
                else WHOLE_GPU + 1
                for make in self._makes
            ]
            or [0],
            dtype=np.int64,
        )


def _as_request(ask: Ask) -> Request:
    return Request(
        gpus=ask.gpus,
        gpu_milli=ask.gpu_milli,
        cpu_milli=ask.cpu_milli,
        memory_mib=ask.memory_mib,
        gpu_types=ask.gpu_types,
        avoid_nodes=frozenset(),
        gpu_memory_mib=ask.gpu_memory_mib,
    )


def _taken(free: Array, gpus: int, milli: Array) -> Array:
    """`free` after the worker was put on each row, on the fullest devices with room."""
    after = free.copy()
    need = milli[:, None]
    order = np.argsort(np.where(free >= need, free, WHOLE_GPU + 1), axis=1, kind="stable")[:, :gpus]
    np.put_along_axis(after, order, np.take_along_axis(free, order, axis=1) - need, axis=1)
    return after
