"""Where the production core's time goes in a simulation: philly-4w, FCFS, greedy; by function, its own time.

By the deterministic profiler, which makes many small calls look dearer than they are: shares, not seconds, count.
"""

from __future__ import annotations

import cProfile
import pstats

from rich.table import Table

from loadgen.jobs import parse_moment
from loadgen.trace import Window, read_trace
from streamsched.core.config import SchedulerConfig
from streamsched.policy import by_name
from streamsched.sim.simulator import simulate
from streamsched.sim.workload import job, nodes_of

from . import _cases

FUNCTIONS = 16


def run(quick: bool) -> None:
    console = _cases.console(110)
    path, first, before, nodes = _cases.SLICES["philly-4w"]
    if (trace := _cases.trace("simulator_profile", path, console)) is None:
        return
    window = Window(parse_moment(first), parse_moment(before), 1_000 if quick else 10_000)
    found = read_trace(trace, window).jobs
    jobs = [job(number, one.submit_s, one.duration_s, one.gpus, one.tenant) for number, one in enumerate(found)]
    config = SchedulerConfig(window_jobs=10_000, reservations_max=0, finished_keep_s=3600.0)
    profiler = cProfile.Profile()
    profiler.enable()
    simulate(jobs, nodes_of([(nodes, 8, "any")]), config, by_name("fcfs"))
    profiler.disable()
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    whole = sum(own for _, _, own, _, _ in stats.values())
    table = Table(title=f"first {len(jobs):,} jobs: own time of {len(stats):,} functions, the dearest")
    for heading in ("function", "calls per job", "share", "sum"):
        table.add_column(heading, justify="left" if heading == "function" else "right")
    total = 0.0
    for (file, line, name), (_, calls, own, _, _) in sorted(stats.items(), key=lambda item: -item[1][2])[:FUNCTIONS]:
        total += own
        where = name if line == 0 else f"{file.rpartition('/')[2]}:{name}"
        table.add_row(where, f"{calls / len(jobs):.1f}", f"{own / whole:.1%}", f"{total / whole:.1%}")
    console.print(table)
