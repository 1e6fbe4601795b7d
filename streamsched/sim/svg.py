"""HTML pages that need nothing else: tables, and plots as inline SVG. Equal input, equal bytes."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 34
_POINTS: Final = 600
"""Points of a line at most; of what lies between two the highest is drawn."""
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


def thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    if len(x) <= _POINTS:
        return x, y
    edges = np.linspace(0, len(x), _POINTS + 1).astype(np.int64)[:-1]
    return x[edges], np.maximum.reduceat(y, edges)


def cdf(name: str, values: Floats) -> Line:
    """Shares of `values` up to each; below 1 they count as 1: for a logarithmic axis."""
    shares = np.linspace(0.0, 1.0, min(_POINTS, max(2, len(values))))
    if not len(values):
        return name, shares * 0.0 + 1.0, shares
    return name, np.maximum(1.0, np.quantile(values, shares, method="inverted_cdf")), shares


def figure(title: str, axes: str, inside: str, height: int = HEIGHT) -> str:
    caption = f"{html.escape(title)} <small>({html.escape(axes)})</small>"
    size = f'viewBox="0 0 {WIDTH} {height}" width={WIDTH} height={height}'
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
    xs, ys = Scale([x for _, x, _ in lines], log_x), Scale([y for _, _, y in lines], log_y, from_zero=True)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = []
    for share, label in ys.ticks():
        level = TOP + high * (1 - share)
        parts.append(f"<line class=axis x1={LEFT} x2={WIDTH - RIGHT} y1={level:.1f} y2={level:.1f} />")
        parts.append(f"<text x={LEFT - 6} y={level + 4:.1f} text-anchor=end>{label}</text>")
    for share, label in xs.ticks():
        parts.append(f"<text x={LEFT + wide * share:.1f} y={HEIGHT - 18} text-anchor=middle>{label}</text>")
    for number, (name, x, y) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        across, up = LEFT + wide * xs.shares(x), TOP + high * (1 - ys.shares(y))
        points = [f"{a:.1f},{b:.1f}" for a, b in zip(across, up, strict=True)]
        if steps:
            points = [p for a, b, c in zip(across, up, np.append(across[1:], across[-1]), strict=True)
                      for p in (f"{a:.1f},{b:.1f}", f"{c:.1f},{b:.1f}")]  # fmt: skip
        parts.append(f'<polyline fill=none stroke="{colour}" stroke-width=1.5 points="{" ".join(points)}" />')
        label = html.escape(name)
        if label:
            parts.append(f'<text x={WIDTH - RIGHT} y={TOP + 12 + 13 * number} text-anchor=end fill="{colour}"'
                         f' style="fill:{colour}">{label}</text>')  # fmt: skip
    return figure(title, f"{y_name} by {x_name}", "".join(parts))


def bars(
    title: str,
    values: Sequence[tuple[str, float, tuple[float, float] | None]],
    axes: str = "line: 95 % interval",
    decimals: int | None = None,
) -> str:
    """(name, value, its interval) as bars from 0, with a line over the interval. `decimals`: of values as text; none
    said: as many as they need."""
    if not values:
        return ""
    highest = max((max(value, *between) if between else value for _, value, between in values), default=0.0)
    left, row = min(260, max(130, 12 + 6 * max(len(name) for name, _, _ in values))), 16
    wide = WIDTH - left - 70
    parts = []
    for number, (name, value, between) in enumerate(values):
        y = TOP + row * number
        scale = wide / highest if highest > 0 else 0.0
        parts.append(f"<text x={left - 6} y={y + 9} text-anchor=end>{html.escape(name)}</text>")
        parts.append(f'<rect x={left} y={y} width={value * scale:.1f} height=10 fill="{_COLOURS[0]}" opacity=.6 />')
        end = max(value, between[1]) if between else value
        digits = decimals if decimals is not None else 0 if value >= 100 else 2
        if between:
            low, high = (left + share * scale for share in between)
            parts.append(f"<line x1={low:.1f} x2={high:.1f} y1={y + 5} y2={y + 5} stroke=currentColor />")
        parts.append(f"<text x={left + end * scale + 5:.1f} y={y + 9}>{value:,.{digits}f}</text>")
    return figure(title, axes, "".join(parts), TOP + row * len(values) + 8)


class Scale:
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
