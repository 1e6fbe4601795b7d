"""A trace in the order of events, so that a predictor is asked with what was known then and nothing else.

At each moment: first all that had ended by it is observed, then questions are asked. A question is a job at its
submission (age 0) or, where wanted, at an age that it reached while it ran. Questions between two ends are answered
from the same history, so they are put together.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .jobs import Finished


@dataclass(frozen=True, slots=True)
class Moment:
    """Jobs by their place in the trace."""

    now_s: float
    """Of the first question."""
    ended: tuple[int, ...]
    """Since the moment before, in the order of their ends; all by `now_s`."""
    asked: tuple[tuple[int, float], ...]
    """(job, its age in s)."""
    running: Mapping[int, float]
    """Job -> when it started, of those that run at `now_s`. Valid until the next moment."""


def moments(
    jobs: Sequence[Finished],
    starts_s: Sequence[float],
    ages_s: Sequence[float] = (),
    batch_max: int = 256,
    batch_s: float = 3_600.0,
) -> Iterator[Moment]:
    """`starts_s`: when each job started; it ended at its `ended_at`. A moment spans at most `batch_s`."""
    ends = sorted((_end_s(job), number) for number, job in enumerate(jobs))
    starts = sorted((start, number) for number, start in enumerate(starts_s))
    questions = _questions(jobs, starts_s, ages_s)
    running: dict[int, float] = {}
    ended = started = 0
    question = next(questions, None)
    while question is not None:
        now = question[0]
        gone = []
        while ended < len(ends) and ends[ended][0] <= now:
            gone.append(ends[ended][1])
            running.pop(gone[-1], None)
            ended += 1
        while started < len(starts) and starts[started][0] <= now:
            start, number = starts[started]
            if _end_s(jobs[number]) > now:
                running[number] = start
            started += 1
        until = min(ends[ended][0] if ended < len(ends) else math.inf, now + batch_s)
        asked: list[tuple[int, float]] = []
        while question is not None and len(asked) < batch_max and (question[0] < until or not asked):
            asked.append((question[1], question[2]))
            question = next(questions, None)
        yield Moment(now, tuple(gone), tuple(asked), running)


def _end_s(job: Finished) -> float:
    """A job that takes no time still ends after it was submitted."""
    submitted = job.features.submitted_at
    return job.ended_at if job.ended_at > submitted else math.nextafter(submitted, math.inf)


def _questions(
    jobs: Sequence[Finished], starts_s: Sequence[float], ages_s: Sequence[float]
) -> Iterator[tuple[float, int, float]]:
    """(when, job, age), in order."""
    streams = [sorted((job.features.submitted_at, number, 0.0) for number, job in enumerate(jobs))]
    for age in ages_s:
        reached = (number for number, job in enumerate(jobs) if starts_s[number] + age < _end_s(job))
        streams.append(sorted((starts_s[number] + age, number, age) for number in reached))
    return heapq.merge(*streams)
