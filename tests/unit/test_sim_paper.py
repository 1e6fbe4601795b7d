"""`report-paper rltune`: batches on empty clusters counted by hand, what backfilling alone gains, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from loadgen.trace import Window, read_trace
from streamsched import cli
from streamsched.errors import UserError
from streamsched.sim import fast, paper
from streamsched.sim.scenario import read_scenario

# Two batches of three jobs on one node of 8. In each a job of 6 GPUs runs for 10 s, one of 8 is behind it, and one of 2
# GPUs comes last: for 9 s (it would delay the second under no reservation) and for 5 s (it would not).
TRACE = """job_id,submit_s,duration_s,gpus,tenant
a,0,10,6,t
b,1,5,8,t
c,2,9,2,t
d,100,10,6,t
e,101,5,8,t
f,102,5,2,t
g,103,5,2,t
h,104,5,99,t
"""


@pytest.fixture(scope="module", autouse=True)
def _mounted() -> None:
    if not any(command.name == "report-paper" for command in cli.app.registered_commands):
        cli._mount()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def run(trace: Path, out: Path, *args: object, code: int = 0) -> str:
    words = ["report-paper", "rltune", "--trace", trace, "--nodes", "1x8", "--batch-jobs", 3, "--out", out, *args]
    result = CliRunner().invoke(cli.app, [str(a) for a in words])
    if code == 0:
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    assert result.exception.exit_code == code
    assert "\n" not in str(result.exception)
    return str(result.exception)


def cases(out: Path) -> dict[tuple[str, str], dict[str, dict[str, float]]]:
    return {(c["rule"], c["backfill"]): c for c in json.loads((out / "summary.json").read_text())["cases"]}


def test_batches_counted_by_hand(trace: Path, tmp_path: Path) -> None:
    run(trace, tmp_path / "out")
    told = cases(tmp_path / "out")
    # Without backfilling: 0, 10, 15 in each; waits 0, 9, 13.
    strict = told["fcfs", "none"]["over_batches"]
    assert strict["mean_wait_s"] == pytest.approx(22 / 3)
    assert strict["mean_wait_s_95"] == pytest.approx([22 / 3, 22 / 3])
    assert strict["mean_jct_s"] == pytest.approx((22 + 24) / 3 / 2 + (22 + 20) / 3 / 2)
    # Skipping: the last starts at once. The first batch: 0, 11, 2, waits 0, 10, 0; the second: 0, 10, 2: 0, 9, 0.
    skip = told["fcfs", "skip"]["over_batches"]
    assert skip["mean_wait_s"] == pytest.approx((10 + 9) / 3 / 2)
    assert skip["mean_wait_s_change"] == pytest.approx((19 / 6) / (22 / 3) - 1)
    assert skip["mean_wait_s_backfill_share"] == pytest.approx(1.0)
    assert skip["mean_wait_s_rule_share"] == pytest.approx(0.0)
    # EASY does not let the first batch's last job past (9 s from 2 is after 10), but the second's.
    assert told["fcfs", "easy"]["over_batches"]["mean_wait_s"] == pytest.approx((22 / 3 + 9 / 3) / 2)
    # GPU-seconds of work 60 + 40 + 18 until 24, and 60 + 40 + 10 until 15 + 5 under no backfilling.
    assert strict["utilisation_to_end"] == pytest.approx((118 / (8 * 24) + 110 / (8 * 20)) / 2)


def test_the_continuous_stream_has_all_jobs_that_fit(trace: Path, tmp_path: Path) -> None:
    text = run(trace, tmp_path / "out")
    document = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (document["jobs"], document["never_fit"], document["batches"]) == (7, 1, 2)
    assert document["batches_without_wait"] == 0
    stream = cases(tmp_path / "out")["fcfs", "none"]["continuous"]
    # The job left out of the batches starts with the one before it, after 15 s: it waits for 12.
    assert stream["mean_wait_s"] == pytest.approx((22 + 22 + 12) / 7)
    assert "mean_wait_s_95" not in stream
    assert "1 jobs that these nodes cannot hold are left out" in text


def test_every_known_rule_with_every_backfilling_and_oracles_named(trace: Path, tmp_path: Path) -> None:
    text = run(trace, tmp_path / "out")
    told = cases(tmp_path / "out")
    assert set(told) == {(rule, how) for rule in paper.known_rules() for how in ("none", "skip", "easy")}
    assert {"fcfs", "sjf", "wfp3", "unicep", "f1"} <= set(paper.known_rules())
    assert ("multifactor" in paper.known_rules()) == ("MULTIFACTOR" in fast.Rule.__members__)
    seen = {key: case["oracle"] for key, case in told.items()}
    assert (seen["fcfs", "none"], seen["fcfs", "skip"], seen["fcfs", "easy"]) == (False, False, True)
    assert seen["sjf", "none"]
    assert "sjf (oracle)" in text
    assert "easy (oracle)" in text
    page = (tmp_path / "out" / "report.html").read_text()
    for words in ("Each batch starts on an empty cluster", "in one stream", "Mean bounded slowdown", "<svg"):
        assert words in page


def test_equal_seeds_give_equal_files(trace: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.csv"
    header = TRACE.splitlines()[0]
    numbers = np.random.default_rng(1).integers(1, 9, size=(60, 2)).tolist()
    more.write_text("\n".join([header, *(f"{n},{n},{10 * r},{g},t" for n, (r, g) in enumerate(numbers))]) + "\n")
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        run(more, tmp_path / name, "--batches", 4, "--seed", seed)
    for file in ("summary.json", "report.html"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert cases(tmp_path / "one") != cases(tmp_path / "three")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--batch-jobs", 4), "two batches of 4 jobs at least"),
        (("--batches", 3), "there are 2 disjoint batches of 3 jobs"),
        (("--nodes", "1x1"), "no job fits these nodes"),
        (("--nodes", "many"), "is not COUNTxGPUS"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(trace: Path, tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    assert words in run(trace, tmp_path / "out", *args, code=2)
    assert not (tmp_path / "out").exists()


def test_batches_are_disjoint_and_drawn_by_the_seed() -> None:
    assert paper.choose(10, 3, None, 1).tolist() == [0, 3, 6]
    drawn = paper.choose(10_000, 100, 20, 1).tolist()
    assert len(set(drawn)) == 20
    assert drawn == sorted(drawn)
    assert all(start % 100 == 0 and start <= 9_900 for start in drawn)
    assert drawn == paper.choose(10_000, 100, 20, 1).tolist() != paper.choose(10_000, 100, 20, 2).tolist()


def case(rule: str, backfill: str, waits: list[float]) -> paper.Case:
    columns = np.zeros((len(waits), len(paper.METRICS)))
    columns[:, 0] = waits
    return paper.Case(rule, backfill, columns, columns.mean(axis=0))


def test_shares_and_changes_are_to_fcfs_without_backfilling() -> None:
    listed = [
        case("fcfs", "none", [100.0, 300.0]),
        case("fcfs", "skip", [50.0, 150.0]),
        case("sjf", "none", [80.0, 240.0]),
        case("sjf", "skip", [25.0, 75.0]),
    ]
    found = [figures[0] for figures in paper.over_batches(listed, seed=1)]
    assert [figure.mean for figure in found] == [200.0, 100.0, 160.0, 50.0]
    assert [figure.change for figure in found] == pytest.approx([0.0, -0.5, -0.2, -0.75])
    # All batches change by the same share, so that drawn pairs do too, however much the batches differ.
    assert found[3].change_interval == pytest.approx((-0.75, -0.75))
    assert found[3].interval == (25.0, 75.0)
    assert (found[3].backfill_share, found[3].rule_share) == pytest.approx((100 / 150, 40 / 150))
    assert found[0].backfill_share is None
    # Where nobody waits there is nothing to gain, and no share of it.
    idle = paper.over_batches([case("fcfs", "none", [0.0, 0.0])], seed=1)[0][0]
    assert (idle.mean, idle.change, idle.change_interval, idle.backfill_share) == (0.0, None, None, None)


@pytest.mark.traces
def test_one_stream_of_a_scenario_meets_the_reference_figures(traces_dir: Path) -> None:
    told = read_scenario(traces_dir.parent / "scenarios" / "philly-4w.toml")
    jobs = fast.Workload.of(read_trace(told.trace, Window(told.submitted_from, told.submitted_before)).jobs)
    starts = paper.choose(len(jobs), paper.BATCH_JOBS, 2, 1)
    found = paper.run(jobs, [8] * 80, starts, paper.BATCH_JOBS, ("fcfs", "sjf", "unicep"))
    figures = {(case.rule, case.backfill): case.continuous[:2].tolist() for case in found}
    assert figures["fcfs", "none"] == pytest.approx([10_051, 20_491], abs=1)
    assert figures["fcfs", "skip"] == pytest.approx([2_279, 12_719], abs=1)
    assert figures["sjf", "skip"] == pytest.approx([1_406, 11_845], abs=1)
    assert figures["unicep", "skip"] == pytest.approx([1_437, 11_877], abs=1)
    # 256 jobs do not fill 640 GPUs.
    assert all(not case.batches[:, 0].any() for case in found)
