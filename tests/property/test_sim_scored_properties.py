"""The compiled simulation under expressions against the production core, start by start, and against the other loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import sim_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policy_expression_properties import programs
from test_sim_fast_properties import cases

from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.model import Job
from streamsched.core.window import Ranker
from streamsched.policy.expression import ByExpression, Expression, is_sound, parse
from streamsched.policy.features import FEATURES, INDEX, Features, Float32s
from streamsched.policy.network import ROUNDED, ByNetwork, Network
from streamsched.sim.fast import Backfill, Rule, Workload, simulate
from streamsched.sim.scored import Instance, episode, measure, simulate_expression, simulate_network
from streamsched.sim.simulator import simulate as simulate_core
from streamsched.sim.workload import job, nodes_of

Case = tuple[Workload, list[int]]


def by_core(case: Case, ranker: Ranker, window_jobs: int = 64) -> list[float | None]:
    w, nodes = case
    assert w.estimate_s is not None
    columns = zip(w.submit_s.tolist(), w.duration_s.tolist(), w.gpus.tolist(), w.estimate_s.tolist(), strict=True)
    jobs = [
        job(i, submit, run, gpus, estimate_s=estimate, whole=max(nodes))
        for i, (submit, run, gpus, estimate) in enumerate(columns)
    ]
    config = SchedulerConfig(policy="mine", reservations_max=0, window_jobs=window_jobs)
    told = simulate_core(jobs, nodes_of((1, gpus, "any") for gpus in nodes), config, ranker)
    return [one.first_start_s for one in told.jobs]


@given(case=cases(), expression=programs().filter(is_sound))
def test_the_core_starts_every_job_at_the_same_time(case: Case, expression: Expression) -> None:
    found = simulate_expression(Instance(*case), expression)
    assert found.start_s.tolist() == by_core(case, ByExpression("mine", expression))


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
    instances = [Instance(w, nodes, weight), Instance(w, nodes * 2)]
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


def network_of(seed: int, *hidden: int) -> Network:
    like = Network.blank(*hidden)
    return like.with_weights(np.random.default_rng(seed).normal(0.0, 1.0, len(like.weights)))


NETWORKS = st.builds(network_of, st.integers(0, 99), st.integers(1, 9), st.integers(1, 9)) | st.builds(
    network_of, st.integers(0, 99)
)


@given(case=cases(), network=NETWORKS)
def test_the_core_starts_every_job_at_the_same_time_under_a_network(case: Case, network: Network) -> None:
    assert simulate_network(Instance(*case), network).start_s.tolist() == by_core(case, ByNetwork("mine", network))


class _Deciding:
    """The core asked for one decision at a time: all scores are those of the network, seen as it is now."""

    name = "deciding"

    def __init__(self, network: Network, choices: int) -> None:
        self.network, self.choices = network, choices
        self.features = Features()
        self.seen: list[Float32s] = []

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        rows, free = self.features(jobs, state, now), [node.free_gpus() for node in state.inventory]
        whole = max(node.spec.gpus for node in state.inventory)
        fits = [reference.place(free, job.spec.total_gpus, whole) is not None for job in jobs]
        order = sorted(np.flatnonzero(fits).tolist(), key=lambda i: jobs[i].seq)[: self.choices]
        if len(order) > 1:
            self.seen.append(rows[order])
        told = np.full(len(jobs), -1e18)
        told[order] = self.network.scores(rows[order])
        found: list[float] = told.tolist()
        return found


@given(case=cases(), network=NETWORKS, choices=st.integers(1, 5))
def test_an_episode_at_temperature_0_is_what_the_core_does_one_job_at_a_time(
    case: Case, network: Network, choices: int
) -> None:
    """Also what is seen at each decision, to the bit."""
    deciding = _Deciding(network, choices)
    starts = by_core(case, deciding, window_jobs=1)
    found = episode(Instance(*case), network, 0, choices, temperature=0.0)
    assert found.outcome.start_s.tolist() == starts
    assert found.choices.tolist() == [len(rows) for rows in deciding.seen]
    for told, rows in zip(found.features, deciding.seen, strict=True):
        assert told[: len(rows)].view(np.int32).tolist() == rows.view(np.int32).tolist()
        assert not told[len(rows) :].any()


@given(case=cases(), network=NETWORKS, seed=st.integers(0, 2**63 - 1), temperature=st.sampled_from([0.1, 1.0, 5.0]))
def test_what_holds_in_every_episode(case: Case, network: Network, seed: int, temperature: float) -> None:
    found = episode(Instance(*case), network, seed, 8, temperature)
    again = episode(Instance(*case), network, seed, 8, temperature)
    assert found.chosen.tolist() == again.chosen.tolist()
    assert found.features.tobytes() == again.features.tobytes()
    assert ((found.chosen >= 0) & (found.chosen < found.choices) & (found.choices >= 2)).all()
    assert (np.diff(found.time_s) >= 0).all()
    assert found.outcome.start_s[found.job].tolist() == found.time_s.tolist()
    assert len(set(found.job.tolist())) == len(found.job)
    chosen = np.arange(len(found.job)), found.chosen
    assert found.features[(*chosen, INDEX["gpus"])].tolist() == case[0].gpus[found.job].tolist()
    for rows, count, place_of, log_p in zip(found.features, found.choices, found.chosen, found.log_p, strict=True):
        scores = network.scores(rows[:count]) / ROUNDED / temperature
        expected = scores[place_of] - scores.max() - np.log(np.exp(scores - scores.max()).sum())
        assert log_p == pytest.approx(expected, rel=1e-6, abs=1e-6)
    waits = found.outcome.wait_s
    assert found.outcome.queue_job_s == pytest.approx(waits.sum(), abs=1e-6)
    assert (np.diff(found.queue_job_s) >= 0).all()


def test_draws_follow_the_probabilities() -> None:
    """Two jobs at one moment, one node: which of them goes first, over many seeds."""
    weights = np.zeros(len(FEATURES) + 1, np.float32)
    weights[INDEX["gpus"]] = np.log1p(1024.0) * np.log(3.0) / np.log(8.0 / 6.0)
    network = Network.blank().with_weights(weights)
    two = Workload(np.zeros(2), np.ones(2), np.array([5, 7]))
    firsts = [int(episode(Instance(two, [8]), network, seed).chosen[0]) for seed in range(4_000)]
    assert np.mean(firsts) == pytest.approx(0.75, abs=0.03)
