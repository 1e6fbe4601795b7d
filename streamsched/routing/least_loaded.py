"""Least-loaded routing: among the pools whose inventory can hold the job, the one with most room per GPU."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from streamsched.core.model import JobSpec


class PoolSummary(Struct, frozen=True, kw_only=True):
    """What is known of a pool from outside. GPUs are whole devices by type."""

    time: float = 0.0
    queued: int = 0
    runs: int = 0
    nodes: int = 0
    gpus: dict[str, int] = {}
    free_gpus: dict[str, int] = {}
    policy: str = ""


def choose(spec: JobSpec, pools: Mapping[str, PoolSummary]) -> str:
    """The pool for a job. Ties go to the first name; if no pool has the GPUs, the largest gets it and says why not."""

    def key(name: str) -> tuple[bool, float, str]:
        pool = pools[name]
        total = _sum(pool.gpus, spec)
        load = (total - _sum(pool.free_gpus, spec) + pool.queued) / total if total else float("inf")
        return (total < spec.total_gpus, load, name)

    return min(pools, key=key)


def _sum(gpus: Mapping[str, int], spec: JobSpec) -> int:
    return sum(count for name, count in gpus.items() if not spec.gpu_types or name in spec.gpu_types)
