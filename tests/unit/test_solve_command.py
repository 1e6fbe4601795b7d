"""`streamsched solve`: what it tells of a window, and one clear line for every file that is none."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from core_builder import Pool, reloaded
from rich.console import Console

import streamsched.cli
from streamsched.core.instructions import SolveWindow
from streamsched.core.problem import Candidate, NodeClass, Problem, Victim
from streamsched.errors import UserError
from streamsched.placement import SolveLimits, milp
from streamsched.placement import solve as by_engine
from streamsched.policy.rules import FirstComeFirstServed
from streamsched.service.dumps import Dump, parse
from streamsched.service.history import next_window
from streamsched.service.recovery import Fold
from streamsched.store.pool_store import Position

assert milp  # Pyomo logs to the stderr it finds when it is imported: not to one that a test has captured
Solve = Callable[..., tuple[int, str, str]]


def window() -> Problem:
    """Greedy takes `wide`, the model `x` and `[y]`; `far` fits nowhere."""
    jobs = [("wide", 8, 5.0), ("x", 4, 4.0), ("[y]", 4, 4.0), ("far", 9, 1.0)]
    return Problem(
        pool="east",
        window=12,
        now=0.0,
        policy="fcfs",
        candidates=tuple(Candidate(job_id=j, attempt=0, chunks=((g, 1),), value=v) for j, g, v in jobs),
        classes=(NodeClass(gpu_type="V100", free_gpus=8, node_ids=("n1",), total_gpus=8),),
    )


def raw(**changes: Any) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(window()) | changes)


@pytest.fixture
def solve(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Solve:
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        code = 0
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setattr(sys, "argv", ["streamsched", "solve", *arguments])
        monkeypatch.setattr("streamsched.commands.solve.console", Console(width=200, highlight=False))
        try:
            streamsched.cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capfd.readouterr()

    return run


def test_it_tells_of_the_model_the_answer_and_each_job(solve: Solve, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_bytes(raw())
    code, out, err = solve(str(path), "--greedy")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "window 12 of pool east, policy fcfs" in lines
    assert "asked 4 jobs; 1 nodes in 1 classes, 8 idle GPUs" in lines
    assert any(line.startswith("model ") and "variables" in line and "1 cells" in line for line in lines)
    assert any(line.startswith("constraints gang") for line in lines)
    assert "status optimal (proved within the gap)" in lines
    assert "objective 8, bound 8, gap 0.000 %" in lines
    assert "greedy greedy, 1 placed, objective 5 (+3 now)" in lines
    assert "2 placed" in lines
    assert "[y] 4 n1 (V100): 4 -" in lines
    assert "2 not placed" in lines
    assert "far 1 gpus: needs 9 free GPUs on one node of any type, best node has 8" in lines


def test_json_from_stdin_goes_round(solve: Solve) -> None:
    code, out, err = solve("-", "--json", "--gap", "0", "--time-limit", "5", "--seed", "3", stdin=raw())
    assert (code, err) == (0, "")
    told = msgspec.json.decode(out)
    assert {a["job_id"] for a in told["solution"]["assignments"]} == {"x", "[y]"}
    assert told["solution"]["status"] == "optimal"
    assert (told["limits"]["gap"], told["limits"]["time_s"], told["limits"]["seed"]) == (0.0, 5.0, 3)
    assert told["size"]["models"] == 1
    assert sum(told["size"]["variables"].values()) >= 4
    assert (told["violations"], told["greedy"]) == ([], None)


def test_the_model_is_written_under_its_own_names_also_where_none_was_needed(solve: Solve, tmp_path: Path) -> None:
    path, lp = tmp_path / "problem.json", tmp_path / "model"
    path.write_bytes(raw(candidates=msgspec.to_builtins(window().candidates[:1])))
    code, _, err = solve(str(path), "--write-lp", str(lp))
    assert (code, err) == (0, f"streamsched: wrote {lp}\n")
    text = lp.read_text()
    assert "gang(0)" in text
    assert "nodes(0_0)" in text


def test_a_dump_is_solved_under_its_limits_and_compared_with_the_answer_of_then(solve: Solve, tmp_path: Path) -> None:
    limits = SolveLimits(variables_max=0, seed=7)
    dump = Dump(
        problem=window(),
        limits=limits,
        reason="fell back",
        solution=by_engine(window(), limits),
        version="0",
        written_at=1.0,
    )
    path = tmp_path / "dump.json"
    path.write_bytes(msgspec.json.encode(dump))
    code, out, _ = solve(str(path))
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "kept because fell back" in lines
    assert "limits 1 s, gap 1.00%, seed 7" in lines
    assert any(line.startswith("answered then greedy, 1 placed, objective 5 (the same now)") for line in lines)


def test_a_problem_is_written_as_it_was_read(solve: Solve, tmp_path: Path) -> None:
    out = tmp_path / "again.json"
    assert solve("-", "--write-problem", str(out), stdin=raw())[0] == 0
    assert parse(out.read_bytes(), "again").problem == window()


NODE = msgspec.to_builtins(window().classes[0])
VICTIM = Victim(placement_id="p", job_id="j", level=0, cost=1.0, held=(("n9", 1, 0, 0),))
JOB = msgspec.to_builtins(window().candidates[0])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "f.json: is empty"),
        (b" \n", "f.json: is empty"),
        (raw()[:-20], "f.json: the JSON ends too early: the file is cut"),
        (b'{\n "pool": }', "f.json:2:10: not JSON: "),
        (b"window 12", "f.json:1:1: not JSON: "),
        (b'{"pool": "\xff"}', "f.json: not JSON: Invalid UTF-8"),
        (b"[" * 100_000, "f.json: not JSON: maximum recursion depth"),
        (b"[1, 2]", "f.json: Expected `object`, got `array`"),
        (b"{}", "f.json: Object missing required field `pool`"),
        (raw(window="twelve"), "f.json: Expected `int`, got `str` - at `$.window`"),
        (raw(candidates=[JOB | {"chunks": [[8, "one"]]}]), "got `str` - at `$.candidates[0].chunks[0][1]`"),
        (raw(candidates=[JOB | {"value": None}]), "at `$.candidates[0].value`"),
        (raw(candidates=[JOB | {"gpu_typs": ["V100"]}]), "unknown field $.candidates[0].gpu_typs"),
        (raw(tenants={}), "unknown field $.tenants"),
        (raw().replace(b'"value":5.0', b'"value":1e999'), "Number out of range"),
        (raw(candidates=[JOB | {"value": 1e300}]), "candidates[0] (wide): value 1e+300 is not within"),
        (raw(candidates=[JOB | {"chunks": [[10**40, 1]]}]), "candidates[0] (wide): GPUs of a worker 1e+40 is not"),
        (raw(classes=[NODE | {"free_gpus": 10**9}]), "classes[0]: free_gpus 1e+09 is not within 0 and 4096"),
        (raw(classes=[NODE | {"free_gpus": -1}]), "classes[0]: free_gpus -1 is not within"),
        (raw(classes=[NODE | {"shares": [1000]}]), "classes[0]: shares 1000 is not within 1 and 999"),
        (raw(classes=[NODE, NODE]), "classes[1]: node n1 is there twice"),
        (raw(classes=[NODE | {"node_ids": []}]), "classes[0]: no node_ids"),
        (
            raw(victims=[msgspec.to_builtins(VICTIM)]),
            "victims[0] (p): node n9 is in no class",
        ),
        (b'{"problem": {"pool": 1}}', "Expected `str`, got `int` - at `$.problem.pool`"),
        (b'{"problem": ' + raw() + b', "reson": "x"}', "unknown field $.reson"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_problem_is_one_clear_line(body: bytes, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(body, "f.json")
    message = str(caught.value)
    assert message.startswith("f.json")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a file with a problem"),
        (("p.json", "--pool", "east"), "give a file with a problem"),
        (("/nowhere/p.json",), "/nowhere/p.json: No such file or directory"),
        (("/",), "/: Is a directory"),
        (("p.json", "--until", "5"), "--until goes with --pool"),
        (("-",), "stdin: is empty"),
    ],
)
def test_what_cannot_be_run_ends_with_code_2_and_one_line(solve: Solve, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = solve(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("streamsched: ")
    assert said in err
    assert err.count("\n") == 1


def test_an_lp_file_that_cannot_be_written_is_one_line(solve: Solve, tmp_path: Path) -> None:
    code, _, err = solve("-", "--write-lp", str(tmp_path / "no" / "m.lp"), stdin=raw())
    assert (code, err.count("\n")) == (2, 1)
    assert "No such file or directory" in err


def test_the_window_of_a_folded_state_is_the_one_its_owner_would_ask() -> None:
    pool = Pool()
    pool.nodes(2, gpus=4)
    pool.arrive("a", 3)
    pool.arrive("b", 2, 2)
    pool.running("a")
    pool.arrive("c", 1, gpu_types=("V100",))
    fold = Fold(reloaded(pool.state), Position())
    fold.state.ranker = None
    (asked,) = [i for i in pool.window() if isinstance(i, SolveWindow)]
    found = next_window(fold, FirstComeFirstServed())
    assert found is not None
    numbered = msgspec.structs.replace(found, window=asked.problem.window)  # each owner counts its own windows
    assert numbered == asked.problem
    assert {c.job_id for c in asked.problem.candidates} == {"c"}


def test_a_state_in_which_no_job_could_start_asks_nothing() -> None:
    pool = Pool()
    pool.node("n", 2)
    pool.arrive("a", 2)
    pool.running("a")
    pool.arrive("b", 2)
    assert next_window(Fold(reloaded(pool.state), Position()), FirstComeFirstServed()) is None


def test_as_a_process_it_prints_nothing_but_its_answer() -> None:
    """Pyomo and HiGHS write to stdout when they can."""
    command = [sys.executable, "-W", "error", "-m", "streamsched.cli", "solve", "-", "--json"]
    done = subprocess.run(command, input=raw(), capture_output=True, timeout=120, check=True)
    assert msgspec.json.decode(done.stdout)["window"] == 12
    assert done.stderr == b""
