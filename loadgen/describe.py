"""What is in a trace: the figures of `loadgen inspect`, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from .jobs import Tally, TraceJob
from .report import mean, percentile
from .trace import Trace, show_moment

HOUR_S = 3600.0
_SIZES_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    mean: float
    median: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The jobs of one GPU count. Their work goes by the parts of GPUs that they ask for."""

    gpus: int
    jobs: int
    gpu_hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Rows of one kind, and the first lines they are on."""

    kind: str
    count: int
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """How unevenly jobs come. Hours are counted from the first submission; those in which nothing came count too."""

    gap_variation: float
    """Coefficient of variation of the gaps between submissions; Poisson arrivals: 1."""
    hourly_peak_to_mean: float
    hourly_dispersion: float
    """Variance of the arrivals per hour, over their mean; Poisson arrivals: 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Times in epoch seconds as the trace's own clock read, durations and gaps in seconds."""

    path: str
    format: str
    jobs: int
    outside: int
    """Usable jobs that are not in the window."""
    first_submit_s: float
    last_submit_s: float
    span_s: float
    tenants: int
    sizes: tuple[Size, ...]
    """By GPUs."""
    duration_s: Spread
    clamped: int
    gpu_hours: float
    gap_s: Spread | None
    """None: of one job."""
    bursts: Bursts | None
    refused: tuple[Kind, ...]
    notes: tuple[Kind, ...]
    """Odd rows that are used all the same."""
    unit: str
    """What the `lines` of these two count."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def describe(trace: Trace) -> Description:
    jobs = trace.jobs
    gaps = gaps_of(jobs)
    return Description(
        path=str(trace.path),
        format=trace.format,
        jobs=len(jobs),
        outside=trace.outside,
        first_submit_s=jobs[0].submit_s,
        last_submit_s=jobs[-1].submit_s,
        span_s=jobs[-1].submit_s - jobs[0].submit_s,
        tenants=len({job.tenant for job in jobs}),
        sizes=_sizes_of(jobs),
        duration_s=_spread([job.duration_s for job in jobs]),
        clamped=trace.clamped,
        gpu_hours=math.fsum(job.gpu_share * job.duration_s for job in jobs) / HOUR_S,
        gap_s=_spread(gaps) if gaps else None,
        bursts=_bursts(jobs, gaps) if gaps else None,
        refused=_kinds(trace.refusals),
        notes=_kinds(trace.refusals.notes),
        unit=trace.refusals.unit,
    )


def gaps_of(jobs: Sequence[TraceJob]) -> list[float]:
    """Seconds between one submission and the next."""
    return [later.submit_s - earlier.submit_s for earlier, later in pairwise(jobs)]


def arrivals_by_hour(jobs: Sequence[TraceJob]) -> dict[int, int]:
    """Jobs by hour since the first submission; not the hours in which none came: a wrong year makes many."""
    return Counter(int((job.submit_s - jobs[0].submit_s) // HOUR_S) for job in jobs)


def variation(values: list[float]) -> float:
    """Standard deviation over mean."""
    average = mean(values) or 0.0
    if average == 0:
        return 0.0
    return math.sqrt(math.fsum((value - average) ** 2 for value in values) / len(values)) / average


def _bursts(jobs: Sequence[TraceJob], gaps: list[float]) -> Bursts:
    by_hour = arrivals_by_hour(jobs)
    hours = max(by_hour) + 1
    average = len(jobs) / hours
    squares = math.fsum((count - average) ** 2 for count in by_hour.values()) + (hours - len(by_hour)) * average**2
    return Bursts(
        gap_variation=variation(gaps),
        hourly_peak_to_mean=max(by_hour.values()) / average,
        hourly_dispersion=squares / hours / average,
    )


def _sizes_of(jobs: Sequence[TraceJob]) -> tuple[Size, ...]:
    work: dict[int, list[float]] = {}
    for job in jobs:
        work.setdefault(job.gpus, []).append(job.gpu_share * job.duration_s)
    return tuple(
        Size(gpus=gpus, jobs=len(gpu_s), gpu_hours=math.fsum(gpu_s) / HOUR_S) for gpus, gpu_s in sorted(work.items())
    )


def _spread(values: list[float]) -> Spread:
    return Spread(
        mean=mean(values) or 0.0,
        median=percentile(values, 50) or 0.0,
        p99=percentile(values, 99) or 0.0,
        max=max(values),
    )


def _kinds(tally: Tally) -> tuple[Kind, ...]:
    return tuple(
        Kind(kind=kind, count=count, lines=tuple(tally.lines[kind])) for kind, count in sorted(tally.count.items())
    )


# ── as a table ───────────────────────────────────────────────────────────────────────────────────────────────────────


def facts(told: Description) -> list[tuple[str, str]]:
    """(what, how much) as one reads it."""
    rows = [
        ("format", told.format),
        ("jobs", f"{told.jobs:,}" + (f" ({told.outside:,} outside the window)" if told.outside else "")),
        (
            "submitted",
            f"{show_moment(told.first_submit_s)} to {show_moment(told.last_submit_s)} (zone as in the file)",
        ),
        ("span", f"{told.span_s / 86400:,.2f} days"),
        ("tenants", f"{told.tenants:,}"),
        ("GPUs per job", _show_sizes(told)),
        ("duration, s", _show(told.duration_s)),
        ("  clamped", f"{told.clamped:,}"),
        ("work", f"{told.gpu_hours:,.0f} GPU-hours"),
    ]
    if told.gap_s is not None:
        rows.append(("gaps between submissions, s", _show(told.gap_s)))
    if told.bursts is not None:
        rows += [
            ("  coefficient of variation", f"{told.bursts.gap_variation:.2f} (1: Poisson; more: bursts)"),
            (
                "arrivals per hour",
                f"peak {told.bursts.hourly_peak_to_mean:,.1f} times the mean; "
                f"index of dispersion {told.bursts.hourly_dispersion:,.1f} (1: Poisson)",
            ),
        ]
    return rows


def table(told: Description) -> Group:
    rows = Table(title=escape(told.path), show_header=False, title_justify="left")
    rows.add_column(style="bold")
    rows.add_column()
    for row in facts(told):
        rows.add_row(*row)
    refused = _kind_table(told.refused, told.unit, "rows refused", "No row was refused.")
    return Group(rows, refused, _kind_table(told.notes, told.unit, "rows odd but used"))


def common_sizes(told: Description) -> list[Size]:
    """The sizes that most jobs have, by GPUs."""
    most = sorted(told.sizes, key=lambda size: (-size.jobs, size.gpus))[:_SIZES_SHOWN]
    return sorted(most, key=lambda size: size.gpus)


def show_lines(kind: Kind) -> str:
    return ", ".join(map(str, kind.lines)) + (", ..." if kind.count > len(kind.lines) else "")


def _show_sizes(told: Description) -> str:
    shown = common_sizes(told)
    text = ", ".join(f"{size.gpus}: {size.jobs / told.jobs:.2%}" for size in shown)
    more = len(told.sizes) - len(shown)
    return text + (f", and {more} other sizes up to {told.sizes[-1].gpus}" if more else "")


def _show(values: Spread) -> str:
    return f"mean {values.mean:,.1f}, median {values.median:,.1f}, p99 {values.p99:,.1f}, max {values.max:,.1f}"


def _kind_table(kinds: Sequence[Kind], unit: str, words: str, none: str = "") -> Table | str:
    if not kinds:
        return none
    rows = Table(title=f"{sum(kind.count for kind in kinds):,} {words}", title_justify="left")
    rows.add_column("kind")
    rows.add_column("rows", justify="right")
    rows.add_column(f"{unit}s")
    for kind in kinds:
        rows.add_row(kind.kind, f"{kind.count:,}", show_lines(kind))
    return rows
