"""The production core in virtual time against the compiled path: the same start times, ties included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sim_fast_properties import NODES, workloads

from streamsched.core.config import SchedulerConfig
from streamsched.policy import by_name
from streamsched.sim import fast
from streamsched.sim.simulator import SimOptions, SimResult, simulate
from streamsched.sim.workload import job, nodes_of

CORE_BACKFILLS = ("none", "skip")


def by_core(w: fast.Workload, nodes: list[int], rule: str, backfill: str, placement: str = "greedy") -> SimResult:
    columns = zip(w.submit_s.tolist(), w.run_s.tolist(), w.gpus.tolist(), w.estimate_s.tolist(), strict=True)
    jobs = [job(i, submit, run, gpus, estimate_s=estimate) for i, (submit, run, gpus, estimate) in enumerate(columns)]
    config = SchedulerConfig(policy=rule, backfill=backfill, reservations_max=0)  # type: ignore[arg-type]
    ranker = by_name(rule, origin_s=float(w.submit_s[0]))
    return simulate(jobs, nodes_of((1, gpus, "any") for gpus in nodes), config, ranker, SimOptions(placement=placement))


@pytest.mark.parametrize("backfill", CORE_BACKFILLS)
@pytest.mark.parametrize("rule", fast.RULES)
@given(w=workloads(), nodes=NODES)
@settings(max_examples=25)
def test_core_and_compiled_path_start_every_job_at_the_same_time(
    rule: str, backfill: str, w: fast.Workload, nodes: list[int]
) -> None:
    lived = by_core(w, nodes, rule, backfill).jobs
    expected = fast.simulate(w, nodes, rule, backfill)
    starts = [np.nan if one.first_start_s is None else one.first_start_s for one in lived]
    ends = [np.nan if one.finish_s is None else one.finish_s for one in lived]
    assert starts == pytest.approx(expected.start_s.tolist(), abs=0.0, nan_ok=True)
    assert ends == pytest.approx(expected.finish_s.tolist(), abs=0.0, nan_ok=True)


@given(
    w=workloads(), nodes=NODES, backfill=st.sampled_from(CORE_BACKFILLS), placement=st.sampled_from(["greedy", "milp"])
)
@settings(max_examples=30)
def test_what_holds_in_every_simulation(w: fast.Workload, nodes: list[int], backfill: str, placement: str) -> None:
    result = by_core(w, nodes, "fcfs", backfill, placement)
    for one in result.jobs:
        spec = one.job.spec
        if one.first_start_s is None:
            assert one.reason.startswith("can never fit")
            continue
        assert one.finish_s is not None
        assert one.first_start_s >= spec.submitted_at
        assert one.finish_s == one.first_start_s + one.job.run_s
        assert one.wait_s == pytest.approx(one.first_start_s - spec.submitted_at, abs=1e-9)
    assert all(0 <= moment.busy_gpus <= sum(nodes) for moment in result.moments)
    assert result.moments[-1].busy_gpus == 0
