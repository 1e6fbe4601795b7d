"""The journal: every applied event and decision of a pool, in order, in one partition of `scheduler.journal`.

Writing is acknowledged by all in-sync replicas before anything else happens. Reading gives the records that count:
a record of an epoch that had ended before it is void, and so is one that does not continue the sequence (an
uncertain write that was repeated under a new epoch).

What carries a pool's key but is no record of that pool was not written by an owner. It is passed over, with a warning
that says where it is. What *is* one, by its pool, epoch and number, but cannot be read otherwise, is handed on as such:
whoever folds the journal knows whether the history can do without it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from msgspec import Struct

from streamsched.core.events import EpochStarted
from streamsched.errors import UserError

from . import codec
from .connection import KafkaConnection
from .messages import JournalRecord

log = logging.getLogger(__name__)

foreign: Counter[str] = Counter()
"""Records that this process has passed over since they are not of their pool, by "topic[partition]"."""
_WARNINGS_MAX = 10
"""Foreign records named one by one in one reading; of more only the number is told."""
_BEYOND_MS = 200
_FETCH_BYTES = 8 * 1024 * 1024


class Entry(Struct, frozen=True):
    """A record and its offset. `unreadable`: why only its pool, epoch and number are known."""

    offset: int
    record: JournalRecord
    unreadable: str = ""


class _Envelope(Struct):
    """What every version's record has."""

    pool: str
    epoch: int
    seq: int


class Written:
    """Since which offset a partition of the journal holds only what this process wrote, by its acknowledgements."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[int, int]] = {}
        """Partition -> first and last offset of the unbroken run that ends with the latest record."""

    def note(self, partition: int, offset: int) -> None:
        first, last = self._runs.get(partition, (offset, offset))
        self._runs[partition] = (first if offset in (last, last + 1) else offset, offset)

    def alone_since(self, partition: int, offset: int) -> bool:
        """Whether nobody else has written between `offset` and the latest record of this process."""
        run = self._runs.get(partition)
        return run is not None and run[0] <= offset


class JournalWriter:
    """Appends to one topic; the partition is the pool's. `written` is shared by all writers of the process."""

    def __init__(self, producer: AIOKafkaProducer, topic: str, written: Written | None = None) -> None:
        self._producer = producer
        self._topic = topic
        self.written = written or Written()

    async def append(self, record: JournalRecord, partition: int) -> int:
        """Write and wait until it is safe; returns the offset. Raises KafkaError: it may or may not be there then."""
        metadata = await self._producer.send_and_wait(
            self._topic, codec.encode(record), key=record.pool.encode(), partition=partition
        )
        self.written.note(partition, int(metadata.offset))
        return int(metadata.offset)


class Validity:
    """Which records of a pool count, told in order. Start it at what is already applied."""

    def __init__(self, epoch: int = 0, seq: int = 0) -> None:
        self.epoch = epoch
        self.seq = seq

    def counts(self, record: JournalRecord) -> bool:
        """Whether this record is part of the pool's history; if so, later ones must continue it."""
        if not self.would_count(record):
            return False
        if mark_of(record) is not None:
            self.epoch = record.epoch
        else:
            self.seq = record.seq
        return True

    def would_count(self, record: JournalRecord) -> bool:
        """The same, asked without a consequence."""
        if mark_of(record) is not None:
            return record.epoch > self.epoch
        return record.epoch == self.epoch and record.seq == self.seq + 1

    def is_ahead(self, record: JournalRecord) -> bool:
        """Whether the present owner wrote it after a record that is not here.

        An owner numbers its records one by one and takes a new epoch when it cannot tell whether one was written. So
        this is no matter of who was faster: something is missing.
        """
        return mark_of(record) is None and record.epoch == self.epoch and record.seq > self.seq + 1


def mark_of(record: JournalRecord) -> EpochStarted | None:
    """The mark of a new epoch, if the record is one."""
    first = record.events[0] if record.events else None
    return first if isinstance(first, EpochStarted) else None


class HistoryMissing(UserError):
    """Records that a state would need next are not there, so it cannot be brought up to date."""


async def read(
    connection: KafkaConnection,
    topic: str,
    partition: int,
    pool: str,
    start: int,
    stop: int | None = None,
    whole: bool = False,
) -> AsyncIterator[Entry]:
    """The pool's records from offset `start` up to `stop`, by default the end as it is now.

    With `whole`, raises HistoryMissing when the oldest record kept is later than `start`.
    """
    if whole and (first := await first_offset(connection, topic, partition)) > start:
        raise HistoryMissing(
            f"pool {pool}: {topic}[{partition}] begins at {first}, records from {start} on are needed. Restore the "
            "topic from a replica, or begin anew (docs/operations.md, The broker is lost)"
        )
    passed_over = 0
    async for offset, _, value in read_partition(connection, topic, partition, pool.encode(), start, stop):
        entry = _entry(offset, value, pool)
        if isinstance(entry, Entry):
            yield entry
            continue
        passed_over += 1
        foreign[f"{topic}[{partition}]"] += 1
        if passed_over <= _WARNINGS_MAX:
            log.warning(
                "pool %s: %s[%d]@%d is no record of this pool and is passed over (%s): find out who writes there",
                *(pool, topic, partition, offset, entry),
            )
    if passed_over > _WARNINGS_MAX:
        log.warning("pool %s: %d such records in %s[%d] in all", pool, passed_over, topic, partition)


def _entry(offset: int, value: bytes, pool: str) -> Entry | str:
    """Or why it is not one of the pool's."""
    try:
        record = codec.decode_journal(value)
    except codec.Refused as refused:
        try:
            head = msgspec.json.decode(value, type=_Envelope)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return str(refused)
        record = JournalRecord(pool=head.pool, epoch=head.epoch, seq=head.seq, now=0.0)
        entry = Entry(offset, record, str(refused))
    else:
        entry = Entry(offset, record)
    return entry if record.pool == pool else f"it says that it is of pool {record.pool}"


async def first_offset(connection: KafkaConnection, topic: str, partition: int) -> int:
    """The oldest offset kept."""
    consumer = AIOKafkaConsumer(**connection.consumer_options())
    await consumer.start()
    try:
        tp = TopicPartition(topic, partition)
        return int((await consumer.beginning_offsets([tp]))[tp])
    finally:
        await consumer.stop()


async def read_partition(
    connection: KafkaConnection,
    topic: str,
    partition: int,
    key: bytes,
    start: int,
    stop: int | None = None,
    prefix: bool = False,
) -> AsyncIterator[tuple[int, int, bytes]]:
    """(offset, timestamp in ms, value) of the messages with `key` (or a key that begins so) in [start, stop).

    Without `stop` it reads to the end as the broker tells it, and what comes within a moment beyond: Tansu tells an end
    that may be a batch too low.
    """
    consumer = AIOKafkaConsumer(
        **connection.consumer_options(), max_poll_records=5000, max_partition_fetch_bytes=_FETCH_BYTES
    )
    await consumer.start()
    try:
        tp = TopicPartition(topic, partition)
        consumer.assign([tp])
        begin = (await consumer.beginning_offsets([tp]))[tp]
        end = (await consumer.end_offsets([tp]))[tp] if stop is None else stop
        position = max(start, begin)
        consumer.seek(tp, position)
        while position < end or stop is None:
            batch = (await consumer.getmany(tp, timeout_ms=1000 if position < end else _BEYOND_MS)).get(tp, [])
            if not batch and position >= end:
                return
            for message in batch:
                if stop is not None and message.offset >= stop:
                    return
                # Asked for an offset beyond the end, a consumer starts again from the oldest one.
                if message.value is None or message.key is None or message.offset < start:
                    continue
                if message.key == key or (prefix and message.key.startswith(key)):
                    yield message.offset, message.timestamp, message.value
            position = await consumer.position(tp)
    finally:
        await consumer.stop()
