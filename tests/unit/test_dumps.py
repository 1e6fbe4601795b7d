"""Windows that went wrong are kept, within bounds, and never at the cost of a window."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import msgspec
import pytest

from streamsched.core.problem import Problem, Solution, SolveStatus
from streamsched.placement import SolveLimits
from streamsched.service.dumps import Dump, DumpFolder, DumpingSolver, parse, why_keep

LIMITS = SolveLimits(time_s=1.0)
MIB = 2**20


def window(number: int, pool: str = "east") -> Problem:
    return Problem(pool=pool, window=number, now=0.0, policy="t", candidates=(), classes=())


def answer(number: int, status: SolveStatus = SolveStatus.INCUMBENT, **more: object) -> Solution:
    return Solution(window=number, status=status, **more)  # type: ignore[arg-type]


def dump(number: int, pool: str = "east") -> Dump:
    return Dump(problem=window(number, pool), reason="slow", written_at=1000.0 + number)


def numbers(folder: Path) -> list[int]:
    return [parse(path.read_bytes(), path.name).problem.window for path in sorted(folder.glob("streamsched-window-*"))]


class Worker:
    """A DumpingSolver whose clock is moved by hand and whose solver answers with what is in `answers`."""

    def __init__(self, folder: DumpFolder, limits: SolveLimits = LIMITS) -> None:
        self.now = 1000.0
        self.answers: dict[int, Solution | Exception] = {}
        self.dumping = DumpingSolver(self._solve, limits, folder, lambda: self.now)

    async def _solve(self, problem: Problem) -> Solution:
        found = self.answers.get(problem.window, answer(problem.window))
        if isinstance(found, Exception):
            raise found
        return found

    async def run(self, *windows: Problem, apart_s: float = 60.0) -> list[Solution]:
        solutions = []
        for problem in windows:
            solutions.append(await self.dumping.solve(problem))
            await self.dumping.close()
            self.now += apart_s
        return solutions


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        (answer(1, SolveStatus.OPTIMAL, build_s=0.1, solve_s=0.2), ""),
        (answer(1, SolveStatus.EMPTY), ""),
        (answer(1, SolveStatus.INCUMBENT), "slow: the limit was reached before the gap"),
        (answer(1, SolveStatus.OPTIMAL, build_s=0.5, solve_s=0.75), "slow: 1.250 s of 1 s"),
        (answer(1, SolveStatus.GREEDY), "fell back: greedy's answer was used"),
        (answer(1, SolveStatus.GREEDY, note="too large: 9 variables, at most 3"), "too large: 9 variables, at most 3"),
        (answer(1, SolveStatus.EMPTY, note="solver process died: EOFError"), "solver process died: EOFError"),
    ],
)
def test_a_window_is_kept_when_it_was_slow_failed_or_fell_back(solution: Solution, reason: str) -> None:
    assert why_keep(solution, LIMITS) == reason


def test_greedy_by_choice_is_no_fall_back() -> None:
    by_choice = SolveLimits(time_s=1.0, variables_max=0)
    assert why_keep(answer(1, SolveStatus.GREEDY, note="too large: 9 variables, at most 0"), by_choice) == ""
    assert why_keep(answer(1, SolveStatus.GREEDY, note="deadline: none"), by_choice) == "deadline: none"


def test_what_is_kept_is_the_problem_the_limits_and_the_answer(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(DumpFolder(tmp_path / "new" / "folder", 9, MIB))
        assert await worker.run(window(3, "a/b:c")) == [answer(3)]

    asyncio.run(main())
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert path.name == "streamsched-window-19700101T001640.000Z-a_b_c-3.json"
    kept = parse(path.read_bytes(), path.name)
    assert (kept.problem, kept.limits, kept.solution) == (window(3, "a/b:c"), LIMITS, answer(3))
    assert kept.reason.startswith("slow")


def test_a_solve_that_raises_is_kept_and_still_raises(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(DumpFolder(tmp_path, 9, MIB))
        worker.answers[1] = RuntimeError("no luck")
        with pytest.raises(RuntimeError, match="no luck"):
            await worker.run(window(1))
        await worker.dumping.close()

    asyncio.run(main())
    (path,) = tmp_path.iterdir()
    assert parse(path.read_bytes(), "f").reason == "failed: RuntimeError: no luck"


def test_a_pool_is_dumped_every_ten_seconds_at_most(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(DumpFolder(tmp_path, 99, MIB))
        await worker.run(*(window(n) for n in range(7)), apart_s=3.0)
        await worker.run(window(100, "west"), apart_s=0.0)

    asyncio.run(main())
    assert numbers(tmp_path) == [0, 4, 100]


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_newest_so_many_stay_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / "streamsched-window-00000101T000000.000Z-east-0.part").write_text("of a crash")
    folder = DumpFolder(tmp_path, 3, MIB)
    for number in range(8):
        folder.write(dump(number))
    assert numbers(tmp_path) == [5, 6, 7]
    assert len(list(tmp_path.iterdir())) == 4


def test_all_together_stay_within_their_bytes(tmp_path: Path) -> None:
    size = len(msgspec.json.encode(dump(1)))
    folder = DumpFolder(tmp_path, 99, int(3.5 * size))
    for number in range(1, 9):
        folder.write(dump(number))
    assert numbers(tmp_path) == [6, 7, 8]


def test_one_that_alone_is_too_large_drops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = len(msgspec.json.encode(dump(1)))
    folder = DumpFolder(tmp_path, 99, small + 200)
    folder.write(dump(1))
    assert folder.write(dump(2, "p" * 500)) is None
    assert numbers(tmp_path) == [1]
    with caplog.at_level(logging.WARNING):
        asyncio.run(Worker(folder).run(window(3, "p" * 500)))
    assert "window 3 not dumped (larger than dump_mib)" in caplog.text


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_no_window_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "replace", refuse)
    with caplog.at_level(logging.WARNING):
        solutions = asyncio.run(Worker(DumpFolder(tmp_path, 9, MIB)).run(*(window(n) for n in range(5))))
    assert solutions == [answer(n) for n in range(5)]
    assert list(tmp_path.iterdir()) == []
    assert [record.getMessage() for record in caplog.records] == [
        "pool east: window 0 not dumped ([Errno 28] No space left on device)"
    ]


def test_a_folder_that_is_none_costs_no_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(Worker(DumpFolder(file / "dumps", 9, MIB)).run(window(1))) == [answer(1)]
    assert "not dumped" in caplog.text
    assert file.read_text() == "in the way"


def test_a_disk_that_hangs_delays_no_window(tmp_path: Path) -> None:
    let_go = threading.Event()

    class Hanging(DumpFolder):
        def write(self, dump: Dump) -> Path | None:
            let_go.wait(20)
            return super().write(dump)

    async def main() -> None:
        worker = Worker(Hanging(tmp_path, 9, MIB))
        for number in range(5):
            assert await worker.dumping.solve(window(number)) == answer(number)
            worker.now += 60
        let_go.set()
        await worker.dumping.close()

    asyncio.run(main())
    assert numbers(tmp_path) == [0]
