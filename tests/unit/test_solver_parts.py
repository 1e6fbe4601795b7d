"""Large windows in several processes: the same answer as one after the other, whatever dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from streamsched.core.problem import Candidate, NodeClass, Problem, SolveStatus
from streamsched.placement import SolveLimits, check, solve_in_parts
from streamsched.service.solver import SolverProcess

LIMITS = SolveLimits(time_s=20.0, gap=0.0, parts_max=2, part_jobs=8)
FUNCTION = "streamsched.service.solver_parts:solve_by_helpers"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def window(number: int) -> Problem:
    """Jobs for more GPUs than there are, in pieces that do not fit together well."""
    r = random.Random(number)
    jobs = [(f"j{i:02}", r.choice([3, 4, 5, 6]), float(r.randint(1, 9))) for i in range(24)]
    return Problem(
        pool="p",
        window=number,
        now=0.0,
        policy="t",
        candidates=tuple(Candidate(job_id=j, attempt=0, chunks=((gpus, 1),), value=value) for j, gpus, value in jobs),
        classes=(NodeClass(gpu_type="V", free_gpus=8, node_ids=tuple(f"n{i}" for i in range(8)), total_gpus=8),),
    )


def with_solver(use: Callable[[SolverProcess], Awaitable[None]]) -> None:
    async def main() -> None:
        async with SolverProcess(LIMITS, function=FUNCTION, grace_s=20.0) as solver:
            await use(solver)

    asyncio.run(main())


def helpers(solver: SolverProcess) -> list[int]:
    """Pids of the solver process's children that solve (the other one tracks resources)."""
    assert solver.pid is not None
    found = Path(f"/proc/{solver.pid}/task/{solver.pid}/children").read_text().split()
    return [int(pid) for pid in found if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_the_helpers_answer_is_that_of_the_parts_one_after_the_other() -> None:
    async def use(solver: SolverProcess) -> None:
        assert len(helpers(solver)) == LIMITS.parts_max
        for number in range(3):
            there, here = await solver.solve(window(number)), solve_in_parts(window(number), LIMITS)
            assert there.assignments == here.assignments
            assert there.objective == here.objective
            assert there.note == ""
            assert check(window(number), there) == []

    with_solver(use)


def test_a_helper_that_dies_costs_one_window_its_parts() -> None:
    async def use(solver: SolverProcess) -> None:
        os.kill(helpers(solver)[0], signal.SIGKILL)
        struck = await solver.solve(window(0))
        assert struck.status is SolveStatus.GREEDY
        assert "helper" in struck.note
        assert check(window(0), struck) == []
        assert (await solver.solve(window(0))).assignments == solve_in_parts(window(0), LIMITS).assignments
        assert (solver.restarts, solver.timeouts) == (0, 0)

    with_solver(use)


def test_helpers_end_with_the_solver_process() -> None:
    async def use(solver: SolverProcess) -> None:
        pids = helpers(solver)
        assert solver.pid is not None
        os.kill(solver.pid, signal.SIGKILL)
        for _ in range(500):
            if not any(map(alive, pids)):
                return
            await asyncio.sleep(0.02)
        pytest.fail(f"helpers outlived their solver process: {pids}")

    with_solver(use)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
