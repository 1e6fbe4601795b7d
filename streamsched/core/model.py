"""The values that the scheduler reasons about: jobs, runs and nodes.

Everything here is frozen; the state changes by replacing whole values (`cluster.py` is the only writer).

Units are part of the name (`_s` seconds, `_mib` MiB, `_milli` thousandths: 1000 cpu_milli = one core, 1000 gpu_milli
= one whole device). Shares of a device are integers, so that adding and removing any number of them is exact.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from operator import attrgetter
from typing import Final

from msgspec import Struct

WHOLE_GPU: Final = 1000
"""Thousandths of one device."""


class JobState(enum.StrEnum):
    """Where a job is in its life; the transitions are the table in `lifecycle.py`."""

    QUEUED = "queued"
    HELD = "held"
    UNFIT = "unfit"  # no set of nodes of this pool could ever hold it; looked at again when the inventory grows
    PLACED = "placed"  # a placement was decided, no `started` yet
    RUNNING = "running"
    STOPPING = "stopping"  # told to stop; its GPUs are held until the executor says they are released
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL: Final = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})


class RunState(enum.StrEnum):
    """Where one attempt to run a job is. A run exists from its placement until its GPUs are known to be free."""

    PLACED = "placed"
    RUNNING = "running"
    STOPPING = "stopping"  # preempt or revoke was sent
    LOST = "lost"  # a node of it is thought lost: it may still be alive


class NodeState(enum.StrEnum):
    UP = "up"
    CORDONED = "cordoned"  # keeps its runs, takes no new ones
    DRAINING = "draining"  # as cordoned, and its preemptible runs are told to stop
    QUARANTINED = "quarantined"  # refused too often; takes no new runs for a while


class TopologyLevel(enum.StrEnum):
    """Levels a gang may want to stay within, from narrow to wide."""

    NODE = "node"
    NVLINK = "nvlink"
    RACK = "rack"
    ZONE = "zone"


class TopologyWish(Struct, frozen=True, kw_only=True):
    level: TopologyLevel
    required: bool = False


class ElasticRange(Struct, frozen=True, kw_only=True):
    """Numbers of workers between which the job can run."""

    min_workers: int
    max_workers: int


class JobSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked for. A gang of `workers` workers, each on one node with `gpus_per_worker` GPUs, all or none.

    `remainder_gpus` > 0 adds one smaller worker (traces have jobs of 12 GPUs that ran as a whole node and a half).
    `gpu_milli` < 1000 asks for a share of one device per worker; then `gpus_per_worker` is 1.
    `gpu_types` are exact declared names; empty means any. All workers are on one type unless `mixed_types`.
    """

    job_id: str
    submitted_at: float
    gpus_per_worker: int
    workers: int = 1
    remainder_gpus: int = 0
    gpu_milli: int = WHOLE_GPU
    gpu_types: tuple[str, ...] = ()
    mixed_types: bool = False
    """Workers may be on different types; the job then runs at the speed of its slowest worker."""
    speeds: dict[str, float] = {}
    """GPU type -> speed on it relative to the job's other types, 1 where not named. Without any they are learned."""
    gpu_memory_mib: int = 0
    """Per worker, for a share of a device: at least so much of its memory, whatever its type."""
    mig_profile: str = ""
    """Per worker, one MIG instance of this profile, e.g. 1g.5gb; then `gpus_per_worker` is 1."""
    cpu_milli: int = 0
    memory_mib: int = 0
    tenant: str = "default"
    topology: TopologyWish | None = None
    anti_affinity: str = ""
    """Workers of jobs with the same name here, also of one job, are never on one node; empty: no such wish."""
    priority_class: str = "normal"
    weight: float = 1.0
    estimate_s: float | None = None
    preemptible: bool = False
    elastic: ElasticRange | None = None
    labels: dict[str, str] = {}
    traceparent: str | None = None

    @property
    def total_gpus(self) -> int:
        """Devices touched: whole ones, or one per worker for shares."""
        return self.workers * self.gpus_per_worker + self.remainder_gpus

    @property
    def total_gpu_milli(self) -> int:
        return self.total_gpus * self.gpu_milli

    def chunks(self) -> tuple[tuple[int, int], ...]:
        """((GPUs of one worker, number of such workers), ...), largest first."""
        whole = ((self.gpus_per_worker, self.workers),)
        return (*whole, (self.remainder_gpus, 1)) if self.remainder_gpus else whole


class Rate(Struct, frozen=True, array_like=True):
    """How fast a job was on a GPU type: 100 ln(units per second), rounded. `unit`: step or fraction."""

    gpu_type: str
    unit: str
    log_centi: int


class Mark(Struct, frozen=True, array_like=True):
    """What a run had done at a time of its executor's: its rate is measured from there. `unit`: step or fraction."""

    unit: str
    amount: float
    time: float


class Job(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job and what has become of it. `seq` is its place in the pool's order of arrival (ties break by it)."""

    spec: JobSpec
    seq: int
    state: JobState
    queued_at: float
    """When it last entered the queue, UTC epoch seconds."""
    waited_s: float = 0.0
    """How long it was in the queue before that, since it was last refused."""
    attempt: int = 0
    """Placements so far; a solution made for an earlier attempt is stale."""
    placement_id: str | None = None
    """The run it has now (`placed`, `running`, `stopping`); None otherwise."""
    not_before: float = 0.0
    """Backoff: not placed before this time."""
    refusals: int = 0
    """Rejections and expired leases in a row; reset by a start."""
    refused_by: tuple[str, ...] = ()
    """Nodes that refused it in a row."""
    reason: str = ""
    """Why it is where it is, in words for its owner."""
    then: JobState | None = None
    """Where it goes when the run that is being stopped has ended."""
    exit_code: int | None = None
    ended_at: float | None = None
    command_offset: int = -1
    """Origin offset of the last command applied: a redelivered command has no second effect."""
    progress: float = 0.0
    """Fraction done as last reported, 0..1."""
    attained_gpu_s: float = 0.0
    """GPU-seconds used by ended runs."""
    preemptions: int = 0
    preempted_at: float = 0.0
    """When a run of it was last told to make room for another job."""
    reservation: tuple[str, ...] = ()
    """Nodes kept free for it while it is queued."""
    awaits: tuple[str, ...] = ()
    """Runs that were told to make room for it; its reservation is where they are."""
    priority_class: str | None = None
    """Set by `reprioritise`; None: as in the spec."""
    weight: float | None = None
    rate: Rate | None = None
    """As last measured."""


BY_ARRIVAL: Final[Callable[[Job], int]] = attrgetter("seq")
"""A sort key; a function of Python takes three times as long."""


class Allocation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The devices of one worker on one node. With `gpu_milli` < 1000 it is a part of the single device in `gpus`.

    `gpu_milli` is what was really taken of each device: for a share by memory it follows from the device's memory, for
    a MIG instance from its profile.
    """

    node_id: str
    gpus: tuple[int, ...]
    gpu_milli: int = WHOLE_GPU
    cpu_milli: int = 0
    memory_mib: int = 0
    anti_affinity: str = ""
    mig_profile: str = ""
    """Set for a MIG instance; then so are the next two."""
    mig_geometry: tuple[tuple[str, int], ...] = ()
    """((profile, instances), ...) that the device is partitioned into, chosen while it was idle."""
    mig_instance: int = 0
    """Which of the geometry's instances of the profile, from 0."""


class Run(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt to run a job. `allocations` are those still held: a partial release removes some of them."""

    placement_id: str
    job_id: str
    attempt: int
    allocations: tuple[Allocation, ...]
    state: RunState
    placed_at: float
    lease_until: float
    """No `started` by then: it is revoked."""
    started_at: float | None = None
    lost_at: float | None = None
    """When a node of it was found lost."""
    stop_at: float | None = None
    """When it was told to stop; a completion before that is a genuine one."""
    stop_said_at: float | None = None
    """When it was last told to stop: said again while nobody answers."""
    given_up: bool = False
    """Its job goes on without it; what it holds is not charged to the tenant any more."""
    last_checkpoint_at: float | None = None
    measured_from: Mark | None = None


class NodeSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A machine as its agent declares it. Topology domains are free-form names; empty means unknown."""

    node_id: str
    gpu_type: str
    gpus: int
    cpu_milli: int = 0
    """0 means: not declared, CPU is not a limit on this node."""
    memory_mib: int = 0
    """0 means: not declared, memory is not a limit on this node."""
    nvlink: str = ""
    rack: str = ""
    zone: str = ""
    gpu_memory_mib: int = 0
    """Of one device; 0 means: not declared, shares by memory do not fit here."""
    mig: str = ""
    """Geometry table by which its devices are partitioned (`core/mig.py`), e.g. A100-40GB; empty: no MIG."""
    labels: dict[str, str] = {}
