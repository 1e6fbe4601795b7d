"""Large windows divided into parts: time and loss against the undivided solve, one after the other and by helpers.

The windows are those of `placement` with topology, larger. The loss is that of the objective against the undivided
solve's (which stops at its own limit), greedy's beside it. Times are of `solve_in_parts` as a whole, with dividing,
greedy and joining, and of `solve` as a whole; the helpers' processes are started before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from msgspec.structs import replace
from rich.table import Table

from benchmarks.placement import Case, problem
from streamsched.core.problem import Problem, Solution
from streamsched.placement import SolveLimits, solve, solve_in_parts
from streamsched.service.solver_parts import solve_by_helpers

from . import _cases

SEEDS = 5
LIMITS = SolveLimits(time_s=3.0)
PARTS = (2, 4)


def run(quick: bool) -> None:
    wide = _cases.console(160)
    seeds = 2 if quick else SEEDS
    table = Table(
        title=f"windows in parts: {seeds} problems per row, medians (loss: median / most); limit {LIMITS.time_s:g} s, "
        f"gap {LIMITS.gap:.0%}, {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f})"
    )
    for heading in ("jobs", "GPUs", "topology", "way", "parts", "seconds", "time, undivided = 1", "loss %", "status"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in [
        Case(n, 10_000, 4, topology) for n in ((128,) if quick else (128, 256, 512)) for topology in (False, True)
    ]:
        for row in _rows(case, [problem(case, seed) for seed in range(seeds)]):
            table.add_row(*row)
    wide.print(table)


def _rows(case: Case, problems: list[Problem]) -> list[list[str]]:
    by_greedy: list[float] = []
    whole = [_timed(partial(solve, p, LIMITS, lambda s: by_greedy.append(s.objective))) for p in problems]
    best = [s.objective for _, s in whole]
    rows = [["undivided", "1", *_figures(whole, whole, best)]]
    for parts in PARTS:
        limits = replace(LIMITS, parts_max=parts, part_jobs=1)
        for way, answer in (("in turn", solve_in_parts), ("helpers", solve_by_helpers)):
            answer(problems[0], limits)
            found = [_timed(partial(answer, p, limits)) for p in problems]
            rows.append([way, str(parts), *_figures(found, whole, best)])
    losses = [100 * (1 - g / b) for g, b in zip(by_greedy, best, strict=True)]
    rows.append(["greedy", "1", "", "", f"{np.median(losses):.2f} / {max(losses):.2f}", ""])
    return [[str(case.jobs), f"{case.gpus:,}", "yes" if case.topology else "no", *row] for row in rows]


def _timed(answer: Callable[[], Solution]) -> tuple[float, Solution]:
    started = time.perf_counter()
    solution = answer()
    return time.perf_counter() - started, solution


def _figures(found: list[tuple[float, Solution]], whole: list[tuple[float, Solution]], best: list[float]) -> list[str]:
    losses = [100 * (1 - s.objective / b) for (_, s), b in zip(found, best, strict=True)]
    statuses = sorted({str(s.status) for _, s in found})
    return [
        f"{np.median([t for t, _ in found]):.2f}",
        f"{np.median([t / u for (t, _), (u, _) in zip(found, whole, strict=True)]):.2f}",
        f"{np.median(losses):.2f} / {max(losses):.2f}",
        " ".join(statuses),
    ]
