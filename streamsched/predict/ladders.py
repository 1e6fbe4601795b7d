"""Survival curves by groups that grow narrower: each is drawn towards the wider one above it.

Two predictors are of this form:

- `survival()`: Kaplan-Meier curves by GPU class, tenant and queue, over some thousand jobs.
- `history()`: what the same user's jobs of like names took lately, as QSSF does it (Hu et al., "Characterization and
  Prediction of Deep Learning Workloads in Large-Scale GPU Datacenters", SC'21, section 4.2: same user and similar
  name, weighted towards the latest; else the user; else everybody). QSSF compares names by edit distance; here names
  are like when they are equal without digits, punctuation and case, which is O(1). `neighbours.py` has the rest.

How far a group's jobs count against its parent's is `strength` (`Counts.shrunk`): the fallback is by counts, gradually.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from .counts import Counts, CountsState, Rows
from .curves import BINS, PRIOR_HAZARDS
from .curves import survival as survival_of
from .jobs import TEXT_MAX, Features, Finished, Floats, gpu_class, kept_with_job, part, stem, usable
from .predictor import Predictor

SEPARATOR: Final = "\x1f"
"""Between the parts of a key."""
_SMEAR: Final = (1 / 9, 2 / 9, 3 / 9, 2 / 9, 1 / 9)
"""A run time of 100 s makes one of 80 to 125 s likely."""


class LadderState(Struct, frozen=True, array_like=True):
    kind: str
    strength: float
    counts: CountsState


@kept_with_job
def survival_keys(job: Features) -> tuple[str, ...]:
    """From wide to narrow."""
    return _survival_keys(job.gpus, part(job.tenant), part(job.queue))


@kept_with_job
def history_keys(job: Features) -> tuple[str, ...]:
    """From wide to narrow."""
    return _history_keys(part(job.tenant), part(job.owner), job.name[:TEXT_MAX], job.gpus)


@functools.lru_cache(maxsize=1 << 14)
def _survival_keys(gpus: int, tenant: str, queue: str) -> tuple[str, ...]:
    size = gpu_class(gpus)
    return (
        "all",
        f"g{SEPARATOR}{size}",
        f"t{SEPARATOR}{tenant}",
        f"tg{SEPARATOR}{tenant}{SEPARATOR}{size}",
        f"tgq{SEPARATOR}{tenant}{SEPARATOR}{size}{SEPARATOR}{queue}",
    )


@functools.lru_cache(maxsize=1 << 14)
def _history_keys(tenant: str, owner: str, told: str, gpus: int) -> tuple[str, ...]:
    name = stem(told)
    return (
        "all",
        f"t{SEPARATOR}{tenant}",
        f"u{SEPARATOR}{owner}",
        f"ug{SEPARATOR}{owner}{SEPARATOR}{gpus:.6g}",
        f"un{SEPARATOR}{owner}{SEPARATOR}{name}",
        f"ung{SEPARATOR}{owner}{SEPARATOR}{name}{SEPARATOR}{gpus:.6g}",
    )


KEYS: Final[dict[str, Callable[[Features], tuple[str, ...]]]] = {"survival": survival_keys, "history": history_keys}


class Ladder(Predictor):
    """See the module's text; made by `survival()` or `history()`."""

    def __init__(self, kind: str, counts: Counts, strength: float) -> None:
        if not 0 < strength < math.inf:
            raise ValueError("strength has to be above 0")
        self.kind, self.counts, self.strength = kind, counts, strength
        self._keys = KEYS[kind]

    def observe(self, job: Finished) -> None:
        if usable(job.run_s):
            self.counts.add(self._keys(job.features), job.run_s, job.censored)

    def set_running(self, jobs: Sequence[Features], ages_s: Sequence[float]) -> None:
        """Jobs that run now and for how long (s): without them, only short jobs are known at first."""
        self.counts.set_running([self._keys(job) for job in jobs], ages_s)

    def knows(self, job: Features) -> bool:
        """Whether a job of its narrowest group or the one above was among those that count."""
        return any(key in self.counts.slots for key in self._keys(job)[-2:])

    def curves(self, jobs: Sequence[Features]) -> Floats:
        if not jobs:
            return np.empty((0, BINS + 1))
        distinct: dict[tuple[str, ...], int] = {}
        of_job = [distinct.setdefault(self._keys(job), len(distinct)) for job in jobs]
        return survival_of(self._hazards(list(distinct)))[of_job]

    def _hazards(self, ladders: Sequence[tuple[str, ...]]) -> Rows:
        hazards = np.broadcast_to(PRIOR_HAZARDS.astype(np.float32), (len(ladders), len(PRIOR_HAZARDS)))
        for level in zip(*ladders, strict=True):
            rows = self.counts.rows(level)
            if rows.any():
                hazards = self.counts.shrunk(rows, hazards, self.strength)
        return hazards

    @property
    def memory_bytes(self) -> int:
        return self.counts.memory_bytes

    def state(self) -> LadderState:
        return LadderState(self.kind, self.strength, self.counts.state())

    @classmethod
    def restored(cls, state: LadderState) -> Ladder:
        """Raises ValueError."""
        if state.kind not in KEYS:
            raise ValueError(f"unknown kind {state.kind!r}")
        return cls(state.kind, Counts.restored(state.counts), state.strength)


def survival(half_life: float = 2000.0, strength: float = 10.0, keys_max: int = 8_192) -> Ladder:
    """`half_life`: of a group's jobs, by number of jobs."""
    return Ladder("survival", Counts(half_life, keys_max), strength)


def history(half_life: float = 5.0, strength: float = 1.0, keys_max: int = 32_768) -> Ladder:
    return Ladder("history", Counts(half_life, keys_max, _SMEAR), strength)
