"""Writes a snapshot of a pool now and then, beside its commits.

It copies the (frozen) values at a commit and encodes and sends them in the background; a snapshot that fails is only
a snapshot less.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from streamsched.bus import snapshots
from streamsched.core.cluster import ClusterState
from streamsched.store.pool_store import Position

from .retry import words

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
        self._task: asyncio.Task[None] | None = None
        self.written = 0

    def begin(self, latest: snapshots.Snapshot | None) -> None:
        """After a recovery: which snapshot is there, and so which slot is free."""
        self._slot = snapshots.next_slot(latest)
        self._last = latest.seq if latest is not None else 0

    def after_commit(self, state: ClusterState, position: Position) -> None:
        """Called when a record and its effects are safe."""
        if position.seq - self._last < self._every or (self._task is not None and not self._task.done()):
            return
        self._last = position.seq
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
            await snapshots.write(self._producer, self._topic, self._partition, self._pool, snapshot)
        except KafkaError as error:
            log.warning("pool %s: snapshot at record %d not written (%s)", self._pool, snapshot.seq, words(error))
            return
        # Only a whole one frees the other slot.
        self._slot = 1 - self._slot
        self.written += 1
        log.info("pool %s: snapshot at record %d", self._pool, snapshot.seq)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
