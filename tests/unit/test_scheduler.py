"""What the scheduler's side of the bus takes, and what it gives back unacknowledged."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streamsched.bus.app import Input
from streamsched.bus.topics import partition_of
from streamsched.service.runner import GivenUp
from streamsched.service.scheduler import Scheduler
from streamsched.service.settings import Settings

SETTINGS = Settings()
HEARTBEAT = b'{"type": "heartbeat", "pool": "default", "node_id": "n", "time": 1}'


class Runner:
    """Takes what it is given, or is stopped before it has."""

    def __init__(self, stopped: bool = False) -> None:
        self.stopped = stopped
        self.ready = asyncio.Event()
        self.ready.set()
        self.offsets: list[int] = []

    async def submit(self, work: list[tuple[Input, Any]]) -> None:
        if self.stopped:
            raise GivenUp
        await self.ready.wait()
        self.offsets += [source.offset for source, _ in work]


def heartbeats(*offsets: int, generation: int, partition: int | None = None) -> list[Input]:
    at = partition_of("default", SETTINGS.partitions) if partition is None else partition
    return [Input("nodes.events", at, offset, b"default", HEARTBEAT, (), generation) for offset in offsets]


@pytest.fixture
def letters() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def scheduler(letters: list[tuple[str, int]]) -> Scheduler:
    async def keep(pairs: list[tuple[Any, Input]]) -> None:
        letters.extend((refused.code, source.offset) for refused, source in pairs)

    parts: Any = SimpleNamespace(settings=SETTINGS)
    return Scheduler(parts, None, SimpleNamespace(write=keep), pytest.fail)  # type: ignore[arg-type]


async def settled(scheduler: Scheduler, inputs: list[Input]) -> dict[int, Any]:
    """What becomes of a batch: places that are not to be acknowledged as None, all the others are."""
    later = await scheduler.schedule(inputs)
    return {place: None for place, work in later.items() if work is None or await work is False}


def assigned(scheduler: Scheduler, runner: Runner, generation: int) -> None:
    scheduler.runners["default"] = runner  # type: ignore[assignment]
    scheduler._generation = generation
    scheduler._assigned.set()


def test_inputs_of_the_present_assignment_are_applied_and_acknowledged(scheduler: Scheduler) -> None:
    runner = Runner()
    assigned(scheduler, runner, generation=2)
    assert asyncio.run(settled(scheduler, heartbeats(3, 4, generation=2))) == {}
    assert runner.offsets == [3, 4]


def test_inputs_from_before_a_rebalance_are_not_applied_after_it(scheduler: Scheduler) -> None:
    """Those before them were given back and will come again: taken first, these would make them look applied."""

    async def work() -> dict[int, Any]:
        stopped, fresh = Runner(stopped=True), Runner()
        assigned(scheduler, stopped, generation=1)
        given_back = await settled(scheduler, heartbeats(10, 11, generation=1))
        assert given_back == {0: None, 1: None}
        scheduler._assigned.clear()
        late = asyncio.ensure_future(settled(scheduler, heartbeats(12, 13, generation=1)))
        await asyncio.sleep(0)
        assert not late.done()
        assigned(scheduler, fresh, generation=2)
        assert await late == {0: None, 1: None}
        await settled(scheduler, heartbeats(10, 11, 12, 13, generation=2))
        assert fresh.offsets == [10, 11, 12, 13]
        return given_back

    asyncio.run(work())


def test_what_is_refused_is_acknowledged_and_the_rest_goes_on(
    scheduler: Scheduler, letters: list[tuple[str, int]]
) -> None:
    runner = Runner()
    assigned(scheduler, runner, generation=1)
    elsewhere = (partition_of("default", SETTINGS.partitions) + 1) % SETTINGS.partitions
    bad = Input("nodes.events", 0, 8, None, b"{", (), 1)
    inputs = [*heartbeats(7, generation=1), bad, *heartbeats(9, generation=1, partition=elsewhere)]
    assert asyncio.run(settled(scheduler, inputs)) == {}
    assert runner.offsets == [7]
    assert letters == [("malformed", 8), ("wrong-partition", 9)]


def test_a_pool_that_recovers_slowly_holds_up_no_other(letters: list[tuple[str, int]]) -> None:
    """Its own inputs wait unacknowledged, in order; those of the other pool are applied and acknowledged meanwhile."""
    pools = ("slow", "quick")
    settings = Settings(pools=pools)

    async def keep(pairs: list[tuple[Any, Input]]) -> None:
        letters.extend((refused.code, source.offset) for refused, source in pairs)

    def batch(*offsets: int) -> list[Input]:
        return [
            Input(
                "nodes.events",
                partition_of(pool, settings.partitions),
                offset,
                pool.encode(),
                HEARTBEAT.replace(b"default", pool.encode()),
                (),
                1,
            )
            for offset in offsets
            for pool in pools
        ]

    async def work() -> None:
        parts: Any = SimpleNamespace(settings=settings)
        scheduler = Scheduler(parts, None, SimpleNamespace(write=keep), pytest.fail)  # type: ignore[arg-type]
        slow, quick = Runner(), Runner()
        slow.ready.clear()
        scheduler.runners = {"slow": slow, "quick": quick}  # type: ignore[dict-item]
        scheduler._generation = 1
        scheduler._assigned.set()
        first = await asyncio.wait_for(scheduler.schedule(batch(0, 1)), 1.0)
        second = await asyncio.wait_for(scheduler.schedule(batch(2)), 1.0)
        assert [await first[1], await first[3], await second[1]] == [True, True, True]  # type: ignore[misc]
        assert (quick.offsets, slow.offsets) == ([0, 1, 2], [])
        assert not any(each.done() for each in (first[0], first[2], second[0]))  # type: ignore[union-attr]
        slow.ready.set()
        assert [await first[0], await first[2], await second[0]] == [True, True, True]  # type: ignore[misc]
        assert slow.offsets == [0, 1, 2]

    asyncio.run(work())
    assert letters == []


def test_letters_that_cannot_be_written_hold_up_what_was_refused_and_nothing_else() -> None:
    """They are in another topic, whose broker may be away while that of the pools is not."""
    away = asyncio.Event()

    async def keep(pairs: list[tuple[Any, Input]]) -> None:
        await away.wait()

    async def work() -> None:
        parts: Any = SimpleNamespace(settings=SETTINGS)
        scheduler = Scheduler(parts, None, SimpleNamespace(write=keep), pytest.fail)  # type: ignore[arg-type]
        runner = Runner()
        assigned(scheduler, runner, generation=1)
        bad = Input("nodes.events", 0, 8, None, b"{", (), 1)
        later = await asyncio.wait_for(scheduler.schedule([*heartbeats(7, generation=1), bad]), 1.0)
        assert await asyncio.wait_for(later[0], 1.0) is True  # type: ignore[arg-type]
        telemetry = await asyncio.wait_for(
            scheduler.observe([msgspec.structs.replace(bad, topic="gpu.telemetry")]), 1.0
        )
        await asyncio.sleep(0)
        assert [later[1].done(), telemetry[0].done()] == [False, False]  # type: ignore[union-attr]
        away.set()
        assert [await later[1], await telemetry[0]] == [None, None]  # type: ignore[misc]

    asyncio.run(work())
