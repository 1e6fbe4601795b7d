"""The command `loadgen` as a process: output, exit codes, one line per error."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import loadgen.cli as cli


def loadgen(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "loadgen.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_equal_seeds_give_equal_files_that_inspect_reads(tmp_path: Path) -> None:
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    for path in (first, second):
        ended = loadgen("generate", "--jobs", "200", "--seed", "4", "--profile", "venus", "--out", str(path))
        assert ended.returncode == 0, ended.stderr
    assert first.read_bytes() == second.read_bytes()
    assert loadgen("generate", "--jobs", "200", "--seed", "4", "--profile", "venus", "--out", "-").stdout.encode() == (
        first.read_bytes()
    )
    seen = loadgen("inspect", str(first))
    assert seen.returncode == 0
    assert "neutral CSV" in " ".join(seen.stdout.split()), "the line breaks where the path ends"
    assert "No row was refused." in seen.stdout


def test_inspect_tells_refused_rows_by_kind_and_line(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text("job_id,submit_s,duration_s,gpus\na,0,1,1\nb,x,1,1\nc,0,1,0\nd,0\n")
    seen = loadgen("inspect", str(path))
    assert seen.returncode == 0
    assert "3 rows refused" in seen.stdout
    for kind, line in (("bad-time", 3), ("cpu-job", 4), ("missing-columns", 5)):
        (row,) = [text for text in seen.stdout.splitlines() if kind in text]
        assert str(line) in row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "absent.csv"], "loadgen: absent.csv: no such file or directory"),
        (["generate", "--jobs", "5", "--out", "/absent/a.csv"], "loadgen: /absent/a.csv: no such file or directory"),
        (["generate", "--jobs", "5", "--profile", "mars", "--out", "-"], "loadgen: unknown profile 'mars'"),
        (["executors"], "loadgen: no nodes: give --nodes 80x8:P100"),
        (["executors", "--nodes", "many"], "loadgen: --nodes many: 'many' is not COUNTxGPUS[:TYPE]"),
        (["replay", "absent.csv"], "loadgen: no nodes for the simulated executors"),
        (["replay", "a", "--report", "absent/r.json"], "loadgen: report absent/r.json: there is no folder absent"),
        (["replay", "a", "--no-executors", "--speed", "0"], "loadgen: speed 0: must be more than 0"),
        (["replay", "a", "--no-executors", "--bootstrap", "nowhere"], "loadgen: Kafka bootstrap server 'nowhere'"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    ended = loadgen(*arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith(message)
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_executors_end_with_a_summary_when_told_to(
    signum: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent:
        """Stands for Kafka: nothing comes, and the signal while it is waited for."""

        def __init__(self, *_: object) -> None:
            pass

        async def __aenter__(self) -> Silent:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def start(self, fence: bool) -> None:
            pass

        async def run(self) -> None:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signum)
            await asyncio.sleep(30)

    monkeypatch.setattr(cli, "Publisher", Silent)
    monkeypatch.setattr(cli, "Executors", Silent)
    cli.executors(nodes=["2x4:T4"])
    assert "pool default: 0 placed, 0 started, 0 completed" in capsys.readouterr().err


def test_executors_still_tell_an_error() -> None:
    ended = loadgen("executors", "--nodes", "1x1:T4", "--bootstrap", "127.0.0.1:9")
    assert ended.returncode == 2
    assert "Kafka at 127.0.0.1:9 does not answer" in ended.stderr
    assert "Traceback" not in ended.stderr
