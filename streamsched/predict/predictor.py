"""The protocol: learn from what has ended, answer with a survival curve. All that is asked of curves is here.

A policy uses the batch calls, whose answers are arrays: `times` for SJF, SRTF, QSSF and shadow times, `gittins_s` for
an index, `curves` for one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from . import curves as grid
from .jobs import LEVELS, Features, Finished, Floats, Quantiles
from .progress import Track

Progress = float | Track | None
"""The fraction that a job has done just now, or what it has reported so far; None: nothing."""


class Times(NamedTuple):
    """Of [job]s at their ages, s."""

    ages_s: Floats
    quantiles_s: Floats
    """[job, level] of the remaining run time, at `LEVELS`."""
    mean_s: Floats
    """Of the remaining run time."""

    @property
    def median_s(self) -> Floats:
        """Of the remaining run time."""
        return np.asarray(self.quantiles_s[:, len(LEVELS) // 2])

    @property
    def total_median_s(self) -> Floats:
        """Of the whole run time, given that the job has run so long."""
        return np.asarray(self.ages_s + self.median_s)

    @property
    def total_mean_s(self) -> Floats:
        return np.asarray(self.ages_s + self.mean_s)


class Predictor(Protocol):
    """Learns from jobs that have ended, in the order of their ends, and is asked about others at any time.

    Ages that are no times count as 0, fractions outside (0, 1] as not told.
    """

    def observe(self, job: Finished) -> None:
        """O(1) amortised; memory is bounded. A run time that is none is not learned from."""
        ...

    def curves(self, jobs: Sequence[Features]) -> Floats:
        """[job, edge] probability that the whole run time exceeds `curves.EDGES_S[edge]`."""
        ...

    def predict(self, job: Features, age_s: float = 0.0, progress: Progress = None) -> Quantiles:
        """Of the run time that is left to a job that has run `age_s`."""
        return self.predict_many([job], [age_s], [progress])[0]

    def predict_many(
        self,
        jobs: Sequence[Features],
        ages_s: Sequence[float] | Floats | None = None,
        progress: Sequence[Progress] | None = None,
    ) -> list[Quantiles]:
        told = self.times(jobs, ages_s, progress)
        rows = zip(told.quantiles_s.tolist(), told.mean_s.tolist(), strict=True)
        return [Quantiles(at=tuple(row), mean_s=mean) for row, mean in rows]

    def times(
        self,
        jobs: Sequence[Features],
        ages_s: Sequence[float] | Floats | None = None,
        progress: Sequence[Progress] | None = None,
    ) -> Times:
        """Remaining and whole run times of many jobs at once."""
        ages, curves = self._curves_now(jobs, ages_s, progress)
        left, mean = grid.remaining(curves, ages)
        return Times(ages, left, mean)

    def gittins_s(
        self,
        jobs: Sequence[Features],
        ages_s: Sequence[float] | Floats | None = None,
        progress: Sequence[Progress] | None = None,
    ) -> Floats:
        """[job] seconds of service for one completion, the least first (`curves.gittins_s`)."""
        ages, curves = self._curves_now(jobs, ages_s, progress)
        return grid.gittins_s(curves, ages)

    def _curves_now(
        self, jobs: Sequence[Features], ages_s: Sequence[float] | Floats | None, progress: Sequence[Progress] | None
    ) -> tuple[Floats, Floats]:
        """([job] ages, [job, edge] curves given what was reported)."""
        ages = np.zeros(len(jobs)) if ages_s is None else ages_of(ages_s)
        curves = self.curves(jobs)
        if progress is None or all(told is None for told in progress):
            return ages, curves
        fractions, totals = np.full(len(jobs), math.nan), np.full(len(jobs), math.nan)
        for i, (job, told) in enumerate(zip(jobs, progress, strict=True)):
            if isinstance(told, Track):
                steps = self.expected_steps(job, told.amount) if told.by_steps else 0.0
                fractions[i], totals[i] = told.fraction(steps), told.total_s(steps)
            elif told is not None and 0.0 < told <= 1.0:
                fractions[i] = told
        return ages, grid.with_progress(curves, ages, fractions, totals)

    def expected_steps(self, job: Features, done: float) -> float:
        """Steps that a job which has done so many will have done at its end; 0: nothing is known."""
        return 0.0


def ages_of(ages_s: Sequence[float] | Floats) -> Floats:
    """Times as they are, anything else as 0."""
    ages = np.asarray(ages_s, np.float64)
    return np.where((ages > 0) & (ages < grid.LONGEST_S**2), ages, 0.0)
