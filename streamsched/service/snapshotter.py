"""Writes a snapshot of a pool now and then, beside its commits.

It copies the (frozen) values at a commit and encodes and sends them in the background; a snapshot that fails is only
a snapshot less.
"""

from __future__ import annotations

import asyncio
import logging
import time

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from streamsched.bus import snapshots
from streamsched.bus.strays import connection_errors
from streamsched.core.cluster import ClusterState
from streamsched.store.pool_store import Position

from .retry import words

_AT_LEAST_EVERY_S = 24 * 3600.0
"""A pool with few events gets a snapshot a day while it has any: the journal is kept for 90 days only."""

log = logging.getLogger(__name__)


class Snapshotter:
    """One per pool and epoch. `every`: journal records between two snapshots."""

    def __init__(self, producer: AIOKafkaProducer, topic: str, partition: int, pool: str, every: int) -> None:
        self._producer = producer
        self._topic = topic
        self._partition = partition
        self._pool = pool
        self._every = every
        self._slot = 0
        self._last = 0
        self._last_at = time.monotonic()
        self.latest_seq = 0
        """Journal record of the latest whole snapshot."""
        self._task: asyncio.Task[None] | None = None
        self.written = 0

    def begin(self, position: Position) -> None:
        """After a recovery: which snapshot is there, and so which slot is free."""
        self._slot = 1 - position.snapshot_slot
        self._last = self.latest_seq = position.snapshot_seq
        self._last_at = time.monotonic()

    @property
    def latest_slot(self) -> int:
        """Of the latest whole snapshot."""
        return 1 - self._slot

    def after_commit(self, state: ClusterState, position: Position) -> None:
        """Called when a record and its effects are safe."""
        due = position.seq - self._last >= self._every or time.monotonic() - self._last_at >= _AT_LEAST_EVERY_S
        if not due or (self._task is not None and not self._task.done()):
            return
        self._last = position.seq
        self._last_at = time.monotonic()
        snapshot = snapshots.Snapshot(
            state=state.everything(),
            epoch=state.epoch,
            seq=position.seq,
            journal=position.journal,
            next_offsets=dict(position.next_offsets),
            slot=self._slot,
        )
        self._task = asyncio.create_task(self._write(snapshot))

    async def _write(self, snapshot: snapshots.Snapshot) -> None:
        try:
            with connection_errors():
                await snapshots.write(self._producer, self._topic, self._partition, self._pool, snapshot)
        except (KafkaError, ConnectionError) as error:
            log.warning("pool %s: snapshot at record %d not written (%s)", self._pool, snapshot.seq, words(error))
            return
        except Exception:
            log.exception("pool %s: snapshot at record %d not written", self._pool, snapshot.seq)
            return
        # Only a whole one frees the other slot.
        self._slot = 1 - self._slot
        self.latest_seq = snapshot.seq
        self.written += 1
        log.info("pool %s: snapshot at record %d", self._pool, snapshot.seq)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
