"""Which pool each job went to: what the router needs to send commands and resubmissions the same way.

A view as well: each pool's owner writes the pool's jobs into it when it takes the pool over, and again whenever it
finds that they are not known to be in (`look_after`). Until every pool has done so, `claim` gives nothing, since a job
that is not found might be known all the same. That they are in counts for one run of the Redis server only: one that
was started again may have come back from an older copy, without the jobs claimed since (`job_index.lua`, generation).

A job that its pool has forgotten stays for a while, marked: an arrival of the same id that is on its way to the pool by
then, or is claimed meanwhile, must not find itself in two pools.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from importlib import resources
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis

_SCRIPT = resources.files(__package__).joinpath("job_index.lua").read_text(encoding="utf-8")
_CHUNK = 5000
GONE_S = 600.0
"""How long a forgotten job stays marked by default: far longer than an arrival takes from its claim to its pool."""
log = logging.getLogger(__name__)


class Claim(Struct, frozen=True):
    """The pool of each job asked for, in order, and the generation of the index that it was written to."""

    pools: list[str]
    generation: str


class JobIndex:
    """Raises redis.exceptions.RedisError when Redis cannot be reached; the caller retries."""

    def __init__(self, redis: Redis, pools: Sequence[str], prefix: str, gone_s: float = GONE_S) -> None:
        self._pools = list(pools)
        self._gone_s = gone_s
        self._prefix = f"{prefix}{{#router}}:"  # no pool can have this name
        self._jobs = f"{self._prefix}jobs"
        self._ready = f"{self._prefix}pools"
        self._script = redis.register_script(_SCRIPT)

    async def claim(self, wishes: Sequence[tuple[str, str]]) -> Claim | None:
        """For each (job, pool): the pool it is in, the wished one if it is new. None: the index is not whole."""
        names = [name for wish in wishes for name in wish]
        answer = await self._do("claim", len(self._pools), *self._pools, *names)
        if answer == -1:
            self._say_mended()
        if not isinstance(answer, list):
            return None
        generation, *pools = [name.decode() for name in answer]
        return Claim(pools, generation)

    async def find(self, job_ids: Sequence[str]) -> list[str | None]:
        """The pool of each job, None where it is not known."""
        pools: list[str | None] = []
        for start in range(0, len(job_ids), _CHUNK):
            mended, *found = await self._do("find", *job_ids[start : start + _CHUNK])
            if mended:
                self._say_mended()
            pools += [pool.decode() if pool is not None else None for pool in found]
        return pools

    async def whole(self) -> bool:
        """Whether every pool has written its jobs since the index was last lost."""
        answer = await self._do("whole", *self._pools)
        if answer == -1:
            self._say_mended()
        return bool(answer == 1)

    async def generation(self) -> str:
        """Changes with every start of the server; empty when it does not tell (our user may not use INFO)."""
        return str((await self._do("now")).decode())

    async def restore(self, pool: str, job_ids: Sequence[str]) -> None:
        """Write the jobs of a pool, then say that they are in."""
        if not await self.generation():
            log.warning(
                "pool %s: Redis does not tell which run of it this is: allow INFO to our user, or a Redis that comes "
                "back from an old copy is not recognised at once",
                pool,
            )
        while True:
            await self._do("begin", pool)
            for start in range(0, len(job_ids), _CHUNK):
                await self._do("put", pool, *job_ids[start : start + _CHUNK])
            if await self._do("end", pool):
                return

    async def forget(self, pool: str, job_ids: Sequence[str], now: float) -> None:
        """The pool does not know these jobs any more; after `gone_s` the same ids are new jobs for all pools."""
        for start in range(0, len(job_ids), _CHUNK):
            await self._do("forget", pool, now, *job_ids[start : start + _CHUNK], own=pool)

    async def look_after(self, pool: str, known: Container[str], now: float) -> bool:
        """Whether the pool's jobs are known to be in; if not, `restore` them.

        Also takes out what was forgotten long ago, but for the jobs that the pool has again (`known`).
        """
        there, *due = await self._do("look", pool, now - self._gone_s, own=pool)
        names = [name.decode() for name in due]
        kept = [name for name in names if name in known]
        if names:
            gone = [name for name in names if name not in known]
            await self._do("settle", pool, len(kept), *kept, *gone, own=pool)
        return bool(there)

    async def _do(self, step: str, *args: str | float, own: str | None = None) -> Any:
        keys = [self._jobs, self._ready] + ([f"{self._prefix}gone:{own}"] if own is not None else [])
        return await self._script(keys=keys, args=[step, *args])

    def _say_mended(self) -> None:
        log.warning("the job index (%s) held what streamsched did not write; all pools write it anew", self._jobs)
