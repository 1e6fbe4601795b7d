"""One pool's state in Redis: read whole, changed by one atomic script per commit.

Keys share the hash tag {pool}, so that a cluster keeps them together:
`<prefix>{pool}:meta|jobs|runs|nodes|queue`. Values are the JSON of the core's values, so that they can be read with
redis-cli. What is here is a view: the journal in Kafka is the truth, and `seq` and `journal` say how much of it is in.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from importlib import resources
from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from streamsched.bus.messages import Placement
from streamsched.core.cluster import Changes, Meta
from streamsched.core.model import Job, JobState, Run
from streamsched.core.node import NodeRecord

_SCRIPT = resources.files(__package__).joinpath("pool_state.lua").read_text(encoding="utf-8")
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
    next_offsets: dict[str, int] = {}
    """Input "topic:partition" -> next offset to apply."""
    outbox: tuple[Placement, ...] = ()
    """Decisions of the last record: whoever takes the pool over sees to it that they are on the topic."""


class Stored(Struct, frozen=True, kw_only=True):
    """A pool as Redis holds it. `state` is None when it holds nothing of it."""

    epoch: int
    position: Position
    state: Changes | None


class PoolStore:
    """Access to one pool. Raises redis.exceptions.RedisError when Redis cannot be reached; the caller retries."""

    def __init__(self, redis: Redis, pool: str, prefix: str = "streamsched:") -> None:
        self.pool = pool
        self._redis = redis
        self._keys = [_key(prefix, pool, name) for name in ("meta", "jobs", "runs", "nodes", "queue")]
        self._script = redis.register_script(_SCRIPT)

    async def load(self) -> Stored:
        """Everything, as of one moment."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for key in self._keys[:4]:
                pipe.hgetall(key)
            meta, jobs, runs, nodes = await pipe.execute()
        epoch = int(meta.get(b"epoch", 0))
        if b"state" not in meta:
            return Stored(epoch=epoch, position=Position(), state=None)
        state = Changes(
            jobs=_decode_all(jobs, Job),
            runs=_decode_all(runs, Run),
            nodes=_decode_all(nodes, NodeRecord),
            meta=msgspec.json.decode(meta[b"state"], type=Meta),
        )
        return Stored(epoch=epoch, position=msgspec.json.decode(meta[b"position"], type=Position), state=state)

    async def raw(self) -> dict[str, dict[bytes, bytes]]:
        """Stored bytes of jobs, runs, nodes and the core's scalars: what a replay of the journal must equal."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for key in self._keys[:4]:
                pipe.hgetall(key)
            meta, jobs, runs, nodes = await pipe.execute()
        return {"jobs": jobs, "runs": runs, "nodes": nodes, "meta": {b"state": meta.get(b"state", b"")}}

    async def acquire(self, at_least: int) -> int:
        """Take the pool over: a new epoch, above every one seen. From now on commits of earlier epochs are refused."""
        return int(await self._script(keys=self._keys, args=["acquire", at_least]))

    async def commit(self, epoch: int, before: int, position: Position, changes: Changes, summary: bytes) -> Outcome:
        """Bring the stored state from record `before` to `position.seq`. Safe to repeat after a lost answer."""
        return Outcome(await self._write("commit", epoch, before, position, changes, summary))

    async def reset(self, epoch: int, position: Position, everything: Changes, summary: bytes) -> Outcome:
        """Replace whatever is stored by `everything`."""
        return Outcome(await self._write("reset", epoch, position.seq, position, everything, summary))

    async def check(self, epoch: int, seq: int) -> Outcome:
        """Whether Redis still holds what the owner of `epoch` last wrote: how an idle owner notices a loss."""
        return Outcome(await self._script(keys=self._keys, args=["check", epoch, seq]))

    async def _write(
        self, step: str, epoch: int, before: int, position: Position, changes: Changes, summary: bytes
    ) -> int:
        values = stored_values(changes)
        meta: list[Any] = ["state", values["meta"][b"state"], "position", _encode(position), "summary", summary]
        queue: list[Any] = []
        for job_id, job in changes.jobs.items():
            queue += [job_id, str(job.seq) if job is not None and job.state is JobState.QUEUED else ""]
        parts = [meta, _pairs(values["jobs"]), _pairs(values["runs"]), _pairs(values["nodes"]), queue]
        args: list[Any] = [step, epoch, before, position.seq, *(len(part) // 2 for part in parts)]
        for part in parts:
            args += part
        return int(await self._script(keys=self._keys, args=args))


async def summaries(redis: Redis, prefix: str, pools: Sequence[str]) -> list[bytes | None]:
    """The summary that each pool's owner last wrote (JSON), None where there is none."""
    async with redis.pipeline(transaction=False) as pipe:
        for pool in pools:
            pipe.hget(_key(prefix, pool, "meta"), "summary")
        return list(await pipe.execute())


def _key(prefix: str, pool: str, name: str) -> str:
    return f"{prefix}{{{pool}}}:{name}"


def stored_values(changes: Changes) -> dict[str, dict[bytes, bytes]]:
    """The bytes that Redis holds for these values; empty for a value that is gone."""
    return {
        "jobs": {name.encode(): _encode(job) if job is not None else b"" for name, job in changes.jobs.items()},
        "runs": {name.encode(): _encode(run) if run is not None else b"" for name, run in changes.runs.items()},
        "nodes": {name.encode(): _encode(node) if node is not None else b"" for name, node in changes.nodes.items()},
        "meta": {b"state": _encode(changes.meta)},
    }


def _pairs(values: dict[bytes, bytes]) -> list[bytes]:
    return [item for pair in values.items() for item in pair]


def _decode_all(raw: dict[bytes, bytes], kind: type[Any]) -> dict[str, Any]:
    decode = msgspec.json.Decoder(kind).decode
    return {name.decode(): decode(value) for name, value in raw.items()}
