"""Snapshots are cut by what their parts weigh on the topic, and read back whole."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from journal_topic import MemoryTopic

from streamsched.bus import codec, snapshots
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.snapshots import Snapshot
from streamsched.bus.topics import SNAPSHOTS
from streamsched.core.cluster import Changes, Meta
from streamsched.core.model import Allocation, Job, JobSpec, JobState, NodeSpec, Run, RunState
from streamsched.core.node import NodeRecord
from streamsched.core.tenants import TenantUsage

LIMIT = int(SNAPSHOTS.configs["max.message.bytes"])
WIDE = "\N{GREEK SMALL LETTER OMEGA}" * 200  # two bytes each


class Sink:
    """A producer that writes to a topic in memory."""

    def __init__(self) -> None:
        self.topic = MemoryTopic()

    async def send(self, topic: str, value: bytes, *, key: bytes, partition: int) -> asyncio.Future[Any]:
        self.topic.write(value, key)
        written: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written


def job(number: int, **more: Any) -> Job:
    spec_fields = {key: more.pop(key) for key in ("labels", "gpu_types") if key in more}
    spec = JobSpec(job_id=f"job-{number}", submitted_at=1.0, gpus_per_worker=1, **spec_fields)
    return Job(spec=spec, seq=number, state=JobState.QUEUED, queued_at=2.0, **more)


def state(jobs: list[Job], tenants: int = 1) -> Changes:
    run = Run(
        placement_id="r:1:1",
        job_id="r",
        attempt=1,
        state=RunState.RUNNING,
        allocations=(Allocation(node_id="n", gpus=(0,)),),
        placed_at=1.0,
        started_at=2.0,
        lease_until=3.0,
    )
    return Changes(
        jobs={one.spec.job_id: one for one in jobs},
        runs={run.placement_id: run},
        nodes={"n": NodeRecord(spec=NodeSpec(node_id="n", gpu_type="A", gpus=8), capacity=8)},
        tenants={f"{i}-{WIDE}": TenantUsage() for i in range(tenants)},
        meta=Meta(epoch=3, now=9.0, next_seq=5),
    )


def written(held: Changes, patch: pytest.MonkeyPatch) -> tuple[list[int], Snapshot | None]:
    """Sizes of the parts, and what is read back."""
    sink = Sink()
    sink.topic.install(patch)
    snapshot = Snapshot(state=held, epoch=3, seq=4, journal=10, next_offsets={"pool.jobs:0": 7}, slot=1)

    async def work() -> Snapshot | None:
        await snapshots.write(sink, "snapshots", 0, "p", snapshot)  # type: ignore[arg-type]
        return await snapshots.read_latest(KafkaConnection(), "snapshots", 0, "p")

    read = asyncio.run(work())
    assert read == snapshot
    return [len(value) for _, value in sink.topic.records], read


def test_an_empty_state_is_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Changes(jobs={}, runs={}, nodes={}, tenants={}, meta=Meta())
    assert len(written(empty, monkeypatch)[0]) == 1


@pytest.mark.parametrize(
    "heavy",
    [
        {"reason": WIDE * 20},
        {"refused_by": tuple(f"{i}-{WIDE}" for i in range(20))},
        {"gpu_types": tuple(f"{i}-{WIDE}" for i in range(20))},
        {"labels": {str(i): WIDE for i in range(20)}},
    ],
    ids=lambda heavy: next(iter(heavy)),
)
def test_parts_fit_whatever_makes_a_job_large(heavy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 jobs of 8 KB each: as many as a part may hold, and twice what its topic takes."""
    sizes, _ = written(state([job(i, **heavy) for i in range(2000)]), monkeypatch)
    assert max(sizes) < LIMIT / 3
    assert len(sizes) >= 7


def test_a_job_that_is_large_alone_does_not_take_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"labels": {"note": "x" * 1_900_000}}
    sizes, _ = written(state([job(0), job(1, **large), job(2, **large), job(3)]), monkeypatch)
    assert max(sizes) < 2 * 1024 * 1024 + 4096


def test_many_tenants_are_cut_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, _ = written(state([job(0)], tenants=20_000), monkeypatch)
    assert max(sizes) < LIMIT / 3


def test_what_others_wrote_under_our_keys_makes_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink()
    sink.topic.install(monkeypatch)
    meta: dict[str, Any] = {"pool": "p", "snapshot_id": "9-9", "part": 0, "parts": 1, "epoch": 9, "seq": 9}
    part = codec.decode_snapshot(msgspec.json.encode(meta | {"slot": 0, "journal": 99}))
    sink.topic.write(codec.encode(part), b"p#0#0")  # without the scalars
    other = msgspec.structs.replace(part, pool="q", meta=Meta())
    sink.topic.write(codec.encode(other), b"p#1#0")
    sink.topic.write(b"?", b"p#1#1")
    assert asyncio.run(snapshots.read_latest(KafkaConnection(), "snapshots", 0, "p")) is None
