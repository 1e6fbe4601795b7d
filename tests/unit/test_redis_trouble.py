"""Each kind of error of Redis is worded for what it is: what, where, what to do."""

from __future__ import annotations

import pytest
from redis import exceptions

from streamsched.store.client import trouble
from streamsched.store.connection import RedisConnection

CONNECTION = RedisConnection("redis://user:secret@redis.example:7000/0")


@pytest.mark.parametrize(
    ("error", "what", "advice"),
    [
        (exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "is full", "maxmemory"),
        (exceptions.ResponseError("Error running script: -OOM command not allowed"), "is full", "maxmemory"),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), "is a replica", "primary"),
        (exceptions.AuthenticationError("Authentication required."), "refuses the login", "set user and password"),
        (
            exceptions.AuthenticationError("invalid username-password pair"),
            "refuses the login",
            "set user and password",
        ),
        (exceptions.ResponseError("NOAUTH Authentication required."), "refuses the login", "set user and password"),
        (exceptions.NoPermissionError("this user has no permissions to run 'eval'"), "forbids a command", "ACL"),
        (
            exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
            "is still loading",
            "when that is done",
        ),
        (exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"), "cannot save", "disk"),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), "refuses a command", "WRONGTYPE"),
        (exceptions.ConnectionError("Error 111 connecting. Connection refused."), "does not answer", "is it running"),
        (exceptions.TimeoutError("Timeout reading from socket"), "does not answer", "is it running"),
        (OSError(), "does not answer", "is it running"),
    ],
)
def test_words(error: Exception, what: str, advice: str) -> None:
    line = trouble(error, CONNECTION)
    assert what in line
    assert advice in line
    assert "redis.example:7000" in line
    assert "secret" not in line
    assert "\n" not in line
    if what != "does not answer":
        assert "does not answer" not in line
