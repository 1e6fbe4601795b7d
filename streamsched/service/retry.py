"""How the service waits for Kafka and Redis to come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

_SHORT_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_LONG_S = 5.0


def pauses() -> Iterator[float]:
    """Waits between tries, seconds: short at first, then every five seconds without end."""
    yield from _SHORT_S
    while True:
        yield _LONG_S


def words(error: BaseException) -> str:
    """An error in one short line."""
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]


def is_stray() -> bool:
    """Whether the running task, just told by a CancelledError, got it without anybody having cancelled it.

    Kafka and Redis clients cancel futures of their own when a connection closes. Who awaits one at that moment looks
    as if cancelled, and a task that ends so ends without a word.
    """
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
        raise ConnectionError("the connection was closed while an answer was awaited") from error
