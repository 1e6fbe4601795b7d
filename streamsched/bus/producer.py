"""The producer of the service: everything it writes is acknowledged by all in-sync replicas, in order.

An idempotent aiokafka producer never gives up on a batch, so while a broker is away a write simply waits, for minutes
and in silence. That is what its callers want (what is not written is not done), but somebody has to say so, and to
notice when the waiting is the client's own fault: `watch` does.

It has a weakness: aiokafka counts a batch that the broker *refuses*, the broker does not, and from then on every write
to that partition is refused as out of sequence, for as long as this producer lives. So what is too large is found out
before it is sent; what nobody depends on (`replaceable` topics) goes through a producer without sequence numbers; and
where a sequence is broken all the same, `watch` says so to whoever can end the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    BrokerResponseError,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    KafkaError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    ProducerFenced,
    UnknownProducerId,
)
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from .connection import KafkaConnection
from .outage import STALL_S, Outage

_REQUEST_BYTES_MAX: Final = 64 * 1024 * 1024
"""Above every topic's `max.message.bytes`: the broker decides what is too large."""
_LOOK_EVERY_S: Final = 1.0
_ASK_EVERY_S: Final = 5.0
_STUCK_S: Final = 60.0
_REFUSALS_MAX: Final = 5
"""Of one topic in a row. Some refusals come before the broker looks at the sequence, and hide that it is broken."""
_OUT_OF_SEQUENCE: Final = (
    OutOfOrderSequenceNumber,
    UnknownProducerId,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    ProducerFenced,
)
"""No write of this producer to the partition will be taken any more."""


def make_producer(connection: KafkaConnection) -> AIOKafkaProducer:
    """Not started yet. Idempotent unless the broker cannot (`KafkaConnection.idempotence`).

    Without idempotence a retry may write twice; journal readers void the second by its sequence number, and executors
    know a placement by its id.
    """
    return AIOKafkaProducer(
        **connection.client_options(),
        acks="all",
        enable_idempotence=connection.idempotence,
        max_request_size=_REQUEST_BYTES_MAX,
        max_batch_size=256 * 1024,
        linger_ms=0,
        request_timeout_ms=30_000,
    )


class Producer:
    """`make_producer`'s, that knows how long its oldest write has been waiting.

    `say` gets one line per outage of the broker and one at its end. `limits` are the topics' `max.message.bytes`.
    Writes to `replaceable` topics are those that a later one replaces: one may be written twice or fail without harm.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        say: Callable[[str], None],
        limits: Mapping[str, int] | None = None,
        replaceable: Collection[str] = (),
    ) -> None:
        self.outage = Outage(connection, say)
        self._limits = dict(limits or {})
        self._waiting: dict[object, float] = {}
        """Writes under way and since when (insertion order is order of age)."""
        self._written_at = time.monotonic()
        self._refused = ""
        """The first write that the broker refused for what it is, in words."""
        self._refusals: Counter[str] = Counter()
        """By topic, since the last write to it that was taken."""
        self._idempotent = connection.idempotence
        self._broken = ""
        self._break = asyncio.Event()
        self._kafka = make_producer(connection)
        self._all = [self._kafka]
        self._of: dict[str, AIOKafkaProducer] = {}
        if replaceable and connection.idempotence:
            self._all.append(make_producer(replace(connection, idempotence=False)))
            self._of = dict.fromkeys(replaceable, self._all[1])

    async def start(self) -> None:
        for kafka in self._all:
            await kafka.start()

    async def stop(self, limit_s: float) -> bool:
        """Write what is waiting, for at most `limit_s`; whether all of it was written."""
        flushed = not self._waiting
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*(kafka.stop() for kafka in self._all))
                flushed = True
        except TimeoutError:  # aiokafka waits for its last batch, whatever becomes of the broker
            pass
        return flushed

    async def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] | None = None,
    ) -> asyncio.Future[Any]:
        """Enqueue in order; the future is done when the write is safe. KafkaError here or there.

        MessageSizeTooLargeError from here (not from the future): nothing was sent.
        """
        sent_headers: list[tuple[str, bytes | None]] = list(headers or ())
        self._check_size(topic, key, value, sent_headers)
        token = object()
        self._waiting[token] = time.monotonic()
        try:
            written: asyncio.Future[Any] = await self._of.get(topic, self._kafka).send(
                topic, value, key=key, partition=partition, headers=sent_headers or None
            )
        except BaseException as error:
            del self._waiting[token]
            self._note(topic, error)
            raise
        written.add_done_callback(lambda future: self._done(topic, token, future))
        return written

    def _check_size(self, topic: str, key: bytes | None, value: bytes, headers: list[tuple[str, bytes | None]]) -> None:
        """As the broker will count it, some bytes more at most."""
        limit = self._limits.get(topic)
        size = DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, headers)
        if limit is not None and size > limit:
            raise MessageSizeTooLargeError(f"{size} bytes for {topic}, which takes {limit} (max.message.bytes)")

    async def send_and_wait(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None
    ) -> Any:
        """As `send`, until it is safe; gives the record's metadata."""
        return await (await self.send(topic, value, key=key, partition=partition))

    def _done(self, topic: str, token: object, written: asyncio.Future[Any]) -> None:
        del self._waiting[token]
        if written.cancelled():
            return
        error = written.exception()
        if error is not None:
            self._note(topic, error)
            return
        self._refusals.pop(topic, None)
        self._written_at = time.monotonic()
        self.outage.end()

    def _note(self, topic: str, error: BaseException) -> None:
        """What a failed write says of those to come."""
        if topic in self._of or not isinstance(error, KafkaError):
            return
        if type(error) is KafkaError:  # what aiokafka makes of an error that ended its sender
            cause = error.__cause__ or error
            self._breaks(f"the client cannot write to Kafka any more ({cause}), a fresh start is needed")
        elif isinstance(error, BrokerResponseError | ProducerFenced) and not error.retriable:
            if not isinstance(error, _OUT_OF_SEQUENCE):
                self._refused = self._refused or f"{topic}: {error}"
            self._refusals[topic] += 1
            if isinstance(error, _OUT_OF_SEQUENCE) or (self._idempotent and self._refusals[topic] >= _REFUSALS_MAX):
                why = f" since it refused one ({self._refused})" if self._refused else ""
                self._breaks(
                    f"Kafka takes no more writes of this process to {topic}{why}: {type(error).__name__}. A fresh "
                    "start puts that right; if it comes back, see `streamsched topics diff` and this user's rights"
                )

    def _breaks(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._break.set()

    async def watch(self, reachable: Callable[[], Awaitable[bool]], on_stuck: Callable[[str], None]) -> None:
        """Until cancelled: say when the broker is away and when it is back.

        `on_stuck` is called when nothing can be written any more by this producer, and when writes go on waiting
        although the broker answers others (`reachable`): a client that does not recover is no reason for the whole
        worker to hang, and a process that starts anew has a fresh one.
        """
        asked_at = answered_since = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._break.wait(), _LOOK_EVERY_S)
            if self._broken:
                on_stuck(self._broken)
                return
            now = time.monotonic()
            oldest = next(iter(self._waiting.values()), now)
            if now - oldest >= STALL_S:
                self.outage.begin()
            if now - asked_at < _ASK_EVERY_S:
                continue
            asked_at = now
            if not await reachable():
                answered_since = time.monotonic()
                self.outage.begin()
            elif not self._waiting:
                self.outage.end()
            stuck_s = time.monotonic() - max(answered_since, oldest, self._written_at)
            if self._waiting and stuck_s >= _STUCK_S:
                on_stuck(f"nothing could be written for {stuck_s:.0f} s although Kafka answers")
