"""Answers that are right as often as they say: adaptive conformal calibration of predicted probabilities.

For a job whose run time turned out to be y, u = 1 - S(y) of the curve predicted at its submission would be uniform if
the curves were right. What is tracked online is, for each nominal level p, the level a(p) below which u really falls
with probability p:

    a(p) <- a(p) + step (p - [u <= a(p)])

the update of adaptive conformal inference (Gibbs & Candès, NeurIPS 2021, eq. 2), applied to conformal scores that are
probabilities (distributional conformal prediction: Chernozhukov, Wüthrich & Zhu, PNAS 2021). Over any long run u falls
below a(p) in a share p of jobs, however wrong the curves are or become, because a(p) has to stay within [0, 1]. The
calibrated curve is 1 - H(1 - S) with H the piecewise linear map from a(p) to p; so it is a curve again, and age,
progress and indices made from curves are calibrated with it.

A censored job counts for the levels it says something about: if it ran beyond a(p), its u is above that.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from .jobs import Floats

NOMINAL: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_STEP: Final = 0.003
"""Jobs come in batches of alike ones: a larger step would follow one sweep."""
_RECENT: Final = 0.005
"""Weight of the newest job in the recent coverage: about the last 200 jobs."""
_EDGE: Final = 1e-3
_TRUSTED: Final = 100.0
"""Jobs after which a group's own levels count as much as everybody's."""


class CalibratorState(Struct, frozen=True, array_like=True):
    levels: list[float]
    coverage: float
    jobs: int


class Calibrator:
    """The levels a(p) of one stream of jobs."""

    def __init__(self) -> None:
        self.levels = list(NOMINAL)
        self.coverage = 0.9
        """Share of recent jobs within the 90 % interval that they were told; far from 0.9 means drift."""
        self.jobs = 0

    def observe(self, u: float, censored: bool) -> None:
        """`u`: predicted probability of a run time of at most what it was; censored: of what it had run by then."""
        levels = self.levels
        step = max(_STEP, 0.2 / (1.0 + self.jobs))  # the first jobs move it faster
        if not censored:
            inside = levels[0] < u <= levels[-1]
            self.coverage += _RECENT * (inside - self.coverage)
            self.jobs += 1
        for n, (level, nominal) in enumerate(zip(levels, NOMINAL, strict=True)):
            if u > level:
                levels[n] = min(level + step * nominal, 1.0 - _EDGE)
            elif not censored:
                levels[n] = max(level - step * (1.0 - nominal), _EDGE)

    def state(self) -> CalibratorState:
        return CalibratorState(list(self.levels), self.coverage, self.jobs)

    @classmethod
    def restored(cls, state: CalibratorState) -> Calibrator:
        """Raises ValueError."""
        if len(state.levels) != len(NOMINAL) or not all(0 < level < 1 for level in state.levels):
            raise ValueError("levels of a calibration are out of bounds")
        if not 0 <= state.coverage <= 1 or state.jobs < 0:
            raise ValueError("coverage of a calibration is out of bounds")
        found = cls()
        found.levels, found.coverage, found.jobs = list(state.levels), state.coverage, state.jobs
        return found


def blend(own: Calibrator | None, everybody: Calibrator) -> Floats:
    """[level] a(p) of a group: its own where it has had jobs, everybody's where it has not."""
    theirs = np.array(everybody.levels)
    if own is None:
        return theirs
    share = own.jobs / (own.jobs + _TRUSTED)
    return np.asarray(theirs + share * (np.array(own.levels) - theirs))


def calibrated(curves: Floats, levels: Floats) -> Floats:
    """[job, edge] curves with the predicted probabilities replaced by those found to be true."""
    ascending = np.maximum.accumulate(levels + np.arange(len(levels)) * 1e-9)
    true = np.interp(1.0 - curves, [0.0, *ascending, 1.0], [0.0, *NOMINAL, 1.0])
    return np.asarray(1.0 - true)
