"""Jobs per second of the simulator: the compiled path and the production core, on the standard scenarios.

Reading the trace is timed apart. Cost by length of the queue: one job completes and one starts each second, while
1,000 or 50,000 others wait.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.generate import WorkloadOptions, generate
from loadgen.trace import Window, read_trace
from streamsched.core.config import SchedulerConfig
from streamsched.policy import by_name
from streamsched.sim import fast
from streamsched.sim.scenario import read_scenario
from streamsched.sim.simulator import simulate
from streamsched.sim.workload import job, nodes_of

CORE_JOBS = 4_000
REPEATS = 5
QUEUES = (1_000, 50_000)


def run(quick: bool) -> None:
    console = Console(width=None if Console().is_terminal else 120)
    table = Table(title=f"simulator: best of {REPEATS}; {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f})")
    for heading in ("workload", "jobs", "read s", "way", "rule", "backfill", "jobs / s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, workload, nodes, read_s in _workloads():
        for rule, backfill in (
            ("fcfs", "skip"),
            ("fcfs", "none"),
            ("sjf", "skip"),
            ("unicep", "skip"),
            ("fcfs", "easy"),
        ):
            took = min(_timed(workload, nodes, rule, backfill) for _ in range(1 if quick else REPEATS))
            jobs = len(workload.gpus)
            table.add_row(name, f"{jobs:,}", f"{read_s:.2f}", "compiled", rule, backfill, f"{jobs / took:,.0f}")
        jobs, took = _by_core(workload, nodes, 500 if quick else CORE_JOBS)
        table.add_row(name, f"{jobs:,}", f"{read_s:.2f}", "core", "fcfs", "skip", f"{jobs / took:,.0f}")
    console.print(table)
    _by_queue(console)


def _workloads() -> list[tuple[str, fast.Workload, list[int], float]]:
    folder = Path(os.environ.get("STREAMSCHED_TRACES", "../shared/traces")).parent / "scenarios"
    found = []
    for name in ("philly-4w", "venus-4w"):
        path = folder / f"{name}.toml"
        if path.is_file():
            scenario = read_scenario(path)
            started = time.perf_counter()
            jobs = read_trace(scenario.trace, Window(scenario.submitted_from, scenario.submitted_before)).jobs
            read_s = time.perf_counter() - started
            nodes = [group.gpus for group in scenario.nodes for _ in range(group.count)]
            found.append((name, _columns(jobs), nodes, read_s))
    if not found:
        found.append(("generated", _columns(generate(WorkloadOptions(jobs=46_000, seed=1))), [8] * 80, 0.0))
    return found


def _columns(jobs) -> fast.Workload:  # type: ignore[no-untyped-def]
    rows = sorted(((j.submit_s, j.duration_s, j.gpus) for j in jobs), key=lambda row: row[0])
    submit_s, run_s, gpus = (np.array(column) for column in zip(*rows, strict=True))
    return fast.Workload(submit_s.astype(np.float64), run_s.astype(np.float64), gpus.astype(np.int64), run_s)


def _timed(workload: fast.Workload, nodes: list[int], rule: str, backfill: str) -> float:
    started = time.perf_counter()
    fast.simulate(workload, nodes, rule, backfill)
    return time.perf_counter() - started


def _by_core(workload: fast.Workload, nodes: list[int], limit: int) -> tuple[int, float]:
    rows = zip(workload.submit_s.tolist(), workload.run_s.tolist(), workload.gpus.tolist(), strict=True)
    jobs = [job(n, *row) for n, row in enumerate(rows)][:limit]
    config = SchedulerConfig(window_jobs=10_000, reservations_max=0, finished_keep_s=3600.0)
    cluster = nodes_of((1, gpus, "any") for gpus in nodes)
    started = time.perf_counter()
    simulate(jobs, cluster, config, by_name("fcfs"))
    return len(jobs), time.perf_counter() - started


def _by_queue(console: Console) -> None:
    """Per arrival and completion, with so many waiting for most of the time."""
    figures = []
    for queue in QUEUES:
        n = 10 * max(QUEUES)
        submit_s = np.concatenate([np.zeros(queue), np.arange(1.0, n + 1.0)])
        run_s = np.full(queue + n, 1.0)  # on one GPU: one completes and one starts each second
        workload = fast.Workload(submit_s, run_s, np.ones(queue + n, dtype=np.int64), run_s)
        took = min(_timed(workload, [1], "sjf", "skip") for _ in range(REPEATS))
        figures.append(took / (2 * (queue + n)) * 1e6)
    console.print(
        f"per event with {QUEUES[0]:,} waiting {figures[0]:.2f} us, with {QUEUES[1]:,} {figures[1]:.2f} us: "
        f"{figures[1] / figures[0]:.2f} times"
    )
