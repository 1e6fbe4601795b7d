"""What a predictor has learned on a real Redis: in pieces, whole or not at all, and written by the owner only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from redis.asyncio import Redis

from streamsched.store import predictor_store as module
from streamsched.store.client import connect
from streamsched.store.connection import RedisConnection
from streamsched.store.pool_store import PoolStore
from streamsched.store.predictor_store import PIECE_BYTES, DamagedPieces, Kept, PredictorStore, TooLarge

pytestmark = pytest.mark.integration

T = TypeVar("T")
LARGE = random.Random(1).randbytes(2 * PIECE_BYTES + 1)


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


async def owner(client: Redis, prefix: str) -> tuple[PredictorStore, int]:
    """A new one of the pool p, and its epoch."""
    return PredictorStore(client, "p", prefix), await PoolStore(client, "p", prefix).acquire(0)


def test_what_is_kept_is_what_is_loaded_and_takes_no_more_room_each_time(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        store, epoch = await owner(client, namespace)
        assert await store.load() is None
        for seq, data in enumerate((LARGE, b"small", LARGE, b"", b"x" * PIECE_BYTES)):
            kept = Kept(data=data, seq=seq, until=0.5 + seq)
            assert await store.write(epoch, kept)
            assert await PredictorStore(client, "p", namespace).load() == kept
            fields = await client.hkeys(f"{namespace}{{p}}:predictor")
            assert len(fields) == 1 + -(-len(data) // PIECE_BYTES)
        assert len(await client.keys(f"{namespace}*")) == 2

    run(work)


def test_a_former_owner_writes_nothing_that_counts(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        store, epoch = await owner(client, namespace)
        assert await store.write(epoch, Kept(data=LARGE, seq=1, until=1.0))
        successor, later = await owner(client, namespace)
        assert not await store.write(epoch, Kept(data=b"old", seq=2, until=2.0))
        found = await successor.load()
        assert found is not None
        assert found.seq == 1
        assert await successor.write(later, Kept(data=b"new", seq=3, until=3.0))
        await client.delete(f"{namespace}{{p}}:meta")
        assert not await successor.write(later, Kept(data=b"lost", seq=4, until=4.0))

    run(work)


def test_a_write_that_is_cut_off_leaves_what_was_there(run, namespace: str) -> None:
    async def work(client: Redis) -> None:
        store, epoch = await owner(client, namespace)
        await store.write(epoch, Kept(data=LARGE, seq=1, until=1.0))
        assert await store._do("put", epoch, "1:0", b"half")
        successor, later = await owner(client, namespace)
        found = await successor.load()
        assert found is not None
        assert found.data == LARGE
        assert await successor.write(later, Kept(data=b"new", seq=2, until=2.0))
        assert sorted(await client.hkeys(f"{namespace}{{p}}:predictor")) == [b"1:0", b"head"]

    run(work)


@pytest.mark.parametrize("damage", ["type", "head", "bounds", "piece gone", "piece cut"])
def test_damage_is_told_and_written_over(run, namespace: str, damage: str) -> None:
    async def work(client: Redis) -> None:
        key = f"{namespace}{{p}}:predictor"
        store, epoch = await owner(client, namespace)
        await store.write(epoch, Kept(data=LARGE, seq=1, until=1.0))
        match damage:
            case "type":
                await client.delete(key)
                await client.set(key, "x")
            case "head":
                await client.hset(key, "head", b"\xff")
            case "bounds":
                await client.hset(key, "head", '{"slot": 0, "pieces": 1, "bytes": 99999999999, "seq": 0, "until": 0}')
            case "piece gone":
                await client.hdel(key, "0:1")
            case "piece cut":
                await client.hset(key, "0:1", b"short")
        successor = PredictorStore(client, "p", namespace)
        with pytest.raises(DamagedPieces):
            await successor.load()
        assert await successor.write(epoch, Kept(data=b"new", seq=2, until=2.0))
        found = await PredictorStore(client, "p", namespace).load()
        assert found is not None
        assert found.data == b"new"

    run(work)


def test_what_is_too_large_is_not_kept(run, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_MAX", 3)

    async def work(client: Redis) -> None:
        store, epoch = await owner(client, namespace)
        with pytest.raises(TooLarge):
            await store.write(epoch, Kept(data=b"four", seq=1, until=1.0))
        assert await store.load() is None

    run(work)


def test_after_a_lost_answer_the_state_that_counts_is_not_written_over(
    run, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(client: Redis) -> None:
        store, epoch = await owner(client, namespace)
        await store.write(epoch, Kept(data=LARGE, seq=1, until=1.0))
        real = store._do

        async def lost(step: str, *args: str | int | bytes) -> object:
            answer = await real(step, *args)
            if step == "end":
                raise ConnectionError("the answer was lost")
            return answer

        monkeypatch.setattr(store, "_do", lost)
        with pytest.raises(ConnectionError):
            await store.write(epoch, Kept(data=LARGE, seq=2, until=2.0))
        monkeypatch.setattr(store, "_do", real)
        assert await store._free_slot() == 0
        await store._do("put", epoch, f"{await store._free_slot()}:0", b"cut off here")
        found = await PredictorStore(client, "p", namespace).load()
        assert found == Kept(data=LARGE, seq=2, until=2.0)

    run(work)
