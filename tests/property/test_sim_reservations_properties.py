"""Nodes kept for jobs that have waited too long, compiled and in the production core."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamsched.core.config import SchedulerConfig
from streamsched.policy.expression import ByExpression, parse
from streamsched.sim.fast import Outcome, Workload
from streamsched.sim.scored import Instance, simulate_expression
from streamsched.sim.simulator import simulate as simulate_core
from streamsched.sim.workload import job, nodes_of

AFTER_S = 50.0
ORDERS = ("wait_s", "-run_s", "-gpus", "gpus * wait_s - run_s")


@st.composite
def crowds(draw: st.DrawFn, gpus_max: int) -> Workload:
    """More work than there is room for, so that jobs wait too long."""
    count = draw(st.integers(2, 25))
    gaps = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    runs = draw(st.lists(st.integers(1, 120), min_size=count, max_size=count))
    gpus = draw(st.lists(st.integers(1, gpus_max), min_size=count, max_size=count))
    run_s = np.array(runs, np.float64)
    return Workload(np.cumsum(gaps).astype(np.float64), run_s, np.array(gpus, np.int64), run_s)


def by_core(jobs: Workload, nodes: list[int], order: str, most: int) -> list[float | None]:
    columns = zip(jobs.submit_s.tolist(), jobs.duration_s.tolist(), jobs.gpus.tolist(), strict=True)
    told = [
        job(i, submit, run, gpus, estimate_s=run, whole=max(nodes)) for i, (submit, run, gpus) in enumerate(columns)
    ]
    config = SchedulerConfig(policy="mine", reserve_after_s=AFTER_S, reservations_max=most)
    done = simulate_core(told, nodes_of((1, gpus, "any") for gpus in nodes), config, ByExpression("mine", parse(order)))
    return [one.first_start_s for one in done.jobs]


def compiled(jobs: Workload, nodes: list[int], order: str, most: int) -> Outcome:
    instance = Instance(jobs, nodes, reserve_after_s=AFTER_S, reservations_max=most)
    return simulate_expression(instance, parse(order))


@given(jobs=crowds(8), order=st.sampled_from(ORDERS))
@settings(max_examples=60)
def test_on_one_node_the_core_starts_every_job_at_the_same_time(jobs: Workload, order: str) -> None:
    """With several nodes other ones of equals may be taken, and then drain at other times."""
    assert compiled(jobs, [8], order, 1).start_s.tolist() == by_core(jobs, [8], order, 1)


@given(jobs=crowds(20), order=st.sampled_from(ORDERS), most=st.integers(1, 4))
@settings(max_examples=60)
def test_nobody_is_on_a_node_with_more_than_it_has(jobs: Workload, order: str, most: int) -> None:
    nodes = [8, 8, 4]
    found = compiled(jobs, nodes, order, most)
    assert np.isfinite(found.start_s).all()
    for moment in np.unique(found.start_s):
        held = np.zeros(len(nodes), np.int64)
        for number in np.flatnonzero((found.start_s <= moment) & (moment < found.finish_s)):
            left = int(jobs.gpus[number])
            for node in found.placed[found.placed_at[number] : found.placed_at[number + 1]]:
                held[node] += min(left, 8)
                left -= 8
            assert left <= 0
        assert (held <= nodes).all()


def test_a_job_that_would_never_have_its_turn_has_it() -> None:
    """One that needs both nodes, and small ones that come without end."""
    count = 400
    submit = np.concatenate([[0.0, 0.0, 5.0], np.arange(count) * 10.0 + 10.0])
    gpus = np.concatenate([[4, 4, 8], np.full(count, 4)]).astype(np.int64)
    run = np.concatenate([[15.0, 20.0, 10.0], np.full(count, 20.0)])
    jobs = Workload(submit, run, gpus, run)
    never = simulate_expression(Instance(jobs, [4, 4]), parse("-run_s * 0 - gpus"))
    assert never.wait_s[2] > 3_000
    kept = compiled(jobs, [4, 4], "-run_s * 0 - gpus", 1)
    assert AFTER_S <= kept.wait_s[2] <= AFTER_S + 20.0


@pytest.mark.parametrize(("after_s", "most"), [(np.inf, 4), (1.0, 0)])
def test_without_reservations_nothing_is_kept(after_s: float, most: int) -> None:
    random = np.random.default_rng(1)
    run = random.exponential(100.0, 300)
    jobs = Workload(np.cumsum(random.exponential(8.0, 300)), run, random.integers(1, 17, 300), run)
    one = simulate_expression(Instance(jobs, [8, 8]), parse("-run_s"))
    other = simulate_expression(Instance(jobs, [8, 8], reserve_after_s=after_s, reservations_max=most), parse("-run_s"))
    assert one.start_s.tolist() == other.start_s.tolist()
    with pytest.raises(ValueError, match="at least 0"):
        Instance(jobs, [8, 8], reserve_after_s=-1.0)
