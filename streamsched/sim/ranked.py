"""Ranks by levels of service in the compiled preemptive simulation: a table for `fast.simulate_index`.

What a network by levels sees of a job changes only when the job reaches a level (`policy.network`), so its ranks are
known before the first event. Jobs of equal features share a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from streamsched.policy.features import FEATURES, FIXED, INDEX, Float32s
from streamsched.policy.network import Network

from .fast import Floats, Index, Outcome, Preemption, simulate_index
from .scored import Instance

Ranking = Callable[[Float32s], Floats]
"""[row, feature] (`policy.features`) of jobs that have just reached a level -> [row] rank, lower goes first. What else
changes while they wait, and the features of the cluster, are 0."""


class Ranks:
    """Of the jobs of one instance, under any ranking that changes at these levels of service, GPU s."""

    def __init__(self, instance: Instance, levels_gpu_s: Sequence[float]) -> None:
        self._instance, self._levels = instance, np.asarray(levels_gpu_s, np.float64)
        fixed = instance.arrays[3]
        different, kind = np.unique(fixed.T, axis=0, return_inverse=True)
        self._kind = kind.astype(np.int64)
        features = np.zeros((len(different), len(self._levels) + 1, len(FEATURES)), np.float32)
        features[:, :, FIXED] = different[:, None, :]
        features[:, 1:, INDEX["attained_gpu_s"]] = self._levels
        features[:, 1:, INDEX["running"]] = 1.0
        self._features = features

    def table(self, ranking: Ranking) -> Index:
        """[kind of job, level + 1] what it says of them at each level."""
        kinds, levels, count = self._features.shape
        ranks = ranking(self._features.reshape(-1, count)).reshape(kinds, levels)
        return Index(self._levels, ranks, self._kind)

    def index(self, network: Network) -> Index:
        """Raises ValueError for a network that is not by these levels."""
        if not np.array_equal(network.levels_gpu_s, self._levels):
            raise ValueError("a network by the same levels expected")
        return self.table(lambda features: -network.scores(features))

    def simulate(self, network: Network, preemption: Preemption) -> Outcome:
        return simulate_index(self._instance.jobs, self._instance.node_gpus, self.index(network), preemption)
