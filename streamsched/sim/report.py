"""A simulation as one HTML file that needs nothing else: figures, and plots as inline SVG."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from .metrics import Schedule, Tenants, by_tenant, jain
from .png import png
from .svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Line,
    Scale,
    cdf,
    document,
    facts_table,
    figure,
    plot,
    table,
    thinned,
)
from .timeline import heat, means

_SPANS: Final = 300
"""Equal spans of time of which means are drawn."""
_TENANTS: Final = 20
_HEAT: Final = [
    (255 - round(s * 247 / 255), 255 - round(s * 207 / 255), 255 - round(s * 148 / 255)) for s in range(256)
]
"""Colours of shares of 0 (white) to 1 (dark blue)."""


def page(
    title: str, facts: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, str]], schedules: Mapping[str, Schedule]
) -> str:
    """`facts`: what was simulated; `rows`: the table of figures; `schedules` by name."""
    tenants = {name: by_tenant(schedule) for name, schedule in schedules.items()}
    plots = [
        plot("Queue length", "days", "jobs", _over_time(schedules, "queued"), steps=True),
        plot("GPUs in use", "days", "share of GPUs", _over_time(schedules, "busy"), steps=True),
        plot("Fragmentation", "days", "share of the free GPUs on partly used nodes", _broken(schedules, "partly")),
        plot(
            "Expected fragmentation", "days", "share of the free GPUs that a job cannot have", _broken(schedules, "fgd")
        ),
        plot("Wait", "seconds (log)", "share of jobs", [cdf(n, s.wait_s) for n, s in schedules.items()], log_x=True),
        plot("JCT", "seconds (log)", "share of jobs", [cdf(n, s.jct_s) for n, s in schedules.items()], log_x=True),
        plot(
            "Mean bounded slowdown by job size", "GPUs (log)", "slowdown", _by_size(schedules), log_x=True, log_y=True
        ),
        plot("Mean wait by tenant, the largest first", "tenant", "seconds", _by_tenant(tenants)),
    ]
    body = (
        facts_table(facts)
        + "<h2>Figures</h2>"
        + table(rows)
        + "<p>In small: 95 % bootstrap intervals, of figures over jobs by blocks of neighbours in order of submission,"
        " of figures over time by equal spans of time. Maxima and Jain's index have none.</p>"
        + "".join(plots)
        + "".join(_heat(name, schedule) for name, schedule in schedules.items())
        + _fairness(tenants)
    )
    return document(title, body)


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────────────


def _over_time(schedules: Mapping[str, Schedule], what: str) -> list[Line]:
    found = []
    for name, schedule in schedules.items():
        lines = schedule.lines
        values = lines.queued if what == "queued" else lines.busy_gpus / max(1, schedule.cluster_gpus)
        days = (lines.time_s - lines.time_s[0]) / 86_400.0 if len(lines.time_s) else lines.time_s
        found.append((name, *thinned(days, values.astype(np.float64))))
    return found


def _broken(schedules: Mapping[str, Schedule], what: str) -> list[Line]:
    """Means of equal spans, drawn at their middles."""
    found = []
    for name, schedule in schedules.items():
        known = schedule.fragmentation
        last_s = _end(schedule)
        if known is not None and last_s > schedule.first_s:
            edges = np.linspace(schedule.first_s, last_s, _SPANS + 1)
            values = means(known.time_s, known.partly if what == "partly" else known.expected, edges)
            found.append((name, ((edges[1:] + edges[:-1]) / 2 - schedule.first_s) / 86_400.0, values))
    return found


def _end(schedule: Schedule) -> float:
    """Of the last run."""
    return float(np.max(schedule.finish_s[schedule.ran], initial=schedule.first_s))


def _by_size(schedules: Mapping[str, Schedule]) -> list[Line]:
    found = []
    for name, schedule in schedules.items():
        gpus, slowdown = schedule.gpus[schedule.ran], schedule.bounded_slowdown
        sizes = np.unique(gpus)
        found.append((name, sizes.astype(np.float64), np.array([slowdown[gpus == size].mean() for size in sizes])))
    return found


def _by_tenant(tenants: Mapping[str, Tenants]) -> list[Line]:
    top = _top(tenants)
    found = []
    for name, told in tenants.items():
        wait = dict(zip(told.names, told.mean_wait_s.tolist(), strict=True))
        found.append((name, np.arange(1.0, len(top) + 1.0), np.array([wait.get(tenant, 0.0) for tenant in top])))
    return found


def _top(tenants: Mapping[str, Tenants]) -> tuple[str, ...]:
    """The tenants with most GPU-seconds, in the same order for every schedule."""
    return next(iter(tenants.values())).names[:_TENANTS] if tenants else ()


def _fairness(tenants: Mapping[str, Tenants]) -> str:
    """Mean wait and slowdown of each of the largest tenants under each schedule, and how equal they are."""
    top = _top(tenants)
    if not top:
        return ""
    first = next(iter(tenants.values()))
    rows = []
    for tenant in top:
        place = first.names.index(tenant)
        row = {"tenant": tenant, "jobs": f"{first.jobs[place]:,}", "GPU-seconds": f"{first.gpu_s[place]:,.0f}"}
        for name, told in tenants.items():
            at = told.names.index(tenant) if tenant in told.names else None
            row[f"mean wait s, {name}"] = "" if at is None else f"{told.mean_wait_s[at]:,.1f}"
            row[f"slowdown, {name}"] = "" if at is None else f"{told.mean_slowdown[at]:,.2f}"
        rows.append(row)
    indices = [
        {"policy": name, "tenants": f"{len(told.names):,}", "Jain's index": f"{jain(told.mean_slowdown):.3f}"}
        for name, told in tenants.items()
    ]
    more = f" The {_TENANTS} largest of {len(first.names):,}." if len(first.names) > _TENANTS else ""
    return (
        "<h2>Fairness by tenant</h2><p>Jain's index, (sum x)&sup2; / (n sum x&sup2;), of the mean bounded slowdowns of"
        " all tenants: 1 where these are equal, 1/n where that of one outweighs all others.</p>"
        f"{table(indices)}<p>By GPU-seconds of work.{more}</p>{table(rows)}"
    )


# ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _heat(name: str, schedule: Schedule) -> str:
    """Nodes by time, each point the share of the GPUs in use; nothing where it is not known."""
    last_s = _end(schedule)
    if schedule.runs is None or last_s <= schedule.first_s:
        return ""
    shares = heat(schedule.runs, schedule.first_s, last_s)
    picture = base64.b64encode(png(np.round(shares * 255).astype(np.uint8), _HEAT)).decode("ascii")
    wide, high, nodes = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM, len(schedule.runs.node_gpus)
    parts = [
        f"<image x={LEFT} y={TOP} width={wide} height={high} preserveAspectRatio=none"
        f' href="data:image/png;base64,{picture}" />'
    ]
    for share, label in Scale([np.array([0.0, (last_s - schedule.first_s) / 86_400.0])], log=False).ticks():
        parts.append(f"<text x={LEFT + wide * share:.1f} y={HEIGHT - 18} text-anchor=middle>{label}</text>")
    for label, y in ((f"{0:,}", TOP + 10), (f"{nodes - 1:,}", TOP + high)):
        parts.append(f"<text x={LEFT - 6} y={y} text-anchor=end>{label}</text>")
    together = f", {nodes / len(shares):.1f} nodes to a row" if nodes > len(shares) else ""
    title = f"GPUs in use by node: {name}"
    return figure(title, f"node by days, white: none, dark: all{together}", "".join(parts))
