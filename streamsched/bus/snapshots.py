"""Snapshots of a pool's state in the compacted topic `scheduler.snapshots`, so that history need not be kept for ever.

A snapshot is cut into parts, since a state can be larger than a message. Snapshots take turns in two slots of keys: the
newer overwrites the older but one, and a writer that ends half-way leaves the other slot whole. A reader takes the
whole snapshot that is furthest in the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaProducer
from msgspec import Struct

from streamsched.core.cluster import Changes

from . import codec, journal
from .connection import KafkaConnection
from .messages import SnapshotPart

_PART_VALUES: Final = 2000
_PART_BYTES: Final = 2 * 1024 * 1024
"""Of the values of one part, as encoded: a quarter of what the topic takes. Only a value that is larger by itself (no
value is as large as the journal record that made it) makes a larger part."""
_SLOTS: Final = 2


class _Place(Struct):
    """Which part of which slot a message is."""

    slot: int
    part: int


_decode_place = msgspec.json.Decoder(_Place).decode
_encode = msgspec.json.Encoder().encode


class Snapshot(Struct, frozen=True, kw_only=True):
    """A whole one."""

    state: Changes
    epoch: int
    seq: int
    journal: int
    next_offsets: dict[str, int]
    slot: int


async def write(producer: AIOKafkaProducer, topic: str, partition: int, pool: str, snapshot: Snapshot) -> int:
    """Returns the number of parts when all are safe. Encoding gives way to other work of the loop between parts."""
    groups = [group async for group in _cut(snapshot.state)]
    sent = []
    for number, group in enumerate(groups):
        part = SnapshotPart(
            pool=pool,
            snapshot_id=f"{snapshot.epoch}-{snapshot.seq}",
            slot=snapshot.slot,
            part=number,
            parts=len(groups),
            epoch=snapshot.epoch,
            seq=snapshot.seq,
            journal=snapshot.journal,
            next_offsets=snapshot.next_offsets if number == 0 else {},
            meta=snapshot.state.meta if number == 0 else None,
            **group,
        )
        key = f"{pool}#{snapshot.slot}#{number}".encode()
        sent.append(await producer.send(topic, codec.encode(part), key=key, partition=partition))
        await asyncio.sleep(0)
    await asyncio.gather(*sent)
    return len(groups)


async def _cut(state: Changes) -> AsyncIterator[dict[str, Any]]:
    """The fields of each part, at least one. Values are encoded once, here, since their sizes decide where to cut."""
    group = _Group()
    empty = True
    for kind, name, value in _values(state):
        encoded = _encode(value)
        size = len(encoded) + 1 + (len(_encode(name)) + 1 if kind == "tenants" else 0)
        if group.values and (group.values >= _PART_VALUES or group.size + size > _PART_BYTES):
            yield group.fields()
            group, empty = _Group(), False
            await asyncio.sleep(0)
        group.add(kind, name, msgspec.Raw(encoded), size)
    if group.values or empty:
        yield group.fields()


def _values(state: Changes) -> Iterator[tuple[str, str, Any]]:
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("tenants", state.tenants),
        ("jobs", state.jobs),
        ("runs", state.runs),
        ("nodes", state.nodes),
    )
    for kind, held in kinds:
        for name, value in held.items():
            if value is not None:
                yield kind, name, value


class _Group:
    """Encoded values on their way into one part."""

    def __init__(self) -> None:
        self.values = 0
        self.size = 0
        self._held: dict[str, dict[str, msgspec.Raw]] = defaultdict(dict)

    def add(self, kind: str, name: str, encoded: msgspec.Raw, size: int) -> None:
        self._held[kind][name] = encoded
        self.values += 1
        self.size += size

    def fields(self) -> dict[str, Any]:
        return {kind: held if kind == "tenants" else tuple(held.values()) for kind, held in self._held.items()}


async def read_latest(connection: KafkaConnection, topic: str, partition: int, pool: str) -> Snapshot | None:
    """The whole snapshot that is furthest in the journal, None when there is none."""
    latest: dict[tuple[int, int], bytes] = {}
    prefix = f"{pool}#".encode()
    async for _, _, value in journal.read_partition(connection, topic, partition, prefix, 0, prefix=True):
        # Only what compaction would leave is kept: what is not compacted yet can be many times the state.
        with contextlib.suppress(msgspec.MsgspecError):
            place = _decode_place(value)
            latest[place.slot, place.part] = value
    parts: dict[tuple[str, int], dict[int, SnapshotPart]] = defaultdict(dict)
    for value in latest.values():
        with contextlib.suppress(codec.Refused):
            part = codec.decode_snapshot(value)
            if part.pool == pool:
                parts[part.snapshot_id, part.slot][part.part] = part
    whole = [found for found in parts.values() if _is_whole(found)]
    if not whole:
        return None
    return _join(max(whole, key=lambda found: (found[0].journal, found[0].epoch)))


def _is_whole(parts: dict[int, SnapshotPart]) -> bool:
    """Whatever somebody else may have written under a key of ours does not make one."""
    first = parts.get(0)
    return first is not None and first.meta is not None and parts.keys() == set(range(first.parts))


def _join(parts: dict[int, SnapshotPart]) -> Snapshot:
    first = parts[0]
    assert first.meta is not None
    ordered = [parts[number] for number in range(first.parts)]
    return Snapshot(
        state=Changes(
            jobs={job.spec.job_id: job for part in ordered for job in part.jobs},
            runs={run.placement_id: run for part in ordered for run in part.runs},
            nodes={node.spec.node_id: node for part in ordered for node in part.nodes},
            tenants={name: usage for part in ordered for name, usage in part.tenants.items()},
            meta=first.meta,
        ),
        epoch=first.epoch,
        seq=first.seq,
        journal=first.journal,
        next_offsets=first.next_offsets,
        slot=first.slot,
    )
