"""The Redis client of the live service, and its errors in words."""

from __future__ import annotations

from redis import exceptions
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


def trouble(error: BaseException, connection: RedisConnection) -> str:
    """What is the matter with Redis, where, and what to do, in one line: an error of a command or a connection."""
    where = f"Redis at {connection.address}"
    text = " ".join((str(error) or type(error).__name__).split())[:200]
    if isinstance(error, exceptions.NoPermissionError) or text.startswith("NOPERM"):
        return f"{where} forbids a command to our user ({text}): allow it in the user's ACL"
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError) or _is_about_login(text):
        return f"{where} refuses the login ({text}): set user and password in STREAMSCHED_REDIS_URL"
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in text:
        return f"{where} is full ({text}): give it more memory (maxmemory), or remove what others keep there"
    if isinstance(error, exceptions.ReadOnlyError) or "READONLY" in text:
        return f"{where} is a replica that takes no writes ({text}): set STREAMSCHED_REDIS_URL to the primary"
    if isinstance(error, exceptions.BusyLoadingError):
        return f"{where} is still loading its data ({text}): it will answer when that is done"
    if "MISCONF" in text:
        return f"{where} takes no writes since it cannot save to its disk ({text}): look at its log and disk"
    if isinstance(error, exceptions.ResponseError):
        return f"{where} refuses a command ({text})"
    return f"Redis does not answer ({text}): is it running at {connection.address} (STREAMSCHED_REDIS_URL)?"


def _is_about_login(text: str) -> bool:
    return any(code in text for code in ("NOAUTH", "WRONGPASS", "invalid password", "AUTH <password> called"))
