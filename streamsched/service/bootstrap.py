"""The only place where the parts are wired: one worker process, from settings to a clean end.

A worker routes, schedules the pools whose partitions it gets, and solves their windows in one process. It ends by
itself when it must not go on (fenced, a broken invariant): whoever supervises it starts it again, and what it held is
made good by recovery.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

from streamsched.bus.admin import diff_topics
from streamsched.bus.app import Handlers, build_app
from streamsched.bus.producer import make_producer
from streamsched.errors import EXIT_FAILED, EXIT_FENCED, UserError
from streamsched.policy import by_name
from streamsched.store.client import connect
from streamsched.store.job_index import JobIndex

from .clock import Clock
from .letters import DeadLetters
from .reachable import check_reachable
from .recovery import Fenced
from .retry import words
from .router import Router
from .runner import Parts
from .scheduler import Scheduler
from .settings import Settings
from .solver import SolverProcess

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Worker:
    """The wired parts of a running worker."""

    scheduler: Scheduler
    letters: DeadLetters
    solver: SolverProcess


async def run_worker(settings: Settings) -> None:
    """Run one worker until SIGTERM or SIGINT. Raises UserError when it cannot start."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with running_worker(settings):
        await stop.wait()
        log.info("stopping: finishing what is being written")


@contextlib.asynccontextmanager
async def running_worker(settings: Settings) -> AsyncIterator[Worker]:
    """A worker inside a running loop: started on entry, drained and stopped on exit."""
    ranker = by_name(settings.scheduler.policy)
    await asyncio.to_thread(check_reachable, settings.kafka, settings.redis)
    await _check_topics(settings)
    producer = make_producer(settings.kafka)
    redis = connect(settings.redis)
    solver = SolverProcess(settings.solve_limits())
    await asyncio.gather(producer.start(), solver.start())
    clock = Clock()
    letters = DeadLetters(settings, producer, clock)
    index = JobIndex(redis, settings.pools, settings.key_prefix)
    parts = Parts(
        settings=settings,
        producer=producer,
        clock=clock,
        ranker=ranker,
        solve=solver.solve,
        letters=letters,
        index=index,
    )
    scheduler = Scheduler(parts, redis, letters, _end_process)
    router = Router(settings, redis, index, producer, letters)
    app = build_app(
        settings.group,
        settings.kafka,
        settings.names,
        Handlers(router.handle, scheduler.schedule, scheduler.observe, scheduler.assigned, scheduler.revoked),
        settings.times,
    )
    telemetry = asyncio.create_task(scheduler.telemetry.run())
    try:
        await app.start()
        yield Worker(scheduler, letters, solver)
    finally:
        await scheduler.drain()
        await app.stop()
        telemetry.cancel()
        await solver.close()
        await producer.stop()
        await redis.aclose()


async def _check_topics(settings: Settings) -> None:
    """Every topic must be there with the right partitions before Faust asks for it."""
    changes = await diff_topics(settings.kafka, settings.names, settings.partitions)
    wrong = [str(change) for change in changes if change.kind in ("missing", "partitions")]
    if wrong:
        raise UserError(f"{settings.kafka.bootstrap}: {'; '.join(wrong)}. Run `streamsched topics apply`")


def _end_process(error: BaseException) -> None:
    """A runner that must not go on ends the process at once: what it did not acknowledge is delivered again."""
    if isinstance(error, Fenced):
        log.error("%s: this worker ends", error)
        logging.shutdown()
        os._exit(EXIT_FENCED)
    log.critical("this worker ends: %s", words(error), exc_info=error)
    logging.shutdown()
    os._exit(EXIT_FAILED)
