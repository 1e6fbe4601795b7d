"""`streamsched simulate` and `compare`: files, figures, and what is told when they cannot run."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_files import made
from typer.testing import CliRunner

from streamsched import cli
from streamsched.commands.apart import map_apart
from streamsched.commands.output import write_text
from streamsched.errors import UserError
from streamsched.policy.models import Registry, write_registry
from streamsched.sim.bootstrap import Bootstrap, Interval
from streamsched.sim.metrics import Lines, Schedule, summary
from streamsched.sim.nodes import parse_nodes
from streamsched.sim.scenario import read_scenario
from streamsched.sim.workload import Estimates

TRACE = """job_id,submit_s,duration_s,gpus,tenant
a,0,10,6,t1
b,1,5,8,t2
c,2,20,2,t1
d,3,4,2,t2
e,4,-1,2,t2
"""


@pytest.fixture(scope="module", autouse=True)
def _mounted() -> None:
    if not any(command.name == "simulate" for command in cli.app.registered_commands):
        cli._mount()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in args])
    if code == 0:
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    assert result.exception.exit_code == code
    return str(result.exception)


@pytest.mark.parametrize("fast", [(), ("--fast",)])
def test_the_files_say_what_became_of_each_job(trace: Path, tmp_path: Path, fast: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    run("simulate", "--trace", trace, "--nodes", "1x8:V", "--backfill", "none", *fast, "--out", out)
    told = json.loads((out / "summary.json").read_text())
    starts = [line.split(",")[5] for line in (out / "jobs.csv").read_text().splitlines()[1:]]
    assert starts == ["0.0", "10.0", "15.0", "15.0"]
    assert told["jobs"] == 4
    assert told["refused_rows"] == 1
    assert told["mean_wait_s"] == pytest.approx((0 + 9 + 13 + 12) / 4)
    assert told["max_wait_s"] == 13.0
    assert told["mean_jct_s"] == pytest.approx((10 + 14 + 33 + 16) / 4)
    assert "<svg" in (out / "report.html").read_text()


def test_equal_input_gives_equal_bytes(trace: Path, tmp_path: Path) -> None:
    args = ("simulate", "--trace", trace, "--nodes", "1x8", "--policy", "sjf", "--estimates", "noisy:0.5", "--seeds", 3)
    for name in ("one", "two"):
        run(*args, "--out", tmp_path / name)
    for file in ("jobs.csv", "report.html"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two"))
    for told in (one, two, *one["by_seed"], *two["by_seed"]):
        told.pop("wall_s")
    assert one == two
    assert len(one["by_seed"]) == 3


def test_compare_names_oracles_and_gives_intervals(trace: Path, tmp_path: Path) -> None:
    args = ("--trace", trace, "--nodes", "1x8", "--policies", "fcfs,sjf", "--estimates", "true", "--processes", 1)
    text = run("compare", *args, "--out", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(told) == ["fcfs", "sjf (oracle)"]
    assert "sjf (oracle)" in text
    for figures in told.values():
        low, high = figures["mean_wait_s_95"]
        assert low <= figures["mean_wait_s"] <= high


@pytest.mark.parametrize("way", [(), ("--fast",)])
@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_backfill_by_true_run_times_is_an_oracle(
    trace: Path, tmp_path: Path, backfill: str, way: tuple[str, ...]
) -> None:
    """c (20 s) would delay b, d (4 s) does not."""
    args = ("--trace", trace, "--nodes", "1x8:V", "--backfill", backfill, "--estimates", "true")
    run("simulate", *args, *way, "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["policy"] == "fcfs (oracle)"
    starts = [line.split(",")[5] for line in (tmp_path / "out" / "jobs.csv").read_text().splitlines()[1:]]
    assert starts == ["0.0", "10.0", "15.0", "3.0"]


PODS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
a,1000,1000,1,600,,LS,Succeeded,0,100,0
b,1000,1000,1,600,,LS,Succeeded,1,101,1
c,1000,1000,1,400,T4,LS,Succeeded,2,102,2
d,1000,1000,2,1000,P100,LS,Succeeded,3,50,3
e,1000,1000,2,1000,P100,LS,Succeeded,4,50,4
f,1000,1000,1,1000,V100,LS,Succeeded,5,50,5
g,1000,1000,0,0,,LS,Succeeded,6,50,6
"""


def test_parts_of_gpus_and_types_on_a_list_of_nodes(tmp_path: Path) -> None:
    """One node of one T4 and one of two P100. a takes 600 of the T4, b a P100, c the rest of the T4; d waits for b to
    end at 101, e for d; nobody has a V100; g wants no GPU."""
    (tmp_path / "pods.csv").write_text(PODS)
    nodes = "sn,cpu_milli,memory_mib,gpu,model\nn1,1000,1000,1,T4\nn2,1000,1000,2,P100\nn3,1000,1000,0,\n"
    (tmp_path / "nodes.csv").write_text(nodes)
    scenario = tmp_path / "mine.toml"
    scenario.write_text('trace = "pods.csv"\nnode_list = "nodes.csv"\n')
    out = tmp_path / "out"
    run("simulate", "--scenario", scenario, "--out", out)
    rows = [line.split(",") for line in (out / "jobs.csv").read_text().splitlines()[1:]]
    starts = [row[5] for row in rows]
    assert starts[2] == "2.0"
    assert sorted(starts[:2]) == ["0.0", "1.0"]
    assert starts[3:] == ["101.0", "148.0", ""]
    told = json.loads((out / "summary.json").read_text())
    assert (told["jobs"], told["never_ran"], told["refused_rows"]) == (5, 1, 1)
    # Between 0 and 5: 0.6 for a second, 1.2 for a second, 1.6 for 3 of 3 GPUs.
    assert told["gpu_utilisation"] == pytest.approx((0.6 + 1.2 + 1.6 * 3) / (3 * 5))
    words = run("simulate", "--scenario", scenario, "--fast", "--out", out, code=2)
    assert "3 jobs ask for a part of one" in words
    words = run("simulate", "--trace", tmp_path / "pods.csv", "--nodes", "9x8", "--fast", "--out", out, code=2)
    assert "part of one" in words


def test_predictions_learn_from_what_had_ended(tmp_path: Path) -> None:
    """Jobs of 8 GPUs took 10 s before the slice, those of 1 GPU 5,000 s: of two that wait the shorter goes first."""
    trace = tmp_path / "trace.csv"
    early = "".join(f"s{n},{n},10,8,t\nl{n},{n},5000,1,t\n" for n in range(40))
    rows = "first,100000,100,8,t\nlong,100001,10,1,t\nshort,100002,5000,8,t\n"
    trace.write_text("job_id,submit_s,duration_s,gpus,tenant\n" + early + rows)
    args = ("--trace", trace, "--nodes", "1x8:V", "--from", "100000", "--backfill", "none", "--policy", "sjf")
    run("simulate", *args, "--estimates", "predicted", "--out", tmp_path / "out")
    starts = [float(line.split(",")[5]) for line in (tmp_path / "out" / "jobs.csv").read_text().splitlines()[1:]]
    assert starts == [100000, 105100, 100100]  # the prediction is wrong for both, and true run times are not seen
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["policy"] == "sjf (predicted)"


@pytest.mark.parametrize("policy", ["gittins", "srtf"])
def test_runs_make_room_by_predictions(tmp_path: Path, policy: str) -> None:
    """By what ended before the slice a job of tenant `l` has hours to go when one of `s` comes, which take 30 s."""
    trace = tmp_path / "trace.csv"
    early = "".join(f"s{n},{n},{30 + n},8,s\nl{n},{n},{40_000 + 100 * n},8,l\n" for n in range(60))
    rows = "long,200000,40000,8,l\nshort,201000,30,8,s\n"
    trace.write_text("job_id,submit_s,duration_s,gpus,tenant\n" + early + rows)
    args = ("--trace", trace, "--nodes", "1x8:V", "--from", "200000", "--policy", policy, "--estimates", "predicted")
    run("simulate", *args, "--preempt", "on", "--out", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert told["policy"] == f"{policy} (predicted)"
    assert told["preemptions"] == 1
    assert told["max_wait_s"] == pytest.approx(400 + 60 + 30)


def test_the_compiled_path_needs_all_estimates_where_nodes_are_kept_by_them(tmp_path: Path) -> None:
    """A rule counts an unknown run time as a day, the core's shadow times as endless."""
    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,submit_s,duration_s,gpus,estimate_s\na,0,10,6,20\nb,1,5,8,\n")
    args = ("simulate", "--trace", trace, "--nodes", "1x8", "--estimates", "user", "--out", tmp_path / "out")
    assert "and 1 have none" in run(*args, "--backfill", "easy", "--fast", code=2)
    run(*args, "--fast")
    run(*args, "--backfill", "easy")


def test_estimates_without_noise_are_true(trace: Path, tmp_path: Path) -> None:
    args = ("--trace", trace, "--nodes", "1x8", "--policy", "sjf", "--estimates", "noisy:0")
    run("simulate", *args, "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["policy"] == "sjf (oracle)"


def test_bound_and_moves_reach_the_compiled_path(tmp_path: Path) -> None:
    """As counted in test_sim_fast.py: the job of 8 GPUs starts at once where one of 1 GPU is moved."""
    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,submit_s,duration_s,gpus\na,0,50,7\nb,0,1000,1\nc,0,50,7\nd,0,1000,1\ne,60,100,8\n")
    args = ("--trace", trace, "--nodes", "2x8", "--policy", "las", "--preempt", "on", "--fast", "--checkpoint-s", "25")
    run("simulate", *args, "--restart-s", "2", "--move-after-s", "10", "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["max_wait_s"] == 12
    assert "moved after 10 s" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("policy", ["las", "gittins", "srtf"])
@pytest.mark.parametrize("way", [(), ("--fast",)])
def test_preemptive_policies_by_both_ways(tmp_path: Path, policy: str, way: tuple[str, ...]) -> None:
    """The long job makes room for the short one that comes 1,000 s after it. The core does not stop runs at once."""
    trace = tmp_path / "trace.csv"
    early = "".join(f"e{n},{n},30,8\n" for n in range(60))
    trace.write_text(f"job_id,submit_s,duration_s,gpus\n{early}long,10000,40000,8\nshort,11000,30,8\n")
    args = ("--trace", trace, "--nodes", "1x8:V", "--from", "10000", "--policy", policy, "--estimates", "true")
    run("simulate", *args, "--preempt", "on", *way, "--out", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert told["jobs"] == 2
    assert told["preemptions"] == 1
    # Kept of the first 1,000 s: 600 s; lost 400, restart 60, and 30 s of the short one.
    assert told["max_wait_s"] == pytest.approx(400 + 60 + 30)
    assert told["p50_wait_s"] == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "give --scenario FILE"),
        (("--nodes", "8"), "is not COUNTxGPUS"),
        (("--nodes", "0x8"), "is not COUNTxGPUS"),
        (("--nodes", "1x8", "--policy", "fancy"), "unknown policy 'fancy'"),
        (("--nodes", "1x8", "--policy", "sjf"), "give --estimates"),
        (("--nodes", "1x8", "--estimates", "noisy:much"), "expected noisy:SIGMA"),
        (("--nodes", "1x8", "--estimates", "noisy:1000"), "a number of 0 to 10"),
        (("--nodes", "9" * 5000 + "x8"), "is not COUNTxGPUS"),
        (("--nodes", "1x8", "--from", "nan"), "is not a time"),
        (("--nodes", "1x1", "--from", "1", "--before", "2"), "no job fits these nodes"),
        (("--nodes", "1x1", "--from", "1", "--before", "2", "--fast"), "no job fits these nodes"),
        (("--nodes", "1x8", "--preempt", "on", "--policy", "las", "--checkpoint-s", "inf"), "--checkpoint-s inf"),
        (("--nodes", "1x8", "--preempt", "on", "--policy", "las", "--restart-s", "1e300"), "--restart-s 1e+300"),
        (("--nodes", "1x8", "--estimates", "user"), "no users' estimates"),
        (("--nodes", "1x8", "--backfill", "easy"), "needs run times"),
        (("--nodes", "1x8", "--backfill", "conservative", "--fast"), "needs run times"),
        (("--nodes", "1x8", "--backfill", "easy", "--estimates", "true", "--preempt", "on"), "leave out --preempt"),
        (("--nodes", "1x8", "--fast", "--policy", "las"), "--fast with --preempt off knows fcfs"),
        (("--nodes", "1x8", "--fast", "--preempt", "on"), "--fast with --preempt on knows las, gittins, srtf"),
        (("--nodes", "1x8", "--fast", "--placement", "milp"), "leave it out"),
        (("--nodes", "1x8", "--fast", "--estimates", "predicted"), "--fast cannot: leave it out"),
        (("--nodes", "1x8", "--fast", "--bound-s", "9"), "--bound-s is for --preempt on"),
        (
            ("--nodes", "1x8", "--policy", "las", "--preempt", "on", "--move-after-s", "9"),
            "--move-after-s is for --fast",
        ),
        (("--nodes", "1x8", "--policy", "gittins", "--preempt", "on"), "learns from jobs that began before --from"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(trace: Path, tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    told = run("simulate", "--trace", trace, *args, "--out", tmp_path / "out", code=2)
    assert words in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trace =", "no TOML"),
        ('trace = "x.csv"', "expected `trace`, and `nodes` or `node_list`"),
        ('trace = "trace.csv"\nnode_list = "gone.csv"', "no node_list gone.csv"),
        ('trace = "x.csv"\nnodes = [{ count = 1, gpus = 8 }]', "no trace x.csv"),
        ('trace = "trace.csv"\nnodes = []', "`nodes` is empty"),
        (f'trace = "{"x" * 300}"\nnodes = [{{ count = 1, gpus = 8 }}]', "no trace xxx"),
        ('trace = "trace.csv"\nnodes = [{ count = true, gpus = 8 }]', "have to be numbers"),
        ('trace = "trace.csv"\nnodes = [{ count = 1, gpus = 8 }]\nsubmitted_from = true', "has to be a date"),
        ('trace = "trace.csv"\nnodes = [{ count = 1, gpus = 8 }]\nsubmitted_from = nan', "has to be a date"),
        ('trace = "trace.csv"\nnodes = [{ count = 1, gpus = 8 }]\nsubmited_from = 3', "unknown key `submited_from`"),
        ('trace = "trace.csv"\nnodes = [{ count = 1 }]', "has to be a list of"),
        ('trace = "trace.csv"\nnodes = [{ count = 1, gpus = 8 }]\nsubmitted_from = "soon"', "has to be a date"),
        ('trace = "trace.csv"\n[[clusters]]\nname = "a"', "not supported"),
    ],
)
def test_a_scenario_that_is_wrong_is_told(trace: Path, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_scenario(path)


def test_a_scenario_names_slice_and_nodes(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'trace = "trace.csv"\nsubmitted_from = 1970-01-02\nnodes = [{ count = 2, gpus = 8, gpu_type = "V" }]'
    )
    told = read_scenario(path)
    assert (told.name, told.submitted_from, told.submitted_before) == ("mine", 86_400.0, None)
    assert told.nodes == parse_nodes("2x8:V")


def test_estimates_are_drawn_by_their_seed() -> None:
    from random import Random

    noisy = Estimates.parse("noisy:0.5")
    drawn = [noisy.of(100.0, None, r) for r in [Random(1)] for _ in range(2000)]
    logs = np.log(np.array(drawn) / 100.0)
    assert abs(float(logs.mean())) < 0.05
    assert abs(float(logs.std()) - 0.5) < 0.05
    assert Estimates.parse("true").of(7.0, 9.0, Random(1)) == 7.0
    assert Estimates.parse("user").of(7.0, 9.0, Random(1)) == 9.0
    assert Estimates.parse("none").of(7.0, 9.0, Random(1)) is None


def schedule(wait: list[float], run_s: float = 20.0) -> Schedule:
    n = len(wait)
    submit = np.arange(n, dtype=np.float64)
    start = submit + np.array(wait)
    return Schedule(
        submit_s=submit,
        run_s=np.full(n, run_s),
        gpus=np.ones(n, dtype=np.int64),
        start_s=start,
        finish_s=start + run_s,
        preemptions=np.zeros(n, dtype=np.int64),
        tenants=("t",) * n,
        cluster_gpus=4,
        lines=Lines(np.array([0.0, 1.0, 3.0]), np.array([0, 1, 0]), np.array([4, 2, 0])),
    )


def test_figures_by_hand() -> None:
    told = summary(schedule([0.0, 20.0, 40.0, math.nan]), refused_rows=3, wall_s=0.5)
    assert (told["jobs"], told["never_ran"], told["refused_rows"]) == (3, 1, 3)
    assert (told["mean_wait_s"], told["p50_wait_s"], told["p99_wait_s"], told["max_wait_s"]) == (20.0, 20.0, 40.0, 40.0)
    assert told["mean_jct_s"] == 40.0
    assert told["mean_bounded_slowdown"] == 2.0
    assert told["gpu_utilisation"] == pytest.approx((1 * 4 + 2 * 2) / (4 * 3))


def interval(values: np.ndarray) -> Interval:
    drawn = Bootstrap(len(values))
    return drawn.between(drawn.means(values))


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    hits = sum(low <= 1.0 <= high for low, high in (interval(random.exponential(1.0, 400)) for _ in range(200)))
    assert 170 <= hits <= 200


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_a_folder_that_cannot_be_made_is_told_before_anything_is_run(trace: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("")
    more = ("--policies", "fcfs") if command == "compare" else ()
    for out in (tmp_path / "file", tmp_path / "file" / "x"):
        told = run(command, "--trace", trace, "--nodes", "1x8", *more, "--out", out, code=2)
        assert told.startswith(f"--out {out}: ")


def test_a_run_time_beyond_all_reason_is_told_with_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,submit_s,duration_s,gpus\na,0,1e300,1\n")
    told = run("simulate", "--trace", trace, "--nodes", "1x8", "--out", tmp_path / "out", code=2)
    assert told.startswith(f"{trace}:2: a job of 1e+300 s")


def test_half_a_file_is_left_nowhere(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder: is a directory"):
        write_text(tmp_path / "folder", "x")
    write_text(tmp_path / "good", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "good"]


def _killed(signal_number: int) -> int:
    os.kill(os.getpid(), signal_number)
    return 0


def test_a_process_that_is_killed_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match="a process was killed before it was done"):
        map_apart(_killed, [signal.SIGKILL], 1)


def test_processes_end_with_the_one_that_asked_for_them(tmp_path: Path) -> None:
    """The parent is killed while its child sleeps: the child is gone soon after."""
    code = (
        "import os, pathlib, sys, time\n"
        "from streamsched.commands.apart import map_apart\n"
        "def sleep(path):\n"
        "    pathlib.Path(path).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    map_apart(sleep, [sys.argv[1]], 1)\n"
    )
    (tmp_path / "parent.py").write_text(code)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "pid")])
    child = _eventually(lambda: int((tmp_path / "pid").read_text() or 0) if (tmp_path / "pid").exists() else 0)
    parent.kill()
    parent.wait()
    assert _eventually(lambda: not Path(f"/proc/{child}").exists() or "Z" in _state(child))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _eventually(found: Callable[[], int]) -> int:
    for _ in range(600):
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError("not within a minute")


def test_a_model_is_simulated_as_a_policy_beside_rules(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes the shortest first is SJF; a trace without estimates is one of the true run times here."""
    monkeypatch.setenv("STREAMSCHED_MODELS_DIR", str(tmp_path / "models"))
    made(tmp_path / "models", "short")
    made(tmp_path / "models", "stops", regime="preemptive")
    write_registry(tmp_path / "models", Registry(default="short"))
    given = ("compare", "--trace", trace, "--nodes", "1x8:V", "--backfill", "none", "--out", tmp_path / "out")
    run(*given, "--policies", "sjf,model:short,model", "--estimates", "true")
    told = json.loads((tmp_path / "out/summary.json").read_text())
    assert list(told) == ["sjf (oracle)", "model:short (oracle)", "model (oracle)"]
    waits = {name: figures["mean_wait_s"] for name, figures in told.items()}
    assert len(set(waits.values())) == 1

    for policy, more, said in (
        ("model:short", (), "looks at run times: give --estimates"),
        ("model:nobody", ("--estimates", "true"), "model nobody: .*no such file"),
        ("model:stops", ("--estimates", "true"), "trained with preemption"),
        ("model:short", ("--estimates", "true", "--fast"), "--fast knows rules alone"),
    ):
        assert re.search(said, run(*given, "--policies", policy, *more, code=2))
    write_registry(tmp_path / "models", Registry())
    assert "names no default" in run(*given, "--policies", "model", "--estimates", "true", code=2)
