"""`streamsched worker`: one worker of the scheduler, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

import typer

from streamsched.service.settings import Settings

_QUIET = {"aiokafka": logging.ERROR, "faust": logging.WARNING, "mode": logging.WARNING}


def worker(
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run a worker: route jobs, schedule the pools whose partitions it gets, publish placements.

    Settings come from STREAMSCHED_* and the file STREAMSCHED_CONFIG names (docs/settings.md). Ends with 0 on SIGTERM or
    Ctrl-C, 2 when it cannot start, 3 when another worker has taken over its pool.
    """
    configure_logging(log_level)
    from streamsched.service.bootstrap import run_worker  # Faust takes a second to import

    asyncio.run(run_worker(Settings.from_env()))


def configure_logging(level: str) -> None:
    """One line per event on stderr, UTC."""
    logging.Formatter.converter = __import__("time").gmtime
    logging.basicConfig(
        level=level.upper() if level.upper() in logging.getLevelNamesMapping() else "INFO",
        format="%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    if level.upper() != "DEBUG":
        for name, least in _QUIET.items():
            logging.getLogger(name).setLevel(least)
