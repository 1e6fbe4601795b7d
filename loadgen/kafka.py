"""Kafka for load generation: a producer that does not give up, and a reader of whole topics from known offsets.

While the broker is away both go on by themselves and say so once; what was not acknowledged is sent again. A message
may so be there twice, which everything downstream has to absorb anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError, UnknownError

from streamsched.bus.connection import KafkaConnection
from streamsched.bus.outage import STALL_S, Outage
from streamsched.errors import ServiceUnreachable, UserError

Say = Callable[[str], None]

_BACKOFF_S: Final = (0.2, 5.0)
_STOP_S: Final = 5.0
_POLL_MS: Final = 200
_RECORDS_MAX: Final = 5000
_PASS_OVER_MAX: Final = 50

Offsets = dict[TopicPartition, int]


class Outgoing(NamedTuple):
    topic: str
    key: bytes
    value: bytes


class Record(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp_s: float
    """Kafka's, epoch seconds: of the broker's append where the topic says so, else of the producer."""
    value: bytes | None


def unreachable(kafka: KafkaConnection, error: Exception) -> ServiceUnreachable:
    why = "" if isinstance(error, KafkaConnectionError | OSError) else f" ({str(error) or type(error).__name__})"
    return ServiceUnreachable(
        f"Kafka at {kafka.bootstrap} does not answer{why}: start it "
        "(`streamsched up`), or give its address with --bootstrap or STREAMSCHED_KAFKA_BOOTSTRAP"
    )


class Publisher:
    """A producer with acks=all, idempotent where the broker knows how.

    `send_all` returns when every message is acknowledged, however long that takes.
    After an error that an idempotent producer cannot get over it is replaced; some messages may then be there twice.
    """

    def __init__(self, kafka: KafkaConnection, say: Say) -> None:
        self._kafka = kafka
        self.outage = Outage(kafka, say)
        self._producer: AIOKafkaProducer | None = None
        self._renewal = asyncio.Lock()
        self._idempotent = kafka.idempotence
        self._refused_idempotence = False

    async def __aenter__(self) -> Publisher:
        try:
            self._producer = await self._started()
        except (KafkaError, OSError) as error:
            raise unreachable(self._kafka, error) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._drop()

    async def partitions(self, topic: str) -> list[TopicPartition]:
        """Of a topic that is there (asking for another one might create it)."""
        assert self._producer is not None
        return [TopicPartition(topic, p) for p in sorted(await self._producer.partitions_for(topic))]

    async def send_all(self, messages: Sequence[Outgoing]) -> None:
        waiting, pause_s = list(messages), _BACKOFF_S[0]
        while waiting:
            producer = self._producer
            attempt = asyncio.ensure_future(self._attempt(producer, waiting))
            try:
                await asyncio.wait({attempt}, timeout=STALL_S)
                if not attempt.done():
                    self.outage.begin()
                waiting = await attempt
            finally:
                attempt.cancel()
            if waiting and self._idempotent and self._refused_idempotence:
                self._idempotent = False
                await self._renew(producer)
            elif waiting:
                self.outage.begin()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _BACKOFF_S[1])
                await self._renew(producer)
        self.outage.end()

    async def _attempt(self, producer: AIOKafkaProducer | None, messages: list[Outgoing]) -> list[Outgoing]:
        """Those that were not acknowledged, in order."""
        if producer is None:
            return messages
        futures: list[asyncio.Future[Any]] = []
        with contextlib.suppress(KafkaError):
            for message in messages:
                futures.append(await producer.send(message.topic, key=message.key, value=message.value))
        results = await asyncio.gather(*futures, return_exceptions=True)
        self._refused_idempotence = any(isinstance(result, UnknownError) for result in results)
        failed = []
        for message, result in zip(messages, results, strict=False):
            if isinstance(result, KafkaError):
                failed.append(message)
            elif isinstance(result, BaseException):
                raise result
        return failed + messages[len(futures) :]

    async def _renew(self, old: AIOKafkaProducer | None) -> None:
        """A new producer in place of `old`: some errors leave an idempotent one unusable."""
        async with self._renewal:
            if self._producer is not old:
                return
            await self._drop()
            with contextlib.suppress(KafkaError, OSError):
                self._producer = await self._started()

    async def _started(self) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(
            **self._kafka.client_options(),
            acks="all",
            enable_idempotence=self._idempotent,
            linger_ms=5,
            max_batch_size=1 << 18,
        )
        try:
            await producer.start()
        except BaseException as error:
            with contextlib.suppress(KafkaError):
                await producer.stop()
            if isinstance(error, UnknownError) and self._idempotent:  # Tansu's answer to a request for a producer id
                self._idempotent = False
                return await self._started()
            raise
        return producer

    async def _drop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(KafkaError, TimeoutError):
                await asyncio.wait_for(producer.stop(), _STOP_S)


class Reader:
    """Reads all partitions of some topics, without a consumer group, from offsets that the caller chooses."""

    def __init__(self, kafka: KafkaConnection, topics: Sequence[str], say: Say) -> None:
        self._kafka = kafka
        self._topics = tuple(topics)
        self._consumer: AIOKafkaConsumer | None = None
        self._partitions: list[TopicPartition] = []
        self._say = say

    async def open(self, publisher: Publisher) -> None:
        """Find the partitions. A topic that is not there is a UserError."""
        self._consumer = AIOKafkaConsumer(**self._kafka.consumer_options(), group_id=None)
        try:
            await self._consumer.start()
            missing = sorted(set(self._topics) - await self._consumer.topics())
            if missing:
                raise UserError(
                    f"Kafka at {self._kafka.bootstrap} has no topic {', '.join(missing)}: "
                    "create the topics with `streamsched topics apply`"
                )
            for topic in self._topics:
                self._partitions += await publisher.partitions(topic)
            self._consumer.assign(self._partitions)
        except (KafkaError, OSError) as error:
            await self.close()
            raise unreachable(self._kafka, error) from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._consumer is not None:
            with contextlib.suppress(KafkaError, TimeoutError):
                await asyncio.wait_for(self._consumer.stop(), _STOP_S)
            self._consumer = None

    async def seek_to_end(self) -> None:
        """Go to where the topics end now.

        A broker may tell an end that is up to a batch too low (Tansu does): what is there beyond it is passed over too.
        """
        assert self._consumer is not None
        for partition, offset in (await self._consumer.end_offsets(self._partitions)).items():
            self._consumer.seek(partition, offset)
        for _ in range(_PASS_OVER_MAX):
            if not await self.read():
                break

    async def seek_to_beginning(self, topic: str) -> None:
        assert self._consumer is not None
        partitions = [partition for partition in self._partitions if partition.topic == topic]
        for partition, offset in (await self._consumer.beginning_offsets(partitions)).items():
            self._consumer.seek(partition, offset)

    async def ends(self) -> Offsets:
        """Where the topics end now, or a little lower (see `seek_to_end`)."""
        assert self._consumer is not None
        offsets: Offsets = await self._consumer.end_offsets(self._partitions)
        return offsets

    async def has_reached(self, ends: Offsets) -> bool:
        assert self._consumer is not None
        return all([await self._consumer.position(partition) >= end for partition, end in ends.items()])

    async def read(self) -> list[Record]:
        """What has come, waiting a moment for it; per partition in order."""
        assert self._consumer is not None
        try:
            batches = await self._consumer.getmany(timeout_ms=_POLL_MS, max_records=_RECORDS_MAX)
        except KafkaError as error:
            self._say(f"reading from Kafka at {self._kafka.bootstrap}: {error}; trying again")
            await asyncio.sleep(1.0)
            return []
        return list(_records(batches.values()))


def _records(batches: Iterable[list[Any]]) -> Iterable[Record]:
    for batch in batches:
        for record in batch:
            yield Record(record.topic, record.partition, record.offset, record.timestamp / 1000.0, record.value)
