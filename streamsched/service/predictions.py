"""Run times of one pool, predicted: learns from what the pool's owner commits, answers its windows.

    committed records --> backlog --> predictor --> windows ask (`run_times`)
                                         |------> Redis now and then (`store/predictor_store.py`)

The predictor is told by one task, a few jobs at a time, so that the event loop never stands still for it; while that
task waits for a thread that writes the state down or reads a model, nothing is told. Windows ask from the loop at any
time: asking changes nothing.

Nothing here is part of the fold. A takeover reads what was kept, then learns from the jobs in the pool's state that
ended since; where nothing is kept or it is damaged, from those that the state remembers.

The predictor is no reason to stop a pool: an error of it is told once per kind and counted, and the answer is what was
said of the jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from msgspec import Struct
from redis.exceptions import RedisError

from streamsched.bus.strays import connection_errors
from streamsched.core import events as ev
from streamsched.core.changes import Changes
from streamsched.core.cluster import ClusterState
from streamsched.core.model import TERMINAL, Job, JobState
from streamsched.core.run_times import RunTimes, Said, gpus_of, ran_s
from streamsched.predict import Combination, Features, Finished, Track, features_of, finished_of, reading_of
from streamsched.predict.boosting import DamagedModel
from streamsched.predict.run_times import Predicted, as_said
from streamsched.predict.state import restored, to_bytes
from streamsched.predict.training import Training
from streamsched.routing.least_loaded import RunTimesSummary
from streamsched.store.predictor_store import DamagedPieces, Kept, PredictorStore, TooLarge

from .retry import words
from .settings import Settings

log = logging.getLogger(__name__)

KEEP_EVERY_S: Final = 300.0
_LOOK_EVERY_S: Final = 60.0
"""At drift, and at what runs."""
_TRAIN_EVERY_S: Final = 5.0
_AT_ONCE: Final = 32
"""Things told to the predictor before the loop goes on: about ten milliseconds."""
_RUNNING_MAX: Final = 1_000
"""Running jobs that are told to it as such: about twenty milliseconds."""
BACKLOG_MAX: Final = 100_000
RELEARN_MAX: Final = 20_000
"""Finished jobs that a cold start learns from, the latest."""
_STATE_MAX: Final = 1 << 28
"""Bytes of a state, unpacked."""


class _Mark(Struct, frozen=True):
    """What comes before it in the backlog is all there was up to this record."""

    seq: int
    until: float
    relearned: bool = False
    """What was believed before is to be asked anew."""


_Item = Features | Finished | str | _Mark
"""A job that was submitted, one that has ended, the id of one that ended without a run, a mark."""


class Predictions:
    """Of one pool while this worker has it. `begin` after each recovery, `after_commit`, `close`."""

    def __init__(self, pool: str, store: PredictorStore, settings: Settings, clock: Callable[[], float]) -> None:
        self._pool, self._store, self._clock = pool, store, clock
        self._predictor = Combination()
        self._told = Predicted(self._predictor, clock)
        self.counts: Counter[str] = Counter()
        """Errors by kind, and jobs that were not learned from."""
        self.run_times: RunTimes = _Guarded(self._told, self._failed)
        """Another object where all that was believed is to be asked anew."""
        self._training = _training(pool, settings)
        self._last_failure = ""
        self._state: ClusterState | None = None
        self._backlog: deque[_Item] = deque()
        self._known: set[str] = set()
        """Jobs that the predictor was told of and that are not over."""
        self._mark = _Mark(0, -math.inf)
        """How far it has come."""
        self._since: set[str] = set()
        """Jobs that were learned from since then: a record may end more than are learned from at once."""
        self._kept = self._mark
        self._drifts = False
        self._fenced = False
        now = clock()
        self._next_look, self._next_keep, self._next_training = now, now + KEEP_EVERY_S, now + _TRAIN_EVERY_S
        self._wake, self._stop = asyncio.Event(), False
        self._task: asyncio.Task[None] | None = None

    # ── from the runner ──────────────────────────────────────────────────────────────────────────────────────────────

    async def begin(self, state: ClusterState, seq: int) -> None:
        """The pool is ours, in this state. Raises RedisError or OSError where what was kept cannot be read now."""
        if self._task is None:
            with self._guarded("reading what was kept"):
                await self._restore()
            self._task = asyncio.create_task(self._run(), name=f"predictions of pool {self._pool}")
        self._state, self._fenced = state, False
        with self._guarded("catching up"):
            self._catch_up(state, seq)

    def after_commit(self, events: Iterable[ev.CoreEvent], changes: Changes, state: ClusterState, seq: int) -> None:
        """A record and its effects are safe."""
        with self._guarded("noting a record"):
            for event in events:
                if isinstance(event, ev.RunProgressed):
                    self._progressed(event, state)
            for job_id, job in changes.jobs.items():
                if job is None or job.state in TERMINAL:
                    self._gone(job_id, job)
                elif job_id not in self._known:
                    self._known.add(job_id)
                    self._backlog.append(features_of(job.spec))
            self._backlog.append(_Mark(seq, state.now))
        while len(self._backlog) > BACKLOG_MAX:
            self._drop(self._backlog.popleft())
        self._wake.set()

    def _drop(self, item: _Item) -> None:
        """One too many: what is not learned must not be remembered either."""
        if isinstance(item, _Mark):
            self._reach(item)
            return
        self.counts["not learned from: too many at once"] += 1
        if not isinstance(item, Features):
            job_id = item if isinstance(item, str) else item.features.job_id
            self._told.forget(job_id)
            self._predictor.forget(job_id)

    def summary(self) -> RunTimesSummary | None:
        """None where it cannot be told."""
        try:
            return self._summary()
        except Exception as error:
            self._failed("telling how it does", error)
            return None

    def _summary(self) -> RunTimesSummary:
        drift, trees = self._predictor.drift(), self._predictor.boosting.trees
        return RunTimesSummary(
            jobs=drift.jobs,
            coverage=drift.coverage,
            below_median=drift.below_median,
            loss=drift.loss,
            reasons=drift.reasons,
            model=trees.version if trees else 0,
            waiting=len(self._backlog),
            failures=sum(self.counts.values()),
        )

    async def close(self, limit_s: float) -> None:
        """Learn what is left and keep it, if that takes no longer than this; else the next owner learns it again."""
        self._stop = True
        self._wake.set()
        if self._task is not None and not (await asyncio.wait([self._task], timeout=limit_s))[0]:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._training is not None:
            self._training.stop()

    # ── what is noted of the pool ────────────────────────────────────────────────────────────────────────────────────

    def _catch_up(self, state: ClusterState, seq: int) -> None:
        """With a state that did not come from our commits: what ended after our mark, what waits, what is gone."""
        expected = self._predictor.expected
        ended = [job for job in _ended_after(state, self._mark.until) if job.spec.job_id not in self._since]
        alive = {job_id for job_id, job in state.jobs.items() if job.state not in TERMINAL}
        there = alive.union(job.spec.job_id for job in ended)
        self._known = alive
        self._backlog.clear()
        self._backlog.extend(job_id for job_id in expected if job_id not in there)
        for job in ended[-RELEARN_MAX:]:
            self._over(job)
        waiting = sorted((state.jobs[job_id] for job_id in alive - expected.keys()), key=_by_arrival)
        # The others are asked about when a window wants to know; what is behind in the backlog must not cost the past.
        self._backlog.extend(features_of(job.spec) for job in waiting[: BACKLOG_MAX // 4])
        cold = self._mark.until == -math.inf
        self._backlog.append(_Mark(seq, state.now, relearned=cold and bool(ended)))
        self._wake.set()

    def _gone(self, job_id: str, job: Job | None) -> None:
        if job_id not in self._known:
            # Told before (a job that has ended may change still, when another run of it ends), or it came and went.
            self._told.forget(job_id)
            return
        self._known.remove(job_id)
        if job is None:
            self._backlog.append(job_id)
        else:
            self._over(job)

    def _over(self, job: Job) -> None:
        track = self._told.tracks.get(job.spec.job_id)
        finished = _finished(job, track.steps if track is not None else 0.0)
        self._backlog.append(job.spec.job_id if finished is None else finished)

    def _progressed(self, event: ev.RunProgressed, state: ClusterState) -> None:
        """Ages are of all runs of the job, as where answers are asked for."""
        job = state.jobs.get(event.job_id)
        if job is None or event.job_id not in self._known or job.placement_id not in (None, event.placement_id):
            return
        track = self._told.tracks.setdefault(event.job_id, Track())
        track.add(reading_of(event.fraction, event.step), ran_s(job, state, state.now))

    # ── the task ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        """Whatever goes wrong, the next turn comes."""
        while not self._stop:
            with self._told_of_connections(), self._guarded("learning"):
                await self._turn()
            await asyncio.sleep(0.0)
        while self._backlog:
            with self._guarded("learning"):
                self._learn_some()
            await asyncio.sleep(0.0)
        with self._told_of_connections(), self._guarded("keeping its state"):
            await self._keep()

    @contextlib.contextmanager
    def _told_of_connections(self) -> Iterator[None]:
        try:
            with connection_errors():
                yield
        except (RedisError, OSError) as error:
            log.warning("pool %s: what the run-time predictor knows is not kept (%s)", self._pool, words(error))

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Errors of connections pass: they are no errors of ours."""
        try:
            yield
        except (RedisError, OSError):
            raise
        except Exception as error:
            self._failed(what, error)

    def _failed(self, what: str, error: Exception) -> None:
        kind = f"{what}: {type(error).__name__}"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            log.error("pool %s: run-time predictor: %s failed; told once", self._pool, what, exc_info=error)

    async def _turn(self) -> None:
        began = asyncio.get_running_loop().time()
        if self._backlog:
            self._learn_some()
            # Half of the time is for others.
            await asyncio.sleep(asyncio.get_running_loop().time() - began)
        else:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), 1.0)
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            self._tell_running()
            self._look_at_drift()
        if now >= self._next_training:
            self._next_training = now + _TRAIN_EVERY_S
            await self._train(now)
        if now >= self._next_keep:
            self._next_keep = now + KEEP_EVERY_S
            await self._keep()

    def _learn_some(self, to_mark: bool = False) -> None:
        """`to_mark`: no further than to the next mark."""
        submitted: list[Features] = []
        for _ in range(min(_AT_ONCE, len(self._backlog))):
            item = self._backlog.popleft()
            if isinstance(item, Features):
                submitted.append(item)
                continue
            self._expect(submitted)
            submitted = []
            if isinstance(item, _Mark):
                self._reach(item)
                if to_mark:
                    return
            else:
                self._end(item)
        self._expect(submitted)

    def _expect(self, submitted: list[Features]) -> None:
        if submitted:
            self._predictor.expect(submitted)
            self._told.said(as_said(self._predictor, (job.job_id for job in submitted)))

    def _end(self, item: Finished | str) -> None:
        job_id = item if isinstance(item, str) else item.features.job_id
        self._told.forget(job_id)
        if isinstance(item, str):
            self._predictor.forget(job_id)
        else:
            self._since.add(job_id)
            self._predictor.observe(item)

    def _reach(self, mark: _Mark) -> None:
        self._mark = mark
        self._since.clear()
        if mark.relearned:
            tracks = self._told.tracks
            self._told = Predicted(self._predictor, self._clock)
            self._told.tracks = tracks
            self.run_times = _Guarded(self._told, self._failed)

    def _tell_running(self) -> None:
        """Else only short jobs are known at first. In the order of the runs, so that a part of many is one of all."""
        state = self._state
        if state is None:
            return
        running = [job for job in map(state.jobs.__getitem__, self._known & state.jobs.keys()) if _runs(job)]
        running = sorted(running, key=_by_arrival)[:: max(1, math.ceil(len(running) / _RUNNING_MAX))]
        ages = [ran_s(job, state, state.now) for job in running]
        self._predictor.set_running([features_of(job.spec) for job in running], ages)

    def _look_at_drift(self) -> None:
        reasons = self._predictor.drift().reasons
        if bool(reasons) != self._drifts:
            self._drifts = bool(reasons)
            what = f"drift: {'; '.join(reasons)}" if reasons else "the drift is over"
            log.warning("pool %s: run-time predictor: %s", self._pool, what)

    async def _train(self, now: float) -> None:
        """In a thread: a model is trained in a process of its own, but its jobs are written and it is read here."""
        training, boosting = self._training, self._predictor.boosting
        if training is None:
            return
        try:
            if await asyncio.to_thread(training.poll, boosting, now) and boosting.trees is not None:
                log.info("pool %s: run-time predictor: model %d is used", self._pool, boosting.trees.version)
        except OSError as error:
            self._failed(f"training in {training.folder}", error)
        if training.last_failure != self._last_failure:
            self._last_failure = training.last_failure
            log.warning("pool %s: %s", self._pool, training.last_failure)

    # ── across restarts ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _restore(self) -> None:
        """What the former owner kept, and the current model of the folder."""
        kept, why = None, ""
        try:
            kept = await self._store.load()
        except DamagedPieces as error:
            why = f"run-time predictor: what is kept of it is damaged ({error}); it learns anew"
        if kept is not None:
            self._predictor, why = await asyncio.to_thread(_unpacked, kept.data)
            if not why:
                self._mark = self._kept = _Mark(kept.seq, kept.until)
        if why:
            log.warning("pool %s: %s", self._pool, why)
        self._told = Predicted(self._predictor, self._clock)
        self._told.said(as_said(self._predictor, self._predictor.expected))
        self.run_times = _Guarded(self._told, self._failed)
        if self._training is not None:
            try:
                await asyncio.to_thread(self._training.resume, self._predictor.boosting, self._clock())
            except DamagedModel as error:
                log.warning("pool %s: %s", self._pool, error)

    async def _keep(self) -> None:
        """Nothing is told meanwhile (this is the task that does), so the thread sees one state of it."""
        while self._since and self._backlog:  # else they would be learned from again by whoever reads it
            self._learn_some(to_mark=True)
            await asyncio.sleep(0.0)
        mark = self._mark
        if mark.seq == self._kept.seq or self._state is None or self._fenced:
            return
        data = await asyncio.to_thread(_packed, self._predictor)
        try:
            ours = await self._store.write(self._state.epoch, Kept(data=data, seq=mark.seq, until=mark.until))
        except TooLarge as error:
            self._failed(f"keeping its state ({error})", error)
            return
        self._fenced = not ours  # until the next recovery, if there is one
        if ours:
            self._kept = mark


def _packed(predictor: Combination) -> bytes:
    return zlib.compress(to_bytes(predictor), 1)


def _unpacked(data: bytes) -> tuple[Combination, str]:
    """Or a new one and the reason."""
    unpacking = zlib.decompressobj()
    try:
        state = unpacking.decompress(data, _STATE_MAX)
    except zlib.error as error:
        return Combination(), f"run-time predictor: its state cannot be unpacked ({error}); it learns anew"
    if not state:
        return Combination(), "run-time predictor: its state is empty; it learns anew"
    return restored(state)


def _training(pool: str, settings: Settings) -> Training | None:
    if not settings.predict_dir:
        return None
    if importlib.util.find_spec("sklearn") is None:
        log.warning("pool %s: predict_dir has no effect without scikit-learn: install streamsched[predict]", pool)
        return None
    folder = Path(settings.predict_dir) / quote(pool, safe="")
    return Training(folder, settings.train_every_jobs, settings.train_every_s)


def _finished(job: Job, steps: float) -> Finished | None:
    """None for a job that has not run, as far as is known.

    What counts as its run time is that of all its runs, as in `core.run_times.ran_s`: with what a stopped or lost run
    did and lost, without queues between them. Of a share by memory that cannot be told: its GPU-seconds are of what it
    took of the device, which its request does not say.
    """
    if job.attained_gpu_s <= 0 or job.spec.gpu_memory_mib or job.ended_at is None:
        return None
    return finished_of(job, job.attained_gpu_s / gpus_of(job), job.ended_at, steps)


def _ended_after(state: ClusterState, until: float) -> list[Job]:
    """In the order of their ends. Records have times of their own, each later than the one before."""
    ended = (state.jobs[job_id] for job_id, at in state.index.finished.items() if at > until)
    return sorted(ended, key=lambda job: (job.ended_at or 0.0, job.seq))


def _runs(job: Job) -> bool:
    return job.state is JobState.RUNNING


def _by_arrival(job: Job) -> int:
    return job.seq


class _Guarded(RunTimes):
    """Answers by the predictor; where that fails, by what was said."""

    def __init__(self, told: RunTimes, failed: Callable[[str, Exception], None]) -> None:
        self._told, self._failed, self._said = told, failed, Said()

    def whole_s(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        return self._first(lambda of: of.whole_s(jobs))

    def spread(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        return self._first(lambda of: of.spread(jobs))

    def total_s(self, jobs: Sequence[Job], ran_s: Sequence[float]) -> Sequence[float | None]:
        return self._first(lambda of: of.total_s(jobs, ran_s))

    def gittins_s(self, jobs: Sequence[Job], ran_s: Sequence[float]) -> Sequence[float | None]:
        return self._first(lambda of: of.gittins_s(jobs, ran_s))

    def _first(self, ask: Callable[[RunTimes], Sequence[float | None]]) -> Sequence[float | None]:
        try:
            answers = ask(self._told)
            bad = [place for place, answer in enumerate(answers) if answer is None or not math.isfinite(answer)]
        except Exception as error:
            self._failed("answering", error)
            return ask(self._said)
        if not bad:
            return answers
        self._failed("answering", ValueError(f"{len(bad)} of {len(answers)} answers are no numbers"))
        said, mixed = ask(self._said), list(answers)
        for place in bad:
            mixed[place] = said[place]
        return mixed
