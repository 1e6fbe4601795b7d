"""Solve functions for `SolverProcess` that misbehave, named by their dotted paths. Warm-up (window -1) is spared."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from msgspec.structs import replace

from streamsched.core.problem import Problem, Solution
from streamsched.placement import SolveLimits, solve

OnGreedy = Callable[[Solution], None]


def hang(problem: Problem, limits: SolveLimits, on_greedy: OnGreedy) -> Solution:
    """Greedy's answer, then nothing ever."""
    solution = solve(problem, limits, on_greedy)
    if problem.window >= 0:
        threading.Event().wait()
    return solution


def hang_at_once(problem: Problem, limits: SolveLimits, on_greedy: OnGreedy) -> Solution:
    if problem.window >= 0:
        threading.Event().wait()
    return solve(problem, limits, on_greedy)


def deaf(problem: Problem, limits: SolveLimits, on_greedy: OnGreedy) -> Solution:
    """Solves, without any limit but in the warm-up."""
    return solve(problem, limits if problem.window < 0 else replace(limits, time_s=None), on_greedy)


def die_in_window_1(problem: Problem, limits: SolveLimits, on_greedy: OnGreedy) -> Solution:
    """kill -9 in the middle of a solve, once."""
    solution = solve(problem, limits, on_greedy)
    if problem.window == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return solution


def raise_in_window_1(problem: Problem, limits: SolveLimits, on_greedy: OnGreedy) -> Solution:
    solution = solve(problem, limits, on_greedy)
    if problem.window == 1:
        raise RuntimeError("no luck")
    return solution


def chatter(problem: Problem, limits: SolveLimits, on_greedy: OnGreedy) -> Solution:
    """Writes to stdout, as solvers do."""
    os.write(1, b"Running HiGHS")
    print("Running HiGHS", flush=True)
    return solve(problem, limits, on_greedy)
