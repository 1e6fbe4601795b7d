"""Cancellations that are none.

Kafka and Redis clients cancel futures of their own when a connection closes. Who awaits one at that moment looks as if
cancelled, and a task that ends so ends without a word: what it did is done no more, and who waits for it waits on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

_CLOSED = "the connection was closed while an answer was awaited"


def is_stray() -> bool:
    """Whether the running task, just told by a CancelledError, got it without anybody having cancelled it."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


@contextlib.contextmanager
def connection_errors() -> Iterator[None]:
    """Turns a stray cancellation into the ConnectionError that it stands for; a real one passes."""
    try:
        yield
    except asyncio.CancelledError as error:
        if not is_stray():
            raise
        raise ConnectionError(_CLOSED) from error


def what_ended(task: asyncio.Task[Any]) -> BaseException | None:
    """The error that a task ended by; None where it has done its work, or was cancelled by one of us."""
    if not task.cancelled():
        return task.exception()
    return None if task.cancelling() else RuntimeError(f"a task was cut short: {_CLOSED}")
