"""The time that decisions are made by: it always flows, never jumps, and is the same for a pool whoever owns it.

Three clocks can be wrong: this machine's, a former owner's, the broker's. None of them may freeze or jump leases,
backoffs and reservations, so

- `Clock` reads the machine's clock at the start and goes on with the monotonic one. What the machine's clock is set to
  later is followed slowly;
- `PoolClock` goes on from the pool's time where a former owner's clock was ahead of ours, and falls back to ours
  slowly: slower time is still time, standing time would hold up every lease until our clock had caught up;
- `BrokerTime` compares ours with the times that the broker puts on what we write, and says when they are apart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from streamsched.bus.connection import KafkaConnection
from streamsched.bus.producer import Producer

log = logging.getLogger(__name__)

SLEW: Final = 0.05
"""By this share time may run faster or slower to come back to where it should be: an hour in twenty hours."""
APART_S: Final = 5.0
"""Clocks that are further apart than this are told of: more than the network and NTP explain."""
_LOG_APPEND_TIME: Final = 1


class Clock:
    """UTC epoch seconds of this process. A step of the machine's clock is followed at `SLEW`, in both directions."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        self._read_at = steady()
        self._now = wall()

    def __call__(self) -> float:
        read_at = self._steady()
        passed, self._read_at = max(0.0, read_at - self._read_at), read_at
        off = self._wall() - (self._now + passed)
        self._now += passed + max(-SLEW * passed, min(SLEW * passed, off))
        return self._now


class PoolClock:
    """The time of one pool on this worker: `clock`'s, unless a former owner's was ahead of it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_at = clock()
        self._ahead_s = 0.0

    def __call__(self) -> float:
        read_at = self._clock()
        passed, self._read_at = max(0.0, read_at - self._read_at), read_at
        self._ahead_s = max(0.0, self._ahead_s - SLEW * passed)
        return read_at + self._ahead_s

    def go_on_from(self, now: float, pool: str) -> None:
        """A pool taken over at `now` of its own time goes on from there. Says so when that is far ahead of ours."""
        ahead_s = now - self()
        if ahead_s <= 0:
            return
        self._ahead_s += ahead_s
        if ahead_s > APART_S:
            log.warning(
                "pool %s: a former owner's clock was %.1f s ahead of this machine's: the pool goes on from there and "
                "comes back to this clock by %.0f s in an hour; check the clocks (NTP) of all workers",
                pool,
                ahead_s,
                SLEW * 3600,
            )


class BrokerTime:
    """How far this worker's clock is from the broker's. One warning when they come apart, one line when they agree."""

    def __init__(self, kafka: str, clock: Callable[[], float]) -> None:
        self._kafka = kafka
        self._clock = clock
        self._told = False

    def now(self) -> float:
        return self._clock()

    def note(self, sent_at: float, written: asyncio.Future[Any]) -> None:
        """Of a write that is done: the broker's time lies between sending and acknowledgement, if the clocks agree."""
        if written.cancelled() or written.exception() is not None:
            return
        record = written.result()
        if getattr(record, "timestamp_type", None) != _LOG_APPEND_TIME or not record.timestamp or record.timestamp < 0:
            return
        appended_at = record.timestamp / 1000.0
        behind_s = max(0.0, appended_at - self._clock()) - max(0.0, sent_at - appended_at)
        if abs(behind_s) > APART_S and not self._told:
            self._told = True
            log.warning(
                "this worker's clock is %.1f s %s that of Kafka at %s: check the clocks (NTP) of both; leases and "
                "waits are right meanwhile, the times that are reported are not",
                abs(behind_s),
                "behind" if behind_s > 0 else "ahead of",
                self._kafka,
            )
        elif abs(behind_s) < APART_S / 2 and self._told:
            self._told = False
            log.info("this worker's clock agrees with that of Kafka at %s again", self._kafka)


class TimedProducer(Producer):
    """A producer whose every write is also a look at the broker's clock."""

    def __init__(
        self,
        connection: KafkaConnection,
        say: Callable[[str], None],
        clock: Callable[[], float],
        limits: Mapping[str, int] | None = None,
        replaceable: Collection[str] = (),
    ) -> None:
        super().__init__(connection, say, limits, replaceable)
        self._broker_time = BrokerTime(connection.bootstrap, clock)

    async def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] | None = None,
    ) -> asyncio.Future[Any]:
        """As `Producer.send`."""
        sent_at = self._broker_time.now()
        written = await super().send(topic, value, key=key, partition=partition, headers=headers)
        written.add_done_callback(lambda future: self._broker_time.note(sent_at, future))
        return written
