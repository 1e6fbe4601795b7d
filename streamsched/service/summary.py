"""What the router and `status` want to know of a pool without reading its whole state."""

from __future__ import annotations

from collections import Counter

import msgspec
from msgspec.structs import replace

from streamsched.core.cluster import ClusterState
from streamsched.routing.least_loaded import ModelSummary, PoolSummary, RunTimesSummary, demand_kind, node_kinds

_DEMAND_FOR_S = 1.0
"""The queue is summed up no more often: routers do not look more often either, and it can be long."""


class Summaries:
    """Of one pool while this process has it; each commit asks for one."""

    def __init__(self) -> None:
        self._demand: dict[str, int] = {}
        self._summed_at = float("-inf")

    def of(
        self,
        state: ClusterState,
        now: float,
        run_times: RunTimesSummary | None = None,
        model: ModelSummary | None = None,
    ) -> bytes:
        """JSON of `PoolSummary`."""
        if not 0 <= now - self._summed_at < _DEMAND_FOR_S:
            self._demand = _demand(state)
            self._summed_at = now
        return msgspec.json.encode(replace(_summary(state, now, self._demand), run_times=run_times, model=model))


def pool_summary(state: ClusterState, now: float) -> bytes:
    """A single one."""
    return Summaries().of(state, now)


def _demand(state: ClusterState) -> dict[str, int]:
    demand: Counter[str] = Counter()
    for job_id in state.index.queued:
        spec = state.jobs[job_id].spec
        demand[demand_kind(spec)] += spec.total_gpu_milli
    return dict(demand)


def _summary(state: ClusterState, now: float, demand: dict[str, int]) -> PoolSummary:
    free: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for capability, nodes in state.inventory.capabilities.total.items():
        total[capability.gpu_type] += capability.gpus * nodes
    for node_class in state.inventory.classes():
        free[node_class.gpu_type] += node_class.free_gpus * len(node_class.node_ids)
    return PoolSummary(
        time=now,
        queued=state.waiting(),
        runs=len(state.runs),
        nodes=len(state.inventory.nodes),
        gpus=dict(total),
        free_gpus=dict(free),
        queued_gpu_milli=demand,
        kinds=node_kinds(state.inventory.capabilities.total),
        policy=state.config.policy,
    )
