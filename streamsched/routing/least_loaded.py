"""Least-loaded routing: among the pools that could hold the job on empty nodes, the one with least work per GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from streamsched.core.capability import Capabilities, Capability
from streamsched.core.model import WHOLE_GPU, JobSpec, TopologyLevel

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
    gpu_memory_mib: int = 0
    """Of one device; 0: not declared."""
    mig: str = ""


class RunTimesSummary(Struct, frozen=True, kw_only=True):
    """How the predictions of a pool's run times are doing."""

    jobs: int
    """That were predicted and have ended."""
    coverage: float
    """Share of them within their 90 % interval, of late."""
    below_median: float
    loss: float
    """Pinball, ln s, of late."""
    reasons: tuple[str, ...]
    """Why the predictions cannot be trusted (drift); empty where they can."""
    model: int
    """Version of the trees; 0: none."""
    waiting: int
    """What happened and has not been learned from yet."""
    failures: int
    """Errors of the predictor; what it did not answer was answered by the jobs' estimates."""


class ShadowSummary(Struct, frozen=True, kw_only=True):
    """A model whose scores are only compared with those in use, as of the last look at the queue."""

    model: str
    """Its name; empty where it cannot be used (`ModelSummary.problems`)."""
    jobs: int
    """That were ranked both ways."""
    correlation: float
    """Spearman's, of their places: 1 the same order, -1 the opposite one."""
    first: float
    """Share of the first `among` of the one order that are among the first of the other."""
    among: int
    looks: int
    """Comparisons so far, by this worker."""


class CanarySummary(Struct, frozen=True, kw_only=True):
    """A model that ranks a share of the jobs. What was placed is counted since it is in use here."""

    model: str
    placed: int
    """Jobs of the share."""
    wait_s: float
    """Mean, of those placed."""
    others_placed: int
    others_wait_s: float


class ModelSummary(Struct, frozen=True, kw_only=True):
    """Which model ranks a pool."""

    wanted: str
    """Named by the registry or the setting `policy`; empty: none is."""
    used: str
    """Empty: the base rule ranks."""
    base: str
    digest: str = ""
    """SHA-256 of the file in use, its first 12 digits."""
    problems: tuple[str, ...] = ()
    """Why what is wanted is not in use, a line each."""
    failures: int = 0
    """Queues that the base rule ranked because the model did not (by this worker)."""
    drift: dict[str, float] = {}
    """Features of which too many jobs are outside of the range of training -> their share of late."""
    shadow: ShadowSummary | None = None
    canary: CanarySummary | None = None


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
    run_times: RunTimesSummary | None = None
    """None where they are not predicted."""
    model: ModelSummary | None = None
    """None where the policy is a rule."""

    def could_hold(self, spec: JobSpec) -> bool:
        """Whether the pool's nodes could hold the job if they were empty, were they all in one topology domain."""
        nodes = Capabilities()
        for k in self.kinds:
            nodes.total[Capability(k.gpu_type, k.gpus, k.cpu_milli, k.memory_mib, k.gpu_memory_mib, k.mig)] += k.nodes
        if spec.topology is not None and spec.topology.level is not TopologyLevel.NODE:
            spec = replace(spec, topology=None)  # domains are not told to the outside
        return nodes.why_never(spec) is None

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
    most = sorted(kinds.items(), key=lambda item: (-item[0].gpus * item[1], item[0]))[:_KINDS_MAX]
    return tuple(
        NodeKind(c.gpu_type, c.gpus, c.cpu_milli, c.memory_mib, n, c.gpu_memory_mib, c.mig) for c, n in sorted(most)
    )


def _joined(kinds: Mapping[Capability, int], by_gpus: bool) -> dict[Capability, int]:
    groups: dict[tuple[str, str, int], list[Capability]] = {}
    for kind in kinds:
        groups.setdefault((kind.gpu_type, kind.mig, kind.gpus if by_gpus else 0), []).append(kind)
    joined: dict[Capability, int] = {}
    for (gpu_type, mig, _), members in groups.items():
        gpus = max(kind.gpus for kind in members)
        total = sum(kind.gpus * kinds[kind] for kind in members)
        best = Capability(
            gpu_type=gpu_type,
            gpus=gpus,
            cpu_milli=_most(kind.cpu_milli for kind in members),
            memory_mib=_most(kind.memory_mib for kind in members),
            gpu_memory_mib=max(kind.gpu_memory_mib for kind in members),
            mig=mig,
        )
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
