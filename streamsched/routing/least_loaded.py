"""Least-loaded routing: among the pools that could hold the job on empty nodes, the one with least work per GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from streamsched.core.inventory import Capability, why_never
from streamsched.core.model import WHOLE_GPU, JobSpec

_KINDS_MAX = 64
ANY_TYPE = ""
"""Stands for the jobs that name no GPU type, or several."""


class NodeKind(Struct, frozen=True, array_like=True):
    """Nodes that give the same when they are empty. CPU and memory 0: no limit."""

    gpu_type: str
    gpus: int
    cpu_milli: int
    memory_mib: int
    nodes: int


class PoolSummary(Struct, frozen=True, kw_only=True):
    """What is known of a pool from outside. GPUs are whole devices by type; queued ones are thousandths."""

    time: float = 0.0
    queued: int = 0
    """Jobs that could be placed."""
    runs: int = 0
    nodes: int = 0
    gpus: dict[str, int] = {}
    free_gpus: dict[str, int] = {}
    queued_gpu_milli: dict[str, int] = {}
    """What the queued jobs ask for, under the one type that they take or `ANY_TYPE`."""
    kinds: tuple[NodeKind, ...] = ()
    """What nodes there are, at most 64 kinds (`node_kinds`)."""
    policy: str = ""

    def could_hold(self, spec: JobSpec) -> bool:
        """Whether the pool's nodes could hold the job if they were empty."""
        kinds = Counter({(k.gpu_type, k.gpus, k.cpu_milli, k.memory_mib): k.nodes for k in self.kinds})
        return why_never(kinds, spec) is None

    def with_queued(self, spec: JobSpec) -> PoolSummary:
        """With one more job in the queue."""
        kind = demand_kind(spec)
        milli = self.queued_gpu_milli.get(kind, 0) + spec.total_gpu_milli
        return replace(self, queued=self.queued + 1, queued_gpu_milli=self.queued_gpu_milli | {kind: milli})

    def load(self, spec: JobSpec) -> float:
        """Work, held and queued, on the GPUs that the job could use, as a share of these GPUs."""
        total = _sum(self.gpus, spec) * WHOLE_GPU
        if not total:
            return float("inf")
        held = total - _sum(self.free_gpus, spec) * WHOLE_GPU
        return (held + _sum(self.queued_gpu_milli, spec) + self.queued_gpu_milli.get(ANY_TYPE, 0)) / total


def demand_kind(spec: JobSpec) -> str:
    """Under which name of `queued_gpu_milli` the job counts."""
    return spec.gpu_types[0] if len(spec.gpu_types) == 1 else ANY_TYPE


def node_kinds(capabilities: Mapping[Capability, int]) -> tuple[NodeKind, ...]:
    """The kinds of a pool's nodes. More than a summary should hold are told coarser, so as to promise rather too much.

    Then first CPU and memory of nodes with equal GPUs are taken to be those of the best of them, then all nodes of a
    type to be as large as the largest; of more types than that the largest are told.
    """
    kinds: Mapping[Capability, int] = {capability: nodes for capability, nodes in capabilities.items() if nodes > 0}
    if len(kinds) > _KINDS_MAX:
        kinds = _joined(kinds, by_gpus=True)
    if len(kinds) > _KINDS_MAX:
        kinds = _joined(kinds, by_gpus=False)
    most = sorted(kinds.items(), key=lambda item: (-item[0][1] * item[1], item[0]))[:_KINDS_MAX]
    return tuple(NodeKind(*capability, nodes) for capability, nodes in sorted(most))


def _joined(kinds: Mapping[Capability, int], by_gpus: bool) -> dict[Capability, int]:
    groups: dict[tuple[str, int], list[Capability]] = {}
    for kind in kinds:
        groups.setdefault((kind[0], kind[1] if by_gpus else 0), []).append(kind)
    joined: dict[Capability, int] = {}
    for (gpu_type, _), members in groups.items():
        gpus = max(kind[1] for kind in members)
        total = sum(kind[1] * kinds[kind] for kind in members)
        best = (gpu_type, gpus, _most(kind[2] for kind in members), _most(kind[3] for kind in members))
        joined[best] = -(-total // gpus) if gpus else sum(kinds[kind] for kind in members)
    return joined


def _most(amounts: Iterable[int]) -> int:
    """Zero is no limit at all."""
    found = list(amounts)
    return 0 if 0 in found else max(found)


def choose(spec: JobSpec, pools: Mapping[str, PoolSummary]) -> str:
    """The pool for a job. Ties go to the first name.

    If no pool could hold it, the one with most GPUs of its types gets it and tells its owner why it cannot.
    """
    able = [name for name, pool in pools.items() if pool.could_hold(spec)]
    if able:
        return min(able, key=lambda name: (pools[name].load(spec), name))
    return min(pools, key=lambda name: (-_sum(pools[name].gpus, spec), name))


def _sum(gpus: Mapping[str, int], spec: JobSpec) -> int:
    return sum(
        count for name, count in gpus.items() if name != ANY_TYPE and (not spec.gpu_types or name in spec.gpu_types)
    )
