"""Quantiles of ln(run time) by gradient-boosted trees: the serving side, without scikit-learn.

`training.py` fits the trees with scikit-learn in a process of its own and writes them as plain numbers. Nothing of a
model file is executed: it is decoded by msgspec into the `Model` below, and every size and value is checked before
it is used. A pickle, which runs code, is never read or written.

Trees of at most 16 leaves are evaluated for a whole batch at once with QuickScorer's bit masks (Lucchese et al., SIGIR
2015): for each feature and each interval between its thresholds, and each tree, the mask says which leaves are still
possible; the leftmost bit of the masks' conjunction is the tree's leaf. So 1,000 jobs through 300 trees cost one row
lookup per feature and job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from streamsched.errors import UserError

from .curves import BINS, PRIOR_HAZARDS, from_quantiles
from .curves import survival as survival_of
from .jobs import Features, Finished, Floats, part, stem, usable
from .predictor import Predictor
from .recent import FEATURES, ITERATIONS, Recent, RecentState

FORMAT: Final = 1
"""Of model files and of the list of features. Another one is not read."""
LEAVES_MAX: Final = 16
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_THRESHOLDS_MAX: Final = 1_024
_TREES_MAX: Final = 4_096
_WORD_MAX: Final = 32
_GPUS_MAX: Final = 1_000_000
_FIRST_BIT: Final = np.array([0] + [(n & -n).bit_length() - 1 for n in range(1, 1 << LEAVES_MAX)], np.uint8)


class DamagedModel(UserError):
    """A model file that cannot be used; the message says why."""


class Model(Struct, frozen=True, kw_only=True):
    """Trees of all quantiles, one after another: `trees[q]` of them for QUANTILES[q]."""

    format: int
    version: int
    features: tuple[str, ...]
    baselines: tuple[float, ...]
    """Per quantile, ln(s)."""
    trees: tuple[int, ...]
    thresholds: tuple[tuple[float, ...], ...]
    """Per feature, ascending; a value belongs to the interval after all thresholds below it."""
    masks: tuple[bytes, ...]
    """Per feature: uint16 [interval, tree]."""
    leaves: bytes
    """float32 [tree, LEAVES_MAX]."""


def encode(model: Model) -> bytes:
    return msgspec.msgpack.encode(model)


def decode(data: bytes) -> Trees:
    """Raises DamagedModel."""
    try:
        return Trees(msgspec.msgpack.decode(data, type=Model))
    except (msgspec.MsgspecError, ValueError) as error:
        raise DamagedModel(f"run-time model: cannot be used, it is left out: {error}") from None


class Trees:
    """A model ready for use. Raises ValueError for one that does not hold together."""

    def __init__(self, model: Model) -> None:
        if model.format != FORMAT or model.features != FEATURES:
            raise ValueError(f"made for other features (format {model.format}, here {FORMAT})")
        total = sum(model.trees)
        if len(model.trees) != len(QUANTILES) or len(model.baselines) != len(QUANTILES) or min(model.trees) < 0:
            raise ValueError("not one forest for each quantile")
        if not 0 < total <= _TREES_MAX or not len(model.thresholds) == len(model.masks) == len(FEATURES):
            raise ValueError("the number of trees or features is out of bounds")
        self.model = model
        self.version = model.version
        self._baselines = _finite(np.asarray(model.baselines))
        self._thresholds = [_thresholds(values) for values in model.thresholds]
        self._masks = [
            _shaped(data, np.uint16, (len(values) + 1, total))
            for data, values in zip(model.masks, model.thresholds, strict=True)
        ]
        self._leaves = _finite(_shaped(model.leaves, np.float32, (total, LEAVES_MAX))).ravel()
        self._first_leaf = np.arange(total, dtype=np.int64) * LEAVES_MAX
        self._ends = np.cumsum((0, *model.trees))

    def quantiles_ln(self, rows: Floats) -> Floats:
        """[job, quantile] ln(s), ascending, of [job, feature]."""
        possible = np.full((len(rows), len(self._first_leaf)), (1 << LEAVES_MAX) - 1, np.uint16)
        masks = np.empty_like(possible)
        for feature, thresholds in enumerate(self._thresholds):
            if len(thresholds):
                place = np.searchsorted(thresholds, rows[:, feature], side="left")
                possible &= np.take(self._masks[feature], place, axis=0, out=masks, mode="clip")
        values = np.take(self._leaves, np.take(_FIRST_BIT, possible) + self._first_leaf)
        out = np.empty((len(rows), len(QUANTILES)))
        for q in range(len(QUANTILES)):
            out[:, q] = values[:, self._ends[q] : self._ends[q + 1]].sum(axis=1, dtype=np.float64) + self._baselines[q]
        out.sort(axis=1)
        return out


def _finite(values: NDArray[Any]) -> NDArray[Any]:
    if not np.isfinite(values).all():
        raise ValueError("a number is not finite")
    return values


def _thresholds(values: tuple[float, ...]) -> Floats:
    found = np.asarray(values, np.float64)
    if len(found) > _THRESHOLDS_MAX or not np.isfinite(found).all() or (np.diff(found) <= 0).any():
        raise ValueError("thresholds are not ascending and finite")
    return found


def _shaped(data: bytes, kind: type[np.generic], shape: tuple[int, int]) -> NDArray[Any]:
    found = np.frombuffer(data, kind)
    if found.size != shape[0] * shape[1]:
        raise ValueError(f"{found.size} numbers where {shape} were expected")
    return found.reshape(shape)


def _kept(job: Finished) -> Finished:
    """With what rows are made of: labels may be long."""
    features = job.features
    cut = {
        "labels": {key: features.labels[key][:_WORD_MAX] for key in ITERATIONS if key in features.labels},
        "tenant": part(features.tenant),
        "user": part(features.user),
        "name": stem(features.name),
        "queue": "",
        "job_id": "",
    }
    gpus = min(max(features.gpus, 0), _GPUS_MAX)
    return replace(job, features=replace(features, gpus=gpus, **cut))


class BoostingState(Struct, frozen=True, kw_only=True):
    rows_max: int
    recent: RecentState
    finished: list[Finished]
    observed: int
    model: Model | None


class Boosting(Predictor):
    """Keeps the latest finished jobs for training, and serves by the model it was last given."""

    def __init__(self, rows_max: int = 20_000, keys_max: int = 32_768) -> None:
        self.rows_max = rows_max
        self.recent = Recent(keys_max)
        self.finished: deque[Finished] = deque(maxlen=rows_max)
        self.observed = 0
        self.trees: Trees | None = None

    def observe(self, job: Finished) -> None:
        if usable(job.run_s):
            self.recent.observe(job)
            self.finished.append(_kept(job))
            self.observed += 1

    def use(self, trees: Trees) -> None:
        """From now on. One assignment: a prediction is made by one model or the other."""
        self.trees = trees

    def curves(self, jobs: Sequence[Features]) -> Floats:
        if self.trees is None:
            return np.repeat(survival_of(PRIOR_HAZARDS)[None, :], len(jobs), axis=0)
        if not jobs:
            return np.empty((0, BINS + 1))
        found = self.trees.quantiles_ln(self.recent.rows(jobs))
        return from_quantiles(np.exp(np.clip(found, 0.0, 17.0)), QUANTILES)

    @property
    def memory_bytes(self) -> int:
        return self.recent.memory_bytes + 600 * len(self.finished)

    def state(self) -> BoostingState:
        return BoostingState(
            rows_max=self.rows_max,
            recent=self.recent.state(),
            finished=list(self.finished),
            observed=self.observed,
            model=self.trees.model if self.trees else None,
        )

    @classmethod
    def restored(cls, state: BoostingState) -> Boosting:
        """Raises ValueError."""
        found = cls(state.rows_max)
        found.recent = Recent.restored(state.recent)
        found.finished.extend(state.finished)
        found.observed = state.observed
        found.trees = Trees(state.model) if state.model else None
        return found
