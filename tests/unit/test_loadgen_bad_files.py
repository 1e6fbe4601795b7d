"""Bad files, kind by kind: the file, the line where there is one, and what was expected; and what only looks bad."""

from __future__ import annotations

import errno
import gzip
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import polars
import pytest
import zstandard

from loadgen.trace import Window, read_trace
from streamsched.errors import UserError

HEADER = "timestamp,duration,num_gpus,gpu_time,cluster\n"
ROWS = "".join(
    f"2017-10-09 07:{i // 60:02}:{i % 60:02},{i * 7919 % 1009}.5,{1 + i % 8},0,vc-{i % 5}\n" for i in range(900)
)
TEXT = HEADER + ROWS
NEUTRAL = "job_id,submit_s,duration_s,gpus,tenant\na,0,1,1,x\nb,5,1,1,y\nc,9,1,2,z\n"


def zstd(content: bytes) -> bytes:
    packed: bytes = zstandard.ZstdCompressor().compress(content)
    return packed


def parquet() -> bytes:
    out = io.BytesIO()
    polars.DataFrame({"job_id": ["a"], "submit_s": [0], "duration_s": [1], "gpus": [1]}).write_parquet(out)
    return out.getvalue()


def put(folder: Path, content: bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(
            lambda: gzip.compress(TEXT.encode())[:-40],
            r": the gzip data end or break after line \d+ \(.+\); expected a whole file",
            id="gzip cut",
        ),
        pytest.param(
            lambda: gzip.compress(TEXT.encode())[:-8] + b"\0" * 8,
            r": damaged gzip file \(CRC check failed .+\); expected a whole one",
            id="gzip of another checksum",
        ),
        pytest.param(
            lambda: zstd(TEXT.encode())[:-40],
            r": the zstd data end or break after line \d+ \(.+\); expected a whole file",
            id="zstd cut",
        ),
        pytest.param(
            lambda: parquet()[:-40],
            r": the Parquet data are cut: expected PAR1 at the end of [\d,]+ bytes",
            id="Parquet cut",
        ),
        pytest.param(
            lambda: TEXT.replace(",", ";").encode(),
            r":1: columns of Philly CSV separated by ';': expected ','",
            id="semicolons",
        ),
        pytest.param(
            lambda: b"\n\n" + TEXT.replace(",", "\t").encode(),
            r":3: columns of Philly CSV separated by tabs: expected ','",
            id="tabs after blank lines",
        ),
        pytest.param(lambda: b"", r": is empty; expected a header line and one job per line", id="empty"),
        pytest.param(lambda: gzip.compress(b""), r": is empty; expected a header line and one job", id="empty gzip"),
        pytest.param(lambda: b"\xef\xbb\xbf", r": is empty; expected a header line and one job", id="only a BOM"),
        pytest.param(lambda: HEADER.encode(), r": no usable job; refused rows: none", id="only a header"),
        pytest.param(
            lambda: (HEADER + "soon,1,1,1,a\n2017-10-09 07:00:00,1,0,1,a\n").encode(),
            r": no usable job; refused rows: 1 bad-time \(line 2\), 1 cpu-job \(line 3\)",
            id="all rows refused",
        ),
        pytest.param(
            lambda: (NEUTRAL + "d,x,1,1,z\n").encode(),
            r": none of its 3 jobs is in the window; they were submitted from 1970-01-01 00:00:00 to "
            r"1970-01-01 00:00:09; refused rows: 1 bad-time \(line 5\)",
            id="nothing in the window",
        ),
        pytest.param(
            lambda: b"when,how_long,how_many\n1,2,3\n",
            r":1: no known trace format begins with 'when,how_long,how_many'; expected the columns of .*"
            r"neutral CSV \(job_id,submit_s,duration_s,gpus\)",
            id="unknown columns",
        ),
        pytest.param(
            lambda: b"2017-10-09 07:01:55,66.0,1,66.0,a\n" * 3,
            r":1: no known trace format begins with '2017-10-09 07:01:55,66\.0,1,66\.0,a'; expected the columns of ",
            id="no header",
        ),
        pytest.param(
            lambda: b"\n" + TEXT.encode().replace(b"duration", b"dura\0tion"),
            r":2: not a text file; expected CSV, plain or compressed with gzip or zstd, or Parquet",
            id="NUL in the head",
        ),
        pytest.param(
            lambda: TEXT.encode("utf-16"), r": is UTF-16 text; expected CSV text, plain or compressed", id="UTF-16"
        ),
        pytest.param(
            lambda: TEXT.encode("utf-16-le"), r":1: not a text file; expected CSV, plain or", id="UTF-16 without a BOM"
        ),
    ],
)
def test_it_is_one_line_with_file_line_and_what_was_expected(
    tmp_path: Path, content: Callable[[], bytes], message: str
) -> None:
    path = put(tmp_path, content())
    with pytest.raises(UserError) as caught:
        read_trace(path, Window(submitted_from=100.0))
    assert re.match(re.escape(str(path)) + message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        pytest.param(TEXT[:-5].encode(), {}, id="last cell cut"),
        pytest.param(TEXT[:-7].encode(), {"missing-columns": [901]}, id="last line cut"),
        pytest.param(TEXT[:-30].encode(), {"missing-columns": [901]}, id="last line cut in its time"),
        pytest.param(
            (
                HEADER
                + "2017-10-09 07:00:00,1,1,1,a\n2017-10-09 07:00:00+08:00,1,1,1,a\n2017-10-09 07:00:00Z,1,1,1,a\n"
            ).encode(),
            {"zoned-time": [3, 4]},
            id="zones among local times",
        ),
        pytest.param(
            b"user,node_num,gpu_num,type,state,submit_time,start_time,end_time,gpu_time\n"
            + b"".join(
                b"u,1,1,x,COMPLETED,%b,%b,%b,1\n" % (at, at, at)
                for at in (b"2023-05-17 11:00:58+08:00", b"2023-05-17 11:00:58", b"2023-05-17 03:00:58+00:00")
            ),
            {"naive-time": [3]},
            id="local times among zones",
        ),
        pytest.param(
            NEUTRAL.replace("b,5,", "b,\0005,").encode() + b"\0" * 4096 + b"\nd,1,1,1,x\n",
            {"bad-time": [3], "missing-columns": [5]},
            id="NULs in rows",
        ),
        pytest.param(
            NEUTRAL.encode() + "d,1,1,1,größe\n".encode("latin-1") + b"e,\xff,1,1,x\n", {"bad-time": [6]}, id="Latin-1"
        ),
        pytest.param(NEUTRAL.replace("b,5,1,1,y", "b;5;1;1;y").encode(), {"missing-columns": [3]}, id="a row of ;"),
    ],
)
def test_odd_rows_are_counted_with_their_lines(tmp_path: Path, content: bytes, refused: dict[str, list[int]]) -> None:
    trace = read_trace(put(tmp_path, content))
    rows = sum(1 for line in content.splitlines() if line.strip()) - 1
    assert trace.refusals.lines == refused
    assert len(trace.jobs) + trace.refusals.total == rows


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: b"\xef\xbb\xbf" + data, id="BOM"),
        pytest.param(lambda data: data.replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param(lambda data: data.rstrip(b"\n"), id="no end of the last line"),
        pytest.param(lambda data: data + b"\n\r\n  \n", id="blank lines at the end"),
        pytest.param(lambda data: data.replace(b",", b" , "), id="blanks around cells"),
        pytest.param(lambda data: gzip.compress(data), id="gzip"),
        pytest.param(lambda data: gzip.compress(data[:999]) + gzip.compress(data[999:]), id="gzip in two members"),
        pytest.param(lambda data: gzip.compress(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")), id="all, in gzip"),
        pytest.param(lambda data: zstd(data), id="zstd"),
        pytest.param(lambda data: zstd(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")), id="all, in zstd"),
    ],
)
def test_what_only_looks_bad_gives_the_same_jobs(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    plain = read_trace(put(tmp_path, TEXT.encode()))
    changed = read_trace(put(tmp_path, change(TEXT.encode())))
    assert len(plain.jobs) == 900
    assert (changed.jobs, changed.refusals, changed.format) == (plain.jobs, plain.refusals, plain.format)


def test_what_cannot_be_opened_is_told(tmp_path: Path) -> None:
    file = put(tmp_path, TEXT.encode())
    for path, words in (
        (tmp_path / "absent", "no such file or directory"),
        (file / "below", "not a directory"),
        (tmp_path, "is a directory; expected a trace file, or a folder with pai_job_table.csv"),
        (tmp_path / ("x" * 300), "file name too long"),
    ):
        with pytest.raises(UserError) as caught:
            read_trace(path)
        assert str(caught.value) == f"{path}: {words}"


def test_a_file_without_permission_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said by the opening itself: root may read any file."""
    path = put(tmp_path, TEXT.encode())

    def refuse(self: Path, *args: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}: permission denied"
