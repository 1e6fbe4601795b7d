"""Run times as survival curves on one grid, and what is read from them.

The grid has `BINS` bins between 1 s and 2^24 s (194 days), six to an octave: a bin is 12 % wide. A *curve* is the
probability that the run time exceeds each of the `BINS + 1` edges; between edges it is linear in log time. All
predictors answer with curves, so that age, progress and quantiles are handled in one place:

    P(T > a + r | T > a) = S(a + r) / S(a)
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .jobs import LEVELS, Floats

PER_OCTAVE: Final = 6
BINS: Final = 24 * PER_OCTAVE
EDGES_LN: Final = np.arange(BINS + 1) * (math.log(2.0) / PER_OCTAVE)
"""ln(seconds) of the edges."""
EDGES_S: Final = np.exp(EDGES_LN)
LONGEST_S: Final = float(EDGES_S[-1])
_WIDTH_LN: Final = float(EDGES_LN[1])
_GRID: Final = EDGES_LN.astype(np.float32)
_LEAST: Final = 1e-9
"""Below this a curve says nothing about what is left."""
_PRIOR_MEDIAN_S: Final = 1800.0
_PRIOR_SIGMA: Final = 2.6


def bin_of(seconds: float) -> int:
    """The bin of a run time; what is outside the grid belongs to the first or the last one."""
    if not seconds > 1.0:
        return 0
    return min(BINS - 1, int(math.log(min(seconds, LONGEST_S)) / _WIDTH_LN))


def ln_s(seconds: Floats) -> Floats:
    """ln, not below one second nor beyond the grid."""
    return np.asarray(np.log(np.minimum(np.maximum(seconds, 1.0), LONGEST_S)))


def survival(hazards: NDArray[np.floating]) -> Floats:
    """[..., edge] from [..., bin]: S(e + 1) = S(e) (1 - h(e))."""
    out = np.empty((*hazards.shape[:-1], BINS + 1))
    out[..., 0] = 1.0
    np.cumprod(1.0 - hazards, axis=-1, out=out[..., 1:])
    out[..., -1] = 0.0
    return out


def kaplan_meier(ended: Floats, censored: Floats) -> Floats:
    """[edge] Kaplan & Meier's estimator (JASA 53, 1958) from weighted counts [bin].

    Of jobs in one bin those that ended come before those that are censored. Beyond the last job that counts, the curve
    stays where it is, but for the grid's end.
    """
    at_risk = np.cumsum((ended + censored)[::-1])[::-1]
    return survival(np.divide(ended, at_risk, out=np.zeros(BINS), where=at_risk > 0))


def _prior() -> Floats:
    """[bin] hazards of a lognormal: what is believed of a job when nothing has been seen. 90 % are between 25 s and 1.5
    days."""
    z = (EDGES_LN - math.log(_PRIOR_MEDIAN_S)) / (_PRIOR_SIGMA * math.sqrt(2.0))
    alive = np.array([0.5 * math.erfc(value) for value in z])
    alive[0] = 1.0
    hazards = 1.0 - alive[1:] / alive[:-1]
    hazards[-1] = 1.0
    return np.asarray(hazards)


PRIOR_HAZARDS: Final = _prior()


def at(curves: Floats, seconds: Floats) -> Floats:
    """[job] probability that the run time of job i exceeds seconds[i]."""
    place = ln_s(seconds) / _WIDTH_LN
    below = np.minimum(place.astype(np.int64), BINS - 1)
    rows = np.arange(len(curves))
    low, high = curves[rows, below], curves[rows, below + 1]
    return np.asarray(low + (high - low) * (place - below))


def times(curves: Floats, alive: Floats) -> Floats:
    """[job, n] seconds at which the curve of the job has come down to alive[job, n]."""
    above = np.count_nonzero(curves[:, None, :] > alive[:, :, None], axis=2)
    edge = np.minimum(np.maximum(above, 1), BINS)
    rows = np.arange(len(curves))[:, None]
    high, low = curves[rows, edge - 1], curves[rows, edge]
    part = np.divide(high - alive, high - low, out=np.zeros(alive.shape), where=high > low)
    return np.asarray(np.exp((edge - 1 + np.minimum(np.maximum(part, 0.0), 1.0)) * _WIDTH_LN))


def remaining(curves: Floats, ages_s: Floats, levels: tuple[float, ...] = LEVELS) -> tuple[Floats, Floats]:
    """([job, level] quantiles, [job] mean) of the run time that is left at these ages, s.

    A job that has run longer than its curve reaches is likely to run as long again (Lindy's law; a Pareto tail of
    exponent 1, its mean taken at half its 0.95 quantile).
    """
    alive = at(curves, ages_s)
    wanted = 1.0 - np.asarray(levels)
    left = times(curves, alive[:, None] * wanted) - ages_s[:, None]
    mean = _mean_left(curves, ages_s, alive)
    lost = (alive < _LEAST) | (ages_s >= LONGEST_S / 2)
    if lost.any():
        lindy = ages_s[lost, None] * (1.0 / wanted - 1.0)
        left[lost], mean[lost] = lindy, 10.0 * ages_s[lost]
    return np.maximum(left, 0.0), np.maximum(mean, 0.0)


def _mean_left(curves: Floats, ages_s: Floats, alive: Floats) -> Floats:
    """The integral of S from the age on, over S(age)."""
    widths = np.diff(EDGES_S)
    area = 0.5 * (curves[:, 1:] + curves[:, :-1])
    before_grid = np.maximum(1.0 - ages_s, 0.0)
    if not ages_s.any():
        return np.asarray(before_grid + area @ widths)
    parts = np.clip(EDGES_S[None, 1:] - ages_s[:, None], 0.0, widths)
    return np.asarray(before_grid + (area * parts).sum(axis=1) / np.maximum(alive, _LEAST))


def with_progress(curves: Floats, ages_s: Floats, fractions: Floats, totals_s: Floats) -> Floats:
    """Curves of the whole run time, given that at these ages these fractions were done (NaN: not told), from which
    these run times follow (NaN: age / fraction).

    Bayes on the grid: the curve's mass times a lognormal likelihood around that run time, whose deviation falls from
    0.6 at the start to 0.05 at the end (start-up and evaluation phases make early fractions poor witnesses). A little
    of the prior is spread evenly, so that a job that history never saw can be believed.
    """
    told = np.isfinite(fractions) & (fractions > _LEAST) & (ages_s > 0)
    if not told.any():
        return curves
    out = curves.copy()
    done = np.minimum(fractions[told], 1.0)
    follows = np.where(np.isfinite(totals_s[told]), totals_s[told], ages_s[told] / done)
    centre = ln_s(np.maximum(follows, ages_s[told]))
    deviation = 0.05 + 0.55 * (1.0 - done)
    middles = 0.5 * (EDGES_LN[1:] + EDGES_LN[:-1])
    z = (middles[None, :] - centre[:, None]) / deviation[:, None]
    mass = -np.diff(curves[told], axis=1) + 1e-3 / BINS
    log_mass = np.log(mass) - 0.5 * z * z
    mass = np.exp(log_mass - log_mass.max(axis=1, keepdims=True))
    mass /= mass.sum(axis=1, keepdims=True)
    out[told, :-1] = np.cumsum(mass[:, ::-1], axis=1)[:, ::-1]
    out[told, -1] = 0.0
    return out


def from_quantiles(times_s: Floats, levels: tuple[float, ...]) -> Floats:
    """[job, edge] curves through [job, level] quantiles, linear in log time; beyond the outer ones the probability
    falls by half with each further distance between the outer two."""
    known = np.log(np.maximum.accumulate(np.maximum(times_s, 1.0), axis=1))
    known = (known + np.arange(len(levels)) * 1e-3).astype(np.float32)  # equal quantiles are a step, not a fault
    below, above = known[:, :1], known[:, -1:]
    fall = np.float32(2.0 * math.log(2.0))
    low_step = np.maximum(known[:, 1:2] - below, np.float32(0.15))
    high_step = np.maximum(above - known[:, -2:-1], np.float32(0.15))
    alive = 1.0 - np.float32(levels[0]) * np.exp(np.minimum(_GRID - below, 0.0) * (fall / low_step))
    for n in range(len(levels) - 1):
        a, b = known[:, n : n + 1], known[:, n + 1 : n + 2]
        alive -= np.float32(levels[n + 1] - levels[n]) * np.clip((_GRID - a) / (b - a), 0.0, 1.0)
    alive *= np.exp(-np.maximum(_GRID - above, 0.0) * (fall / high_step))
    alive[:, 0], alive[:, -1] = 1.0, 0.0
    return np.asarray(np.maximum(alive, 0.0), np.float64)


def gittins_s(curves: Floats, ages_s: Floats) -> Floats:
    """[job] Gittins' rank of jobs of these ages: the least, over all times d that a job could be served, of

        E[min(T - a, d) | T > a] / P(T - a <= d | T > a)

    seconds of service for one completion, the reciprocal of Gittins' index (Gittins, J. R. Stat. Soc. B 41, 1979;
    Aalto, Ayesta & Righter, QUESTA 63, 2009). Whoever has the least is served first. d ends at edges of the grid. An
    age beyond the curve has the age itself, which is what Pareto's law of exponent 1 comes to.
    """
    alive = at(curves, ages_s)
    served = _served(curves)
    place = ln_s(ages_s) / _WIDTH_LN
    below = np.minimum(place.astype(np.int64), BINS - 1)
    rows = np.arange(len(curves))
    here = np.maximum(ages_s, 1.0)
    until = served[rows, below] + 0.5 * (curves[rows, below] + alive) * (here - EDGES_S[below])
    return _least(served, curves, np.where(ages_s < 1.0, ages_s, until), alive, below, ages_s)


def gittins_table_s(curves: Floats) -> Floats:
    """[curve, edge] `gittins_s` at the age of every edge but the last, in one pass: a table to look ranks up in."""
    served, out = _served(curves), np.empty((len(curves), BINS))
    for edge in range(BINS):
        ages = np.full(len(curves), EDGES_S[edge])
        below = np.full(len(curves), edge)
        out[:, edge] = _least(served, curves, served[:, edge], curves[:, edge], below, ages)
    return out


def _served(curves: Floats) -> Floats:
    """[job, edge] E[min(T, edge)], s."""
    out = np.empty_like(curves)
    out[:, 0] = 1.0
    np.cumsum(0.5 * (curves[:, 1:] + curves[:, :-1]) * np.diff(EDGES_S), axis=1, out=out[:, 1:])
    out[:, 1:] += 1.0
    return out


def _least(
    served: Floats, curves: Floats, until: Floats, alive: Floats, below: NDArray[np.int64], ages_s: Floats
) -> Floats:
    cost, gain = served - until[:, None], alive[:, None] - curves
    possible = (np.arange(BINS + 1)[None, :] > below[:, None]) & (gain > _LEAST)
    ranks = np.divide(cost, gain, out=np.full(cost.shape, np.inf), where=possible)
    least = ranks.min(axis=1)
    return np.where(np.isfinite(least) & (alive >= _LEAST), np.maximum(least, 0.0), np.maximum(ages_s, 1.0))
