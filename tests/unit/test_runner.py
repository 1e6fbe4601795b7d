"""The runner at its edges: a ranking that is large or does not get through, a journal record that is too large."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, TopicAuthorizationFailedError
from core_builder import Pool
from journal_topic import MemoryTopic
from sim.redis import Client, Server

from streamsched.bus import codec, journal
from streamsched.bus.app import Input
from streamsched.bus.hearing import Hearing
from streamsched.bus.messages import Joined, JournalRecord, QueueRanking, RankedJob
from streamsched.core.run_times import Said
from streamsched.errors import UserError
from streamsched.policy import by_name
from streamsched.service import runner as module
from streamsched.service.ranking import bounded
from streamsched.service.recovery import Fenced
from streamsched.service.runner import Parts, PoolRunner
from streamsched.service.settings import Settings
from streamsched.store.job_index import JobIndex
from streamsched.store.pool_store import PoolStore

SETTINGS = Settings(pools=("p",), partitions=1, ranking_every_s=0.0, timer_s=3600.0, window_s=3600.0)
JOURNAL = SETTINGS.names.journal


class FakeProducer:
    """Writes to topics in memory. `limit`: of the journal; `failing`: topics whose writes fail once sent."""

    def __init__(self) -> None:
        self.topics = {JOURNAL: MemoryTopic()}
        self.limit = 10**9
        self.failing: dict[str, KafkaError] = {}
        self.outage = SimpleNamespace(active=False)

    async def send(self, topic: str, value: bytes, *, key: bytes, partition: int, headers: Any = None) -> Any:
        if topic == JOURNAL and len(value) > self.limit:
            raise MessageSizeTooLargeError(f"{len(value)} bytes for {topic}, which takes {self.limit}")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if topic in self.failing:
            answer.set_exception(self.failing[topic])
        else:
            offset = self.topics.setdefault(topic, MemoryTopic()).write(value, key)
            answer.set_result(SimpleNamespace(offset=offset))
        return answer

    async def send_and_wait(self, topic: str, value: bytes, *, key: bytes, partition: int) -> Any:
        return await (await self.send(topic, value, key=key, partition=partition))


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> FakeProducer:
    fake = FakeProducer()
    fake.topics[JOURNAL].install(monkeypatch)

    async def no_jobs(*_: Any) -> list[str]:
        return []

    async def no_decisions(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(module, "known_jobs", no_jobs)
    monkeypatch.setattr("streamsched.service.recovery._not_on_topic", no_decisions)
    return fake


@pytest.fixture
def runner(producer: FakeProducer) -> PoolRunner:
    redis: Any = Client(Server())
    parts = Parts(
        settings=SETTINGS,
        producer=producer,  # type: ignore[arg-type]
        clock=time.time,
        ranker=by_name(SETTINGS.scheduler.policy),
        solve=pytest.fail,
        letters=pytest.fail,
        index=JobIndex(redis, ("p",), "t:"),
        hearing=lambda partition: Hearing.ALL,
    )
    return PoolRunner("p", 0, parts, PoolStore(redis, "p", "t:"))


def nodes(count: int, padding: int = 0) -> list[tuple[Input, Any]]:
    found = []
    for i in range(count):
        event = Joined(pool="p", node_id=f"n{i}", time=1.0, gpu_type="A", gpus=1, labels={"note": "x" * padding})
        found.append((Input("nodes.events", 0, i, b"p", b"?", (), 1), event))
    return found


def run(runner: PoolRunner, inputs: list[tuple[Input, Any]]) -> BaseException | None:
    """Apply the inputs; what the runner ended with."""

    async def work() -> BaseException | None:
        ended: list[BaseException | None] = []
        runner.start(lambda task: ended.append(task.exception()))
        submitted = asyncio.ensure_future(runner.submit(inputs))
        assert runner._task is not None
        await asyncio.wait([submitted, runner._task], return_when=asyncio.FIRST_COMPLETED)
        await runner.stop()
        await asyncio.wait([submitted])
        submitted.exception()
        return ended[0]

    return asyncio.run(work())


# ── a journal record that is too large ───────────────────────────────────────────────────────────────────────────────


def test_what_is_too_large_as_one_record_is_written_as_several(runner: PoolRunner, producer: FakeProducer) -> None:
    producer.limit = 5000
    assert run(runner, nodes(20, padding=500)) is None
    assert len(runner.state.inventory.nodes) == 20
    records = [codec.decode_journal(value) for _, value in producer.topics[JOURNAL].records]
    joined = [event.spec.node_id for r in records for event in r.events if hasattr(event, "spec")]
    assert joined == [f"n{i}" for i in range(20)], "each once, in order"
    assert all(len(codec.encode(r)) <= 5000 for r in records)
    assert runner._events_max == module._RECORD_EVENTS


def test_an_event_that_is_too_large_alone_ends_the_worker_with_a_line(
    runner: PoolRunner, producer: FakeProducer
) -> None:
    producer.limit = 5000
    error = run(runner, nodes(1, padding=6000))
    assert isinstance(error, UserError)
    line = str(error)
    assert line.startswith(
        "pool p: a single NodeJoined from nodes.events[0]@0 gives a journal record that is too large"
    )
    assert "\n" not in line
    records = [codec.decode_journal(value) for _, value in producer.topics[JOURNAL].records]
    assert all(journal.mark_of(record) is not None for record in records), "nothing of it was done"


# ── rankings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def ranking(limit: int) -> QueueRanking:
    job = RankedJob(
        job_id="j", rank=1, score=0.0, state="queued", reason="\N{GREEK SMALL LETTER OMEGA}" * 500, waited_s=0
    )
    return QueueRanking(
        pool="p",
        time=1.0,
        epoch=1,
        seq=1,
        policy="fcfs",
        queued=1000,
        truncated=limit < 1000,
        jobs=tuple(msgspec.structs.replace(job, rank=i) for i in range(1, min(limit, 1000) + 1)),
    )


@pytest.mark.parametrize("bytes_max", [10, 500, 5000, 50_000, 10**7])
def test_a_ranking_is_bounded_by_its_bytes(bytes_max: int) -> None:
    bound, encoded = bounded(ranking, 1000, bytes_max)
    assert codec.decode_ranking(encoded) == bound
    assert len(encoded) <= bytes_max or not bound.jobs
    if bytes_max >= 5000:
        assert len(bound.jobs) == 1000 or len(encoded) > bytes_max * 0.6
    assert bound.truncated is (len(bound.jobs) < 1000)


@pytest.fixture
def waiting(runner: PoolRunner, make_pool: Any) -> PoolRunner:
    """With a job in its queue."""
    pool: Pool = make_pool()
    pool.node("n", 1)
    pool.arrive("a", 1)
    runner.state = pool.state
    return runner


def publish(runner: PoolRunner, times: int) -> None:
    async def work() -> None:
        for _ in range(times):
            runner._ranking_pause = 0.0
            await runner._publish_ranking()
            await asyncio.sleep(0)

    asyncio.run(work())


def test_a_ranking_that_fails_on_its_way_is_warned_of_and_tried_again(
    waiting: PoolRunner, producer: FakeProducer, caplog: pytest.LogCaptureFixture
) -> None:
    topic = SETTINGS.names.rankings
    producer.failing[topic] = TopicAuthorizationFailedError(topic)
    publish(waiting, 2)
    assert [r.levelno for r in caplog.records if "ranking not published" in r.getMessage()] == [logging.WARNING] * 2
    del producer.failing[topic]
    publish(waiting, 3)
    assert len(producer.topics[topic].records) == 1, "told once, since it tells nothing new"


def test_a_ranking_tells_what_is_believed_of_run_times(waiting: PoolRunner, producer: FakeProducer) -> None:
    class Believed(Said):
        def whole_s(self, jobs: Any) -> list[float | None]:
            return [60.0 for _ in jobs]

    publish(waiting, 1)
    waiting.state.run_times, waiting._told = Believed(), None
    publish(waiting, 1)
    told = [codec.decode_ranking(value) for _, value in producer.topics[SETTINGS.names.rankings].records]
    assert [[job.run_s for job in message.jobs] for message in told] == [[None], [60.0]]


def test_a_score_that_json_cannot_hold_is_a_ranking_less(
    waiting: PoolRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wild(*_: Any) -> QueueRanking:
        first = ranking(1)
        return msgspec.structs.replace(first, jobs=(msgspec.structs.replace(first.jobs[0], score=float("nan")),))

    monkeypatch.setattr(module, "queue_ranking", wild)
    publish(waiting, 1)
    assert "ranking not published" in caplog.text


@pytest.mark.parametrize(("epoch", "unreadable", "fenced"), [(9, "?", True), (2, "?", False), (9, "", False)])
def test_a_mark_of_a_later_epoch_is_a_successor_s_even_if_we_cannot_read_it(
    runner: PoolRunner, monkeypatch: pytest.MonkeyPatch, epoch: int, unreadable: str, fenced: bool
) -> None:
    """A later version may write marks of another form. What has no epoch at all is no record of ours."""

    async def read(*_: Any) -> AsyncIterator[journal.Entry]:
        yield journal.Entry(7, JournalRecord(pool="p", epoch=epoch, seq=0, now=0.0), unreadable)

    monkeypatch.setattr(journal, "read", read)
    runner.state.epoch = 2
    with pytest.raises(Fenced, match="epoch 9") if fenced else contextlib.nullcontext():
        asyncio.run(runner._look_for_successor(7, 8))


def test_a_rule_that_remembers_is_each_pools_own(runner: PoolRunner) -> None:
    other = PoolRunner("q", 0, runner._parts, runner._store)
    assert runner._ranker is not other._ranker
