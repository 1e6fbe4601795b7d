"""A partition of a topic in memory, in the place of Kafka for whoever reads a journal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from core_builder import Pool

from streamsched.bus import codec, journal
from streamsched.bus.messages import JournalRecord
from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.instructions import Place, Preempt, Revoke


class MemoryTopic:
    """Records by offset; `begin` is the oldest kept. `install` makes it what `bus.journal` reads."""

    def __init__(self, records: list[tuple[bytes, bytes]] | None = None) -> None:
        self.records = records or []
        self.begin = 0

    def write(self, value: bytes, key: bytes = b"p") -> int:
        self.records.append((key, value))
        return len(self.records) - 1

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(journal, "read_partition", self._read)
        patch.setattr(journal, "first_offset", self._first)

    async def _first(self, *_: Any) -> int:
        return self.begin

    async def _read(
        self, _c: Any, _t: str, _p: int, key: bytes, start: int, stop: int | None = None, prefix: bool = False
    ) -> AsyncIterator[tuple[int, int, bytes]]:
        for offset in range(max(start, self.begin), len(self.records) if stop is None else stop):
            found, value = self.records[offset]
            if found == key or (prefix and found.startswith(key)):
                yield offset, 0, value


def records_of(pool: Pool, epoch: int = 1) -> list[JournalRecord]:
    """The pool's history as a journal: a mark, then one record per event."""
    state = ClusterState("p", pool.config)
    found = []
    events = [(ev.EpochStarted(epoch=epoch, config=pool.config), 0.0), *pool.history]
    for seq, (event, now) in enumerate(events):
        decisions = [i for i in state.handle(event, now) if isinstance(i, Place | Preempt | Revoke)]
        record = JournalRecord(
            pool="p",
            epoch=epoch,
            seq=seq,
            now=now,
            events=(event,),
            decisions=tuple(decisions),
            next_offsets={"pool.jobs:0": seq},
        )
        found.append(codec.decode_journal(codec.encode(record)))
    return found


def changed(record: JournalRecord, **fields: Any) -> bytes:
    """The record as bytes, with other fields."""
    return codec.encode(msgspec.structs.replace(record, **fields))
