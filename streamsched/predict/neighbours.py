"""Run times of the jobs whose words are most alike (retrieval, as SchedMate does it with embeddings).

A job is a bag of tokens: words of its name, its script and its labels, its user, tenant, queue and GPU class, without
digits. Tokens are hashed with a sign into `WIDTH` numbers (feature hashing: Weinberger et al., ICML 2009) of length 1
per job, so that the scalar product of two is the cosine of their likeness, give or take collisions. Jobs of equal
tokens are one *prototype* with counts of its own: recurring jobs cost nothing more, and memory is bounded by the number
of prototypes. A prediction is the curve of the nearest prototypes, weighted by a power of their likeness and drawn
towards everybody's.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .counts import Counts, CountsState, Rows
from .curves import BINS, PRIOR_HAZARDS
from .curves import survival as survival_of
from .jobs import (
    NAME_LABELS,
    SCRIPT_LABELS,
    TEXT_MAX,
    Features,
    Finished,
    Floats,
    gpu_class,
    kept_with_job,
    part,
    tokens,
    usable,
)
from .predictor import Predictor

WIDTH: Final = 64
_NEAREST: Final = 6
_POWER: Final = 12.0
"""Weight of a neighbour = likeness to this power: 0.9 counts as 0.28."""
_TOKENS_MAX: Final = 64
_LABELS_MAX: Final = 16
_ALL: Final = "all"


class NeighboursState(Struct, frozen=True, array_like=True):
    strength: float
    counts: CountsState


@kept_with_job
def bag(job: Features) -> str:
    """The job's tokens, sorted and joined by spaces; each with its weight's class before it. Digits do not count, but
    for the GPU class."""
    labels = _labels(job) if job.labels else ()
    return _bag(job.name[:TEXT_MAX], labels, part(job.owner), part(job.tenant), part(job.queue), job.gpus)


def _labels(job: Features) -> tuple[tuple[str, str], ...]:
    return tuple(
        ("_".join(part(key).split()), value[:TEXT_MAX])
        for key, value in itertools.islice(job.labels.items(), _LABELS_MAX)
        if key not in NAME_LABELS and key != "user"
    )


@functools.lru_cache(maxsize=1 << 12)
def _bag(name: str, labels: tuple[tuple[str, str], ...], owner: str, tenant: str, queue: str, gpus: int) -> str:
    words = {f"n:{word}" for word in tokens(name)}
    for key, value in labels:
        words.update(f"{'s' if key in SCRIPT_LABELS else 'l'}:{key}:{word}" for word in tokens(value))
    listed = sorted(words)[:_TOKENS_MAX]
    owner, tenant, queue = ("_".join(text.split()) for text in (owner, tenant, queue))
    return " ".join([*listed, f"u:{owner}", f"t:{tenant}", f"q:{queue}", f"g:{gpu_class(gpus)}"])


_WEIGHTS: Final = {"n": 1.0, "s": 0.5, "l": 0.5, "u": 1.0, "t": 0.5, "q": 0.3, "g": 0.7}


@functools.lru_cache(maxsize=1 << 12)
def vector(tokens_of_job: str) -> bytes:
    """float32 [WIDTH] of length 1; the same in every process."""
    out = np.zeros(WIDTH, np.float32)
    for token in tokens_of_job.split():
        hashed = zlib.crc32(token.encode())
        out[hashed % WIDTH] += _WEIGHTS.get(token[0], 0.5) * (1.0 if hashed & 0x10000 else -1.0)
    length = float(np.linalg.norm(out))
    return np.asarray(out / length if length else out, np.float32).tobytes()


def _nearest(likeness: Rows, count: int) -> tuple[NDArray[np.int64], Rows]:
    """([job, count] rows, their likeness), the nearest first. Empties `likeness` of them: for so few, the largest of
    the rest again and again is a fifth of the work of a partition."""
    rows, alike = np.empty((len(likeness), count), np.int64), np.empty((len(likeness), count), np.float32)
    jobs = np.arange(len(likeness))
    for place in range(count):
        best = likeness.argmax(axis=1)
        rows[:, place], alike[:, place] = best, likeness[jobs, best]
        likeness[jobs, best] = -np.inf
    return rows, alike


class Neighbours(Predictor):
    """See the module's text."""

    def __init__(self, half_life: float = 8.0, strength: float = 2.0, prototypes_max: int = 1_024) -> None:
        if not 0 < strength < math.inf:
            raise ValueError("strength has to be above 0")
        self.strength = strength
        self._use(Counts(half_life, prototypes_max + 1))

    def _use(self, counts: Counts) -> None:
        self.counts = counts
        self._vectors: Rows = np.zeros((counts.keys_max + 1, WIDTH), np.float32)
        for key, row in counts.slots.items():
            self._place(key, row)

    def _place(self, key: str, row: int) -> None:
        self._vectors[row] = 0.0 if key == _ALL else np.frombuffer(vector(key), np.float32)

    def observe(self, job: Finished) -> None:
        if not usable(job.run_s):
            return
        key = bag(job.features)
        new = key not in self.counts.slots
        self.counts.add((_ALL, key), job.run_s, job.censored)
        if new:
            self._place(key, self.counts.slots[key])

    def set_running(self, jobs: Sequence[Features], ages_s: Sequence[float]) -> None:
        self.counts.set_running([(_ALL, bag(job)) for job in jobs], ages_s)

    def curves(self, jobs: Sequence[Features]) -> Floats:
        if not jobs:
            return np.empty((0, BINS + 1))
        distinct: dict[str, int] = {}
        of_job = [distinct.setdefault(bag(job), len(distinct)) for job in jobs]
        return survival_of(self._hazards(list(distinct)))[of_job]

    def _hazards(self, bags: Sequence[str]) -> Rows:
        counts = self.counts
        prior = PRIOR_HAZARDS.astype(np.float32)[None, :]
        everybody = counts.shrunk(counts.rows([_ALL]), prior, self.strength)[0]
        used = len(counts.slots) + 1
        if used <= 2:
            return np.broadcast_to(everybody, (len(bags), BINS))
        asked = np.frombuffer(b"".join(map(vector, bags)), np.float32).reshape(len(bags), WIDTH)
        likeness = asked @ self._vectors[:used].T
        rows, alike = _nearest(likeness, min(_NEAREST, used - 1))
        likes = np.clip(alike, 0.0, 1.0) ** _POWER
        weights = likes / counts.unit[rows]
        ended = np.einsum("jk,jkb->jb", weights, counts.ended[rows])
        at_risk = np.einsum("jk,jkb->jb", weights, counts.at_risk[rows])
        if len(counts.running) > 1:
            at_risk += np.einsum("jk,jkb->jb", likes, counts.running[counts.running_row[rows]])
        hazards = (ended + self.strength * everybody) / (at_risk + self.strength)
        return np.minimum(np.asarray(hazards, np.float32), 1.0)

    @property
    def memory_bytes(self) -> int:
        return self.counts.memory_bytes + self._vectors.nbytes

    def state(self) -> NeighboursState:
        return NeighboursState(self.strength, self.counts.state())

    @classmethod
    def restored(cls, state: NeighboursState) -> Neighbours:
        """Raises ValueError."""
        found = cls(strength=state.strength)
        found._use(Counts.restored(state.counts))
        return found
