"""Training: the exported network is the actor, the floor holds, and an interrupted run ends like any other."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from streamsched.errors import UserError
from streamsched.learn.rl_config import BASES, RlConfig
from streamsched.learn.windows import by_rule, cut, drawn_instance
from streamsched.policy.features import FEATURES
from streamsched.policy.network import ROUNDED, from_bytes, load
from streamsched.sim.fast import Rule
from streamsched.sim.scored import simulate_network

if importlib.util.find_spec("torch") is None and os.environ.get("STREAMSCHED_TRAIN_TESTS") != "1":
    pytest.skip("needs torch: make test-train", allow_module_level=True)

import torch

from streamsched.commands.train import train_app
from streamsched.learn import ppo
from streamsched.learn.env import scaled

pytestmark = pytest.mark.train

SOURCE = drawn_instance(0, jobs=500, nodes=2, load=1.3)
TRAIN, VALIDATION = SOURCE.take(slice(350)), cut(SOURCE, Rule.SJF, 350, 120, 100)
TINY = RlConfig(
    updates=4, windows=2, episodes=2, window_jobs=40, warm_jobs=60, width=8, minibatch=64, epochs=2, validate_every=2,
    imitation_updates=2, threads=1, base="sjf",
)  # fmt: skip


def trainer(config: RlConfig = TINY) -> ppo.Trainer:
    return ppo.Trainer(TRAIN, VALIDATION, config)


def test_the_exported_network_scores_as_the_actor_does() -> None:
    actor = ppo.perceptron(len(FEATURES), 32, 2, seed=3)
    random = np.random.default_rng(0)
    features = np.exp(random.uniform(-2, 14, (200, len(FEATURES)))).astype(np.float32)
    features[:, 9:] = features[0, 9:]
    with torch.no_grad():
        told = actor(torch.from_numpy(scaled(features)))[:, 0].numpy()
    network = from_bytes(ppo.exported(actor).to_bytes())
    assert np.abs(network.scores(features) / ROUNDED - told).max() < 1e-5


@pytest.mark.parametrize("name", BASES)
def test_rules_are_networks(name: str) -> None:
    found = simulate_network(VALIDATION.instance, ppo.of_rule(name))
    assert found.start_s.tolist() == by_rule(VALIDATION.instance, Rule.named(name)).start_s.tolist()


def test_labels_are_the_first_of_the_best() -> None:
    features = np.zeros((2, 3, len(FEATURES)), np.float32)
    features[:, :, 0] = [[4, 1, 1], [2, 3, 0]]
    assert ppo.labels_of("smallest", features, np.array([3, 2])).tolist() == [1, 0]


def test_advantages_by_hand() -> None:
    """Time goes by between the second and the third step alone."""
    gain, time_s = np.array([-1.0, -2.0, -4.0]), np.array([0.0, 0.0, np.log(2.0), np.log(2.0)])
    assert ppo.returns_to_go(gain, time_s, 1.0).tolist() == pytest.approx([-5.0, -4.0, -4.0, 0.0])
    values = np.zeros(4)
    assert ppo.advantages(gain, time_s, values, 1.0, 1.0).tolist() == pytest.approx([-5.0, -4.0, -4.0])
    assert ppo.advantages(gain, time_s, values, 1.0, 0.0).tolist() == pytest.approx(gain.tolist())
    assert ppo.advantages(gain, time_s, np.array([-5.0, -4.0, -4.0, 0.0]), 1.0, 0.9) == pytest.approx(np.zeros(3))


def test_baselines_are_those_of_the_others_at_the_same_time() -> None:
    times = [np.array([0.0, 10.0]), np.array([0.0, 5.0, 20.0]), np.array([0.0, 20.0])]
    returns = [np.array([-4.0, 0.0]), np.array([-8.0, -2.0, 0.0]), np.array([-6.0, 0.0])]
    first, second, _ = ppo.input_baselines(times, returns)
    assert first.tolist() == pytest.approx([-7.0, (-2.0 * 10 / 15 - 3.0) / 2])
    assert second.tolist() == pytest.approx([-5.0, (-2.0 - 4.5) / 2, 0.0])
    assert ppo.input_baselines(times[:1], returns[:1])[0].tolist() == [0.0, 0.0]


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = trainer()
    expected = whole.run()
    trainer(replace(TINY, updates=2)).run(tmp_path)
    again = trainer()
    updates: list[int] = []
    found = again.run(tmp_path, lambda progress: updates.append(progress.update))
    assert updates == [3, 4]
    assert found.history == expected.history
    assert found.network.digest == expected.network.digest
    for one, other in zip(whole.actor.parameters(), again.actor.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UserError, match="other settings"):
        trainer(replace(TINY, clip=0.1)).run(tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"no")
    with pytest.raises(UserError, match="no checkpoint"):
        trainer().run(tmp_path)


def test_what_is_returned_is_never_worse_than_the_base_rule() -> None:
    """A learning rate that ruins the policy: nothing is better than the rule, which is what is returned."""
    done = trainer(replace(TINY, learning_rate=1.0, imitation_updates=0, updates=2)).run()
    assert done.best_cost <= done.base_cost
    cost = ppo.Reward.parse("wait").cost(VALIDATION, simulate_network(VALIDATION.instance, done.network))
    assert cost / VALIDATION.new == pytest.approx(done.best_cost)
    assert done.is_base == (done.network.digest == ppo.of_rule("sjf").digest)


def test_imitation_comes_close_to_its_rule() -> None:
    trained = trainer(replace(TINY, imitation_updates=25, imitation_rate=1e-2, updates=0, width=16))
    trained.run()
    assert trained.history[0][1] < 1.25 * trained.base_cost


def test_it_finds_what_pays() -> None:
    """From random weights, by PPO alone."""
    config = replace(TINY, updates=12, imitation_updates=0, windows=4, episodes=4, learning_rate=5e-3, kl_max=1.0)
    trained = trainer(config)
    trained.run()
    costs = [cost for _, cost in trained.history]
    assert min(costs[1:]) < costs[0]


def test_the_command_writes_what_it_says(tmp_path: Path) -> None:
    trace, config, out = tmp_path / "jobs.csv", tmp_path / "tiny.toml", tmp_path / "out"
    jobs = SOURCE.jobs
    with trace.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["job_id", "submit_s", "duration_s", "gpus", "tenant"])
        for i in range(len(jobs)):
            rows.writerow([f"j{i}", jobs.submit_s[i], jobs.duration_s[i], jobs.gpus[i], "t"])
    config.write_text('base = "smallest"\nupdates = 7\nwindow_jobs = 40\nwarm_jobs = 60\nimitation_updates = 1\n')
    asked = ["rl", "--trace", trace, "--nodes", "2x8", "--config", config, "--updates", 2, "--threads", 1, "--out", out]
    found = CliRunner().invoke(train_app, [str(word) for word in asked])
    assert found.exit_code == 0, (found.output, found.exception)
    told = json.loads((out / "training.json").read_text())
    assert told["network"] == load(out / "network.bin").digest
    assert told["config"]["updates"] == 2
    assert told["config"]["base"] == told["base"] == "smallest"
    assert told["best_cost"] <= told["base_cost"]
    assert told["is_base_rule"] == ("nothing better was found" in found.output)
    assert [update for update, _ in told["history"]] == [0, 2]
    again = CliRunner().invoke(train_app, [str(word) for word in [*asked, "--base", "fcfs"]])
    assert "of other settings or jobs" in str(again.exception)
