"""The stored form of a pool's state, and the notes of what of it changed since it was last written."""

from __future__ import annotations

from msgspec import Struct

from .config import SchedulerConfig
from .model import Job, Run
from .node import NodeRecord
from .tenants import TenantUsage


class Meta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored scalars of a pool."""

    epoch: int = 0
    now: float = 0.0
    next_seq: int = 0
    config: SchedulerConfig = SchedulerConfig()


class Changes(Struct, frozen=True, kw_only=True):
    """What a batch of events changed, as the store needs it. A value of None means: gone."""

    jobs: dict[str, Job | None]
    runs: dict[str, Run | None]
    nodes: dict[str, NodeRecord | None]
    tenants: dict[str, TenantUsage | None]
    meta: Meta

    def __bool__(self) -> bool:
        return bool(self.jobs or self.runs or self.nodes or self.tenants)


class Notes:
    """Ids of what changed since `clear`; `any` says whether anything did since it was last set to False."""

    def __init__(self) -> None:
        self.jobs: set[str] = set()
        self.runs: set[str] = set()
        self.nodes: set[str] = set()
        self.tenants: set[str] = set()
        self.any = False

    def job(self, job_id: str) -> None:
        self.jobs.add(job_id)
        self.any = True

    def run(self, placement_id: str) -> None:
        self.runs.add(placement_id)
        self.any = True

    def node(self, node_id: str) -> None:
        self.nodes.add(node_id)
        self.any = True

    def tenant(self, tenant: str) -> None:
        self.tenants.add(tenant)
        self.any = True

    def clear(self) -> None:
        for ids in (self.jobs, self.runs, self.nodes, self.tenants):
            ids.clear()
