"""The compiled simulation under expressions against the production core, start by start, and against the other loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from test_policy_expression_properties import is_sound, programs
from test_sim_fast_properties import cases

from streamsched.core.config import SchedulerConfig
from streamsched.policy.expression import ByExpression, Expression, parse
from streamsched.sim.fast import Backfill, Rule, Workload, simulate
from streamsched.sim.scored import Instance, measure, simulate_expression
from streamsched.sim.simulator import simulate as simulate_core
from streamsched.sim.workload import job, nodes_of

Case = tuple[Workload, list[int]]


def by_core(case: Case, expression: Expression) -> list[float | None]:
    w, nodes = case
    assert w.estimate_s is not None
    columns = zip(w.submit_s.tolist(), w.duration_s.tolist(), w.gpus.tolist(), w.estimate_s.tolist(), strict=True)
    jobs = [
        job(i, submit, run, gpus, estimate_s=estimate, whole=max(nodes))
        for i, (submit, run, gpus, estimate) in enumerate(columns)
    ]
    config = SchedulerConfig(policy="mine", reservations_max=0)
    told = simulate_core(jobs, nodes_of((1, gpus, "any") for gpus in nodes), config, ByExpression("mine", expression))
    return [one.first_start_s for one in told.jobs]


@given(case=cases(), expression=programs().filter(is_sound))
def test_the_core_starts_every_job_at_the_same_time(case: Case, expression: Expression) -> None:
    assert simulate_expression(Instance(*case), expression).start_s.tolist() == by_core(case, expression)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("wait_s", Rule.FCFS),
        ("-run_s", Rule.SJF),
        ("neg(work_gpu_s)", Rule.SAF),
        ("gpus", Rule.LARGEST),
        ("-nodes * 0 - gpus", Rule.SMALLEST),
    ],
)
@given(case=cases())
@settings(max_examples=25)
def test_rules_as_expressions_are_these_rules(text: str, rule: Rule, case: Case) -> None:
    expected = simulate(*case, rule, Backfill.SKIP)
    found = simulate_expression(Instance(*case), parse(text))
    for name in ("start_s", "finish_s", "placed", "passes", "queue_max"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert found.queue_job_s == pytest.approx(expected.queue_job_s)
    assert found.busy_gpu_s == pytest.approx(expected.busy_gpu_s)


@given(case=cases())
@settings(max_examples=25)
def test_measures_are_those_of_the_schedules_whatever_the_threads(case: Case) -> None:
    """Many programs through one world: nothing of one schedule is left for the next."""
    w, nodes = case
    weight = np.random.default_rng(len(w)).uniform(0.0, 3.0, len(w)).astype(np.float32).astype(np.float64)
    instances = [Instance(w, nodes, weight), Instance(w, [8, *nodes, max(nodes)])]
    texts = ["wait_s", "-run_s / weight", "gpus * load + wait_s", "if_less(fragmentation, 0.5, -gpus, run_s)"] * 20
    programs = [parse(text) for text in texts]
    found = measure(instances, programs, threads=3)
    assert np.array_equal(found, measure(instances, programs, threads=1))
    assert np.array_equal(found[:, :4], found[:, 76:])
    for place, instance in enumerate(instances):
        for number in range(4):
            outcome = simulate_expression(instance, programs[number])
            own = weight if place == 0 else np.ones(len(w))
            slowdown = np.maximum(1.0, (outcome.wait_s + w.duration_s) / np.maximum(w.duration_s, 10.0))
            expected = [
                float(own @ outcome.wait_s / own.sum()),
                float((own * outcome.wait_s).max()),
                outcome.utilisation,
                outcome.mean_wait_s,
                float(outcome.wait_s.max()),
                float(slowdown.mean()),
            ]
            assert found[place, number].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
