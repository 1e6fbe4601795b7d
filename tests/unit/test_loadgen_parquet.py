"""The neutral columns as Parquet: the jobs and refusals that CSV has, and one clear line where it cannot be used."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import polars
import pytest
from typer.testing import CliRunner

from loadgen import cli
from loadgen.jobs import TraceJob
from loadgen.trace import Trace, read_trace
from streamsched.errors import UserError

CSV = (
    "job_id,submit_s,duration_s,gpus,tenant,duration_clamped,estimate_s,gpu_milli,gpu_types,queued_s,attempts,group\n"
    'a,0.125,10.5,1,vc-1,0,60.000,460,T4|V100,3.000,2,"say ""hi"", x"\n'
    "b,7.000,0,16,vc-1,1,,,,,1,\n"
    "c,7.000,5184000.001,3,,0,,2500,,0.000,1,gruppe-ä\n"
)


def table(folder: Path, **columns: list[Any]) -> Path:
    """A job `[0, 1, 1]` and what `columns` say otherwise."""
    path = folder / "trace"
    rows = max(map(len, columns.values()), default=1)
    told = {"job_id": ["j"] * rows, "submit_s": [0.0] * rows, "duration_s": [1.0] * rows, "gpus": [1] * rows} | columns
    polars.DataFrame({name: cells for name, cells in told.items() if cells}).write_parquet(path)
    return path


def facts(trace: Trace) -> list[dict[str, Any]]:
    """All of the jobs but their lines."""
    names = [name for name in TraceJob.__struct_fields__ if name != "line"]
    return [{name: getattr(job, name) for name in names} for job in trace.jobs]


def convert(source: Path, out: Path) -> None:
    result = CliRunner().invoke(cli.app, ["convert", str(source), "--out", str(out)])
    assert result.exit_code == 0, result.exception


def test_neutral_csv_to_parquet_and_back_is_the_same(tmp_path: Path) -> None:
    source, packed, back = tmp_path / "a.csv", tmp_path / "b.parquet", tmp_path / "c.csv"
    source.write_text(CSV, encoding="utf-8")
    convert(source, packed)
    assert packed.read_bytes().startswith(b"PAR1")
    convert(packed, back)
    before, between, after = map(read_trace, (source, packed, back))
    assert (before.format, between.format) == ("neutral CSV", "neutral Parquet")
    assert facts(before) == facts(between) == facts(after)
    assert before.jobs[0].group == 'say "hi", x'
    assert [job.line for job in between.jobs] == [1, 2, 3]
    twice = tmp_path / "d.parquet"
    convert(packed, twice)
    assert twice.read_bytes() == packed.read_bytes()


@pytest.mark.parametrize(("end", "magic"), [(".gz", b"\x1f\x8b"), (".zst", b"\x28\xb5\x2f\xfd")])
def test_convert_compresses_by_the_name(tmp_path: Path, end: str, magic: bytes) -> None:
    source, packed, again = tmp_path / "a.csv", tmp_path / f"b.csv{end}", tmp_path / f"c.csv{end}"
    source.write_text(CSV, encoding="utf-8")
    for out in (packed, again):
        convert(source, out)
    assert packed.read_bytes().startswith(magic)
    assert packed.read_bytes() == again.read_bytes()
    assert facts(read_trace(packed)) == facts(read_trace(source))


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"submit_s": [0.0, None]}, "no-time"),
        ({"submit_s": [0.0, float("nan")]}, "bad-time"),
        ({"submit_s": [0, 1_700_000_000_000]}, "bad-time"),
        ({"duration_s": [1.0, None]}, "no-duration"),
        ({"duration_s": [1.0, float("inf")]}, "bad-duration"),
        ({"duration_s": [1, -1]}, "negative-duration"),
        ({"gpus": [1, None]}, "no-gpus"),
        ({"gpus": [1.0, 1.5]}, "fractional-gpus"),
        ({"gpus": [1, -1]}, "bad-gpus"),
        ({"gpus": [1, 0]}, "cpu-job"),
        ({"gpu_milli": [1000, 1001]}, "bad-gpu-milli"),
        ({"gpu_milli": [None, float("nan")]}, "bad-gpu-milli"),
    ],
)
def test_odd_rows_are_counted_by_kind_and_row(tmp_path: Path, columns: dict[str, list[Any]], kind: str) -> None:
    trace = read_trace(table(tmp_path, **columns))
    assert (len(trace.jobs), trace.refusals.lines) == (1, {kind: [2]})
    assert trace.refusals.describe() == f"1 {kind} (row 2)"


def test_columns_of_other_types_further_columns_and_nulls_are_taken(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        job_id=[1, 2],
        gpus=[8.0, 1.0],
        duration_clamped=[True, None],
        tenant=[17, None],
        estimate_s=[None, None],
        group=["two\nlines", "plain"],
        note=[["a", "list"], []],
    )
    clamped, plain = read_trace(path).jobs
    assert (clamped.gpus, clamped.clamped, clamped.tenant, clamped.group) == (8, True, "17", "two lines")
    assert (plain.gpus, plain.clamped, plain.tenant, plain.estimate_s) == (1, False, "default", None)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"submit_s": ["0"]}, r"trace: column 'submit_s' is String; expected numbers"),
        ({"duration_s": [[1.0]]}, r"trace: column 'duration_s' is List\(Float64\); expected numbers"),
        ({"gpus": [True]}, r"trace: column 'gpus' is Boolean; expected numbers"),
        ({"tenant": [0.5]}, r"trace: column 'tenant' is Float64; expected text"),
        (
            {"gpus": [], "duration_s": [], "wait": [1]},
            r"trace: Parquet without duration_s, gpus \(found: job_id, submit_s, wait\); expected the columns "
            r"job_id, submit_s, duration_s, gpus and optionally tenant, .*, group$",
        ),
        ({"gpus": [0]}, r"trace: no usable job; refused rows: 1 cpu-job \(row 1\)"),
    ],
)
def test_columns_that_cannot_be_used_are_one_clear_line(
    tmp_path: Path, columns: dict[str, list[Any]], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_trace(table(tmp_path, **columns))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("left", [4, 8, 100, -1])
def test_a_cut_file_is_told(tmp_path: Path, left: int) -> None:
    path = table(tmp_path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UserError, match=r"trace: the Parquet data are cut: expected PAR1 at the end of [\d,]+ bytes"):
        read_trace(path)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"PAR1" + b"\xff" * 100 + b"PAR1")
    with pytest.raises(UserError, match=r"trace: damaged Parquet file \(.+\); expected a whole one") as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    source = tmp_path / "a.csv.gz"
    source.write_bytes(gzip.compress(CSV.encode()))
    result = CliRunner().invoke(cli.app, ["convert", str(source), "--out", str(tmp_path / "no" / "b.parquet")])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).endswith("b.parquet: no such file or directory")


def test_without_the_extra_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UserError, match=r"trace: reading Parquet needs the extra `trace`: pip install"):
        read_trace(path)
    source = tmp_path / "a.csv"
    source.write_text(CSV, encoding="utf-8")
    result = CliRunner().invoke(cli.app, ["convert", str(source), "--out", str(tmp_path / "b.parquet")])
    assert "b.parquet: writing Parquet needs the extra `trace`" in str(result.exception)
