"""The command `loadgen`. Results go to standard output; progress and messages to standard error."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from streamsched.bus.connection import KafkaConnection
from streamsched.bus.topics import TopicNames
from streamsched.errors import EXIT_INTERRUPTED, CheckFailed, UserError
from streamsched.sim.nodes import NodeGroup, parse_nodes

from . import describe, machines
from .executor import AgentIntervals, Executors
from .fleet import FleetOptions, SimulatedFleet
from .generate import WorkloadOptions
from .generate import generate as generate_jobs
from .jobs import parse_moment
from .kafka import Publisher
from .replay import ReplayOptions, run_replay
from .report import table
from .trace import Window, read_trace
from .write import KINDS, write_trace

T = TypeVar("T")

app = typer.Typer(
    name="loadgen",
    help="Load for streamsched: replay real or synthetic GPU-cluster workloads into Kafka, with simulated executors.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_messages = Console(stderr=True)
_results = Console()

TraceFile = Annotated[
    Path,
    typer.Argument(
        help="A trace in a format of docs/traces.md, found out by content: text, plain, gzip or zstd; Parquet; "
        "a folder of PAI tables."
    ),
]
OutFile = Annotated[Path, typer.Option(help=f"Where to write: {KINDS}.")]
From = Annotated[str | None, typer.Option("--from", help="Jobs submitted at or after (2017-10-02[T12:00:00]).")]
Before = Annotated[str | None, typer.Option("--before", help="Jobs submitted before.")]
Limit = Annotated[int | None, typer.Option(min=1, help="The first N jobs of these.")]
Nodes = Annotated[
    list[str] | None,
    typer.Option(help="[POOL=]COUNTxGPUS[:TYPE][,...] such as 80x8:P100; repeat for further pools."),
]
Pool = Annotated[
    str | None, typer.Option(help="Pool of the jobs and of --nodes without one; 'default' when none is named.")
]
Bootstrap = Annotated[
    str | None, typer.Option(help="Kafka, HOST:PORT[,...] [env: STREAMSCHED_KAFKA_BOOTSTRAP; TLS and SASL from there]")
]
Prefix = Annotated[str | None, typer.Option(help="Prefix of topic names [env: STREAMSCHED_TOPIC_PREFIX]")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn at random.")]
Heartbeat = Annotated[float, typer.Option(min=0.1, help="Seconds between a node's heartbeats.")]
Telemetry = Annotated[float, typer.Option(min=0.0, help="Seconds between a node's GPU samples; 0: none.")]
Fence = Annotated[
    bool, typer.Option(help="Say first that the nodes were lost and nothing runs there: after a restart.")
]
Checkpoint = Annotated[
    float | None, typer.Option(min=0.001, help="Real seconds between checkpoints of preempted runs; none: all is lost.")
]
StartDelay = Annotated[float, typer.Option(min=0.0, help="Mean seconds from a placement to its start.")]


@app.command()
def replay(
    trace: TraceFile,
    speed: Annotated[float, typer.Option(help="Trace seconds per real second.")] = 600.0,
    nodes: Nodes = None,
    pool: Pool = None,
    limit: Limit = None,
    submitted_from: From = None,
    submitted_before: Before = None,
    max_duration_s: Annotated[float | None, typer.Option(min=0.001, help="Cut trace durations to this.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Larger jobs take whole nodes of this size.")] = None,
    executors: Annotated[bool, typer.Option(help="Run simulated executors and node agents.")] = True,
    fence: Fence = False,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    job_prefix: Annotated[str | None, typer.Option(help="Of job ids; made from name and time when not given.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the summary as JSON.")] = None,
    seed: Seed = 1,
    wait: Annotated[bool, typer.Option(help="Wait until all jobs have ended, and audit the topics.")] = True,
    stall_timeout_s: Annotated[float, typer.Option(min=1.0, help="Give up when nothing moves for so long.")] = 120.0,
    start_delay_s: StartDelay = 0.02,
    checkpoint_s: Checkpoint = None,
    heartbeat_s: Heartbeat = 3.0,
    telemetry_s: Telemetry = 5.0,
) -> None:
    """Replay a trace into Kafka, run its jobs on simulated nodes, and audit what was decided.

    Exit code 1 when a job was lost, placed twice or over capacity.
    """
    if report is not None and not report.parent.is_dir():
        raise UserError(f"report {report}: there is no folder {report.parent}")
    pools = _pools(nodes, pool)
    options = ReplayOptions(
        trace=trace,
        speed=speed,
        nodes=pools,
        pool=pool or ("default" if set(pools) <= {"default"} else None),
        window=_window(submitted_from, submitted_before, limit),
        max_duration_s=max_duration_s,
        gpus_per_node=gpus_per_node,
        job_prefix=job_prefix,
        executors=executors,
        fence=fence,
        fleet=FleetOptions(seed=seed, start_delay_s=start_delay_s, checkpoint_s=checkpoint_s),
        intervals=AgentIntervals(heartbeat_s=heartbeat_s, telemetry_s=telemetry_s),
        wait=wait,
        stall_timeout_s=stall_timeout_s,
    )
    result = _run(run_replay(options, _kafka(bootstrap), _names(prefix), _messages))
    _results.print(table(result.summary, title=f"{trace.name} as {result.job_prefix}-*"))
    if report is not None:
        result.summary.write(report)
    if not result.ok:
        for detail in result.audit.details[:20]:
            _messages.print(f"[red]{escape(detail)}[/]")
        raise CheckFailed(f"{result.audit.total} violations in the messages of {result.job_prefix}-*")


@app.command()
def generate(
    jobs: Annotated[int, typer.Option(min=1, help="Number of jobs.")],
    out: OutFile,
    seed: Seed = 1,
    profile: Annotated[str, typer.Option(help="Workload to resemble: philly or venus.")] = "philly",
    rate_per_h: Annotated[float | None, typer.Option(help="Mean jobs per hour; the profile's when not given.")] = None,
    load: Annotated[float | None, typer.Option(help="Instead of a rate: offered work / --cluster-gpus.")] = None,
    cluster_gpus: Annotated[int | None, typer.Option(min=1, help="GPUs that --load is a share of.")] = None,
    burstiness: Annotated[float, typer.Option(min=0.0, help="1: as the real trace; 0: Poisson arrivals.")] = 1.0,
    duration_scale: Annotated[float, typer.Option(help="Multiplies all durations.")] = 1.0,
    max_duration_s: Annotated[float | None, typer.Option(help="Cuts durations, marking them.")] = None,
    max_gpus: Annotated[int | None, typer.Option(min=1, help="Largest job.")] = None,
    tenants: Annotated[int | None, typer.Option(min=1, help="Number of tenants; the profile's when not given.")] = None,
    start: Annotated[str, typer.Option(help="Time of the first submission.")] = "0",
) -> None:
    """Write a synthetic workload with the bursts, sizes and heavy tails of real ones. Equal seed, equal bytes."""
    options = WorkloadOptions(
        jobs=jobs,
        seed=seed,
        profile=profile,
        rate_per_h=rate_per_h,
        load=load,
        cluster_gpus=cluster_gpus,
        burstiness=burstiness,
        duration_scale=duration_scale,
        duration_max_s=max_duration_s,
        gpus_max=max_gpus,
        tenants=tenants,
        start_s=parse_moment(start),
    )
    workload = generate_jobs(options)
    write_trace(workload, out)
    if str(out) == "-":
        return
    _messages.print(
        f"{len(workload):,} jobs over {(workload[-1].submit_s - workload[0].submit_s) / 3600:,.1f} h in {out}"
    )


@app.command("inspect")
def inspect_trace(
    trace: TraceFile,
    submitted_from: From = None,
    submitted_before: Before = None,
    limit: Limit = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write an HTML file with plots too.")] = None,
) -> None:
    """Say what is in a trace: jobs, span, sizes, durations, bursts, and which rows were refused and why."""
    if plot is not None and not os.path.isdir(plot.parent):
        raise UserError(f"plot {plot}: there is no folder {plot.parent}")
    found = read_trace(trace, _window(submitted_from, submitted_before, limit))
    told = describe.describe(found)
    if plot is not None:
        from .drawing import page

        try:
            plot.write_text(page(found, told), encoding="utf-8")
        except OSError as error:
            raise UserError(f"plot {plot}: {(error.strerror or str(error)).lower()}") from None
    if as_json:
        sys.stdout.write(told.to_json())
    else:
        _results.print(describe.table(told))


@app.command()
def convert(
    trace: TraceFile,
    out: OutFile,
    submitted_from: From = None,
    submitted_before: Before = None,
    limit: Limit = None,
) -> None:
    """Write a trace, or a window of it, as neutral CSV or Parquet; what was refused is told on standard error."""
    found = read_trace(trace, _window(submitted_from, submitted_before, limit))
    write_trace(found.jobs, out)
    if found.refusals.total:
        _messages.print(f"{trace}: refused rows: {found.refusals.describe()}", markup=False, soft_wrap=True)


@app.command("nodes")
def list_nodes(
    file: Annotated[Path, typer.Argument(help="A list of machines (docs/traces.md), found out by content.")],
    memory_as_type: Annotated[bool, typer.Option(help="Take the GPUs' memory, such as 12GB, for their type.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with what was left out.")] = False,
) -> None:
    """Write a trace's list of machines as the text that `streamsched simulate --nodes` takes.

    Machines without GPUs are left out; they and odd rows are told on standard error.
    """
    found = machines.read(file, memory_as_type)
    sys.stdout.write(found.to_json() if as_json else found.nodes + "\n")
    for text in found.left_out():
        _messages.print(f"{file}: {text}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def executors(
    nodes: Nodes = None,
    pool: Pool = None,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    seed: Seed = 1,
    fence: Fence = False,
    start_delay_s: StartDelay = 0.02,
    checkpoint_s: Checkpoint = None,
    heartbeat_s: Heartbeat = 3.0,
    telemetry_s: Telemetry = 5.0,
) -> None:
    """Run simulated executors and node agents until Ctrl-C or SIGTERM, then say what they did. Exit code 0."""
    pools = _pools(nodes, pool)
    if not pools:
        raise UserError("no nodes: give --nodes 80x8:P100")
    fleet_options = FleetOptions(seed=seed, start_delay_s=start_delay_s, checkpoint_s=checkpoint_s)
    fleets = [SimulatedFleet(name, groups, fleet_options) for name, groups in pools.items()]
    intervals = AgentIntervals(heartbeat_s=heartbeat_s, telemetry_s=telemetry_s)
    try:
        _run(_run_executors(fleets, _kafka(bootstrap), _names(prefix), intervals, fence))
    finally:
        for fleet in fleets:
            counts = fleet.counts
            _messages.print(
                f"pool {fleet.pool}: {counts.placed} placed, {counts.started} started, {counts.completed} completed, "
                f"{counts.preempted} preempted, {counts.released} revoked, {counts.rejected} rejected, "
                f"{counts.violations.total()} violations"
            )


async def _run_executors(
    fleets: list[SimulatedFleet], kafka: KafkaConnection, names: TopicNames, intervals: AgentIntervals, fence: bool
) -> None:
    async def work() -> None:
        async with Publisher(kafka, _say) as publisher:
            fleet = Executors(fleets, kafka, names, publisher, _say, intervals)
            await fleet.start(fence)
            nodes = sum(len(f.nodes) for f in fleets)
            _say(f"{nodes} nodes announced in {', '.join(f.pool for f in fleets)}; Ctrl-C ends")
            await fleet.run()

    await _until_told_to_end(work())


async def _until_told_to_end(work: Coroutine[Any, Any, None]) -> None:
    """SIGINT and SIGTERM are the ordinary end of what has no other; an error of `work` is raised."""
    working = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        if not working.cancelled():
            raise


def _say(text: str) -> None:
    _messages.print(f"[yellow]{escape(text)}[/]")


def _pools(nodes: list[str] | None, pool: str | None) -> dict[str, tuple[NodeGroup, ...]]:
    pools: dict[str, tuple[NodeGroup, ...]] = {}
    for spec in nodes or []:
        name, equals, groups = spec.rpartition("=")
        name = name if equals else pool or "default"
        pools[name] = pools.get(name, ()) + parse_nodes(groups)
    return pools


def _window(submitted_from: str | None, submitted_before: str | None, limit: int | None) -> Window:
    return Window(
        parse_moment(submitted_from) if submitted_from else None,
        parse_moment(submitted_before) if submitted_before else None,
        limit,
    )


def _kafka(bootstrap: str | None) -> KafkaConnection:
    return KafkaConnection.from_env().with_bootstrap(bootstrap)


def _names(prefix: str | None) -> TopicNames:
    return TopicNames.from_env() if prefix is None else TopicNames(prefix)


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def main() -> None:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # outages are told once, by us
    try:
        app()
    except UserError as error:
        _messages.print(f"loadgen: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output is gone: say nothing more, also not at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
