"""Taking a pool over: from what Redis and Kafka hold to a state that can go on, whatever happened before.

Redis as it is comes first (or the latest snapshot, when Redis has nothing), then the journal's tail on top. The new
epoch is taken in Redis (from then on commits of earlier epochs are refused) and marked in the journal (records of
earlier epochs after the mark are void); what the former owner wrote in between is before the mark and so part of the
history. The mark's own offset says where to stop reading, which needs no trust in what a broker says of its end.

Decisions that may not be on the placements topic are those of the last stored outbox and those of the tail. They are
looked for on the topic, and what is missing and still matters is the outbox of the recovered state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
from msgspec import Struct

from streamsched.bus import codec, journal, snapshots, topics
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.messages import JournalRecord, Placement
from streamsched.core import events as ev
from streamsched.core.cluster import Changes, ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.errors import BrokenInvariant
from streamsched.core.instructions import Decision, Place, Preempt, Revoke
from streamsched.core.model import RunState
from streamsched.errors import UserError
from streamsched.store.pool_store import Outcome, PoolStore, Position, Stored

_DECISIONS_MAX = 20_000
"""Decisions kept while folding before those that do not matter any more are dropped."""

_CHANGES_MAX = 5000
"""Values that one script call may change while other clients of Redis wait; a longer tail has changed most of them."""
_WORDS_MAX = 300

log = logging.getLogger(__name__)


class Fenced(Exception):
    """Another worker owns the pool now; this process must end without writing anything more."""


class OtherVersion(UserError, BrokenInvariant):
    """A journal record that this version cannot fold to what its writer had. A restart meets it again."""

    def __init__(self, entry: journal.Entry, what: str) -> None:
        record = entry.record
        what = what.splitlines()[0][:_WORDS_MAX]
        super().__init__(
            f"pool {record.pool}: journal record {record.seq} of epoch {record.epoch}, journal offset {entry.offset}: "
            f"{what}. Was it written by another version of streamsched? Start that one, let it take the pool over and "
            "stop it with SIGTERM (docs/operations.md, Rolling upgrade)"
        )


class PoolTopics(Struct, frozen=True):
    """Where a pool's history is, and the settings that a new epoch begins with."""

    pool: str
    partition: int
    kafka: KafkaConnection
    journal: str
    placements: str
    snapshots: str
    config: SchedulerConfig


class Taken(Struct, frozen=True):
    """A pool taken over. `position.outbox` is what is still to be published.

    `changes` bring Redis from record `stored_seq` to `position.seq`; None when Redis did not hold what the state was
    made from.
    """

    state: ClusterState
    position: Position
    stored_seq: int = 0
    changes: Changes | None = None


class Fold:
    """A state and how far it has come in the journal."""

    def __init__(self, state: ClusterState, position: Position) -> None:
        self.state = state
        self.position = msgspec.structs.replace(position, next_offsets=dict(position.next_offsets))
        self.validity = journal.Validity(state.epoch, position.seq)
        self.decisions = list(position.outbox)

    @classmethod
    def from_snapshot(cls, pool: str, config: SchedulerConfig, snapshot: snapshots.Snapshot | None) -> Fold:
        """Begin at a snapshot, or at nothing."""
        fold = cls(ClusterState(pool, config), Position())
        if snapshot is not None:
            state = ClusterState(pool, config)
            state.load(snapshot.state)
            position = Position(
                seq=snapshot.seq,
                journal=snapshot.journal,
                next_offsets=dict(snapshot.next_offsets),
                snapshot_seq=snapshot.seq,
                snapshot_slot=snapshot.slot,
            )
            fold = cls(state, position)
        return fold

    def add(self, entry: journal.Entry) -> bool:
        """Fold one record; False when it does not count. What it decided must be what the core decides again.

        Raises OtherVersion when it is not, or cannot be read, and HistoryMissing when there is a gap before it.
        """
        record = entry.record
        if entry.unreadable:
            self._pass_over(entry)
            return False
        if self.validity.is_ahead(record):
            raise journal.HistoryMissing(
                f"pool {record.pool}: journal offset {entry.offset} holds record {record.seq} of epoch {record.epoch}, "
                f"and those from {self.validity.seq + 1} on are missing before it. If Redis is not of this journal, "
                "`streamsched rebuild` puts it right; else restore the topic from a replica, or begin anew "
                "(docs/operations.md, The broker is lost)"
            )
        self.position = msgspec.structs.replace(self.position, journal=entry.offset + 1)
        if not self.validity.counts(record):
            return False
        decided = self._decide(entry)
        if decided != record.decisions:
            raise OtherVersion(entry, "its decisions are not what this version makes of its events")
        self.decisions += [
            Placement(pool=record.pool, time=record.now, epoch=record.epoch, seq=record.seq, decision=decision)
            for decision in record.decisions
        ]
        self.position = msgspec.structs.replace(
            self.position,
            seq=max(self.position.seq, record.seq),
            next_offsets=self.position.next_offsets | record.next_offsets,
        )
        if len(self.decisions) > _DECISIONS_MAX:
            self.decisions = [placement for placement in self.decisions if _matters(placement.decision, self.state)]
        return True

    def _decide(self, entry: journal.Entry) -> tuple[Decision, ...]:
        try:
            return tuple(
                instruction
                for event in entry.record.events
                for instruction in self.state.handle(event, entry.record.now)
                if isinstance(instruction, Place | Preempt | Revoke)
            )
        except Exception as error:  # whatever it is: the version that wrote the record did not meet it
            raise OtherVersion(entry, f"its events cannot be applied ({type(error).__name__}: {error})") from error

    def _pass_over(self, entry: journal.Entry) -> None:
        """Only what the history can do without. A mark or a next record that is hidden would be a second truth."""
        record = entry.record
        if record.epoch > self.validity.epoch or (
            record.epoch == self.validity.epoch and record.seq > self.validity.seq
        ):
            raise OtherVersion(entry, f"it cannot be read ({entry.unreadable})")
        self.position = msgspec.structs.replace(self.position, journal=entry.offset + 1)


async def take_over(
    pool: PoolTopics,
    store: PoolStore,
    writer: journal.JournalWriter,
    clock: Callable[[], float],
    known_epoch: int,
    trust_redis: bool = True,
) -> Taken:
    """Raises KafkaError or RedisError when one does not answer, Fenced when another worker was faster.

    HistoryMissing or OtherVersion when the journal cannot be folded; a restart does not help then.
    """
    stored = await store.load() if trust_redis else Stored(epoch=await store.epoch(), position=Position(), state=None)
    fold, from_redis = await _begin(pool, stored)
    await _read_on(pool, fold)
    epoch = await store.acquire(max(stored.epoch, fold.validity.epoch, known_epoch))
    mark = await writer.append(_mark(pool, epoch, clock()), pool.partition)
    if mark < fold.position.journal:
        log.warning("pool %s: Redis holds the state of another journal; it is replaced by this one's", pool.pool)
        fold, from_redis = await _begin(pool, Stored(epoch=0, position=Position(), state=None))
    if await _read_on(pool, fold, mark + 1) != mark:
        raise Fenced(f"another worker has taken over pool {pool.pool} (epoch {fold.state.epoch}, ours {epoch})")
    changes = fold.state.take_changes()
    outbox = await _not_on_topic(pool, fold)
    position = msgspec.structs.replace(fold.position, outbox=tuple(outbox))
    changes_do = from_redis and stored.queue_is_right
    return Taken(fold.state, position, stored.position.seq, changes if changes_do else None)


async def write_to_redis(store: PoolStore, taken: Taken, summary: bytes) -> Outcome:
    """Bring Redis to the state that was taken over.

    As a rule it is there already, but for the records that were folded on top and the new epoch, and a state of tens
    of thousands of jobs takes seconds to write while no job is placed. That it is there needs no second look: the
    state *is* what was loaded, under the new epoch nobody else can write any more, and the script makes the step only
    from the record that was loaded (or to a Redis that the former owner has brought to our record meanwhile). If it
    does not make it, everything is written anew.
    """
    changes = taken.changes
    if changes is not None and _size(changes) <= _CHANGES_MAX:
        outcome = await store.commit(taken.state.epoch, taken.stored_seq, taken.position, changes, summary)
        if outcome is not Outcome.LOST:
            return outcome
    return await store.reset(taken.state.epoch, taken.position, taken.state.everything(), summary)


def _size(changes: Changes) -> int:
    return len(changes.jobs) + len(changes.runs) + len(changes.nodes) + len(changes.tenants)


async def _begin(pool: PoolTopics, stored: Stored) -> tuple[Fold, bool]:
    """Where to read on from: Redis, unless it has nothing or the journal does not reach back to it; else a snapshot.

    Also whether it is Redis.
    """
    first = await journal.first_offset(pool.kafka, pool.journal, pool.partition)
    if stored.state is not None and stored.position.journal >= first:
        state = ClusterState(pool.pool, pool.config)
        state.load(stored.state)
        state.take_changes()
        return Fold(state, stored.position), True
    snapshot = await snapshots.read_latest(pool.kafka, pool.snapshots, pool.partition, pool.pool)
    return Fold.from_snapshot(pool.pool, pool.config, snapshot), False


async def known_jobs(pool: PoolTopics, pool_jobs: str, state: ClusterState, position: Position) -> list[str]:
    """Jobs of the pool for the job index: those in the state, and those routed to it that it has not read yet.

    Without the latter a lost index would seem whole again, and a job on its way here that is submitted (or delivered)
    once more might be sent to another pool.
    """
    jobs = dict.fromkeys(state.jobs)
    start = position.next_offsets.get(f"{topics.POOL_JOBS.name}:{pool.partition}", 0)
    async for _, _, value in journal.read_partition(pool.kafka, pool_jobs, pool.partition, pool.pool.encode(), start):
        try:
            message = codec.decode_pool_job(value)
        except codec.Refused:
            continue  # its letter is written when its turn comes
        if message.arrival is not None:
            jobs[message.arrival.job_id] = None
    return list(jobs)


def _mark(pool: PoolTopics, epoch: int, now: float) -> JournalRecord:
    started = ev.EpochStarted(epoch=epoch, config=pool.config)
    return JournalRecord(pool=pool.pool, epoch=epoch, seq=0, now=now, events=(started,))


async def _read_on(pool: PoolTopics, fold: Fold, stop: int | None = None) -> int | None:
    """Fold what comes up to `stop`; the offset of the last mark that counts (of two with one epoch only the first)."""
    last = None
    async for entry in journal.read(
        pool.kafka, pool.journal, pool.partition, pool.pool, fold.position.journal, stop, whole=True
    ):
        if fold.add(entry) and journal.mark_of(entry.record) is not None:
            last = entry.offset
    return last


async def _not_on_topic(pool: PoolTopics, fold: Fold) -> list[Placement]:
    """Decisions that still matter and are not on the topic: their writer ended before it had sent them."""
    still = [placement for placement in fold.decisions if _matters(placement.decision, fold.state)]
    if not still:
        return []
    there = set()
    async for _, _, value in journal.read_partition(
        pool.kafka, pool.placements, pool.partition, pool.pool.encode(), fold.position.placements
    ):
        try:
            decision = codec.decode_placement(value).decision
        except codec.Refused:
            continue  # not ours, whoever wrote it
        there.add((type(decision), decision.placement_id))
    return [p for p in still if (type(p.decision), p.decision.placement_id) not in there]


def _matters(decision: Decision, state: ClusterState) -> bool:
    """Whether an executor still has to hear of it: a run that has ended needs neither its start nor its stop."""
    run = state.runs.get(decision.placement_id)
    if run is None:
        return False
    return run.state is RunState.PLACED if isinstance(decision, Place) else run.stop_at is not None
