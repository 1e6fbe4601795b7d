"""The report, tenants' shares, intervals by key, and the file of jobs in both formats."""

from __future__ import annotations

import base64
import errno
import json
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars
import pytest
from typer.testing import CliRunner

from streamsched import cli
from streamsched.errors import UserError
from streamsched.sim import jobs_file
from streamsched.sim.metrics import Lines, Schedule, by_tenant, intervals, jain, summary
from streamsched.sim.png import png
from streamsched.sim.report import page
from streamsched.sim.svg import bars, table
from streamsched.sim.timeline import Runs

TRACE = """job_id,submit_s,duration_s,gpus,tenant
a,0,10,6,t1
b,1,5,8,t2
c,2,20,2,t1
d,3,4,2,t3
e,4,9,99,t4
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


def run(*args: object) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in args])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def schedule(wait: list[float], tenants: Sequence[str], run_s: float = 20.0, runs: Runs | None = None) -> Schedule:
    """Jobs of one GPU, submitted each second."""
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
        tenants=tuple(tenants),
        cluster_gpus=4,
        lines=Lines(submit, np.zeros(n, dtype=np.int64), np.full(n, 2)),
        runs=runs,
    )


# ── tenants ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_jains_index() -> None:
    assert jain(np.array([3.0, 3.0, 3.0])) == 1.0
    assert jain(np.array([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert jain(np.array([1.0, 2.0, 3.0])) == pytest.approx(36 / (3 * 14))
    assert jain(np.array([])) == 0.0


def test_tenants_by_gpu_seconds_with_means_of_their_jobs_that_ran() -> None:
    told = by_tenant(schedule([0.0, 20.0, 60.0, np.nan, np.nan], "abbbc"))
    assert told.names == ("b", "a")
    assert told.jobs.tolist() == [2, 1]
    assert told.gpu_s.tolist() == [40.0, 20.0]
    assert told.mean_wait_s.tolist() == [40.0, 0.0]
    assert told.mean_slowdown.tolist() == [3.0, 1.0]


def test_fairness_is_of_the_tenants_mean_slowdowns() -> None:
    told = summary(schedule([0.0, 20.0, 60.0, np.nan], "abbc"), 0, 0.0)
    assert told["fairness_jain"] == pytest.approx((3 + 1) ** 2 / (2 * (9 + 1)))


# ── intervals ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_figure_but_maxima_and_indices_has_an_interval_around_it() -> None:
    runs = Runs(np.array([0]), np.array([2]), np.array([100.0]), np.array([300.0]), np.array([4]))
    one = schedule(np.random.default_rng(1).exponential(50.0, 400).tolist(), "ab" * 200, runs=runs)
    told, between = summary(one, 0, 0.0), intervals(one)
    assert set(between) == {
        "mean_wait_s", "p50_wait_s", "p99_wait_s", "mean_jct_s", "mean_bounded_slowdown", "gpu_utilisation",
        "mean_fragmentation", "mean_expected_fragmentation",
    }  # fmt: skip
    for key, (low, high) in between.items():
        assert low <= told[key] <= high, key
    low, high = between["mean_fragmentation"]  # half of the 400 s, wholly
    assert low < told["mean_fragmentation"] - 0.05
    assert high > told["mean_fragmentation"] + 0.05


def test_what_never_varies_has_intervals_without_width() -> None:
    between = intervals(schedule([30.0] * 50, "a" * 50))
    assert between["mean_wait_s"] == between["p99_wait_s"] == (30.0, 30.0)
    assert between["mean_bounded_slowdown"] == (2.5, 2.5)
    assert between["gpu_utilisation"] == (0.5, 0.5)


def test_one_job_has_no_intervals() -> None:
    assert intervals(schedule([1.0], "a")) == {}


# ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode(data: bytes) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Pixels and palette of a PNG of 8-bit palette colours without filters; checks sums and lengths."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    columns, rows, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 3, 0, 0, 0]
    raw = zlib.decompress(chunks[b"IDAT"])
    lines = [raw[row * (columns + 1) : (row + 1) * (columns + 1)] for row in range(rows)]
    assert len(raw) == rows * (columns + 1)
    assert all(line[0] == 0 for line in lines)
    colours = chunks[b"PLTE"]
    return [list(line[1:]) for line in lines], [tuple(colours[i : i + 3]) for i in range(0, len(colours), 3)]


def test_a_picture_is_what_was_drawn() -> None:
    colours = [(255, 255, 255), (1, 2, 3), (8, 48, 107)]
    assert decode(png(np.array([[0, 1, 2], [2, 2, 0]], dtype=np.uint8), colours)) == ([[0, 1, 2], [2, 2, 0]], colours)


def test_the_report_and_the_summary_have_all_figures(trace: Path, tmp_path: Path) -> None:
    args = ("--trace", trace, "--nodes", "2x8", "--policies", "fcfs,smallest", "--processes", 1)
    text = run("compare", *args, "--out", tmp_path / "out")
    found = (tmp_path / "out" / "report.html").read_text()
    for title in ("Queue length", "Fragmentation", "Expected fragmentation", "GPUs in use by node: smallest", "Jain"):
        assert title in found
    # Nothing is fetched from elsewhere.
    assert re.findall(r"(?:src|href)=\"?(?!\"?data:)", found) == []
    told = json.loads((tmp_path / "out" / "summary.json").read_text())
    for figures in told.values():
        for key in ("mean_wait_s", "p50_wait_s", "p99_wait_s", "mean_jct_s", "gpu_utilisation", "mean_fragmentation"):
            low, high = figures[f"{key}_95"]
            assert low <= high
        assert "max_wait_s_95" not in figures
        assert 1 / 3 <= figures["fairness_jain"] <= 1.0
    assert " - ".join(f"{end:,.0f}" for end in told["fcfs"]["mean_jct_s_95"]) in text


def test_the_heat_map_is_of_the_nodes() -> None:
    runs = Runs(np.array([0]), np.array([4]), np.array([0.0]), np.array([21.0]), np.array([4, 4]))
    found = page("title", [], [], {"fcfs": schedule([0.0, 0.0], "ab", runs=runs)})
    [picture] = re.findall(r"data:image/png;base64,([^\"]+)\"", found)
    pixels, _ = decode(base64.b64decode(picture))
    assert len(pixels) == 2
    assert set(pixels[0]) == {255}
    assert set(pixels[1]) == {0}


def test_no_heat_map_where_runs_are_not_known() -> None:
    found = page("title", [], [], {"las": schedule([0.0, 5.0], "ab")})
    assert "by node" not in found
    assert "data:image" not in found
    assert "Fragmentation" not in found


def test_what_others_named_is_escaped() -> None:
    found = page("<b>", [("<b>", "<b>")], [{"<b>": "<b>"}], {"<b>": schedule([0.0, 5.0], ["<b>", "t"])})
    assert "<b>" not in found
    assert found.count("&lt;b&gt;") >= 8


def test_what_follows_a_line_break_is_in_small() -> None:
    assert "<td>1<br><small>0 &lt; 2</small></td>" in table([{"a": "1\n0 < 2"}])


def test_bars_of_nothing_are_nothing_and_long_names_have_room() -> None:
    assert bars("Rows", []) == ""
    found = bars("Rows", [("started-before-submission", 1234.0, None), ("b", 5.0, None)], "rows by kind", decimals=0)
    assert "<small>(rows by kind)</small>" in found
    assert re.findall(r">([\d,.]+)</text>", found) == ["1,234", "5"]
    edges = [int(x) for x in re.findall(r"<rect x=(\d+)", found)]
    assert min(edges) >= 6 * len("started-before-submission")


def test_bars_begin_at_zero_and_share_a_scale() -> None:
    found = bars("Wait", [("a", 10.0, (5.0, 20.0)), ("b", 20.0, None), ("c", 0.0, None)])
    widths = [float(x) for x in re.findall(r"<rect [^>]*width=([\d.]+)", found)]
    assert widths == [pytest.approx(widths[1] / 2), widths[1], 0.0]
    assert widths[1] > 100
    assert found.count("<line") == 1


# ── the file of jobs ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_parquet_holds_what_csv_holds(trace: Path, tmp_path: Path) -> None:
    args = ("simulate", "--trace", trace, "--nodes", "1x8", "--backfill", "none")
    run(*args, "--out", tmp_path / "csv")
    run(*args, "--out", tmp_path / "one", "--jobs-format", "parquet")
    run(*args, "--out", tmp_path / "two", "--jobs-format", "parquet")
    frame = polars.read_parquet(tmp_path / "one" / "jobs.parquet")
    assert frame.equals(polars.read_csv(tmp_path / "csv" / "jobs.csv", schema=frame.schema))
    assert frame.schema == {
        "job": polars.Int64, "submit_s": polars.Float64, "run_s": polars.Float64, "gpus": polars.Int64,
        "tenant": polars.String, "start_s": polars.Float64, "finish_s": polars.Float64, "preemptions": polars.Int64,
    }  # fmt: skip
    assert frame["start_s"].to_list() == [0.0, 10.0, 15.0, 15.0, None]
    assert (tmp_path / "one" / "jobs.parquet").read_bytes() == (tmp_path / "two" / "jobs.parquet").read_bytes()
    assert not (tmp_path / "one" / "jobs.csv").exists()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_file_of_jobs_is_whole_or_the_one_before(
    kind: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in the middle of writing."""
    out, path_write = tmp_path / "out", Path.write_bytes
    args = ("simulate", "--trace", trace, "--nodes", "1x8", "--jobs-format", kind, "--out", out)
    run(*args)
    before = (out / f"jobs.{kind}").read_bytes()

    def full(path: Path, data: bytes) -> int:
        path_write(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    told = CliRunner().invoke(cli.app, [str(word) for word in (*args, "--policy", "smallest")])
    assert str(told.exception) == f"{out}/jobs.{kind}: no space left on device"
    assert (out / f"jobs.{kind}").read_bytes() == before
    assert sorted(path.name for path in out.iterdir()) == [f"jobs.{kind}", "report.html", "summary.json"]


def test_without_polars_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(jobs_file.importlib, "import_module", absent)
    with pytest.raises(UserError, match=r"streamsched\[trace\]"):
        jobs_file.jobs_encoder("parquet")
    assert jobs_file.jobs_encoder("csv") is jobs_file.as_csv
