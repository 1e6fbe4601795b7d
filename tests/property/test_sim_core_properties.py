"""The production core in virtual time against the compiled path: the same start times, ties included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sim_fast_properties import cases

from streamsched.core.config import SchedulerConfig
from streamsched.policy import by_name
from streamsched.sim import fast
from streamsched.sim.simulator import SimOptions, SimResult, simulate
from streamsched.sim.workload import job, nodes_of

CORE_BACKFILLS = tuple(fast.Backfill)
Case = tuple[fast.Workload, list[int]]


def by_core(case: Case, rule: str, backfill: fast.Backfill, placement: str = "greedy") -> SimResult:
    w, nodes = case
    assert w.estimate_s is not None
    columns = zip(w.submit_s.tolist(), w.duration_s.tolist(), w.gpus.tolist(), w.estimate_s.tolist(), strict=True)
    jobs = [
        job(i, submit, run, gpus, estimate_s=estimate, whole=max(nodes))
        for i, (submit, run, gpus, estimate) in enumerate(columns)
    ]
    name = backfill.name.lower()
    config = SchedulerConfig(policy=rule, backfill=name, reservations_max=0)  # type: ignore[arg-type]
    ranker = by_name(rule, origin_s=float(w.submit_s[0]))
    return simulate(jobs, nodes_of((1, gpus, "any") for gpus in nodes), config, ranker, SimOptions(placement=placement))


@pytest.mark.parametrize("backfill", CORE_BACKFILLS, ids=lambda backfill: backfill.name.lower())
@pytest.mark.parametrize("rule", list(fast.Rule), ids=lambda rule: rule.name.lower())
@given(case=cases())
@settings(max_examples=25)
def test_core_and_compiled_path_start_every_job_at_the_same_time(
    rule: fast.Rule, backfill: fast.Backfill, case: Case
) -> None:
    lived = by_core(case, rule.name.lower(), backfill).jobs
    expected = fast.simulate(*case, rule, backfill)
    assert [one.first_start_s for one in lived] == expected.start_s.tolist()
    assert [one.finish_s for one in lived] == expected.finish_s.tolist()


@given(case=cases(), backfill=st.sampled_from(CORE_BACKFILLS), placement=st.sampled_from(["greedy", "milp"]))
@settings(max_examples=30)
def test_what_holds_in_every_simulation(case: Case, backfill: fast.Backfill, placement: str) -> None:
    result = by_core(case, "fcfs", backfill, placement)
    for one in result.jobs:
        spec = one.job.spec
        assert one.first_start_s is not None
        assert one.finish_s is not None
        assert one.first_start_s >= spec.submitted_at
        assert one.finish_s == one.first_start_s + one.job.run_s
        assert one.wait_s == pytest.approx(one.first_start_s - spec.submitted_at, abs=1e-9)
    assert all(0 <= moment.busy_gpus <= sum(case[1]) for moment in result.moments)
    assert result.moments[-1].busy_gpus == 0
    _littles_law(result)


def _littles_law(result: SimResult) -> None:
    """The integral of the number of waiting jobs over time is the sum of the waits."""
    times = np.array([moment.time_s for moment in result.moments])
    queued = np.array([moment.queued for moment in result.moments])
    waited = sum((one.first_start_s or 0.0) - one.job.spec.submitted_at for one in result.jobs)
    assert float(np.sum(np.diff(times) * queued[:-1])) == pytest.approx(waited, abs=1e-6)
