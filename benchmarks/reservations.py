"""What a bound on waits costs without preemption: nodes kept for jobs that have waited too long, on two real slices.

By the parts of `streamsched.learn.judge`: simple orders (run times predicted from before the slice), whoever fits is
started, with nodes kept after 22 h for one job at a time or for four, and without.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from rich.console import Console

from streamsched.learn import judge
from streamsched.learn.judge import Judge, Measure, Part, Split
from streamsched.policy.expression import parse

from .policies import slices

BOUND_S: Final = 79_200.0
ORDERS: Final = {"fcfs": "wait_s", "sjf": "-run_s", "smallest": "-gpus", "qssf": "-work_gpu_s"}
BOUNDS: Final = ((math.inf, 1), (BOUND_S, 1), (BOUND_S, 4))
COLUMNS: Final = (Measure.MEAN_WAIT, Measure.P99_WAIT, Measure.MAX_WAIT)


def run(quick: bool) -> None:
    """A table in Markdown for each slice and part. STREAMSCHED_BENCH_CASES: philly-4w,venus-4w (all)."""
    console = Console(width=200, highlight=False)
    for name, given in slices("reservations", console, quick):
        split = Split.of_four_weeks(given.start_s)
        if quick:
            submit = np.array([job.features.submitted_at for job in given.jobs])
            half, later = np.quantile(submit, [0.5, 0.75]).tolist()
            split = Split((given.start_s, half, later, float(submit[-1]) + 1.0))
        where = judge.Slice(name, given.jobs, given.history, given.nodes, split)
        for part in (Part.CHOOSE, Part.REPORT):
            console.print(f"\n### {name}, {part} part\n", markup=False)
            console.print("\n".join(table(Judge(where), where, part)), markup=False)


def table(bench: Judge, where: judge.Slice, part: Part) -> list[str]:
    """Lines of Markdown; waits in s."""
    lines = [
        "| order | nodes kept after | for jobs at a time | mean wait, s | p99 | longest | utilisation |",
        "|---|---|---|---|---|---|---|",
    ]
    for order, text in ORDERS.items():
        for after_s, most in BOUNDS:
            candidate = judge.by_expression(
                order, parse(text), where.node_gpus, reserve_after_s=after_s, reservations_max=most
            )
            found = bench.judge(candidate, part)
            kept = ("never", "-") if math.isinf(after_s) else (f"{after_s / 3600:g} h", str(most))
            waits = " | ".join(f"{found.values[column]:,.0f}" for column in COLUMNS)
            lines.append(f"| {order} | {kept[0]} | {kept[1]} | {waits} | {found.values[Measure.UTILISATION]:.1%} |")
    return lines
