"""The topics of streamsched, one declaration each (DESIGN: contract with everything outside).

All topics but `dead.letters` have the same number of partitions. Those keyed by pool need it so that one worker gets
partition n of all of them, and so a pool whole; those keyed by job need it so that a worker's share of routing is one
share of the whole. The count cannot be raised later without moving pools to other partitions, away from their past.

Kafka's own time of writing (LogAppendTime) drives retention: a replayed trace with timestamps of years ago would be
deleted at once otherwise, and one producer with a clock in the future would keep a segment for ever.
`min.insync.replicas` and replication are the cluster's business.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from aiokafka.partitioner import murmur2

from . import messages

KiB: Final = 1024
MiB: Final = 1024 * KiB
_MINUTE_MS: Final = 60_000
_HOUR_MS: Final = 60 * _MINUTE_MS
_DAY_MS: Final = 24 * _HOUR_MS

DEFAULT_PARTITIONS: Final = 8
MAX_BODY_BYTES: Final = 1 * MiB
"""Of one input message. Topics take larger ones, so that these arrive and are refused with a dead letter."""
MAX_ORIGINAL_BYTES: Final = 16 * MiB
"""Kept of a refused input."""

Key = Literal["job_id", "pool", "pool#slot#part", "as input"]
PartitionGroup = Literal["shared", "own"]


@dataclass(frozen=True, slots=True)
class TopicDeclaration:
    """One topic. `types` are the members of its tagged union, or the one message type it has."""

    name: str
    key: Key
    types: tuple[type[messages.Message], ...]
    union: Any
    """What one message of it is: a type or a union of types, as the decoder takes it."""
    written_by: str
    read_by: str
    summary: str
    max_body_bytes: int
    configs: Mapping[str, str] = field(default_factory=dict)
    partition_group: PartitionGroup = "shared"


def _kept(retention_ms: int, segment_ms: int, max_message_bytes: int) -> dict[str, str]:
    """Deleted by age. Only whole segments are, so these must be a fraction of the retention."""
    return {
        "cleanup.policy": "delete",
        "max.message.bytes": str(max_message_bytes),
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": str(retention_ms),
        "segment.ms": str(segment_ms),
    }


_INPUT: Final = _kept(7 * _DAY_MS, _DAY_MS, 16 * MiB)

ARRIVALS: Final = TopicDeclaration(
    name="jobs.arrivals",
    key="job_id",
    types=(messages.JobArrival,),
    union=messages.JobArrival,
    written_by="submission systems",
    read_by="the router",
    summary="A job to run: what it needs and how it is to be treated.",
    max_body_bytes=MAX_BODY_BYTES,
    configs=_INPUT,
)
COMMANDS: Final = TopicDeclaration(
    name="jobs.commands",
    key="job_id",
    types=(messages.Cancel, messages.Hold, messages.Release, messages.Reprioritise),
    union=messages.Command,
    written_by="users and the command line",
    read_by="the router",
    summary="Something its owner wants done with a job.",
    max_body_bytes=MAX_BODY_BYTES,
    configs=_INPUT,
)
COMPLETIONS: Final = TopicDeclaration(
    name="jobs.completions",
    key="pool",
    types=(
        messages.Started,
        messages.Progress,
        messages.Completed,
        messages.Failed,
        messages.Preempted,
        messages.Rejected,
        messages.Released,
    ),
    union=messages.Completion,
    written_by="executors",
    read_by="the scheduler",
    summary="What has become of a placement.",
    max_body_bytes=MAX_BODY_BYTES,
    configs=_INPUT,
)
TELEMETRY: Final = TopicDeclaration(
    name="gpu.telemetry",
    key="pool",
    types=(messages.GpuTelemetry,),
    union=messages.GpuTelemetry,
    written_by="node agents",
    read_by="the scheduler",
    summary="Use and health of all GPUs of one node, in DCGM's fields and units. Only the latest counts.",
    max_body_bytes=MAX_BODY_BYTES,
    configs=_kept(_HOUR_MS, 10 * _MINUTE_MS, 16 * MiB),
)
NODES: Final = TopicDeclaration(
    name="nodes.events",
    key="pool",
    types=(
        messages.Joined,
        messages.Capacity,
        messages.Heartbeat,
        messages.Cordon,
        messages.Uncordon,
        messages.Drain,
        messages.Lost,
    ),
    union=messages.NodeEvent,
    written_by="node agents and operators",
    read_by="the scheduler",
    summary="What there is of nodes and how they are.",
    max_body_bytes=MAX_BODY_BYTES,
    configs=_INPUT,
)
POOL_JOBS: Final = TopicDeclaration(
    name="pool.jobs",
    key="pool",
    types=(messages.PoolJob,),
    union=messages.PoolJob,
    written_by="the router",
    read_by="the scheduler",
    summary="An arrival or a command, routed to the pool that it is for.",
    max_body_bytes=2 * MAX_BODY_BYTES,
    configs=_kept(7 * _DAY_MS, _DAY_MS, 24 * MiB),
)
PLACEMENTS: Final = TopicDeclaration(
    name="placements",
    key="pool",
    types=(messages.Placement,),
    union=messages.Placement,
    written_by="the scheduler",
    read_by="executors",
    summary="A decision to carry out: place, preempt or revoke.",
    max_body_bytes=8 * MiB,
    configs=_kept(7 * _DAY_MS, _DAY_MS, 8 * MiB),
)
RANKINGS: Final = TopicDeclaration(
    name="queue.rankings",
    key="pool",
    types=(messages.QueueRanking,),
    union=messages.QueueRanking,
    written_by="the scheduler",
    read_by="users and dashboards",
    summary="The queue as last ranked, with each job's score and why it waits.",
    max_body_bytes=8 * MiB,
    configs={
        "cleanup.policy": "compact",
        "max.message.bytes": str(8 * MiB),
        "message.timestamp.type": "LogAppendTime",
        "segment.ms": str(_HOUR_MS),
    },
)
JOURNAL: Final = TopicDeclaration(
    name="scheduler.journal",
    key="pool",
    types=(messages.JournalRecord,),
    union=messages.JournalRecord,
    written_by="the scheduler",
    read_by="the scheduler, replay and audits",
    summary="Every applied event and decision, in order. With the snapshots it is what the state is rebuilt from.",
    max_body_bytes=8 * MiB,
    configs=_kept(90 * _DAY_MS, 7 * _DAY_MS, 8 * MiB),
)
SNAPSHOTS: Final = TopicDeclaration(
    name="scheduler.snapshots",
    key="pool#slot#part",
    types=(messages.SnapshotPart,),
    union=messages.SnapshotPart,
    written_by="the scheduler",
    read_by="the scheduler, rebuild and replay",
    summary="The state of each pool now and then, so that a rebuild needs only the journal since.",
    max_body_bytes=8 * MiB,
    configs={
        "cleanup.policy": "compact",
        "max.message.bytes": str(8 * MiB),
        "message.timestamp.type": "LogAppendTime",
        "segment.bytes": str(64 * MiB),
        "segment.ms": str(_HOUR_MS),
    },
)
DEAD_LETTERS: Final = TopicDeclaration(
    name="dead.letters",
    key="as input",
    types=(messages.DeadLetter,),
    union=messages.DeadLetter,
    written_by="the router and the scheduler",
    read_by="operators",
    summary="An input that was refused: why, where it was, and its bytes.",
    max_body_bytes=24 * MiB,
    configs=_kept(30 * _DAY_MS, _DAY_MS, 24 * MiB),
    partition_group="own",
)

DECLARATIONS: Final = (
    ARRIVALS,
    COMMANDS,
    COMPLETIONS,
    TELEMETRY,
    NODES,
    POOL_JOBS,
    PLACEMENTS,
    RANKINGS,
    JOURNAL,
    SNAPSHOTS,
    DEAD_LETTERS,
)
BY_NAME: Final = {declaration.name: declaration for declaration in DECLARATIONS}


@dataclass(frozen=True, slots=True)
class TopicNames:
    """The topics' names on one cluster: a prefix keeps several installations (or tests) apart."""

    prefix: str = ""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        return cls(prefix=env.get("STREAMSCHED_TOPIC_PREFIX", ""))

    def of(self, declaration: TopicDeclaration) -> str:
        return self.prefix + declaration.name

    @property
    def arrivals(self) -> str:
        return self.of(ARRIVALS)

    @property
    def commands(self) -> str:
        return self.of(COMMANDS)

    @property
    def completions(self) -> str:
        return self.of(COMPLETIONS)

    @property
    def telemetry(self) -> str:
        return self.of(TELEMETRY)

    @property
    def nodes(self) -> str:
        return self.of(NODES)

    @property
    def pool_jobs(self) -> str:
        return self.of(POOL_JOBS)

    @property
    def placements(self) -> str:
        return self.of(PLACEMENTS)

    @property
    def rankings(self) -> str:
        return self.of(RANKINGS)

    @property
    def journal(self) -> str:
        return self.of(JOURNAL)

    @property
    def snapshots(self) -> str:
        return self.of(SNAPSHOTS)

    @property
    def dead_letters(self) -> str:
        return self.of(DEAD_LETTERS)


def partition_of(pool: str, partitions: int) -> int:
    """Partition of a pool's (or job's) messages: Kafka's default, murmur2 of the key's UTF-8 bytes."""
    hashed: int = murmur2(pool.encode())
    return (hashed & 0x7FFFFFFF) % partitions
