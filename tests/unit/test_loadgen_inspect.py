"""`loadgen inspect`: figures by hand, one source of table, JSON and page; equal traces give equal pages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import loadgen.cli as cli
from loadgen.describe import Description, arrivals_by_hour, describe, facts
from loadgen.drawing import page
from loadgen.trace import Trace, Window, read_trace
from streamsched.errors import UserError

HEADER = "job_id,submit_s,duration_s,gpus,tenant,gpu_milli\n"
ROWS = """a,0,10,1,t1,
b,0,20,1,t2,500
c,600,3600,8,t1,
d,1800,30,1,t1,
e,9000,7200,2,t1,
f,x,1,1,t1,
g,1,1,0,t1,
h,2,1,0,t1,
"""


def file(folder: Path, rows: str = ROWS) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "trace.csv"
    path.write_text(HEADER + rows)
    return path


def told(folder: Path, rows: str = ROWS, window: Window | None = None) -> tuple[Trace, Description]:
    trace = read_trace(file(folder, rows), window)
    return trace, describe(trace)


def run(*args: object) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in args])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def inspect_json(*args: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("inspect", "--json", *args))
    return found


def test_json_has_every_figure(tmp_path: Path) -> None:
    path = file(tmp_path)
    found = inspect_json(path)
    bursts = found.pop("bursts")
    assert found == {
        "path": str(path),
        "format": "neutral CSV",
        "jobs": 5,
        "outside": 0,
        "first_submit_s": 0.0,
        "last_submit_s": 9000.0,
        "span_s": 9000.0,
        "tenants": 2,
        "sizes": [
            {"gpus": 1, "jobs": 3, "gpu_hours": pytest.approx(50 / 3600)},
            {"gpus": 2, "jobs": 1, "gpu_hours": 4.0},
            {"gpus": 8, "jobs": 1, "gpu_hours": 8.0},
        ],
        "duration_s": {"mean": 2172.0, "median": 30.0, "p99": pytest.approx(7056.0), "max": 7200.0},
        "clamped": 0,
        "gpu_hours": pytest.approx(12 + 50 / 3600),
        "gap_s": {"mean": 2250.0, "median": 900.0, "p99": pytest.approx(7020.0), "max": 7200.0},
        "refused": [
            {"kind": "bad-time", "count": 1, "lines": [7]},
            {"kind": "cpu-job", "count": 2, "lines": [8, 9]},
        ],
        "notes": [],
        "unit": "line",
    }
    # Gaps 0, 600, 1200, 7200; arrivals per hour 4, 0, 1 around 5/3.
    assert bursts == {
        "gap_variation": pytest.approx(((2250**2 + 1650**2 + 1050**2 + 4950**2) / 4) ** 0.5 / 2250),
        "hourly_peak_to_mean": pytest.approx(4 / (5 / 3)),
        "hourly_dispersion": pytest.approx(((4 - 5 / 3) ** 2 + (5 / 3) ** 2 + (1 - 5 / 3) ** 2) / 3 / (5 / 3)),
    }


def test_json_is_of_the_window_and_clean_on_standard_output(tmp_path: Path) -> None:
    found = inspect_json(file(tmp_path), "--limit", "1")
    assert (found["jobs"], found["outside"], found["gap_s"], found["bursts"]) == (1, 4, None, None)


def test_table_shows_the_figures_of_the_json(tmp_path: Path) -> None:
    _, description = told(tmp_path)
    shown = dict(facts(description))
    assert shown["arrivals per hour"] == "peak 2.4 times the mean; index of dispersion 1.7 (1: Poisson)"
    assert shown["  coefficient of variation"].startswith("1.28 ")
    assert shown["GPUs per job"] == "1: 60.00%, 2: 20.00%, 8: 20.00%"
    assert shown["work"] == "12 GPU-hours"
    table = " ".join(run("inspect", description.path).split())
    assert "index of dispersion" in table
    assert "3 rows refused" in table


def test_sizes_beyond_those_shown_are_counted(tmp_path: Path) -> None:
    rows = "".join(f"{gpus},{gpus},3600,{gpus},t,\n" for gpus in range(1, 16)) + "x,99,1,15,t,\n"
    trace, description = told(tmp_path, rows)
    shown = dict(facts(description))["GPUs per job"]
    assert shown.endswith("15: 12.50%, and 3 other sizes up to 15")
    other = re.findall(r">other</text>.*?<text[^>]*>([\d.,]+)</text>", page(trace, description))
    assert other == ["3", "39.00"]  # 12, 13 and 14 GPUs


def test_hours_begin_with_the_first_submission(tmp_path: Path) -> None:
    trace, _ = told(tmp_path, "a,3000,1,1,t,\nb,6000,1,1,t,\nc,6600,1,1,t,\n")
    assert arrivals_by_hour(trace.jobs) == {0: 2, 1: 1}


def test_hours_without_arrivals_count_and_cost_nothing(tmp_path: Path) -> None:
    """One wrong year must not become an array of all hours since."""
    rows = "a,0,1,1,t,\nb,1,1,1,t,\nc,9e10,1,1,t,\n"
    trace, description = told(tmp_path, rows)
    assert arrivals_by_hour(trace.jobs) == {0: 2, 25 * 10**6: 1}
    assert description.bursts is not None
    assert description.bursts.hourly_peak_to_mean == pytest.approx(2 * (25 * 10**6 + 1) / 3)
    assert "of 41666.7 hours the highest" in page(trace, description)


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.captions: list[str] = []
        self.outside: list[str] = []
        self.tags: set[str] = set()
        self._in_caption = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]
        self._in_caption = self._in_caption or tag == "figcaption"
        if tag == "figcaption":
            self.captions.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_caption = self._in_caption and tag != "figcaption"

    def handle_data(self, data: str) -> None:
        if self._in_caption:
            self.captions[-1] += data


def test_page_has_every_plot_and_needs_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "p.html"
    run("inspect", file(tmp_path), "--plot", out)
    found = _Checker()
    found.feed(out.read_text())
    assert found.captions == [
        "Arrivals (jobs per hour by days)",
        "Duration (share of jobs by seconds (log))",
        "Jobs by GPUs (jobs)",
        "Work by GPUs of the job (GPU-hours)",
        "Gaps between submissions (share of gaps by seconds (log))",
        "Refused rows (rows by kind)",
    ]
    assert found.outside == []
    assert found.tags.isdisjoint({"script", "link", "img"})
    text = out.read_text()
    assert "index of dispersion 1.7" in text
    assert "<td>cpu-job</td><td>2</td><td>8, 9</td>" in text


def test_arrivals_are_drawn_by_hour(tmp_path: Path) -> None:
    text = page(*told(tmp_path))
    points = re.findall(r'points="([^"]*)"', text)[0].split()
    levels = [float(point.split(",")[1]) for point in points[::2]]
    top, bottom = 12.0, 226.0
    assert levels == [top, bottom, *2 * [pytest.approx(bottom - (bottom - top) / 4, abs=0.06)]]


def test_equal_traces_give_equal_pages_wherever_they_are(tmp_path: Path) -> None:
    first, second = page(*told(tmp_path / "a")), page(*told(tmp_path / "b"))
    assert first == second
    assert first != page(*told(tmp_path / "c", ROWS.replace("7200", "7201")))


@pytest.mark.parametrize("rows", ["a,0,10,1,t1,\n", "a,0,0,1,t,\nb,0,0,1,t,\n"], ids=["one job", "no time at all"])
def test_the_smallest_traces_have_a_page(tmp_path: Path, rows: str) -> None:
    text = page(*told(tmp_path, rows))
    assert re.search(r"\b(nan|inf)\b", text) is None
    assert "Arrivals" in text
    assert "Refused rows" not in text


def test_names_from_the_file_are_text_in_the_page(tmp_path: Path) -> None:
    path = tmp_path / "<b>.csv"
    path.write_text(HEADER + ROWS)
    trace = read_trace(path)
    text = page(trace, describe(trace))
    assert "<b>" not in text
    assert "&lt;b&gt;.csv" in text


def test_a_plot_that_cannot_be_written_is_told_before_the_trace_is_read(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["inspect", "absent.csv", "--plot", str(tmp_path / "no" / "p.html")])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == f"plot {tmp_path}/no/p.html: there is no folder {tmp_path}/no"
    result = CliRunner().invoke(cli.app, ["inspect", "absent.csv", "--plot", 300 * "x" + "/p.html"])
    assert isinstance(result.exception, UserError)  # asking for such a folder is an error of its own
    result = CliRunner().invoke(cli.app, ["inspect", str(file(tmp_path)), "--plot", str(tmp_path)])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == f"plot {tmp_path}: is a directory"
