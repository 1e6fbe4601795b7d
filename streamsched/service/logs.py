"""The worker's log: one line per event on stderr, UTC, and no floods.

While a broker is away aiokafka and Faust log every attempt of every connection, some with tracebacks. What there is to
say, the worker says itself, once (`bus.outage`); of theirs only what is not an outage is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from aiokafka.errors import KafkaError

_OTHERS: Final = ("aiokafka", "faust", "mode", "kafka")
_BURST: Final = 5
_EVERY_S: Final = 10.0


def configure_logging(level: str) -> None:
    """For the whole process. DEBUG lets everything through."""
    handler = logging.StreamHandler()
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    if number > logging.DEBUG:
        handler.addFilter(not_of_outages)
        handler.addFilter(Repeats())
    logging.basicConfig(level=number, handlers=[handler])


def not_of_outages(record: logging.LogRecord) -> bool:
    """Of the Kafka libraries: errors with a cause that is not the broker's absence."""
    if record.name.partition(".")[0] not in _OTHERS:
        return True
    if record.levelno < logging.ERROR or record.exc_info is None:
        return False
    cause = record.exc_info[1]
    return cause is not None and not isinstance(cause, KafkaError | OSError | TimeoutError)


class Repeats(logging.Filter):
    """Of messages with the same wording a few are shown in any ten seconds; the next one tells how many were not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], list[float]] = {}
        """(logger, wording) -> [since when, how many in this time]."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.CRITICAL:
            return True
        now, key = self._clock(), (record.name, str(record.msg))
        since, count = self._seen.get(key, (now, 0))
        if now - since >= _EVERY_S:
            left_out = int(count) - _BURST
            self._seen[key] = [now, 1]
            if left_out > 0:
                record.msg = f"{record.getMessage()} ({left_out} more like this were left out)"
                record.args = None
            return True
        self._seen[key] = [since, count + 1]
        return count < _BURST
