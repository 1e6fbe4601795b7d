"""Nodes kept for jobs that have waited too long, compiled and in the production core."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsched.core.config import SchedulerConfig
from streamsched.core.window import Ranker
from streamsched.policy.expression import ByExpression, parse
from streamsched.policy.features import FEATURES
from streamsched.policy.network import ByNetwork, Network, weights_of
from streamsched.sim.fast import Outcome, Workload
from streamsched.sim.scored import Instance, episode, simulate_expression
from streamsched.sim.simulator import simulate as simulate_core
from streamsched.sim.workload import job, nodes_of

AFTER_S = 50.0
LOW, HIGH = np.array([(feature.low, feature.high) for feature in FEATURES]).T.copy()
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


def by_core(jobs: Workload, nodes: list[int], ranker: Ranker, most: int, window_jobs: int = 64) -> list[float | None]:
    columns = zip(jobs.submit_s.tolist(), jobs.duration_s.tolist(), jobs.gpus.tolist(), strict=True)
    told = [
        job(i, submit, run, gpus, estimate_s=run, whole=max(nodes)) for i, (submit, run, gpus) in enumerate(columns)
    ]
    config = SchedulerConfig(policy="mine", reserve_after_s=AFTER_S, reservations_max=most, window_jobs=window_jobs)
    done = simulate_core(told, nodes_of((1, gpus, "any") for gpus in nodes), config, ranker)
    return [one.first_start_s for one in done.jobs]


def compiled(jobs: Workload, nodes: list[int], order: str, most: int) -> Outcome:
    instance = Instance(jobs, nodes, reserve_after_s=AFTER_S, reservations_max=most)
    return simulate_expression(instance, parse(order))


def most_of_one_job(nodes: list[int]) -> int:
    """GPUs: as many workers as there are largest nodes, and one that is smaller on the next."""
    whole = max(nodes)
    return whole * nodes.count(whole) + max((size for size in nodes if size < whole), default=0)


CASES = st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=6).flatmap(
    lambda nodes: st.tuples(crowds(most_of_one_job(nodes)), st.just(nodes))
)


@given(case=CASES, order=st.sampled_from(ORDERS), most=st.integers(1, 4))
def test_the_core_starts_every_job_at_the_same_time(case: tuple[Workload, list[int]], order: str, most: int) -> None:
    """A job that starts elsewhere gives its nodes back when the window is over, not in the midst of it."""
    jobs, nodes = case
    ranker = ByExpression("mine", parse(order))
    assert compiled(jobs, nodes, order, most).start_s.tolist() == by_core(jobs, nodes, ranker, most)


@given(case=CASES, seed=st.integers(0, 9), most=st.integers(1, 4))
def test_an_episode_at_temperature_0_is_what_the_core_does_one_job_at_a_time(
    case: tuple[Workload, list[int]], seed: int, most: int
) -> None:
    """All that wait can be chosen."""
    jobs, nodes = case
    sizes = (len(FEATURES), 1)
    weights = np.random.default_rng(seed).normal(0.0, 1.0, weights_of(sizes)).astype(np.float32)
    network = Network(sizes, weights, LOW, HIGH)
    instance = Instance(jobs, nodes, reserve_after_s=AFTER_S, reservations_max=most)
    found = episode(instance, network, 0, len(jobs), temperature=0.0)
    assert found.outcome.start_s.tolist() == by_core(jobs, nodes, ByNetwork("mine", network), most, window_jobs=1)


@given(jobs=crowds(20), order=st.sampled_from(ORDERS), most=st.integers(1, 4))
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
