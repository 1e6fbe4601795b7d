"""A simulation as one HTML file that needs nothing else: figures, and plots as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from .metrics import Floats, Schedule

_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")
_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 34
_POINTS: Final = 600
"""Points of a line at most; of what lies between two the highest is drawn."""
_TENANTS: Final = 20
_STYLE: Final = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1360px; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .15rem .7rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #8881 }
figure { display: inline-block; margin: 1rem 1rem 0 0 } figcaption { font-weight: 600 }
svg text { font: 11px system-ui, sans-serif; fill: currentColor } .axis { stroke: currentColor; opacity: .35 }
"""

Line = tuple[str, Floats, Floats]
"""(name, x, y)."""


def page(
    title: str, facts: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, str]], schedules: Mapping[str, Schedule]
) -> str:
    """`facts`: what was simulated; `rows`: the table of figures; `schedules` by name."""
    plots = [
        _plot("Queue length", "days", "jobs", _over_time(schedules, "queued"), steps=True),
        _plot("GPUs in use", "days", "share of GPUs", _over_time(schedules, "busy"), steps=True),
        _plot("Wait", "seconds (log)", "share of jobs", [_cdf(n, s.wait_s) for n, s in schedules.items()], log_x=True),
        _plot("JCT", "seconds (log)", "share of jobs", [_cdf(n, s.jct_s) for n, s in schedules.items()], log_x=True),
        _plot(
            "Mean bounded slowdown by job size", "GPUs (log)", "slowdown", _by_size(schedules), log_x=True, log_y=True
        ),
        _plot("Mean wait by tenant, the largest first", "tenant", "seconds", _by_tenant(schedules)),
    ]
    told = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in facts)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><table>{told}</table>{_table(rows)}{''.join(plots)}</html>\n"
    )


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(v)}</td>" for v in row.values()) + "</tr>" for row in rows)
    return f"<h2>Figures</h2><table><tr>{head}</tr>{body}</table>"


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────────────


def _over_time(schedules: Mapping[str, Schedule], what: str) -> list[Line]:
    found = []
    for name, schedule in schedules.items():
        lines = schedule.lines
        values = lines.queued if what == "queued" else lines.busy_gpus / max(1, schedule.cluster_gpus)
        days = (lines.time_s - lines.time_s[0]) / 86_400.0 if len(lines.time_s) else lines.time_s
        found.append((name, *_thinned(days, values.astype(np.float64))))
    return found


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


def _by_tenant(schedules: Mapping[str, Schedule]) -> list[Line]:
    """The tenants with most GPU-seconds, in the same order for every schedule."""
    first = next(iter(schedules.values()), None)
    if first is None:
        return []
    names, at = np.unique(np.array(first.tenants), return_inverse=True)
    used = np.bincount(at, weights=first.run_s * first.gpus, minlength=len(names))
    top = np.argsort(-used, kind="stable")[:_TENANTS]
    found = []
    for name, schedule in schedules.items():
        of, wait = at[schedule.ran], schedule.wait_s
        means = [float(wait[of == tenant].mean()) if np.any(of == tenant) else 0.0 for tenant in top]
        found.append((name, np.arange(1.0, len(top) + 1.0), np.array(means)))
    return found


# ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _plot(
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
    caption = f"{html.escape(title)} <small>({html.escape(y_name)} by {html.escape(x_name)})</small>"
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width={_WIDTH} height={_HEIGHT}'
    return f"<figure><figcaption>{caption}</figcaption><svg {size} role=img>{''.join(parts)}</svg></figure>"


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
