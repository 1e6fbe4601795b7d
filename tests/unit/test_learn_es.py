"""Evolution strategies: what they begin with, what they return, and that they can be interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamsched.errors import UserError
from streamsched.learn.es import LEVELS_GPU_S, Course, Form, Runs, cost, search
from streamsched.learn.es_config import EsConfig
from streamsched.policy.features import FEATURES, INDEX
from streamsched.policy.network import Network, from_bytes
from streamsched.sim.fast import Index, Preemption, Rule, Workload, simulate, simulate_index
from streamsched.sim.ranked import Ranks
from streamsched.sim.scored import Instance

TINY = EsConfig(base="sjf", hidden=3, generations=4, pairs=2, window_days=0.2, check_every=2, least_wait_s=1.0)


def crowd(count: int = 900, seed: int = 1) -> Instance:
    random = np.random.default_rng(seed)
    gpus = random.choice([1, 2, 4, 8, 16], count, p=[0.5, 0.2, 0.1, 0.15, 0.05])
    run = np.exp(random.normal(5.5, 1.6, count))
    submit = np.cumsum(random.exponential(float((gpus * run).mean()) / 32 / 1.05, count))
    told = run * np.exp(random.normal(0.0, 0.5, count))
    return Instance(Workload(submit, run, gpus.astype(np.int64), told), [8] * 4, spread=np.full(count, 1.6))


def course(count: int = 900) -> Course:
    jobs = crowd(count)
    edges = np.quantile(jobs.jobs.submit_s, [0.5, 0.75])
    return Course(jobs, float(edges[0]), float(edges[1]))


@pytest.mark.parametrize(
    ("base", "rule"),
    [("fcfs", Rule.FCFS), ("lcfs", Rule.LCFS), ("sjf", Rule.SJF), ("smallest", Rule.SMALLEST), ("qssf", Rule.QSSF)],
)
def test_it_begins_with_the_rule(base: str, rule: Rule) -> None:
    config = replace(TINY, base=base, reserve_after_s=np.inf)
    form, jobs = Form(config), crowd()
    found = Runs(replace(jobs, reserve_after_s=np.inf), config).outcome(
        form.network(form.start(np.random.default_rng(0)))
    )
    expected = simulate(jobs.jobs, jobs.node_gpus, rule)
    assert found.start_s.tolist() == expected.start_s.tolist()


def test_with_preemption_it_begins_with_least_attained_service() -> None:
    config = replace(TINY, base="las")
    form, jobs = Form(config), crowd()
    network = form.network(form.start(np.random.default_rng(0)))
    begin = np.log1p(np.concatenate([[0.0], LEVELS_GPU_S]))
    table = np.floor(begin / np.log(2.0) / 2.0 + 1e-9)[None, :]
    expected = simulate_index(jobs.jobs, jobs.node_gpus, Index(np.array(LEVELS_GPU_S), table), config.preemption)
    found = Runs(jobs, config).outcome(network)
    assert found.finish_s.tolist() == expected.finish_s.tolist()
    assert found.preemptions.sum() > 0


@pytest.mark.parametrize("base", ["sjf", "las"])
def test_the_choosing_part_decides_and_the_rule_is_the_floor(base: str) -> None:
    where = course()
    found = search(where, replace(TINY, base=base), threads=1)
    assert found.checks[0].generation == 0
    assert found.checks[0].cost == 1.0
    assert [check.generation for check in found.checks] == [0, 2, 4]
    assert found.chosen.cost == min(check.cost for check in found.checks) <= 1.0
    parts = [where.part(0, where.known, load) for load in found.config.choose_loads]
    runs = [Runs(part, found.config) for part in parts if part is not None]
    for (mean_s, _), run in zip(found.chosen.waits, runs, strict=True):
        assert run.outcome(found.network).wait_s[where.trained :].mean() == pytest.approx(mean_s)


def test_equal_seeds_give_equal_results_on_any_number_of_threads_and_after_an_interruption(tmp_path: Path) -> None:
    where, kept = course(), tmp_path / "kept"
    whole = search(where, TINY, threads=1)
    search(where, replace(TINY, generations=2), kept, threads=2)
    resumed = search(where, TINY, kept, threads=2)
    assert resumed.network.to_bytes() == whole.network.to_bytes()
    assert resumed.checks == whole.checks
    other = search(where, replace(TINY, seed=2), threads=2)
    assert other.checks[1:] != whole.checks[1:]


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    where, kept = course(), tmp_path / "kept"
    search(where, replace(TINY, generations=1), kept, threads=1)
    with pytest.raises(UserError, match="another configuration"):
        search(where, replace(TINY, pairs=3), kept)
    kept.write_bytes(b"nothing of that kind")
    with pytest.raises(UserError, match="checkpoint"):
        search(where, TINY, kept)


def test_nothing_after_the_choosing_part_is_looked_at() -> None:
    """Other jobs later: the same result."""
    where = course()
    jobs = where.jobs.jobs
    later = np.arange(len(jobs)) >= where.known
    changed = Workload(jobs.submit_s, np.where(later, 1.0, jobs.duration_s), jobs.gpus, jobs.estimate_s)
    other = Course(replace(where.jobs, jobs=changed), where.choose_from_s, where.until_s)
    assert search(other, TINY, threads=1).network.to_bytes() == search(where, TINY, threads=1).network.to_bytes()


def test_where_no_window_has_jobs_the_whole_part_is_learned_from() -> None:
    where = course(60)
    found = search(where, replace(TINY, window_days=1e-9, generations=1), threads=1)
    assert len(found.checks) == 2
    assert where.part(5, 6) is None


def test_what_cannot_be_searched_for_is_refused() -> None:
    with pytest.raises(ValueError, match="no base"):
        EsConfig(base="best")
    with pytest.raises(ValueError, match="at least 1"):
        EsConfig(pairs=0)
    with pytest.raises(ValueError, match="to train on"):
        search(Course(crowd(), 0.0, 0.0), TINY)


def test_costs_count_the_tail_only_above_the_rules() -> None:
    assert cost((50.0, 900.0), (100.0, 1_000.0), TINY) == 0.5
    assert cost((100.0, 1_500.0), (100.0, 1_000.0), TINY) == pytest.approx(1.0 + TINY.tail * 0.5)


# ── networks by levels ───────────────────────────────────────────────────────────────────────────────────────────────


def by_levels() -> Network:
    form = Form(replace(TINY, base="las"))
    return form.network(form.start(np.random.default_rng(3)) + 0.3 * np.random.default_rng(4).normal(size=form.length))


def test_ranks_are_whole_numbers_and_change_at_levels_only() -> None:
    network = by_levels()
    rows = np.zeros((4, len(FEATURES)), np.float32)
    rows[:, INDEX["gpus"]] = 4.0
    rows[:, INDEX["attained_gpu_s"]] = [LEVELS_GPU_S[3], LEVELS_GPU_S[3] * 1.9, LEVELS_GPU_S[9], LEVELS_GPU_S[9] * 1.9]
    rows[1, [INDEX["wait_s"], INDEX["running"], INDEX["free_gpus"], INDEX["load"]]] = 7.0
    scores = network.scores(rows)
    assert scores.tolist() == np.floor(scores).tolist()
    assert scores[0] == scores[1] > scores[2] == scores[3]


def test_levels_are_in_the_file() -> None:
    network = by_levels()
    again = from_bytes(network.to_bytes())
    assert again.levels_gpu_s == LEVELS_GPU_S
    assert again.digest == network.digest
    with pytest.raises(ValueError, match="fixed of a job"):
        Network(network.sizes, np.ones_like(network.weights), network.low, network.high, network.levels_gpu_s)
    with pytest.raises(ValueError, match="ascending"):
        Network(network.sizes, network.weights, network.low, network.high, (5.0, 4.0))
    with pytest.raises(ValueError, match="same levels"):
        Ranks(crowd(20), LEVELS_GPU_S[1:]).index(network)


def test_the_table_of_the_simulation_has_the_scores_of_the_live_scheduler() -> None:
    network, jobs = by_levels(), crowd(50)
    index = Ranks(jobs, LEVELS_GPU_S).index(network)
    fixed = jobs.arrays[3].T
    for level, begin in enumerate([0.0, *LEVELS_GPU_S]):
        rows = np.zeros((50, len(FEATURES)), np.float32)
        rows[:, : fixed.shape[1]] = fixed
        rows[:, INDEX["attained_gpu_s"]] = begin
        assert index.kind is not None
        assert index.table[index.kind, level].tolist() == (-network.scores(rows)).tolist()
    assert Ranks(jobs, LEVELS_GPU_S).simulate(network, Preemption()).finish_s.shape == (50,)
