"""Reading by column and reading by line give the same jobs and refusals, whatever is in the file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from loadgen import columns
from loadgen.formats import Format, Head
from loadgen.formats.neutral_csv import COLUMNS
from loadgen.jobs import Refusals, TraceJob
from loadgen.text import numbered, text_of
from loadgen.trace import detect
from streamsched.errors import UserError

TIMES = ("2017-10-09 07:01:55", "2020-02-29 00:00:00", "1999-12-31 23:59:59", "9999-12-31 23:59:59")
NUMBERS = ("0", "1", "66.0", "2951.125", "0.1", "123456789.123457", "007", "999999999")
PLAIN = {
    "timestamp": TIMES,
    "submit_time": TIMES,
    "duration": NUMBERS,
    "num_gpus": ("1", "8", "99999"),
    "gpu_num": ("1", "8", "99999"),
    "cluster": ("11cb48", "vc-1", ""),
    "duration_clamped": ("0", "1", ""),
    "submit_s": ("0", "1506902400", "9999999999.99999", "12.345"),
    "duration_s": NUMBERS,
    "gpus": ("1", "16"),
    "tenant": ("default", "a/b:c@d", ""),
    "estimate_s": ("", "0", "60.000", "0.0"),
    "gpu_milli": ("",),
    "gpu_types": ("", "V100", "T4"),
    "queued_s": ("", "0", "3.500"),
    "attempts": ("", "1", "12"),
    "group": ("", "nmt/f00d", "two words"),
}
ODD = (
    "", " ", "0", "-0", "-1", "+1", "1 ", " 8", "1.", ".5", "1e3", "1_000", "0x1", "nan", "inf", "1e400", "100000",
    "100001", "12345678901234567890", "0.1234567890123456789", "٣", "８", "1.5", "8.0", "00", "01", "true", "null",
    "2017-10-09", "2017-10-09 07:01", "2017-10-09T07:01:55", "2017-10-09 07:01:55.5", "2017-02-29 00:00:00",
    "2017-13-01 00:00:00", "2017-10-09 24:00:00", "2017-10-09 23:59:60", "2017-10-09 07:60:00", "0000-01-01 00:00:00",
    "0001-01-01 00:00:00", "1000-01-01 00:00:00", "2017-10-09 07:01:55+00:00", "2017-10-09 07:01:55Z",
    "2017-10-09  07:01:55", "20171009 07:01:55", "٢٠١٧-10-09 07:01:55", "-vc", "a b", "größe", "x" * 300, "T4|V100",
    " T4", "|", " x", "x ", " 1", "yes",
    "12345678901", "123456789012", "100000000000", "100000000001", "99999999999.5",
    "\x0b", "\x1c1", "\u2028", "\xa01", "1\x85", "460", "1000", "999.5",
)  # fmt: skip
HEADERS = (
    ("timestamp", "duration", "num_gpus", "cluster"),
    ("submit_time", "duration", "gpu_num", "duration_clamped"),
    COLUMNS[:4],
    COLUMNS,
)
MARKS = st.sampled_from([b'"', b",", b"\n", b"\r", b"\r\n", b"\0", b" ", b"\xff", b"\xef\xbb\xbf", b"\n\n", b"\xc2"])

CELLS = (
    st.sampled_from(ODD)
    | st.text(max_size=4)
    | st.floats(0, 1e9).map(lambda value: f"{value:.6f}")
    | st.datetimes().map(lambda moment: f"{moment:%Y-%m-%d %H:%M:%S}")
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    extra = draw(st.lists(st.sampled_from(["job_id", "note", "gpu_time", "duration", "tenant", "cluster"]), max_size=2))
    header = draw(st.permutations([*draw(st.sampled_from(HEADERS)), *extra]))
    row = st.tuples(*(st.sampled_from(PLAIN.get(name, ("", "x", "1"))) for name in header))
    rows = [list(cells) for cells in draw(st.lists(row, min_size=1, max_size=6))]
    for _ in range(draw(st.integers(0, 3))):
        cells = draw(st.sampled_from(rows))
        cells[draw(st.integers(0, len(header) - 1))] = draw(CELLS)
    text = "\n".join(",".join(cells) for cells in [header, *rows]) + draw(st.sampled_from(["", "\n", "\n\n", "\n \n"]))
    data = text.encode("utf-8", "replace")
    if draw(st.booleans()):
        data = data.replace(b"\n", b"\r\n")
    if draw(st.booleans()):
        data = b"\xef\xbb\xbf" + data
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(MARKS) + data[at + draw(st.integers(0, 3)) :]
    return data


@given(content=files())
def test_both_readers_see_the_same(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(content)
        refusals = Refusals()
        try:
            format, head, jobs = by_lines(path, refusals)
        except UserError:
            event("not a trace, or not usable")
            format, head = opened(path) or (None, None)
            if format is not None and head is not None:
                assert columns.read(path, head, format, Refusals()) is None
            return
        mine = Refusals()
        read = columns.read(path, head, format, mine)
    event("by line" if read is None else f"by column, {'some' if mine.total else 'none'} refused")
    if read is None:
        assert mine == Refusals()
    else:
        assert (repr(read), mine) == (repr(jobs), refusals)  # as text: 1 is not 1.0


def by_lines(path: Path, refusals: Refusals) -> tuple[Format, Head, list[TraceJob]]:
    with text_of(path) as file:
        lines = numbered(file, str(path))
        head = next(Head(str(path), line, number) for number, line in lines if line.strip())
        format = detect(head)
        return format, head, list(format.read(head, lines, refusals))


def opened(path: Path) -> tuple[Format, Head] | None:
    try:
        with text_of(path) as file:
            lines = numbered(file, str(path))
            head = next(Head(str(path), line, number) for number, line in lines if line.strip())
            return detect(head), head
    except UserError:
        return None


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: f"{header[0]}, {len(header)} columns")
def test_each_odd_cell_in_each_column(tmp_path: Path, header: tuple[str, ...]) -> None:
    """One after another, so that none is left to chance."""
    plain = [next((cell for cell in PLAIN.get(name, ("j",)) if cell), "") for name in header]
    rows = [header, plain]
    for at, name in enumerate(header):
        for cell in (*ODD, *PLAIN.get(name, ()), *NUMBERS, *TIMES):
            rows.append((*plain[:at], cell, *plain[at + 1 :]))
    path = tmp_path / "trace"
    path.write_text("\n".join(map(",".join, rows)), encoding="utf-8")
    refusals, mine = Refusals(), Refusals()
    format, head, jobs = by_lines(path, refusals)
    read = columns.read(path, head, format, mine)
    assert read is not None
    for one, other in zip(read, jobs, strict=True):
        assert repr(one) == repr(other)
    assert mine == refusals
