"""The producer of the service: everything it writes is acknowledged by all in-sync replicas, in order.

An idempotent aiokafka producer never gives up on a batch, so while a broker is away a write simply waits, for minutes
and in silence. That is what its callers want (what is not written is not done), but somebody has to say so, and to
notice when the waiting is the client's own fault: `watch` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaProducer

from .connection import KafkaConnection
from .outage import STALL_S, Outage

_REQUEST_BYTES_MAX: Final = 64 * 1024 * 1024
"""Above every topic's `max.message.bytes`: the broker decides what is too large."""
_LOOK_EVERY_S: Final = 1.0
_ASK_EVERY_S: Final = 5.0
_STUCK_S: Final = 60.0


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

    `say` gets one line per outage of the broker and one at its end.
    """

    def __init__(self, connection: KafkaConnection, say: Callable[[str], None]) -> None:
        self.outage = Outage(connection, say)
        self._waiting: dict[object, float] = {}
        """Writes under way and since when (insertion order is order of age)."""
        self._written_at = time.monotonic()
        self._kafka = make_producer(connection)

    async def start(self) -> None:
        await self._kafka.start()

    async def stop(self, limit_s: float) -> bool:
        """Write what is waiting, for at most `limit_s`; whether all of it was written."""
        flushed = not self._waiting
        try:
            async with asyncio.timeout(limit_s):
                await self._kafka.stop()
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
        """Enqueue in order; the future is done when the write is safe. KafkaError here or there."""
        token = object()
        self._waiting[token] = time.monotonic()
        try:
            written: asyncio.Future[Any] = await self._kafka.send(
                topic, value, key=key, partition=partition, headers=list(headers) if headers else None
            )
        except BaseException:
            del self._waiting[token]
            raise
        written.add_done_callback(lambda future: self._done(token, future))
        return written

    async def send_and_wait(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None
    ) -> Any:
        """As `send`, until it is safe; gives the record's metadata."""
        return await (await self.send(topic, value, key=key, partition=partition))

    def _done(self, token: object, written: asyncio.Future[Any]) -> None:
        del self._waiting[token]
        if not written.cancelled() and written.exception() is None:
            self._written_at = time.monotonic()
            self.outage.end()

    async def watch(self, reachable: Callable[[], Awaitable[bool]], on_stuck: Callable[[str], None]) -> None:
        """Until cancelled: say when the broker is away and when it is back.

        `on_stuck` is called when writes go on waiting although the broker answers others (`reachable`): a client that
        does not recover is no reason for the whole worker to hang.
        """
        asked_at = answered_since = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
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
