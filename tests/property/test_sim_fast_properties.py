"""The compiled path against the plain reference: the same start times to the last bit, for every rule and backfill."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_reference import RefJob
from sim_reference import simulate as by_reference

from streamsched.policy.formulas import FORMULAS
from streamsched.sim.fast import BACKFILLS, RULES, Outcome, Workload, as_jobs, simulate


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Few distinct times and run times, so that much happens at one moment and scores tie."""
    n = draw(st.integers(1, 24))
    times = st.sampled_from([0.0, 1.0, 1.0, 2.5, 4.0, 9.0, 30.0])
    submit = np.sort(np.array(draw(st.lists(times, min_size=n, max_size=n)), dtype=np.float64))
    run = np.array(draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0, 11.0, 40.0]), min_size=n, max_size=n)))
    gpus = np.array(draw(st.lists(st.sampled_from([1, 1, 2, 3, 4, 8, 8, 12, 16, 24]), min_size=n, max_size=n)))
    wrong = draw(st.lists(st.sampled_from([1.0, 1.0, 0.2, 3.0]), min_size=n, max_size=n))
    return Workload(submit, run, gpus.astype(np.int64), run * np.array(wrong))


NODES = st.lists(st.sampled_from([2, 4, 8, 8, 8]), min_size=1, max_size=4)


def lower_first(rule: str, workload: Workload):  # type: ignore[no-untyped-def]
    """By the formula, of all jobs at once."""

    def score(job: RefJob, now: float) -> float:
        return float(FORMULAS[rule](as_jobs(workload), now)[job.number])

    return score


@pytest.mark.parametrize("backfill", BACKFILLS)
@pytest.mark.parametrize("rule", RULES)
@given(w=workloads(), nodes=NODES)
@settings(max_examples=60)
def test_it_starts_every_job_when_the_reference_does(rule: str, backfill: str, w: Workload, nodes: list[int]) -> None:
    jobs = [
        RefJob(i, *map(float, (w.submit_s[i], w.run_s[i])), int(w.gpus[i]), float(w.estimate_s[i]))
        for i in range(len(w.gpus))
    ]
    expected = by_reference(jobs, nodes, lower_first(rule, w), backfill)
    assert simulate(w, nodes, rule, backfill).start_s.tolist() == pytest.approx(expected, abs=0.0, nan_ok=True)


@given(w=workloads(), nodes=NODES, rule=st.sampled_from(RULES), backfill=st.sampled_from(BACKFILLS))
@settings(max_examples=150)
def test_what_holds_in_every_schedule(w: Workload, nodes: list[int], rule: str, backfill: str) -> None:
    outcome = simulate(w, nodes, rule, backfill)
    placed = ~np.isnan(outcome.start_s)
    assert np.all(outcome.start_s[placed] >= w.submit_s[placed])
    assert np.array_equal(outcome.finish_s[placed], (outcome.start_s + w.run_s)[placed])
    capacity = sum(nodes)
    for moment in outcome.start_s[placed]:
        busy = placed & (outcome.start_s <= moment) & (outcome.finish_s > moment)
        assert int(w.gpus[busy].sum()) <= capacity
    _littles_law(w, outcome)


def _littles_law(w: Workload, outcome: Outcome) -> None:
    """The integral of the number of waiting jobs over time is the sum of the waits."""
    placed = ~np.isnan(outcome.start_s)
    steps = sorted([(t, 1) for t in w.submit_s[placed]] + [(t, -1) for t in outcome.start_s[placed]])
    integral, length, last = 0.0, 0, steps[0][0] if steps else 0.0
    for moment, change in steps:
        integral += length * (moment - last)
        length, last = length + change, moment
    assert length == 0
    assert integral == pytest.approx(math.fsum(outcome.start_s[placed] - w.submit_s[placed]), abs=1e-6)


@given(w=workloads(), gpus=st.sampled_from([8]), count=st.integers(1, 4), rule=st.sampled_from(RULES))
@settings(max_examples=100)
def test_no_gpus_idle_while_a_job_that_fits_waits(w: Workload, gpus: int, count: int, rule: str) -> None:
    """Work conservation of `skip`, for jobs of one GPU, which fit wherever one is free."""
    w = Workload(w.submit_s, w.run_s, np.ones_like(w.gpus), w.estimate_s)
    outcome = simulate(w, [gpus] * count, rule, "skip")
    for moment in {*w.submit_s.tolist(), *outcome.finish_s.tolist()}:
        waiting = np.any((w.submit_s <= moment) & (outcome.start_s > moment))
        busy = int(np.sum((outcome.start_s <= moment) & (outcome.finish_s > moment)))
        assert not waiting or busy == gpus * count
