"""Simulated jobs per second, and what an event costs with a short and a long queue.

The compiled path (`streamsched.sim.fast`) on the standard slices of the traces, rule by rule, with the mean wait beside
it: a figure of speed is worth something only if the schedule is right. Times are the processor's, the best of several
runs after the first, which compiles.

Then the same from file to figures, reading included, as `streamsched simulate` does it; and the production core.

Last a queue that is held at its length: a job arrives whenever one starts. Rules that change with time look at the
whole queue for each start; the others do not.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from loadgen.formats.openb_csv import read_machines
from loadgen.jobs import parse_moment
from loadgen.trace import Window, read_trace
from streamsched.core.config import SchedulerConfig
from streamsched.errors import UserError
from streamsched.policy import by_name
from streamsched.sim.fast import Backfill, Outcome, Rule, Workload, simulate, simulate_las
from streamsched.sim.simulator import simulate as simulate_core
from streamsched.sim.workload import job, nodes_of

from . import _cases

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
CORE_CASES = ((Rule.FCFS, Backfill.SKIP), (Rule.UNICEP, Backfill.SKIP), (Rule.FCFS, Backfill.EASY))
OPENB_NODES = "alibaba-gpu-v2023/openb_node_list_gpu_node.csv"
WHOLE_FILES = (
    ("openb", "alibaba-gpu-v2023/openb_pod_list_default.csv", None),
    ("Venus", "helios-venus/venus_gpu_jobs_until_2020-07-31.csv", "84x8:V100"),
    ("Philly", "philly/philly_jobs_until_2017-11-15.csv", "80x8:P100"),
)
"""Name, trace, nodes; None: those of its own list, by the production core, as its pods ask for parts of GPUs."""


def measure(jobs: Workload, nodes: list[int], rule: Rule, mode: Backfill, runs: int) -> tuple[Outcome, float]:
    """The outcome, and the processor's seconds of the quickest run."""
    outcome = simulate(jobs, nodes, rule, mode)
    return outcome, min(_seconds(lambda: simulate(jobs, nodes, rule, mode)) for _ in range(runs))


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def held_queue(waiting: int, served: int, nodes: int = 80, seed: int = 1) -> Workload:
    """`waiting` jobs at 0, and one more whenever FCFS starts one, `served` in all: of the GPU counts of Philly's jobs
    (roughly). Arrivals are the starts of a first run in which everybody was there from the beginning."""
    draw = np.random.default_rng(seed)
    total = waiting + served
    gpus = draw.choice([1, 2, 4, 8, 16], total, p=[0.78, 0.07, 0.06, 0.07, 0.02]).astype(np.int64)
    duration = draw.exponential(1_000.0, total)
    everybody = Workload(np.zeros(total), duration, gpus, duration)
    starts = np.sort(simulate(everybody, [8] * nodes, Rule.FCFS, Backfill.SKIP).start_s)
    return Workload(np.concatenate([np.zeros(waiting), starts[:served]]), duration, gpus, duration)


def run(quick: bool) -> None:
    console = _cases.console(160)
    try:
        compile_s = _seconds(lambda: simulate(held_queue(1, 1), [8, 8]))
    except UserError as error:
        console.print(f"simulator: left out, {error}", markup=False)
        return
    console.print(f"{os.cpu_count()} cores; to compile or to load from the cache: {compile_s:.1f} s")
    for name, (path, first, before, nodes) in _cases.SLICES.items():
        if (trace := _cases.trace(name, path, console)) is None:
            continue
        window = Window(parse_moment(first), parse_moment(before))
        jobs = Workload.of(read_trace(trace, window).jobs).with_true_estimates()
        console.print(_slice_table(name, jobs, [8] * nodes, runs=1 if quick else 7))
        console.print(_las_line(name, jobs, [8] * nodes))
        console.print(_core_line(name, jobs, nodes, "las", Backfill.SKIP, 200 if quick else 4_000, "rank"))
        for rule, mode in CORE_CASES:
            console.print(_core_line(name, jobs, nodes, rule.name.lower(), mode, 500 if quick else len(jobs)))
    console.print(_whole_files(_cases.traces()))
    console.print(_queue_table(quick))
    console.print(_core_queue_table(quick))


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


def _core_line(
    name: str, jobs: Workload, nodes: int, rule: str, mode: Backfill, limit: int, preempt: str = "off"
) -> str:
    seconds = _seconds(lambda: _by_core(jobs, nodes, rule, mode, limit, preempt=preempt))
    return (
        f"{name}, production core, {rule}, {mode.name.lower()}, preempt {preempt}, greedy, first {limit:,} jobs: "
        f"{limit / seconds:,.0f} jobs/s"
    )


def _by_core(
    jobs: Workload,
    nodes: int,
    rule: str,
    mode: Backfill,
    limit: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    preempt: str = "off",
) -> None:
    columns = (jobs.submit_s.tolist(), jobs.duration_s.tolist(), jobs.gpus.tolist())
    rows = itertools.islice(zip(*columns, strict=True), limit)
    chosen = [job(number, *row, estimate_s=row[1], preemptible=preempt != "off") for number, row in enumerate(rows)]
    told: Any = {"backfill": mode.name.lower(), "preempt": preempt}
    config = SchedulerConfig(window_jobs=10_000, reservations_max=0, finished_keep_s=3600.0, **told)
    ranker = by_name(rule)
    simulate_core(chosen, nodes_of([(nodes, 8, "any")]), config, ranker, on_progress=on_progress)


def _whole_files(traces: Path) -> Table:
    table = Table(title="whole files, fcfs and skip: from file to summary.json and report.html")
    for heading in ("trace", "by", "jobs", "refused rows", "s"):
        table.add_column(heading, justify="left" if heading == "trace" else "right")
    for name, path, nodes in WHOLE_FILES:
        if not (traces / path).is_file():
            continue
        with tempfile.TemporaryDirectory() as out:
            args = ["simulate", "--trace", str(traces / path), "--out", out]
            args += ["--nodes", _openb_nodes(traces)] if nodes is None else ["--nodes", nodes, "--fast"]
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", "from streamsched.cli import main; main()", *args],
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.perf_counter() - began
            if done.returncode:
                table.add_row(name, "failed", done.stderr.strip()[-60:], "", "")
                continue
            told = json.loads((Path(out) / "summary.json").read_text())
            table.add_row(
                name,
                "core" if nodes is None else "compiled",
                f"{told['jobs']:,}",
                f"{told['refused_rows']:,}",
                f"{seconds:.1f}",
            )
    return table


def _openb_nodes(traces: Path) -> str:
    machines, _ = read_machines(traces / OPENB_NODES)
    counts = Counter((machine.gpus, machine.gpu_type) for machine in machines)
    return ",".join(f"{count}x{gpus}:{gpu_type}" for (gpus, gpu_type), count in counts.items())


def _core_queue_table(quick: bool) -> Table:
    """The processor's time from the end of the first moment, when all are queued, until as many have been served."""
    table = Table(title="the same in the production core: microseconds per event")
    table.add_column("rule")
    for waiting in QUEUES:
        table.add_column(f"{waiting:,} waiting", justify="right")
    table.add_column("ratio", justify="right")
    served = 500 if quick else 5_000
    for rule in (Rule.FCFS, Rule.SJF):
        costs = []
        for waiting in QUEUES:
            marks: list[float] = []

            def note(finished: int, marks: list[float] = marks) -> None:
                if not marks or (finished >= served and len(marks) == 1):
                    marks.append(time.process_time())

            _by_core(held_queue(waiting, served), 80, rule.name.lower(), Backfill.SKIP, on_progress=note)
            costs.append(1e6 * (marks[1] - marks[0]) / (2 * served))
        table.add_row(rule.name.lower(), *(f"{cost:.0f}" for cost in costs), f"{costs[1] / costs[0]:.2f}")
    return table


def _queue_table(quick: bool) -> Table:
    """What twice as many served jobs cost more, so that the filling of the queue does not count."""
    table = Table(title="compiled path, queue held at its length: microseconds per event (arrival or completion)")
    for heading in ("rule", "backfill"):
        table.add_column(heading)
    for waiting in QUEUES:
        table.add_column(f"{waiting:,} waiting (mean of the run)", justify="right")
    table.add_column("ratio", justify="right")
    for rule, mode in CASES:
        if rule.by_time and quick:
            continue  # a hundred times as slow as the others
        served = 5_000 if rule.by_time else 20_000 if quick else 200_000
        row, costs = [], []
        for waiting in QUEUES:
            _, once = measure(held_queue(waiting, served), [8] * 80, rule, mode, runs=2)
            outcome, twice = measure(held_queue(waiting, 2 * served), [8] * 80, rule, mode, runs=2)
            costs.append(1e6 * max(0.0, twice - once) / (2 * served))
            row.append(f"{costs[-1]:.2f} ({outcome.queue_job_s / outcome.span_s:,.0f})")
        ratio = f"{costs[1] / costs[0]:.1f}" if costs[0] > 0 else "-"
        table.add_row(rule.name.lower(), mode.name.lower(), *row, ratio)
    return table
