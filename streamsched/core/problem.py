"""What a window's solver is given and what it answers. Plain data: it crosses process borders and goes into dumps.

Nodes that are interchangeable in the window are one `NodeClass`, so that neither the message nor the model grows with
the number of nodes.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from .model import WHOLE_GPU


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
    cpu_milli: int = 0
    memory_mib: int = 0
    avoid_nodes: tuple[str, ...] = ()
    """Nodes that refused it lately."""

    @property
    def total_gpus(self) -> int:
        return sum(size * count for size, count in self.chunks)


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One window. `candidates` in rank order (best first), `classes` in a fixed order: equal state, equal problem."""

    pool: str
    window: int
    now: float
    policy: str
    candidates: tuple[Candidate, ...]
    classes: tuple[NodeClass, ...]


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
