"""`streamsched demo`: a real trace through the whole system, audited from the topics."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from streamsched.errors import CheckFailed
from streamsched.service.settings import Settings

from .up import DataDir, StackOption, console, running_stack, running_worker

_SLICE_FROM = datetime(2017, 10, 2, tzinfo=UTC)
_PHILLY = "philly/philly_jobs_until_2017-11-15.csv"
_SECONDS_FOR_ARRIVALS = 75.0
_SECONDS_FOR_LONGEST = 60.0


def demo(
    jobs: Annotated[int, typer.Option(min=1, help="Jobs to replay.")] = 2000,
    stack: StackOption = "embedded",
    report: Annotated[Path | None, typer.Option(help="Write the summary as JSON.")] = None,
    speed: Annotated[float | None, typer.Option(min=1, help="Trace seconds per second; chosen when not given.")] = None,
    data_dir: DataDir = None,
    seed: Annotated[int, typer.Option(help="Of everything drawn at random.")] = 1,
) -> None:
    """Start a stack and a worker, replay real jobs on 80 simulated nodes of 8 GPUs, check the outcome from the topics.

    The jobs are a slice of the Philly trace when the shared traces are there (STREAMSCHED_TRACES or ../shared/traces),
    else a generated workload. Exit code 1 when a job was lost, placed twice or over capacity.
    """
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="streamsched-demo-") as temporary:
        home = data_dir or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        log = home / "worker.log"
        with running_stack(stack, home / "stack") as (_, env), running_worker(env, log) as worker:
            console.print(f"worker: pid {worker.pid}, log {log}")
            try:
                _replay(Settings.from_env(env), _trace(jobs, seed, home), jobs, speed, seed, report)
            except BaseException:
                if worker.poll() is not None:
                    console.print(f"the worker ended with exit code {worker.returncode}; the end of its log:")
                    console.print(
                        "".join(log.read_text(errors="replace").splitlines(keepends=True)[-15:]), markup=False
                    )
                raise


def _replay(settings: Settings, trace: Path, jobs: int, speed: float | None, seed: int, report: Path | None) -> None:
    from loadgen.fleet import FleetOptions
    from loadgen.replay import ReplayOptions, make_plan, run_replay
    from loadgen.report import table
    from loadgen.trace import Window
    from streamsched.sim.nodes import NodeGroup

    window = Window(submitted_from=_SLICE_FROM.timestamp() if _PHILLY in str(trace) else None, limit=jobs)
    options = ReplayOptions(
        trace=trace,
        speed=1.0,
        nodes={settings.pools[0]: (NodeGroup(80, 8, "P100"),)},
        pool=settings.pools[0],
        window=window,
        fleet=FleetOptions(seed=seed),
    )
    plan = make_plan(options, ())
    speed = speed or max(1.0, plan.entries[-1][0] / _SECONDS_FOR_ARRIVALS)
    options = replace(options, speed=speed, max_duration_s=speed * _SECONDS_FOR_LONGEST)
    started = time.monotonic()
    result = asyncio.run(run_replay(options, settings.kafka, settings.names, Console(stderr=True)))
    Console().print(table(result.summary, title=f"{jobs} jobs of {trace.name} at {speed:,.0f} x real time"))
    if report is not None:
        result.summary.write(report)
    if not result.ok:
        for detail in result.audit.details[:20]:
            console.print(detail, markup=False)
        raise CheckFailed(f"the topics show {result.audit.total} violations")
    console.print(
        f"checked from the topics: all {jobs} jobs ran once, none over capacity ({time.monotonic() - started:.0f} s)"
    )


def _trace(jobs: int, seed: int, home: Path) -> Path:
    """The real slice when it is there, else a generated one of its shape."""
    philly = Path(os.environ.get("STREAMSCHED_TRACES", "../shared/traces")) / _PHILLY
    if philly.is_file():
        return philly
    from loadgen.formats import neutral_csv
    from loadgen.generate import WorkloadOptions, generate

    path = home / "generated.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        neutral_csv.write(generate(WorkloadOptions(jobs=jobs, seed=seed)), file)
    console.print("no shared traces here (STREAMSCHED_TRACES): a generated workload is used")
    return path
