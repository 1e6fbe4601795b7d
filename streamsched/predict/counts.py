"""Decayed counts of run times by key, in bounded memory.

Each key has a row of counts of jobs that *ended* in each bin of the grid, and of jobs *at risk* at each bin's start
(run times that reached it, whether they ended or were censored). Old jobs count less: each new one weighs more by
2^(1/half-life) than the last of its key, which is the same and costs nothing for those that are there; a row is
scaled down before its numbers grow large. Keys beyond `keys_max` replace those that were longest without a job.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .curves import BINS, bin_of

Rows = NDArray[np.float32]
Slots = NDArray[np.int64]

_UNIT_MAX: Final = 1e6
_FIRST_ROWS: Final = 64


class CountsState(Struct, frozen=True, array_like=True):
    """As stored. Rows by key in the order of their last use."""

    half_life: float
    kernel: list[float]
    keys_max: int
    keys: list[str]
    rows: list[int]
    """Of the keys: sums over rows go on in the same order."""
    ended: bytes
    at_risk: bytes
    unit: bytes


class Counts:
    """Row 0 belongs to no key and is empty: what is not known has the counts of nothing."""

    def __init__(self, half_life: float, keys_max: int, kernel: Sequence[float] = (1.0,)) -> None:
        """`kernel`: how one end is spread over the bins around it (odd length, sum 1)."""
        if not 0.1 <= half_life < math.inf or keys_max < 1:
            raise ValueError("half_life has to be 0.1 or more, keys_max above 0")
        if len(kernel) % 2 == 0 or not abs(math.fsum(kernel) - 1.0) < 1e-3 or min(kernel) < 0:
            raise ValueError("a kernel has an odd number of shares that add up to 1")
        self.half_life, self.keys_max = half_life, keys_max
        self._growth = 2.0 ** (1.0 / half_life)
        self.kernel = np.asarray(kernel, np.float32)
        self._reach = len(kernel) // 2
        self._tail = np.cumsum(self.kernel[::-1])[::-1].astype(np.float32)
        self.slots: OrderedDict[str, int] = OrderedDict()
        """By last use, the oldest first. A plain dict would search past the holes of all it has dropped."""
        self._allocate(_FIRST_ROWS)

    def _allocate(self, rows: int) -> None:
        self.ended: Rows = np.zeros((rows, BINS), np.float32)
        self.at_risk: Rows = np.zeros((rows, BINS), np.float32)
        self.unit: Rows = np.ones(rows, np.float32)
        """Weight of the last job of each row."""
        self.running_row = np.zeros(rows, np.int64)
        self.running: Rows = np.zeros((1, BINS), np.float32)
        """Jobs at risk that still run, by `running_row`; of weight 1."""

    def add(self, keys: Sequence[str], run_s: float, censored: bool) -> None:
        """Count one job under each of the keys."""
        place = bin_of(run_s)
        for key in keys:
            row = self._row(key)
            weight = self.unit[row] * self._growth
            self.unit[row] = weight
            self._count(row, place, weight, censored)
            if weight > _UNIT_MAX:
                self.ended[row] /= weight
                self.at_risk[row] /= weight
                self.unit[row] = 1.0

    def _count(self, row: int, place: int, weight: np.float32, censored: bool) -> None:
        if censored or not self._reach or not self._reach <= place < BINS - self._reach:
            self.at_risk[row, : place + 1] += weight
            if not censored:
                self.ended[row, place] += weight
            return
        low, high = place - self._reach, place + self._reach + 1
        self.at_risk[row, :low] += weight
        self.at_risk[row, low:high] += weight * self._tail
        self.ended[row, low:high] += weight * self.kernel

    def _row(self, key: str) -> int:
        row = self.slots.get(key, 0)
        if row:
            self.slots.move_to_end(key)
        else:
            row = self.slots[key] = self._new_row()
        return row

    def _new_row(self) -> int:
        used = len(self.slots)
        if used >= self.keys_max:
            row = self.slots.popitem(last=False)[1]
            self.ended[row], self.at_risk[row], self.unit[row], self.running_row[row] = 0.0, 0.0, 1.0, 0
            return row
        if used + 1 >= len(self.unit):
            self._grow()
        return used + 1

    def _grow(self) -> None:
        more = min(2 * len(self.unit), self.keys_max + 1) - len(self.unit)
        empty = np.zeros((more, BINS), np.float32)
        self.ended, self.at_risk = np.concatenate([self.ended, empty]), np.concatenate([self.at_risk, empty])
        self.unit = np.concatenate([self.unit, np.ones(more, np.float32)])
        self.running_row = np.concatenate([self.running_row, np.zeros(more, np.int64)])

    def rows(self, keys: Sequence[str]) -> Slots:
        """Rows of these keys, 0 for those not known."""
        get = self.slots.get
        return np.array([get(key, 0) for key in keys], np.int64)

    def set_running(self, keys: Sequence[Sequence[str]], ages_s: Sequence[float]) -> None:
        """Jobs that run now, each under its keys: they count as censored at their ages. Replaces those told before.

        As of the jobs that ended, the latest count most: each weighs less by 2^(-1/half-life) than the next younger
        one of its key. Else a hundred that run would outweigh the few that a short half-life leaves of the ended.
        """
        numbers: dict[int, int] = {}
        rows, places, weights = list[int](), list[int](), list[float]()
        latest: dict[int, float] = {}
        for place, job in sorted((bin_of(age_s), job) for job, age_s in enumerate(ages_s)):
            for key in keys[job]:
                row = self.slots.get(key, 0)
                if row:
                    rows.append(numbers.setdefault(row, len(numbers) + 1))
                    places.append(place)
                    weights.append(latest.get(row, 1.0))
                    latest[row] = weights[-1] / self._growth
        ended = np.zeros((len(numbers) + 1, BINS))
        np.add.at(ended, (np.array(rows, np.int64), np.array(places, np.int64)), weights)
        self.running = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1].astype(np.float32)
        self.running_row[:] = 0
        self.running_row[list(numbers)] = range(1, len(numbers) + 1)

    def shrunk(self, rows: Slots, parent: Rows, strength: float) -> Rows:
        """[job, bin] hazards of these rows, drawn towards the parent's as if `strength` jobs had shown those:

            h = (ended + k h_parent) / (at risk + k)

        which is the mean of a beta prior after the jobs were seen (cf. Susarla & Van Ryzin, JASA 71, 1976). It is the
        parent's hazard where nobody was at risk, so a few jobs do not make a narrow curve, nor a short one.
        """
        unit = self.unit[rows, None]
        prior = strength * unit
        at_risk = np.take(self.at_risk, rows, axis=0)
        at_risk += prior
        if len(self.running) > 1:
            at_risk += self.running[self.running_row[rows]] * unit
        prior = prior * parent
        prior += np.take(self.ended, rows, axis=0)
        prior /= at_risk
        np.minimum(prior, 1.0, out=prior)  # sums of many small numbers need not agree to the last bit
        return prior

    def weight(self, rows: Slots) -> Rows:
        """[job] how many jobs count in a row, after decay."""
        return np.asarray(self.at_risk[rows, 0] / self.unit[rows], np.float32)

    @property
    def memory_bytes(self) -> int:
        return (
            self.ended.nbytes
            + self.at_risk.nbytes
            + self.running.nbytes
            + self.unit.nbytes
            + sum(map(len, self.slots))
            + 150 * len(self.slots)
        )

    def state(self) -> CountsState:
        rows = np.array(list(self.slots.values()), np.int64)
        return CountsState(
            half_life=self.half_life,
            kernel=self.kernel.tolist(),
            keys_max=self.keys_max,
            keys=list(self.slots),
            rows=rows.tolist(),
            ended=self.ended[rows].tobytes(),
            at_risk=self.at_risk[rows].tobytes(),
            unit=self.unit[rows].tobytes(),
        )

    @classmethod
    def restored(cls, state: CountsState) -> Counts:
        """Raises ValueError where the state is not one."""
        counts = cls(state.half_life, state.keys_max, state.kernel)
        keys = state.keys
        if len(set(keys)) != len(keys) or len(keys) > state.keys_max or sorted(state.rows) != list(_numbers(keys)):
            raise ValueError("keys twice, or too many, or their rows are not 1 to their number")
        shape = (len(keys), BINS)
        ended, at_risk = _floats(state.ended, shape), _floats(state.at_risk, shape)
        unit = _floats(state.unit, (len(keys),))
        if (unit <= 0).any():
            raise ValueError("a weight is not above 0")
        counts._allocate(max(_FIRST_ROWS, len(keys) + 1))
        counts.slots = OrderedDict(zip(keys, state.rows, strict=True))
        counts.ended[state.rows], counts.at_risk[state.rows], counts.unit[state.rows] = ended, at_risk, unit
        return counts


def _numbers(keys: Sequence[str]) -> range:
    return range(1, len(keys) + 1)


def _floats(data: bytes, shape: tuple[int, ...]) -> Rows:
    found = np.frombuffer(data, np.float32)
    if found.size != np.prod(shape, dtype=np.int64) or not np.isfinite(found).all() or (found < 0).any():
        raise ValueError("counts of another size, negative or not finite")
    return found.reshape(shape)
