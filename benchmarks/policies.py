"""Waits under rules and preemptive policies on the standard slices: what predictions, preemption and moves are worth.

Preemption costs a restart of 60 s and the work since the last checkpoint (every 600 s); nodes have boundaries.
Predictions are learned day by day from what had ended by then in the schedule of that policy itself, and before the
slice from the trace's jobs before it (`streamsched.sim.foresight`); `frozen`: from these alone. Gittins by class is
from the run times seen before the slice. Rules that see true run times are oracles.

The bound is two hours below a day: a job's last restart, and the wait for others beyond their bound, come on top. The
steps of ranks (`foresight.coarse`) were chosen on the first two weeks of the slices, whence the column of the last two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.jobs import TraceJob, parse_moment
from loadgen.trace import Window, read_trace
from streamsched.policy import gittins
from streamsched.policy.gittins import in_steps
from streamsched.predict import Finished
from streamsched.sim import foresight
from streamsched.sim.fast import (
    BOUNDED,
    COSTS,
    MOVED,
    SPARING,
    Backfill,
    Index,
    Outcome,
    Rule,
    Workload,
    las_index,
    simulate,
    simulate_index,
    simulate_srtf,
)
from streamsched.sim.foresight import HISTORY_JOBS, Foreseen, Policy, as_finished, coarse, foresee, workload_of

from . import _cases

FORTNIGHT_S = 14 * 86_400.0


@dataclass(frozen=True)
class Slice:
    jobs: list[Finished]
    history: list[Finished]
    """By submission."""
    before: list[TraceJob]
    start_s: float
    nodes: list[int]


def run(quick: bool) -> None:
    """STREAMSCHED_BENCH_CASES: philly-4w,venus-4w (all)."""
    console = _cases.console(160)
    for name, given in slices("policies", console, quick):
        console.print(_table(name, given, lambda line: console.print(line, markup=False, style="dim")))


def slices(benchmark: str, console: Console, quick: bool) -> Iterator[tuple[str, Slice]]:
    """The standard slices that are asked for and there, by name."""
    for name in _cases.chosen(benchmark, _cases.SLICES, console):
        path, first, before, nodes = _cases.SLICES[name]
        if (trace := _cases.trace(name, path, console)) is not None:
            yield name, _slice(trace, parse_moment(first), parse_moment(before), [8] * nodes, quick)


def _slice(path: Path, start_s: float, before_s: float, nodes: list[int], quick: bool) -> Slice:
    jobs = read_trace(path, Window(start_s, before_s, 2_000 if quick else None)).jobs
    before = read_trace(path, Window(None, start_s)).jobs
    history = [as_finished(job) for job in before[-HISTORY_JOBS:]]
    return Slice([as_finished(job) for job in jobs], history, before, start_s, nodes)


Case = tuple[str, str, Callable[[], Outcome]]
"""(policy, what it sees of run times, its outcome)"""


def cases(given: Slice) -> Iterator[Case]:
    jobs = workload_of(given.jobs).with_true_estimates()
    yield from _blind(jobs, given)
    yield from _predicting(given)
    yield from _oracles(jobs, given.nodes)


def _blind(jobs: Workload, given: Slice) -> Iterator[Case]:
    nodes, index = given.nodes, gittins_index(jobs, given)
    steps = replace(index, table=in_steps(index.table))
    yield "fcfs, skip", "nothing", lambda: simulate(jobs, nodes)
    yield "smallest, skip", "nothing", lambda: simulate(jobs, nodes, Rule.SMALLEST)
    yield "las", "nothing", lambda: simulate_index(jobs, nodes, las_index(), COSTS)
    yield "las, bound", "nothing", lambda: simulate_index(jobs, nodes, las_index(), BOUNDED)
    yield "las, bound, moves", "nothing", lambda: simulate_index(jobs, nodes, las_index(), MOVED)
    yield "las, bound, moves, least loss", "nothing", lambda: simulate_index(jobs, nodes, las_index(), SPARING)
    yield "gittins by class, bound, moves", "before", lambda: simulate_index(jobs, nodes, index, MOVED)
    yield "gittins by class in steps, ..., least loss", "before", lambda: simulate_index(jobs, nodes, steps, SPARING)


def _predicting(given: Slice) -> Iterator[Case]:
    nodes = given.nodes
    index, steps = foresight.gittins_per_gpu, coarse(foresight.gittins_per_gpu)
    policies: dict[str, Policy] = {
        "sjf, skip": foresight.by_estimate(nodes, Rule.SJF),
        "qssf, skip": foresight.by_estimate(nodes, Rule.QSSF),
        "fcfs, easy": foresight.by_estimate(nodes, Rule.FCFS, Backfill.EASY),
        "a-srpt, released": foresight.by_virtual_machine(nodes, released=True),
        "a-srpt": foresight.by_virtual_machine(nodes),
        "a-srpt, preemptive, bound, moves": foresight.by_virtual_machine(nodes, preemption=MOVED),
        "srtf, bound, moves": foresight.by_service(nodes, foresight.median_left, MOVED),
        "gittins, bound, moves": foresight.by_service(nodes, index, MOVED),
        "gittins in steps, ..., least loss": foresight.by_service(nodes, steps, SPARING),
    }
    for name, policy in policies.items():
        yield name, "predicted", lambda policy=policy: foresee(given.jobs, policy, given.history)[0]  # type: ignore[misc]
    for name in ("sjf, skip", "gittins in steps, ..., least loss"):
        policy = policies[name]
        yield name, "frozen", lambda policy=policy: foresee(given.jobs, policy, given.history, frozen=True)[0]  # type: ignore[misc]


def _oracles(jobs: Workload, nodes: list[int]) -> Iterator[Case]:
    true = Foreseen(jobs.duration_s[:, None], np.arange(len(jobs)))
    early, stopping = foresight.by_virtual_machine(nodes), foresight.by_virtual_machine(nodes, preemption=MOVED)
    yield "sjf, skip", "ORACLE", lambda: simulate(jobs, nodes, Rule.SJF)
    yield "qssf, skip", "ORACLE", lambda: simulate(jobs, nodes, Rule.QSSF)
    yield "fcfs, easy", "ORACLE", lambda: simulate(jobs, nodes, Rule.FCFS, Backfill.EASY)
    yield "sjf, easy", "ORACLE", lambda: simulate(jobs, nodes, Rule.SJF, Backfill.EASY)
    yield "a-srpt", "ORACLE", lambda: early.run(jobs, true)
    yield "a-srpt, preemptive, bound, moves", "ORACLE", lambda: stopping.run(jobs, true)
    yield "srtf", "ORACLE", lambda: simulate_srtf(jobs, nodes, COSTS)
    yield "srtf x GPUs, bound, moves", "ORACLE", lambda: simulate_srtf(jobs, nodes, MOVED, by_gpu_time=True)


def _table(name: str, given: Slice, note: Callable[[str], None]) -> Table:
    table = Table(title=f"{name}: {len(given.jobs):,} jobs, {len(given.history):,} before them as history; seconds")
    for heading in ("policy", "sees of run times"):
        table.add_column(heading)
    for heading in ("mean wait", "p50", "p99", "longest", "last 2 weeks", "mean JCT", "preemptions per job"):
        table.add_column(heading, justify="right")
    submit = np.array([job.features.submitted_at for job in given.jobs])
    late = submit >= given.start_s + FORTNIGHT_S
    for policy, sees, outcome_of in cases(given):
        began = time.perf_counter()
        outcome = outcome_of()
        wait, jct = outcome.wait_s, outcome.finish_s - submit
        last = f"{wait[late].mean():,.0f}" if late.any() else "-"
        times = [f"{value:,.0f}" for value in (wait.mean(), *np.percentile(wait, [50, 99]), wait.max())]
        row = [policy, sees, *times, last, f"{jct.mean():,.0f}", f"{outcome.preemptions.mean():.2f}"]
        table.add_row(*row)
        note(f"{name}: {' | '.join(row)} ({time.perf_counter() - began:.0f} s)")
    return table


def gittins_index(jobs: Workload, given: Slice) -> Index:
    table = gittins.table_before(given.before, given.start_s)
    assert table is not None
    return Index(np.array(gittins.LEVELS_GPU_S), table, gittins.class_of(jobs.gpus))
