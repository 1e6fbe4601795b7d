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

Answers are judged late, when the job ends, and hundreds of others may have been given meanwhile. So that the 90 %
interval covers 90 %, its two levels are judged as they were told: [u <= a(p)] with the a(p) of then, as in the paper;
any bias of what ends first is then made good in the end. The inner levels are judged as they are now: that settles
sooner, and a median need not have exactly half of the jobs below it.

A censored job ran beyond some u = c: for a(p) <= c it counts as above, for a(p) > c as below as far as that is to be
expected of a uniform u > c, (a(p) - c) / (1 - c). Leaving it out there would count it as above alone.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from .jobs import Floats

NOMINAL: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_STEP: Final = 0.001
_STEP_OUTER: Final = 0.0002
"""Jobs come in batches of alike ones: a larger step would follow the last batch and be wrong of the next."""
_STEP_FIRST: Final = 0.003
"""Of the first jobs; then it falls as 2 / jobs."""
_EDGE: Final = 1e-3


class CalibratorState(Struct, frozen=True, array_like=True):
    levels: list[float]
    jobs: int


class Calibrator:
    """The levels a(p) of one stream of jobs."""

    def __init__(self) -> None:
        self.levels = list(NOMINAL)
        self.jobs = 0

    @property
    def outer(self) -> tuple[float, float]:
        """What bounds the 90 % interval now: kept with an answer, to be judged by."""
        return self.levels[0], self.levels[-1]

    def observe(self, u: float, censored: bool, told: tuple[float, float] | None = None) -> None:
        """`u`: predicted probability of a run time of at most what it was; censored: of what it had run by then.
        `told`: `outer` as it was when the answer was given (else as it is now)."""
        levels = self.levels
        low, high = told or self.outer
        first = min(_STEP_FIRST, 2.0 / (1.0 + self.jobs))
        self.jobs += not censored
        for n, (asked, nominal) in enumerate(zip((low, *levels[1:-1], high), NOMINAL, strict=True)):
            step = max(first, _STEP if 0 < n < len(levels) - 1 else _STEP_OUTER)
            if u > asked:
                levels[n] = min(levels[n] + step * nominal, 1.0 - _EDGE)
            else:
                below = (asked - u) / (1.0 - u) if censored else 1.0
                levels[n] = min(max(levels[n] + step * (nominal - below), _EDGE), 1.0 - _EDGE)

    def state(self) -> CalibratorState:
        return CalibratorState(list(self.levels), self.jobs)

    @classmethod
    def restored(cls, state: CalibratorState) -> Calibrator:
        """Raises ValueError."""
        if len(state.levels) != len(NOMINAL) or not all(0 < level < 1 for level in state.levels) or state.jobs < 0:
            raise ValueError("levels of a calibration are out of bounds")
        found = cls()
        found.levels, found.jobs = list(state.levels), state.jobs
        return found


def calibrated(curves: Floats, levels: Floats) -> Floats:
    """[job, edge] curves with the predicted probabilities replaced by those found to be true."""
    ascending = np.maximum.accumulate(levels + np.arange(len(levels)) * 1e-9)
    true = np.interp(1.0 - curves, [0.0, *ascending, 1.0], [0.0, *NOMINAL, 1.0])
    return np.asarray(1.0 - true)
