"""Which pool each job went to: what the router needs to send commands and resubmissions the same way.

A view as well: each pool's owner writes the pool's jobs into it when it recovers and takes out those it forgets. Until
every pool has done so after a loss, `claim` gives nothing, since a job that is not found might be known all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

_CLAIM = """
for i = 1, tonumber(ARGV[1]) do
  if redis.call('HEXISTS', KEYS[2], ARGV[1 + i]) == 0 then return false end
end
local answer = {}
for i = tonumber(ARGV[1]) + 2, #ARGV, 2 do
  redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1])
  answer[#answer + 1] = redis.call('HGET', KEYS[1], ARGV[i])
end
return answer
"""
_FORGET = """
for i = 2, #ARGV do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[1] then redis.call('HDEL', KEYS[1], ARGV[i]) end
end
"""
_CHUNK = 5000


class JobIndex:
    """Raises redis.exceptions.RedisError when Redis cannot be reached; the caller retries."""

    def __init__(self, redis: Redis, pools: Sequence[str], prefix: str) -> None:
        self._redis = redis
        self._pools = list(pools)
        self._jobs = f"{prefix}{{#router}}:jobs"
        self._ready = f"{prefix}{{#router}}:pools"  # no pool can have this name
        self._claim = redis.register_script(_CLAIM)
        self._forget = redis.register_script(_FORGET)

    async def claim(self, wishes: Sequence[tuple[str, str]]) -> list[str] | None:
        """For each (job, pool): the pool it is in, the wished one if it is new. None: the index is not whole."""
        args: list[str | int] = [len(self._pools), *self._pools, *(name for wish in wishes for name in wish)]
        answer = await self._claim(keys=[self._jobs, self._ready], args=args)
        return None if answer is None else [pool.decode() for pool in answer]

    async def find(self, job_ids: Sequence[str]) -> list[str | None]:
        """The pool of each job, None where it is not known."""
        if not job_ids:
            return []
        found = await self._redis.hmget(self._jobs, list(job_ids))
        return [pool.decode() if isinstance(pool, bytes) else None for pool in found]

    async def whole(self) -> bool:
        """Whether every pool has written its jobs since the index was last lost."""
        return all(await self._redis.hmget(self._ready, self._pools))

    async def restore(self, pool: str, job_ids: Sequence[str], epoch: int) -> None:
        """Write the jobs of a pool, then say that they are in."""
        for start in range(0, len(job_ids), _CHUNK):
            await self._redis.hset(self._jobs, mapping=dict.fromkeys(job_ids[start : start + _CHUNK], pool))
        await self._redis.hset(self._ready, pool, str(epoch))

    async def forget(self, pool: str, job_ids: Sequence[str]) -> None:
        """The pool does not know these jobs any more; the same ids are new jobs from now on."""
        for start in range(0, len(job_ids), _CHUNK):
            await self._forget(keys=[self._jobs], args=[pool, *job_ids[start : start + _CHUNK]])
