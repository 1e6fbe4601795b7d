"""A predictor as the core's `RunTimes`. Answers are kept for a while: a window does not ask ten thousand curves.

What is believed of a job changes slowly. Its answer stands until `STANDS_S` have passed or it has run a tenth longer
or beyond the answer. Where one answer is due, others that are too are asked along with it: a thousand curves at once
cost little more than thirty one by one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import islice, takewhile
from typing import Final, NamedTuple

from streamsched.core.model import Job
from streamsched.core.run_times import RunTimes

from .combination import Combination
from .jobs import LEVELS, Features, Floats, features_of
from .predictor import Predictor, Progress
from .progress import Track

STANDS_S: Final = 60.0
_LONGER: Final = 1.1
_AT_ONCE: Final = 1_000
"""Curves made at once; also answers that are asked along at most."""


class Whole(NamedTuple):
    """What was said of a job's whole run time when it was submitted."""

    median_s: float
    spread: float
    """ln of the 95 % over the 5 % quantile, as models are trained on (`learn/judge.py`): both of them 1 s at least."""


Ask = Callable[[list[Features], list[float], list[Progress]], Floats]


class _Answer(NamedTuple):
    value: float
    asked_at: float
    features: Features
    ran_s: float
    """For which it was given."""
    until_s: float
    """It is refuted when the job has run so long."""


class Predicted(RunTimes):
    """`clock` gives s, never going back. `said` or `expect` when a job is submitted, `forget` when it is over."""

    def __init__(self, predictor: Predictor, clock: Callable[[], float]) -> None:
        self._whole: dict[str, Whole] = {}
        """What was said when the job was submitted, or asked about first."""
        self._totals = _Answers(self._ask_totals, clock, refutable=True)
        self._ranks = _Answers(self._ask_ranks, clock, refutable=False)
        self.predictor = predictor
        self.tracks: dict[str, Track] = {}
        """What running jobs have reported, by job."""

    def expect(self, jobs: Sequence[Features]) -> None:
        """All at once; those that are known stay as they are."""
        new = [job for job in jobs if job.job_id not in self._whole]
        for start in range(0, len(new), _AT_ONCE):
            part = new[start : start + _AT_ONCE]
            times = self.predictor.times(part, [0.0] * len(part), [None] * len(part))
            for job, quantiles in zip(part, times.quantiles_s, strict=True):
                self._whole[job.job_id] = _whole(quantiles)

    def said(self, wholes: Mapping[str, Whole]) -> None:
        """By job, what was said at its submission (`as_said`); jobs that are known stay as they are."""
        for job_id, whole in wholes.items():
            self._whole.setdefault(job_id, whole)

    def forget(self, job_id: str) -> None:
        self._whole.pop(job_id, None)
        self._totals.forget(job_id)
        self._ranks.forget(job_id)
        self.tracks.pop(job_id, None)

    def whole_s(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        return [whole.median_s for whole in self._wholes(jobs)]

    def spread(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        return [whole.spread for whole in self._wholes(jobs)]

    def _wholes(self, jobs: Sequence[Job]) -> list[Whole]:
        self.expect([features_of(job.spec) for job in jobs if job.spec.job_id not in self._whole])
        return [self._whole[job.spec.job_id] for job in jobs]

    def total_s(self, jobs: Sequence[Job], ran_s: Sequence[float]) -> Sequence[float | None]:
        return self._totals.of(jobs, ran_s, self.tracks)

    def gittins_s(self, jobs: Sequence[Job], ran_s: Sequence[float]) -> Sequence[float | None]:
        return self._ranks.of(jobs, ran_s, self.tracks)

    def _ask_totals(self, jobs: list[Features], ages_s: list[float], progress: list[Progress]) -> Floats:
        return self.predictor.times(jobs, ages_s, progress).total_median_s

    def _ask_ranks(self, jobs: list[Features], ages_s: list[float], progress: list[Progress]) -> Floats:
        return self.predictor.gittins_s(jobs, ages_s, progress)


class _Answers:
    """Of one kind, by job, those longest unasked first."""

    def __init__(self, ask: Ask, clock: Callable[[], float], refutable: bool) -> None:
        """`refutable`: answers are run times, which a job that runs longer proves wrong."""
        self._ask, self._clock, self._refutable = ask, clock, refutable
        self._of: OrderedDict[str, _Answer] = OrderedDict()

    def of(self, jobs: Sequence[Job], ran_s: Sequence[float], tracks: dict[str, Track]) -> list[float]:
        """[job]"""
        now = self._clock()
        due: dict[str, tuple[Features, float]] = {}
        old: list[tuple[float, str, float]] = []
        for job, ran in zip(jobs, ran_s, strict=True):
            answer = self._of.get(job.spec.job_id)
            if answer is None or ran > answer.until_s:
                due[job.spec.job_id] = (features_of(job.spec) if answer is None else answer.features, ran)
            elif now - answer.asked_at >= STANDS_S:
                old.append((answer.asked_at, job.spec.job_id, ran))
        # Those that were asked together fall due together: renewed a part at a time, no window waits for them all.
        due |= {job_id: (self._of[job_id].features, ran) for _, job_id, ran in nsmallest(_AT_ONCE, old)}
        if due:
            self._renew(due | self._along(due, now), now, tracks)
        return [self._of[job.spec.job_id].value for job in jobs]

    def _along(self, due: dict[str, tuple[Features, float]], now: float) -> dict[str, tuple[Features, float]]:
        """Those not asked about now are renewed for what they had run when they were."""
        room = max(0, _AT_ONCE - len(due))
        oldest = takewhile(lambda item: now - item[1].asked_at >= STANDS_S, islice(self._of.items(), room))
        return {job_id: (answer.features, answer.ran_s) for job_id, answer in oldest if job_id not in due}

    def _renew(self, due: dict[str, tuple[Features, float]], now: float, tracks: dict[str, Track]) -> None:
        features, ran_s = [job for job, _ in due.values()], [ran for _, ran in due.values()]
        values = _in_parts(self._ask, features, ran_s, [tracks.get(job_id) for job_id in due])
        for (job_id, (job, ran)), value in zip(due.items(), values, strict=True):
            longer = max(_LONGER * ran, 1.0)
            until = min(longer, max(value, ran)) if self._refutable else longer
            self._of[job_id] = _Answer(value, now, job, ran, until)
            self._of.move_to_end(job_id)

    def forget(self, job_id: str) -> None:
        self._of.pop(job_id, None)


def as_said(predictor: Combination, job_ids: Iterable[str]) -> dict[str, Whole]:
    """Of the whole run times, as they were said of those of these jobs that are expected."""
    expected = predictor.expected
    return {
        job_id: _whole([math.exp(told) for told in expected[job_id].answer]) for job_id in job_ids if job_id in expected
    }


def _whole(quantiles_s: Sequence[float] | Floats) -> Whole:
    """`quantiles_s`: [level]"""
    low, high = max(float(quantiles_s[0]), 1.0), max(float(quantiles_s[-1]), 1.0)
    return Whole(float(quantiles_s[len(LEVELS) // 2]), math.log(max(high / low, 1.0)))


def _in_parts(ask: Ask, jobs: list[Features], ages_s: list[float], progress: list[Progress]) -> list[float]:
    """A curve of each job is in memory, and several of what is made from it."""
    found: list[float] = []
    for start in range(0, len(jobs), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        found += ask(jobs[part], ages_s[part], progress[part]).tolist()
    return found
