"""The router over a fake Redis and a Kafka that only keeps what it is given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiokafka.errors import KafkaConnectionError
from sim.redis import Client, Server

from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.bus.app import Input
from streamsched.bus.codec import Refused
from streamsched.bus.topics import partition_of
from streamsched.routing.least_loaded import NodeKind, PoolSummary
from streamsched.service.early_commands import EarlyCommands
from streamsched.service.letters import DeadLetters
from streamsched.service.router import Router
from streamsched.service.settings import Settings
from streamsched.store.job_index import JobIndex

SETTINGS = Settings(pools=("p", "q"), early_command_s=0.5)


class Kafka:
    """Acknowledges a moment later; `at_once` is how many writes were under way at one time at most."""

    def __init__(self) -> None:
        self.written: list[tuple[str, bytes]] = []
        self.at_once = self.failures = self.cancelled = 0
        self.before_ack: Callable[[], Any] = lambda: None
        self._under_way = 0

    async def send(self, topic: str, value: bytes, **_: Any) -> asyncio.Future[None]:
        self._under_way += 1
        self.at_once = max(self.at_once, self._under_way)
        return asyncio.ensure_future(self._write(topic, value))

    async def _write(self, topic: str, value: bytes) -> None:
        await asyncio.sleep(0.01)
        self._under_way -= 1
        if self.cancelled:
            self.cancelled -= 1
            raise asyncio.CancelledError
        if self.failures:
            self.failures -= 1
            raise KafkaConnectionError("away")
        self.written.append((topic, value))
        self.before_ack()

    def letters(self) -> list[m.DeadLetter]:
        return [codec.decode_dead_letter(value) for topic, value in self.written if topic == "dead.letters"]

    def routed(self) -> list[m.PoolJob]:
        return [codec.decode_pool_job(value) for topic, value in self.written if topic == "pool.jobs"]


class Bench:
    """A router with all it needs."""

    def __init__(self) -> None:
        self.server = Server()
        self.kafka: Any = Kafka()
        redis: Any = Client(self.server)
        self.index = JobIndex(redis, SETTINGS.pools, SETTINGS.key_prefix)
        letters = DeadLetters(SETTINGS, self.kafka, lambda: 1.0)  # type: ignore[arg-type]
        self.letters = letters
        self.router = Router(SETTINGS, redis, self.index, self.kafka, letters)

    async def index_is_whole(self) -> None:
        for pool in SETTINGS.pools:
            await self.index.restore(pool, [])

    def summary(self, pool: str, value: bytes) -> None:
        self.server.data.hashes[f"{SETTINGS.key_prefix}{{{pool}}}:meta".encode()][b"summary"] = value


def run(work: Callable[[Bench], Awaitable[None]]) -> None:
    async def on_a_bench() -> None:
        bench = Bench()
        await bench.index_is_whole()
        await work(bench)

    asyncio.run(on_a_bench())


def arrival(job_id: str, offset: int = 0, **fields: Any) -> Input:
    job = m.JobArrival(job_id=job_id, submitted_at=1.0, gpus_per_worker=1, **fields)
    return Input("jobs.arrivals", 0, offset, job_id.encode(), codec.encode(job))


def cancel(job_id: str, offset: int = 0, partition: int | None = None) -> Input:
    at = partition_of(job_id, SETTINGS.partitions) if partition is None else partition
    return Input(
        "jobs.commands", at, offset, job_id.encode(), codec.encode(m.Cancel(job_id=job_id, time=float(offset)))
    )


def test_a_command_by_another_partition_than_its_keys_is_refused() -> None:
    async def work(bench: Bench) -> None:
        await bench.router.handle([arrival("j", pool="p")])
        right = partition_of("j", SETTINGS.partitions)
        for partition in range(SETTINGS.partitions):
            assert await bench.router.handle([cancel("j", partition, partition)]) == {}
        letters = bench.kafka.letters()
        assert {letter.code for letter in letters} == {"wrong-partition"}
        assert {letter.origin.partition for letter in letters} == set(range(SETTINGS.partitions)) - {right}
        assert f"belong into partition {right}, this came by" in letters[0].detail
        assert [job.origin.partition for job in bench.kafka.routed() if job.command] == [right]

    run(work)


def test_a_summary_that_cannot_be_read_is_that_of_a_pool_that_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def work(bench: Bench) -> None:
        kinds = (NodeKind("A", 8, 0, 0, 1),)
        bench.summary("q", msgspec.json.encode(PoolSummary(gpus={"A": 8}, kinds=kinds)))
        for value in (b"{", b"\xff", b'{"gpus": []}', b""):
            bench.summary("p", value)
            bench.router._summaries_at = -1e9
            await bench.router.handle([arrival(f"j{value!r}".translate(_ONLY_NAMES))])
        assert {job.pool for job in bench.kafka.routed()} == {"q"}
        assert len(bench.kafka.routed()) == 4

    with caplog.at_level(logging.WARNING):
        run(work)
    assert [r.getMessage()[:50] for r in caplog.records] == ["pool p: its summary in Redis cannot be read (Input"]


_ONLY_NAMES = {code: "x" for code in range(128) if not chr(code).isalnum()}


def test_a_job_that_the_index_has_in_a_pool_not_here_is_refused() -> None:
    async def work(bench: Bench) -> None:
        bench.server.data.hashes[bench.index._jobs.encode()][b"j"] = b"gone-pool"
        await bench.router.handle([arrival("j"), cancel("j")])
        assert [letter.code for letter in bench.kafka.letters()] == ["unknown-pool"] * 2
        assert "the job index has job j in pool gone-pool" in bench.kafka.letters()[0].detail
        assert bench.kafka.routed() == []

    run(work)


def test_letters_of_a_batch_are_written_together_and_all_of_them() -> None:
    async def work(bench: Bench) -> None:
        bench.kafka.failures = 3
        nonsense = [Input("jobs.arrivals", 0, offset, b"k", b"{") for offset in range(700)]
        await bench.router.handle(nonsense)
        assert bench.kafka.at_once == 500
        assert {letter.origin.offset for letter in bench.kafka.letters()} == set(range(700))

    run(work)


def test_large_letters_are_not_all_in_memory_at_one_time() -> None:
    async def work(bench: Bench) -> None:
        large = Input("jobs.arrivals", 0, 1, b"k", b"x" * 5_000_000)
        await bench.letters.write((Refused("too-large", "x"), large) for _ in range(4))
        assert bench.kafka.at_once == 1
        assert len(bench.kafka.letters()) == 4

    run(work)


def test_an_arrival_under_way_while_redis_comes_back_from_an_old_copy_is_not_lost_to_the_index() -> None:
    """Its pool has written its jobs anew before the arrival had reached it."""

    async def work(bench: Bench) -> None:
        copy = bench.server.data.copy()

        def restart() -> None:
            bench.kafka.before_ack = lambda: None
            bench.server.replace(copy)

        bench.kafka.before_ack = restart
        routing = asyncio.ensure_future(bench.router.handle([arrival("j", pool="p")]))
        await asyncio.sleep(0.2)
        assert not routing.done(), "the index is not whole"
        await bench.index_is_whole()
        await routing
        assert await bench.index.find(["j"]) == ["p"]

    run(work)


def test_an_index_from_an_old_copy_gives_no_job_to_a_second_pool() -> None:
    async def work(bench: Bench) -> None:
        copy = bench.server.data.copy()
        await bench.router.handle([arrival("j")])
        [first] = bench.kafka.routed()
        bench.server.replace(copy)
        other = "q" if first.pool == "p" else "p"
        bench.summary(other, msgspec.json.encode(PoolSummary(gpus={"A": 8}, kinds=(NodeKind("A", 8, 0, 0, 1),))))
        again = asyncio.ensure_future(bench.router.handle([arrival("j", 1)]))
        await asyncio.sleep(0.2)
        assert not again.done(), "until all pools have said what they have"
        await bench.index.restore(other, [])
        await bench.index.restore(first.pool, ["j"])
        await again
        assert [job.pool for job in bench.kafka.routed()] == [first.pool] * 2

    run(work)


# ── early commands ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_early_commands_share_one_look() -> None:
    async def work(bench: Bench) -> None:
        looks: list[int] = []
        find = bench.index.find

        async def counted(job_ids: Any) -> Any:
            looks.append(len(job_ids))
            return await find(job_ids)

        bench.index.find = counted  # type: ignore[method-assign]
        waiting = await bench.router.handle([cancel(f"j{n}", n) for n in range(200)])
        assert len(waiting) == 200
        assert await bench.router.handle([cancel("j0", 500)]) != {}
        await asyncio.sleep(0.3)
        await bench.router.handle([arrival(f"j{n}", pool="p") for n in range(100)])
        await asyncio.gather(*(done for done in waiting.values() if done is not None))
        assert len(looks) <= 8, "two batches and a look every 0.2 s"
        commands = [job.command.job_id for job in bench.kafka.routed() if job.command is not None]
        assert sorted(commands) == sorted([*(f"j{n}" for n in range(100)), "j0"])
        times = [job.command.time for job in bench.kafka.routed() if job.command and job.command.job_id == "j0"]
        assert times == [0.0, 500.0], "in their order"
        assert len(bench.kafka.letters()) == 100
        assert {letter.code for letter in bench.kafka.letters()} == {"unknown-job"}
        assert "j150" not in bench.router._early

    run(work)


def early(find: Any, sent: list[Any], refused: list[Any]) -> EarlyCommands:
    async def whole() -> bool:
        return True

    async def send(commands: Any) -> None:
        sent.extend(commands)

    async def refuse(commands: Any) -> None:
        refused.extend(commands)

    return EarlyCommands(0.05, find, whole, send, refuse)


def test_arrivals_do_not_wait_for_early_commands_however_many(caplog: pytest.LogCaptureFixture) -> None:
    async def work(bench: Bench) -> None:
        asked: list[int] = []
        ask = bench.index._do

        async def counted(step: str, *args: Any, **own: Any) -> Any:
            asked.append(len(args))
            return await ask(step, *args, **own)

        bench.index._do = counted  # type: ignore[method-assign]
        bench.router._early._wait_s = 5.0  # also on a busy machine all have been asked for by then
        waiting: list[Any] = []
        for start in range(0, 12_000, 1000):
            later = await bench.router.handle([cancel(f"j{n}", n) for n in range(start, start + 1000)])
            waiting += later.values()
        await asyncio.wait_for(bench.router.handle([arrival("j5", pool="p"), arrival("other", pool="p")]), 4.0)
        assert await asyncio.gather(*waiting) == [True] * 12_000
        assert [job.command.job_id for job in bench.kafka.routed() if job.command] == ["j5"]
        assert len(bench.kafka.letters()) == 11_999
        assert max(asked) <= 5000, "no call keeps Redis from others for long"

    with caplog.at_level(logging.ERROR):
        run(work)


def test_early_commands_from_before_a_rebalance_are_given_back_and_wait_once() -> None:
    async def work() -> None:
        async def nothing(job_ids: Any) -> list[None]:
            return [None] * len(job_ids)

        refused: list[Any] = []
        commands = early(nothing, [], refused)
        rounds = [
            [
                commands.add(
                    msgspec.structs.replace(cancel(name), generation=generation), m.Cancel(job_id=name, time=1.0)
                )
                for name in ("a", "a", "b")
            ]
            for generation in (1, 2, 3)
        ]
        assert [await done for early_round in rounds for done in early_round] == [False] * 6 + [True] * 3
        assert len(refused) == 3
        assert "a" not in commands

    asyncio.run(work())


@pytest.mark.parametrize("stray", [False, True])
def test_an_error_of_the_look_and_a_stray_cancellation_are_told_to_all_that_wait(stray: bool) -> None:
    async def work() -> None:
        async def broken(job_ids: Any) -> list[None]:
            raise asyncio.CancelledError if stray else ValueError("broken")

        commands = early(broken, [], [])
        waiting = [commands.add(cancel(name), m.Cancel(job_id=name, time=1.0)) for name in ("a", "b")]
        answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 2.0)
        assert [type(answer) for answer in answers] == [RuntimeError if stray else ValueError] * 2

    asyncio.run(work())


# ── connections that close ───────────────────────────────────────────────────────────────────────────────────────────


def test_what_clients_cancel_as_a_connection_closes_is_tried_again() -> None:
    async def work(bench: Bench) -> None:
        bench.kafka.cancelled = 2  # a write of an arrival, a write of a letter
        claim, whole = bench.index.claim, bench.index.whole
        answers: list[Any] = [asyncio.CancelledError(), asyncio.CancelledError()]

        async def lost() -> None:
            if answers:
                raise answers.pop()

        async def claim_lost(wishes: Any) -> Any:
            await lost()
            return await claim(wishes)

        async def whole_lost() -> bool:
            await lost()
            return await whole()

        bench.index.claim, bench.index.whole = claim_lost, whole_lost  # type: ignore[method-assign]
        nonsense = Input("jobs.arrivals", 0, 9, b"k", b"{")
        later = await bench.router.handle([arrival("j", pool="p"), nonsense, cancel("k")])
        assert await asyncio.wait_for(asyncio.gather(*later.values()), 5.0) == [True]  # type: ignore[arg-type]
        assert [job.arrival.job_id for job in bench.kafka.routed() if job.arrival] == ["j"]
        assert sorted(letter.code for letter in bench.kafka.letters()) == ["malformed", "unknown-job"]
        assert (bench.kafka.cancelled, answers) == (0, [])

    run(work)
