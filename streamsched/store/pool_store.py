"""One pool's state in Redis: read whole, changed by one atomic script per commit.

Keys share the hash tag {pool}, so that a cluster keeps them together:
`<prefix>{pool}:meta|jobs|runs|nodes|tenants|queue`. Values are the JSON of the core's values, so that redis-cli shows
them. What is here is a view: the journal in Kafka is the truth, and `seq` and `journal` say how much of it is in.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from streamsched.bus.messages import Placement
from streamsched.core.cluster import Changes, Meta
from streamsched.core.model import Job, JobState, Run
from streamsched.core.node import NodeRecord
from streamsched.core.tenants import TenantUsage

_SCRIPT = resources.files(__package__).joinpath("pool_state.lua").read_text(encoding="utf-8")
log = logging.getLogger(__name__)

_KEYS = ("meta", "jobs", "runs", "nodes", "tenants", "queue")
_FILL = 20_000
"""Values per script call when a state is written anew: other clients of Redis wait meanwhile."""
_encode = msgspec.json.Encoder(order="deterministic").encode


class Outcome(enum.IntEnum):
    """The script's answer to a commit."""

    DONE = 1
    FENCED = 0  # a later epoch owns the pool: this worker must stop writing
    LOST = -1  # Redis does not hold what this worker last wrote (flushed, or restarted from an older file)


class Position(Struct, frozen=True, kw_only=True):
    """How far a stored state has come."""

    seq: int = 0
    """Of the last journal record in it."""
    journal: int = 0
    """Journal offset to read on from."""
    placements: int = 0
    """Offset of the placements partition from which on decisions of the outbox can be."""
    snapshot_seq: int = 0
    """Journal record of the latest snapshot."""
    snapshot_slot: int = 1
    """Its slot; the next goes to the other."""
    next_offsets: dict[str, int] = {}
    """Input "topic:partition" -> next offset to apply."""
    outbox: tuple[Placement, ...] = ()
    """Decisions of the last record: whoever takes the pool over sees to it that they are on the topic."""


class Stored(Struct, frozen=True, kw_only=True):
    """A pool as Redis holds it. `state` is None when it holds nothing of it."""

    epoch: int
    position: Position
    state: Changes | None
    queue_is_right: bool = True
    """Nothing is decided by the key `queue`, so a wrong one is no reason to doubt the state."""


class Unreadable(Exception):
    """What Redis holds of a pool is not what streamsched writes; the text says what is wrong with it."""


class PoolStore:
    """Access to one pool. Raises redis.exceptions.RedisError when Redis cannot be reached; the caller retries."""

    def __init__(self, redis: Redis, pool: str, prefix: str = "streamsched:") -> None:
        self.pool = pool
        self._redis = redis
        self._keys = [key_of(prefix, pool, name) for name in _KEYS]
        self._script = redis.register_script(_SCRIPT)

    async def load(self) -> Stored:
        """Everything, as of one moment. What cannot be read counts as not there: it is made anew from the journal."""
        try:
            meta, raw = await self._read()
        except Unreadable as error:
            log.warning("pool %s: what Redis holds cannot be read (%s)", self.pool, error)
            return Stored(epoch=await self.epoch(), position=Position(), state=None)
        epoch = _epoch(meta.get(b"epoch"))
        if b"state" not in meta:
            return Stored(epoch=epoch, position=Position(), state=None)
        try:
            state = Changes(
                jobs=_decode_all(raw["jobs"], Job),
                runs=_decode_all(raw["runs"], Run),
                nodes=_decode_all(raw["nodes"], NodeRecord),
                tenants=_decode_all(raw["tenants"], TenantUsage),
                meta=msgspec.json.decode(meta[b"state"], type=Meta),
            )
            position = msgspec.json.decode(meta[b"position"], type=Position)
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
            log.warning("pool %s: what Redis holds cannot be read (%s)", self.pool, error)
            return Stored(epoch=epoch, position=Position(), state=None)
        queue_is_right = raw["queue"] == _queue(state.jobs)
        if not queue_is_right:
            log.warning("pool %s: %s in Redis is not the queue of its jobs", self.pool, self._keys[5])
        return Stored(epoch=epoch, position=position, state=state, queue_is_right=queue_is_right)

    async def epoch(self) -> int:
        """Of the owner; 0 when there has been none, or none that can be read (the journal knows it as well)."""
        try:
            stored: Any = await self._redis.hget(self._keys[0], "epoch")
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            return 0
        return _epoch(stored)

    async def raw(self) -> tuple[Position, dict[str, dict[bytes, bytes]]]:
        """Position and stored bytes of all values: what a replay of the journal must equal (see `stored_values`).

        Raises Unreadable when there is something else.
        """
        meta, raw = await self._read()
        try:
            position = msgspec.json.decode(meta[b"position"], type=Position) if b"position" in meta else Position()
        except msgspec.MsgspecError as error:
            raise Unreadable(f"{self._keys[0]}, position: {error}") from None
        return position, raw | {"meta": {b"state": meta.get(b"state", b"")}}

    async def _read(self) -> tuple[dict[bytes, bytes], dict[str, dict[bytes, bytes]]]:
        async with self._redis.pipeline(transaction=True) as pipe:
            for key in self._keys[:5]:
                pipe.hgetall(key)
            pipe.zrange(self._keys[5], 0, -1, withscores=True)
            try:
                meta, *values, queue = await pipe.execute()
            except ResponseError as error:
                if not is_wrong_type(error):
                    raise
                raise Unreadable(f"a key of {self._keys[0].removesuffix('meta')}* is of another type") from None
        scores = {name: f"{score:g}".encode() if score % 1 else b"%d" % score for name, score in queue}
        return meta, dict(zip(_KEYS[1:], (*values, scores), strict=True))

    async def acquire(self, at_least: int) -> int:
        """Take the pool over: a new epoch, above every one seen. From now on commits of earlier epochs are refused."""
        return int(await self._script(keys=self._keys, args=["acquire", at_least]))

    async def commit(self, epoch: int, before: int, position: Position, changes: Changes, summary: bytes) -> Outcome:
        """Bring the stored state from record `before` to `position.seq`. Safe to repeat after a lost answer."""
        parts = _parts(changes)
        parts["meta"] = _meta(changes, position, summary)
        return await self._write("commit", epoch, before, position.seq, parts)

    async def reset(self, epoch: int, position: Position, everything: Changes, summary: bytes) -> Outcome:
        """Replace whatever is stored by `everything`. Until the last step the pool counts as not there."""
        outcome = Outcome(await self._script(keys=self._keys, args=["clear", epoch]))
        for kind, pairs in _parts(everything).items():
            for start in range(0, len(pairs), 2 * _FILL):
                if outcome is Outcome.DONE:
                    outcome = await self._write("fill", epoch, "", "", {kind: pairs[start : start + 2 * _FILL]})
        if outcome is not Outcome.DONE:
            return outcome
        return await self._write("commit", epoch, 0, position.seq, {"meta": _meta(everything, position, summary)})

    async def check(self, epoch: int, seq: int, summary: bytes | None = None) -> Outcome:
        """Whether Redis still holds what the owner of `epoch` last wrote: how an idle owner notices a loss. If so, this
        is its summary now."""
        told = [] if summary is None else [summary]
        return Outcome(await self._script(keys=self._keys, args=["check", epoch, seq, *told]))

    async def _write(
        self, step: str, epoch: int, before: int | str, seq: int | str, parts: dict[str, list[bytes]]
    ) -> Outcome:
        args: list[Any] = [step, epoch, before, seq, *(len(parts.get(key, ())) // 2 for key in _KEYS)]
        for key in _KEYS:
            args += parts.get(key, ())
        return Outcome(await self._script(keys=self._keys, args=args))


def _parts(changes: Changes) -> dict[str, list[bytes]]:
    """Name, value, name, value... for each key but meta; an empty value deletes."""
    values = stored_values(changes)
    parts = {kind: [item for pair in values[kind].items() for item in pair] for kind in _KEYS[1:5]}
    queue = values["queue"]
    parts["queue"] = [item for name in values["jobs"] for item in (name, queue.get(name, b""))]
    return parts


def _meta(changes: Changes, position: Position, summary: bytes) -> list[bytes]:
    return [b"state", _encode(changes.meta), b"position", _encode(position), b"summary", summary]


async def summaries(redis: Redis, prefix: str, pools: Sequence[str]) -> list[bytes | None]:
    """The summary that each pool's owner last wrote (JSON), None where there is none, empty where the key is not ours.

    What is in one pool's key must not hide the others.
    """
    async with redis.pipeline(transaction=False) as pipe:
        for pool in pools:
            pipe.hget(key_of(prefix, pool, "meta"), "summary")
        found: list[Any] = await pipe.execute(raise_on_error=False)
    for answer in found:
        if isinstance(answer, Exception) and not is_wrong_type(answer):
            raise answer
    return [b"" if isinstance(answer, Exception) else answer for answer in found]


def is_wrong_type(error: BaseException) -> bool:
    """Whether Redis refused a command because the key holds a value of another type."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


def _epoch(stored: bytes | None) -> int:
    return int(stored) if stored is not None and stored.isdigit() else 0


def key_of(prefix: str, pool: str, name: str) -> str:
    """All keys of a pool share its hash tag."""
    return f"{prefix}{{{pool}}}:{name}"


def stored_values(changes: Changes) -> dict[str, dict[bytes, bytes]]:
    """The bytes that Redis holds for these values; empty for a value that is gone, but for the queue."""
    return {
        "jobs": _encode_all(changes.jobs),
        "runs": _encode_all(changes.runs),
        "nodes": _encode_all(changes.nodes),
        "tenants": _encode_all(changes.tenants),
        "meta": {b"state": _encode(changes.meta)},
        "queue": _queue(changes.jobs),
    }


def _queue(jobs: Mapping[str, Job | None]) -> dict[bytes, bytes]:
    """Queued jobs and their scores."""
    return {
        job_id.encode(): b"%d" % job.seq
        for job_id, job in jobs.items()
        if job is not None and job.state is JobState.QUEUED
    }


def _encode_all(values: Mapping[str, Struct | None]) -> dict[bytes, bytes]:
    return {name.encode(): _encode(value) if value is not None else b"" for name, value in values.items()}


def _decode_all(raw: dict[bytes, bytes], kind: type[Any]) -> dict[str, Any]:
    decode = msgspec.json.Decoder(kind).decode
    return {name.decode(): decode(value) for name, value in raw.items()}
