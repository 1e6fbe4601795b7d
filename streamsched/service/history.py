"""A pool's past: fold the journal without any solver, compare it with Redis, write Redis anew from it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from streamsched.bus import journal, snapshots
from streamsched.bus.messages import JournalRecord
from streamsched.bus.producer import make_producer
from streamsched.bus.topics import partition_of
from streamsched.core.cluster import ClusterState, Meta
from streamsched.core.events import WindowElapsed
from streamsched.core.instructions import Decision, Place, SolveWindow
from streamsched.core.model import Job, Run
from streamsched.core.node import NodeRecord
from streamsched.core.problem import Problem
from streamsched.core.tenants import TenantUsage
from streamsched.core.window import Ranker
from streamsched.errors import UserError
from streamsched.store.client import connect
from streamsched.store.job_index import JobIndex
from streamsched.store.pool_store import PoolStore, Position, stored_values

from .clock import Clock
from .recovery import Fold, PoolTopics, known_jobs, take_over
from .settings import Settings
from .summary import pool_summary

_STORED: Final[dict[str, Any]] = {"jobs": Job, "runs": Run, "nodes": NodeRecord, "tenants": TenantUsage, "meta": Meta}
_encode = msgspec.json.Encoder(order="deterministic").encode


class Until(Struct, frozen=True):
    """Where to stop: after the record with this number, before the first record later than this time, or at the end."""

    seq: int | None = None
    time: float | None = None

    def is_before(self, record: JournalRecord) -> bool:
        """Whether `record` comes after the stop."""
        if self.seq is not None and record.seq > self.seq:
            return True
        return self.time is not None and record.now > self.time

    def is_before_state(self, fold: Fold) -> bool:
        """Whether the fold has come further than the stop already."""
        if self.seq is not None and fold.position.seq > self.seq:
            return True
        return self.time is not None and fold.state.now > self.time


def pool_topics(settings: Settings, pool: str) -> PoolTopics:
    """Raises UserError for a pool that the settings do not have."""
    if pool not in settings.pools:
        raise UserError(f"no pool {pool} here, there is {', '.join(settings.pools)} (STREAMSCHED_POOLS)")
    return PoolTopics(
        pool,
        partition_of(pool, settings.partitions),
        settings.kafka,
        settings.names.journal,
        settings.names.placements,
        settings.names.snapshots,
        settings.scheduler,
    )


async def replay(
    settings: Settings, pool: str, until: Until, on_record: Callable[[JournalRecord, ClusterState], None] | None = None
) -> Fold:
    """Fold the pool's journal up to `until`, from its beginning or, where that is not kept, from a snapshot.

    Raises UserError when the record or time is before what is kept, or the record is not there yet.
    """
    fold = await _replay(settings, pool, until, on_record)
    if until.seq is not None and fold.position.seq < until.seq:
        raise UserError(f"pool {pool}: the journal ends at record {fold.position.seq}, there is no {until.seq} (yet)")
    return fold


async def _replay(
    settings: Settings, pool: str, until: Until, on_record: Callable[[JournalRecord, ClusterState], None] | None = None
) -> Fold:
    topics = pool_topics(settings, pool)
    fold = Fold(ClusterState(pool, settings.scheduler), Position())
    first = await journal.first_offset(topics.kafka, topics.journal, topics.partition)
    if first > 0:
        snapshot = await snapshots.read_latest(topics.kafka, topics.snapshots, topics.partition, pool)
        if snapshot is None or snapshot.journal < first:
            raise UserError(
                f"pool {pool}: the journal before offset {first} is not kept and no snapshot reaches back there"
            )
        fold = Fold.from_snapshot(pool, settings.scheduler, snapshot)
        if until.is_before_state(fold):
            raise UserError(
                f"pool {pool}: that far back the journal is not kept any more; the oldest state that can be told is "
                f"that of the snapshot after record {fold.position.seq}, {_moment(fold.state.now)}"
            )
    async for entry in journal.read(
        topics.kafka, topics.journal, topics.partition, pool, fold.position.journal, whole=True
    ):
        # A void record says nothing of where its neighbours are in time.
        if fold.validity.would_count(entry.record) and until.is_before(entry.record):
            break
        if fold.add(entry) and on_record is not None:
            on_record(entry.record, fold.state)
    return fold


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def next_window(fold: Fold, ranker: Ranker) -> Problem | None:
    """What the pool's owner would ask its solver at the moment of the fold's last record; None: no job could start.

    Its number is not the owner's: each process counts its own windows. The fold's state goes on to that window, so it
    is not the journal's any more.
    """
    state = fold.state
    state.ranker = ranker
    for instruction in state.handle(WindowElapsed(), state.now):
        if isinstance(instruction, SolveWindow):
            return instruction.problem
    return None


async def compare_with_redis(settings: Settings, pool: str) -> list[str]:
    """Differences between what Redis holds and the journal folded to the same record; none: equal.

    Values are compared as this version writes them. What an older one wrote stays as it is until it changes, and is no
    difference when it means the same.
    """
    redis = connect(settings.redis)
    try:
        position, raw = await PoolStore(redis, pool, settings.key_prefix).raw()
    finally:
        await redis.aclose()
    fold = await _replay(settings, pool, Until(seq=position.seq))
    if fold.position.seq != position.seq:
        return [f"Redis is at record {position.seq}, the journal ends at {fold.position.seq}"]
    expected = stored_values(fold.state.everything())
    differences = []
    for kind in sorted(expected):
        for name in sorted(expected[kind].keys() | raw[kind].keys()):
            wanted, found = expected[kind].get(name), raw[kind].get(name)
            if wanted != found and wanted != _as_written_now(kind, found):
                differences.append(f"{kind} {name.decode()}: Redis {found!r}, journal {wanted!r}")
    return differences


def _as_written_now(kind: str, value: bytes | None) -> bytes | None:
    if kind not in _STORED:
        return value
    try:
        return _encode(msgspec.json.decode(value or b"", type=_STORED[kind]))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return value


async def rebuild(settings: Settings, pool: str) -> Fold:
    """Write the pool's keys in Redis anew from snapshots and journal, under a new epoch: a live owner ends."""
    topics = pool_topics(settings, pool)
    producer = make_producer(settings.kafka)
    await producer.start()
    redis = connect(settings.redis)
    try:
        store = PoolStore(redis, pool, settings.key_prefix)
        writer = journal.JournalWriter(producer, settings.names.journal)
        taken = await take_over(topics, store, writer, Clock(), 0, trust_redis=False)
        everything = taken.state.everything()
        await store.reset(taken.state.epoch, taken.position, everything, pool_summary(taken.state, Clock()()))
        jobs = await known_jobs(topics, settings.names.pool_jobs, taken.state, taken.position)
        await JobIndex(redis, settings.pools, settings.key_prefix, settings.index_keep_s).restore(pool, jobs)
        return Fold(taken.state, taken.position)
    finally:
        await producer.stop()
        await redis.aclose()


def story_of(job_id: str) -> tuple[list[str], Callable[[JournalRecord, ClusterState], None]]:
    """A list that fills with the job's story while a replay calls the returned function."""
    lines: list[str] = []
    before: list[tuple[str, str]] = [("", "")]

    def note(record: JournalRecord, state: ClusterState) -> None:
        job = state.jobs.get(job_id)
        now = (job.state.value, job.reason) if job is not None else ("", "")
        if now != before[0]:
            lines.append(f"{record.now:.3f} #{record.seq} {now[0] or 'forgotten'}{f' ({now[1]})' if now[1] else ''}")
            before[0] = now
        for decision in record.decisions:
            if decision.job_id == job_id:
                lines.append(f"{record.now:.3f} #{record.seq}   {_describe(decision)}")

    return lines, note


def _describe(decision: Decision) -> str:
    text = f"{type(decision).__name__.lower()} {decision.placement_id}"
    if isinstance(decision, Place):
        return f"{text} on {', '.join(dict.fromkeys(a.node_id for a in decision.allocations))}"
    return f"{text}: {decision.reason}"
