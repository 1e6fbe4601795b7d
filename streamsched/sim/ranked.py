"""Networks by levels in the compiled preemptive simulation: a table of ranks for `fast.simulate_index`.

What such a network sees of a job changes only when the job reaches a level (`policy.network`), so its ranks are known
before the first event. Jobs of equal features share a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamsched.policy.features import FEATURES, FIXED, INDEX
from streamsched.policy.network import Network

from .fast import Index, Outcome, Preemption, simulate_index
from .scored import Instance


class Ranks:
    """Of the jobs of one instance, under any network of these levels."""

    def __init__(self, instance: Instance, levels_gpu_s: Sequence[float]) -> None:
        self._instance, self._levels = instance, np.asarray(levels_gpu_s, np.float64)
        fixed = instance.arrays[3]
        different, kind = np.unique(fixed.T, axis=0, return_inverse=True)
        self._kind = kind.astype(np.int64)
        features = np.zeros((len(different), len(self._levels) + 1, len(FEATURES)), np.float32)
        features[:, :, FIXED] = different[:, None, :]
        features[:, 1:, INDEX["attained_gpu_s"]] = self._levels
        self._features = features

    def index(self, network: Network) -> Index:
        """Raises ValueError for a network that is not by these levels."""
        if not np.array_equal(network.levels_gpu_s, self._levels):
            raise ValueError("a network by the same levels expected")
        kinds, levels, count = self._features.shape
        scores = network.scores(self._features.reshape(-1, count)).reshape(kinds, levels)
        return Index(self._levels, -scores, self._kind)

    def simulate(self, network: Network, preemption: Preemption) -> Outcome:
        return simulate_index(self._instance.jobs, self._instance.node_gpus, self.index(network), preemption)
