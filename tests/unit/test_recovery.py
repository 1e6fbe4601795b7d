"""Folding a journal by hand: what counts, what is refused, and which decisions a successor has to publish."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from core_builder import Pool, placed, stored
from journal_topic import MemoryTopic, records_of
from sim.redis import Client, Data, Server

from streamsched.bus import codec
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.journal import Entry, HistoryMissing, JournalWriter
from streamsched.bus.messages import JournalRecord
from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.errors import BrokenInvariant
from streamsched.core.instructions import Revoke
from streamsched.errors import EXIT_UNUSABLE
from streamsched.service.recovery import Fold, OtherVersion, PoolTopics, Taken, _matters, take_over, write_to_redis
from streamsched.store.pool_store import Outcome, PoolStore, Position, stored_values

CONFIG = SchedulerConfig()


def entries(pool: Pool, epoch: int = 1) -> list[Entry]:
    return [Entry(10 * record.seq, record) for record in records_of(pool, epoch)]


def fold_of(history: list[Entry]) -> Fold:
    fold = Fold(ClusterState("p", CONFIG), Position())
    for entry in history:
        fold.add(entry)
    return fold


@pytest.fixture
def pool(make_pool) -> Pool:
    pool = make_pool()
    pool.nodes(2, 8)
    pool.arrive("a", 8)
    pool.arrive("b", 4)
    pool.arrive("c", 8)
    pool.solve()
    pool.start("a")
    return pool


def test_folding_gives_the_state_and_how_far_it_came(pool: Pool) -> None:
    history = entries(pool)
    fold = fold_of(history)
    live = ClusterState("p", pool.config)
    live.handle(ev.EpochStarted(epoch=1, config=pool.config), 0.0)
    for event, now in pool.history:
        live.handle(event, now)
    assert stored(fold.state) == stored(live)
    last = history[-1]
    assert fold.position.seq == last.record.seq
    assert fold.position.journal == last.offset + 1
    assert fold.position.next_offsets == {"pool.jobs:0": last.record.seq}
    assert [p.decision.job_id for p in fold.decisions] == ["a", "b"]


def test_folding_on_from_a_stored_state_is_folding_it_all(pool: Pool) -> None:
    history = entries(pool)
    for cut in range(1, len(history)):
        first = fold_of(history[:cut])
        state = ClusterState("p", CONFIG)
        state.load(first.state.everything())
        second = Fold(state, first.position)
        # Redis may be behind the journal offset it notes or not: records it has are passed over.
        for entry in history[max(0, cut - 2) :]:
            second.add(entry)
        assert stored(second.state) == stored(fold_of(history).state)
        assert second.position.seq == history[-1].record.seq


def test_a_void_record_changes_nothing_but_the_place_to_read_on(pool: Pool) -> None:
    history = entries(pool)
    fold = fold_of(history)
    before = stored(fold.state)
    again = Entry(history[-1].offset + 7, history[-1].record)
    assert not fold.add(again)
    assert stored(fold.state) == before
    assert fold.position.journal == again.offset + 1


def test_a_decision_that_the_events_do_not_give_is_a_broken_invariant(pool: Pool) -> None:
    history = entries(pool)
    with_place = next(i for i, e in enumerate(history) if e.record.decisions)
    record = history[with_place].record
    for wrong in ((), record.decisions[::-1], (*record.decisions, record.decisions[0])):
        forged = Entry(history[with_place].offset, msgspec.structs.replace(record, decisions=wrong))
        with pytest.raises(BrokenInvariant, match=f"journal offset {forged.offset}"):
            fold_of([*history[:with_place], forged])


def test_a_record_of_another_version_is_one_line_that_names_it_and_the_way_out(pool: Pool) -> None:
    """Whether the core decides otherwise or cannot take the events at all."""
    history = entries(pool)
    last = history[-1]
    unknown = ev.RunStarted(placement_id="j:1:1", job_id="j", time=-1e12)
    with_place = next(e for e in history if e.record.decisions)
    for entry, changes in ((with_place, {"decisions": ()}), (last, {"decisions": with_place.record.decisions})):
        forged = Entry(entry.offset, msgspec.structs.replace(entry.record, **changes))
        with pytest.raises(OtherVersion) as caught:
            fold_of([*(e for e in history if e.offset < entry.offset), forged])
        line = str(caught.value)
        assert f"pool p: journal record {entry.record.seq} of epoch 1, journal offset {entry.offset}: " in line
        assert "Start that one" in line
        assert "\n" not in line
        assert caught.value.exit_code == EXIT_UNUSABLE
    fold = fold_of(history)
    fold.state.handle = _raise  # type: ignore[method-assign]
    record = msgspec.structs.replace(last.record, seq=last.record.seq + 1, events=(unknown,))
    with pytest.raises(OtherVersion, match="cannot be applied"):
        fold.add(Entry(last.offset + 1, record))


def _raise(event: ev.CoreEvent, now: float) -> None:
    raise KeyError("a field of the future")


def test_a_gap_in_an_epoch_is_told_with_its_offset(pool: Pool) -> None:
    history = entries(pool)
    with pytest.raises(HistoryMissing) as caught:
        fold_of([*history[:3], *history[4:]])
    line = str(caught.value)
    assert f"journal offset {history[4].offset} holds record 4 of epoch 1, and those from 3 on are missing" in line
    assert "\n" not in line


def test_a_record_that_cannot_be_read_is_passed_over_only_where_it_does_not_count(pool: Pool) -> None:
    history = entries(pool, epoch=3)
    for epoch, seq, counts in ((2, 9, False), (3, 2, False), (3, 3, True), (3, 4, True), (4, 0, True)):
        fold = fold_of(history[:3])
        stub = JournalRecord(pool="p", epoch=epoch, seq=seq, now=0.0)
        entry = Entry(1234, stub, unreadable="invalid: of the future")
        if counts:
            with pytest.raises(OtherVersion, match="offset 1234: it cannot be read"):
                fold.add(entry)
        else:
            assert not fold.add(entry)
            assert fold.position.journal == 1235
            assert fold.position.seq == 2


def test_decisions_matter_while_their_run_is_where_they_left_it(pool: Pool) -> None:
    place_a, place_b = pool.placements["a"], pool.placements["b"]
    assert _matters(place_b, pool.state), "b has not started: its executor may not know of it"
    assert not _matters(place_a, pool.state), "a runs: it is known"
    out = pool.command(ev.CancelRequested, "a")
    [revoke] = [i for i in out if isinstance(i, Revoke)]
    assert _matters(revoke, pool.state)
    pool.report(ev.RunReleased, "a")
    assert not _matters(revoke, pool.state), "the run is over"
    pool.command(ev.CancelRequested, "b")
    assert not _matters(place_b, pool.state), "to be stopped, not to be started"
    assert "c" in placed(pool.solve())


# ── Redis at a takeover ──────────────────────────────────────────────────────────────────────────────────────────────


class Steps:
    """A pool's journal in memory, a Redis that notes what is done with it, and takeovers of both."""

    def __init__(self, pool: Pool, patch: pytest.MonkeyPatch) -> None:
        self.journal = MemoryTopic([(b"p", codec.encode(record)) for record in records_of(pool)])
        self.journal.install(patch)
        self.server = Server()
        self.store = PoolStore(Client(self.server), "p", "test:")  # type: ignore[arg-type]
        self.done: list[str] = []
        script = self.store._script

        async def noted(keys: Any, args: Any) -> Any:
            self.done.append(args[0])
            return await script(keys=keys, args=args)

        self.store._script = noted  # type: ignore[assignment]
        self.topics = PoolTopics("p", 0, KafkaConnection(), "journal", "nowhere", "nowhere", pool.config)

    async def append(self, topic: str, value: bytes, *, key: bytes, partition: int) -> Any:
        return SimpleNamespace(offset=self.journal.write(value, key))

    async def put(self, records: int) -> None:
        """Redis as the owner of epoch 1 had it after so many records of the journal."""
        fold = Fold(ClusterState("p", CONFIG), Position())
        for offset in range(records):
            fold.add(Entry(offset, codec.decode_journal(self.journal.records[offset][1])))
        self.server.data = Data()
        assert await self.store.acquire(0) == 1
        assert await self.store.reset(1, fold.position, fold.state.everything(), b"{}") is Outcome.DONE

    async def take_over(self) -> Taken:
        producer: Any = SimpleNamespace(send_and_wait=self.append)
        return await take_over(self.topics, self.store, JournalWriter(producer, "journal"), lambda: 5000.0, 0)

    async def write(self, taken: Taken) -> Outcome:
        self.done.clear()
        return await write_to_redis(self.store, taken, b"{}")

    async def is_right(self, taken: Taken) -> bool:
        position, raw = await self.store.raw()
        assert position == taken.position
        return raw == stored_values(taken.state.everything())


@pytest.fixture
def steps(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(pool, monkeypatch)


def test_a_redis_that_is_right_is_not_written_anew(steps: Steps) -> None:
    async def work() -> None:
        first = await steps.take_over()
        assert await steps.write(first) is Outcome.DONE
        assert "clear" in steps.done, "it was empty"
        assert await steps.is_right(first)
        second = await steps.take_over()
        assert await steps.write(second) is Outcome.DONE
        assert steps.done == ["commit"]
        assert second.state.epoch == first.state.epoch + 1
        assert await steps.is_right(second)

    asyncio.run(work())


def test_a_redis_that_is_behind_gets_what_is_missing(steps: Steps) -> None:
    """As after a kill between journal and Redis."""

    async def work() -> None:
        await steps.put(3)
        taken = await steps.take_over()
        assert taken.stored_seq == 2
        assert await steps.write(taken) is Outcome.DONE
        assert steps.done == ["commit"]
        assert taken.position.seq == len(steps.journal.records) - 2
        assert await steps.is_right(taken)

    asyncio.run(work())


def test_a_queue_that_is_wrong_alone_is_put_right(steps: Steps) -> None:
    async def work() -> None:
        await steps.put(4)
        assert await steps.write(await steps.take_over()) is Outcome.DONE
        assert steps.done == ["commit"]
        steps.server.data.sorted_sets[b"test:{p}:queue"] = {b"nobody": 1.0}
        taken = await steps.take_over()
        assert taken.stored_seq, "the state itself is taken from Redis"
        assert await steps.write(taken) is Outcome.DONE
        assert await steps.is_right(taken)

    asyncio.run(work())


@pytest.mark.parametrize("harm", ["flushed", "older", "another epoch"])
def test_a_redis_that_changed_after_it_was_read_is_not_written_to(steps: Steps, harm: str) -> None:
    async def work() -> None:
        await steps.put(2)
        old = steps.server.data.copy()
        await steps.put(5)
        taken = await steps.take_over()
        if harm == "another epoch":
            await steps.store.acquire(0)
            assert await steps.write(taken) is Outcome.FENCED
            assert steps.done == ["commit"]
            return
        steps.server.data = Data() if harm == "flushed" else old
        # Without our epoch it is not ours to write: the runner recovers once more, from what is there now.
        assert await steps.write(taken) is Outcome.LOST
        again = await steps.take_over()
        assert await steps.write(again) is Outcome.DONE
        assert ("clear" in steps.done) is (harm == "flushed")
        assert await steps.is_right(again)

    asyncio.run(work())


def test_a_redis_whose_record_is_another_one_is_written_anew(steps: Steps) -> None:
    async def work() -> None:
        await steps.write(await steps.take_over())
        taken = await steps.take_over()
        meta = steps.server.data.hashes[b"test:{p}:meta"]
        meta[b"seq"] = b"2"
        assert await steps.write(taken) is Outcome.DONE
        assert steps.done[:2] == ["commit", "clear"]
        assert await steps.is_right(taken)

    asyncio.run(work())
