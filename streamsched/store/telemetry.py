"""The latest telemetry of each node of a pool, as a hash that holds nodes of the pool only."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from redis.asyncio import Redis

_WRITE = """
if redis.call('TYPE', KEYS[1])['ok'] ~= 'hash' then redis.call('DEL', KEYS[1]) end
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
"""


class TelemetryStore:
    """Raises redis.exceptions.RedisError when Redis cannot be reached."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix

    async def write(self, pool: str, samples: Mapping[str, bytes]) -> None:
        """Node -> its sample. A key that is not a hash is not ours and is replaced."""
        args = [item for pair in samples.items() for item in pair]
        await self._redis.register_script(_WRITE)(keys=[self._key(pool)], args=args)

    async def forget_strangers(self, pool: str, nodes: Container[str]) -> None:
        """Take out what is not of these nodes: machines come and go, and their names with them."""
        names: list[Any] = await self._redis.hkeys(self._key(pool))
        gone = [name for name in names if name.decode(errors="replace") not in nodes]
        if gone:
            await self._redis.hdel(self._key(pool), *gone)

    def _key(self, pool: str) -> str:
        return f"{self._prefix}{{{pool}}}:telemetry"
