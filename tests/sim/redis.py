"""A fake Redis: what the scheduler's store uses of it, with the Lua scripts as Python functions.

`PoolStore` and `JobIndex` run unchanged on `Client`. That these functions do what the real scripts do on a real server
is shown by tests/integration/test_store_model.py.

A command has one of these fates: executed and answered; executed, the answer lost; not executed, an error; an error
first and executed later all the same. Besides, the server may be away, lose everything, or come back from an older
copy.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from streamsched.store import job_index, pool_store, predictor_store

if TYPE_CHECKING:
    from .world import World

DONE, FENCED, LOST = 1, 0, -1


class Data:
    """Hashes and sorted sets, and the commands on them."""

    generation = b"run0"
    """Of the server that holds them: not part of a copy."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, dict[bytes, bytes]] = defaultdict(dict)
        self.sorted_sets: dict[bytes, dict[bytes, float]] = defaultdict(dict)

    def copy(self) -> Data:
        other = Data()
        other.hashes, other.sorted_sets = copy.deepcopy((self.hashes, self.sorted_sets))
        return other

    def run(self, script: str, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        return _SCRIPTS[script](self, keys, args)


# ── pool_state.lua ───────────────────────────────────────────────────────────────────────────────────────────────────


def _pool_state(data: Data, keys: Sequence[bytes], args: Sequence[bytes]) -> int:
    step = args[0]
    meta = data.hashes[keys[0]]
    if step == b"acquire":
        epoch = max(int(meta.get(b"epoch", b"0")), int(args[1])) + 1
        meta[b"epoch"] = str(epoch).encode()
        return epoch
    answer = _owner(meta, int(args[1]))
    if step == b"check":
        answer = _at_record(meta, answer, args[2], args[2])
        if answer == DONE and len(args) > 3:
            meta[b"summary"] = args[3]
        return answer
    if step == b"clear":
        return _clear(data, keys, answer)
    if step == b"commit":
        answer = _at_record(meta, answer, args[2], args[3])
    if answer != DONE:
        return answer
    _write(data, keys, args)
    if step == b"commit":
        meta[b"seq"] = args[3]
    return DONE


def _owner(meta: dict[bytes, bytes], epoch: int) -> int:
    stored = int(meta.get(b"epoch", b"-1"))
    return FENCED if stored > epoch else LOST if stored < epoch else DONE


def _at_record(meta: dict[bytes, bytes], owner: int, before: bytes, seq: bytes) -> int:
    if owner == DONE and meta.get(b"seq", b"0") not in (before, seq):
        return LOST
    return owner


def _clear(data: Data, keys: Sequence[bytes], owner: int) -> int:
    if owner == DONE:
        for key in keys[1:]:
            data.hashes.pop(key, None)
            data.sorted_sets.pop(key, None)
        for name in (b"seq", b"state", b"position", b"summary"):
            data.hashes[keys[0]].pop(name, None)
    return owner


def _write(data: Data, keys: Sequence[bytes], args: Sequence[bytes]) -> None:
    counts, pairs = [int(n) for n in args[4:10]], iter(args[10:])
    for key, count in zip(keys[:5], counts[:5], strict=True):
        for _ in range(count):
            name, value = next(pairs), next(pairs)
            if value:
                data.hashes[key][name] = value
            else:
                data.hashes[key].pop(name, None)
    for _ in range(counts[5]):
        name, score = next(pairs), next(pairs)
        if score:
            data.sorted_sets[keys[5]][name] = float(score)
        else:
            data.sorted_sets[keys[5]].pop(name, None)


# ── the job index ────────────────────────────────────────────────────────────────────────────────────────────────────


def _job_index(data: Data, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
    step, args = args[0].decode(), args[1:]
    jobs, ready = data.hashes[keys[0]], data.hashes[keys[1]]
    if step == "claim":
        last = 1 + int(args[0])
        return _claim(data, jobs, ready, args[1:last], args[last:])
    if step == "find":
        return [0, *(_pool_in(jobs.get(job)) for job in args)]
    if step == "whole":
        return int(all(ready.get(pool) == data.generation for pool in args))
    if step == "now":
        return data.generation
    pool = args[0]
    if step == "begin":
        if ready.get(pool) != data.generation:
            ready[pool] = b"writing:" + data.generation
    elif step == "put":
        jobs.update(dict.fromkeys(args[1:], pool))
    elif step == "end":
        there = ready.get(pool) in (data.generation, b"writing:" + data.generation)
        if there:
            ready[pool] = data.generation
        return int(there)
    else:
        return _gone(step, data, jobs, keys, args)
    return 1


def _claim(
    data: Data, jobs: dict[bytes, bytes], ready: dict[bytes, bytes], pools: Sequence[bytes], wishes: Sequence[bytes]
) -> list[bytes] | None:
    if any(ready.get(pool) != data.generation for pool in pools):
        return None
    answer = [data.generation]
    for job, wish in zip(wishes[::2], wishes[1::2], strict=True):
        jobs[job] = _pool_in(jobs.get(job)) or wish
        answer.append(jobs[job])
    return answer


def _pool_in(value: bytes | None) -> bytes | None:
    return value.removesuffix(b"~") if value is not None else None


def _gone(step: str, data: Data, jobs: dict[bytes, bytes], keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
    pool, gone = args[0], data.sorted_sets[keys[2]]
    if step == "look":
        due = sorted((at, job) for job, at in gone.items() if at <= float(args[1]))
        return [int(data.hashes[keys[1]].get(pool) == data.generation), *(job for _, job in due)]
    if step == "forget":
        for job in args[2:]:
            if jobs.get(job) == pool:
                jobs[job] = pool + b"~"
                gone[job] = float(args[1])
        return None
    for number, job in enumerate(args[2:]):
        if jobs.get(job) == pool + b"~":
            if number < int(args[1]):
                jobs[job] = pool
            else:
                del jobs[job]
        gone.pop(job, None)
    return None


# ── predictor_state.lua ──────────────────────────────────────────────────────────────────────────────────────────────


def _predictor_state(data: Data, keys: Sequence[bytes], args: Sequence[bytes]) -> int:
    step, epoch, *rest = args
    if data.hashes[keys[0]].get(b"epoch") != epoch:
        return 0
    fields = data.hashes[keys[1]]
    if step == b"put":
        fields[rest[0]] = rest[1]
        return 1
    head, slot, count = rest
    kept = {b"%s:%d" % (slot, number) for number in range(int(count))}
    data.hashes[keys[1]] = {name: value for name, value in fields.items() if name in kept} | {b"head": head}
    return 1


_SCRIPTS: dict[str, Callable[[Data, Sequence[bytes], Sequence[bytes]], Any]] = {
    pool_store._SCRIPT: _pool_state,
    job_index._SCRIPT: _job_index,
    predictor_store._SCRIPT: _predictor_state,
}


# ── server and connections ───────────────────────────────────────────────────────────────────────────────────────────


class Server:
    """The data, and whether anybody can reach it."""

    def __init__(self) -> None:
        self.data = Data()
        self.away_until = -math.inf
        self.resets = 0
        """Times that data was lost."""
        self.copies: list[Data] = []

    def keep_copy(self) -> None:
        self.copies = [*self.copies[-2:], self.data.copy()]

    def replace(self, data: Data) -> None:
        """As data comes back: with a server that was started again."""
        self.data = data.copy()
        self.resets += 1
        self.data.generation = f"run{self.resets}".encode()


class Client:
    """Quacks like redis.asyncio.Redis. Without a world it is a plain, faultless one (for the model's own test)."""

    def __init__(self, server: Server, world: World | None = None, name: str = "") -> None:
        self._server = server
        self._world = world
        self._name = name

    def register_script(self, script: str) -> Callable[..., Any]:
        async def call(keys: Sequence[Any], args: Sequence[Any]) -> Any:
            raw_keys, raw_args = [_raw(key) for key in keys], [_raw(arg) for arg in args]
            label = f"{'' if script == pool_store._SCRIPT else 'index '}{raw_args[0].decode()}"
            return await self._do(label, lambda data: data.run(script, raw_keys, raw_args))

        return call

    async def hget(self, key: Any, name: Any) -> bytes | None:
        [found] = await self._do("get", lambda data: [data.hashes[_raw(key)].get(_raw(name))])
        return found

    def pipeline(self, transaction: bool = True) -> Pipeline:
        return Pipeline(self)

    async def _do(self, label: str, effect: Callable[[Data], Any]) -> Any:
        world = self._world
        if world is None:
            return effect(self._server.data)
        await world.hazard(f"redis {label}")
        answer: asyncio.Future[Any] = world.loop.create_future()
        fate = world.faults.fate_of_command()
        world.later(world.faults.latency_s() / 2, lambda: self._execute(world, label, effect, fate, answer))
        result = await answer
        await world.hazard(f"redis {label} done")
        return result

    def _execute(
        self, world: World, label: str, effect: Callable[[Data], Any], fate: str, answer: asyncio.Future[Any]
    ) -> None:
        what: Any = RedisTimeoutError(f"{fate} (simulated)")
        if world.loop.time() < self._server.away_until:
            what = RedisConnectionError("Redis is away")
        elif fate == "late":
            world.later(world.rng.uniform(0.0, 4.0), lambda: effect(self._server.data) and None)
        elif fate != "not executed":
            result = effect(self._server.data)
            if not isinstance(result, list):
                world.tell(f"{self._name}: redis {label} -> {result}{' (answer lost)' if fate != 'ok' else ''}")
            world.strike(self._name, f"redis {label} executed")
            what = result if fate == "ok" else what
        if answer.done():
            return
        if isinstance(what, BaseException):
            answer.set_exception(what)
        else:
            answer.set_result(what)


class Pipeline:
    """Reads (and the telemetry's writes), executed together."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._effects: list[Callable[[Data], Any]] = []

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._effects.clear()

    def hgetall(self, key: str) -> None:
        self._effects.append(lambda data: dict(data.hashes[_raw(key)]))

    def zrange(self, key: str, start: int, end: int, withscores: bool) -> None:
        assert (start, end, withscores) == (0, -1, True)
        self._effects.append(lambda data: sorted(data.sorted_sets[_raw(key)].items(), key=lambda item: item[::-1]))

    def hget(self, key: str, name: str) -> None:
        self._effects.append(lambda data: data.hashes[_raw(key)].get(_raw(name)))

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        effects = list(self._effects)
        return await self._client._do("pipeline", lambda data: [effect(data) for effect in effects])


def _raw(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
