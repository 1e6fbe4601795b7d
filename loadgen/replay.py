"""Replay a trace into Kafka in (scaled) real time, with simulated executors, until every job has ended.

`run_replay` is the whole of it: read the trace, note where the topics end, announce the fleet, submit each job at its
time divided by `speed`, wait, read the topics to their end, audit and summarise them.

The real duration of a job travels as the label `loadgen.duration_s`, which only simulated executors look at.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.topics import TopicNames
from streamsched.errors import UserError
from streamsched.sim.nodes import NodeGroup

from .executor import AgentIntervals, Executors
from .fleet import DURATION_LABEL, FleetOptions, SimulatedFleet
from .history import Audit, History, audit
from .jobs import GPUS_PER_NODE, Gang, TraceJob, gang_of
from .kafka import Outgoing, Publisher
from .observe import Observer
from .progress import Progress, show_progress
from .report import RunFacts, Summary, summarise
from .trace import Trace, Window, clamp, read_trace

_BATCH: Final = 1000
_TICK_S: Final = 0.2
_HINT_S: Final = 20.0
_LONG_GAP_REAL_S: Final = 300.0
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """`nodes`: node groups of each pool. `pool` None: jobs name no pool and the router chooses one."""

    trace: Path
    speed: float = 600.0
    nodes: Mapping[str, tuple[NodeGroup, ...]] = field(default_factory=dict)
    pool: str | None = "default"
    window: Window = field(default_factory=Window)
    max_duration_s: float | None = None
    """Trace seconds; longer jobs are cut to it, and counted."""
    gpus_per_node: int | None = None
    """Largest worker; None: the largest node of the fleet, or 8."""
    job_prefix: str | None = None
    """Of job ids; None: made from the trace's name and the time, so that a second replay brings new jobs."""
    executors: bool = True
    fence: bool = False
    fleet: FleetOptions = field(default_factory=FleetOptions)
    intervals: AgentIntervals = field(default_factory=AgentIntervals)
    wait: bool = True
    stall_timeout_s: float = 120.0
    """Give up when nothing runs and nothing was heard for this long."""
    allow_repeated_placements: bool = False
    """A scheduler that was killed may write a placement twice; that is then no violation."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    summary: Summary
    audit: Audit
    trace: Trace
    history: History
    fleets: tuple[SimulatedFleet, ...]
    job_prefix: str

    @property
    def ok(self) -> bool:
        """Every job that was waited for completed, and nothing was violated."""
        return self.audit.total == 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be submitted: (seconds after the start, arrival without its time), in order."""

    trace: Trace
    prefix: str
    entries: tuple[tuple[float, m.JobArrival], ...]
    clamped: int
    end_s: float
    """When the last job would end if none waited."""
    notes: tuple[str, ...]


async def run_replay(
    options: ReplayOptions, kafka: KafkaConnection, names: TopicNames, console: Console
) -> ReplayResult:
    """Raises UserError when it cannot run; what is wrong with the outcome is in the result."""
    fleets = _fleets(options)
    plan = make_plan(options, fleets)

    def say(text: str) -> None:
        console.print(f"[yellow]{escape(text)}[/]")

    for note in plan.notes:
        say(note)
    started = time.monotonic()
    with _one_error():
        async with Publisher(kafka, say) as publisher, _closing(Observer(kafka, names, say)) as observer:
            await observer.start(publisher, nodes_from_beginning=not options.executors)
            progress = Progress(total=len(plan.entries), expected_s=plan.end_s, observer=observer)
            executors = Executors(fleets, kafka, names, publisher, say, options.intervals)
            if options.executors:
                await executors.start(options.fence)
            background = [show_progress(progress, console)] + ([executors.run()] if options.executors else [])
            async with _running(background, observer.follow(), observer.stop):
                await submit(plan.entries, names, publisher, progress)
                if options.wait:
                    await _wait_for_end(plan, observer, publisher, options, say)
            await observer.catch_up()
    return _result(options, plan, fleets, observer.history, time.monotonic() - started)


def make_plan(options: ReplayOptions, fleets: Sequence[SimulatedFleet]) -> Plan:
    if not (options.speed > 0 and math.isfinite(options.speed)):
        raise UserError(f"speed {options.speed:g}: must be more than 0 trace seconds per second")
    trace = read_trace(options.trace, options.window)
    jobs, clamped = trace.jobs, 0
    if options.max_duration_s is not None:
        jobs, clamped = clamp(jobs, options.max_duration_s)
    prefix = options.job_prefix or _job_prefix(options.trace)
    if not _PREFIX.fullmatch(prefix):
        raise UserError(f"job prefix {prefix!r}: letters, digits and ._:/@+- only, at most 200")
    largest_node = max((node.gpus for fleet in fleets for node in fleet.nodes), default=GPUS_PER_NODE)
    gpus_per_node = options.gpus_per_node or largest_node
    entries, end_s = [], 0.0
    origin = jobs[0].submit_s
    for job in jobs:
        gang = gang_of(job.gpus, gpus_per_node)
        if fleets and not any(_could_hold(fleet, gang) for fleet in fleets):
            trace.refusals.add("larger-than-the-fleet", job.line)
            continue
        at_s = (job.submit_s - origin) / options.speed
        end_s = max(end_s, at_s + job.duration_s / options.speed)
        entries.append((at_s, _arrival(job, gang, prefix, options)))
    if not entries:
        raise UserError(f"{options.trace}: no job fits the fleet; refused: {trace.refusals.describe()}")
    return Plan(trace, prefix, tuple(entries), clamped, end_s, tuple(_notes(trace, entries, clamped, end_s)))


async def submit(
    entries: Sequence[tuple[float, m.JobArrival]], names: TopicNames, publisher: Publisher, progress: Progress
) -> None:
    """Each arrival at its time after now; what is late (the broker was away) goes at once."""
    origin, position = time.monotonic(), 0
    while position < len(entries):
        due = position
        elapsed = time.monotonic() - origin
        while due < len(entries) and due - position < _BATCH and entries[due][0] <= elapsed:
            due += 1
        if due == position:
            await asyncio.sleep(entries[position][0] - elapsed)
            continue
        now = time.time()
        batch = [_with_time(arrival, now) for _, arrival in entries[position:due]]
        await publisher.send_all([Outgoing(names.arrivals, codec.key_of(a), codec.encode(a)) for a in batch])
        progress.submitted += len(batch)
        position = due


def _with_time(arrival: m.JobArrival, now: float) -> m.JobArrival:
    return m.JobArrival(**{name: getattr(arrival, name) for name in arrival.__struct_fields__} | {"submitted_at": now})


def _arrival(job: TraceJob, gang: Gang, prefix: str, options: ReplayOptions) -> m.JobArrival:
    return m.JobArrival(
        job_id=f"{prefix}-{job.index}",
        submitted_at=0.0,
        workers=gang.workers,
        gpus_per_worker=gang.gpus_per_worker,
        remainder_gpus=gang.remainder_gpus,
        tenant=job.tenant,
        pool=options.pool,
        labels={DURATION_LABEL: repr(round(job.duration_s / options.speed, 6))},
    )


def _fleets(options: ReplayOptions) -> tuple[SimulatedFleet, ...]:
    if not options.executors:
        return ()
    if not options.nodes:
        raise UserError("no nodes for the simulated executors: give --nodes 80x8:P100, or --no-executors")
    return tuple(SimulatedFleet(pool, groups, options.fleet) for pool, groups in options.nodes.items())


def _could_hold(fleet: SimulatedFleet, gang: Gang) -> bool:
    """Whether the empty fleet has room for all workers of the gang."""
    left, workers = sorted((node.gpus for node in fleet.nodes), reverse=True), gang.workers
    for position, free in enumerate(left):
        here = min(workers, free // gang.gpus_per_worker)
        left[position] -= here * gang.gpus_per_worker
        workers -= here
        if workers == 0:
            return max(left) >= gang.remainder_gpus
    return False


def _job_prefix(trace: Path) -> str:
    stem = re.sub(r"[^A-Za-z0-9-]+", "-", trace.name.split(".")[0]).strip("-")[:40] or "job"
    return f"{stem}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{time.time_ns() // 1_000_000 % 1000:03d}"


def _notes(trace: Trace, entries: Sequence[tuple[float, m.JobArrival]], clamped: int, end_s: float) -> Iterable[str]:
    if trace.refusals.total:
        yield f"not replayed: {trace.refusals.describe()}"
    if clamped:
        yield f"{clamped} of {len(entries)} jobs run shorter than in the trace (--max-duration-s)"
    gap_s, after = max(((b[0] - a[0], a[1].job_id) for a, b in pairwise(entries)), default=(0.0, ""))
    if gap_s > _LONG_GAP_REAL_S:
        yield f"nothing is submitted for {gap_s / 60:.0f} minutes before {after}: --from and --before choose a window"
    if end_s > 3 * max(entries[-1][0], _LONG_GAP_REAL_S):
        yield f"the longest job ends {end_s / 60:.0f} minutes after the start: --max-duration-s cuts it"


async def _wait_for_end(
    plan: Plan, observer: Observer, publisher: Publisher, options: ReplayOptions, say: Callable[[str], None]
) -> None:
    """Until all jobs have ended, or nothing has moved for too long."""
    unfinished = {arrival.job_id for _, arrival in plan.entries}
    began, hinted = time.monotonic(), False
    while unfinished:
        await asyncio.sleep(_TICK_S)
        unfinished -= observer.finished
        quiet_s = time.monotonic() - max(observer.changed_at, began)
        if observer.running or publisher.outage.active:
            continue
        if unfinished and quiet_s > _HINT_S and not hinted:
            hinted = True
            say(
                f"{len(unfinished)} jobs wait, nothing runs and nothing was placed for {quiet_s:.0f} s: "
                f"is a scheduler running for pool {options.pool or ', '.join(options.nodes)}?"
            )
        if quiet_s > options.stall_timeout_s:
            say(f"giving up on {len(unfinished)} jobs: nothing has happened for {quiet_s:.0f} s")
            return


def _result(
    options: ReplayOptions, plan: Plan, fleets: tuple[SimulatedFleet, ...], history: History, wall_s: float
) -> ReplayResult:
    ours = {arrival.job_id for _, arrival in plan.entries}
    capacities = {node_id: gpus for fleet in fleets for node_id, gpus in fleet.capacities().items()}
    gpu_types = {node.node_id: node.gpu_type for fleet in fleets for node in fleet.nodes}
    findings = audit(
        history,
        capacities=capacities,
        gpu_types=gpu_types,
        may_stay_unfinished=frozenset() if options.wait else frozenset(ours),
        prefix=plan.prefix,
        allow_repeats=options.allow_repeated_placements,
    )
    for job_id in sorted(ours - {arrival.job_id for _, arrival in history.arrivals}):
        findings.add("not-submitted", f"job {job_id} is not on the topic")
    for fleet in fleets:
        for kind, count in fleet.counts.violations.items():
            findings.counts[f"executor-{kind}"] += count
        findings.details += fleet.counts.details
    facts = RunFacts(
        jobs=len(plan.entries),
        speed=options.speed,
        gpus=sum(fleet.gpus for fleet in fleets) or _joined_gpus(history),
        wall_s=wall_s,
        clamped=plan.clamped,
        refused=plan.trace.refusals.count,
        notes=plan.notes,
    )
    summary = summarise(history, findings, facts)
    return ReplayResult(summary, findings, plan.trace, history, fleets, plan.prefix)


def _joined_gpus(history: History) -> int:
    return sum({e.node_id: e.gpus for _, e in history.nodes if isinstance(e, m.Joined)}.values())


@contextlib.asynccontextmanager
async def _closing(observer: Observer) -> AsyncIterator[Observer]:
    try:
        yield observer
    finally:
        await observer.close()


@contextlib.asynccontextmanager
async def _running(
    background: Iterable[Coroutine[Any, Any, None]], reading: Coroutine[Any, Any, None], stop: Callable[[], None]
) -> AsyncIterator[None]:
    """Run tasks beside the body: its end ends them, and an error of one ends it.

    `reading` is asked to `stop` and awaited, so that nothing that was read is lost; the others are cancelled.
    """
    async with asyncio.TaskGroup() as group:
        group.create_task(reading)
        tasks = [group.create_task(each) for each in background]
        try:
            yield
        finally:
            stop()
            for task in tasks:
                task.cancel()


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """The first error instead of a group of them."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
