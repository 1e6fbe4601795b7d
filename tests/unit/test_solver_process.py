"""The solver process: an answer by the deadline whatever happens to the child. No times are measured here."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from streamsched.core.problem import Candidate, NodeClass, Problem, Solution, SolveStatus
from streamsched.placement import SolveLimits, check, solve
from streamsched.service.solver import SolverProcess

LIMITS = SolveLimits(time_s=1.0)
SHORT = SolveLimits(time_s=0.3)


def window(number: int) -> Problem:
    """Greedy takes `wide`; the model knows better."""
    jobs = [("wide", 8, 5.0), ("x", 4, 4.0), ("y", 4, 4.0)]
    return Problem(
        pool="p",
        window=number,
        now=0.0,
        policy="t",
        candidates=tuple(
            Candidate(job_id=name, attempt=0, chunks=((gpus, 1),), value=value) for name, gpus, value in jobs
        ),
        classes=(NodeClass(gpu_type="V", free_gpus=8, node_ids=("n",)),),
    )


def placed(solution: Solution) -> set[str]:
    return {a.job_id for a in solution.assignments}


def with_solver(
    use: Callable[[SolverProcess], Awaitable[None]],
    function: str = "streamsched.placement.solve:solve",
    limits: SolveLimits = LIMITS,
    grace_s: float = 20.0,
) -> None:
    async def main() -> None:
        async with SolverProcess(limits, function=function, grace_s=grace_s) as solver:
            await use(solver)
        assert solver.pid is None

    asyncio.run(main())


def test_it_answers_as_solve_does_window_after_window() -> None:
    async def use(solver: SolverProcess) -> None:
        for number in range(3):
            timeless = {"build_s": 0.0, "solve_s": 0.0}
            there, here = await solver.solve(window(number)), solve(window(number), LIMITS)
            assert msgspec.structs.replace(there, **timeless) == msgspec.structs.replace(here, **timeless)
        assert (solver.restarts, solver.timeouts) == (0, 0)

    with_solver(use)


def test_at_the_deadline_greedys_answer_is_there_and_the_loop_was_never_blocked() -> None:
    async def use(solver: SolverProcess) -> None:
        ticks = 0

        async def heartbeat() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        beating = asyncio.create_task(heartbeat())
        before = solver.pid
        solution = await solver.solve(window(0))
        beating.cancel()
        assert solution.status is SolveStatus.GREEDY
        assert placed(solution) == {"wide"}
        assert solution.note.startswith("deadline:")
        assert ticks >= 5
        assert (solver.timeouts, solver.restarts) == (1, 1)
        await solver.start()
        assert solver.pid not in (None, before)

    with_solver(use, "solver_functions:hang", SHORT, grace_s=0.2)


def hard(number: int) -> Problem:
    """Many jobs of odd sizes that are worth almost what they take, on many odd nodes: not finished in any time."""
    r = random.Random(number)
    return Problem(
        pool="p",
        window=number,
        now=0.0,
        policy="t",
        candidates=tuple(
            Candidate(
                job_id=f"j{i}",
                attempt=0,
                chunks=((1, 1),),
                value=1.0 + (cpu + memory + r.randrange(-300, 300)) / 80_000,
                cpu_milli=cpu,
                memory_mib=memory,
            )
            for i in range(96)
            for cpu, memory in [(r.randrange(10_001, 40_000, 2), r.randrange(10_001, 40_000, 2))]
        ),
        classes=tuple(
            NodeClass(
                gpu_type="V",
                free_gpus=8,
                node_ids=(f"n{i}",),
                free_cpu_milli=r.randrange(50_001, 90_000, 2),
                free_memory_mib=r.randrange(50_001, 90_000, 2),
            )
            for i in range(24)
        ),
    )


@pytest.mark.parametrize("function", ["streamsched.placement.solve:solve", "solver_functions:deaf"])
def test_a_model_made_hard_gives_its_best_so_far_and_the_loop_goes_on(function: str) -> None:
    """Whether the engine looks at its limit by itself or has to be killed at the deadline."""

    async def use(solver: SolverProcess) -> None:
        beats = 0

        async def heartbeat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        beating = asyncio.create_task(heartbeat())
        solution = await solver.solve(hard(1))
        beating.cancel()
        assert solution.status in (SolveStatus.INCUMBENT, SolveStatus.GREEDY)
        assert len(solution.assignments) > 24
        assert check(hard(1), solution) == []
        assert beats >= 5
        assert solver.timeouts == (1 if function.endswith("deaf") else 0)

    grace_s = 0.5 if function.endswith("deaf") else 20.0
    with_solver(use, function, SolveLimits(time_s=0.5, gap=0.0), grace_s)


def test_without_even_greedys_answer_the_window_is_empty() -> None:
    async def use(solver: SolverProcess) -> None:
        solution = await solver.solve(window(7))
        assert (solution.status, solution.window, solution.assignments) == (SolveStatus.EMPTY, 7, ())

    with_solver(use, "solver_functions:hang_at_once", SHORT, grace_s=0.2)


def test_a_killed_child_costs_one_windows_model_and_is_replaced() -> None:
    async def use(solver: SolverProcess) -> None:
        assert placed(await solver.solve(window(0))) == {"x", "y"}
        struck = await solver.solve(window(1))
        assert placed(struck) == {"wide"}
        assert struck.note.startswith("solver process died")
        assert placed(await solver.solve(window(2))) == {"x", "y"}
        assert (solver.restarts, solver.timeouts) == (1, 0)

    with_solver(use, "solver_functions:die_in_window_1")


def test_a_child_that_died_between_windows_costs_nothing() -> None:
    async def use(solver: SolverProcess) -> None:
        assert solver.pid is not None
        os.kill(solver.pid, signal.SIGKILL)
        assert solver._child is not None
        await solver._child._process.wait()
        assert placed(await solver.solve(window(0))) == {"x", "y"}
        assert (solver.restarts, solver.timeouts) == (1, 0)

    with_solver(use)


def test_an_exception_in_the_child_leaves_greedys_answer_and_the_child() -> None:
    async def use(solver: SolverProcess) -> None:
        before = solver.pid
        struck = await solver.solve(window(1))
        assert (placed(struck), struck.note) == ({"wide"}, "solver: RuntimeError: no luck")
        assert placed(await solver.solve(window(2))) == {"x", "y"}
        assert solver.pid == before

    with_solver(use, "solver_functions:raise_in_window_1")


def test_a_cancelled_solve_does_not_answer_the_next_one() -> None:
    async def use(solver: SolverProcess) -> None:
        asking = asyncio.create_task(solver.solve(window(0)))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert solver.restarts == 1

    with_solver(use, "solver_functions:hang")


def test_concurrent_solves_take_turns() -> None:
    async def use(solver: SolverProcess) -> None:
        solutions = await asyncio.gather(*(solver.solve(window(n)) for n in range(4)))
        assert [s.window for s in solutions] == [0, 1, 2, 3]

    with_solver(use)


def test_what_the_child_prints_does_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    async def use(solver: SolverProcess) -> None:
        assert placed(await solver.solve(window(0))) == {"x", "y"}

    with_solver(use, "solver_functions:chatter")
    assert capfd.readouterr().out == ""


def slow_start(problem: Problem, limits: SolveLimits, on_greedy: Callable[[Solution], None]) -> Solution:
    """Its warm-up takes longer than a solve may."""
    if problem.window == -1:
        time.sleep(3.0)
    return solve(problem, limits, on_greedy)


def test_a_slow_start_does_not_count_against_the_window() -> None:
    async def main() -> None:
        solver = SolverProcess(LIMITS, function="test_solver_process:slow_start", grace_s=1.5)
        assert placed(await solver.solve(window(0)))
        assert (solver.restarts, solver.timeouts) == (0, 0)
        await solver.close()

    asyncio.run(main())


def test_a_child_that_never_gets_warm_is_replaced() -> None:
    async def main() -> None:
        solver = SolverProcess(LIMITS, function="test_solver_process:slow_start", start_limit_s=0.2)
        solution = await solver.solve(window(0))
        assert (solution.status, solver.restarts) == (SolveStatus.EMPTY, 1)
        assert "not ready" in solution.note
        await solver.close()

    asyncio.run(main())


def test_a_function_that_does_not_exist_is_told_at_start() -> None:
    async def main() -> None:
        solver = SolverProcess(LIMITS, function="solver_functions:missing")
        with pytest.raises(OSError, match="missing"):
            await solver.start()
        await solver.close()

    asyncio.run(main())


def test_closing_ends_a_child_that_is_still_starting() -> None:
    async def main() -> None:
        solver = SolverProcess(LIMITS)
        starting = asyncio.create_task(solver.start())
        await asyncio.sleep(0.05)
        await solver.close()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())


PARENT = """
import asyncio, sys
from streamsched.placement import SolveLimits
from streamsched.service.solver import SolverProcess
from test_solver_process import window

async def main():
    solver = SolverProcess(SolveLimits(time_s=60.0), function="solver_functions:hang")
    await solver.start()
    print(solver.pid, flush=True)
    await solver.solve(window(0))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PDEATHSIG")
def test_the_child_dies_with_its_parent_also_while_solving() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=env, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(500):
        if not alive(child):
            return
        asyncio.run(asyncio.sleep(0.02))
    pytest.fail(f"solver process {child} outlived its parent")


def alive(pid: int) -> bool:
    """A zombie whose new parent has not looked yet is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
