"""The loss by which quantiles are judged."""

from __future__ import annotations

from collections.abc import Sequence

from .jobs import LEVELS


def pinball(quantiles: Sequence[float], value: float, levels: Sequence[float] = LEVELS) -> float:
    """Mean over the levels p of max(p (v - q), (p - 1) (v - q)); of logarithms, so that 10 s for 20 s is as wrong as
    10 h for 20 h (Koenker & Bassett, Econometrica 46, 1978)."""
    total = 0.0
    for level, quantile in zip(levels, quantiles, strict=True):
        off = value - quantile
        total += max(level * off, (level - 1.0) * off)
    return total / len(levels)
