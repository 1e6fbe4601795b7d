"""Predictions in the compiled simulation: nothing is known before it has happened, and all that has is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace
from predict_jobs import finished

from loadgen.jobs import TraceJob
from streamsched.policy import gittins
from streamsched.predict import Combination, Ending, Features, Finished
from streamsched.predict import curves as grid
from streamsched.sim import foresight
from streamsched.sim.fast import Backfill, Floats, Preemption, Rule, simulate
from streamsched.sim.foresight import Foreseen, Policy, foresee, workload_of

NODES = [8, 8]
EPOCH_S = 3_600.0


def trace(jobs: int = 150, seed: int = 3, first: int = 0, begins: float = 0.0) -> list[Finished]:
    """More than two nodes can take at once, so that who starts when depends on what was foreseen."""
    draw, at, rows = random.Random(seed), begins, []
    for number in range(first, first + jobs):
        at += draw.choice([0.0, 5.0, 60.0, 500.0])
        user = draw.randrange(4)
        run_s = draw.choice([20.0, 300.0, 4_000.0]) * (1 + user)
        gpus = draw.choice([1, 2, 8, 12])
        rows.append(finished(run_s, user=f"u{user}", gpus=gpus, job_id=f"j{number}", submitted_at=at))
    return rows


POLICIES: dict[str, Policy] = {
    "sjf": foresight.by_estimate(NODES, Rule.SJF),
    "easy": foresight.by_estimate(NODES, Rule.FCFS, Backfill.EASY, foresight.mean_s),
    "gittins": foresight.by_service(NODES, foresight.gittins_per_gpu, Preemption(bound_s=20_000.0)),
    "median left": foresight.by_service(NODES, foresight.median_left),
    "mean left": foresight.by_service(NODES, foresight.mean_left_per_gpu, Preemption(move_after_s=600.0)),
    "asrpt": foresight.by_virtual_machine(NODES),
    "asrpt, released": foresight.by_virtual_machine(NODES, released=True),
    "asrpt, preemptive": foresight.by_virtual_machine(NODES, preemption=Preemption()),
}


def told_of(found: Foreseen, count: int) -> list[list[float]]:
    return found.told[found.kind[:count]].tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_what_comes_later_changes_no_prediction(name: str) -> None:
    """From a moment on other jobs come, and what had not ended by then runs longer than it did."""
    policy, jobs = POLICIES[name], trace()
    moment = 5 * EPOCH_S
    outcome, found = foresee(jobs, policy, epoch_s=EPOCH_S)
    before = [job for job in jobs if job.features.submitted_at < moment]
    assert 20 < len(before) < len(jobs)
    assert (outcome.finish_s[: len(before)] > moment).sum() > 3
    changed = [
        job if end <= moment else replace(job, run_s=job.run_s + 9_999.0)
        for job, end in zip(before, outcome.finish_s.tolist(), strict=False)
    ]
    later = trace(100, seed=8, first=1_000, begins=moment)
    others, found_then = foresee([*changed, *later], policy, epoch_s=EPOCH_S)
    assert told_of(found_then, len(before)) == told_of(found, len(before))
    started = outcome.start_s[: len(before)] < moment
    assert others.start_s[: len(before)][started].tolist() == outcome.start_s[: len(before)][started].tolist()


class Spy(Combination):
    """Writes down what it is told and asked."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: dict[str, Finished] = {}
        self.asked: list[tuple[str, set[str]]] = []
        """(job, those known to have ended)"""
        self.running: dict[str, float] = {}
        self.runs_told: list[dict[str, float]] = []

    def observe(self, job: Finished) -> None:
        self.ended[job.features.job_id] = job
        super().observe(job)

    def set_running(self, jobs: Sequence[Features], ages_s: Sequence[float]) -> None:
        self.runs_told.append({job.job_id: age for job, age in zip(jobs, ages_s, strict=True)})
        super().set_running(jobs, ages_s)

    def expect(self, jobs: Sequence[Features]) -> None:
        self.asked += [(job.job_id, set(self.ended)) for job in jobs]
        super().expect(jobs)


@pytest.mark.parametrize("name", POLICIES)
def test_at_each_epoch_all_that_had_ended_in_this_very_schedule_is_known(name: str) -> None:
    jobs, spy = trace(), Spy()
    outcome, _ = foresee(jobs, POLICIES[name], epoch_s=EPOCH_S, predictor=spy)
    ends = {job.features.job_id: end for job, end in zip(jobs, outcome.finish_s.tolist(), strict=True)}
    assert [job_id for job_id, _ in spy.asked] == [job.features.job_id for job in jobs]
    for job, (_, known) in zip(jobs, spy.asked, strict=True):
        epoch = math.floor((job.features.submitted_at - jobs[0].features.submitted_at) / EPOCH_S)
        now = jobs[0].features.submitted_at + epoch * EPOCH_S
        assert known == {other for other, end in ends.items() if end <= now}
    assert {job_id: job.ended_at for job_id, job in spy.ended.items()} == {key: ends[key] for key in spy.ended}
    observed = [job.ended_at for job in spy.ended.values()]
    assert observed == sorted(observed)


def test_running_jobs_are_told_with_their_ages() -> None:
    """One GPU: `a` runs from 0 to 5,000, so that after an hour it has had 3,600 and `b` nothing."""
    jobs = [finished(run_s, job_id=name, submitted_at=at) for name, run_s, at in
            [("a", 5_000.0, 0.0), ("b", 10.0, 60.0), ("c", 10.0, 4_000.0)]]  # fmt: skip
    spy = Spy()
    foresee(jobs, foresight.by_estimate([1], Rule.FCFS), epoch_s=EPOCH_S, predictor=spy)
    assert spy.runs_told == [{"a": 3_600.0}]


def test_history_is_learned_before_the_slice_and_what_still_ran_then_when_it_ends() -> None:
    """`old` ended before the first job came, `long` (8,000 s) ends between the second hour and the third."""
    history = [
        replace(finished(100.0, job_id="old", submitted_at=-5_000.0), ended_at=-4_900.0),
        replace(finished(8_000.0, job_id="long", submitted_at=-400.0), ended_at=7_600.0),
    ]
    jobs = [finished(10.0, job_id=f"j{hour}", submitted_at=hour * EPOCH_S) for hour in range(4)]
    spy = Spy()
    foresee(jobs, foresight.by_estimate([1], Rule.FCFS), history, EPOCH_S, predictor=spy)
    known = {job_id: ended - {"j0", "j1", "j2"} for job_id, ended in spy.asked}
    assert known == {
        "old": set(), "long": {"old"}, "j0": {"old"}, "j1": {"old"}, "j2": {"old"}, "j3": {"old", "long"},
    }  # fmt: skip
    assert spy.runs_told == [{"long": 4_000.0}, {"long": 7_600.0}, {}]


def test_frozen_nothing_is_learned_from_the_slice() -> None:
    jobs, spy = trace(), Spy()
    foresee(jobs, POLICIES["sjf"], [replace(finished(5.0, job_id="h"), ended_at=-1.0)], EPOCH_S, True, spy)
    assert set(spy.ended) == {"h"}
    assert all(known in (set(), {"h"}) for _, known in spy.asked)


def test_what_is_learned_helps() -> None:
    """Each user's jobs take about as long: SJF with what was learned waits less than one that was told nothing."""
    draw, at, jobs = random.Random(1), 0.0, []
    for number in range(400):
        at += draw.choice([60.0, 200.0])
        user = number % 4
        jobs.append(finished(10.0 * 8**user * draw.uniform(0.8, 1.2), user=f"u{user}", gpus=8, job_id=f"j{number}",
                             submitted_at=at))  # fmt: skip
    policy = foresight.by_estimate(NODES, Rule.SJF)
    learned, _ = foresee(jobs, policy, epoch_s=EPOCH_S)
    ignorant, _ = foresee(jobs, policy, frozen=True)
    oracle = simulate(workload_of(jobs).with_true_estimates(), NODES, Rule.SJF)
    assert oracle.mean_wait_s < learned.mean_wait_s < 0.7 * ignorant.mean_wait_s


def test_cut_runs_are_censored_and_equal_curves_are_one_kind() -> None:
    jobs = [
        finished(50.0, gpus=2, job_id=f"j{n}", submitted_at=float(n), ending=Ending.CLAMPED if n % 2 else Ending.FAILED)
        for n in range(10)
    ]
    read: list[int] = []

    def counted(curves: Floats, gpus: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
        read.append(len(curves))
        return foresight.median_s(curves, gpus)

    policy = foresight.by_estimate(NODES, Rule.FCFS, read=counted)
    _, found = foresee(jobs, policy, epoch_s=EPOCH_S)
    assert read == [1]
    assert found.kind.tolist() == [0] * 10


def test_releases_do_not_go_with_stopping() -> None:
    with pytest.raises(ValueError, match="does not stop"):
        foresight.by_virtual_machine(NODES, preemption=Preemption(), released=True)


def lognormal(median_s: float, sigma: float, count: int, seed: int = 1) -> Floats:
    return np.asarray(median_s * np.exp(sigma * np.random.default_rng(seed).standard_normal(count)))


@pytest.mark.parametrize(
    "run_s", [lognormal(600.0, 1.0, 4_000), lognormal(5_000.0, 2.0, 4_000)], ids=["narrow", "wide"]
)
def test_both_gittins_agree_on_one_set_of_run_times(run_s: Floats) -> None:
    """`policy.gittins` reckons with the run times themselves, `predict.curves` with bins of 12 %."""
    exact = gittins.ranks(run_s, np.zeros(len(run_s), bool), grid.EDGES_S[1:].tolist())
    ended = np.bincount([grid.bin_of(value) for value in run_s.tolist()], minlength=grid.BINS).astype(float)
    on_grid = grid.gittins_table_s(grid.kaplan_meier(ended, np.zeros(grid.BINS))[None, :])[0]
    # Beyond the 95 % quantile both follow the noise of few jobs.
    edges = slice(12, grid.bin_of(float(np.quantile(run_s, 0.95))))
    assert on_grid[edges] == pytest.approx(exact[edges], rel=0.1)


def test_before_the_slice_is_what_is_frozen_without_the_schedule() -> None:
    history, jobs = trace(200, seed=5), trace(80, seed=6, first=200, begins=200_000.0)
    policy = Policy(foresight.median_and_spread, lambda jobs, told: simulate(jobs, NODES))
    _, expected = foresee(jobs, policy, history, frozen=True)
    found = foresight.foreseen_before(jobs, history, foresight.median_and_spread)
    assert found.told.tolist() == expected.told.tolist()
    assert found.kind.tolist() == expected.kind.tolist()
    assert len(set(found.first.tolist())) > 1
    with pytest.raises(ValueError, match="not ascending"):
        foresight.foreseen_before(jobs[::-1], history, foresight.median_and_spread)


def test_median_and_spread_are_those_of_the_curve() -> None:
    curves = Combination().curves([Features(gpus=1), Features(gpus=2)])
    times, _ = grid.remaining(curves, np.zeros(2), (0.05, 0.5, 0.95))
    median, spread = foresight.median_and_spread(curves, np.array([1, 2])).T
    assert median.tolist() == times[:, 1].tolist()
    assert np.exp(spread) == pytest.approx(np.maximum(times[:, 2], 1.0) / np.maximum(times[:, 0], 1.0))
    assert (spread > 0).all()


@pytest.mark.parametrize(("queued_s", "ended_s"), [(None, 130.0), (20.0, 150.0)])
def test_a_job_of_a_trace_ends_after_its_wait_where_that_is_told(queued_s: float | None, ended_s: float) -> None:
    job = TraceJob(
        submit_s=100.0, duration_s=30.0, gpus=2, line=1, tenant="a", clamped=True, queued_s=queued_s, index=7
    )
    told = foresight.as_finished(job)
    assert (told.ended_at, told.run_s, told.ending) == (ended_s, 30.0, Ending.CLAMPED)
    assert told.features == Features(gpus=2, tenant="a", job_id="7", submitted_at=100.0)
    assert foresight.as_finished(replace(job, clamped=False)).ending is Ending.COMPLETED
