"""Replay, fleet and audit on a real broker, with a first-fit stand-in for the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadgen.fleet import FleetOptions
from loadgen.kafka import Outgoing, Publisher, Reader
from loadgen.replay import ReplayOptions, ReplayResult, run_replay
from loadgen.trace import Window
from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.bus.admin import apply_topics
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.topics import TopicNames
from streamsched.core.instructions import Place, Why
from streamsched.core.model import Allocation
from streamsched.errors import UserError
from streamsched.service.stacks import Stack
from streamsched.sim.nodes import parse_nodes

pytestmark = pytest.mark.integration

PARTITIONS = 2


@dataclass
class StandIn:
    """Places first-fit, in order of arrival, skipping what does not fit. Faults for the audit: `over`, `forget`."""

    kafka: KafkaConnection
    names: TopicNames
    forget: int = 0
    over: bool = False
    free: dict[str, set[int]] = field(default_factory=dict)
    queue: dict[str, m.JobArrival] = field(default_factory=dict)
    runs: dict[str, Place] = field(default_factory=dict)
    seq: int = 0

    async def run(self) -> None:
        topics = (self.names.arrivals, self.names.nodes, self.names.completions)
        reader = Reader(self.kafka, topics, print)
        async with Publisher(self.kafka, print) as publisher:
            await reader.open(publisher)
            try:
                while True:
                    for record in await reader.read():
                        self.take(record.topic, record.value)
                    messages = [
                        m.Placement(pool="default", time=time.time(), epoch=1, seq=self.seq, decision=place)
                        for place in self.window()
                    ]
                    out = [Outgoing(self.names.placements, b"default", codec.encode(message)) for message in messages]
                    await publisher.send_all(out)
            finally:
                await reader.close()

    def take(self, topic: str, value: bytes | None) -> None:
        if topic == self.names.arrivals:
            arrival = codec.decode_arrival(value)
            self.queue[arrival.job_id] = arrival
        elif topic == self.names.nodes:
            if isinstance(event := codec.decode_node(value), m.Joined):
                self.free.setdefault(event.node_id, set(range(event.gpus)))
        else:
            self.take_report(codec.decode_completion(value))

    def take_report(self, report: m.Completion) -> None:
        place = None if isinstance(report, m.Started) else self.runs.pop(report.placement_id, None)
        if place is None:
            return
        for allocation in place.allocations:
            self.free[allocation.node_id] |= set(allocation.gpus)
        if not isinstance(report, m.Completed):
            self.queue[report.job_id] = m.JobArrival(
                job_id=place.job_id, submitted_at=0.0, gpus_per_worker=1, labels=place.labels
            )

    def window(self) -> list[Place]:
        places = []
        for arrival in list(self.queue.values()):
            self.seq += 1
            allocations = self.fit(arrival)
            if not allocations:
                continue
            del self.queue[arrival.job_id]
            if self.forget and self.seq % self.forget == 0:
                continue
            place = Place(
                placement_id=f"p-{self.seq}",
                job_id=arrival.job_id,
                attempt=1,
                allocations=tuple(allocations),
                lease_until=time.time() + 60,
                why=Why(policy="first-fit", window=self.seq),
                labels=arrival.labels,
            )
            self.runs[place.placement_id] = place
            places.append(place)
        return places

    def fit(self, arrival: m.JobArrival) -> list[Allocation]:
        free = {node_id: sorted(gpus) for node_id, gpus in self.free.items()}
        allocations = []
        for size in [arrival.gpus_per_worker or 1] * arrival.workers + [arrival.remainder_gpus] * bool(
            arrival.remainder_gpus
        ):
            node_id = next((node_id for node_id, gpus in free.items() if len(gpus) >= size), None)
            if node_id is None:
                return []
            allocations.append(Allocation(node_id=node_id, gpus=tuple(free[node_id][:size])))
            del free[node_id][:size]
        if not self.over:
            for allocation in allocations:
                self.free[allocation.node_id] -= set(allocation.gpus)
        return allocations


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def trace_of(folder: Path, jobs: int = 40) -> Path:
    """One job a minute, of 1, 2, 4 or 12 GPUs, for 100 to 1,000 s."""
    path = folder / "small.csv"
    rows = [f"j{i},{i * 60},{100 + 90 * (i % 11)},{(1, 1, 2, 4, 12)[i % 5]},t{i % 3}" for i in range(jobs)]
    path.write_text("job_id,submit_s,duration_s,gpus,tenant\n" + "\n".join(rows) + "\n")
    return path


def options_for(trace: Path, **changes: Any) -> ReplayOptions:
    options = ReplayOptions(
        trace=trace,
        speed=1000.0,
        nodes={"default": parse_nodes("4x8:P100")},
        job_prefix="job",
        stall_timeout_s=3.0,
        fleet=FleetOptions(start_delay_s=0.005),
    )
    return replace(options, **changes)


async def replayed(stand_in: StandIn, options: ReplayOptions) -> tuple[ReplayResult, str]:
    await apply_topics(stand_in.kafka, stand_in.names, PARTITIONS)
    console = Console(file=io.StringIO(), width=200)
    async with beside(stand_in.run()):
        result = await run_replay(options, stand_in.kafka, stand_in.names, console)
    return result, console.file.getvalue()  # type: ignore[attr-defined]


def test_every_job_is_run_and_nothing_is_violated(kafka: KafkaConnection, namespace: str, tmp_path: Path) -> None:
    stand_in = StandIn(kafka, TopicNames(f"{namespace}."))
    result, said = asyncio.run(replayed(stand_in, options_for(trace_of(tmp_path))))
    summary = result.summary
    assert result.ok, result.audit.details
    assert summary.jobs == summary.completed == 40
    assert summary.placements == 40
    assert result.fleets[0].counts.completed == 40
    assert summary.gpu_utilisation is not None
    assert 0 < summary.gpu_utilisation <= 1
    assert summary.p99_wait_s is not None
    assert said == ""


def test_a_second_replay_on_the_same_topics_sees_only_its_own_jobs(
    kafka: KafkaConnection, namespace: str, tmp_path: Path
) -> None:
    names = TopicNames(f"{namespace}.")
    first = options_for(trace_of(tmp_path), job_prefix="first", window=Window(limit=10))
    second = options_for(trace_of(tmp_path), job_prefix="second", window=Window(limit=15))

    async def both() -> tuple[ReplayResult, ReplayResult]:
        await apply_topics(kafka, names, PARTITIONS)
        quiet = Console(file=io.StringIO())
        async with beside(StandIn(kafka, names).run()):
            return await run_replay(first, kafka, names, quiet), await run_replay(second, kafka, names, quiet)

    one, two = asyncio.run(both())
    assert one.ok, one.audit.details
    assert two.ok, two.audit.details
    assert (one.summary.jobs, two.summary.jobs) == (10, 15)


def test_faults_of_the_executors_are_survived_by_who_places_again(
    kafka: KafkaConnection, namespace: str, tmp_path: Path
) -> None:
    rows = [f"j{i},{i * 30},100,1" for i in range(30)]
    trace = tmp_path / "ones.csv"
    trace.write_text("job_id,submit_s,duration_s,gpus\n" + "\n".join(rows) + "\n")
    faults = FleetOptions(
        seed=3, start_delay_s=0.005, reject_share=0.2, fail_share=0.2, duplicate_share=0.5, lose_started_share=0.3
    )
    stand_in = StandIn(kafka, TopicNames(f"{namespace}."))
    result, _ = asyncio.run(replayed(stand_in, options_for(trace, fleet=faults)))
    counts = result.fleets[0].counts
    assert result.ok, result.audit.details
    assert result.summary.completed == 30
    assert counts.rejected > 0
    assert counts.failed > 0
    assert result.summary.placements == 30 + counts.rejected + counts.failed


def test_a_scheduler_that_forgets_jobs_is_found_out(kafka: KafkaConnection, namespace: str, tmp_path: Path) -> None:
    stand_in = StandIn(kafka, TopicNames(f"{namespace}."), forget=10)
    result, said = asyncio.run(replayed(stand_in, options_for(trace_of(tmp_path))))
    assert set(result.audit.counts) == {"lost"}
    assert result.audit.counts["lost"] == 40 - result.summary.completed
    assert "giving up" in said


def test_a_scheduler_that_gives_devices_twice_is_found_out(
    kafka: KafkaConnection, namespace: str, tmp_path: Path
) -> None:
    stand_in = StandIn(kafka, TopicNames(f"{namespace}."), over=True)
    trace = tmp_path / "two.csv"
    trace.write_text("job_id,submit_s,duration_s,gpus\na,0,1000,4\nb,300,1000,4\n")
    options = options_for(trace, stall_timeout_s=1.0)
    result, _ = asyncio.run(replayed(stand_in, options))
    assert result.audit.counts["device-conflict"] > 0
    assert result.audit.counts["executor-device-conflict"] > 0


def test_missing_topics_are_told(kafka: KafkaConnection, namespace: str, tmp_path: Path) -> None:
    names = TopicNames(f"{namespace}.")
    with pytest.raises(UserError, match=r"no topic .*jobs\.arrivals.*streamsched topics apply"):
        asyncio.run(run_replay(options_for(trace_of(tmp_path)), kafka, names, Console(file=io.StringIO())))


def test_the_broker_may_go_away_and_come_back(private_stack: Stack, namespace: str, tmp_path: Path) -> None:
    """Killed and started again, or, where the broker would forget its topics, halted for a while."""
    stack = private_stack
    stand_in = StandIn(stack.kafka, TopicNames(f"{namespace}."))

    async def outage() -> None:
        assert stack.broker is not None
        while not stand_in.runs:  # noqa: ASYNC110 - until the replay has begun, however slow the machine is
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        end, begin = (
            (stack.broker.kill, stack.broker.restart)
            if stack.traits.broker_keeps_data
            else (
                stack.broker.pause,
                stack.broker.resume,
            )
        )
        end()
        await asyncio.sleep(5.0)
        await asyncio.to_thread(begin)

    async def scenario() -> tuple[ReplayResult, str]:
        async with beside(outage()):
            return await replayed(stand_in, options_for(trace_of(tmp_path), speed=300.0, stall_timeout_s=60.0))

    result, said = asyncio.run(scenario())
    assert result.ok, result.audit.details
    assert result.summary.completed == 40
    assert "does not answer; trying again" in said
    assert "is back after" in said


def test_the_command_tells_an_absent_broker_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadgen.cli", "replay", str(trace_of(tmp_path)), "--nodes", "4x8:P100"]
    ended = subprocess.run(
        [*command, "--bootstrap", "127.0.0.1:1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("loadgen: Kafka at 127.0.0.1:1 does not answer")
