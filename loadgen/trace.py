"""Read a trace file: find its format by its content, read it to the end, sort, choose the window.

Odd rows are counted by kind with their lines and never end the reading. What makes the *file* unusable (not there, not
text, no known header, cut compression, nothing left) is a `UserError` that names file, line and what was expected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from streamsched.errors import UserError

from . import columns
from .formats import FORMATS, Format, Head, neutral_parquet, pai_csv
from .jobs import Refusals, TraceJob
from .text import numbered, text_of


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
    name, jobs = _read(_file_of(Path(path)), refusals)
    for job in jobs:
        if job.duration_s == 0:
            refusals.notes.add("zero-duration", job.line)
        if job.gpu_milli is not None and job.gpus > 1:
            refusals.notes.add("gpus-rounded-up", job.line)
    jobs.sort(key=lambda job: job.submit_s)  # stable: jobs of one second keep the order of the file
    chosen = [replace(job, index=i) for i, job in enumerate(jobs) if window.holds(job)][: window.limit]
    if not chosen:
        raise UserError(_nothing_left(str(path), jobs, refusals, window))
    return Trace(str(path), name, chosen, refusals, len(jobs))


def _file_of(path: Path) -> Path:
    """Of a folder, the table that the others are joined to."""
    if not os.path.isdir(path):  # Path.is_dir raises for some paths; opening it tells what is wrong
        return path
    if found := pai_csv.table_in(path):
        return found
    raise UserError(f"{path}: is a directory; expected a trace file, or a folder with pai_job_table.csv")


def _read(path: Path, refusals: Refusals) -> tuple[str, list[TraceJob]]:
    """(name of the format, jobs in the order of the file)."""
    if neutral_parquet.is_parquet(path):
        return neutral_parquet.NAME, list(neutral_parquet.read(path, refusals))
    with text_of(path) as file:
        lines = numbered(file, str(path))
        head = _head(lines, str(path))
        kind = detect(head)
        if (
            path.stat().st_size >= columns.WORTH_BYTES
            and (jobs := columns.read(path, head, kind, refusals)) is not None
        ):
            return kind.name, jobs
        return kind.name, list(kind.read(head, lines, refusals))


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


def _head(lines: Iterator[tuple[int, str]], path: str) -> Head:
    for number, line in lines:
        if "\0" in line:
            raise UserError(
                f"{path}:{number}: not a text file; expected CSV, plain or compressed with gzip or zstd, or Parquet"
            )
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
