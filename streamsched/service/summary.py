"""What the router and `status` want to know of a pool without reading its whole state."""

from __future__ import annotations

from collections import Counter

import msgspec

from streamsched.core.cluster import ClusterState


def pool_summary(state: ClusterState, now: float) -> bytes:
    """JSON, as `routing.least_loaded.PoolSummary` reads it."""
    free: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for capability, nodes in state.inventory.capabilities.total.items():
        total[capability.gpu_type] += capability.gpus * nodes
    for node_class in state.inventory.classes():
        free[node_class.gpu_type] += node_class.free_gpus * len(node_class.node_ids)
    return msgspec.json.encode(
        {
            "time": now,
            "queued": state.waiting(),
            "runs": len(state.runs),
            "nodes": len(state.inventory.nodes),
            "gpus": dict(total),
            "free_gpus": dict(free),
            "policy": state.config.policy,
        }
    )
