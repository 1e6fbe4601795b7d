"""The agents on a real broker: a partition that stands still holds up no other and fills no memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from streamsched.bus.admin import apply_topics
from streamsched.bus.app import GroupTimes, Handler, Handlers, Input, build_app
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.hearing import Ears, Hearing
from streamsched.bus.intake import BATCH_MAX, OPEN_BYTES_MAX, OPEN_MAX, Later
from streamsched.bus.topics import TopicNames

pytestmark = pytest.mark.integration

SLOW, QUICK = 0, 1
MANY = 6 * OPEN_MAX


def test_a_partition_that_stands_still_holds_up_no_other(kafka: KafkaConnection, namespace: str) -> None:
    asyncio.run(_check(kafka, TopicNames(f"{namespace}."), namespace))


async def _check(kafka: KafkaConnection, names: TopicNames, group: str) -> None:
    await apply_topics(kafka, names, 2)
    open_again = asyncio.Event()
    got: Counter[int] = Counter()
    offsets: list[int] = []

    async def waits() -> bool:
        return await open_again.wait()

    async def schedule(inputs: list[Input]) -> dict[int, Later | None]:
        got.update(source.partition for source in inputs)
        offsets.extend(source.offset for source in inputs if source.partition == SLOW)
        share = waits()
        slow = [place for place, source in enumerate(inputs) if source.partition == SLOW]
        if not slow:
            share.close()
        return dict.fromkeys(slow, share)

    async with _running(kafka, names, group, _nothing, schedule) as ears:
        await _until(lambda: {ears(SLOW), ears(QUICK)} == {Hearing.ALL}, "both partitions to be heard")
        await _write(kafka, names.nodes, SLOW, MANY)
        await _until(lambda: got[SLOW] >= OPEN_MAX, "the slow partition to be full")
        assert ears(SLOW) is Hearing.NOTHING, "it is held back"
        await _write(kafka, names.nodes, QUICK, 10)
        await _until(lambda: got[QUICK] == 10, "the quick partition")
        await asyncio.sleep(2.0)
        assert got[SLOW] <= OPEN_MAX + 10 * BATCH_MAX, "what was fetched before the pause comes, and no more"
        assert await _committed(kafka, group, names.nodes, QUICK, 10) == 10
        assert await _committed(kafka, group, names.nodes, SLOW, 0) == 0
        assert (ears(SLOW), ears(QUICK)) == (Hearing.NOTHING, Hearing.ALL)
        open_again.set()
        await _until(lambda: got[SLOW] == MANY, "the rest of the slow partition")
        assert offsets == list(range(MANY)), "in order, and none is left out"
        await _until(lambda: ears(SLOW) is Hearing.ALL, "the slow partition to be heard again")
        assert await _committed(kafka, group, names.nodes, SLOW, MANY) == MANY


def test_a_handler_that_does_not_return_stops_no_other_agent(kafka: KafkaConnection, namespace: str) -> None:
    """As the router while Redis does not answer. All agents are fed by one loop of Faust's."""

    async def check() -> None:
        names = TopicNames(f"{namespace}.")
        await apply_topics(kafka, names, 2)
        go_on = asyncio.Event()
        routed: list[int] = []
        got: Counter[int] = Counter()

        async def route(inputs: list[Input]) -> dict[int, Later | None]:
            await go_on.wait()
            routed.extend(source.offset for source in inputs)
            return {}

        async def schedule(inputs: list[Input]) -> dict[int, Later | None]:
            got.update(source.partition for source in inputs)
            return {}

        async with _running(kafka, names, namespace, route, schedule):
            await _write(kafka, names.arrivals, 0, MANY)
            await asyncio.sleep(3.0)
            await _write(kafka, names.nodes, QUICK, 10)
            await _until(lambda: got[QUICK] == 10, "the other agent")
            assert await _committed(kafka, namespace, names.nodes, QUICK, 10) == 10
            go_on.set()
            await _until(lambda: len(routed) == MANY, "the rest")
            assert routed == list(range(MANY)), "in order, and none is left out"
            assert await _committed(kafka, namespace, names.arrivals, 0, MANY) == MANY

    asyncio.run(check())


def test_large_messages_hold_a_partition_by_their_bytes(kafka: KafkaConnection, namespace: str) -> None:
    async def check() -> None:
        names = TopicNames(f"{namespace}.")
        await apply_topics(kafka, names, 2)
        go_on = asyncio.Event()
        got: Counter[int] = Counter()
        large, count = bytes(900_000), 3 * OPEN_BYTES_MAX // 900_000

        async def waits() -> bool:
            return await go_on.wait()

        async def schedule(inputs: list[Input]) -> dict[int, Later | None]:
            got.update(source.partition for source in inputs)
            return dict.fromkeys(range(len(inputs)), waits())

        async with _running(kafka, names, namespace, _nothing, schedule):
            await _write(kafka, names.nodes, SLOW, count, large)
            await _until(lambda: got[SLOW] * len(large) >= OPEN_BYTES_MAX, "the partition to be full")
            await asyncio.sleep(2.0)
            assert got[SLOW] * len(large) <= 1.5 * OPEN_BYTES_MAX, (
                "what was fetched before the pause comes, and no more"
            )
            go_on.set()
            await _until(lambda: got[SLOW] == count, "the rest")
            assert await _committed(kafka, namespace, names.nodes, SLOW, count) == count

    asyncio.run(check())


def test_topics_that_the_broker_did_not_know_at_first_are_assigned_soon(kafka: KafkaConnection, namespace: str) -> None:
    """A broker that comes back does not know all its topics at once, and whoever leads the group may have asked then.

    aiokafka by itself would ask again after five minutes, in which the partitions are nobody's.
    """

    async def check() -> None:
        names = TopicNames(f"{namespace}.")
        got: Counter[int] = Counter()

        async def schedule(inputs: list[Input]) -> dict[int, Later | None]:
            got.update(source.partition for source in inputs)
            return {}

        async with _running(kafka, names, namespace, _nothing, schedule):
            await apply_topics(kafka, names, 2)
            for partition in (0, 1):
                await _write(kafka, names.nodes, partition, 10)
            await _until(lambda: (got[0], got[1]) == (10, 10), "both partitions to be assigned")

    asyncio.run(check())


async def _nothing(*_: Any) -> dict[int, Later | None]:
    return {}


@contextlib.asynccontextmanager
async def _running(
    kafka: KafkaConnection, names: TopicNames, group: str, route: Handler, schedule: Handler
) -> AsyncIterator[Ears]:
    """The agents with these handlers, once partitions are assigned."""
    ready = asyncio.Event()

    async def assigned(*_: Any) -> None:
        ready.set()

    async def revoked() -> None:
        pass

    def fault(error: BaseException) -> None:
        raise error

    ears = Ears(kafka.fetch_wait_ms / 1e3)
    app = build_app(
        group,
        kafka,
        names,
        Handlers(route, schedule, _nothing, assigned, revoked, fault),
        GroupTimes(6.0, 1.0, 5.0),
        ears,
    )
    await app.start()
    try:
        async with asyncio.timeout(60.0):
            await ready.wait()
        yield ears
    finally:
        await app.stop()


async def _write(kafka: KafkaConnection, topic: str, partition: int, count: int, value: bytes = b"x") -> None:
    async with AIOKafkaProducer(**kafka.client_options(), linger_ms=5) as producer:
        sent = [await producer.send(topic, value, partition=partition) for _ in range(count)]
        await asyncio.gather(*sent)


async def _committed(kafka: KafkaConnection, group: str, topic: str, partition: int, wanted: int) -> int:
    """What the group has acknowledged; it may take a moment to be what is wanted."""
    consumer = AIOKafkaConsumer(**kafka.consumer_options(), group_id=group)
    await consumer.start()
    try:
        tp = TopicPartition(topic, partition)
        offset = 0
        for _ in range(60):
            offset = await consumer.committed(tp) or 0
            if offset == wanted:
                break
            await asyncio.sleep(0.5)
        return offset
    finally:
        await consumer.stop()


async def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        await asyncio.sleep(0.1)
