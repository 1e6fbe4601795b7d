"""Reading whole trace files: by line, and by column with polars.

Processor's seconds from the file to its jobs in order (`loadgen.trace.read_trace`), the best of several runs; both
readings have to give the same. What a process pays once for importing polars is told apart.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path

from rich.table import Table

from loadgen import columns
from loadgen.trace import Trace, read_trace

from . import _cases

FILES = {
    "Philly": "philly/philly_jobs_until_2017-11-15.csv",
    "Venus": "helios-venus/venus_gpu_jobs_until_2020-07-31.csv",
}


def run(quick: bool) -> None:
    console = _cases.console(160)
    began = time.process_time()
    try:
        importlib.import_module("polars")
    except ImportError:
        console.print("traces: left out, the extra `trace` is not there", markup=False)
        return
    import_s = time.process_time() - began
    table = Table(title="reading traces, processor's seconds")
    for heading in ("trace", "MB", "jobs", "by line", "by column", "ratio"):
        table.add_column(heading, justify="left" if heading == "trace" else "right")
    for name, path in FILES.items():
        if (file := _cases.trace(name, path, console)) is None:
            continue
        by_line, line_s = _measure(file, 1 << 60, 1 if quick else 7)
        by_column, column_s = _measure(file, 0, 1 if quick else 7)
        if by_line != by_column:
            raise AssertionError(f"{name}: the two readings differ")
        size = file.stat().st_size
        table.add_row(
            name,
            f"{size / 1e6:.1f}",
            f"{len(by_line.jobs):,}",
            f"{line_s:.3f}",
            f"{column_s:.3f}",
            f"{line_s / column_s:.1f}",
        )
    console.print(table)
    console.print(
        f"importing polars, once: {import_s:.3f} s (0 if another benchmark did); by column from "
        f"{columns.WORTH_BYTES / 1e6:.1f} MB"
    )


def _measure(path: Path, worth_bytes: int, runs: int) -> tuple[Trace, float]:
    """What is read, and the quickest run's seconds, with files of `worth_bytes` and more read by column."""
    kept, columns.WORTH_BYTES = columns.WORTH_BYTES, worth_bytes
    seconds = []
    try:
        for _ in range(runs):
            began = time.process_time()
            trace = read_trace(path)
            seconds.append(time.process_time() - began)
    finally:
        columns.WORTH_BYTES = kept
    return trace, min(seconds)
