"""A predictor as the core asks it: what is asked anew, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from streamsched.core.model import Job, JobSpec, JobState
from streamsched.predict import Features, Finished
from streamsched.predict.curves import EDGES_S
from streamsched.predict.jobs import Floats
from streamsched.predict.predictor import Predictor
from streamsched.predict.progress import Track, reading_of
from streamsched.predict.run_times import STANDS_S, Predicted


class Uniform(Predictor):
    """Every run time below 2^16 s is equally likely; notes how many jobs it is asked about at once."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def observe(self, job: Finished) -> None:
        raise NotImplementedError

    def curves(self, jobs: Sequence[Features]) -> Floats:
        self.asked.append(len(jobs))
        return np.tile(np.maximum(1.0 - (EDGES_S - 1.0) / 65_535.0, 0.0), (len(jobs), 1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def job(name: str) -> Job:
    spec = JobSpec(job_id=name, submitted_at=0.0, gpus_per_worker=1)
    return Job(spec=spec, seq=0, state=JobState.QUEUED, queued_at=0.0)


@pytest.fixture
def told() -> tuple[Predicted, Uniform, Clock]:
    predictor, clock = Uniform(), Clock()
    return Predicted(predictor, clock), predictor, clock


def test_many_jobs_are_one_question_and_an_answer_stands_for_a_while(told: tuple[Predicted, Uniform, Clock]) -> None:
    times, predictor, clock = told
    jobs = [job(f"j{n}") for n in range(50)]
    first = times.total_s(jobs, [0.0] * 50)
    assert first == pytest.approx([32_768] * 50, rel=0.1)
    clock.now = STANDS_S - 1.0
    assert times.total_s(jobs, [0.0] * 50) == first
    assert predictor.asked == [50]
    clock.now = STANDS_S
    times.total_s(jobs, [0.0] * 50)
    assert predictor.asked == [50, 50]


def test_who_is_asked_about_alone_takes_along_those_that_are_due(told: tuple[Predicted, Uniform, Clock]) -> None:
    times, predictor, clock = told
    jobs = [job(f"j{n}") for n in range(50)]
    times.remaining_s(jobs, [0.0] * 50)
    clock.now = STANDS_S
    for each in jobs:
        times.remaining_s([each], [0.0])
    assert predictor.asked == [50, 50]


def test_a_job_that_runs_on_is_asked_about_sooner(told: tuple[Predicted, Uniform, Clock]) -> None:
    times, predictor, _ = told
    one = job("a")
    [at_first] = times.remaining_s([one], [10_000.0])
    [a_little_later] = times.remaining_s([one], [10_900.0])
    assert at_first is not None
    assert a_little_later == at_first - 900
    assert len(predictor.asked) == 1
    [later] = times.total_s([one], [11_500.0])
    assert later is not None
    assert later > 10_000 + at_first
    assert len(predictor.asked) == 2
    times.gittins_s([one], [11_500.0])
    times.gittins_s([one], [12_000.0])
    assert len(predictor.asked) == 3


def test_an_answer_that_the_job_outlived_is_no_answer(told: tuple[Predicted, Uniform, Clock]) -> None:
    times, predictor, _ = told
    one = job("a")
    times.tracks["a"] = Track()
    times.tracks["a"].add(reading_of(fraction=0.99), 20_000.0)
    [total] = times.total_s([one], [20_000.0])
    assert total == pytest.approx(20_200, rel=0.05)
    times.total_s([one], [total + 1.0])
    assert len(predictor.asked) == 2


def test_what_was_said_first_stays_until_the_job_is_over(told: tuple[Predicted, Uniform, Clock]) -> None:
    times, predictor, clock = told
    times.expect([Features(gpus=1, job_id="a")])
    clock.now = 1e6
    [whole] = times.whole_s([job("a")])
    assert whole == pytest.approx(32_768, rel=0.1)
    assert predictor.asked == [1]
    [spread] = times.spread([job("a")])
    assert spread == pytest.approx(math.log(0.95 / 0.05), rel=0.1)  # uniform up to 65,536 s
    times.forget("a")
    times.whole_s([job("a")])
    assert predictor.asked == [1, 1]


def test_of_many_old_answers_a_part_is_renewed_at_a_time_the_oldest_first(
    told: tuple[Predicted, Uniform, Clock],
) -> None:
    times, predictor, clock = told
    jobs = [job(f"j{n}") for n in range(2_500)]
    times.total_s(jobs, [0.0] * 2_500)
    assert sum(predictor.asked) == 2_500
    for window in range(3):
        clock.now = STANDS_S + window
        times.total_s(jobs, [0.0] * 2_500)
    assert predictor.asked[3:] == [1_000, 1_000, 500]
