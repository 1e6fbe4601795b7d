"""Speeds per GPU type learned from progress reports."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from core_builder import Pool, reloaded, stored

from streamsched.core import events as ev
from streamsched.core.instructions import SolveWindow
from streamsched.core.model import Job, JobSpec, JobState, Rate
from streamsched.core.speeds import PRIOR_JOBS, Speeds


def two_types() -> Pool:
    pool = Pool()
    pool.node("fast0", 8, "A100")
    pool.node("slow0", 8, "K80")
    return pool


def report(pool: Pool, job_id: str, step: int, after_s: float = 20.0, **more: Any) -> None:
    pool.later(after_s)
    pool.report(ev.RunProgressed, job_id, time=pool.now, step=step, **more)


def run_at(pool: Pool, job_id: str, gpu_type: str, steps_per_s: int, family: str = "resnet") -> None:
    """A job of the family that runs on that type and reports steps."""
    pool.arrive(job_id, gpu_types=(gpu_type,), labels={"family": family})
    pool.running(job_id)
    report(pool, job_id, 0)
    report(pool, job_id, 20 * steps_per_s)


def speeds_of(pool: Pool, **more: Any) -> dict[str, float]:
    """What the window would tell of a job that is new."""
    pool.arrive("asked", **more)
    (window,) = (i for i in pool.window() if isinstance(i, SolveWindow))
    return dict(next(c.speeds for c in window.problem.candidates if c.job_id == "asked"))


def test_a_family_that_was_seen_on_two_types_is_asked_for_the_faster_one() -> None:
    pool = two_types()
    for n in range(3):
        run_at(pool, f"f{n}", "A100", 40)
        run_at(pool, f"s{n}", "K80", 10)
    speeds = speeds_of(pool, labels={"family": "resnet"})
    assert 1.5 < speeds["A100"] / speeds["K80"] < 4.0  # four times as fast, less what the prior holds back


def test_more_jobs_bring_it_nearer_to_what_was_measured() -> None:
    ratios = []
    for jobs in (1, 4, 40):
        speeds = Speeds()
        for n in range(jobs):
            speeds.job(job(f"f{n}", Rate("A100", "step", 400)))
            speeds.job(job(f"s{n}", Rate("K80", "step", 300)))
        of = speeds.of(job("x").spec)
        ratios.append(of["A100"] / of["K80"])
    assert 1.0 < ratios[0] < ratios[1] < ratios[2] == pytest.approx(math.e, rel=0.12)


def test_a_new_family_is_thought_to_be_as_fast_as_the_others() -> None:
    speeds = Speeds()
    for n in range(20):
        speeds.job(job(f"f{n}", Rate("A100", "step", 500), f"family{n % 4}"))
        speeds.job(job(f"s{n}", Rate("K80", "step", 300), f"family{n % 4}"))
    of = speeds.of(job("x", family="never seen").spec)
    assert of["A100"] / of["K80"] == pytest.approx(math.exp(2 * 20 / (20 + PRIOR_JOBS)), rel=0.12)


def test_a_family_of_its_own_kind_is_told_apart_from_the_others() -> None:
    """Bound by its input, it gains nothing from a GPU that all others like."""
    speeds = Speeds()
    for n in range(30):
        for family, on_fast in (("vision", 500), ("speech", 480), ("loader", 300)):
            speeds.job(job(f"{family}f{n}", Rate("A100", "step", on_fast), family))
            speeds.job(job(f"{family}s{n}", Rate("K80", "step", 300), family))
    vision, loader = speeds.of(job("x", family="vision").spec), speeds.of(job("x", family="loader").spec)
    assert vision["A100"] / vision["K80"] > 5.0
    assert loader["A100"] / loader["K80"] == pytest.approx(1.0, abs=0.3)


def test_one_type_alone_tells_nothing() -> None:
    pool = two_types()
    run_at(pool, "a", "A100", 40)
    assert speeds_of(pool, labels={"family": "resnet"}) == {}


def test_what_the_job_says_itself_counts() -> None:
    pool = two_types()
    run_at(pool, "a", "A100", 40)
    run_at(pool, "b", "K80", 10)
    assert speeds_of(pool, labels={"family": "resnet"}, speeds={"K80": 2.0}) == {"K80": 2.0}


@pytest.mark.parametrize(
    ("second", "after_s"),
    [(900, 9.0), (100, 20.0), (50, 20.0)],
    ids=["too soon", "no step done", "back at a checkpoint"],
)
def test_reports_that_give_no_rate(second: int, after_s: float) -> None:
    pool = two_types()
    pool.arrive("a")
    pool.running("a")
    report(pool, "a", 100)
    report(pool, "a", second, after_s)
    assert pool.job("a").rate is None


def test_after_a_step_back_it_is_measured_from_there() -> None:
    pool = two_types()
    pool.arrive("a")
    pool.running("a")
    for step in (1000, 500, 700):
        report(pool, "a", step)
    assert pool.job("a").rate == Rate("A100", "step", round(100 * math.log(200 / 20)))


def test_a_run_on_two_types_tells_of_neither() -> None:
    pool = two_types()
    pool.arrive("a", 8, workers=2, mixed_types=True)
    pool.running("a")
    report(pool, "a", 0)
    report(pool, "a", 100)
    assert pool.job("a").rate is None


def test_rates_are_part_of_the_stored_state_and_go_with_their_job() -> None:
    pool = Pool(finished_keep_s=100.0)
    pool.node("fast0", 8, "A100")
    pool.node("slow0", 8, "K80")
    run_at(pool, "a", "A100", 40)
    run_at(pool, "b", "K80", 10)
    assert stored(reloaded(pool.state)) == stored(pool.state)
    assert reloaded(pool.state).index.speeds == pool.state.index.speeds
    assert pool.state.index.speeds.counted
    for job_id in ("a", "b"):
        pool.report(ev.RunCompleted, job_id)
    pool.later(101.0)
    pool.window()
    assert not pool.state.jobs
    assert pool.state.index.speeds == Speeds()


def test_the_order_in_which_jobs_are_counted_makes_no_difference() -> None:
    r = random.Random(1)
    jobs = [
        job(f"j{n}", Rate(r.choice("ABC"), r.choice(["step", "fraction"]), r.randint(-900, 900)), r.choice("xyz"))
        for n in range(200)
    ]
    one, other = Speeds(), Speeds()
    for each in jobs:
        one.job(each)
    r.shuffle(jobs)
    for each in [*jobs, *jobs[:50]]:
        other.job(each)
    assert one == other
    for family in "xyzw":
        assert one.of(job("q", family=family).spec) == other.of(job("q", family=family).spec)


def job(job_id: str, rate: Rate | None = None, family: str = "resnet") -> Job:
    spec = JobSpec(job_id=job_id, submitted_at=0.0, gpus_per_worker=1, labels={"family": family})
    return Job(spec=spec, seq=0, state=JobState.RUNNING, queued_at=0.0, rate=rate)
