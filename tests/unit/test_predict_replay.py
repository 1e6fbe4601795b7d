"""Nothing is learned before it has happened: at every question the predictor has seen what had ended, and all of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from msgspec.structs import replace
from predict_jobs import finished

from streamsched.predict import Combination, Features, Finished
from streamsched.predict.replay import Moment, moments

Replay = Callable[[Sequence[Finished], Sequence[float]], Iterator[Moment]]


def trace(jobs: int = 120, seed: int = 4) -> tuple[list[Finished], list[float]]:
    """Waits, equal times, jobs of no length; run times from seconds to hours, so that ends are out of order."""
    draw, at, rows, starts = random.Random(seed), 0.0, [], []
    for number in range(jobs):
        at += draw.choice([0.0, 1.0, 30.0, 600.0])
        run_s = draw.choice([0.0, 1.0, 60.0, 900.0, 20_000.0])
        starts.append(at + draw.choice([0.0, 0.0, 45.0]))
        job = finished(run_s, f"job-{'abc'[number % 3]}", user=f"u{number % 4}", job_id=f"j{number}", submitted_at=at)
        rows.append(replace(job, ended_at=starts[-1] + run_s))
    return rows, starts


class Spy:
    """Checks each question against the trace itself."""

    def __init__(self, jobs: Sequence[Finished]) -> None:
        self.jobs = jobs
        self.observed: set[int] = set()
        self.leaks = 0
        self.missed = 0

    def observe(self, number: int) -> None:
        self.observed.add(number)

    def ask(self, number: int, at_s: float) -> None:
        self.leaks += sum(self.jobs[i].ended_at > at_s for i in self.observed) + (number in self.observed)
        submitted = (i for i, job in enumerate(self.jobs) if job.features.submitted_at < at_s)
        self.missed += sum(self.jobs[i].ended_at <= at_s and i not in self.observed for i in submitted)


def spied(replay: Replay, ages: bool = False) -> Spy:
    jobs, starts = trace()
    spy = Spy(jobs)
    for moment in replay(jobs, starts):
        for number in moment.ended:
            spy.observe(number)
        for number, age_s in moment.asked:
            spy.ask(number, starts[number] + age_s if age_s else jobs[number].features.submitted_at)
    return spy


def leaking(jobs: Sequence[Finished], starts: Sequence[float]) -> Iterator[Moment]:
    """Learns from a job when it is submitted, as a replay in the order of the file would."""
    for number, job in enumerate(jobs):
        yield Moment(job.features.submitted_at, (number - 1,) if number else (), ((number, 0.0),), {})


def test_what_had_ended_and_nothing_else_was_observed_at_each_question() -> None:
    spy = spied(moments)
    assert (spy.leaks, spy.missed) == (0, 0)
    assert len(spy.observed) > 50


def test_at_ages_of_running_jobs_too() -> None:
    spy = spied(lambda jobs, starts: moments(jobs, starts, (10.0, 500.0), batch_max=5))
    assert (spy.leaks, spy.missed) == (0, 0)


def test_the_spy_sees_a_replay_that_leaks() -> None:
    assert spied(leaking).leaks > 0


def test_every_job_is_asked_about_once_at_its_submission_and_at_each_age_it_reached() -> None:
    jobs, starts = trace()
    asked = [question for moment in moments(jobs, starts, (100.0,)) for question in moment.asked]
    assert sorted(number for number, age_s in asked if not age_s) == list(range(len(jobs)))
    assert {number for number, age_s in asked if age_s} == {i for i, job in enumerate(jobs) if job.run_s > 100.0}


def test_what_runs_is_what_has_started_and_not_ended() -> None:
    jobs, starts = trace()
    seen = 0
    for moment in moments(jobs, starts):
        seen += len(moment.running)
        for number, start in moment.running.items():
            assert start == starts[number] <= moment.now_s
            assert moment.now_s < jobs[number].ended_at or jobs[number].run_s == 0
    assert seen > 0


def answers_until(jobs: list[Finished], starts: list[float], until_s: float, replay: Replay) -> list[object]:
    predictor, out = Combination(), list[object]()
    for moment in replay(jobs, starts):
        if moment.now_s >= until_s:
            break
        for number in moment.ended:
            predictor.observe(jobs[number])
        features = [jobs[number].features for number, _ in moment.asked]
        out += predictor.predict_many(features)
        predictor.expect(features)
    return out


@pytest.mark.parametrize(("replay", "same"), [(moments, True), (leaking, False)])
def test_another_future_does_not_change_a_prediction(replay: Replay, same: bool) -> None:
    """Everything that ends after a moment runs as long again: what was said until then is the same, unless it leaks."""
    jobs, starts = trace(60)
    until = jobs[40].features.submitted_at
    other = [
        replace(job, run_s=2 * job.run_s, ended_at=job.ended_at + job.run_s) if job.ended_at > until else job
        for job in jobs
    ]
    first, second = (answers_until(rows, starts, until, replay) for rows in (jobs, other))
    count = min(len(first), len(second))
    assert count > 20
    assert (first[:count] == second[:count]) is same


def test_rows_for_training_hold_what_was_known_at_submission() -> None:
    from streamsched.predict.training import rows_of

    jobs, _ = trace(80)
    cut = jobs[50].features.submitted_at
    other = [replace(job, run_s=3 * job.run_s + 7) if job.ended_at > cut else job for job in jobs]
    rows, changed = rows_of(jobs)[0], rows_of(other)[0]
    until = sum(job.features.submitted_at <= cut for job in jobs)
    assert np.array_equal(rows[:until], changed[:until])
    assert not np.array_equal(rows, changed)
    assert isinstance(jobs[0].features, Features)
