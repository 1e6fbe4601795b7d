"""Bytes from Kafka to messages, and messages to the core's events: decoded once, checked once, here.

What is wrong with an input is data: `decode_*` raises `Refused` with a code and a line for the dead letter, and nothing
else, whatever the bytes. Beyond the types these hold after decoding:

- an arrival asks for whole GPUs, for a share or for a MIG instance, not for two of them; its gang is within limits; its
  elastic range holds `workers`; it wants nothing that no inventory could give (`_check_wishes`);
- a node's MIG table is known;
- a time given as text lies in the range that is allowed for numbers;
- `reprioritise` says what to change; a routed job is either an arrival or a command.

JSON's loose ends: a number with a fraction or exponent is not an integer, not even 8.0; of a key given twice the last
counts, for everybody, because only what was decoded here is passed on; unknown fields are ignored; NaN and infinity are
not JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec

from streamsched.core import events as ev
from streamsched.core import mig
from streamsched.core.model import WHOLE_GPU, ElasticRange, JobSpec, NodeSpec, TopologyLevel, TopologyWish

from . import messages as m
from . import topics
from .topics import MAX_BODY_BYTES, MAX_ORIGINAL_BYTES

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_GPUS",
    "MAX_ORIGINAL_BYTES",
    "Refused",
    "command_event",
    "dead_letter",
    "decode_arrival",
    "decode_command",
    "decode_completion",
    "decode_dead_letter",
    "decode_journal",
    "decode_node",
    "decode_placement",
    "decode_pool_job",
    "decode_ranking",
    "decode_telemetry",
    "encode",
    "epoch_seconds",
    "job_spec",
    "key_of",
    "node_event",
    "origin",
    "run_event",
    "traceparent",
]

T = TypeVar("T")

MAX_GPUS: Final = 100_000
"""Of one gang, at its largest."""
_LAST_SECOND: Final = 32503680000.0  # the year 3000, as in messages.EpochSeconds
_DETAIL_MAX: Final = 500


class Refused(Exception):
    """This input cannot be used; `code` and `detail` go into its dead letter."""

    def __init__(self, code: m.RefusalCode, detail: str) -> None:
        if len(detail) > _DETAIL_MAX:  # a message may quote the input
            detail = detail[:_DETAIL_MAX] + "…"
        super().__init__(f"{code}: {detail}")
        self.code: m.RefusalCode = code
        self.detail = detail


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _decoder(
    declaration: topics.TopicDeclaration, check: Callable[[T], None] | None = None
) -> Callable[[bytes | None], T]:
    decode: Callable[[bytes], T] = msgspec.json.Decoder(declaration.union).decode
    limit = declaration.max_body_bytes

    def decode_body(raw: bytes | None) -> T:
        if not raw:
            raise Refused("malformed", "no value (a tombstone)" if raw is None else "empty value")
        if len(raw) > limit:
            raise Refused("too-large", f"{len(raw)} bytes, at most {limit} are taken")
        try:
            if not raw.isascii():
                raw.decode()  # msgspec does not look into fields that it skips
            message = decode(raw)
        except msgspec.ValidationError as error:
            raise Refused("invalid", str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused("malformed", str(error)) from None
        except RecursionError:
            raise Refused("malformed", "nested too deeply") from None
        if check is not None:
            check(message)
        return message

    return decode_body


def _check_time(time: m.Time, name: str = "time") -> None:
    if isinstance(time, datetime) and not 0 <= time.timestamp() <= _LAST_SECOND:
        raise Refused("invalid", f"Expected a time from 1970 to 2999 - at `$.{name}`")


def _check_arrival(arrival: m.JobArrival) -> None:
    _check_time(arrival.submitted_at, "submitted_at")
    _check_devices(arrival)
    _check_gang(arrival)
    _check_wishes(arrival)


def _check_devices(arrival: m.JobArrival) -> None:
    """Whole devices, a share of one by thousandths or memory, or a MIG instance."""
    whole, by_fraction = arrival.gpus_per_worker is not None, arrival.gpu_fraction is not None
    by_memory, by_profile = arrival.gpu_memory_mib > 0, arrival.mig_profile is not None
    if by_profile and (whole or by_fraction or by_memory):
        other = "gpus_per_worker" if whole else "gpu_fraction" if by_fraction else "gpu_memory_mib"
        raise Refused(
            "invalid", f"Not together with `{other}`: an instance has what its name says - at `$.mig_profile`"
        )
    if whole and by_fraction:
        raise Refused("invalid", "Expected exactly one of `gpus_per_worker` and `gpu_fraction` - at `$`")
    if whole and by_memory:
        raise Refused("invalid", "Not together with `gpus_per_worker`: it asks for a share - at `$.gpu_memory_mib`")
    if not (whole or by_fraction or by_memory or by_profile):
        kinds = "`gpus_per_worker`, a share (`gpu_fraction`, `gpu_memory_mib`) and `mig_profile`"
        raise Refused("invalid", f"Expected exactly one of {kinds} - at `$`")
    if arrival.remainder_gpus and not whole:
        asked = "mig_profile" if by_profile else "gpu_fraction" if by_fraction else "gpu_memory_mib"
        raise Refused("invalid", f"Not together with `{asked}` - at `$.remainder_gpus`")


def _check_wishes(arrival: m.JobArrival) -> None:
    """Contradictions that no inventory could resolve."""
    if arrival.gpu_types:
        for gpu_type in arrival.speeds:
            if gpu_type not in arrival.gpu_types:
                raise Refused("invalid", f"{gpu_type} is not among `gpu_types` - at `$.speeds`")
    topology = arrival.topology
    on_one_node = topology is not None and topology.required and topology.level is TopologyLevel.NODE
    if on_one_node and arrival.anti_affinity and arrival.workers + arrival.remainder_gpus > 1:
        raise Refused("invalid", "Workers apart cannot all be on one node (`topology`) - at `$.anti_affinity`")


def _check_gang(arrival: m.JobArrival) -> None:
    gpus_per_worker = arrival.gpus_per_worker or 1
    if arrival.remainder_gpus >= gpus_per_worker:
        raise Refused("invalid", f"Expected `int` < {gpus_per_worker} (a worker) - at `$.remainder_gpus`")
    workers = arrival.workers
    if elastic := arrival.elastic:
        if not elastic.min_workers <= workers <= elastic.max_workers:
            raise Refused("invalid", f"Expected min_workers <= {workers} (workers) <= max_workers - at `$.elastic`")
        workers = elastic.max_workers
    if workers * gpus_per_worker + arrival.remainder_gpus > MAX_GPUS:
        raise Refused("invalid", f"Expected at most {MAX_GPUS} GPUs (workers x gpus_per_worker) - at `$`")


def _check_command(command: m.Command) -> None:
    _check_time(command.time)
    if isinstance(command, m.Reprioritise) and command.priority_class is None and command.weight is None:
        raise Refused("invalid", "Expected `priority_class` or `weight` - at `$`")


def _check_report(message: m.Completion | m.GpuTelemetry) -> None:
    _check_time(message.time)


def _check_pool_job(message: m.PoolJob) -> None:
    if (message.arrival is None) == (message.command is None):
        raise Refused("invalid", "Expected exactly one of `arrival` and `command` - at `$`")
    if message.arrival is not None:
        _check_arrival(message.arrival)
    if message.command is not None:
        _check_command(message.command)


def _check_node(message: m.NodeEvent) -> None:
    _check_time(message.time)
    if isinstance(message, m.Joined) and message.mig and message.mig not in mig.TABLES:
        raise Refused("invalid", f"Expected one of {', '.join(sorted(mig.TABLES))} - at `$.mig`")


decode_arrival: Callable[[bytes | None], m.JobArrival] = _decoder(topics.ARRIVALS, _check_arrival)
decode_command: Callable[[bytes | None], m.Command] = _decoder(topics.COMMANDS, _check_command)
decode_completion: Callable[[bytes | None], m.Completion] = _decoder(topics.COMPLETIONS, _check_report)
decode_telemetry: Callable[[bytes | None], m.GpuTelemetry] = _decoder(topics.TELEMETRY, _check_report)
decode_node: Callable[[bytes | None], m.NodeEvent] = _decoder(topics.NODES, _check_node)
decode_pool_job: Callable[[bytes | None], m.PoolJob] = _decoder(topics.POOL_JOBS, _check_pool_job)
decode_placement: Callable[[bytes | None], m.Placement] = _decoder(topics.PLACEMENTS)
decode_ranking: Callable[[bytes | None], m.QueueRanking] = _decoder(topics.RANKINGS)
decode_journal: Callable[[bytes | None], m.JournalRecord] = _decoder(topics.JOURNAL)
decode_snapshot: Callable[[bytes | None], m.SnapshotPart] = _decoder(topics.SNAPSHOTS)
decode_dead_letter: Callable[[bytes | None], m.DeadLetter] = _decoder(topics.DEAD_LETTERS)

DECODERS: Final[dict[str, Callable[[bytes | None], Any]]] = {
    topics.ARRIVALS.name: decode_arrival,
    topics.COMMANDS.name: decode_command,
    topics.COMPLETIONS.name: decode_completion,
    topics.TELEMETRY.name: decode_telemetry,
    topics.NODES.name: decode_node,
    topics.POOL_JOBS.name: decode_pool_job,
    topics.PLACEMENTS.name: decode_placement,
    topics.RANKINGS.name: decode_ranking,
    topics.JOURNAL.name: decode_journal,
    topics.SNAPSHOTS.name: decode_snapshot,
    topics.DEAD_LETTERS.name: decode_dead_letter,
}
"""By topic name without prefix."""


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_encode = msgspec.json.Encoder().encode


def encode(message: m.Message) -> bytes:
    """The message as JSON. Raises ValueError for a NaN or infinite number.

    msgspec writes those as null, which no reader takes back: one such score in the journal would make a pool's past
    unreadable. Absent values are left out, so a null in the text is rare and then worth a second look.
    """
    raw = _encode(message)
    if b"null" in raw:
        try:
            msgspec.json.decode(raw, type=type(message))
        except msgspec.ValidationError as error:
            raise ValueError(f"{type(message).__name__} with a number that JSON cannot hold: {error}") from None
    return raw


def key_of(message: m.JobArrival | m.Command | Any) -> bytes:
    """The Kafka key of a message: the job's id on the topics of submitters and users, else the pool."""
    if isinstance(message, m.JobArrival | m.JobCommand):
        return message.job_id.encode()
    key: str = message.pool
    return key.encode()


# ── from messages to the core ────────────────────────────────────────────────────────────────────────────────────────


def epoch_seconds(time: m.Time) -> float:
    return time.timestamp() if isinstance(time, datetime) else time


def job_spec(arrival: m.JobArrival, traceparent: str | None = None) -> JobSpec:
    topology, elastic = arrival.topology, arrival.elastic
    return JobSpec(
        job_id=arrival.job_id,
        submitted_at=epoch_seconds(arrival.submitted_at),
        gpus_per_worker=arrival.gpus_per_worker or 1,
        workers=arrival.workers,
        remainder_gpus=arrival.remainder_gpus,
        gpu_milli=_gpu_milli(arrival),
        gpu_types=arrival.gpu_types,
        mixed_types=arrival.mixed_types,
        speeds=arrival.speeds,
        gpu_memory_mib=arrival.gpu_memory_mib,
        mig_profile=arrival.mig_profile or "",
        cpu_milli=arrival.cpu_milli,
        memory_mib=arrival.memory_mib,
        tenant=arrival.tenant,
        topology=TopologyWish(level=topology.level, required=topology.required) if topology else None,
        anti_affinity=arrival.anti_affinity or "",
        priority_class=arrival.priority_class,
        weight=arrival.weight,
        estimate_s=arrival.estimate_s,
        preemptible=arrival.preemptible,
        elastic=_elastic_range(elastic) if elastic else None,
        labels=arrival.labels,
        traceparent=traceparent,
    )


def _gpu_milli(arrival: m.JobArrival) -> int:
    """Of one device, as far as the request itself says it: what a share by memory takes depends on the device."""
    if arrival.mig_profile is not None:
        return mig.MILLI.get(arrival.mig_profile, WHOLE_GPU)
    return WHOLE_GPU if arrival.gpu_fraction is None else round(arrival.gpu_fraction * WHOLE_GPU)


def _elastic_range(elastic: m.Elastic) -> ElasticRange:
    return ElasticRange(min_workers=elastic.min_workers, max_workers=elastic.max_workers)


def command_event(command: m.Command, offset: int) -> ev.CoreEvent:
    """`offset` is that of the command in its origin partition (`PoolJob.origin`): a job's commands share one."""
    match command:
        case m.Cancel(job_id=job_id):
            return ev.CancelRequested(job_id=job_id, offset=offset)
        case m.Hold(job_id=job_id):
            return ev.HoldRequested(job_id=job_id, offset=offset)
        case m.Release(job_id=job_id):
            return ev.ReleaseRequested(job_id=job_id, offset=offset)
        case m.Reprioritise(job_id=job_id):
            return ev.ReprioritiseRequested(
                job_id=job_id, offset=offset, priority_class=command.priority_class, weight=command.weight
            )


def run_event(report: m.Completion) -> ev.CoreEvent:
    placement_id, job_id, time = report.placement_id, report.job_id, epoch_seconds(report.time)
    match report:
        case m.Started():
            return ev.RunStarted(placement_id=placement_id, job_id=job_id, time=time)
        case m.Progress():
            return ev.RunProgressed(
                placement_id=placement_id,
                job_id=job_id,
                time=time,
                fraction=_fraction(report),
                step=report.step,
                checkpointed=report.checkpointed,
            )
        case m.Completed():
            return ev.RunCompleted(placement_id=placement_id, job_id=job_id, time=time, exit_code=report.exit_code)
        case m.Failed():
            return ev.RunFailed(
                placement_id=placement_id,
                job_id=job_id,
                time=time,
                exit_code=report.exit_code,
                reason=report.reason,
                retryable=report.retryable,
            )
        case m.Preempted():
            return ev.RunPreempted(placement_id=placement_id, job_id=job_id, time=time)
        case m.Rejected():
            return ev.RunRejected(
                placement_id=placement_id,
                job_id=job_id,
                time=time,
                node_id=report.node_id,
                reason=report.reason,
            )
        case m.Released():
            return ev.RunReleased(placement_id=placement_id, job_id=job_id, time=time, node_ids=report.node_ids)


def _fraction(report: m.Progress) -> float | None:
    """As said, else from steps; a job may run on past the steps it planned."""
    if report.fraction is not None:
        return report.fraction
    if report.step is None or report.total_steps is None:
        return None
    return min(1.0, report.step / report.total_steps)


def node_event(message: m.NodeEvent) -> ev.CoreEvent:
    node_id = message.node_id
    match message:
        case m.Joined():
            return ev.NodeJoined(spec=_node_spec(message))
        case m.Capacity():
            return ev.NodeCapacityChanged(node_id=node_id, gpus=message.gpus)
        case m.Heartbeat():
            return ev.NodeHeard(node_id=node_id)
        case m.Cordon():
            return ev.NodeCordoned(node_id=node_id)
        case m.Uncordon():
            return ev.NodeUncordoned(node_id=node_id)
        case m.Drain():
            return ev.NodeDrained(node_id=node_id)
        case m.Lost():
            return ev.NodeLost(node_id=node_id, fenced=message.fenced, time=epoch_seconds(message.time))


def _node_spec(message: m.Joined) -> NodeSpec:
    return NodeSpec(
        node_id=message.node_id,
        gpu_type=message.gpu_type,
        gpus=message.gpus,
        cpu_milli=message.cpu_milli,
        memory_mib=message.memory_mib,
        nvlink=message.nvlink,
        rack=message.rack,
        zone=message.zone,
        gpu_memory_mib=message.gpu_memory_mib,
        mig=message.mig,
        labels=message.labels,
    )


# ── dead letters and headers ─────────────────────────────────────────────────────────────────────────────────────────


def origin(topic: str, partition: int, offset: int) -> m.Origin:
    return m.Origin(topic=topic, partition=partition, offset=offset)


def dead_letter(
    refused: Refused, origin: m.Origin, time: float, key: bytes | None, original: bytes | None
) -> m.DeadLetter:
    """The letter for a refused input. Of a giant only the first 16 MiB are kept, and the detail says so."""
    original = original or b""
    detail = refused.detail
    if len(original) > MAX_ORIGINAL_BYTES:
        detail = f"{detail} (of {len(original)} bytes the first {MAX_ORIGINAL_BYTES} are kept)"
        original = original[:MAX_ORIGINAL_BYTES]
    return m.DeadLetter(code=refused.code, detail=detail, origin=origin, time=time, key=key, original=original)


def traceparent(headers: Iterable[tuple[str, bytes]]) -> str | None:
    """The W3C trace context of a message, None when there is none or it is too long to be one."""
    for name, value in headers:
        if name.lower() == "traceparent" and value and len(value) <= 128 and value.isascii():
            return value.decode()
    return None
