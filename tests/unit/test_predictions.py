"""Run times of a live pool: what is learned of its commits, what is kept of that, and what damage does."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_builder import Pool

from streamsched.core import events as ev
from streamsched.core.model import Job, JobSpec, JobState
from streamsched.predict import Combination
from streamsched.predict.boosting import Boosting
from streamsched.predict.run_times import Whole
from streamsched.predict.state import from_bytes
from streamsched.routing.least_loaded import RunTimesSummary
from streamsched.service import predictions as module
from streamsched.service.predictions import Predictions
from streamsched.service.settings import Settings
from streamsched.store.predictor_store import DamagedPieces, Kept


class Store:
    """Of one pool, as `PredictorStore`."""

    def __init__(self) -> None:
        self.kept: Kept | None = None
        self.epoch = 0
        self.damage = ""

    async def load(self) -> Kept | None:
        if self.damage:
            raise DamagedPieces(self.damage)
        return self.kept

    async def write(self, epoch: int, kept: Kept) -> bool:
        if epoch != self.epoch:
            return False
        self.kept = kept
        return True


class Live:
    """A pool whose records are told to its predictions, each when it is safe."""

    def __init__(self, pool: Pool, store: Store, settings: Settings | None = None) -> None:
        self.pool, self.store = pool, store
        self.predictions = self.another(settings)
        self.seq = 0
        self._events: list[ev.CoreEvent] = []
        handle = pool.state.handle

        def noting(event: ev.CoreEvent, now: float) -> Any:
            self._events.append(event)
            return handle(event, now)

        pool.state.handle = noting  # type: ignore[method-assign]

    def another(self, settings: Settings | None = None) -> Predictions:
        settings = settings or Settings(run_times="predicted")
        return Predictions("p", self.store, settings, lambda: self.pool.now)  # type: ignore[arg-type]

    def commit(self) -> None:
        self.seq += 1
        self.predictions.after_commit(self._events, self.pool.state.take_changes(), self.pool.state, self.seq)
        self._events = []

    def job(self, name: str, run_s: float, label: str, end: type[Any] = ev.RunCompleted, **more: Any) -> None:
        """Comes, runs for so long alone, ends."""
        self.pool.arrive(name, 8, labels={"name": label}, **more)
        self.commit()
        self.pool.running(name)
        self.commit()
        self.pool.later(run_s)
        self.pool.report(end, name)
        self.commit()

    def learn(self, count: int = 40) -> None:
        for n in range(count):
            self.job(f"short {n}", 60.0 + n % 5, "short")
            self.job(f"long {n}", 7_000.0 + n % 5, "long")


def waiting(label: str) -> Job:
    spec = JobSpec(job_id=f"new {label}", submitted_at=0.0, gpus_per_worker=8, labels={"name": label})
    return Job(spec=spec, seq=10**6, state=JobState.QUEUED, queued_at=0.0)


def told(predictions: Predictions) -> RunTimesSummary:
    summary = predictions.summary()
    assert summary is not None
    return summary


async def idle(predictions: Predictions) -> None:
    """Until all that was told has been learned from."""
    for _ in range(100_000):
        if not told(predictions).waiting:
            return
        await asyncio.sleep(0.0)
    raise AssertionError("there is a backlog still")


def asked(predictions: Predictions) -> tuple[float, float]:
    short, long = predictions.run_times.whole_s([waiting("short"), waiting("long")])
    assert short is not None
    assert long is not None
    return short, long


@pytest.fixture
def live(make_pool: Callable[..., Pool]) -> Live:
    pool = make_pool(finished_keep_s=1e9, lease_s=1e6)
    pool.node("n0", 8)
    return Live(pool, Store())


def test_names_are_learned_of_what_was_committed(live: Live) -> None:
    async def work() -> None:
        await live.predictions.begin(live.pool.state, 0)
        live.learn()
        await idle(live.predictions)
        short, long = asked(live.predictions)
        assert short == pytest.approx(62, rel=0.2)
        assert long == pytest.approx(7_002, rel=0.2)
        [left] = live.predictions.run_times.remaining_s([waiting("long")], [6_000.0])
        assert left == pytest.approx(1_002, rel=0.5)
        summary = told(live.predictions)
        assert (summary.jobs, summary.failures, summary.model) == (80, 0, 0)
        assert live.predictions._predictor.expected == {}
        await live.predictions.close(5.0)

    asyncio.run(work())


def test_what_is_learned_is_that_of_all_runs_of_a_job(live: Live) -> None:
    """300 s until it was given back, 500 s more, and not the 1,000 s in the queue between."""

    async def work() -> None:
        observed: list[Any] = []
        await live.predictions.begin(live.pool.state, 0)
        live.predictions._predictor.observe = observed.append  # type: ignore[method-assign]
        live.job("a", 300.0, "x", end=ev.RunPreempted)
        live.pool.later(1_000.0)
        live.pool.running("a")
        live.pool.report(ev.RunProgressed, "a", step=70)
        live.pool.later(500.0)
        live.pool.report(ev.RunProgressed, "a", step=100)
        live.pool.report(ev.RunFailed, "a", reason="broke", exit_code=1)
        live.commit()
        live.commit()
        live.pool.arrive("never ran", 8)
        live.commit()
        live.pool.command(ev.CancelRequested, "never ran")
        live.commit()
        live.pool.arrive("by memory", 1, gpu_memory_mib=1)
        live.commit()
        live.pool.command(ev.CancelRequested, "by memory")
        live.commit()
        await idle(live.predictions)
        [one] = observed
        assert (one.features.job_id, one.run_s, one.ending, one.steps) == ("a", 800.0, "failed", 100.0)
        assert list(live.predictions._predictor.expected) == ["a"], "of the others nothing stays"
        await live.predictions.close(5.0)

    asyncio.run(work())


def test_a_successor_goes_on_from_what_was_kept_and_what_ended_since(live: Live) -> None:
    async def work() -> None:
        live.store.epoch = live.pool.state.epoch
        await live.predictions.begin(live.pool.state, 0)
        live.learn(10)
        live.pool.arrive("waits", 8, labels={"name": "long"})
        live.pool.command(ev.HoldRequested, "waits")
        live.commit()
        await live.predictions.close(5.0)
        kept = live.store.kept
        assert kept is not None
        assert (kept.seq, kept.until) == (live.seq, live.pool.state.now)
        said = live.predictions.run_times.whole_s([live.pool.job("waits")])
        live.pool.later(5.0)
        live.job("unseen", 60.0, "short")
        successor = live.another()
        await successor.begin(live.pool.state, live.seq)
        await idle(successor)
        assert successor._predictor.observed == 21
        assert list(successor._predictor.expected) == ["waits"]
        assert successor.run_times.whole_s([live.pool.job("waits")]) == pytest.approx(said, rel=1e-3)
        short, long = asked(successor)
        assert short < 200 < long
        await successor.begin(live.pool.state, live.seq)
        await idle(successor)
        assert successor._predictor.observed == 21, "a second recovery of the same process tells nothing twice"
        await successor.close(5.0)

    asyncio.run(work())


@pytest.mark.parametrize("damage", ["nothing", "pieces", "bytes", "state"])
def test_without_what_was_kept_it_learns_from_the_jobs_that_are_remembered(
    live: Live, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        live.learn(10)
        live.pool.arrive("waits", 8, labels={"name": "long"})
        live.pool.state.take_changes()
        live.store.damage = "3 bytes are there of 4" if damage == "pieces" else ""
        if damage in ("bytes", "state"):
            data = b"no zlib" if damage == "bytes" else module.zlib.compress(b"no state")
            live.store.kept = Kept(data=data, seq=7, until=1e12)
        successor = live.another()
        await successor.begin(live.pool.state, live.seq)
        before = successor.run_times
        before.whole_s([live.pool.job("waits")])
        await idle(successor)
        assert successor._predictor.observed == 20
        assert successor.run_times is not before, "so that the queue is ranked anew"
        [whole] = successor.run_times.whole_s([live.pool.job("waits")])
        assert whole is not None
        assert whole > 1_000
        await successor.close(5.0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (damage != "nothing")
    assert all("run-time predictor" in line for line in lines)


def test_whoever_has_lost_the_pool_keeps_nothing(live: Live) -> None:
    async def work() -> None:
        live.store.epoch = live.pool.state.epoch + 1
        await live.predictions.begin(live.pool.state, 0)
        live.learn(1)
        await live.predictions.close(5.0)
        assert live.store.kept is None

    asyncio.run(work())


def test_it_is_kept_now_and_then(live: Live) -> None:
    async def work() -> None:
        live.store.epoch = live.pool.state.epoch
        await live.predictions.begin(live.pool.state, 0)
        live.learn(1)  # longer than KEEP_EVERY_S
        for _ in range(1_000):
            await asyncio.sleep(0.001)
            if live.store.kept is not None:
                break
        assert live.store.kept is not None
        found = from_bytes(module.zlib.decompress(live.store.kept.data))
        assert found.observed <= 2
        live.predictions._task.cancel()  # type: ignore[union-attr]

    asyncio.run(work())


def test_an_error_of_the_predictor_is_told_once_and_what_was_said_is_the_answer(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("no")

    async def work() -> None:
        await live.predictions.begin(live.pool.state, 0)
        live.predictions._predictor.times = broken  # type: ignore[method-assign]
        live.predictions._predictor.observe = broken  # type: ignore[method-assign]
        live.pool.arrive("a", 8, estimate_s=77.0)
        live.pool.arrive("b", 8)
        jobs = [live.pool.job("a"), live.pool.job("b")]
        for _ in range(3):
            assert live.predictions.run_times.whole_s(jobs) == [77.0, None]
            assert live.predictions.run_times.remaining_s(jobs, [70.0, 0.0]) == [7.0, None]
        for name in ("a", "b"):
            live.pool.command(ev.CancelRequested, name)
        live.learn(2)
        await idle(live.predictions)
        assert live.predictions.counts == {"answering: ZeroDivisionError": 6, "learning: ZeroDivisionError": 4}
        assert told(live.predictions).failures == 10
        await live.predictions.close(5.0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    assert len([record for record in caplog.records if "told once" in record.getMessage()]) == 2


def test_an_answer_that_is_no_number_is_none(live: Live) -> None:
    async def work() -> None:
        await live.predictions.begin(live.pool.state, 0)
        live.predictions._told.said({"a": Whole(math.nan, math.nan)})
        live.pool.arrive("a", 8, estimate_s=77.0)
        assert live.predictions.run_times.whole_s([live.pool.job("a")]) == [77.0]
        await live.predictions.close(5.0)

    asyncio.run(work())


def test_drift_is_told_when_it_begins_and_when_it_ends(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    predictor = live.predictions._predictor
    with caplog.at_level(logging.WARNING):
        for covered in (0.9, 0.5, 0.5, 0.9, 0.9):
            predictor.watched.jobs, predictor.watched.covered = 1_000, covered
            live.predictions._look_at_drift()
    said = [record.getMessage().split("run-time predictor: ")[1] for record in caplog.records]
    assert said == ["drift: the 90 % interval covers 50 %", "the drift is over"]


def test_what_runs_is_told_as_such(live: Live) -> None:
    async def work() -> None:
        await live.predictions.begin(live.pool.state, 0)
        live.learn(5)
        live.pool.arrive("runs", 8, labels={"name": "short"})
        live.commit()
        live.pool.running("runs")
        live.commit()
        await idle(live.predictions)
        _, before = asked(live.predictions)
        live.pool.later(5_000.0)
        heard: list[Any] = []
        live.predictions._predictor.set_running = lambda *told: heard.append(told)  # type: ignore[method-assign]
        live.predictions._tell_running()
        [(jobs, ages)] = heard
        assert [job.job_id for job in jobs] == ["runs"]
        assert ages == [live.pool.state.now - live.pool.state.runs[live.pool.job("runs").placement_id].started_at]
        assert before > 0
        await live.predictions.close(5.0)

    asyncio.run(work())


def test_too_much_at_once_is_dropped_and_counted(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG_MAX", 10)
    for n in range(12):
        live.pool.arrive(f"j{n}", 8)
    live.commit()
    assert told(live.predictions).waiting == 10
    assert told(live.predictions).failures == 3


def test_a_model_of_the_folder_is_used_and_a_damaged_one_is_told(
    live: Live, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("sklearn")
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "current.json").write_text("{")

    async def work() -> None:
        predictions = live.another(Settings(run_times="predicted", predict_dir=str(tmp_path)))
        await predictions.begin(live.pool.state, 0)
        assert told(predictions).model == 0
        assert isinstance(predictions._predictor, Combination)
        await predictions.close(5.0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    assert ["no usable current.json" in record.getMessage() for record in caplog.records] == [True]


class Trainer:
    """Fails twice for one reason, then has a model."""

    folder = Path("folder")
    last_failure = ""
    polls = 0

    def poll(self, boosting: Boosting, now: float) -> bool:
        self.polls += 1
        self.last_failure = "training of run times: no; the model before it stays"
        if self.polls == 4:
            raise PermissionError("no")
        if self.polls == 3:
            boosting.trees = SimpleNamespace(version=7)  # type: ignore[assignment]
        return self.polls == 3


def test_a_model_is_swapped_in_and_what_fails_is_told_once(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    live.predictions._training = Trainer()  # type: ignore[assignment]

    async def work() -> None:
        for _ in range(4):
            await live.predictions._train(live.pool.now)

    with caplog.at_level(logging.INFO):
        asyncio.run(work())
    said = [record.getMessage().removeprefix("pool p: ") for record in caplog.records]
    assert said == [
        "training of run times: no; the model before it stays",
        "run-time predictor: model 7 is used",
        "run-time predictor: training in folder failed; told once",
    ]
    assert told(live.predictions).model == 7


def test_each_job_is_learned_from_once_also_where_a_record_ends_many(make_pool: Callable[..., Pool]) -> None:
    async def work() -> None:
        live = Live(make_pool(finished_keep_s=1e9, lease_s=1e6), Store())
        live.pool.nodes(5, 8)
        live.store.epoch = live.pool.state.epoch
        predictions = live.predictions
        predictions._catch_up(live.pool.state, 0)
        predictions._state = live.pool.state
        names = [f"m{number}" for number in range(40)]
        for name in names:
            live.pool.arrive(name, 1, labels={"name": "m"})
        live.pool.running(*names)
        live.commit()
        live.pool.later(100)
        for name in names:
            live.pool.report(ev.RunCompleted, name)
        live.commit()
        while predictions._predictor.observed == 0:
            predictions._learn_some()
        assert predictions._predictor.observed < 40
        await predictions._keep()
        successor = live.another()
        await successor.begin(live.pool.state, live.seq)
        await idle(successor)
        assert successor._predictor.observed == 40
        await successor.close(5.0)

    asyncio.run(work())


def test_what_is_too_much_to_learn_is_not_remembered_either(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG_MAX", 5)
    predictions = live.predictions
    predictions._catch_up(live.pool.state, 0)
    names = [f"m{number}" for number in range(8)]
    for name in names:
        live.pool.arrive(name, 1)
        live.commit()
        live.pool.running(name)
        live.commit()
        while predictions._backlog:
            predictions._learn_some()
    predictions.run_times.total_s([live.pool.job(name) for name in names], [1.0] * 8)
    for name in names:
        live.pool.report(ev.RunCompleted, name)
    live.commit()
    while predictions._backlog:
        predictions._learn_some()
    assert not predictions._told._whole
    assert not predictions._predictor.expected
    assert told(predictions).failures > 0


def test_a_bad_answer_of_one_job_is_no_bad_answer_of_all(live: Live) -> None:
    async def work() -> None:
        await live.predictions.begin(live.pool.state, 0)
        live.learn(5)
        await idle(live.predictions)
        live.predictions._told.said({"bad": Whole(math.nan, math.nan)})
        live.pool.arrive("bad", 8, estimate_s=77.0)
        live.pool.arrive("good", 8, labels={"name": "long"})
        bad, good = live.predictions.run_times.whole_s([live.pool.job("bad"), live.pool.job("good")])
        assert bad == 77.0
        assert good is not None
        await live.predictions.close(5.0)

    asyncio.run(work())
