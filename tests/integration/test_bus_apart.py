"""The agents on a real broker: a partition that stands still holds up no other and fills no memory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from streamsched.bus.admin import apply_topics
from streamsched.bus.app import BATCH_MAX, OPEN_MAX, GroupTimes, Handlers, Input, Later, build_app
from streamsched.bus.connection import KafkaConnection
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
    ready = asyncio.Event()

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

    async def nothing(*_: Any) -> dict[int, Later | None]:
        return {}

    async def assigned(*_: Any) -> None:
        ready.set()

    async def revoked() -> None:
        pass

    def fault(error: BaseException) -> None:
        raise error

    app = build_app(
        group, kafka, names, Handlers(nothing, schedule, nothing, assigned, revoked, fault), GroupTimes(6.0, 1.0, 5.0)
    )
    await app.start()
    try:
        async with asyncio.timeout(60.0):
            await ready.wait()
        await _write(kafka, names.nodes, SLOW, MANY)
        await _until(lambda: got[SLOW] >= OPEN_MAX, "the slow partition to be full")
        await _write(kafka, names.nodes, QUICK, 10)
        await _until(lambda: got[QUICK] == 10, "the quick partition")
        await asyncio.sleep(2.0)
        assert got[SLOW] <= OPEN_MAX + 10 * BATCH_MAX, "what was fetched before the pause comes, and no more"
        assert await _committed(kafka, group, names.nodes, QUICK, 10) == 10
        assert await _committed(kafka, group, names.nodes, SLOW, 0) == 0
        open_again.set()
        await _until(lambda: got[SLOW] == MANY, "the rest of the slow partition")
        assert offsets == list(range(MANY)), "in order, and none is left out"
        assert await _committed(kafka, group, names.nodes, SLOW, MANY) == MANY
    finally:
        await app.stop()


async def _write(kafka: KafkaConnection, topic: str, partition: int, count: int) -> None:
    async with AIOKafkaProducer(**kafka.client_options(), linger_ms=5) as producer:
        sent = [await producer.send(topic, b"x", partition=partition) for _ in range(count)]
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
