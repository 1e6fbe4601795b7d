"""What is in a trace as one HTML file: the figures of `loadgen inspect`, and plots. Equal input, equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from streamsched.sim import svg

from .describe import Description, Kind, arrivals_by_hour, common_sizes, facts, gaps_of, show_lines
from .jobs import TraceJob
from .trace import Trace

_SPANS: Final = 600
"""Points of the line of arrivals at most."""


def page(trace: Trace, told: Description) -> str:
    """The file's name, not its folder, is told: a copy of a trace gives the same page."""
    jobs = trace.jobs
    durations = np.array([job.duration_s for job in jobs], dtype=np.float64)
    gaps = np.array(gaps_of(jobs), dtype=np.float64)
    plots = [
        _arrivals(jobs),
        svg.plot("Duration", "seconds (log)", "share of jobs", [svg.cdf("", durations)], log_x=True),
        _by_size("Jobs by GPUs", told, [float(size.jobs) for size in told.sizes], "jobs", 0),
        _by_size("Work by GPUs of the job", told, [size.gpu_hours for size in told.sizes], "GPU-hours", None),
        svg.plot("Gaps between submissions", "seconds (log)", "share of gaps", [svg.cdf("", gaps)], log_x=True)
        if len(gaps)
        else "",
        svg.bars("Refused rows", [(kind.kind, kind.count, None) for kind in told.refused], "rows by kind", decimals=0),
    ]
    body = svg.facts_table([(name.strip(), value) for name, value in facts(told)]) + "".join(plots)
    body += "<p>Durations and gaps below 1 s are drawn at 1 s.</p>"
    body += _kinds("Rows refused", told.refused, told.unit) + _kinds("Rows odd but used", told.notes, told.unit)
    return svg.document(f"loadgen: {Path(told.path).absolute().name}", body)


def _arrivals(jobs: Sequence[TraceJob]) -> str:
    """Hours of a long trace are put together, each group drawn with its busiest hour."""
    by_hour = arrivals_by_hour(jobs)
    hours = max(by_hour) + 1
    points = min(_SPANS, hours)
    days, highest = np.linspace(0.0, hours / 24.0, points + 1), np.zeros(points + 1)
    for hour, count in by_hour.items():
        at = hour * points // hours
        highest[at] = max(highest[at], count)
    highest[-1] = highest[-2]  # a step has an end
    together = "" if hours == points else f", of {hours / points:.1f} hours the highest"
    return svg.plot("Arrivals", "days", f"jobs per hour{together}", [("", days, highest)], steps=True)


def _by_size(title: str, told: Description, values: Sequence[float], unit: str, decimals: int | None) -> str:
    """The sizes that most jobs have; all others together."""
    shown = {size.gpus for size in common_sizes(told)}
    rows = [(size.gpus, value) for size, value in zip(told.sizes, values, strict=True)]
    bars: list[tuple[str, float, None]] = [(f"{gpus:,}", value, None) for gpus, value in rows if gpus in shown]
    if len(rows) > len(bars):
        bars.append(("other", sum(value for gpus, value in rows if gpus not in shown), None))
    return svg.bars(title, bars, unit, decimals)


def _kinds(title: str, kinds: Sequence[Kind], unit: str) -> str:
    rows = [{"kind": kind.kind, "rows": f"{kind.count:,}", f"{unit}s": show_lines(kind)} for kind in kinds]
    return f"<h2>{title}</h2>{svg.table(rows)}" if rows else ""
