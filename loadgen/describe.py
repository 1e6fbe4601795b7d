"""What is in a trace: the table of `loadgen inspect`."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

from rich.console import Group
from rich.table import Table

from .jobs import Tally
from .report import mean, percentile
from .trace import Trace, show_moment

_SIZES_SHOWN = 12


def describe(trace: Trace) -> Group:
    jobs = trace.jobs
    rows = Table(title=str(trace.path), show_header=False, title_justify="left")
    rows.add_column(style="bold")
    rows.add_column()
    rows.add_row("format", trace.format)
    rows.add_row("jobs", f"{len(jobs):,}" + (f" ({trace.outside:,} outside the window)" if trace.outside else ""))
    rows.add_row(
        "submitted", f"{show_moment(jobs[0].submit_s)} to {show_moment(jobs[-1].submit_s)} (zone as in the file)"
    )
    rows.add_row("span", f"{(jobs[-1].submit_s - jobs[0].submit_s) / 86400:,.2f} days")
    rows.add_row("tenants", f"{len({job.tenant for job in jobs}):,}")
    rows.add_row("GPUs per job", _sizes(trace))
    rows.add_row("duration, s", _quantiles([job.duration_s for job in jobs]))
    rows.add_row("  clamped", f"{trace.clamped:,}")
    rows.add_row("work", f"{math.fsum(job.gpu_share * job.duration_s for job in jobs) / 3600:,.0f} GPU-hours")
    gaps = [later.submit_s - earlier.submit_s for earlier, later in pairwise(jobs)]
    if gaps:
        rows.add_row("gaps between submissions, s", _quantiles(gaps))
        rows.add_row("  coefficient of variation", f"{variation(gaps):.2f} (1: Poisson; more: bursts)")
    refused = _kinds(trace.refusals, "rows refused", "No row was refused.")
    return Group(rows, refused, _kinds(trace.refusals.notes, "rows odd but used", ""))


def variation(values: list[float]) -> float:
    """Standard deviation over mean."""
    average = mean(values) or 0.0
    if average == 0:
        return 0.0
    return math.sqrt(math.fsum((value - average) ** 2 for value in values) / len(values)) / average


def _sizes(trace: Trace) -> str:
    counts = Counter(job.gpus for job in trace.jobs)
    shown = counts.most_common(_SIZES_SHOWN)
    text = ", ".join(f"{gpus}: {count / len(trace.jobs):.2%}" for gpus, count in sorted(shown))
    more = len(counts) - len(shown)
    return text + (f", and {more} other sizes up to {max(counts)}" if more else "")


def _quantiles(values: list[float]) -> str:
    median, tail = percentile(values, 50) or 0.0, percentile(values, 99) or 0.0
    return f"mean {mean(values) or 0.0:,.1f}, median {median:,.1f}, p99 {tail:,.1f}, max {max(values):,.1f}"


def _kinds(tally: Tally, words: str, none: str) -> Table | str:
    if not tally.total:
        return none
    rows = Table(title=f"{tally.total:,} {words}", title_justify="left")
    rows.add_column("kind")
    rows.add_column("rows", justify="right")
    rows.add_column(f"{tally.unit}s")
    for kind, count in sorted(tally.count.items()):
        lines = tally.lines[kind]
        rows.add_row(kind, f"{count:,}", ", ".join(map(str, lines)) + (", ..." if count > len(lines) else ""))
    return rows
