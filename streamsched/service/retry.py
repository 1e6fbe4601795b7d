"""How the service waits for Kafka and Redis to come back."""

from __future__ import annotations

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
