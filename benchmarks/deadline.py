"""A window that no solver finishes: is an answer there at the deadline, and does the event loop stay free meanwhile?

The window is a multiple knapsack made hard on purpose: jobs of one GPU that differ in their cores and memory by odd
amounts and are worth almost exactly what they take, on nodes with different odd amounts, at gap 0. It goes through the
real solver process, once with the engine as it is, which looks at its limit by itself, and once with one that ignores
it, so that the parent has to kill it. A heartbeat on the same event loop measures the longest time that nothing else
could run.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace
from rich.table import Table

from streamsched.core.problem import Candidate, NodeClass, Problem, Solution
from streamsched.placement import SolveLimits, check, solve
from streamsched.service.solver import SolverProcess

from . import _cases

LIMITS = SolveLimits(time_s=1.0, gap=0.0)
GRACE_S = 0.5
LATE_MS_MAX = 50.0
HEARTBEAT_S = 0.002
SEEDS = 10


class Measured(NamedTuple):
    solution: Solution
    seconds: float
    stall_ms: float
    """Longest time between two heartbeats, less the pause between them."""


def hard(seed: int, jobs: int = 96, nodes: int = 24) -> Problem:
    """Gaps of a few thousandths that branch and bound does not close in any time at hand."""
    r = random.Random(seed)
    candidates = []
    for number in range(jobs):
        cpu, memory = r.randrange(10_001, 40_000, 2), r.randrange(10_001, 40_000, 2)
        candidates.append(
            Candidate(
                job_id=f"j{number:03}",
                attempt=0,
                chunks=((1, 1),),
                value=1.0 + (cpu + memory + r.randrange(-300, 300)) / 80_000,
                cpu_milli=cpu,
                memory_mib=memory,
            )
        )
    classes = tuple(
        NodeClass(
            gpu_type="V100",
            free_gpus=8,
            node_ids=(f"n{number:03}",),
            free_cpu_milli=r.randrange(50_001, 90_000, 2),
            free_memory_mib=r.randrange(50_001, 90_000, 2),
            total_gpus=8,
        )
        for number in range(nodes)
    )
    return Problem(pool="hard", window=seed, now=0.0, policy="bench", candidates=tuple(candidates), classes=classes)


def deaf(problem: Problem, limits: SolveLimits, on_greedy: Callable[[Solution], None]) -> Solution:
    """Solves as ever in the warm-up; any other window without a limit."""
    return solve(problem, limits if problem.window < 0 else replace(limits, time_s=None), on_greedy)


def run(quick: bool) -> None:
    table = Table(
        title=f"a window that is not finished: deadline {LIMITS.time_s:g} + {GRACE_S:g} s, gap 0;"
        f" {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f})"
    )
    for heading in (
        "solver",
        "windows",
        "answer after ms",
        "beyond the deadline ms",
        "loop stalled ms",
        "placed",
        "gap %",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("answers", "killed", f"within {LATE_MS_MAX:g} ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, function in (
        ("keeps its limit", "streamsched.placement.solve:solve"),
        ("ignores it", "benchmarks.deadline:deaf"),
    ):
        measured, killed = asyncio.run(_measure(function, 3 if quick else SEEDS))
        table.add_row(name, *_row(measured, killed))
    _cases.console(200).print(table)


async def _measure(function: str, seeds: int) -> tuple[list[Measured], int]:
    measured = []
    async with SolverProcess(LIMITS, grace_s=GRACE_S, function=function) as solver:
        for seed in range(seeds):
            await solver.start()  # the successor of a killed one gets warm beside other work, not in a window
            problem, stalls = hard(seed), [0.0]
            beating = asyncio.create_task(_heartbeat(stalls))
            began = time.perf_counter()
            solution = await solver.solve(problem)
            took = time.perf_counter() - began
            beating.cancel()
            if violations := check(problem, solution):
                raise AssertionError(violations[0])
            measured.append(Measured(solution, took, 1e3 * max(stalls)))
        return measured, solver.timeouts


async def _heartbeat(stalls: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(HEARTBEAT_S)
        stalls.append(time.perf_counter() - before - HEARTBEAT_S)


def _row(measured: list[Measured], killed: int) -> list[str]:
    assert LIMITS.time_s is not None
    late = [1e3 * (m.seconds - LIMITS.time_s - GRACE_S) for m in measured]
    answers = Counter(m.solution.status.value for m in measured)
    return [
        str(len(measured)),
        f"{1e3 * min(m.seconds for m in measured):.0f} to {1e3 * max(m.seconds for m in measured):.0f}",
        f"{max(0.0, *late):.1f}",
        f"{max(m.stall_ms for m in measured):.1f}",
        f"{min(len(m.solution.assignments) for m in measured)} to {max(len(m.solution.assignments) for m in measured)}",
        f"{100 * max(m.solution.gap or 0.0 for m in measured):.2f}",
        " ".join(f"{status} {count}" for status, count in sorted(answers.items())),
        str(killed),
        f"{sum(ms <= LATE_MS_MAX for ms in late)} of {len(late)}",
    ]
