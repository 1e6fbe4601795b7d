"""A pool's state and the job index on a real Redis: what is written is what is loaded, and only by whom it may be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import pytest
from redis.asyncio import Redis

from streamsched.core import events as ev
from streamsched.core.cluster import Changes, ClusterState
from streamsched.core.instructions import SolveWindow
from streamsched.core.model import JobSpec, NodeSpec
from streamsched.core.problem import Assignment, Solution, SolveStatus
from streamsched.policy.rules import FirstComeFirstServed
from streamsched.store import pool_store
from streamsched.store.client import connect
from streamsched.store.connection import RedisConnection
from streamsched.store.job_index import GONE_S, JobIndex
from streamsched.store.pool_store import Outcome, PoolStore, Position, Unreadable
from streamsched.store.telemetry import TelemetryStore

pytestmark = pytest.mark.integration

T = TypeVar("T")


@pytest.fixture
def run(redis_url: str) -> Callable[[Callable[[Redis], Awaitable[T]]], T]:
    def with_client(work: Callable[[Redis], Awaitable[T]]) -> T:
        async def connected() -> T:
            client = connect(RedisConnection(redis_url))
            try:
                return await work(client)
            finally:
                await client.aclose()

        return asyncio.run(connected())

    return with_client


class Scenario:
    """A pool that grows by one batch of events after the other; each gives what changed."""

    def __init__(self) -> None:
        self.state = ClusterState("p", ranker=FirstComeFirstServed())
        self.seq = 0

    def step(self, *events: ev.CoreEvent) -> tuple[Position, Changes]:
        self.seq += 1
        for event in events:
            for instruction in self.state.handle(event, 1000.0 + self.seq):
                if isinstance(instruction, SolveWindow):
                    self.place_first(instruction)
        position = Position(seq=self.seq, journal=10 * self.seq, next_offsets={"pool.jobs:0": self.seq})
        return position, self.state.take_changes()

    def place_first(self, ask: SolveWindow) -> None:
        candidate = ask.problem.candidates[0]
        assignment = Assignment(job_id=candidate.job_id, attempt=candidate.attempt, workers=(("n", 1),))
        solution = Solution(window=1, status=SolveStatus.GREEDY, assignments=(assignment,))
        self.state.handle(ev.WindowSolved(solution=solution), 1000.0 + self.seq)


def node() -> ev.NodeJoined:
    return ev.NodeJoined(spec=NodeSpec(node_id="n", gpu_type="A", gpus=2))


def job(name: str) -> ev.JobArrived:
    return ev.JobArrived(spec=JobSpec(job_id=name, submitted_at=1.0, gpus_per_worker=1, labels={"ü": "\n"}))


def as_bytes(changes: Changes | None) -> bytes:
    return msgspec.json.encode(changes, order="deterministic")


async def owned(client: Redis, prefix: str, scenario: Scenario) -> tuple[PoolStore, int]:
    """A store whose first state is written."""
    store = PoolStore(client, "p", prefix)
    epoch = await store.acquire(0)
    position = Position(seq=scenario.seq)
    assert await store.reset(epoch, position, scenario.state.everything(), b"{}") is Outcome.DONE
    return store, epoch


def test_what_is_loaded_is_what_was_written(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        scenario = Scenario()
        store, epoch = await owned(client, namespace, scenario)
        steps = [(node(), job("a"), job("b")), (ev.WindowElapsed(),), (ev.CancelRequested(job_id="b"),)]
        for events in steps:
            before = scenario.seq
            position, changes = scenario.step(*events)
            assert await store.commit(epoch, before, position, changes, b'{"queued": 1}') is Outcome.DONE
            stored = await store.load()
            assert (stored.epoch, stored.position) == (epoch, position)
            assert as_bytes(stored.state) == as_bytes(scenario.state.everything())
        assert await client.zrange(f"{namespace}{{p}}:queue", 0, -1) == []
        assert await client.hget(f"{namespace}{{p}}:meta", "summary") == b'{"queued": 1}'
        assert await store.check(epoch, scenario.seq) is Outcome.DONE

    run(work)


def test_the_queue_holds_what_could_be_placed_in_order_of_arrival(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        scenario = Scenario()
        store, epoch = await owned(client, namespace, scenario)
        position, changes = scenario.step(node(), job("z"), job("a"), job("m"))
        assert await store.commit(epoch, 0, position, changes, b"") is Outcome.DONE
        assert await client.zrange(f"{namespace}{{p}}:queue", 0, -1) == [b"z", b"a", b"m"]
        position, changes = scenario.step(ev.HoldRequested(job_id="a"))
        assert await store.commit(epoch, 1, position, changes, b"") is Outcome.DONE
        assert await client.zrange(f"{namespace}{{p}}:queue", 0, -1) == [b"z", b"m"]

    run(work)


def test_a_commit_whose_answer_was_lost_may_be_repeated(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        scenario = Scenario()
        store, epoch = await owned(client, namespace, scenario)
        position, changes = scenario.step(node(), job("a"))
        for _ in range(3):
            assert await store.commit(epoch, 0, position, changes, b"") is Outcome.DONE
        assert as_bytes((await store.load()).state) == as_bytes(scenario.state.everything())

    run(work)


def test_a_former_owner_writes_nothing(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        scenario = Scenario()
        store, epoch = await owned(client, namespace, scenario)
        heir = await store.acquire(epoch)
        assert heir > epoch
        before = await store.raw()
        position, changes = scenario.step(node(), job("a"))
        assert await store.commit(epoch, 0, position, changes, b"") is Outcome.FENCED
        assert await store.reset(epoch, position, scenario.state.everything(), b"") is Outcome.FENCED
        assert await store.check(epoch, 0) is Outcome.FENCED
        assert await store.raw() == before
        assert await store.commit(heir, 0, position, changes, b"") is Outcome.DONE

    run(work)


def test_epochs_rise_above_all_that_were_seen(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        store = PoolStore(client, "p", namespace)
        assert await store.acquire(0) == 1
        assert await store.acquire(0) == 2
        assert await store.acquire(41) == 42
        assert await store.acquire(7) == 43

    run(work)


def test_a_loss_is_noticed_by_the_next_commit_or_look(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        scenario = Scenario()
        store, epoch = await owned(client, namespace, scenario)
        position, changes = scenario.step(node(), job("a"))
        assert await store.commit(epoch, 0, position, changes, b"") is Outcome.DONE
        for key in ("meta", "jobs", "runs", "nodes", "queue"):
            await client.delete(f"{namespace}{{p}}:{key}")  # as FLUSHALL would, on a Redis that others use
        assert await store.check(epoch, 1) is Outcome.LOST
        later, more = scenario.step(job("b"))
        assert await store.commit(epoch, 1, later, more, b"") is Outcome.LOST
        stored = await store.load()
        assert (stored.state, stored.epoch) == (None, 0)
        assert await store.reset(epoch, later, scenario.state.everything(), b"") is Outcome.LOST
        again = await store.acquire(epoch)
        assert await store.reset(again, later, scenario.state.everything(), b"") is Outcome.DONE
        assert as_bytes((await store.load()).state) == as_bytes(scenario.state.everything())

    run(work)


def test_a_redis_that_came_back_older_is_noticed(run, namespace: str) -> None:
    """As after a restart from an append-only file that lacks the last second."""

    async def work(client: Redis) -> None:
        scenario = Scenario()
        store, epoch = await owned(client, namespace, scenario)
        key = f"{namespace}{{p}}:"
        position, changes = scenario.step(node(), job("a"))
        assert await store.commit(epoch, 0, position, changes, b"") is Outcome.DONE
        old = {name: await client.dump(key + name) for name in ("meta", "jobs", "nodes")}
        for number in (1, 2):
            position, changes = scenario.step(job(f"b{number}"))
            assert await store.commit(epoch, number, position, changes, b"") is Outcome.DONE
        for name, value in old.items():
            await client.restore(key + name, 0, value, replace=True)
        assert await store.check(epoch, 3) is Outcome.LOST
        position, changes = scenario.step(job("c"))
        assert await store.commit(epoch, 3, position, changes, b"") is Outcome.LOST
        assert (await store.load()).position.seq == 1

    run(work)


def test_a_reset_leaves_nothing_of_what_was_there(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        scenario = Scenario()
        store, epoch = await owned(client, namespace, scenario)
        position, changes = scenario.step(node(), job("a"), job("b"), ev.WindowElapsed())
        assert await store.commit(epoch, 0, position, changes, b"") is Outcome.DONE
        empty = ClusterState("p").everything()
        assert await store.reset(epoch, Position(seq=5), empty, b"") is Outcome.DONE
        assert as_bytes((await store.load()).state) == as_bytes(empty)
        left = {name async for name in client.scan_iter(f"{namespace}*")}
        assert left == {f"{namespace}{{p}}:meta".encode()}

    run(work)


# ── what is not ours ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["meta", "jobs", "runs", "nodes", "tenants", "queue"])
def test_a_key_of_another_type_is_a_loss_that_a_takeover_mends(run, namespace: str, key: str) -> None:
    async def work(client: Redis) -> None:
        scenario = Scenario()
        store, epoch = await owned(client, namespace, scenario)
        position, changes = scenario.step(node(), job("a"))
        assert await store.commit(epoch, 0, position, changes, b"") is Outcome.DONE
        await client.delete(f"{namespace}{{p}}:{key}")
        await client.set(f"{namespace}{{p}}:{key}", "nonsense")
        assert await store.check(epoch, 1) is Outcome.LOST
        later, more = scenario.step(job("b"))
        assert await store.commit(epoch, 1, later, more, b"") is Outcome.LOST
        assert await store.epoch() == (0 if key == "meta" else epoch)
        assert (await store.load()).state is None
        with pytest.raises(Unreadable, match=r"\{p\}:\*"):
            await store.raw()
        again = await store.acquire(epoch)
        assert again > epoch
        assert await store.reset(again, later, scenario.state.everything(), b"") is Outcome.DONE
        assert as_bytes((await store.load()).state) == as_bytes(scenario.state.everything())
        assert await store.check(again, later.seq) is Outcome.DONE

    run(work)


def test_a_wrong_queue_is_seen_and_costs_no_state(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        scenario = Scenario()
        store, epoch = await owned(client, namespace, scenario)
        position, changes = scenario.step(node(), job("a"), job("b"))
        assert await store.commit(epoch, 0, position, changes, b"") is Outcome.DONE
        assert (await store.load()).queue_is_right
        queue = f"{namespace}{{p}}:queue"
        for harm in (client.zrem(queue, "b"), client.zadd(queue, {"b": 1.5}), client.zadd(queue, {"b": 1, "c": 3})):
            await harm
            stored = await store.load()
            assert not stored.queue_is_right
            assert as_bytes(stored.state) == as_bytes(scenario.state.everything())
        assert (await store.raw())[1]["queue"].keys() == {b"a", b"b", b"c"}

    run(work)


@pytest.mark.parametrize("field", ["state", "position", "epoch"])
def test_a_field_that_cannot_be_read_is_a_loss_that_a_takeover_mends(run, namespace: str, field: str) -> None:
    async def work(client: Redis) -> None:
        scenario = Scenario()
        store, epoch = await owned(client, namespace, scenario)
        await client.hset(f"{namespace}{{p}}:meta", field, b"\xff{")
        stored = await store.load()
        assert (stored.state is None) is (field != "epoch")
        assert stored.epoch == await store.epoch() == (0 if field == "epoch" else epoch)
        if field == "position":
            with pytest.raises(Unreadable, match="position"):
                await store.raw()
        if field == "epoch":
            assert await store.check(epoch, 0) is Outcome.LOST
        again = await store.acquire(epoch)
        assert again > epoch
        assert await store.reset(again, Position(), scenario.state.everything(), b"") is Outcome.DONE
        assert (await store.load()).epoch == again

    run(work)


def test_the_summary_of_one_pool_does_not_hide_those_of_the_others(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        await client.set(f"{namespace}{{p}}:meta", "nonsense")
        await client.hset(f"{namespace}{{q}}:meta", "summary", "{}")
        assert await pool_store.summaries(client, namespace, ["p", "q", "r"]) == [b"", b"{}", None]

    run(work)


def test_telemetry_holds_nodes_of_the_pool_only(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        key = f"{namespace}{{p}}:telemetry"
        store = TelemetryStore(client, namespace)
        await client.set(key, "nonsense")
        await store.write("p", {f"n{number}": b"{}" for number in range(9)})
        await client.hset(key, b"\xff", "x")
        await store.forget_strangers("p", {"n1", "n2"})
        assert set(await client.hkeys(key)) == {b"n1", b"n2"}

    run(work)


# ── the job index ────────────────────────────────────────────────────────────────────────────────────────────────────


async def whole_index(client: Redis, prefix: str, **jobs: list[str]) -> JobIndex:
    """With the jobs of pools p and q."""
    index = JobIndex(client, ("p", "q"), prefix)
    for pool in ("p", "q"):
        await index.restore(pool, jobs.get(pool, []))
    return index


async def claimed(index: JobIndex, *wishes: tuple[str, str]) -> list[str] | None:
    claim = await index.claim(wishes)
    return claim.pools if claim is not None else None


def test_a_job_stays_in_the_pool_that_claimed_it(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        index = JobIndex(client, ("p", "q"), namespace)
        assert await claimed(index, ("a", "p")) is None, "q has not said what it knows"
        await index.restore("p", [])
        assert not await index.whole()
        await index.restore("q", ["old"])
        assert await index.whole()
        assert await claimed(index, ("a", "p"), ("old", "p"), ("b", "q")) == ["p", "q", "q"]
        assert await claimed(index, ("a", "q"), ("b", "p")) == ["p", "q"]
        assert await index.find(["a", "old", "never"]) == ["p", "q", None]
        assert await index.find([]) == []

    run(work)


def test_only_its_own_pool_forgets_a_job(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        index = await whole_index(client, namespace, p=["p0", "p1"], q=["q0"])
        await index.forget("p", ["p0", "q0"], 100.0)
        assert await index.look_after("p", (), 100.0 + GONE_S)
        assert await index.find(["p0", "p1", "q0"]) == [None, "p", "q"]
        assert await claimed(index, ("p0", "q")) == ["q"]
        assert await client.exists(f"{namespace}{{#router}}:gone:p") == 0

    run(work)


def test_a_resubmission_that_meets_the_forgetting_of_its_job_stays_in_its_pool(run, namespace: str) -> None:
    """Claimed before and applied after, or claimed after: either way the pool has it, and no other one may."""

    async def work(client: Redis) -> None:
        index = await whole_index(client, namespace, p=["on-its-way", "asked-for", "gone"])
        await index.forget("p", ["on-its-way", "asked-for", "gone"], 100.0)
        assert await claimed(index, ("asked-for", "q")) == ["p"]
        assert await index.look_after("p", (), 99.0 + GONE_S)
        assert await index.find(["on-its-way", "asked-for", "gone"]) == ["p", "p", "p"], "too soon to know"
        assert await index.look_after("p", {"on-its-way"}, 100.0 + GONE_S)
        wishes = [(name, "q") for name in ("on-its-way", "asked-for", "gone")]
        assert await claimed(index, *wishes) == ["p", "p", "q"]

    run(work)


def test_an_index_of_another_run_of_the_server_counts_for_nothing(run, namespace: str) -> None:
    """As after a restart from an old copy: whatever it says of itself, jobs claimed since may be missing."""

    async def work(client: Redis) -> None:
        index = await whole_index(client, namespace)
        assert await claimed(index, ("a", "p")) == ["p"]
        ready, jobs = f"{namespace}{{#router}}:pools", f"{namespace}{{#router}}:jobs"
        for pool in ("p", "q"):
            await client.hset(ready, pool, "another-run")
        await client.delete(jobs)
        assert not await index.whole()
        assert await claimed(index, ("a", "q")) is None
        assert not await index.look_after("p", (), 0.0)
        await index.restore("q", [])
        assert await claimed(index, ("a", "q")) is None
        await index.restore("p", ["a"])
        assert await claimed(index, ("a", "q")) == ["p"]

    run(work)


def test_a_restore_that_is_cut_off_by_a_loss_begins_again(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        index = await whole_index(client, namespace)
        await index._do("begin", "p")
        await index._do("put", "p", "a")
        await client.delete(f"{namespace}{{#router}}:jobs", f"{namespace}{{#router}}:pools")
        assert await index._do("end", "p") == 0
        assert not await index.look_after("p", (), 0.0)

    run(work)


@pytest.mark.parametrize("key", ["jobs", "pools"])
def test_a_key_of_the_index_of_another_type_is_made_anew(run, namespace: str, key: str) -> None:
    async def work(client: Redis) -> None:
        index = await whole_index(client, namespace, p=["a"])
        await client.delete(f"{namespace}{{#router}}:{key}")
        await client.set(f"{namespace}{{#router}}:{key}", "nonsense")
        assert await claimed(index, ("a", "q")) is None
        await index.restore("p", ["a"])
        await index.restore("q", [])
        assert await claimed(index, ("a", "q")) == ["p"]

    run(work)


@pytest.mark.parametrize("value", [b"\xff\xfe", b"", b"a b", b"p~~", b"x" * 300])
def test_a_value_of_the_index_that_is_no_name_is_thrown_out(run, namespace: str, value: bytes) -> None:
    async def work(client: Redis) -> None:
        index = await whole_index(client, namespace, p=["a"])
        await client.hset(f"{namespace}{{#router}}:jobs", "a", value)
        assert await claimed(index, ("a", "q")) is None, "which pool has it is known when all have written theirs"
        await client.hset(f"{namespace}{{#router}}:jobs", "a", value)
        assert await index.find(["a"]) == [None]
        assert not await index.whole()
        await index.restore("p", ["a"])
        await index.restore("q", [])
        assert await claimed(index, ("a", "q")) == ["p"]

    run(work)
