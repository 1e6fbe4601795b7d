"""Snapshots of a pool's state in the compacted topic `scheduler.snapshots`, so that history need not be kept for ever.

A snapshot is cut into parts, since a state can be larger than a message. Snapshots take turns in two slots of keys: the
newer overwrites the older but one, and a writer that ends half-way leaves the other slot whole. A reader takes the
whole snapshot that is furthest in the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec
from aiokafka import AIOKafkaProducer
from msgspec import Struct

from streamsched.core.cluster import Changes

from . import codec, journal
from .connection import KafkaConnection
from .messages import SnapshotPart

T = TypeVar("T")

_PART_VALUES: Final = 2000
_PART_BYTES: Final = 2 * 1024 * 1024
_SLOTS: Final = 2


class _Place(Struct):
    """Which part of which slot a message is."""

    slot: int
    part: int


_decode_place = msgspec.json.Decoder(_Place).decode


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
    groups = list(_cut(snapshot.state))
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
            tenants=_there(snapshot.state.tenants) if number == 0 else {},
            **group,
        )
        key = f"{pool}#{snapshot.slot}#{number}".encode()
        sent.append(await producer.send(topic, codec.encode(part), key=key, partition=partition))
        await asyncio.sleep(0)
    await asyncio.gather(*sent)
    return len(groups)


def _there(values: Mapping[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in values.items() if value is not None}


def _cut(state: Changes) -> Iterator[dict[str, Any]]:
    """Groups of values, each well below a message's limit; at least one."""
    values = (
        (kind, value)
        for kind, held in (("jobs", state.jobs), ("runs", state.runs), ("nodes", state.nodes))
        for value in held.values()
        if value is not None
    )
    first = True
    while True:
        group: dict[str, list[Any]] = defaultdict(list)
        size = 0
        for kind, value in islice(values, _PART_VALUES):
            group[kind].append(value)
            size += _weight(value)
            if size > _PART_BYTES:
                break
        if not group and not first:
            return
        first = False
        yield {kind: tuple(held) for kind, held in group.items()}


def _weight(value: Any) -> int:
    """Bytes, roughly, of the parts of a value that have no small bound."""
    labels = getattr(getattr(value, "spec", None), "labels", {})
    return 400 + sum(len(k) + len(v) for k, v in labels.items()) + 120 * len(getattr(value, "allocations", ()))


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
            parts[part.snapshot_id, part.slot][part.part] = part
    whole = [found for found in parts.values() if len(found) == next(iter(found.values())).parts]
    if not whole:
        return None
    return _join(max(whole, key=lambda found: (found[0].journal, found[0].epoch)))


def _join(parts: dict[int, SnapshotPart]) -> Snapshot:
    first = parts[0]
    assert first.meta is not None
    ordered = [parts[number] for number in range(first.parts)]
    return Snapshot(
        state=Changes(
            jobs={job.spec.job_id: job for part in ordered for job in part.jobs},
            runs={run.placement_id: run for part in ordered for run in part.runs},
            nodes={node.spec.node_id: node for part in ordered for node in part.nodes},
            tenants=dict(first.tenants),
            meta=first.meta,
        ),
        epoch=first.epoch,
        seq=first.seq,
        journal=first.journal,
        next_offsets=first.next_offsets,
        slot=first.slot,
    )
