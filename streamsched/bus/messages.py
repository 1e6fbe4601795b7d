"""The messages on the topics: the contract with submission systems, executors and node agents.

JSON Schema and the AsyncAPI document under topics/ are generated from these types. Decoding is strict about what is
there (types, ranges, times) and lenient about what is not known (unknown fields are ignored, so that producers can be
newer than the scheduler).

Times are UTC epoch seconds (number) or RFC 3339 text with an offset; text without an offset is refused, because nobody
can say which instant it means. GPU telemetry uses DCGM's field names and units (utilisation in percent).
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from streamsched.core.cluster import Meta as StoredMeta
from streamsched.core.events import CoreEvent
from streamsched.core.instructions import Decision
from streamsched.core.model import Job, Run, TopologyLevel
from streamsched.core.node import NodeRecord
from streamsched.core.tenants import TenantUsage

Id = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*\Z")]
"""Name of a job, node or pool: letters, digits and ._:/@+- , at most 253 characters.

`\\Z`, because Python's `$` also matches before a last line feed; the published schemas say `$`, which does not.
"""
PlacementId = Annotated[str, Meta(min_length=1, max_length=300, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*\Z")]
"""Name of a placement: that of its job and two numbers, so longer than an `Id`."""
Label = Annotated[str, Meta(max_length=4096)]
Labels = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=253)], Label], Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=1, le=100_000)]
Workers = Annotated[int, Meta(ge=1, le=10_000)]
"""A placement names the node and devices of every worker, and has to fit one Kafka message."""
Amount = Annotated[int, Meta(ge=0, le=2**50)]
EpochSeconds = Annotated[float, Meta(ge=0, le=32503680000)]
_RFC3339 = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]+)?([Zz]|[+-][0-9]{2}:?[0-9]{2})$"
ZonedTime = Annotated[datetime, Meta(tz=True, extra_json_schema={"pattern": _RFC3339})]
Time = EpochSeconds | ZonedTime
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Fraction = Annotated[float, Meta(ge=0.001, le=0.999)]
Speed = Annotated[float, Meta(gt=0, le=1e6)]
MigProfile = Annotated[str, Meta(max_length=32, pattern=r"^[1-9][0-9]*g\.[1-9][0-9]*gb\Z")]
"""Name of a MIG profile as NVIDIA writes it: slices and memory, e.g. 3g.20gb."""
GpuIndex = Annotated[int, Meta(ge=0, le=1023)]
ExitCode = Annotated[int, Meta(ge=-(2**31), le=2**32 - 1)]
Traceparent = Annotated[str, Meta(max_length=128)]


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


# ── jobs.arrivals ────────────────────────────────────────────────────────────────────────────────────────────────────


class Topology(Message, frozen=True, kw_only=True):
    """Keep the workers within one domain of `level`; a wish unless `required`."""

    level: TopologyLevel
    required: bool = False


class Elastic(Message, frozen=True, kw_only=True):
    """Numbers of workers between which the job can run."""

    min_workers: Workers
    max_workers: Workers


class JobArrival(Message, frozen=True, kw_only=True):
    """A job: a gang of `workers` workers with `gpus_per_worker` GPUs each, started all together or not at all.

    A share of one device is asked for with `gpu_fraction` (0.001 to 0.999, thousandths are kept), `gpu_memory_mib` or
    both instead of `gpus_per_worker`, a MIG instance with `mig_profile`. `remainder_gpus` adds one smaller worker.
    `gpu_types` are exact declared names; none means any. All workers are on one type unless `mixed_types`.
    """

    job_id: Id
    submitted_at: Time
    gpus_per_worker: Count | None = None
    gpu_fraction: Fraction | None = None
    workers: Workers = 1
    remainder_gpus: Annotated[int, Meta(ge=0, le=100_000)] = 0
    gpu_types: Annotated[tuple[Id, ...], Meta(max_length=64)] = ()
    mixed_types: bool = False
    """Workers may be on different types; the job then runs at the speed of its slowest worker."""
    speeds: Annotated[dict[Id, Speed], Meta(max_length=64)] = {}
    """GPU type -> how fast the job runs on it, relative to its other types, 1 where not named; types of `gpu_types`, if
    that is given. Without it speeds are learned from the progress reports of jobs with the same label `family`."""
    gpu_memory_mib: Amount = 0
    """Per worker, at least so much of one device's memory, MiB: a share of whatever device has it."""
    mig_profile: MigProfile | None = None
    """Per worker, one MIG instance of this profile, e.g. 1g.5gb."""
    cpu_milli: Amount = 0
    """Per worker, thousandths of a core."""
    memory_mib: Amount = 0
    """Per worker, MiB."""
    tenant: Id = "default"
    pool: Id | None = None
    """The pool to run in; the router chooses one when it is not given."""
    topology: Topology | None = None
    anti_affinity: Id | None = None
    """At most one worker of all jobs with the same name here is on a node."""
    priority_class: Id = "normal"
    weight: Annotated[float, Meta(gt=0, le=1e9)] = 1.0
    estimate_s: Seconds | None = None
    """The submitter's estimate of the run time."""
    preemptible: bool = False
    elastic: Elastic | None = None
    labels: Labels = {}


# ── jobs.commands ────────────────────────────────────────────────────────────────────────────────────────────────────


class JobCommand(Message, frozen=True, kw_only=True, tag_field="type"):
    """Base of the commands on a job."""

    job_id: Id
    time: Time
    user: Text = ""
    reason: Text = ""


class Cancel(JobCommand, frozen=True, kw_only=True, tag="cancel"):
    """End the job wherever it is."""


class Hold(JobCommand, frozen=True, kw_only=True, tag="hold"):
    """Keep a queued job from being placed."""


class Release(JobCommand, frozen=True, kw_only=True, tag="release"):
    """Undo `hold`."""


class Reprioritise(JobCommand, frozen=True, kw_only=True, tag="reprioritise"):
    """Change the priority class or weight of a job that is not running."""

    priority_class: Id | None = None
    weight: Annotated[float, Meta(gt=0, le=1e9)] | None = None


Command = Cancel | Hold | Release | Reprioritise


# ── pool.jobs ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Origin(Message, frozen=True, kw_only=True):
    """Where an input was first written."""

    topic: Annotated[str, Meta(min_length=1, max_length=249)]
    partition: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    offset: Annotated[int, Meta(ge=0, le=2**53)]


class PoolJob(Message, frozen=True, kw_only=True):
    """An arrival or a command, routed to its pool; exactly one of the two is given."""

    pool: Id
    origin: Origin
    arrival: JobArrival | None = None
    command: Command | None = None
    traceparent: Traceparent | None = None


# ── jobs.completions ─────────────────────────────────────────────────────────────────────────────────────────────────


class RunReport(Message, frozen=True, kw_only=True, tag_field="type"):
    """Base of what executors say of a run, named by the placement that began it."""

    pool: Id
    job_id: Id
    placement_id: PlacementId
    time: Time


class Started(RunReport, frozen=True, kw_only=True, tag="started"):
    """All workers of the gang are running."""


class Progress(RunReport, frozen=True, kw_only=True, tag="progress"):
    """How far the job is; `checkpointed` says that work up to now would survive a stop."""

    fraction: Annotated[float, Meta(ge=0, le=1)] | None = None
    step: Amount | None = None
    total_steps: Count | None = None
    checkpointed: bool = False


class Completed(RunReport, frozen=True, kw_only=True, tag="completed"):
    """The job ended by itself. A process that exits 0 because it was told to stop is `preempted` or `released`."""

    exit_code: ExitCode = 0


class Failed(RunReport, frozen=True, kw_only=True, tag="failed"):
    """The job ended by its own fault, or (`retryable`) by that of a node or the network."""

    exit_code: ExitCode | None = None
    reason: Text = ""
    retryable: bool = False


class Preempted(RunReport, frozen=True, kw_only=True, tag="preempted"):
    """Answer to `preempt`: the run has stopped, its GPUs are free."""


class Rejected(RunReport, frozen=True, kw_only=True, tag="rejected"):
    """The executor will not start this placement; nothing of it runs."""

    node_id: Id | None = None
    reason: Text = ""


class Released(RunReport, frozen=True, kw_only=True, tag="released"):
    """Answer to `revoke` (also when nothing was running): the GPUs on `node_ids`, or all of the run's, are free."""

    node_ids: Annotated[tuple[Id, ...], Meta(max_length=100_000)] = ()


Completion = Started | Progress | Completed | Failed | Preempted | Rejected | Released


# ── gpu.telemetry ────────────────────────────────────────────────────────────────────────────────────────────────────


class GpuSample(Message, frozen=True, kw_only=True):
    """One device. Field names and units are DCGM's: utilisation in percent, framebuffer in MiB, power in W."""

    gpu: GpuIndex
    utilization: Annotated[float, Meta(ge=0, le=100)] | None = field(name="DCGM_FI_DEV_GPU_UTIL", default=None)
    framebuffer_used: Amount | None = field(name="DCGM_FI_DEV_FB_USED", default=None)
    framebuffer_free: Amount | None = field(name="DCGM_FI_DEV_FB_FREE", default=None)
    power_usage: Annotated[float, Meta(ge=0)] | None = field(name="DCGM_FI_DEV_POWER_USAGE", default=None)
    temperature: float | None = field(name="DCGM_FI_DEV_GPU_TEMP", default=None)
    xid_errors: Amount | None = field(name="DCGM_FI_DEV_XID_ERRORS", default=None)
    """The *last* XID, not a count."""
    ecc_dbe: Amount | None = field(name="DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", default=None)
    """Volatile double-bit ECC errors since the driver was loaded."""


class GpuTelemetry(Message, frozen=True, kw_only=True):
    """All devices of one node at one moment."""

    pool: Id
    node_id: Id
    time: Time
    gpus: Annotated[tuple[GpuSample, ...], Meta(max_length=1024)]


# ── nodes.events ─────────────────────────────────────────────────────────────────────────────────────────────────────


class NodeMessage(Message, frozen=True, kw_only=True, tag_field="type"):
    """Base of what is said of a node."""

    pool: Id
    node_id: Id
    time: Time


class Joined(NodeMessage, frozen=True, kw_only=True, tag="joined"):
    """The node offers this inventory. CPU or memory of 0 means: not declared, no limit. Domains are free-form names."""

    gpu_type: Id
    gpus: Annotated[int, Meta(ge=0, le=1024)]
    cpu_milli: Amount = 0
    memory_mib: Amount = 0
    nvlink: Text = ""
    rack: Text = ""
    zone: Text = ""
    gpu_memory_mib: Amount = 0
    """Of one device. 0 means: not declared, shares by memory are not placed here."""
    mig: Text = ""
    """How its devices are partitioned, e.g. A100-40GB, A100-80GB, H100-80GB or A30; empty: MIG is off. Under MIG a
    device is given whole or as instances, never in shares."""
    labels: Labels = {}


class Capacity(NodeMessage, frozen=True, kw_only=True, tag="capacity"):
    """The number of usable GPUs has changed."""

    gpus: Annotated[int, Meta(ge=0, le=1024)]


class Heartbeat(NodeMessage, frozen=True, kw_only=True, tag="heartbeat"):
    """A sign of life; to be sent every few seconds."""


class Cordon(NodeMessage, frozen=True, kw_only=True, tag="cordon"):
    """No new runs on this node."""


class Uncordon(NodeMessage, frozen=True, kw_only=True, tag="uncordon"):
    """Undo `cordon` and `drain`."""


class Drain(NodeMessage, frozen=True, kw_only=True, tag="drain"):
    """No new runs, and those of preemptible jobs are told to stop; the others run to their end."""


class Lost(NodeMessage, frozen=True, kw_only=True, tag="lost"):
    """The node is gone. `fenced`: it is certain that nothing runs there any more (powered off, disk wiped)."""

    fenced: bool = False


NodeEvent = Joined | Capacity | Heartbeat | Cordon | Uncordon | Drain | Lost


# ── placements ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Placement(Message, frozen=True, kw_only=True):
    """A decision for executors. `placement_id` names the run; carrying it out twice must have the effect of once."""

    pool: Id
    time: EpochSeconds
    epoch: int
    """Of the scheduler that decided; grows with each takeover of the pool."""
    seq: int
    """Of the journal record that holds the decision."""
    decision: Decision


# ── queue.rankings ───────────────────────────────────────────────────────────────────────────────────────────────────


class RankedJob(Message, frozen=True, kw_only=True):
    """One waiting job: its place in the order, its score, and why it waits (a code, then words)."""

    job_id: str
    rank: int
    score: float
    state: str
    reason: str
    waited_s: float
    run_s: Seconds | None = None
    """What is believed of its run time: what was said of it, or what is predicted (setting `run_times`)."""
    shadow_score: float | None = None
    """By a model whose scores are only compared, where there is one."""


class QueueRanking(Message, frozen=True, kw_only=True):
    """The queue of a pool as last ranked, best first. `truncated`: only the first of `queued` jobs are listed."""

    pool: Id
    time: EpochSeconds
    epoch: int
    seq: int
    policy: str
    queued: int
    truncated: bool = False
    jobs: tuple[RankedJob, ...] = ()


# ── scheduler.journal ────────────────────────────────────────────────────────────────────────────────────────────────


class JournalRecord(Message, frozen=True, kw_only=True):
    """One commit: the events applied, in order, at one moment, and the decisions that came of them.

    `next_offsets` are those of the input partitions after this commit ("topic:partition" -> offset). A record whose
    `epoch` is lower than one seen before it in the partition is void: its writer had lost the pool.
    """

    pool: Id
    epoch: int
    seq: int
    now: EpochSeconds
    events: tuple[CoreEvent, ...] = ()
    decisions: tuple[Decision, ...] = ()
    next_offsets: dict[str, int] = {}


# ── scheduler.snapshots ──────────────────────────────────────────────────────────────────────────────────────────────


class SnapshotPart(Message, frozen=True, kw_only=True):
    """One part of the stored state of a pool after journal record `seq`; whole when all `parts` of its id are there.

    Parts of two snapshots take turns in two slots of keys, so that one whole snapshot is there at every moment while
    the topic is compacted to two per pool.
    """

    pool: Id
    snapshot_id: str
    slot: int
    part: int
    parts: int
    epoch: int
    seq: int
    journal: int
    """Journal offset to read on from."""
    next_offsets: dict[str, int] = {}
    meta: StoredMeta | None = None
    """In the first part."""
    jobs: tuple[Job, ...] = ()
    runs: tuple[Run, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    tenants: dict[str, TenantUsage] = {}
    """In the first part, and in later ones what does not fit there."""


# ── dead.letters ─────────────────────────────────────────────────────────────────────────────────────────────────────


RefusalCode = Literal[
    "malformed",
    "invalid",
    "too-large",
    "unknown-pool",
    "wrong-partition",
    "conflict",
    "unknown-job",
    "unknown-node",
    "not-applicable",
]


class DeadLetter(Message, frozen=True, kw_only=True):
    """An input that was refused: why, where it was, and its bytes (base64 in JSON)."""

    code: RefusalCode
    detail: str
    origin: Origin
    time: EpochSeconds
    key: bytes | None = None
    original: bytes = b""
