"""Where a scarce window's time goes: 64 jobs on 100,000 GPUs of four types, with and without topology.

By the deterministic profiler, which makes Python look slower than it is beside HiGHS: shares are upper bounds for
everything but HiGHS.
"""

from __future__ import annotations

import cProfile
import pstats

from rich.table import Table

from benchmarks.placement import LIMITS, Case, problem
from streamsched.placement import solve
from streamsched.service.solver import leave_alone_what_is_there

from . import _cases

SEEDS = 20
STAGES = {
    "HiGHS (branch and bound)": ("<built-in method highspy._core.run>",),
    "Pyomo to HiGHS (appsi set_instance)": ("set_instance",),
    "model (variables, constraints)": ("milp.py:__init__",),
    "options, groups, patterns": ("_layout",),
    "greedy": ("_greedy",),
    "what can never fit": ("_judge",),
    "check of the answer": ("_checked",),
}
"""Stage -> functions whose cumulative time it is; they do not contain each other."""


def run(quick: bool) -> None:
    seeds = 3 if quick else SEEDS
    table = Table(title=f"profile of {seeds} windows, ms per window (share)")
    table.add_column("stage")
    columns = {topology: _profile(topology, seeds) for topology in (False, True)}
    for topology in columns:
        table.add_column("with topology" if topology else "without", justify="right")
    for stage in (*STAGES, "all"):
        table.add_row(stage, *(columns[topology][stage] for topology in columns))
    _cases.console(110).print(table)


def _profile(topology: bool, seeds: int) -> dict[str, str]:
    problems = [problem(Case(64, 100_000, 4, topology), seed) for seed in range(seeds)]
    solve(problems[0], LIMITS)
    leave_alone_what_is_there()
    profiler = cProfile.Profile()
    profiler.enable()
    for each in problems:
        solve(each, LIMITS)
    profiler.disable()
    seconds: dict[str, float] = {}
    for (file, _, name), (_, _, _, cumulative, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        for key in (name, f"{file.rpartition('/')[2]}:{name}"):
            seconds[key] = seconds.get(key, 0.0) + cumulative
    whole = seconds["_after_greedy"]
    found = {stage: sum(seconds.get(name, 0.0) for name in names) for stage, names in STAGES.items()} | {"all": whole}
    return {stage: f"{1e3 * s / seeds:.0f} ({100 * s / whole:.0f} %)" for stage, s in found.items()}
