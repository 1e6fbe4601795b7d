"""The worker's log in an outage: our one line, not their hundreds."""

from __future__ import annotations

import logging
import sys

from aiokafka.errors import KafkaConnectionError

from streamsched.service.logs import Repeats, not_of_outages


def record(name: str, level: int, message: str, *args: object, error: Exception | None = None) -> logging.LogRecord:
    exc_info = None
    if error is not None:
        try:
            raise error
        except Exception:
            exc_info = sys.exc_info()
    return logging.LogRecord(name, level, "f.py", 1, message, args, exc_info)


def test_of_the_libraries_only_real_errors_are_kept() -> None:
    assert not not_of_outages(record("aiokafka.conn", logging.ERROR, "Unable connect to node"))
    assert not not_of_outages(record("mode.app", logging.ERROR, "Crashed", error=KafkaConnectionError("gone")))
    assert not_of_outages(record("faust.app", logging.ERROR, "Crashed", error=ZeroDivisionError()))
    assert not_of_outages(record("streamsched.x", logging.INFO, "ours"))


def test_repeats_are_left_out_and_counted() -> None:
    now = [0.0]
    repeats = Repeats(lambda: now[0])
    shown = [repeats.filter(record("a", logging.WARNING, "job %s", i)) for i in range(12)]
    assert shown == [True] * 5 + [False] * 7
    assert repeats.filter(record("a", logging.WARNING, "another %s", 1))
    assert repeats.filter(record("a", logging.CRITICAL, "job %s", 1))
    now[0] = 10.0
    late = record("a", logging.WARNING, "job %s", 12)
    assert repeats.filter(late)
    assert late.getMessage() == "job 12 (7 more like this were left out)"
