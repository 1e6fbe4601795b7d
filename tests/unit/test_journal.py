"""Which records of a journal count: of the epoch that had the pool when they were written, each once, in order."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest
from journal_topic import MemoryTopic, changed

from streamsched.bus import codec, journal
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.journal import Entry, Validity
from streamsched.bus.messages import JournalRecord
from streamsched.core import events as ev
from streamsched.core.config import SchedulerConfig


def mark(epoch: int) -> JournalRecord:
    started = ev.EpochStarted(epoch=epoch, config=SchedulerConfig())
    return JournalRecord(pool="p", epoch=epoch, seq=0, now=0.0, events=(started,))


def record(epoch: int, seq: int) -> JournalRecord:
    return JournalRecord(pool="p", epoch=epoch, seq=seq, now=0.0, events=(ev.WindowElapsed(),))


def counted(*records: JournalRecord, epoch: int = 0, seq: int = 0) -> list[tuple[int, int]]:
    validity = Validity(epoch, seq)
    return [(r.epoch, r.seq) for r in records if validity.counts(r)]


def test_a_history_without_faults_counts_whole() -> None:
    history = [mark(1), record(1, 1), record(1, 2), mark(2), record(2, 3)]
    assert counted(*history) == [(r.epoch, r.seq) for r in history]


def test_a_record_of_an_ended_epoch_is_void() -> None:
    assert counted(mark(1), record(1, 1), mark(2), record(1, 2), record(2, 2)) == [(1, 0), (1, 1), (2, 0), (2, 2)]


def test_what_the_former_owner_wrote_before_the_mark_counts() -> None:
    assert counted(mark(1), record(1, 1), record(1, 2), mark(3), record(3, 3))[-1] == (3, 3)


def test_a_record_written_twice_counts_once() -> None:
    assert counted(mark(1), record(1, 1), record(1, 1), record(1, 2), record(1, 2)) == [(1, 0), (1, 1), (1, 2)]


def test_after_a_gap_nothing_of_that_epoch_counts() -> None:
    assert counted(mark(1), record(1, 1), record(1, 3), record(1, 4)) == [(1, 0), (1, 1)]


def test_a_record_before_any_mark_is_void() -> None:
    assert counted(record(1, 1), mark(1), record(1, 1)) == [(1, 0), (1, 1)]


def test_marks_only_rise() -> None:
    assert counted(mark(2), mark(1), mark(2), record(1, 1), record(2, 1)) == [(2, 0), (2, 1)]


def test_starting_at_a_stored_position_takes_what_continues_it() -> None:
    assert counted(record(4, 9), record(4, 10), record(4, 11), epoch=4, seq=9) == [(4, 10), (4, 11)]


@pytest.mark.parametrize("late", [1, 2, 3])
def test_wherever_a_zombie_writes_after_the_mark_the_history_is_the_same(late: int) -> None:
    """Epoch 1 is frozen after its second record and writes on when epoch 2 has the pool."""
    before, after = [mark(1), record(1, 1), record(1, 2)], [mark(2), record(2, 3), record(2, 4), record(2, 5)]
    zombie = [record(1, 3), record(1, 4)]
    wanted = counted(*before, *after)
    for places in itertools.combinations_with_replacement(range(late, len(after) + 1), 2):
        mixed = list(after)
        for place, one in zip(sorted(places, reverse=True), reversed(zombie), strict=True):
            mixed.insert(place, one)
        assert counted(*before, *mixed) == wanted


# ── reading what others have written ─────────────────────────────────────────────────────────────────────────────────


def read_all(topic: MemoryTopic, patch: pytest.MonkeyPatch) -> list[Entry]:
    topic.install(patch)

    async def work() -> list[Entry]:
        return [entry async for entry in journal.read(KafkaConnection(), "journal", 3, "p", 0, whole=True)]

    return asyncio.run(work())


FOREIGN = [
    b"not json",
    b"\xff\xfe",
    b"{}",
    b"[" * 5000,
    b'{"pool": "p"}',
    b'{"pool": "p", "epoch": "one", "seq": 1}',
    changed(record(1, 1), pool="q"),
    b'{"pool": "q", "epoch": 1, "seq": 1}',
]


@pytest.mark.parametrize("value", FOREIGN)
def test_what_no_owner_wrote_is_passed_over_named_and_counted(
    value: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = MemoryTopic()
    ours = [mark(1), record(1, 1), record(1, 2)]
    topic.write(codec.encode(ours[0]))
    topic.write(codec.encode(ours[1]))
    topic.write(value)
    topic.write(codec.encode(ours[2]))
    before = journal.foreign["journal[3]"]
    found = read_all(topic, monkeypatch)
    assert [(entry.offset, entry.record) for entry in found] == [(0, ours[0]), (1, ours[1]), (3, ours[2])]
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "journal[3]@2 is no record of this pool and is passed over" in warning
    assert "\n" not in warning
    assert journal.foreign["journal[3]"] == before + 1


def test_many_foreign_records_are_not_as_many_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = MemoryTopic([(b"p", b"?")] * 5000)
    topic.write(codec.encode(mark(1)))
    assert len(read_all(topic, monkeypatch)) == 1
    assert len(caplog.records) == 11
    assert "5000 such records in journal[3]" in caplog.records[-1].getMessage()


def test_a_record_of_the_pool_that_cannot_be_read_is_handed_on_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = MemoryTopic()
    topic.write(b'{"pool": "p", "epoch": 4, "seq": 17, "now": 1.0, "events": [{"type": "of the future"}]}')
    [entry] = read_all(topic, monkeypatch)
    assert (entry.record.epoch, entry.record.seq) == (4, 17)
    assert entry.unreadable.startswith("invalid")
