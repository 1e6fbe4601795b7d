"""Folding a journal by hand: what counts, what is refused, and which decisions a successor has to publish."""

from __future__ import annotations

import msgspec
import pytest
from core_builder import Pool, placed, stored

from streamsched.bus import codec
from streamsched.bus.journal import Entry
from streamsched.bus.messages import JournalRecord
from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.errors import BrokenInvariant
from streamsched.core.instructions import Place, Preempt, Revoke
from streamsched.service.recovery import Fold, _matters
from streamsched.store.pool_store import Position

CONFIG = SchedulerConfig()


def entries(pool: Pool, epoch: int = 1) -> list[Entry]:
    """The pool's history as a journal: a mark, then one record per event, through the codec as Kafka would give it."""
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
        found.append(Entry(10 * seq, codec.decode_journal(codec.encode(record))))
    return found


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
