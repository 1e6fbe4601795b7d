"""What a window's solver is given and what it answers. Plain data: it crosses process borders and goes into dumps.

Nodes that are interchangeable in the window are one `NodeClass`, so that neither the message nor the model grows with
the number of nodes.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from .model import WHOLE_GPU, TopologyWish


class NodeClass(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Nodes with the same GPU type, free whole GPUs, free shares, CPU, memory and topology domains.

    `free_gpus`: entirely free devices per node. `shares`: free thousandths of each partly used device of a node,
    ascending. `free_cpu_milli` / `free_memory_mib`: per node; -1 means not a limit. `node_ids` in ascending order.
    """

    gpu_type: str
    free_gpus: int
    node_ids: tuple[str, ...]
    shares: tuple[int, ...] = ()
    free_cpu_milli: int = -1
    free_memory_mib: int = -1
    nvlink: str = ""
    rack: str = ""
    zone: str = ""
    total_gpus: int = 0
    """Devices of each node (used by fragmentation terms)."""
    gpu_memory_mib: int = 0
    """Memory of one device; 0: not declared."""
    affinity_taken: tuple[str, ...] = ()
    """`anti_affinity` names that have a worker on each of these nodes, ascending."""
    mig: str = ""
    """Geometry table of its devices (`core/mig.py`); empty: no MIG. Under MIG a device gives no shares: an idle one is
    given whole, or opened for a profile (`mig.opened`), and then has that geometry's instances until it is idle."""
    instances: tuple[tuple[str, int], ...] = ()
    """((MIG profile, free instances of it on the node's partitioned devices), ...), ascending, none of 0. These are
    used before an idle device is opened."""


class Candidate(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A queued job as the window sees it. `chunks`: ((GPUs of one worker, workers), ...); all of them or none.

    `value` > 0 is what placing it is worth, relative to the other candidates of the window.
    `cpu_milli` and `memory_mib` are per worker.
    """

    job_id: str
    attempt: int
    chunks: tuple[tuple[int, int], ...]
    value: float
    score: float = 0.0
    gpu_milli: int = WHOLE_GPU
    gpu_types: tuple[str, ...] = ()
    one_type: bool = False
    """All workers on nodes of one GPU type."""
    speeds: tuple[tuple[str, float], ...] = ()
    """(GPU type, relative speed > 0), ascending by name; types that are not named have speed 1. `value` is for the
    fastest type; on another it is worth `value` * speed / fastest, and on a mix what its slowest worker makes of it."""
    gpu_memory_mib: int = 0
    """Per worker, for a share: of a device with memory M it takes ceil(1000 * this / M) thousandths, and `gpu_milli`
    where that is below 1000 and more. Not on nodes that declare no device memory, nor under MIG."""
    mig_profile: str = ""
    """Per worker, one instance of this profile; only where `NodeClass.mig` has it."""
    cpu_milli: int = 0
    memory_mib: int = 0
    topology: TopologyWish | None = None
    """All workers in one domain of that level; nodes without a name for the level are in no domain. Where it is only a
    wish, keeping it is worth `TOPOLOGY_BONUS` of the value."""
    anti_affinity: str = ""
    """At most one worker with this name on a node; none where `NodeClass.affinity_taken` has it."""
    avoid_nodes: tuple[str, ...] = ()
    """Nodes that refused it lately."""
    level: int = 0
    """It may take the place of victims with a lower level."""

    @property
    def total_gpus(self) -> int:
        return sum(size * count for size, count in self.chunks)


class Ask(Struct, frozen=True, array_like=True, order=True):
    """What one worker of a job asks for: `gpus` whole devices, or a share of one (`gpu_milli` or `gpu_memory_mib`)."""

    gpus: int
    gpu_milli: int
    gpu_memory_mib: int
    cpu_milli: int
    memory_mib: int
    gpu_types: tuple[str, ...]


class Victim(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run that may be told to make room. `cost` > 0: what stopping it loses, in units of `Candidate.value`."""

    placement_id: str
    job_id: str
    level: int
    cost: float
    held: tuple[tuple[str, int, int, int], ...]
    """((node_id, whole GPUs, cpu_milli, memory_mib), ...): what becomes free on each node, all of it at once."""
    anti_affinity: str = ""


TOPOLOGY_BONUS = 0.1
"""Share of a candidate's value that keeping a topology wish adds."""


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One window. `candidates` in rank order (best first), `classes` in a fixed order: equal state, equal problem."""

    pool: str
    window: int
    now: float
    policy: str
    candidates: tuple[Candidate, ...]
    classes: tuple[NodeClass, ...]
    """With victims also nodes that have nothing free, where a victim is on them."""
    in_order: bool = False
    """No candidate is placed unless all before it are."""
    by_rank: bool = False
    """Candidates are placed one after the other, and nobody gives way to those after it for the sake of the sum."""
    victims: tuple[Victim, ...] = ()
    mix: tuple[tuple[Ask, int], ...] = ()
    """What workers of the pool's jobs ask for, and in how many jobs, the most frequent first. Only where some ask for
    shares of devices; then free devices are kept useful for this mix, instead of the nodes tidy."""


class SolveStatus(enum.StrEnum):
    """How a solution was got."""

    OPTIMAL = "optimal"  # proved within the gap asked for
    INCUMBENT = "incumbent"  # the limit was reached; `gap` says how far the bound is
    GREEDY = "greedy"  # the model was too large, failed or gave nothing in time
    EMPTY = "empty"  # nothing to place, or nothing fits


class Assignment(Struct, frozen=True, kw_only=True):
    """Nodes for all workers of a job: one entry per worker, in the order of `Candidate.chunks`."""

    job_id: str
    attempt: int
    workers: tuple[tuple[str, int], ...]
    """((node_id, GPUs of the worker), ...); for shares GPUs is 1."""
    score: float = 0.0
    after: tuple[str, ...] = ()
    """Placement ids of the victims that have to make room before it can start; empty: it starts at once."""


class Solution(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a window. Checked by `placement/check.py` where it was made and again, job by job, at commit."""

    window: int
    status: SolveStatus
    policy: str = ""
    assignments: tuple[Assignment, ...] = ()
    gap: float | None = None
    """|bound - objective| / max(|objective|, 1e-9); None where no bound is known."""
    objective: float = 0.0
    bound: float | None = None
    build_s: float = 0.0
    solve_s: float = 0.0
    unplaced: dict[str, str] = {}
    """job_id -> why this candidate was not placed."""
    note: str = ""
    """What went wrong on the way to this answer (model too large, answer refused by the check); empty: nothing did."""
