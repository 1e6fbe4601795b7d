"""Traces read by column: which files are, which are left to the reader of lines, and that both see the same."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen import columns
from loadgen.formats import Head, helios_csv, neutral_csv, philly_csv
from loadgen.formats.base import HeaderCsv
from loadgen.jobs import Refusals, TraceJob
from loadgen.trace import read_trace

HEADER = "timestamp,duration,num_gpus,gpu_time,cluster\n"
ROWS = (
    "2017-10-09 07:01:55,66.0,1,66.0,11cb48\n"
    "soon,66.0,1,66.0,a\n"
    "2017-10-09 06:13:03, 2951.5,8.0,,two words\n"
    "2017-10-09 06:13:03,0,0,,a\n"
    "2017-10-09 07:01:55.5,1,3,,\n"
    "2017-10-09 07:01:55,1e3,3,,\n"
)
TEXT = (HEADER + ROWS).encode()


def by_column(folder: Path, content: bytes, format: HeaderCsv = philly_csv.FORMAT, header: str = HEADER) -> object:
    """(jobs, refusals), or None where the file is left to the other reader."""
    path = folder / "trace"
    path.write_bytes(content)
    refusals = Refusals()
    jobs = columns.read(path, Head(str(path), header.strip(), 1), format, refusals)
    return None if jobs is None else (jobs, refusals)


def by_line(content: bytes, format: HeaderCsv = philly_csv.FORMAT) -> tuple[list[TraceJob], Refusals]:
    refusals = Refusals()
    head, *lines = enumerate(content.decode().splitlines(), start=1)
    return list(format.read(Head("trace", head[1], 1), lines, refusals)), refusals


def test_odd_cells_go_to_the_format_with_their_lines(tmp_path: Path) -> None:
    jobs, refusals = by_line(TEXT)
    assert by_column(tmp_path, TEXT) == (jobs, refusals)
    assert [(job.line, job.gpus, job.tenant) for job in jobs] == [
        (2, 1, "11cb48"),
        (4, 8, "two-words"),
        (6, 3, "default"),
        (7, 3, "default"),
    ]
    assert refusals.lines == {"bad-time": [3], "cpu-job": [5]}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (
            helios_csv.DERIVED,
            "job_id,gpu_num,duration_clamped,duration,submit_time\n1,8,1,172800,2020-03-18 04:01:39\n"
            "2,1,0,5,2020-03-18 04:01:39\n3,1,yes,5,2020-03-18 04:01:39\n",
        ),
        (neutral_csv.FORMAT, "job_id,submit_s,duration_s,gpus\na,0.125,1,1\nb,-5,1,1\nc,1e9,1,1\n"),
        (
            neutral_csv.FORMAT,
            ",".join(neutral_csv.COLUMNS) + "\na,0.125,10.5,1,vc-1,0,60.000,460,T4|V100,3.000,2,x\n"
            "b,7.000,0,16,vc-1,1,,,,,1,\nc,7.000,1,3,,0,0,,V100,0.000,,nmt/f00d\nd,7,1,3,,0,-1,,,-1,0,\n",
        ),
    ],
)
def test_each_format_is_read_as_by_line(tmp_path: Path, format: HeaderCsv, text: str) -> None:
    seen = by_column(tmp_path, text.encode(), format, text.split("\n")[0])
    assert repr(seen) == repr(by_line(text.encode(), format))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"), id="BOM and CRLF"),
        pytest.param(lambda data: data + b"\n\n", id="blank lines at the end"),
        pytest.param(lambda data: data.rstrip(b"\n"), id="no end of the last line"),
        pytest.param(gzip.compress, id="gzip"),
    ],
)
def test_such_files_are_read_by_column(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    assert by_column(tmp_path, change(TEXT)) == by_line(TEXT)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(TEXT.replace(b"two words", b'"two words"'), id="quote"),
        pytest.param(TEXT.replace(b"two words", b"two\0words"), id="NUL"),
        pytest.param(TEXT.replace(b"two words", b"two\rwords"), id="lone CR"),
        pytest.param(TEXT.replace(b"two words", b"two,words"), id="comma too many"),
        pytest.param(TEXT.replace(b",two words", b""), id="comma too few"),
        pytest.param(TEXT.replace(b"two words", b"\xff"), id="not UTF-8"),
        pytest.param(TEXT.replace(b"two words", b"x" * (1 << 20)), id="endless line"),
        pytest.param(TEXT.replace(b"\nsoon", b"\n\nsoon"), id="blank line inside"),
        pytest.param(b"\n" + TEXT, id="blank line first"),
        pytest.param(HEADER.encode(), id="no row"),
        pytest.param(gzip.compress(TEXT)[:-9], id="cut gzip"),
    ],
)
def test_such_files_are_left_to_the_reader_of_lines(tmp_path: Path, content: bytes) -> None:
    assert by_column(tmp_path, content) is None


def test_a_column_that_is_there_twice_is_left_to_the_reader_of_lines(tmp_path: Path) -> None:
    header = HEADER.replace("gpu_time", "duration")
    assert by_column(tmp_path, (header + ROWS).encode(), header=header) is None


def test_read_trace_reads_large_files_by_column_and_all_without_polars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(TEXT)
    monkeypatch.setattr(columns, "WORTH_BYTES", len(TEXT) + 1)
    monkeypatch.setattr(columns, "_clean", lambda *_: pytest.fail("a small file was read by column"))
    small = read_trace(path)
    seen = []
    monkeypatch.undo()
    monkeypatch.setattr(columns, "WORTH_BYTES", len(TEXT))
    jobs_of = columns._jobs
    monkeypatch.setattr(columns, "_jobs", lambda table: seen.append(table.height) or jobs_of(table))
    assert read_trace(path) == small
    assert seen == [1]
    monkeypatch.setitem(sys.modules, "polars", None)
    assert read_trace(path) == small
    assert seen == [1]


@pytest.mark.traces
@pytest.mark.parametrize(
    "name", ["philly/philly_jobs_until_2017-11-15.csv", "helios-venus/venus_gpu_jobs_until_2020-07-31.csv"]
)
def test_the_real_files_are_read_alike(traces_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    jobs_of = columns._jobs
    monkeypatch.setattr(columns, "_jobs", lambda table: seen.append(table.height) or jobs_of(table))
    by_column = read_trace(traces_dir / name)
    assert seen == [by_column.usable]
    monkeypatch.setattr(columns, "WORTH_BYTES", 1 << 60)
    assert read_trace(traces_dir / name) == by_column
