"""A fake Kafka: partitions as lists, a producer per worker, and what can go wrong between the two.

A produce has one of these fates (seeded): written and acknowledged; written, the acknowledgement lost; not written,
an error; an error first and written later all the same, as a request that was on its way. Records of one producer and
partition that are written in time keep their order. What is on its way is written whatever becomes of its producer.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple

from aiokafka.errors import KafkaConnectionError, RequestTimedOutError

from streamsched.bus.topics import partition_of

if TYPE_CHECKING:
    from .world import World

TopicPartition = tuple[str, int]
_APART_S = 1e-6
"""Between two records of a producer in one partition, so that timers keep their order."""


class Record(NamedTuple):
    offset: int
    at: float
    """Epoch seconds, as the broker stamps it."""
    key: bytes | None
    value: bytes
    writer: str


class Written(NamedTuple):
    """What the runner reads of aiokafka's RecordMetadata."""

    offset: int


class Kafka:
    """The broker. `partitions` of every topic."""

    def __init__(self, world: World, partitions: int) -> None:
        self._world = world
        self.partitions = partitions
        self.logs: dict[TopicPartition, list[Record]] = defaultdict(list)
        self.away_until = 0.0
        self._losses = 0

    def append(self, topic: str, partition: int, key: bytes | None, value: bytes, writer: str) -> Record:
        log = self.logs[topic, partition]
        record = Record(len(log), self._world.epoch_s(), key, value, writer)
        log.append(record)
        self._world.tell(f"{writer}: {topic}[{partition}]@{record.offset} {zlib.crc32(value):08x}", value)
        return record

    def topic(self, topic: str) -> list[Record]:
        """All records of a topic, by time."""
        logs = [self.logs[topic, partition] for partition in range(self.partitions)]
        return sorted((record for log in logs for record in log), key=lambda record: record.at)

    @property
    def away(self) -> bool:
        return self._world.loop.time() < self.away_until

    async def read_partition(
        self,
        connection: Any,
        topic: str,
        partition: int,
        key: bytes,
        start: int,
        stop: int | None = None,
        prefix: bool = False,
    ) -> AsyncIterator[tuple[int, int, bytes]]:
        """In the place of `streamsched.bus.journal.read_partition`."""
        await self._world.hazard(f"read {topic}")
        await asyncio.sleep(self._world.faults.latency_s())
        if self.away:
            raise self._connection_lost()
        log = self.logs[topic, partition]
        end = len(log) if stop is None else stop
        for offset in range(start, end):
            if offset % 50 == 49:
                await self._world.hazard(f"read on {topic}")
                if self.away:
                    raise self._connection_lost()
            record = log[offset]
            if record.key == key or (prefix and record.key is not None and record.key.startswith(key)):
                yield record.offset, int(record.at * 1000), record.value

    def _connection_lost(self) -> BaseException:
        """aiokafka cancels what awaits a connection that it closes: now an error of its own, now that."""
        self._losses += 1
        return asyncio.CancelledError() if self._losses % 2 else KafkaConnectionError("the broker is away")

    async def first_offset(self, connection: Any, topic: str, partition: int) -> int:
        """In the place of `streamsched.bus.journal.first_offset`."""
        await self._world.hazard(f"first {topic}")
        return 0


class _Outage:
    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka

    @property
    def active(self) -> bool:
        return self._kafka.away


class Producer:
    """As streamsched.bus.producer.Producer, for one worker."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._free_at: dict[TopicPartition, float] = {}
        self.outage = _Outage(world.kafka)

    async def send(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Any = None
    ) -> asyncio.Future[Any]:
        await self._world.hazard(f"send {topic}")
        if partition is None:
            partition = partition_of((key or b"").decode(), self._world.kafka.partitions)
        answer: asyncio.Future[Any] = self._world.loop.create_future()
        self._enqueue((topic, partition), key, value, answer)
        return answer

    async def send_and_wait(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None
    ) -> Any:
        written = await (await self.send(topic, value, key=key, partition=partition))
        await self._world.hazard(f"sent {topic}")
        return written

    def _enqueue(self, tp: TopicPartition, key: bytes | None, value: bytes, answer: asyncio.Future[Any]) -> None:
        world = self._world
        fate = world.faults.fate_of_produce(tp[0])
        now = world.loop.time()
        at = max(now + world.faults.latency_s(), self._free_at.get(tp, 0.0) + _APART_S, world.kafka.away_until)
        self._free_at[tp] = at

        def write() -> None:
            record = world.kafka.append(*tp, key, value, self._name)
            world.strike(self._name, f"written {tp[0]}")
            if fate == "answer lost":
                fail()
            else:
                world.later(world.faults.latency_s(), lambda: _answer(answer, Written(record.offset)))

        def fail() -> None:
            world.tell(f"{self._name}: {tp[0]} {fate}")
            _answer(answer, RequestTimedOutError(f"{fate} (simulated)"))

        if fate in ("ok", "answer lost"):
            world.later(at - now, write)
        else:
            world.later(at - now, fail)
        if fate == "late":
            late = world.rng.uniform(0.0, 6.0)
            world.later(at - now + late, lambda: world.kafka.append(*tp, key, value, self._name) and None)


def _answer(answer: asyncio.Future[Any], what: Any) -> None:
    if answer.done():
        return
    if isinstance(what, BaseException):
        answer.set_exception(what)
    else:
        answer.set_result(what)
