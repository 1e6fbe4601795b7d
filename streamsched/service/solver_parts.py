"""Large windows solved in parts, each in a process of its own: what a solver process runs where `solve_processes` > 1.

The solver process (`solver.py`) divides the window, hands the parts to helpers and joins their answers. Helpers end
when it does, which the parent kills at the deadline; a helper that dies costs its window the parts' answers (greedy's
is there), and the next window gets new helpers.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Final

from streamsched.core.problem import Problem, Solution
from streamsched.placement.solve import PartsFailed, SolveLimits, solve, solve_in_parts

from .solver import die_with, leave_alone_what_is_there, warm_up_problem

_START_S: Final = 0.2
"""How long each helper is kept busy at the start, so that every one of them is started then."""


def solve_by_helpers(
    problem: Problem, limits: SolveLimits, on_greedy: Callable[[Solution], None] | None = None
) -> Solution:
    """A `SolveFunction`: as `solve_in_parts`, `limits.parts_max` helpers being at work at a time."""
    _helpers.start(limits)  # also for windows that are not divided: the warm-up of the solver process is one
    return solve_in_parts(problem, limits, on_greedy, _helpers.run)


class _Helpers:
    """Processes that solve parts; started at first use, all of them."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def run(self, parts: Sequence[Problem], limits: SolveLimits) -> list[Solution]:
        """Answers in the order of the parts."""
        pool = self.start(limits)
        try:
            return list(pool.map(solve, parts, [limits] * len(parts)))
        except BrokenProcessPool as error:
            self.close()
            raise PartsFailed("a helper that solved a part has died") from error

    def start(self, limits: SolveLimits) -> ProcessPoolExecutor:
        if self._pool is None:
            # Spawned: a fork would take over this process's locks as they are.
            self._pool = ProcessPoolExecutor(
                limits.parts_max, multiprocessing.get_context("spawn"), _begin, (os.getpid(), limits)
            )
            list(self._pool.map(time.sleep, [_START_S] * limits.parts_max))
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


_helpers: Final = _Helpers()
atexit.register(_helpers.close)


def _begin(parent: int, limits: SolveLimits) -> None:
    """In a helper: import the solver and run it once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    solve(warm_up_problem(), limits)
    leave_alone_what_is_there()
