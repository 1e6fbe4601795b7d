"""Simulated jobs per second, and what an event costs with a short and a long queue.

The compiled path (`streamsched.sim.fast`) on the standard slices of the traces, rule by rule, with the mean wait beside
it: a figure of speed is worth something only if the schedule is right. Times are the processor's, the best of several
runs after the first, which compiles.

Then a queue of a fixed length: at the start as many jobs wait as the heading says, and from then on jobs arrive as fast
as the cluster serves them. Rules that change with time look at the whole queue for each start; the others do not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.jobs import parse_moment
from loadgen.trace import Window, read_trace
from streamsched.core.config import SchedulerConfig
from streamsched.errors import UserError
from streamsched.policy import by_name
from streamsched.sim.fast import Backfill, Outcome, Rule, Workload, simulate, simulate_las
from streamsched.sim.simulator import simulate as simulate_core
from streamsched.sim.workload import job, nodes_of

SLICES = {
    "philly-4w": ("philly/philly_jobs_until_2017-11-15.csv", "2017-10-02", "2017-10-30", 80),
    "venus-4w": ("helios-venus/venus_gpu_jobs_until_2020-07-31.csv", "2020-06-29", "2020-07-27", 84),
}
"""scenarios/*.toml: trace, submitted from, submitted before, nodes of eight GPUs."""
CASES = (
    (Rule.FCFS, Backfill.NONE),
    (Rule.FCFS, Backfill.SKIP),
    (Rule.SMALLEST, Backfill.SKIP),
    (Rule.SJF, Backfill.SKIP),
    (Rule.F1, Backfill.SKIP),
    (Rule.UNICEP, Backfill.SKIP),
    (Rule.FCFS, Backfill.EASY),
    (Rule.SJF, Backfill.EASY),
    (Rule.UNICEP, Backfill.EASY),
)
QUEUES = (1_000, 50_000)
CORE_JOBS = 5_000


def measure(jobs: Workload, nodes: list[int], rule: Rule, mode: Backfill, runs: int) -> tuple[Outcome, float]:
    """The outcome, and the processor's seconds of the quickest run."""
    outcome = simulate(jobs, nodes, rule, mode)
    return outcome, min(_seconds(lambda: simulate(jobs, nodes, rule, mode)) for _ in range(runs))


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def long_queue(waiting: int, arrivals: int, nodes: int = 80, seed: int = 1) -> Workload:
    """`waiting` jobs at 0, then `arrivals` at the rate of service, of the GPU counts of Philly's jobs (roughly)."""
    draw = np.random.default_rng(seed)
    total = waiting + arrivals
    gpus = draw.choice([1, 2, 4, 8, 16], total, p=[0.78, 0.07, 0.06, 0.07, 0.02])
    duration = draw.exponential(1_000.0, total)
    per_job_s = float((gpus * duration).mean()) / (8 * nodes)
    submit = np.concatenate([np.zeros(waiting), np.cumsum(draw.exponential(per_job_s, arrivals))])
    return Workload(submit, duration, gpus.astype(np.int64), duration)


def run(quick: bool) -> None:
    console = Console(width=None if Console().is_terminal else 160)
    try:
        compile_s = _seconds(lambda: simulate(long_queue(1, 1), [8, 8]))
    except UserError as error:
        console.print(f"simulator: left out, {error}", markup=False)
        return
    console.print(f"{os.cpu_count()} cores; to compile or to load from the cache: {compile_s:.1f} s")
    traces = Path(os.environ.get("STREAMSCHED_TRACES", "../shared/traces"))
    for name, (path, first, before, nodes) in SLICES.items():
        if (traces / path).is_file():
            window = Window(parse_moment(first), parse_moment(before))
            jobs = Workload.of(read_trace(traces / path, window).jobs).with_true_estimates()
            console.print(_slice_table(name, jobs, [8] * nodes, runs=1 if quick else 7))
            console.print(_las_line(name, jobs, [8] * nodes))
            console.print(_core_line(name, jobs, nodes, 500 if quick else CORE_JOBS))
        else:
            console.print(f"{name}: left out, no {traces / path} (STREAMSCHED_TRACES)", markup=False)
    console.print(_queue_table(quick))


def _slice_table(name: str, jobs: Workload, nodes: list[int], runs: int) -> Table:
    table = Table(title=f"{name}: {len(jobs):,} jobs on {len(nodes)} nodes; estimates are the true run times")
    for heading in ("rule", "backfill"):
        table.add_column(heading)
    for heading in ("mean wait, s", "ms", "jobs/s"):
        table.add_column(heading, justify="right")
    for rule, mode in CASES:
        outcome, seconds = measure(jobs, nodes, rule, mode, runs)
        table.add_row(
            rule.name.lower(),
            mode.name.lower(),
            f"{outcome.mean_wait_s:,.0f}",
            f"{1e3 * seconds:,.1f}",
            f"{len(jobs) / seconds:,.0f}",
        )
    return table


def _las_line(name: str, jobs: Workload, nodes: list[int]) -> str:
    """Preemptive, no run times seen, restart 60 s, checkpoints every 600 s, nodes have boundaries."""
    outcome = simulate_las(jobs, nodes)
    p50, p99, most = np.percentile(outcome.wait_s, [50, 99, 100])
    return (
        f"{name}, preemptive least attained service: wait mean {outcome.mean_wait_s:,.0f}, p50 {p50:,.0f}, "
        f"p99 {p99:,.0f}, max {most:,.0f} s; {outcome.preemptions.mean():.2f} preemptions per job"
    )


def _core_line(name: str, jobs: Workload, nodes: int, limit: int) -> str:
    rows = zip(jobs.submit_s.tolist(), jobs.duration_s.tolist(), jobs.gpus.tolist(), strict=True)
    chosen = [job(number, *row) for number, row in enumerate(rows)][:limit]
    config = SchedulerConfig(window_jobs=10_000, reservations_max=0, finished_keep_s=3600.0)
    seconds = _seconds(lambda: simulate_core(chosen, nodes_of([(nodes, 8, "any")]), config, by_name("fcfs")))
    return f"{name}, production core, fcfs, skip, greedy, first {limit:,} jobs: {limit / seconds:,.0f} jobs/s"


def _queue_table(quick: bool) -> Table:
    table = Table(title="microseconds per event (arrival or completion) by waiting jobs: 80 nodes of 8")
    for heading in ("rule", "backfill"):
        table.add_column(heading)
    for waiting in QUEUES:
        table.add_column(f"{waiting:,} (mean of the run)", justify="right")
    table.add_column("ratio", justify="right")
    for rule, mode in CASES:
        if rule.by_time and quick:
            continue  # a hundred times as slow as the others
        arrivals = 20_000 if rule.by_time else 50_000 if quick else 500_000
        row, costs = [], []
        for waiting in QUEUES:
            jobs = long_queue(waiting, arrivals)
            outcome, seconds = measure(jobs, [8] * 80, rule, mode, runs=1)
            costs.append(1e6 * seconds / (2 * len(jobs)))
            row.append(f"{costs[-1]:.2f} ({outcome.queue_job_s / outcome.span_s:,.0f})")
        table.add_row(rule.name.lower(), mode.name.lower(), *row, f"{costs[1] / costs[0]:.1f}")
    return table
