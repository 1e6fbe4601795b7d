"""Priorities by a small neural network: read from a file of a few KB and evaluated by NumPy.

Each job is scored by the same perceptron, which sees the job's features and those of the cluster, so the order of the
queue does not depend on the order in which jobs are listed. Hidden layers are rectified; the highest score goes first.

The file holds no code (msgpack, no pickle):

    magic (8 bytes)   format (1 byte)   SHA-256 of the rest (32 bytes)   msgpack of `_Body`

A network *by levels* (for preemption) ranks jobs that wait and jobs that run. It sees what is fixed of a job and the
service it has had, rounded down to a level, and its scores are whole numbers. So a job's rank changes only when it
reaches a level, and nobody is stopped for less than a whole number.

Weights are float32, sums float64, and scores are rounded to 1e-9: jobs that look the same get the same score wherever
they are in the queue and on whatever machine, and the first to arrive of them goes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

import msgspec
import numpy as np

from streamsched.core.cluster import ClusterState
from streamsched.core.model import Job
from streamsched.errors import UserError

from .features import FEATURES, FEATURES_VERSION, FIXED, INDEX, NAMES, Features, Float32s, Floats

_MAGIC: Final = b"ssntwrk\0"
FORMAT: Final = 1
_HEAD: Final = len(_MAGIC) + 1 + 32
LAYERS_MAX: Final = 8
WIDTH_MAX: Final = 512
ROUNDED: Final = 1e9
"""Scores are multiples of 1 / ROUNDED."""
_PRODUCTS: Final = 1 << 18
"""Of one matrix multiplication at most: in the cache, and so small that OpenBLAS starts no threads for it, which on a
busy machine cost far more than they gain."""
LEVELS_MAX: Final = 64
_CLUSTER: Final = INDEX["free_gpus"]
_ATTAINED: Final = INDEX["attained_gpu_s"]
_CHANGING: Final = [place for place in range(len(FEATURES)) if place not in (*FIXED, _ATTAINED)]


class UnusableModel(UserError):
    """A file that is no network for this version; the message says why."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    features_version: int
    features: list[str]
    low: list[float]
    high: list[float]
    sizes: list[int]
    weights: bytes
    """Per layer the matrix [input, output] and the bias, float32, little-endian."""
    levels_gpu_s: list[float] = []


@dataclass(frozen=True, eq=False)
class Network:
    """`sizes`: units of each layer, from the features to the one score; `weights`: flat, as in the file; `low` and
    `high`: [feature] the range of training. Raises ValueError where these do not match."""

    sizes: tuple[int, ...]
    weights: Float32s
    low: Floats
    high: Floats
    levels_gpu_s: tuple[float, ...] = ()
    """Ascending; none: the network is not by levels."""

    @classmethod
    def blank(cls, *hidden: int, levels_gpu_s: Sequence[float] = ()) -> Self:
        """Untrained: hidden layers of so many units, all weights 0, on the usual ranges of the features."""
        sizes = (len(FEATURES), *hidden, 1)
        low, high = (np.array([getattr(feature, end) for feature in FEATURES], np.float64) for end in ("low", "high"))
        return cls(sizes, np.zeros(weights_of(sizes), np.float32), low, high, tuple(levels_gpu_s))

    def with_weights(self, weights: Floats | Float32s) -> Self:
        """The same but for these, flat. Raises ValueError for another number of them."""
        return replace(self, weights=weights.astype(np.float32))

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or self.sizes[0] != len(FEATURES) or self.sizes[-1] != 1:
            raise ValueError(f"layers {self.sizes}: {len(FEATURES)} features to 1 score expected")
        if len(self.sizes) > LAYERS_MAX + 1 or not all(1 <= size <= WIDTH_MAX for size in self.sizes):
            raise ValueError(f"at most {LAYERS_MAX} layers of 1 to {WIDTH_MAX} units expected")
        if self.weights.shape != (weights_of(self.sizes),) or not np.isfinite(self.weights).all():
            raise ValueError(f"{weights_of(self.sizes)} finite weights expected")
        if not (self.low.shape == self.high.shape == (len(FEATURES),)):
            raise ValueError(f"the range of {len(FEATURES)} features expected")
        if not ((self.low >= 0) & (self.low < self.high) & np.isfinite(self.high)).all():
            raise ValueError("ranges from at least 0 to a larger number expected")
        if self.levels_gpu_s:
            self._check_levels()

    def _check_levels(self) -> None:
        levels = np.array(self.levels_gpu_s)
        ascending = bool(np.isfinite(levels).all() and levels[0] > 0 and (np.diff(levels) > 0).all())
        if len(levels) > LEVELS_MAX or not ascending:
            raise ValueError(f"at most {LEVELS_MAX} levels expected, ascending from above 0")
        if self.layers[0][0][_CHANGING].any():
            raise ValueError("a network by levels looks at what is fixed of a job, and at its service, only")

    @cached_property
    def layers(self) -> list[tuple[Floats, Floats]]:
        """(matrix [input, output], bias [output]) of each."""
        found, at = [], 0
        for inputs, outputs in pairwise(self.sizes):
            matrix = self.weights[at : at + inputs * outputs].reshape(inputs, outputs)
            at += inputs * outputs
            found.append((matrix.astype(np.float64), self.weights[at : at + outputs].astype(np.float64)))
            at += outputs
        return found

    @cached_property
    def looked_at(self) -> frozenset[str]:
        """Names of the features that make a difference."""
        return frozenset(name for name, row in zip(NAMES, self.layers[0][0], strict=True) if row.any())

    @cached_property
    def scale(self) -> tuple[Floats, Floats]:
        """[feature] what the logarithms are shifted by, and what they are multiplied with."""
        shift = np.log1p(self.low)
        return shift, 1.0 / (np.log1p(self.high) - shift)

    @property
    def digest(self) -> str:
        """Names the file's contents."""
        return hashlib.sha256(self._body()).hexdigest()

    def inputs(self, features: Float32s, which: slice) -> Floats:
        """[job, feature of these]: logarithms of 1 + what is at least 0, cut to the range of training, from 0 to 1."""
        shift, factor = self.scale
        logs = np.log1p(np.maximum(features[:, which], 0.0, dtype=np.float64))
        return np.asarray(np.clip((logs - shift[which]) * factor[which], 0.0, 1.0))

    def level_of(self, attained_gpu_s: Float32s) -> Floats:
        """The service that counts: that of the level reached."""
        begin = np.concatenate([[0.0], self.levels_gpu_s])
        return np.asarray(begin[np.searchsorted(self.levels_gpu_s, attained_gpu_s, side="right")])

    def scores(self, features: Float32s) -> Floats:
        """[job] of [job, feature]; the features of the cluster are those of the first job."""
        if not len(features):
            return np.zeros(0)
        if self.levels_gpu_s:
            features = features.copy()
            features[:, _ATTAINED] = self.level_of(features[:, _ATTAINED])
        matrix, bias = self.layers[0]
        base = self.inputs(features[:1], slice(_CLUSTER, None))[0] @ matrix[_CLUSTER:] + bias
        block = max(1, _PRODUCTS // max(inputs * outputs for inputs, outputs in pairwise(self.sizes)))
        return np.concatenate([self._scores(features[at : at + block], base) for at in range(0, len(features), block)])

    def _scores(self, features: Float32s, base: Floats) -> Floats:
        """`base`: what the first layer makes of the cluster."""
        values = self.inputs(features, slice(_CLUSTER)) @ self.layers[0][0][:_CLUSTER] + base
        for matrix, bias in self.layers[1:]:
            values = np.maximum(values, 0.0) @ matrix + bias
        rounded = np.rint(values[:, 0] * ROUNDED)
        return np.asarray(np.floor(rounded / ROUNDED) if self.levels_gpu_s else rounded)

    def outside(self, features: Float32s) -> dict[str, float]:
        """Share of the jobs whose feature is outside the range of training, by name, where there are any."""
        beyond = (features < self.low.astype(np.float32)) | (features > self.high.astype(np.float32))
        return {name: float(share) for name, share in zip(NAMES, beyond.mean(axis=0), strict=True) if share > 0}

    def _body(self) -> bytes:
        return msgspec.msgpack.encode(
            _Body(
                FEATURES_VERSION,
                list(NAMES),
                self.low.tolist(),
                self.high.tolist(),
                list(self.sizes),
                self.weights.astype("<f4").tobytes(),
                list(self.levels_gpu_s),
            )
        )

    def to_bytes(self) -> bytes:
        body = self._body()
        return _MAGIC + bytes([FORMAT]) + hashlib.sha256(body).digest() + body


def weights_of(sizes: Sequence[int]) -> int:
    """How many there are."""
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(sizes))


def from_bytes(data: bytes, where: str = "network") -> Network:
    """Raises UnusableModel, whose line begins with `where`."""
    if data[: len(_MAGIC)] != _MAGIC or len(data) <= _HEAD:
        raise UnusableModel(f"{where}: these bytes are no network")
    if data[len(_MAGIC)] != FORMAT:
        raise UnusableModel(f"{where}: format {data[len(_MAGIC)]}, this version reads {FORMAT}")
    body = data[_HEAD:]
    if hashlib.sha256(body).digest() != data[_HEAD - 32 : _HEAD]:
        raise UnusableModel(f"{where}: cut or damaged (its digest differs)")
    try:
        told = msgspec.msgpack.decode(body, type=_Body)
    except msgspec.MsgspecError as error:
        raise UnusableModel(f"{where}: {error}") from None
    if told.features_version != FEATURES_VERSION or tuple(told.features) != NAMES:
        raise UnusableModel(
            f"{where}: trained on features of version {told.features_version}, this version has {FEATURES_VERSION};"
            " train it anew"
        )
    try:
        weights = np.frombuffer(told.weights, "<f4").astype(np.float32)
        low, high = np.array(told.low, np.float64), np.array(told.high, np.float64)
        return Network(tuple(told.sizes), weights, low, high, tuple(told.levels_gpu_s))
    except ValueError as error:
        raise UnusableModel(f"{where}: {error}") from None


def load(path: Path) -> Network:
    """Raises UnusableModel, also for a file that is not there."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnusableModel(f"model {path}: {error.strerror}") from None
    return from_bytes(data, f"model {path}")


class ByNetwork:
    """The rule of a network. `features` are shared where several rules look at the same queue."""

    def __init__(self, name: str, network: Network, features: Features | None = None) -> None:
        self.name, self.network = name, network
        self._features = features or Features()

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        found: list[float] = self.network.scores(self._features(jobs, state, now)).tolist()
        return found
