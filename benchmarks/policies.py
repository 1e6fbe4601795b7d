"""Waits under rules and preemptive policies on the standard slices: what preemption, a bound and moves are worth.

Preemption costs a restart of 60 s and the work since the last checkpoint (every 600 s); nodes have boundaries. Rules
that see true run times are oracles. Gittins' curves are of what had been seen of the trace's jobs before the slice. The
bound is half an hour below a day: a job's last restart, and the wait for others beyond their bound, come on top.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.jobs import TraceJob, parse_moment
from loadgen.trace import Window, read_trace
from streamsched.policy import gittins
from streamsched.sim.fast import (
    Backfill,
    Index,
    Outcome,
    Preemption,
    Rule,
    Workload,
    las_index,
    simulate,
    simulate_index,
    simulate_srtf,
)

from .simulator import SLICES

BOUND_S = 84_600.0
MOVE_AFTER_S = 1_800.0
FINE_LEVELS_GPU_S = tuple(float(level) for level in np.geomspace(60.0, 1e6, 13))
FREE, BOUNDED = Preemption(), Preemption(bound_s=BOUND_S)
MOVED = Preemption(bound_s=BOUND_S, move_after_s=MOVE_AFTER_S)


def run(quick: bool) -> None:
    console = Console(width=None if Console().is_terminal else 160)
    traces = Path(os.environ.get("STREAMSCHED_TRACES", "../shared/traces"))
    for name, (path, first, before, nodes) in SLICES.items():
        if not (traces / path).is_file():
            console.print(f"{name}: left out, no {traces / path} (STREAMSCHED_TRACES)", markup=False)
            continue
        start = parse_moment(first)
        window = Window(start, parse_moment(before), 2_000 if quick else None)
        jobs = Workload.of(read_trace(traces / path, window).jobs).with_true_estimates()
        console.print(_table(name, jobs, [8] * nodes, read_trace(traces / path, Window(None, start)).jobs, start))


def _table(name: str, jobs: Workload, nodes: list[int], before: Sequence[TraceJob], start_s: float) -> Table:
    table = Table(title=f"{name}: {len(jobs):,} jobs; seconds")
    for heading in ("policy", "sees run times"):
        table.add_column(heading)
    for heading in ("mean wait", "p99 wait", "longest wait", "mean JCT", "preemptions per job"):
        table.add_column(heading, justify="right")
    index = gittins_index(jobs, before, start_s)
    cases: tuple[tuple[str, bool, Callable[[], Outcome]], ...] = (
        ("fcfs, skip", False, lambda: simulate(jobs, nodes)),
        ("smallest, skip", False, lambda: simulate(jobs, nodes, Rule.SMALLEST)),
        ("fcfs, easy", True, lambda: simulate(jobs, nodes, Rule.FCFS, Backfill.EASY)),
        ("sjf, skip", True, lambda: simulate(jobs, nodes, Rule.SJF)),
        ("sjf, easy", True, lambda: simulate(jobs, nodes, Rule.SJF, Backfill.EASY)),
        ("las, 5 levels", False, lambda: simulate_index(jobs, nodes, las_index(), FREE)),
        ("las, 5 levels, bound", False, lambda: simulate_index(jobs, nodes, las_index(), BOUNDED)),
        ("las, 5 levels, bound, moves", False, lambda: simulate_index(jobs, nodes, las_index(), MOVED)),
        (
            "las, 13 levels, bound, moves",
            False,
            lambda: simulate_index(jobs, nodes, las_index(FINE_LEVELS_GPU_S), MOVED),
        ),
        ("gittins, bound", False, lambda: simulate_index(jobs, nodes, index, BOUNDED)),
        ("gittins, bound, moves", False, lambda: simulate_index(jobs, nodes, index, MOVED)),
        ("srtf", True, lambda: simulate_srtf(jobs, nodes, FREE)),
        ("srtf x GPUs, bound, moves", True, lambda: simulate_srtf(jobs, nodes, MOVED, by_gpu_time=True)),
    )
    for policy, oracle, outcome_of in cases:
        outcome = outcome_of()
        wait, jct = outcome.wait_s, outcome.finish_s - jobs.submit_s
        table.add_row(
            *(policy, "yes" if oracle else "no"),
            *(f"{value:,.0f}" for value in (wait.mean(), np.percentile(wait, 99), wait.max(), jct.mean())),
            f"{outcome.preemptions.mean():.2f}",
        )
    return table


def gittins_index(jobs: Workload, before: Sequence[TraceJob], start_s: float) -> Index:
    table = gittins.table_before(before, start_s)
    assert table is not None
    return Index(np.array(gittins.LEVELS_GPU_S), table, gittins.class_of(jobs.gpus))
