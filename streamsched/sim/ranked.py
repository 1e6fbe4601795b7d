"""Networks by levels in the compiled preemptive simulation: a table of ranks for `fast.simulate_index`.

What such a network sees of a job changes only when the job reaches a level (`policy.network`), so its ranks are known
before the first event. Jobs of equal features share a row.
"""

from __future__ import annotations

import numpy as np

from streamsched.policy.features import FEATURES, FIXED, INDEX
from streamsched.policy.network import Network

from .fast import Index, Outcome, Preemption, simulate_index
from .scored import Instance


def index_of(network: Network, instance: Instance) -> Index:
    """Raises ValueError for a network that is not by levels."""
    if not network.levels_gpu_s:
        raise ValueError("a network by levels expected")
    _, _, _, fixed, _ = instance.arrays
    different, kind = np.unique(fixed.T, axis=0, return_inverse=True)
    begin = np.concatenate([[0.0], network.levels_gpu_s])
    features = np.zeros((len(different), len(begin), len(FEATURES)), np.float32)
    features[:, :, FIXED] = different[:, None, :]
    features[:, :, INDEX["attained_gpu_s"]] = begin
    scores = network.scores(features.reshape(-1, len(FEATURES))).reshape(len(different), len(begin))
    return Index(np.array(network.levels_gpu_s), -scores, kind.astype(np.int64))


def simulate_levels(instance: Instance, network: Network, preemption: Preemption) -> Outcome:
    """By the ranks of the network."""
    return simulate_index(instance.jobs, instance.node_gpus, index_of(network, instance), preemption)
