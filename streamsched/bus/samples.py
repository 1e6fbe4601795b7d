"""Golden sample messages, at least one of every kind on every topic; written to topics/ and read back by tests.

They tell one story: a gang of 12 GPUs is submitted to pool `west`, placed on two nodes, preempted and finished.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Final, TypedDict

from streamsched.core import events as ev
from streamsched.core import instructions as ins
from streamsched.core.cluster import Meta
from streamsched.core.config import SchedulerConfig
from streamsched.core.model import Allocation, Job, JobState, NodeSpec, TopologyLevel
from streamsched.core.node import NodeRecord
from streamsched.core.problem import Assignment, Solution, SolveStatus

from . import codec, topics
from . import messages as m

_NOW: Final = 1_767_225_600.0  # 2026-01-01T00:00:00Z
_TRACE: Final = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
_POOL: Final = "west"
_JOB: Final = "resnet-0042"
_RUN: Final = "resnet-0042.1"

_GANG: Final = m.JobArrival(
    job_id=_JOB,
    submitted_at=datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
    gpus_per_worker=8,
    remainder_gpus=4,
    gpu_types=("A100-SXM4-80GB", "H100-SXM5-80GB"),
    cpu_milli=64_000,
    memory_mib=524_288,
    tenant="vision",
    pool=_POOL,
    topology=m.Topology(level=TopologyLevel.RACK, required=True),
    priority_class="high",
    weight=2.0,
    estimate_s=7200.0,
    preemptible=True,
    labels={"image": "train:1.4", "note": "Größe ≈ 12 GPUs"},
)
_SHARE: Final = m.JobArrival(job_id="notebook-7", submitted_at=_NOW, gpu_fraction=0.25, cpu_milli=2000)
_ELASTIC: Final = m.JobArrival(
    job_id="sweep/3",
    submitted_at=_NOW + 0.125,
    gpus_per_worker=1,
    workers=4,
    elastic=m.Elastic(min_workers=2, max_workers=16),
)
_BY_MEMORY: Final = m.JobArrival(
    job_id="serve-9",
    submitted_at=_NOW + 1,
    gpu_memory_mib=8138,
    workers=3,
    gpu_types=("A100-SXM4-80GB", "T4"),
    mixed_types=True,
    speeds={"A100-SXM4-80GB": 3.5, "T4": 1.0},
    anti_affinity="serve",
)
_INSTANCE: Final = m.JobArrival(job_id="notebook-8", submitted_at=_NOW + 2, mig_profile="1g.10gb")
_CANCEL: Final = m.Cancel(job_id=_JOB, time=_NOW + 60, user="ada", reason="wrong data set")

_PLACE: Final = ins.Place(
    placement_id=_RUN,
    job_id=_JOB,
    attempt=1,
    allocations=(
        Allocation(node_id="gpu-a01", gpus=(0, 1, 2, 3, 4, 5, 6, 7), cpu_milli=64_000, memory_mib=524_288),
        Allocation(node_id="gpu-a02", gpus=(0, 1, 2, 3), cpu_milli=64_000, memory_mib=524_288),
    ),
    lease_until=_NOW + 62,
    why=ins.Why(policy="f1", score=0.75, solver=SolveStatus.INCUMBENT, gap=0.01, window=17),
    labels=_GANG.labels,
    tenant="vision",
    traceparent=_TRACE,
)
_PREEMPT: Final = ins.Preempt(placement_id=_RUN, job_id=_JOB, attempt=1, reason="node drained")
_REVOKE: Final = ins.Revoke(placement_id=_RUN, job_id=_JOB, attempt=1, reason="not started within its lease")


class _Run(TypedDict):
    pool: str
    job_id: str
    placement_id: str


class _Node(TypedDict):
    pool: str
    node_id: str


def _completions() -> tuple[m.Completion, ...]:
    about: _Run = {"pool": _POOL, "job_id": _JOB, "placement_id": _RUN}
    return (
        m.Started(**about, time=_NOW + 9),
        m.Progress(**about, time=_NOW + 300, step=500, total_steps=10_000, checkpointed=True),
        m.Progress(**about, time=_NOW + 600, fraction=0.1),
        m.Completed(**about, time=_NOW + 7000),
        m.Failed(**about, time=_NOW + 700, exit_code=137, reason="node lost power", retryable=True),
        m.Preempted(**about, time=_NOW + 700),
        m.Rejected(**about, time=_NOW + 3, node_id="gpu-a02", reason="image not found"),
        m.Released(**about, time=_NOW + 700, node_ids=("gpu-a02",)),
    )


def _nodes() -> tuple[m.NodeEvent, ...]:
    node: _Node = {"pool": _POOL, "node_id": "gpu-a01"}
    return (
        m.Joined(
            **node,
            time=_NOW - 500,
            gpu_type="A100-SXM4-80GB",
            gpus=8,
            cpu_milli=128_000,
            memory_mib=1_048_576,
            nvlink="gpu-a01",
            rack="r7",
            zone="hall-1",
            gpu_memory_mib=81_920,
            labels={"driver": "570.86"},
        ),
        m.Joined(
            pool=_POOL,
            node_id="gpu-a03",
            time=_NOW - 400,
            gpu_type="A100-SXM4-80GB-MIG",
            gpus=8,
            mig="A100-80GB",
        ),
        m.Capacity(**node, time=_NOW + 100, gpus=7),
        m.Heartbeat(**node, time=_NOW + 5.5),
        m.Cordon(**node, time=_NOW + 100),
        m.Uncordon(**node, time=_NOW + 200),
        m.Drain(**node, time=_NOW + 300),
        m.Lost(**node, time=_NOW + 400, fenced=True),
    )


def _telemetry() -> m.GpuTelemetry:
    busy = m.GpuSample(
        gpu=0,
        utilization=97.0,
        framebuffer_used=70_112,
        framebuffer_free=10_926,
        power_usage=388.5,
        temperature=64.0,
        xid_errors=0,
        ecc_dbe=0,
    )
    return m.GpuTelemetry(pool=_POOL, node_id="gpu-a01", time=_NOW, gpus=(busy, m.GpuSample(gpu=1)))


def _pool_jobs() -> tuple[m.PoolJob, ...]:
    arrived = codec.origin("jobs.arrivals", 3, 1041)
    return (
        m.PoolJob(pool=_POOL, origin=arrived, arrival=_GANG, traceparent=_TRACE),
        m.PoolJob(pool=_POOL, origin=codec.origin("jobs.commands", 3, 12), command=_CANCEL),
    )


_PLACE_INSTANCE: Final = ins.Place(
    placement_id="notebook-8:7:1",
    job_id="notebook-8",
    attempt=1,
    allocations=(
        Allocation(
            node_id="gpu-a03",
            gpus=(2,),
            gpu_milli=142,
            mig_profile="1g.10gb",
            mig_geometry=(("2g.20gb", 3), ("1g.10gb", 1)),
        ),
    ),
    lease_until=_NOW + 65,
    why=ins.Why(policy="f1", score=0.5, solver=SolveStatus.OPTIMAL, gap=0.0, window=18),
)


def _placements() -> tuple[m.Placement, ...]:
    decisions: tuple[ins.Decision, ...] = (_PLACE, _PREEMPT, _REVOKE, _PLACE_INSTANCE)
    return tuple(
        m.Placement(pool=_POOL, time=_NOW + 2 + i, epoch=4, seq=900 + i, decision=decision)
        for i, decision in enumerate(decisions)
    )


def _ranking() -> m.QueueRanking:
    waiting = m.RankedJob(
        job_id=_JOB,
        rank=0,
        score=0.75,
        state="queued",
        reason="gpus-busy: 12 of A100 wanted, 4 free",
        waited_s=31.5,
        run_s=5400.0,
    )
    return m.QueueRanking(
        pool=_POOL, time=_NOW + 2, epoch=4, seq=900, policy="f1", queued=250, truncated=True, jobs=(waiting,)
    )


def _journal_events() -> tuple[ev.CoreEvent, ...]:
    solution = Solution(
        window=17,
        status=SolveStatus.INCUMBENT,
        policy="f1",
        assignments=(Assignment(job_id=_JOB, attempt=0, workers=(("gpu-a01", 8), ("gpu-a02", 4)), score=0.75),),
        gap=0.01,
        objective=9.5,
        bound=9.6,
        build_s=0.008,
        solve_s=0.106,
        unplaced={"sweep/3": "no free GPUs"},
    )
    scheduler: tuple[ev.CoreEvent, ...] = (
        ev.EpochStarted(epoch=4, config=SchedulerConfig()),
        ev.WindowElapsed(),
        ev.WindowSolved(solution=solution),
    )
    commands: tuple[m.Command, ...] = (
        _CANCEL,
        m.Hold(job_id=_JOB, time=_NOW),
        m.Release(job_id=_JOB, time=_NOW),
        m.Reprioritise(job_id=_JOB, time=_NOW, weight=4.0),
    )
    return (
        *scheduler,
        ev.JobArrived(spec=codec.job_spec(_GANG, _TRACE)),
        ev.JobArrived(spec=codec.job_spec(_SHARE)),
        ev.JobArrived(spec=codec.job_spec(_ELASTIC)),
        ev.JobArrived(spec=codec.job_spec(_BY_MEMORY)),
        ev.JobArrived(spec=codec.job_spec(_INSTANCE)),
        *(codec.command_event(command, 12 + i) for i, command in enumerate(commands)),
        *(codec.run_event(report) for report in _completions()),
        *(codec.node_event(message) for message in _nodes()),
    )


def _snapshot() -> m.SnapshotPart:
    spec = codec.job_spec(_GANG)
    return m.SnapshotPart(
        pool=_POOL,
        snapshot_id="3-41",
        slot=0,
        part=0,
        parts=1,
        epoch=3,
        seq=41,
        journal=57,
        next_offsets={"pool.jobs:5": 12},
        meta=Meta(epoch=3, now=_NOW, next_seq=1),
        jobs=(Job(spec=spec, seq=0, state=JobState.QUEUED, queued_at=_NOW),),
        nodes=(NodeRecord(spec=NodeSpec(node_id="gpu-07", gpu_type="H100-SXM5-80GB", gpus=8), capacity=8),),
    )


def _journal() -> m.JournalRecord:
    return m.JournalRecord(
        pool=_POOL,
        epoch=4,
        seq=900,
        now=_NOW + 2,
        events=_journal_events(),
        decisions=(_PLACE, _PREEMPT, _REVOKE),
        next_offsets={"pool.jobs:5": 1043, "jobs.completions:5": 88, "nodes.events:5": 4711},
    )


def _dead_letter() -> m.DeadLetter:
    refused = codec.Refused("invalid", "Expected `int` >= 1 - at `$.gpus_per_worker`")
    original = b'{"job_id":"x-1","submitted_at":1767225600,"gpus_per_worker":-1}'
    return codec.dead_letter(refused, codec.origin("jobs.arrivals", 3, 1042), _NOW + 2, b"x-1", original)


SAMPLES: Final[dict[str, tuple[m.Message, ...]]] = {
    topics.ARRIVALS.name: (_GANG, _SHARE, _ELASTIC, _BY_MEMORY, _INSTANCE),
    topics.COMMANDS.name: (
        _CANCEL,
        m.Hold(job_id=_JOB, time=_NOW + 61, user="ada"),
        m.Release(job_id=_JOB, time=_NOW + 62, user="ada"),
        m.Reprioritise(job_id=_JOB, time=_NOW + 63, user="ada", priority_class="low", weight=0.5),
    ),
    topics.COMPLETIONS.name: _completions(),
    topics.TELEMETRY.name: (_telemetry(),),
    topics.NODES.name: _nodes(),
    topics.POOL_JOBS.name: _pool_jobs(),
    topics.PLACEMENTS.name: _placements(),
    topics.RANKINGS.name: (_ranking(),),
    topics.JOURNAL.name: (_journal(),),
    topics.SNAPSHOTS.name: (_snapshot(),),
    topics.DEAD_LETTERS.name: (_dead_letter(),),
}
"""By topic name without prefix; the first of each is the topic's sample."""
