"""Recent run times by key as a few numbers: the features that boosting learns from."""

from __future__ import annotations

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from .curves import LONGEST_S
from .jobs import TEXT_MAX, Features, Finished, Floats, gpu_class, kept_with_job, part, stem, usable

_FORGET: Final = 0.3
"""Weight of the newest in the running mean."""
_UNKNOWN: Final = -5.0
"""Stands for a mean or a last run time that there is none of; ln(1 s) is 0."""
_NEVER: Final = (_UNKNOWN, 0.0, _UNKNOWN, 0.0)
"""(mean, mean square deviation, last, count) of a key without jobs."""
_WEEK_S: Final = 7 * 86_400.0
ITERATIONS: Final = ("iterations", "steps", "epochs")
"""Labels that say how much work a job is."""
FEATURES: Final = (
    "log2_gpus", "hour", "weekday", "iterations",
    *(f"{key}_{what}" for key in ("name_size", "name", "owner", "owner_size", "tenant_size", "all")
      for what in ("mean", "last", "spread", "count")),
)  # fmt: skip
"""Columns of a row, in order. Another list is another version (`boosting.FORMAT`)."""


class RecentState(Struct, frozen=True, array_like=True):
    keys_max: int
    keys: list[str]
    numbers: list[tuple[float, float, float, float]]


class Recent:
    """Running mean, spread and last of ln(run time) by key, at most `keys_max` keys, those longest unused go first."""

    def __init__(self, keys_max: int = 32_768) -> None:
        self.keys_max = keys_max
        self._of: OrderedDict[str, tuple[float, float, float, float]] = OrderedDict()
        """Key -> (mean, mean square deviation, last, count), by last use."""

    def observe(self, job: Finished) -> None:
        """Censored jobs count with what they ran: a mean has no other way, and the curves have a better one."""
        if not usable(job.run_s):
            return
        value = math.log(min(max(job.run_s, 1.0), LONGEST_S))
        for key in _keys(job.features):
            mean, square, _, count = self._of.pop(key, (value, 0.0, value, 0.0))
            share = max(_FORGET, 1.0 / (count + 1.0))
            off = value - mean
            self._of[key] = (
                mean + share * off,
                (1.0 - share) * (square + share * off * off),
                value,
                count + 1.0,
            )
            if len(self._of) > self.keys_max:
                self._of.popitem(last=False)

    def row(self, job: Features) -> list[float]:
        """`FEATURES` of a job, from what was observed so far."""
        return [float(value) for value in self.rows([job])[0]]

    def rows(self, jobs: Sequence[Features]) -> Floats:
        """[job, feature]."""
        keys = itertools.chain.from_iterable(map(_keys, jobs))
        found = itertools.chain.from_iterable(map(self._of.get, keys, itertools.repeat(_NEVER)))
        mean, square, last, count = np.moveaxis(np.fromiter(found, np.float64).reshape(len(jobs), -1, 4), 2, 0)
        gpus = np.array([min(max(1, job.gpus), 10**6) for job in jobs], np.float64)
        submitted = np.array([job.submitted_at if math.isfinite(job.submitted_at) else 0.0 for job in jobs])
        when_s = submitted % _WEEK_S  # day 0 is a Thursday
        out = np.empty((len(jobs), len(FEATURES)))
        out[:, 0], out[:, 1], out[:, 2] = np.log2(gpus), (when_s / 3600.0) % 24.0, when_s // 86_400.0
        out[:, 3] = [_iterations(job) for job in jobs]
        out[:, 4::4], out[:, 5::4], out[:, 7::4] = mean, last, np.log1p(count)
        out[:, 6::4] = np.where(count > 0, np.sqrt(square), _UNKNOWN)
        return out

    @property
    def memory_bytes(self) -> int:
        return 300 * len(self._of)

    def state(self) -> RecentState:
        return RecentState(self.keys_max, list(self._of), list(self._of.values()))

    @classmethod
    def restored(cls, state: RecentState) -> Recent:
        """Raises ValueError."""
        if len(state.keys) != len(state.numbers) or len(state.keys) > state.keys_max:
            raise ValueError("keys and numbers do not match")
        if not all(map(math.isfinite, (number for row in state.numbers for number in row))):
            raise ValueError("a mean is not finite")
        if any(square < 0 or count < 0 for _, square, _, count in state.numbers):
            raise ValueError("a spread or count is below 0")
        found = cls(state.keys_max)
        found._of = OrderedDict(zip(state.keys, state.numbers, strict=True))
        return found


@kept_with_job
def _keys(job: Features) -> tuple[str, ...]:
    """As in `FEATURES`."""
    return _keys_of(part(job.owner), part(job.tenant), job.name[:TEXT_MAX], job.gpus)


@functools.lru_cache(maxsize=1 << 14)
def _keys_of(owner: str, tenant: str, told: str, gpus: int) -> tuple[str, ...]:
    name, size = stem(told), gpu_class(gpus)
    return (
        f"ns\x1f{owner}\x1f{name}\x1f{size}",
        f"n\x1f{owner}\x1f{name}",
        f"o\x1f{owner}",
        f"os\x1f{owner}\x1f{size}",
        f"ts\x1f{tenant}\x1f{size}",
        "all",
    )


def _iterations(job: Features) -> float:
    for label in ITERATIONS:
        if label in job.labels:
            try:
                told = float(job.labels[label])
            except ValueError:
                return -1.0
            return math.log1p(told) if 0 <= told < math.inf else -1.0
    return -1.0
