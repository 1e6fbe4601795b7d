"""`streamsched worker`: one worker of the scheduler, until SIGTERM."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from streamsched.service.settings import Settings


def worker(
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run a worker: route jobs, schedule the pools whose partitions it gets, publish placements.

    Settings come from STREAMSCHED_* and the file STREAMSCHED_CONFIG names. Ends with 0 on SIGTERM or Ctrl-C (1 when
    Kafka or Redis did not let it finish), 2 when it cannot start or take a pool over and a person has to act, 3 when
    another worker has taken over its pool, 1 when it must not go on: whoever supervises it starts it again, and
    recovery makes good what was open.
    """
    from streamsched.service.logs import configure_logging

    configure_logging(log_level)
    from streamsched.service.bootstrap import run_worker  # Faust takes a second to import

    asyncio.run(run_worker(Settings.from_env()))
