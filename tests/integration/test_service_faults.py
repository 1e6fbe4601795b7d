"""Workers, Redis and the broker are ended in the middle of a replay: nothing is lost, placed twice or over capacity.

The replay's executors and its audit know nothing of the scheduler but the topics. Where a worker is killed between
writing a placement and noting that it has, the next one may write the same placement again (same id, same content):
executors take it once, so the audit allows that repetition and nothing else.
"""

from __future__ import annotations

import asyncio
import io
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.console import Console
from service_fixture import Service, installed, pools_apart

from loadgen.fleet import FleetOptions
from loadgen.replay import ReplayOptions, ReplayResult, run_replay
from streamsched.bus import messages as m
from streamsched.service.stacks import Stack
from streamsched.sim.nodes import parse_nodes

pytestmark = pytest.mark.integration

JOBS = 100


def trace_of(folder: Path, jobs: int = JOBS) -> Path:
    """A job every 20 s, of 1 to 16 GPUs, for 20 to 200 s: most of 32 GPUs busy, with a queue now and then."""
    path = folder / "trace.csv"
    rows = [f"j{i},{i * 20},{20 + 20 * (i % 10)},{(1, 1, 2, 4, 8, 16)[i % 6]},t{i % 3}" for i in range(jobs)]
    path.write_text("job_id,submit_s,duration_s,gpus,tenant\n" + "\n".join(rows) + "\n")
    return path


def replay(
    service: Service, fault: Callable[[], Awaitable[None]] | None = None, speed: float = 200.0, repeats: bool = False
) -> ReplayResult:
    """Replay beside `fault` (10 s of arrivals at the default speed)."""
    pools = service.settings.pools
    options = ReplayOptions(
        trace=trace_of(service.folder),
        speed=speed,
        nodes={pool: parse_nodes("4x8:P100") for pool in pools},
        pool=pools[0] if len(pools) == 1 else None,
        job_prefix="job",
        stall_timeout_s=90.0,
        allow_repeated_placements=repeats,
        fleet=FleetOptions(start_delay_s=0.01),
    )

    async def both() -> ReplayResult:
        beside = asyncio.ensure_future(fault()) if fault is not None else None
        result = await run_replay(options, service.stack.kafka, service.names, Console(file=io.StringIO()))
        if beside is not None:
            await beside
        return result

    return asyncio.run(both())


def check(service: Service, result: ReplayResult) -> None:
    logs = "\n".join(f"{w.log.name}:\n" + "\n".join(w.lines()[-30:]) for w in service.workers)
    assert result.ok, f"{result.audit.details}\n{logs}"
    assert result.summary.completed == result.summary.jobs == JOBS
    refused = [letter for letter in service.letters() if letter.code != "unknown-node"]
    assert not refused, refused[:3]


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def service(stack: Stack, tmp_path: Path):
    with installed(stack, f"t{uuid.uuid4().hex[:8]}", tmp_path) as running:
        yield running


def test_a_replay_completes(service: Service) -> None:
    worker = service.start()
    check(service, replay(service, speed=300.0))
    assert worker.stop() == 0
    assert not [line for line in worker.lines() if " ERROR " in line or "Traceback" in line]


@pytest.mark.chaos
def test_a_worker_killed_twice_in_the_middle(service: Service) -> None:
    service.start()

    async def fault() -> None:
        for pause in (2.0, 4.0):
            await asyncio.sleep(pause)
            service.workers[-1].kill()
            service.spawn()

    check(service, replay(service, fault, repeats=True))
    assert service.workers[-1].process.poll() is None


@pytest.mark.chaos
def test_of_two_workers_one_is_stopped_and_then_the_other_killed(stack: Stack, tmp_path: Path) -> None:
    pools = pools_apart(3)
    with installed(stack, f"t{uuid.uuid4().hex[:8]}", tmp_path, pools) as service:
        first = service.start()

        async def fault() -> None:
            await asyncio.sleep(2.0)
            second = service.spawn()
            await asyncio.to_thread(service.wait_for, lambda: second.said("pools here: pool"), "the second's pools")
            await asyncio.sleep(2.0)
            assert await asyncio.to_thread(first.stop) == 0
            third = service.spawn()
            await asyncio.to_thread(service.wait_for, lambda: third.said("pools here"), "the third in the group")
            await asyncio.sleep(2.0)
            second.kill()

        check(service, replay(service, fault, speed=100.0, repeats=True))
        assert {placement.pool for placement in service.placements()} == set(pools)
        assert service.workers[2].stop() == 0


@pytest.mark.chaos
@pytest.mark.slow
def test_partitions_move_again_and_again_under_load(stack: Stack, tmp_path: Path) -> None:
    """Every rebalance gives back unapplied inputs, which must come again, and before those behind them."""
    pools = pools_apart(3)
    with installed(stack, f"t{uuid.uuid4().hex[:8]}", tmp_path, pools) as service:
        stays = service.start()

        async def fault() -> None:
            for _ in range(4):
                guest = service.spawn()
                await asyncio.to_thread(service.wait_for, lambda guest=guest: guest.said("pools here"), "the guest")
                await asyncio.sleep(1.0)
                assert await asyncio.to_thread(guest.stop) == 0

        check(service, replay(service, fault, speed=60.0))
        assert stays.process.poll() is None
        assert stays.said("pools here: pool") >= 5


@pytest.mark.chaos
def test_a_worker_that_was_frozen_for_too_long_changes_nothing(service: Service) -> None:
    zombie = service.start()
    service.send(service.names.nodes, m.Joined(pool="default", node_id="n", time=time.time(), gpu_type="A", gpus=8))
    service.wait_for(lambda: (s := service.state()) is not None and "n" in s.nodes, "the node")
    zombie.signal(signal.SIGSTOP)
    heir = service.start()
    # Work that the zombie finds in its queues or is told of by its timers would be done twice if nothing stopped it.
    service.send(
        service.names.arrivals,
        *(m.JobArrival(job_id=f"j{i}", submitted_at=time.time(), gpus_per_worker=1) for i in range(8)),
    )
    for i in range(8):
        service.wait_placed(f"j{i}")
    epoch = service.placements()[-1].epoch
    zombie.signal(signal.SIGCONT)
    assert zombie.ended() == 3
    assert zombie.said("another worker has taken over pool default") == 1
    assert zombie.said("Traceback") == 0
    assert {p.epoch for p in service.placements()} == {epoch}
    assert [len(service.placed(f"j{i}")) for i in range(8)] == [1] * 8
    service.send(service.names.arrivals, m.JobArrival(job_id="last", submitted_at=time.time(), gpus_per_worker=9))
    service.wait_job("last", lambda job: True)
    assert heir.stop() == 0


def test_a_stop_in_the_middle_of_work_is_clean(service: Service) -> None:
    service.start()

    async def fault() -> None:
        await asyncio.sleep(2.0)
        assert await asyncio.to_thread(service.workers[0].stop) == 0
        await asyncio.to_thread(service.start)

    check(service, replay(service, fault, speed=300.0))


# ── Redis ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def own(private_stack: Stack, tmp_path: Path):
    """An installation whose servers may be killed."""
    with installed(private_stack, f"t{uuid.uuid4().hex[:8]}", tmp_path) as running:
        yield running


@pytest.mark.chaos
def test_redis_killed_and_flushed_while_running(own: Service) -> None:
    worker = own.start()
    server = own.stack.redis_server
    assert server is not None

    async def fault() -> None:
        await asyncio.sleep(2.0)
        server.kill()
        await asyncio.sleep(3.0)
        await asyncio.to_thread(server.restart)
        await asyncio.sleep(2.0)
        await asyncio.to_thread(own.redis, lambda client: client.flushall())

    check(own, replay(own, fault, repeats=True))
    assert worker.process.poll() is None, "it goes on by itself"
    assert 1 <= worker.said("Redis does not answer|not stored") <= 20
    assert worker.said("Redis does not hold what was last written there") >= 1
    assert worker.said("Traceback") == 0


@pytest.mark.chaos
def test_an_idle_worker_notices_that_redis_was_flushed(own: Service) -> None:
    worker = own.start()
    own.send(own.names.nodes, m.Joined(pool="default", node_id="n", time=time.time(), gpu_type="A", gpus=8))
    own.send(own.names.arrivals, m.JobArrival(job_id="j", submitted_at=time.time(), gpus_per_worker=1))
    place = own.wait_placed("j")
    own.redis(lambda client: client.flushall())
    job = own.wait_job("j", lambda job: True)
    assert job.placement_id == place.placement_id
    assert len(own.placed("j")) == 1
    assert worker.said("recovering") == 1


@pytest.mark.chaos
def test_a_stop_while_redis_is_away_is_bounded(own: Service) -> None:
    worker = own.start()
    assert own.stack.redis_server is not None
    own.stack.redis_server.kill()
    own.send(own.names.nodes, m.Joined(pool="default", node_id="n", time=time.time(), gpu_type="A", gpus=8))
    own.wait_for(lambda: worker.said("pool default: Redis does not answer"), "the commit under way")
    worker.signal(signal.SIGTERM)
    assert worker.ended(25.0) in (0, 1)
    own.stack.redis_server.restart()
    own.start()
    own.wait_for(lambda: (s := own.state()) is not None and "n" in s.nodes, "the node")


# ── the broker ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def outage(own: Service, seconds: float) -> None:
    """Killed and started again, or frozen for a while where the broker would forget everything."""
    broker = own.stack.broker
    assert broker is not None
    keeps = own.stack.traits.broker_keeps_data
    (broker.kill if keeps else broker.pause)()
    await asyncio.sleep(seconds)
    await asyncio.to_thread(broker.restart if keeps else broker.resume)


@pytest.mark.chaos
@pytest.mark.parametrize("seconds", [5.0, pytest.param(70.0, marks=pytest.mark.slow)])
def test_the_broker_goes_away_and_comes_back(own: Service, seconds: float) -> None:
    worker = own.start()

    async def fault() -> None:
        await asyncio.sleep(2.0)
        await outage(own, seconds)

    check(own, replay(own, fault, repeats=True))
    assert worker.process.poll() is None, "it goes on by itself"
    told = worker.said("Kafka at .* does not answer")
    # A broker that is only halted refuses no connection: a few seconds of it may pass before a write is late.
    assert told == 1 or (told == 0 and not own.stack.traits.broker_keeps_data and seconds < 10.0)
    assert worker.said("Kafka at .* is back after") == told
    assert worker.said("Traceback") == 0
    assert len(worker.lines()) < 60
    assert worker.stop() == 0


@pytest.mark.chaos
def test_an_idle_worker_says_that_the_broker_is_away_and_goes_on(own: Service) -> None:
    worker = own.start()
    asyncio.run(outage(own, 9.0))
    own.wait_for(lambda: worker.said("is back after"), "the end of the outage")
    own.send(own.names.nodes, m.Joined(pool="default", node_id="n", time=time.time(), gpu_type="A", gpus=8))
    own.send(own.names.arrivals, m.JobArrival(job_id="j", submitted_at=time.time(), gpus_per_worker=1))
    own.wait_placed("j")
    assert worker.said("Kafka at .* does not answer") == 1


@pytest.mark.chaos
def test_a_stop_while_the_broker_is_away_is_bounded(own: Service) -> None:
    worker = own.start()
    broker = own.stack.broker
    assert broker is not None
    broker.pause()
    own.wait_for(lambda: worker.said("Kafka at .* does not answer"), "the worker to notice")
    worker.signal(signal.SIGTERM)
    # 1 when something was still to be told to Kafka (leaving the group, as a rule), else 0; never a hang.
    assert worker.ended(30.0) == worker.said("stopped without waiting for")
    assert worker.said("Traceback") == 0
    broker.resume()
