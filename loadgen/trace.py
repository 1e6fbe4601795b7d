"""Read a trace file: find its format by its content, read it to the end, sort, choose the window.

Odd rows are counted by kind with their lines and never end the reading. What makes the *file* unusable (not there, not
text, no known header, cut compression, nothing left) is a `UserError` that names file, line and what was expected.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

from msgspec.structs import replace

from streamsched.errors import UserError

from .formats import FORMATS, Format, Head
from .jobs import Refusals, TraceJob

_MAGIC: Final = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "zstd-compressed",
    b"BZh": "bzip2-compressed",
    b"\xfd7zXZ": "xz-compressed",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
_GZIP: Final = b"\x1f\x8b"
_LINE_MAX: Final = 1 << 20
"""Characters; a longer line is not a row of any trace."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which jobs of a trace: submitted in [submitted_from, submitted_before), the first `limit` of them."""

    submitted_from: float | None = None
    submitted_before: float | None = None
    limit: int | None = None

    def holds(self, job: TraceJob) -> bool:
        return (self.submitted_from is None or job.submit_s >= self.submitted_from) and (
            self.submitted_before is None or job.submit_s < self.submitted_before
        )


@dataclass(slots=True)
class Trace:
    """The jobs of the window by (submit time, order in the file), and what was left out."""

    path: str
    format: str
    jobs: list[TraceJob]
    refusals: Refusals
    usable: int
    """Usable jobs in the whole file."""

    @property
    def outside(self) -> int:
        return self.usable - len(self.jobs)

    @property
    def clamped(self) -> int:
        return sum(job.clamped for job in self.jobs)


def read_trace(path: str | Path, window: Window | None = None) -> Trace:
    """Read `path`; raises UserError when there is no job in the window."""
    window = window or Window()
    refusals = Refusals()
    with _text_of(Path(path)) as file:
        lines = _numbered(file, str(path))
        head = _head(lines, str(path))
        kind = detect(head)
        jobs = list(kind.read(head, lines, refusals))
    jobs.sort(key=lambda job: job.submit_s)  # stable: jobs of one second keep the order of the file
    chosen = [replace(job, index=i) for i, job in enumerate(jobs) if window.holds(job)][: window.limit]
    if not chosen:
        raise UserError(_nothing_left(str(path), jobs, refusals, window))
    return Trace(str(path), kind.name, chosen, refusals, len(jobs))


def detect(head: Head) -> Format:
    for candidate in FORMATS:
        if candidate.matches(head):
            return candidate
    place = f"{head.path}:{head.number}"
    for candidate in FORMATS:
        if reason := candidate.near_miss(head):
            raise UserError(f"{place}: {reason}")
    found = head.line if len(head.line) <= 80 else head.line[:77] + "..."
    raise UserError(
        f"{place}: no known trace format begins with {found!r}; expected the columns of "
        + " or ".join(candidate.expects for candidate in FORMATS)
    )


def clamp(jobs: list[TraceJob], max_duration_s: float) -> tuple[list[TraceJob], int]:
    """Jobs with durations of at most `max_duration_s`, and how many were cut."""
    cut = [
        replace(job, duration_s=max_duration_s, clamped=True) if job.duration_s > max_duration_s else job
        for job in jobs
    ]
    return cut, sum(job.duration_s > max_duration_s for job in jobs)


@contextmanager
def _text_of(path: Path) -> Iterator[IO[str]]:
    """The file as text: gzip known by its first bytes, no BOM, any line ends; bad bytes spoil only their row."""
    try:
        with path.open("rb") as raw:
            first = raw.read(8)
            raw.seek(0)
            for magic, words in _MAGIC.items():
                if first.startswith(magic):
                    raise UserError(f"{path}: is {words}; expected CSV text, plain or gzip-compressed")
            binary: IO[bytes] = raw
            if first.startswith(_GZIP):
                binary = gzip.GzipFile(fileobj=raw)  # type: ignore[assignment]
            with io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace") as text:
                yield text
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise UserError(f"{path}: damaged gzip file: {error}") from None
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _numbered(file: IO[str], path: str) -> Iterator[tuple[int, str]]:
    number, json = 0, False
    try:
        while line := file.readline(-1 if json else _LINE_MAX):
            number += 1
            if number == 1 and line.lstrip().startswith("["):
                json = True  # may be all in one line
                line += "" if line.endswith("\n") else file.readline()
            if len(line) == _LINE_MAX and not json:
                raise UserError(f"{path}:{number}: a line of over {_LINE_MAX:,} characters: this is not a trace in CSV")
            yield number, line.rstrip("\r\n")
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: the gzip data end or break after line {number}: {error}") from None


def _head(lines: Iterator[tuple[int, str]], path: str) -> Head:
    for number, line in lines:
        if "\0" in line:
            raise UserError(f"{path}:{number}: not a text file; expected CSV, plain or gzip-compressed")
        if line.strip():
            return Head(path, line, number)
    raise UserError(f"{path}: is empty; expected a header line and one job per line")


def _nothing_left(path: str, jobs: list[TraceJob], refusals: Refusals, window: Window) -> str:
    if not jobs:
        return f"{path}: no usable job; refused rows: {refusals.describe()}"
    if window.limit is not None and window.limit < 1:
        return f"{path}: a limit of {window.limit} leaves no job"
    return (
        f"{path}: none of its {len(jobs)} jobs is in the window; they were submitted from "
        f"{show_moment(jobs[0].submit_s)} to {show_moment(jobs[-1].submit_s)}; refused rows: {refusals.describe()}"
    )


def show_moment(submit_s: float) -> str:
    try:
        return datetime.fromtimestamp(submit_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{submit_s:.0f} s"
