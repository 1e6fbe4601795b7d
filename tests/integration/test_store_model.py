"""The fake Redis of the fault simulation does what the real scripts do on a real server.

Random sequences of the store's and the job index's operations go to both; every answer and, after every step, every
stored byte must be the same. So what the simulation shows on the fake holds on the real thing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from sim.redis import Client, Server

from streamsched.core.cluster import Changes, Meta
from streamsched.core.model import Allocation, Job, JobSpec, JobState, NodeSpec, Run, RunState
from streamsched.core.node import NodeRecord
from streamsched.core.tenants import TenantUsage
from streamsched.store import predictor_store
from streamsched.store.client import connect
from streamsched.store.connection import RedisConnection
from streamsched.store.job_index import GONE_S, JobIndex
from streamsched.store.pool_store import PoolStore, Position, key_of
from streamsched.store.predictor_store import Kept, PredictorStore

pytestmark = pytest.mark.integration

Operation = Callable[[PoolStore, JobIndex, Any], Awaitable[Any]]
_POOLS = ("p", "q")
_numbers = itertools.count()
_few = st.integers(0, 4)
_names = st.sampled_from(["a", "b", "c"])


def _jobs() -> st.SearchStrategy[Job]:
    return st.builds(
        lambda name, seq, state: Job(
            spec=JobSpec(job_id=name, submitted_at=1.0, gpus_per_worker=1), seq=seq, state=state, queued_at=2.0
        ),
        _names,
        _few,
        st.sampled_from([JobState.QUEUED, JobState.RUNNING, JobState.COMPLETED]),
    )


def _run(name: str) -> Run:
    return Run(
        placement_id=name,
        job_id=name,
        attempt=1,
        allocations=(Allocation(node_id="n", gpus=(0,)),),
        state=RunState.PLACED,
        placed_at=1.0,
        lease_until=2.0,
    )


def _maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(_names, st.none() | values, max_size=3)


changes = st.builds(
    lambda jobs, gone, runs, nodes, tenants, epoch: Changes(
        jobs={job.spec.job_id: job for job in jobs} | dict.fromkeys(gone),
        runs={name: _run(name) if there else None for name, there in runs.items()},
        nodes={
            name: NodeRecord(spec=NodeSpec(node_id=name, gpu_type="A", gpus=gpus)) if gpus is not None else None
            for name, gpus in nodes.items()
        },
        tenants={name: TenantUsage(held_milli=held) if held is not None else None for name, held in tenants.items()},
        meta=Meta(epoch=epoch),
    ),
    st.lists(_jobs(), max_size=3),
    st.lists(_names, max_size=1),
    _maybe(st.just(True)),
    _maybe(_few),
    _maybe(_few),
    _few,
)
positions = st.builds(lambda seq, journal: Position(seq=seq, journal=journal), _few, _few)


def _acquire(at_least: int) -> Operation:
    return lambda store, index, client: store.acquire(at_least)


def _commit(epoch: int, before: int, position: Position, what: Changes) -> Operation:
    return lambda store, index, client: store.commit(epoch, before, position, what, b"{}")


def _reset(epoch: int, position: Position, what: Changes) -> Operation:
    return lambda store, index, client: store.reset(epoch, position, what, b"{}")


def _clear(epoch: int) -> Operation:
    """The first half of a reset: its caller died then."""
    return lambda store, index, client: store._script(keys=store._keys, args=["clear", epoch])


def _fill(epoch: int, what: Changes) -> Operation:
    async def fill(store: PoolStore, index: JobIndex, client: Any) -> Any:
        from streamsched.store.pool_store import _parts

        return await store._write("fill", epoch, "", "", _parts(what))

    return fill


def _check(epoch: int, seq: int) -> Operation:
    return lambda store, index, client: store.check(epoch, seq)


def _find(names: list[str]) -> Operation:
    return lambda store, index, client: index.find(names)


def _claim(wishes: list[tuple[str, str]]) -> Operation:
    async def claim(store: PoolStore, index: JobIndex, client: Any) -> list[str] | None:
        answer = await index.claim(wishes)
        return answer and answer.pools

    return claim


def _restore(pool: str, names: list[str]) -> Operation:
    async def restore(store: PoolStore, index: JobIndex, client: Any) -> bool:
        await index.restore(pool, names)
        return await index.whole()

    return restore


def _begin(pool: str) -> Operation:
    """The first part of a restore: its caller died then."""
    return lambda store, index, client: index._do("begin", pool)


def _forget(pool: str, names: list[str], now: int) -> Operation:
    return lambda store, index, client: index.forget(pool, names, now)


def _look_after(pool: str, known: list[str], now: int) -> Operation:
    return lambda store, index, client: index.look_after(pool, known, GONE_S + now)


def _keep(epoch: int, data: bytes) -> Operation:
    async def keep(store: PoolStore, index: JobIndex, client: Any) -> Any:
        kept = PredictorStore(client, "p", index._prefix.removesuffix("{#router}:"))
        before = await kept.load()
        return before, await kept.write(epoch, Kept(data=data, seq=epoch, until=1.0))

    return keep


operations = st.lists(
    st.one_of(
        st.builds(_acquire, _few),
        st.builds(_commit, _few, _few, positions, changes),
        st.builds(_commit, _few, _few, positions, changes),
        st.builds(_reset, _few, positions, changes),
        st.builds(_clear, _few),
        st.builds(_fill, _few, changes),
        st.builds(_check, _few, _few),
        st.builds(_claim, st.lists(st.tuples(_names, st.sampled_from(_POOLS)), min_size=1, max_size=3)),
        st.builds(_find, st.lists(_names, max_size=3)),
        st.builds(_restore, st.sampled_from(_POOLS), st.lists(_names, max_size=3)),
        st.builds(_restore, st.sampled_from(_POOLS), st.lists(_names, max_size=3)),
        st.builds(_begin, st.sampled_from(_POOLS)),
        st.builds(_forget, st.sampled_from(_POOLS), st.lists(_names, max_size=2), _few),
        st.builds(_look_after, st.sampled_from(_POOLS), st.lists(_names, max_size=2), _few),
        st.builds(_keep, _few, st.binary(max_size=7)),
        st.builds(_keep, _few, st.binary(max_size=7)),
    ),
    min_size=1,
    max_size=25,
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture
def real(runner: asyncio.Runner, redis_url: str) -> Iterator[Redis]:
    async def make() -> Redis:
        return connect(RedisConnection(redis_url))

    client = runner.run(make())
    yield client
    runner.run(client.aclose())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=operations)
def test_fake_and_real_redis_agree(runner: asyncio.Runner, real: Redis, namespace: str, steps: list[Operation]) -> None:
    with mock.patch.object(predictor_store, "PIECE_BYTES", 2):
        runner.run(_compare(real, f"{namespace}:{next(_numbers)}:", steps))


async def _compare(real: Redis, prefix: str, steps: list[Operation]) -> None:
    server = Server()
    fake: Any = Client(server)
    both = [(PoolStore(c, "p", prefix), JobIndex(c, _POOLS, prefix), c) for c in (fake, real)]
    store, index, _ = both[1]
    predictor = key_of(prefix, "p", "predictor")
    names = [*store._keys, predictor, index._jobs, index._ready, *(f"{index._prefix}gone:{pool}" for pool in _POOLS)]
    server.data.generation = (await index.generation()).encode()
    for step in steps:
        assert await step(*both[0]) == await step(*both[1])
        assert _dump(server) == await _dump_real(real, names)
        assert await both[0][0].load() == await both[1][0].load()
    await real.delete(*names)


def _dump(server: Server) -> dict[bytes, Any]:
    """Without empty ones, which Redis does not keep."""
    held = {key: dict(value) for key, value in server.data.hashes.items() if value}
    return held | {key: dict(value) for key, value in server.data.sorted_sets.items() if value}


async def _dump_real(real: Redis, names: list[str]) -> dict[bytes, Any]:
    dump: dict[bytes, Any] = {}
    for name in names:
        kind = await real.type(name)
        if kind == b"zset":
            dump[name.encode()] = dict(await real.zrange(name, 0, -1, withscores=True))
        elif kind == b"hash":
            dump[name.encode()] = await real.hgetall(name)
    return dump
