"""The Redis client of the live service, and its errors in words."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .connection import RedisConnection


def connect(connection: RedisConnection) -> Redis:
    """A client that fails fast: the runner does the retrying, since only it knows what is safe to repeat."""
    return Redis.from_url(
        connection.url,
        decode_responses=False,
        socket_timeout=10.0,
        socket_connect_timeout=5.0,
        health_check_interval=15,
        retry=Retry(NoBackoff(), 0),
    )
