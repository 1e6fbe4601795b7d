"""The runner of one pool: takes events in, executes the core's instructions, keeps the promises about crashes.

One commit is, in this order:
  1. fold the events into the state in memory, write a dead letter for what is refused (should the rest fail, it is
     refused again: rather one letter too many than one too few);
  2. append one record (events, decisions, next input offsets) to the journal and wait for all replicas; should others
     have written since the last one, make sure that no successor has;
  3. bring Redis to the new state by one script, which refuses an epoch that is not the pool's (zombies end here);
     the decisions go with it as the outbox;
  4. publish the decisions;
  5. only then are the inputs acknowledged.
A crash between any two steps is made good by `_recover`: Redis as it is, the journal's tail folded on top, the outbox
published as far as it is not on the topic. Redelivered inputs are recognised by the offsets in the state.

Whatever fails in step 2 leaves it open whether the record is there. Then the state in memory is thrown away and
recovered under a new epoch, which decides the question for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiokafka.errors import KafkaError, MessageSizeTooLargeError
from redis.exceptions import RedisError

from streamsched.bus import codec, journal
from streamsched.bus.app import Input
from streamsched.bus.codec import Refused
from streamsched.bus.hearing import Hearing
from streamsched.bus.messages import Heartbeat, Joined, JournalRecord, Placement, PoolJob
from streamsched.bus.producer import Producer
from streamsched.bus.strays import connection_errors, is_stray
from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.instructions import Absorb, Decision, Place, Preempt, Refuse, Revoke, SolveWindow
from streamsched.core.model import JobSpec
from streamsched.core.problem import Assignment, Problem, Solution, SolveStatus
from streamsched.core.window import Ranker
from streamsched.errors import UserError
from streamsched.routing.least_loaded import ModelSummary
from streamsched.store.client import trouble
from streamsched.store.job_index import JobIndex
from streamsched.store.pool_store import Outcome, PoolStore, Position
from streamsched.store.predictor_store import PredictorStore

from .clock import PoolClock
from .models import ModelFolder
from .pool_model import PoolModel
from .predictions import Predictions
from .ranking import bounded, queue_ranking
from .recovery import Fenced, PoolTopics, known_jobs, take_over, write_to_redis
from .retry import pauses, words
from .settings import Settings
from .silence import SignsOfLife
from .snapshotter import Snapshotter
from .summary import Summaries

log = logging.getLogger(__name__)

_RECORD_EVENTS = 1000
_DEAF_S = 10.0
_CHECK_EVERY_S = 2.0
_WINDOW_REST = 4.0
_RANKING_REST = 20.0
"""Times as long as the last window (ranking) took until the next. A message from Kafka takes several turns of the event
loop to get here, so with windows back to back over a long queue hardly any would, completions among them."""
_RANKING_BYTES = 4 * 1024 * 1024
"""Of a ranking's message at most: half of what its topic takes."""
_PREDICTOR_STOP_S = 2.0
"""For what is learned to be kept when a pool is stopped; it is not lost for good if that takes longer."""
_RECORD_BYTES = 2 * 1024 * 1024
"""About the bytes of a journal record at most, so that it stays well below the topic's limit."""


class GivenUp(Exception):
    """The pool was stopped before these inputs were applied."""


class _Stopped(Exception):
    """Told to stop while Kafka or Redis did not answer."""


class _StateLost(Exception):
    """Redis does not hold what was written there, or a journal write is uncertain: recover."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the runners of one worker share."""

    settings: Settings
    producer: Producer
    clock: Callable[[], float]
    ranker: Ranker
    """By the setting `policy`, where that is a rule."""
    solve: Callable[[Problem], Any]
    """`await solve(problem) -> Solution`; off the event loop, bounded in time."""
    letters: Callable[[list[tuple[Refused, Input]]], Any]
    """`await letters(pairs)` keeps refused inputs."""
    index: JobIndex
    hearing: Callable[[int], Hearing]
    """How much is heard of `nodes.events` in a partition."""
    journalled: journal.Written = field(default_factory=journal.Written)
    models: ModelFolder | None = None
    """Where the policy is a model."""


@dataclass(slots=True)
class _Batch:
    """Decoded inputs of one pool and whoever waits for them to be applied."""

    inputs: list[tuple[Input, Any]]
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Work:
    """One event on its way in, with the input it came from."""

    event: ev.CoreEvent
    source: Input | None = None
    weight: int = 0
    """About its bytes in the journal, with what it decides."""


@dataclass(slots=True)
class Counts:
    """What this process did for the pool, for logs and metrics."""

    applied: int = 0
    absorbed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    solves: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    recoveries: int = 0


class PoolRunner:
    """Runs one pool while this worker has its partition. `start`, then `submit`; `stop` when the partition leaves."""

    def __init__(
        self, pool: str, partition: int, parts: Parts, store: PoolStore, predictor: PredictorStore | None = None
    ) -> None:
        """`predictor`: where it is kept what is learned of run times; None: none are predicted."""
        self.pool = pool
        self.partition = partition
        self.counts = Counts()
        self.state = ClusterState(pool, parts.settings.scheduler)
        self._model = PoolModel(pool, parts.models, parts.settings.scheduler) if parts.models is not None else None
        self._ranker = copy.deepcopy(parts.ranker)
        """A rule may remember (A-SRPT's virtual machine does), and each pool has its own past. With a model it is what
        that makes of it, anew with each commit."""
        self._parts = parts
        self._clock = PoolClock(parts.clock)
        self._settings = parts.settings
        self._names = parts.settings.names
        self._store = store
        self._journal = journal.JournalWriter(parts.producer, self._names.journal, parts.journalled)
        self._pool = PoolTopics(
            pool,
            partition,
            parts.settings.kafka,
            self._names.journal,
            self._names.placements,
            self._names.snapshots,
            parts.settings.scheduler,
        )
        self._snapshots = Snapshotter(
            parts.producer, self._names.snapshots, partition, pool, parts.settings.snapshot_every
        )
        self._position = Position()
        self._known_epoch = 0
        self._inbox: deque[_Batch | Solution] = deque()
        self._wake = asyncio.Event()
        self._placements_end = 0
        self._events_max = _RECORD_EVENTS
        """Of one journal record; fewer after one that was too large."""
        self._solving: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._worth_a_window = True
        self._last_window = 0.0
        self._window_pause = parts.settings.window_s
        self._ranking_pause = parts.settings.ranking_every_s
        self._last_timer = 0.0
        self._listened_at = self._clock()
        """When silence was last judged: a long gap means that this process was held up, not the nodes."""
        self._last_ranking = 0.0
        self._told: object = None
        """What the last ranking on the topic says: by which rule, whether beside a shadow; jobs, their states and
        reasons."""
        self._unplaced: dict[str, str] = {}
        """Why the candidates of the last window were not placed."""
        self._last_store = 0.0
        self._last_index = 0.0
        self._summaries = Summaries()
        self._signs = SignsOfLife(parts.settings.node_silent_s, self._clock())
        self._strangers: dict[str, float] = {}
        self._predictions = Predictions(pool, predictor, parts.settings, self._clock) if predictor is not None else None

    # ── from outside ─────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, on_end: Callable[[asyncio.Task[None]], None]) -> None:
        self._task = asyncio.create_task(self._run(), name=f"pool {self.pool}")
        self._task.add_done_callback(on_end)

    async def submit(self, inputs: list[tuple[Input, Any]]) -> None:
        """Returns when the inputs are applied or refused, and safe; GivenUp when the pool is stopped before."""
        batch = _Batch(inputs, asyncio.get_running_loop().create_future())
        self._put(batch)
        await batch.done

    async def stop(self) -> None:
        """Finish the commit under way, then end. One that takes too long (an outage) is left to the next owner."""
        self._stop.set()
        if self._solving is not None:
            self._solving.cancel()
        self._wake.set()
        if self._task is not None and not (await asyncio.wait([self._task], timeout=self._settings.stop_s))[0]:
            log.warning("pool %s: stopped in the middle of a commit; its next owner completes it", self.pool)
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._snapshots.close()
        if self._predictions is not None:
            await self._predictions.close(_PREDICTOR_STOP_S)
        for item in self._inbox:
            if isinstance(item, _Batch):
                item.done.set_exception(GivenUp())
        self._inbox.clear()

    def _put(self, item: _Batch | Solution) -> None:
        self._inbox.append(item)
        self._wake.set()

    @property
    def model(self) -> ModelSummary | None:
        """What ranks; None where the policy is a rule."""
        return self._model.summary() if self._model is not None else None

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        try:
            await self._recover_until_done()
            while not self._stop.is_set():
                await self._wait()
                batches, works = self._take()
                try:
                    await self._apply_until_done(batches, works)
                finally:
                    for batch in batches:
                        if not batch.done.done():
                            batch.done.set_exception(GivenUp())
        except _Stopped:
            log.info("pool %s: stopped with a commit under way; its next owner completes it", self.pool)
        except asyncio.CancelledError as error:
            if is_stray():  # else the pool would stand still without a word
                raise RuntimeError(f"pool {self.pool}: its task was cancelled by nobody of us") from error
            raise

    async def _wait(self) -> None:
        """Until there is work or a timer is due."""
        if not self._inbox and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._wait_s())
        self._wake.clear()

    def _take(self) -> tuple[list[_Batch], list[_Work]]:
        """All that is there, up to a record's worth."""
        batches: list[_Batch] = []
        works: list[_Work] = []
        taken = 0
        while self._inbox and taken < _RECORD_EVENTS:
            item = self._inbox.popleft()
            if isinstance(item, _Batch):
                batches.append(item)
                taken += len(item.inputs)
            else:
                works += _parts_of(item, self.state)
        return batches, works

    def _wait_s(self) -> float:
        now = self._clock()
        due = self._last_timer + self._settings.timer_s
        if self._worth_a_window and self._solving is None:
            due = min(due, self._last_window + self._window_pause)
        return max(0.0, due - now)

    async def _apply_until_done(self, batches: list[_Batch], works: list[_Work]) -> None:
        """Apply; when the state had to be recovered on the way, apply again what its offsets say is not in."""
        while True:
            try:
                with connection_errors():
                    todo = works + [work for batch in batches for work in await self._admit(batch)]
                    todo += self._timers()
                    for chunk in _chunks(todo, self._events_max):
                        await self._commit(chunk)
                    self._events_max = _RECORD_EVENTS
                    await self._check_store()
                    await self._check_index()
                    if self._model is not None:
                        self._model.look(self.state, self._clock)
                    await self._publish_ranking()
                break
            except (_StateLost, ConnectionError) as lost:
                log.warning("pool %s: %s; recovering", self.pool, lost)
                works = []
                await self._recover_until_done()
        for batch in batches:
            if not batch.done.done():
                batch.done.set_result(None)

    async def _admit(self, batch: _Batch) -> list[_Work]:
        """The inputs that are new, as events. Signs of life of nodes that are well are noted here and go no further."""
        works: list[_Work] = []
        for source, message in batch.inputs:
            if source.offset < self._position.next_offsets.get(f"{source.topic}:{source.partition}", 0):
                continue
            if isinstance(message, Heartbeat) and self._note_heartbeat(message):
                continue
            if isinstance(message, Joined):
                self._signs.note(message.node_id, self._clock())
            works.append(_Work(_event(message, source), source, len(source.value or b"")))
        return works

    def _note_heartbeat(self, message: Heartbeat) -> bool:
        """True when it tells the core nothing: the node is known and not thought lost, or a stranger told of lately."""
        now = self._clock()
        node = self.state.inventory.nodes.get(message.node_id)
        if node is not None:
            self._signs.note(message.node_id, now)
            return not node.record.lost
        if now - self._strangers.get(message.node_id, -1e9) < 60.0:
            return True
        if len(self._strangers) > 10_000:
            self._strangers.clear()
        self._strangers[message.node_id] = now
        return False

    def _pass(self, source: Input) -> None:
        """The next offset is part of the state; when nothing else changed it is stored with the next commit."""
        self._position.next_offsets[f"{source.topic}:{source.partition}"] = source.offset + 1

    def _timers(self) -> list[_Work]:
        now = self._clock()
        works: list[_Work] = []
        timer_due = now - self._last_timer >= self._settings.timer_s
        window_due = self._worth_a_window and now - self._last_window >= self._window_pause
        if timer_due:
            self._last_timer = now
            works += [_Work(ev.NodeLost(node_id=node_id)) for node_id in self._silent_nodes(now)]
        if timer_due or (window_due and self._solving is None):
            works.append(_Work(ev.WindowElapsed()))
        return works

    def _silent_nodes(self, now: float) -> list[str]:
        if self._parts.producer.outage.active or now - self._listened_at > _DEAF_S:
            self._signs.deaf(now)
        self._listened_at = now
        hearing = self._parts.hearing(self.partition)
        if hearing is Hearing.ALL and self._inbox:
            hearing = Hearing.PART
        nodes = {node.node_id for node in self.state.inventory if not node.record.lost}
        return self._signs.silent(nodes, hearing, now)

    # ── a commit ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _commit(self, works: list[_Work]) -> None:
        now = self._clock()
        if self._model is not None:
            self._model.refresh()
            self._ranker = self._model.ranker
        self.state.ranker = self._ranker if self._solving is None else None
        if self._predictions is not None:
            self.state.run_times = self._predictions.run_times
        decisions: list[Decision] = []
        letters: list[tuple[Refused, Input]] = []
        problem: Problem | None = None
        for work in works:
            for instruction in self.state.handle(work.event, now):
                if isinstance(instruction, SolveWindow):
                    problem = instruction.problem
                elif isinstance(instruction, Refuse):
                    self._refuse(instruction, work.source, letters)
                elif isinstance(instruction, Absorb):
                    self.counts.absorbed[instruction.code] += 1
                elif isinstance(instruction, Place | Preempt | Revoke):
                    decisions.append(instruction)
            if work.source is not None:
                self._pass(work.source)
        worked_until = self._clock()
        changes = self.state.take_changes()
        if letters:
            await self._parts.letters(letters)
        if changes or decisions:
            await self._make_durable(works, now, decisions, changes)
        if any(isinstance(work.event, ev.WindowElapsed) for work in works):
            self._worth_a_window = False
            self._last_window = worked_until
            self._window_pause = max(self._settings.window_s, _WINDOW_REST * (worked_until - now))
            if self.state.unfinished_timers:
                self._last_timer = 0.0  # more leases and lost runs are due than one record should hold
        if changes or decisions:
            self._worth_a_window = True
        if problem is not None and self._solving is None and not self._stop.is_set():
            self._solving = asyncio.create_task(self._solve(problem))

    def _refuse(self, instruction: Refuse, source: Input | None, letters: list[tuple[Refused, Input]]) -> None:
        self.counts.refused[instruction.code] += 1
        if source is not None:
            letters.append((Refused(instruction.code, instruction.detail), source))  # type: ignore[arg-type]

    async def _make_durable(self, works: list[_Work], now: float, decisions: list[Decision], changes: Any) -> None:
        """Journal, Redis, placements, in this order."""
        before = self._position
        record = JournalRecord(
            pool=self.pool,
            epoch=self.state.epoch,
            seq=before.seq + 1,
            now=now,
            events=tuple(work.event for work in works),
            decisions=tuple(decisions),
            next_offsets=dict(before.next_offsets),
        )
        try:
            offset = await self._journal.append(record, self.partition)
        except MessageSizeTooLargeError as error:
            raise self._too_large(works, error) from None
        except KafkaError as error:
            raise _StateLost(f"a journal write is uncertain ({words(error)})") from None
        if not self._journal.written.alone_since(self.partition, before.journal):
            await self._look_for_successor(before.journal, offset)
        self._position = msgspec.structs.replace(
            before,
            seq=record.seq,
            journal=offset + 1,
            outbox=tuple(self._placements(record)),
            placements=self._placements_end,
            snapshot_seq=self._snapshots.latest_seq,
            snapshot_slot=self._snapshots.latest_slot,
        )
        await self._store_commit(before.seq, changes)
        await self._publish(self._position.outbox)
        self._snapshots.after_commit(self.state, self._position)
        if self._predictions is not None:
            self._predictions.after_commit(record.events, changes, self.state, record.seq)
        if self._model is not None:
            self._model.placed(decisions, self.state)
        self.counts.commits += 1
        self.counts.applied += len(works)
        self.counts.decisions.update(type(decision).__name__.lower() for decision in decisions)
        if gone := [job_id for job_id, job in changes.jobs.items() if job is None]:
            await self._forget_in_index(gone)

    def _too_large(self, works: list[_Work], error: MessageSizeTooLargeError) -> Exception:
        """The record is not there and nothing of it may take effect: take less at once, or end and say so."""
        if len(works) > 1:
            self._events_max = len(works) // 2
            return _StateLost(f"a journal record of {len(works)} events is too large ({words(error)}), taking fewer")
        source = works[0].source
        where = f" from {source.topic}[{source.partition}]@{source.offset}" if source is not None else ""
        return UserError(
            f"pool {self.pool}: a single {type(works[0].event).__name__}{where} gives a journal record that is too "
            f"large ({words(error)}). Nothing of it was done. If the topic takes less than declared, raise that "
            "(`streamsched topics diff`); else report it, and move the group's offset past the input to go on without"
        )

    async def _look_for_successor(self, start: int, stop: int) -> None:
        """Somebody else wrote between the last two records: a successor's mark there voids the second.

        Redis refuses it as well, unless it has come back from a copy older than the takeover. A later version's mark
        may be one that we cannot read: what cannot be read and is of a later epoch counts as one.
        """
        try:
            async for entry in journal.read(
                self._settings.kafka, self._names.journal, self.partition, self.pool, start, stop
            ):
                epoch = entry.record.epoch
                if epoch > self.state.epoch and (entry.unreadable or journal.mark_of(entry.record) is not None):
                    raise Fenced(f"another worker has taken over pool {self.pool} (epoch {epoch})")
        except KafkaError as error:
            raise _StateLost(f"the journal cannot be read ({words(error)})") from None

    async def _store_commit(self, before: int, changes: Any) -> None:
        for pause in pauses():
            try:
                outcome = await self._store.commit(self.state.epoch, before, self._position, changes, self._summary())
                break
            except (RedisError, OSError) as error:
                log.warning("pool %s: %s; trying again", self.pool, trouble(error, self._settings.redis))
                await self._pause(pause)
        self._last_store = self._clock()
        self._judge(outcome)

    async def _forget_in_index(self, job_ids: list[str]) -> None:
        """Only bounds the index: an entry that stays sends a resubmission to the same pool, which takes it as new."""
        try:
            await self._parts.index.forget(self.pool, job_ids, self._clock())
        except (RedisError, OSError) as error:
            log.warning("pool %s: %d jobs stay in the job index (%s)", self.pool, len(job_ids), words(error))

    async def _check_store(self) -> None:
        """An idle owner looks now and then whether Redis still holds its state and its epoch, and says how it is."""
        now = self._clock()
        if now - self._last_store < _CHECK_EVERY_S:
            return
        self._last_store = now
        try:
            outcome = await self._store.check(self.state.epoch, self._position.seq, self._summary())
        except (RedisError, OSError) as error:
            log.warning("pool %s: %s", self.pool, trouble(error, self._settings.redis))
            return
        self._judge(outcome)

    async def _check_index(self) -> None:
        """Busy or not: a Redis that was started again has the pool's jobs in the index, but nobody can rely on it."""
        now = self._clock()
        if now - self._last_index < _CHECK_EVERY_S:
            return
        self._last_index = now
        try:
            if not await self._parts.index.look_after(self.pool, self.state.jobs, now):
                log.warning("pool %s: Redis was started again or lost the job index; writing our jobs anew", self.pool)
                await self._restore_index()
        except (RedisError, KafkaError, OSError) as error:
            log.warning("pool %s: the job index is not looked after (%s)", self.pool, words(error))

    async def _restore_index(self) -> None:
        jobs = await known_jobs(self._pool, self._names.pool_jobs, self.state, self._position)
        await self._parts.index.restore(self.pool, jobs)

    def _judge(self, outcome: Outcome) -> None:
        if outcome is Outcome.FENCED:
            raise Fenced(f"another worker has taken over pool {self.pool}")
        if outcome is Outcome.LOST:
            raise _StateLost("Redis does not hold what was last written there")

    def _placements(self, record: JournalRecord) -> Iterable[Placement]:
        for decision in record.decisions:
            yield Placement(pool=self.pool, time=record.now, epoch=record.epoch, seq=record.seq, decision=decision)

    async def _publish(self, placements: Iterable[Placement]) -> None:
        """Put the decisions on the topic and wait until they are safe there, however long that takes."""
        todo = list(placements)
        for pause in pauses():
            if not todo:
                return
            sent = [await self._send(placement) for placement in todo]
            failed: list[Placement] = []
            reason = ""
            for placement, answer in zip(todo, await asyncio.gather(*sent, return_exceptions=True), strict=True):
                if isinstance(answer, KafkaError):
                    failed.append(placement)
                    reason = words(answer)
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    self._placements_end = max(self._placements_end, answer.offset + 1)
            todo = failed
            if failed:
                log.warning("pool %s: %d placements not published yet (%s)", self.pool, len(failed), reason)
                await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
            raise _Stopped

    async def _send(self, placement: Placement) -> Any:
        """The future of one produce; a failure to enqueue is a failed future as well."""
        decision = placement.decision
        trace = decision.traceparent if isinstance(decision, Place) else None
        try:
            return await self._parts.producer.send(
                self._names.placements,
                codec.encode(placement),
                key=self.pool.encode(),
                partition=self.partition,
                headers=[("traceparent", trace.encode())] if trace else None,
            )
        except KafkaError as error:
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed

    # ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _solve(self, problem: Problem) -> None:
        try:
            with connection_errors():
                solution: Solution = await self._parts.solve(problem)
        except Exception:
            log.exception("pool %s: a window could not be solved", self.pool)
            solution = Solution(window=problem.window, status=SolveStatus.EMPTY)
        self._solving = None
        self.counts.solves[solution.status.value] += 1
        self._unplaced = solution.unplaced
        self._put(solution)

    async def _publish_ranking(self) -> None:
        """The queue as last ranked, when it tells anything new; one that is not written is replaced by the next."""
        now = self._clock()
        due = now - self._last_ranking >= self._ranking_pause
        if not due or self._parts.producer.outage.active:
            return
        self._last_ranking = now
        shadow = self._model.shadow_scores if self._model is not None else {}
        try:
            ranking, encoded = bounded(
                lambda limit: queue_ranking(self.state, self._position.seq, now, self._unplaced, limit, shadow),
                self._settings.ranking_jobs,
                _RANKING_BYTES,
            )
        except ValueError as error:  # a score that JSON cannot hold
            log.warning("pool %s: ranking not published (%s)", self.pool, words(error))
            return
        told = ranking.policy, bool(shadow), [(job.job_id, job.state, job.reason) for job in ranking.jobs]
        self._ranking_pause = max(self._settings.ranking_every_s, _RANKING_REST * (self._clock() - now))
        if told == self._told:
            return
        self._told = told
        try:
            written = await self._parts.producer.send(
                self._names.rankings, encoded, key=self.pool.encode(), partition=self.partition
            )
        except KafkaError as error:
            self._ranking_failed(error)
        else:
            written.add_done_callback(self._ranking_written)

    def _ranking_written(self, written: asyncio.Future[Any]) -> None:
        if not written.cancelled() and (error := written.exception()) is not None:
            self._ranking_failed(error)

    def _ranking_failed(self, error: BaseException) -> None:
        log.warning("pool %s: ranking not published (%s)", self.pool, words(error))
        self._told = None  # so that the next one is written, also if it tells the same

    def _summary(self) -> bytes:
        run_times = self._predictions.summary() if self._predictions is not None else None
        return self._summaries.of(self.state, self._clock(), run_times, self.model)

    # ── recovery ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _recover_until_done(self) -> None:
        for pause in pauses():
            try:
                with connection_errors():
                    await self._recover()
                return
            except (RedisError, KafkaError, OSError, _StateLost) as error:
                why = trouble(error, self._settings.redis) if isinstance(error, RedisError) else words(error)
                log.warning("pool %s: cannot recover yet (%s), trying again", self.pool, why)
                await self._pause(pause)

    async def _recover(self) -> None:
        """Take the pool over: state, Redis, job index and placements are as the journal says, under a new epoch."""
        if self._solving is not None:
            self._solving.cancel()
            self._solving = None
        taken = await take_over(self._pool, self._store, self._journal, self._clock, self._known_epoch)
        self.state, self._position = taken.state, taken.position
        self._clock.go_on_from(taken.state.now, self.pool)
        self._known_epoch = taken.state.epoch
        self._snapshots.begin(taken.position)
        self._judge(await write_to_redis(self._store, taken, self._summary()))
        await self._restore_index()
        if self._predictions is not None:
            await self._predictions.begin(self.state, self._position.seq)
        self._placements_end = taken.position.placements
        await self._publish(taken.position.outbox)
        now = self._clock()
        self._signs.deaf(now)
        self._worth_a_window = True
        self.counts.recoveries += 1
        log.info(
            "pool %s: epoch %d, %d jobs, %d runs, %d nodes, %d placements made good",
            self.pool,
            self.state.epoch,
            len(self.state.jobs),
            len(self.state.runs),
            len(self.state.inventory.nodes),
            len(taken.position.outbox),
        )


def _event(message: Any, source: Input) -> ev.CoreEvent:
    if isinstance(message, PoolJob):
        if message.arrival is not None:
            return ev.JobArrived(spec=codec.job_spec(message.arrival, message.traceparent))
        assert message.command is not None
        return codec.command_event(message.command, message.origin.offset)
    if source.topic.startswith("nodes"):
        return codec.node_event(message)
    return codec.run_event(message)


def _parts_of(solution: Solution, state: ClusterState) -> list[_Work]:
    """A solution as events that each fit a journal record: a placement carries its job's labels and all its nodes."""
    works: list[_Work] = []
    part: list[Assignment] = []
    weight = 0
    for assignment in solution.assignments:
        job = state.jobs.get(assignment.job_id)
        if job is None:
            continue
        more = _weight(assignment, job.spec)
        if part and weight + more > _RECORD_BYTES:
            works.append(_solved(solution, part, weight))
            part, weight = [], 0
        part.append(assignment)
        weight += more
    if part:
        works.append(_solved(solution, part, weight))
    return works


def _solved(solution: Solution, part: list[Assignment], weight: int) -> _Work:
    """Why the others were not placed is not part of the past: the queue's ranking tells it."""
    event = ev.WindowSolved(solution=msgspec.structs.replace(solution, assignments=tuple(part), unplaced={}))
    return _Work(event, weight=weight)


def _weight(assignment: Assignment, spec: JobSpec) -> int:
    workers = sum(2 * len(node_id) + 100 for node_id, _ in assignment.workers)
    return 500 + workers + sum(len(name) + 6 * len(value) for name, value in spec.labels.items())


def _chunks(works: list[_Work], events_max: int) -> Iterable[list[_Work]]:
    """Cut to what fits into one journal record."""
    chunk: list[_Work] = []
    size = 0
    for work in works:
        if chunk and (len(chunk) >= events_max or size + work.weight > _RECORD_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(work)
        size += work.weight
    if chunk:
        yield chunk
