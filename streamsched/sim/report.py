"""A simulation as one HTML file that needs nothing else: figures, and plots as inline SVG."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from .metrics import Floats, Schedule, Tenants, by_tenant, jain
from .png import png
from .timeline import heat, means

_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")
_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 34
_POINTS: Final = 600
"""Points of a line at most; of what lies between two the highest is drawn."""
_SPANS: Final = 300
"""Equal spans of time of which means are drawn."""
_TENANTS: Final = 20
_HEAT: Final = [
    (255 - round(s * 247 / 255), 255 - round(s * 207 / 255), 255 - round(s * 148 / 255)) for s in range(256)
]
"""Colours of shares of 0 (white) to 1 (dark blue)."""
_STYLE: Final = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1360px; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .15rem .7rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #8881 }
figure { display: inline-block; margin: 1rem 1rem 0 0 } figcaption { font-weight: 600 }
td { vertical-align: top } td small { opacity: .7 }
svg image { image-rendering: pixelated } p { max-width: 60rem }
svg text { font: 11px system-ui, sans-serif; fill: currentColor } .axis { stroke: currentColor; opacity: .35 }
"""

Line = tuple[str, Floats, Floats]
"""(name, x, y)."""


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
        plot("Wait", "seconds (log)", "share of jobs", [_cdf(n, s.wait_s) for n, s in schedules.items()], log_x=True),
        plot("JCT", "seconds (log)", "share of jobs", [_cdf(n, s.jct_s) for n, s in schedules.items()], log_x=True),
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


def document(title: str, body: str) -> str:
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{body}</html>\n"
    )


def facts_table(facts: Sequence[tuple[str, str]]) -> str:
    told = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in facts)
    return f"<table>{told}</table>"


def items(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in texts) + "</ul>"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """What comes after a line break in a cell is smaller print."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{_cell(v)}</td>" for v in row.values()) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(text: str) -> str:
    first, _, more = text.partition("\n")
    return html.escape(first) + (f"<br><small>{html.escape(more)}</small>" if more else "")


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────────────


def _over_time(schedules: Mapping[str, Schedule], what: str) -> list[Line]:
    found = []
    for name, schedule in schedules.items():
        lines = schedule.lines
        values = lines.queued if what == "queued" else lines.busy_gpus / max(1, schedule.cluster_gpus)
        days = (lines.time_s - lines.time_s[0]) / 86_400.0 if len(lines.time_s) else lines.time_s
        found.append((name, *_thinned(days, values.astype(np.float64))))
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


def _thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    if len(x) <= _POINTS:
        return x, y
    edges = np.linspace(0, len(x), _POINTS + 1).astype(np.int64)[:-1]
    return x[edges], np.maximum.reduceat(y, edges)


def _cdf(name: str, values: Floats) -> Line:
    shares = np.linspace(0.0, 1.0, min(_POINTS, max(2, len(values))))
    if not len(values):
        return name, shares * 0.0 + 1.0, shares
    return name, np.maximum(1.0, np.quantile(values, shares, method="inverted_cdf")), shares


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
    wide, high, nodes = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM, len(schedule.runs.node_gpus)
    parts = [
        f"<image x={_LEFT} y={_TOP} width={wide} height={high} preserveAspectRatio=none"
        f' href="data:image/png;base64,{picture}" />'
    ]
    for share, label in _Scale([np.array([0.0, (last_s - schedule.first_s) / 86_400.0])], log=False).ticks():
        parts.append(f"<text x={_LEFT + wide * share:.1f} y={_HEIGHT - 18} text-anchor=middle>{label}</text>")
    for label, y in ((f"{0:,}", _TOP + 10), (f"{nodes - 1:,}", _TOP + high)):
        parts.append(f"<text x={_LEFT - 6} y={y} text-anchor=end>{label}</text>")
    together = f", {nodes / len(shares):.1f} nodes to a row" if nodes > len(shares) else ""
    title = f"GPUs in use by node: {name}"
    return _figure(title, f"node by days, white: none, dark: all{together}", "".join(parts))


def _figure(title: str, axes: str, inside: str, height: int = _HEIGHT) -> str:
    caption = f"{html.escape(title)} <small>({html.escape(axes)})</small>"
    size = f'viewBox="0 0 {_WIDTH} {height}" width={_WIDTH} height={height}'
    return f"<figure><figcaption>{caption}</figcaption><svg {size} role=img>{inside}</svg></figure>"


def plot(
    title: str,
    x_name: str,
    y_name: str,
    lines: list[Line],
    log_x: bool = False,
    log_y: bool = False,
    steps: bool = False,
) -> str:
    lines = [(name, x, y) for name, x, y in lines if len(x)]
    if not lines:
        return ""
    xs, ys = _Scale([x for _, x, _ in lines], log_x), _Scale([y for _, _, y in lines], log_y, from_zero=True)
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    parts = []
    for share, label in ys.ticks():
        level = _TOP + high * (1 - share)
        parts.append(f"<line class=axis x1={_LEFT} x2={_WIDTH - _RIGHT} y1={level:.1f} y2={level:.1f} />")
        parts.append(f"<text x={_LEFT - 6} y={level + 4:.1f} text-anchor=end>{label}</text>")
    for share, label in xs.ticks():
        parts.append(f"<text x={_LEFT + wide * share:.1f} y={_HEIGHT - 18} text-anchor=middle>{label}</text>")
    for number, (name, x, y) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        across, up = _LEFT + wide * xs.shares(x), _TOP + high * (1 - ys.shares(y))
        points = [f"{a:.1f},{b:.1f}" for a, b in zip(across, up, strict=True)]
        if steps:
            points = [p for a, b, c in zip(across, up, np.append(across[1:], across[-1]), strict=True)
                      for p in (f"{a:.1f},{b:.1f}", f"{c:.1f},{b:.1f}")]  # fmt: skip
        parts.append(f'<polyline fill=none stroke="{colour}" stroke-width=1.5 points="{" ".join(points)}" />')
        label = html.escape(name)
        parts.append(f'<text x={_WIDTH - _RIGHT} y={_TOP + 12 + 13 * number} text-anchor=end fill="{colour}"'
                     f' style="fill:{colour}">{label}</text>')  # fmt: skip
    return _figure(title, f"{y_name} by {x_name}", "".join(parts))


def bars(title: str, values: Sequence[tuple[str, float, tuple[float, float] | None]]) -> str:
    """(name, value, its interval) as bars from 0, with a line over the interval."""
    highest = max((max(value, *between) if between else value for _, value, between in values), default=0.0)
    left, row = 130, 16
    wide = _WIDTH - left - 70
    parts = []
    for number, (name, value, between) in enumerate(values):
        y = _TOP + row * number
        scale = wide / highest if highest > 0 else 0.0
        parts.append(f"<text x={left - 6} y={y + 9} text-anchor=end>{html.escape(name)}</text>")
        parts.append(f'<rect x={left} y={y} width={value * scale:.1f} height=10 fill="{_COLOURS[0]}" opacity=.6 />')
        end = max(value, between[1]) if between else value
        if between:
            low, high = (left + share * scale for share in between)
            parts.append(f"<line x1={low:.1f} x2={high:.1f} y1={y + 5} y2={y + 5} stroke=currentColor />")
        parts.append(f"<text x={left + end * scale + 5:.1f} y={y + 9}>{value:,.{0 if value >= 100 else 2}f}</text>")
    return _figure(title, "line: 95 % interval", "".join(parts), _TOP + row * len(values) + 8)


class _Scale:
    """Values to shares of an axis."""

    def __init__(self, values: list[Floats], log: bool, from_zero: bool = False) -> None:
        self.log = log
        low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
        if log:
            low, high = math.log10(max(low, 1e-9)), math.log10(max(high, 1e-9))
        elif from_zero:
            low = min(0.0, low)
        self.low, self.high = low, high if high > low else low + 1.0

    def shares(self, values: Floats) -> Floats:
        scaled = np.log10(np.maximum(values, 1e-9)) if self.log else values
        return np.asarray((scaled - self.low) / (self.high - self.low))

    def ticks(self) -> list[tuple[float, str]]:
        if self.log:
            exponents = range(math.ceil(self.low), math.floor(self.high) + 1)
            return [((e - self.low) / (self.high - self.low), f"{10.0**e:g}") for e in exponents]
        return [(share, f"{self.low + share * (self.high - self.low):.3g}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
