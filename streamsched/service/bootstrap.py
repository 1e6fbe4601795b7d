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
from collections.abc import AsyncIterator, Awaitable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiokafka.errors import KafkaError

from streamsched.bus.admin import diff_topics
from streamsched.bus.app import Handlers, build_app
from streamsched.bus.hearing import Ears
from streamsched.bus.producer import Producer
from streamsched.bus.strays import what_ended
from streamsched.bus.topics import DECLARATIONS
from streamsched.errors import EXIT_FAILED, EXIT_FENCED, MustRestart, UserError
from streamsched.placement.solve import SolveLimits
from streamsched.policy import by_name
from streamsched.store.client import connect
from streamsched.store.job_index import JobIndex

from .clock import Clock, TimedProducer
from .dumps import DumpFolder, DumpingSolver
from .letters import DeadLetters
from .meters import measure_models
from .models import ModelFolder, check_policy, is_model
from .reachable import check_reachable, probe_kafka
from .recovery import Fenced
from .retention import unsafe_keep
from .retry import words
from .router import Router
from .runner import Parts
from .scheduler import Scheduler
from .settings import Settings
from .solver import SolverProcess
from .solver_parts import solve_by_helpers

log = logging.getLogger(__name__)

_STOP_S: Final = 5.0
_PROBE_S: Final = 3.0


@dataclass(slots=True)
class Worker:
    """The wired parts of a running worker."""

    scheduler: Scheduler
    letters: DeadLetters
    solver: SolverProcess
    left: list[str] = field(default_factory=list)
    """What did not come to its end when the worker stopped."""


async def run_worker(settings: Settings) -> None:
    """Run one worker until SIGTERM or SIGINT. Raises UserError when it cannot start.

    It ends within about `settings.stop_s` and ten seconds more, also while Kafka or Redis do not answer: what it has
    not finished then is finished by whoever takes its pools over, and the exit code is 1.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with running_worker(settings) as worker:
        await stop.wait()
        log.info("stopping: finishing what is being written")
    if worker.left:
        # Faust's threads are still waiting for Kafka, and Python would wait for them.
        log.error("stopped without waiting for %s: recovery makes good what is open", " and ".join(worker.left))
        logging.shutdown()
        os._exit(EXIT_FAILED)


@contextlib.asynccontextmanager
async def running_worker(settings: Settings) -> AsyncIterator[Worker]:
    """A worker inside a running loop: started on entry, drained and stopped on exit."""
    check_policy(settings)
    models = ModelFolder(settings) if is_model(settings) else None
    await asyncio.to_thread(check_reachable, settings.kafka, settings.redis)
    await _check_topics(settings)
    names = settings.names
    limits = {names.of(declared): int(declared.configs["max.message.bytes"]) for declared in DECLARATIONS}
    clock = Clock()
    if models is not None:
        await asyncio.to_thread(models.poll, clock())
    producer = TimedProducer(settings.kafka, log.warning, clock, limits, replaceable=(names.rankings, names.snapshots))
    redis = connect(settings.redis)
    solver = _solver(settings.solve_limits())
    await _start(settings, producer, solver)
    dumping = _dumping(settings, solver, clock)
    letters = DeadLetters(settings, producer, clock)
    index = JobIndex(redis, settings.pools, settings.key_prefix, settings.index_keep_s)
    ears = Ears(settings.kafka.fetch_wait_ms / 1e3)
    parts = Parts(
        settings=settings,
        producer=producer,
        clock=clock,
        ranker=by_name(settings.scheduler.policy if models is None else models.in_use.base),
        solve=dumping.solve if dumping else solver.solve,
        letters=letters.write,
        index=index,
        hearing=ears,
        models=models,
    )
    scheduler = Scheduler(parts, redis, letters, _end_process)
    if models is not None:
        measure_models(scheduler.models, lambda: models.refused)
    router = Router(settings, redis, index, producer, letters)
    app = build_app(
        settings.group,
        settings.kafka,
        settings.names,
        Handlers(
            router.handle, scheduler.schedule, scheduler.observe, scheduler.assigned, scheduler.revoked, _end_process
        ),
        settings.times,
        ears,
    )
    worker = Worker(scheduler, letters, solver)
    watching = _watch(settings, producer, scheduler, app)
    if models is not None:
        watching.append(_must_go_on(models.watch(clock)))
    try:
        try:
            await app.start()
        except KafkaError as error:
            raise UserError(f"Kafka at {settings.kafka.bootstrap} went away at the start: {words(error)}") from None
        yield worker
    finally:
        await scheduler.drain()
        worker.left += await _within("the consumer group", app.stop(), _STOP_S)
        for task in watching:
            task.cancel()
        await solver.close()
        if dumping:
            await dumping.close()
        worker.left += [] if await producer.stop(_STOP_S) else ["Kafka"]
        await redis.aclose()


def _solver(limits: SolveLimits) -> SolverProcess:
    if limits.parts_max == 1:
        return SolverProcess(limits)
    return SolverProcess(limits, function=f"{solve_by_helpers.__module__}:{solve_by_helpers.__name__}")


def _dumping(settings: Settings, solver: SolverProcess, clock: Clock) -> DumpingSolver | None:
    if not settings.dump_dir:
        return None
    folder = DumpFolder(Path(settings.dump_dir), settings.dump_files, settings.dump_mib * 2**20)
    return DumpingSolver(solver.solve, settings.solve_limits(), folder, clock)


async def _start(settings: Settings, producer: Producer, solver: SolverProcess) -> None:
    try:
        await asyncio.gather(producer.start(), solver.start())
    except (KafkaError, OSError) as error:
        await solver.close()
        await producer.stop(_STOP_S)
        raise UserError(f"Kafka at {settings.kafka.bootstrap} or the solver did not start: {words(error)}") from None


def _watch(settings: Settings, producer: Producer, scheduler: Scheduler, app: Any) -> list[asyncio.Task[None]]:
    """What runs beside the agents; the end of any of these by an error is the end of the process."""

    async def reachable() -> bool:
        try:
            await asyncio.to_thread(probe_kafka, settings.kafka, _PROBE_S)
        except UserError:
            return False
        return True

    def stuck(reason: str) -> None:
        _end_process(MustRestart(reason))

    async def crash() -> None:
        while not app.crashed:  # noqa: ASYNC110 - set from other threads
            await asyncio.sleep(0.5)
        raise RuntimeError(f"the consumer has crashed: {words(app.crash_reason)}")

    return [_must_go_on(work) for work in (scheduler.telemetry.run(), producer.watch(reachable, stuck), crash())]


def _must_go_on(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """As a task whose end by an error is the end of the process."""

    def ended(task: asyncio.Task[None]) -> None:
        if (error := what_ended(task)) is not None:
            _end_process(error)

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task


async def _within(what: str, work: Awaitable[Any], limit_s: float) -> list[str]:
    """Nothing, or what did not end in time. It is not cancelled: that would have to be waited for as well."""
    done, _ = await asyncio.wait([asyncio.ensure_future(work)], timeout=limit_s)
    return [] if done else [what]


async def _check_topics(settings: Settings) -> None:
    """Every topic must be there with the right partitions before Faust asks for it."""
    changes = await diff_topics(settings.kafka, settings.names, settings.partitions)
    wrong = [str(change) for change in changes if change.kind in ("missing", "partitions")]
    if wrong:
        raise UserError(f"{settings.kafka.bootstrap}: {'; '.join(wrong)}. Run `streamsched topics apply`")
    if unsafe := unsafe_keep(settings, changes):
        log.warning("%s", unsafe)


def _end_process(error: BaseException) -> None:
    """A runner that must not go on ends the process at once: what it did not acknowledge is delivered again."""
    if isinstance(error, Fenced):
        log.error("%s: this worker ends", error)
        logging.shutdown()
        os._exit(EXIT_FENCED)
    if isinstance(error, UserError):
        log.error("%s: this worker ends", error)
        log.debug("where it came from", exc_info=error)
        logging.shutdown()
        os._exit(error.exit_code)
    log.critical("this worker ends: %s", words(error), exc_info=error)
    logging.shutdown()
    os._exit(EXIT_FAILED)
