"""`replay --until`: the state at a record or a time is what the journal's beginning gives, and errors are one line."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import msgspec
import pytest
from core_builder import Pool, stored
from journal_topic import MemoryTopic, changed, records_of

from streamsched.bus import codec, snapshots
from streamsched.bus.journal import Entry
from streamsched.bus.messages import JournalRecord
from streamsched.bus.snapshots import Snapshot
from streamsched.commands.history import until_of
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.errors import UserError
from streamsched.service.history import Until, _as_written_now, replay
from streamsched.service.recovery import Fold
from streamsched.service.settings import Settings
from streamsched.store.pool_store import Position, stored_values

SETTINGS = Settings(pools=("p",))


@pytest.fixture
def records(make_pool) -> list[JournalRecord]:
    """Two nodes, then a job every ten seconds from 1000 s on, placed and started."""
    pool: Pool = make_pool()
    pool.nodes(2, 8)
    for job_id in ("a", "b", "c"):
        pool.later(10.0)
        pool.arrive(job_id, 4)
    pool.solve()
    pool.later(10.0)
    pool.start("a")
    return records_of(pool)


@pytest.fixture
def topic(records: list[JournalRecord], monkeypatch: pytest.MonkeyPatch) -> MemoryTopic:
    topic = MemoryTopic([(b"p", codec.encode(record)) for record in records])
    topic.install(monkeypatch)
    return topic


def replayed(until: Until) -> Fold:
    return asyncio.run(replay(SETTINGS, "p", until))


def refused(until: Until) -> str:
    with pytest.raises(UserError) as caught:
        replayed(until)
    line = str(caught.value)
    assert line.startswith("pool p: ")
    assert "\n" not in line
    return line


def prefix(records: list[JournalRecord]) -> Fold:
    fold = Fold(ClusterState("p", SchedulerConfig()), Position())
    for offset, record in enumerate(records):
        fold.add(Entry(offset, record))
    return fold


def snapshot_after(count: int, records: list[JournalRecord]) -> Snapshot:
    fold = prefix(records[:count])
    position = fold.position
    return Snapshot(
        state=fold.state.everything(),
        epoch=fold.state.epoch,
        seq=position.seq,
        journal=position.journal,
        next_offsets=position.next_offsets,
        slot=0,
    )


def keep_from(topic: MemoryTopic, begin: int, snapshot: Snapshot | None, patch: pytest.MonkeyPatch) -> None:
    """The journal's beginning is gone, and this is the latest snapshot."""
    topic.begin = begin

    async def latest(*_: object) -> Snapshot | None:
        return snapshot

    patch.setattr(snapshots, "read_latest", latest)


def test_until_a_record_is_the_state_of_the_prefix(topic: MemoryTopic, records: list[JournalRecord]) -> None:
    for seq in range(len(records)):
        fold = replayed(Until(seq=seq))
        assert fold.position.seq == seq
        assert stored(fold.state) == stored(prefix(records[: seq + 1]).state)


def test_until_a_time_is_the_state_of_the_prefix(topic: MemoryTopic, records: list[JournalRecord]) -> None:
    times = [record.now for record in records]
    for time in sorted({*times, *(t + 1.0 for t in times), *(t - 1.0 for t in times)}):
        fold = replayed(Until(time=time))
        assert stored(fold.state) == stored(prefix([r for r in records if r.now <= time]).state)


def test_a_void_record_does_not_end_a_replay(topic: MemoryTopic, records: list[JournalRecord]) -> None:
    """A zombie's clock may be ahead, and its record's number is one that its successor gives again."""
    zombie = changed(records[5], epoch=0, now=9e8, seq=1000)
    topic.records.insert(5, (b"p", zombie))
    assert replayed(Until(time=records[-1].now)).position.seq == records[-1].seq
    assert replayed(Until(seq=records[-1].seq)).position.seq == records[-1].seq


def test_a_record_beyond_the_end_is_refused_and_a_time_is_not(topic: MemoryTopic, records: list[JournalRecord]) -> None:
    last = records[-1].seq
    assert f"ends at record {last}, there is no {last + 1}" in refused(Until(seq=last + 1))
    assert replayed(Until(time=9e9)).position.seq == last, "it is so until something happens"


def test_what_is_before_the_kept_history_is_refused(
    topic: MemoryTopic, records: list[JournalRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_from(topic, 4, snapshot_after(5, records), monkeypatch)
    moment = datetime.fromtimestamp(records[4].now, UTC).isoformat(timespec="milliseconds")
    for until in (Until(seq=3), Until(time=records[3].now), Until(time=0.0)):
        line = refused(until)
        assert "not kept any more" in line
        assert f"the snapshot after record 4, {moment}" in line
    for until in (Until(seq=4), Until(time=records[4].now), Until(seq=6), Until()):
        fold = replayed(until)
        wanted = [r for r in records if not until.is_before(r)]
        assert stored(fold.state) == stored(prefix(wanted).state)


@pytest.mark.parametrize("kept", [None, 3])
def test_without_a_snapshot_that_reaches_back_there_is_no_state(
    kept: int | None, topic: MemoryTopic, records: list[JournalRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_from(topic, 4, snapshot_after(kept, records) if kept else None, monkeypatch)
    assert "before offset 4 is not kept and no snapshot reaches back" in refused(Until())


def test_what_until_may_say() -> None:
    assert until_of("12") == Until(seq=12)
    assert until_of("1970-01-01T00:01:00Z") == Until(time=60.0)
    for text in ("yesterday", "1970-01-01T00:01:00", "-1"):
        with pytest.raises(UserError, match=f"--until {text}"):
            until_of(text)


def test_a_value_as_another_version_wrote_it_is_no_difference(records: list[JournalRecord]) -> None:
    """Redis is not written anew at every takeover, so it may hold some for long."""
    values = stored_values(prefix(records).state.everything())
    for kind, held in values.items():
        for value in held.values() if kind != "queue" else ():
            older = b" " + msgspec.json.encode(msgspec.json.decode(value) | {"of": "the past"})
            assert older != value
            assert _as_written_now(kind, older) == value
    assert _as_written_now("jobs", b"?") == b"?"
    assert _as_written_now("jobs", None) is None
