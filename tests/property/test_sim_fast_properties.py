"""The compiled simulation against plain Python, and what must hold of every schedule."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import sim_reference as reference
from hypothesis import example, given
from hypothesis import strategies as st

from streamsched.sim.fast import (
    Backfill,
    Index,
    Outcome,
    Preemption,
    Rule,
    Workload,
    fits_cluster,
    las_index,
    simulate,
    simulate_index,
    simulate_las,
    simulate_srtf,
)

RULES = st.sampled_from(list(Rule))
MODES = st.sampled_from(list(Backfill))
CLUSTERS = st.one_of(
    st.tuples(st.integers(1, 4), st.integers(1, 8)).map(lambda shape: [shape[1]] * shape[0]),
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
)
# Few distinct values, so that moments, scores and estimated ends coincide; some that do not; zero as well.
TIMES = st.one_of(st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0]), st.floats(0, 20, width=16))
DURATIONS = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 3.0, 10.0, 100.0]), st.floats(0, 50, width=16))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, list[int]]:
    """Up to 40 jobs, bursts and pauses, that all fit the empty cluster; estimates may be wrong either way."""
    nodes = draw(CLUSTERS)
    possible = [g for g in range(1, sum(nodes) + 1) if fits_cluster(np.array([g]), nodes)[0]]
    sizes = st.sampled_from(draw(st.lists(st.sampled_from(possible), min_size=1, max_size=6)))
    rows = draw(st.lists(st.tuples(TIMES, DURATIONS, sizes, DURATIONS), min_size=1, max_size=40))
    exact = draw(st.booleans())
    gaps, durations, gpus, estimates = (np.array(column) for column in zip(*rows, strict=True))
    gaps[0] = 0.0
    return Workload(np.cumsum(gaps), durations, gpus, durations if exact else estimates), nodes


def reference_jobs(jobs: Workload) -> list[reference.Job]:
    assert jobs.estimate_s is not None
    rows = zip(
        jobs.submit_s.tolist(), jobs.duration_s.tolist(), jobs.gpus.tolist(), jobs.estimate_s.tolist(), strict=True
    )
    return [reference.Job(seq, *row) for seq, row in enumerate(rows)]


def random_case(jobs: int, seed: int) -> tuple[Workload, list[int]]:
    """Longer than what Hypothesis draws: queues of dozens, whole-node gangs, wrong estimates."""
    draw = np.random.default_rng(seed)
    submit = np.floor(np.cumsum(draw.exponential(3.0, jobs)))
    duration = np.ceil(draw.lognormal(3.0, 1.5, jobs))
    gpus = draw.choice([1, 1, 1, 2, 4, 8, 12, 16, 20], jobs)
    estimate = np.ceil(duration * draw.lognormal(0.0, 0.7, jobs))
    return Workload(submit - submit[0], duration, gpus, estimate), [8, 8, 4, 8, 2]


@given(cases(), RULES, MODES)
@example(random_case(300, 1), Rule.FCFS, Backfill.EASY)
@example(random_case(300, 2), Rule.SJF, Backfill.EASY)
@example(random_case(300, 3), Rule.WFP3, Backfill.EASY)
@example(random_case(300, 4), Rule.F1, Backfill.SKIP)
@example(random_case(300, 5), Rule.UNICEP, Backfill.SKIP)
@example(random_case(300, 6), Rule.SAF, Backfill.NONE)
def test_every_job_starts_when_and_where_the_plain_reference_starts_it(
    case: tuple[Workload, list[int]], rule: Rule, mode: Backfill
) -> None:
    jobs, nodes = case
    plain = reference_jobs(jobs)
    starts = reference.simulate(plain, nodes, reference.score_of(rule.name.lower(), nodes), mode.name.lower())
    outcome = simulate(jobs, nodes, rule, mode)
    assert outcome.start_s.tolist() == starts
    assert outcome.finish_s.tolist() == [job.end for job in plain]
    assert nodes_of(outcome) == [[node for node, _ in job.placement] for job in plain]


@pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name.lower())
@pytest.mark.parametrize("mode", list(Backfill), ids=lambda mode: mode.name.lower())
def test_no_rule_and_no_mode_is_left_out_of_the_comparison(rule: Rule, mode: Backfill) -> None:
    jobs, nodes = random_case(150, seed=100 + 3 * rule + mode)
    starts = reference.simulate(
        reference_jobs(jobs), nodes, reference.score_of(rule.name.lower(), nodes), mode.name.lower()
    )
    assert simulate(jobs, nodes, rule, mode).start_s.tolist() == starts


@given(cases(), MODES, st.data())
def test_scores_of_ones_own_with_ties_are_followed(
    case: tuple[Workload, list[int]], mode: Backfill, data: st.DataObject
) -> None:
    jobs, nodes = case
    scores = data.draw(st.lists(st.sampled_from([-1.0, 0.0, -0.0, 2.5]), min_size=len(jobs), max_size=len(jobs)))
    starts = reference.simulate(reference_jobs(jobs), nodes, lambda job, now: scores[job.seq], mode.name.lower())
    assert simulate(jobs, nodes, np.array(scores), mode).start_s.tolist() == starts


@given(cases(), RULES, MODES)
def test_no_job_starts_before_it_arrives_and_each_runs_as_long_as_it_should(
    case: tuple[Workload, list[int]], rule: Rule, mode: Backfill
) -> None:
    jobs, nodes = case
    outcome = simulate(jobs, nodes, rule, mode)
    assert (outcome.start_s >= jobs.submit_s).all()
    assert (outcome.finish_s == outcome.start_s + jobs.duration_s).all()


@given(cases(), RULES, MODES)
def test_no_node_ever_has_more_gpus_in_use_than_it_has(
    case: tuple[Workload, list[int]], rule: Rule, mode: Backfill
) -> None:
    jobs, nodes = case
    outcome = simulate(jobs, nodes, rule, mode)
    taken = nodes_of(outcome)
    for now in outcome.start_s:
        used = np.zeros(len(nodes), np.int64)
        for job in np.flatnonzero((outcome.start_s <= now) & (outcome.finish_s > now)):
            assert len(set(taken[job])) == len(taken[job])
            for worker, node in enumerate(taken[job]):
                used[node] += min(max(nodes), jobs.gpus[job] - worker * max(nodes))
        assert (used <= nodes).all()


@given(cases(), RULES, MODES)
def test_littles_law_and_the_work_done(case: tuple[Workload, list[int]], rule: Rule, mode: Backfill) -> None:
    """The integral of the queue's length is the sum of all waits; that of the busy GPUs is the work."""
    jobs, nodes = case
    outcome = simulate(jobs, nodes, rule, mode)
    assert outcome.queue_job_s == pytest.approx(outcome.wait_s.sum(), rel=1e-9, abs=1e-6)
    assert outcome.busy_gpu_s == pytest.approx((jobs.gpus * jobs.duration_s).sum(), rel=1e-9, abs=1e-6)
    assert outcome.queue_max <= len(jobs)


@given(cases(), RULES)
def test_with_skipping_nothing_waits_that_fits(case: tuple[Workload, list[int]], rule: Rule) -> None:
    """At each moment after its pass, no waiting job would have found room."""
    jobs, nodes = case
    outcome = simulate(jobs, nodes, rule, Backfill.SKIP)
    taken = nodes_of(outcome)
    for now in np.unique(np.concatenate([outcome.start_s, outcome.finish_s, jobs.submit_s])):
        free = list(nodes)
        for job in np.flatnonzero((outcome.start_s <= now) & (outcome.finish_s > now)):
            for worker, node in enumerate(taken[job]):
                free[node] -= min(max(nodes), int(jobs.gpus[job]) - worker * max(nodes))
        for job in np.flatnonzero((jobs.submit_s <= now) & (outcome.start_s > now)):
            assert reference.place(free, int(jobs.gpus[job]), max(nodes)) is None


@given(cases())
def test_with_true_estimates_easy_never_delays_the_head_of_the_queue(case: tuple[Workload, list[int]]) -> None:
    """The first in order of arrival that is blocked starts no later than with no job behind it at all."""
    jobs, nodes = case
    outcome = simulate(jobs.with_true_estimates(), nodes, Rule.FCFS, Backfill.EASY)
    blocked = np.flatnonzero(outcome.start_s > jobs.submit_s)
    if len(blocked):
        ahead = slice(0, blocked[0] + 1)
        alone = Workload(jobs.submit_s[ahead], jobs.duration_s[ahead], jobs.gpus[ahead])
        limit = simulate(alone, nodes, Rule.FCFS, Backfill.NONE).start_s[-1]
        assert outcome.start_s[blocked[0]] <= max(limit, jobs.submit_s[blocked[0]] + reference.OVERDUE_S)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 80))
def test_what_fits_the_empty_cluster_is_what_best_fit_can_place(nodes: list[int], gpus: int) -> None:
    assert fits_cluster(np.array([gpus]), nodes)[0] == (reference.place(nodes, gpus, max(nodes)) is not None)


LEVELS = st.sampled_from([(), (3.0,), (1.0, 4.0, 20.0), (5.0, 10.0, 30.0, 100.0)])
RANKS = st.sampled_from([0.0, 1.0, 2.0, 7.5])


@st.composite
def orders(draw: st.DrawFn) -> reference.Order:
    """By an index of one to three kinds, or by what remains."""
    costs = {
        "restart_s": draw(st.sampled_from([0.0, 0.5, 2.0])),
        "checkpoint_s": draw(st.sampled_from([1.0, 3.0, 10.0])),
        "bound_s": draw(st.sampled_from([math.inf, 0.0, 2.5, 20.0])),
        "by_gpu_time": draw(st.booleans()),
        "move_after_s": draw(st.sampled_from([math.inf, 2.0**-20, 1.0, 5.0])),
        "least_loss": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return reference.Order(**costs)
    levels = draw(LEVELS)
    row = st.lists(RANKS, min_size=len(levels) + 1, max_size=len(levels) + 1)
    return reference.Order(levels, draw(st.lists(row, min_size=1, max_size=3)), **costs)


def shares(jobs: Workload, kinds: int) -> list[reference.Share]:
    return [
        reference.Share(
            *(job.seq, job.submit, job.duration, job.gpus, job.estimate),
            kind=job.seq % kinds,
            remaining=job.duration,
            left=job.estimate,
        )
        for job in reference_jobs(jobs)
    ]


def by_kernel(jobs: Workload, nodes: list[int], order: reference.Order) -> Outcome:
    preemption = Preemption(order.restart_s, order.checkpoint_s, order.bound_s, order.move_after_s, order.least_loss)
    if order.table is None:
        return simulate_srtf(jobs, nodes, preemption, order.by_gpu_time)
    kind = np.arange(len(jobs)) % len(order.table)
    index = Index(np.array(order.levels), np.array(order.table), kind, order.by_gpu_time)
    return simulate_index(jobs, nodes, index, preemption)


LAS = ((20.0, 100.0, 500.0), [[0.0, 1.0, 2.0, 3.0]])
UP_AND_DOWN = ((10.0, 30.0, 100.0, 300.0), [[2.0, 1.0, 3.0, 3.0, 0.0], [0.0, 4.0, 1.0, 5.0, 2.0]])


@given(cases(), orders())
@example(random_case(200, 7), reference.Order(*LAS, restart_s=2.0, checkpoint_s=10.0))
@example(random_case(200, 8), reference.Order(*UP_AND_DOWN, restart_s=0.0, checkpoint_s=1e9))
@example(random_case(200, 9), reference.Order(*UP_AND_DOWN, by_gpu_time=False, restart_s=1.0, bound_s=200.0))
@example(random_case(200, 10), reference.Order(restart_s=1.0, checkpoint_s=10.0, by_gpu_time=False))
@example(random_case(200, 12), reference.Order(*LAS, restart_s=2.0, checkpoint_s=10.0, move_after_s=5.0))
@example(random_case(200, 13), reference.Order(*UP_AND_DOWN, restart_s=1.0, checkpoint_s=5.0, move_after_s=20.0))
@example(random_case(200, 14), reference.Order(restart_s=1.0, checkpoint_s=5.0, move_after_s=20.0, bound_s=300.0))
@example(random_case(200, 15), reference.Order(*LAS, restart_s=2.0, checkpoint_s=10.0, least_loss=True))
@example(random_case(200, 16), reference.Order(*LAS, restart_s=2.0, move_after_s=5.0, bound_s=90.0, least_loss=True))
@example(random_case(200, 11), reference.Order(restart_s=1.0, checkpoint_s=10.0, bound_s=100.0))
def test_preemptive_orders_are_as_the_plain_reference(case: tuple[Workload, list[int]], order: reference.Order) -> None:
    jobs, nodes = case
    plain = shares(jobs, 1 if order.table is None else len(order.table))
    reference.simulate_order(plain, nodes, order)
    outcome = by_kernel(jobs, nodes, order)
    assert outcome.start_s.tolist() == [job.start for job in plain]
    assert outcome.finish_s.tolist() == [job.done for job in plain]
    assert outcome.preemptions.tolist() == [job.preemptions for job in plain]
    assert nodes_of(outcome) == [[node for node, _ in job.placement] for job in plain]


@given(cases(), LEVELS)
def test_least_attained_service_is_an_index(case: tuple[Workload, list[int]], levels: tuple[float, ...]) -> None:
    jobs, nodes = case
    index = Index(np.array(levels), np.arange(len(levels) + 1.0)[None, :])
    expected = simulate_index(jobs, nodes, index, Preemption(1.0, 3.0))
    assert simulate_las(jobs, nodes, levels, 1.0, 3.0).finish_s.tolist() == expected.finish_s.tolist()


@given(cases())
def test_shortest_remaining_first_is_optimal_on_one_gpu(case: tuple[Workload, list[int]]) -> None:
    """With free preemption no order has a lower mean completion time there (Schrage 1968)."""
    drawn, _ = case
    jobs = Workload(drawn.submit_s, drawn.duration_s, np.ones(len(drawn), np.int64)).with_true_estimates()
    free = Preemption(restart_s=0.0, checkpoint_s=2.0**-20)
    best = simulate_srtf(jobs, [1], free).finish_s.sum()
    for rule in (Rule.FCFS, Rule.SJF, Rule.LCFS):
        assert best <= simulate(jobs, [1], rule).finish_s.sum() + 1e-3
    assert best <= simulate_index(jobs, [1], las_index((3.0, 10.0)), free).finish_s.sum() + 1e-3


@given(cases(), LEVELS, st.sampled_from([0.0, 2.0]))
def test_preemption_loses_no_job_and_all_its_time_is_accounted_for(
    case: tuple[Workload, list[int]], levels: tuple[float, ...], restart_s: float
) -> None:
    """Occupied is what was useful, what was lost and the restarts; a job that was not evicted ran in one stretch."""
    jobs, nodes = case
    outcome = simulate_las(jobs, nodes, levels, restart_s, checkpoint_s=3.0)
    unmoved = outcome.preemptions == 0
    assert outcome.finish_s[unmoved] == pytest.approx(outcome.start_s[unmoved] + jobs.duration_s[unmoved])
    assert (outcome.wait_s >= -1e-9).all()
    assert (outcome.wait_s >= outcome.start_s - jobs.submit_s - 1e-9).all()
    # An eviction wastes less than a checkpoint's work and a restart, at each end of a stretch.
    most_lost = float((outcome.preemptions * jobs.gpus).sum()) * (3.0 + restart_s)
    assert outcome.useful_gpu_s - 1e-6 <= outcome.busy_gpu_s <= outcome.useful_gpu_s + most_lost + 1e-6
    assert sum(nodes) * outcome.span_s >= outcome.busy_gpu_s - 1e-6
    held = jobs.gpus[outcome.runs.job] * (outcome.runs.end_s - outcome.runs.start_s)
    assert held.sum() == pytest.approx(outcome.busy_gpu_s, rel=1e-9, abs=1e-6)
    assert np.bincount(outcome.runs.job, minlength=len(jobs)).tolist() == (outcome.preemptions + 1).tolist()


def nodes_of(outcome: Outcome) -> list[list[int]]:
    bounds = outcome.placed_at.tolist()
    return [outcome.placed[a:b].tolist() for a, b in itertools.pairwise(bounds)]
