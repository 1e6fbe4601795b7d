"""Reinforcement learning: our loop of PPO beside Stable-Baselines3's, on the same jobs, for as many decisions.

Ours begins from nothing here, without imitation. Stable-Baselines3's PPO runs on `streamsched/Queue-v0`: once with the
same actor and critic as ours, jobs that are not there at -1e8, and once as it comes (a perceptron over the flattened
observation, no mask: an action without a job starts the oldest that fits). Jobs are drawn, not real. All are judged by
the mean wait of the same window, ours in the order it would have live, the others by their best action each time.

Needs the extra `train`, and stable-baselines3 for the second half.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from streamsched.errors import UserError
from streamsched.learn.rl_config import RlConfig
from streamsched.learn.windows import Reward, Sampling, Window, by_rule, cut, drawn_instance
from streamsched.sim.fast import Rule
from streamsched.sim.scored import Instance

CONFIG = RlConfig(
    base="sjf", windows=4, updates=40, window_jobs=128, warm_jobs=200, imitation_updates=0, nodes_low=1.0, threads=1,
    learning_rate=1e-3,
)  # fmt: skip
VALIDATIONS = 8


def run(quick: bool) -> None:
    console = Console()
    try:
        from streamsched.learn import ppo
    except UserError as error:
        console.print(f"left out: {error}", markup=False)
        return
    source = drawn_instance(0, jobs=3_000, nodes=4, load=1.15)
    train, validation = source.take(slice(2_000)), cut(source, Rule.SJF, 2_000, 800, 200)
    updates = 4 if quick else CONFIG.updates
    table = Table("", "wall s", "mean wait s", "decisions", title=f"validation: {validation.new} jobs")
    for rule in (Rule.FCFS, Rule.SMALLEST, Rule.SJF):
        table.add_row(rule.name.lower(), "", f"{_wait(validation, by_rule(validation.instance, rule)):,.0f}", "")
    budget = _ours(table, ppo, train, validation, updates)
    _theirs(table, console, train, validation, budget)
    console.print(table)
    lines = len(Path(inspect.getfile(ppo)).read_text(encoding="utf-8").splitlines())
    console.print(f"ppo.py: {lines} lines, with imitation, validation, export and checkpoints")


def _wait(window: Window, outcome: Any) -> float:
    return Reward().cost(window, outcome) / window.new


def _ours(table: Table, ppo: Any, train: Instance, validation: Window, updates: int) -> int:
    """A row for every few updates; how many decisions were made."""
    trainer = ppo.Trainer(train, validation, RlConfig(**{**CONFIG.__dict__, "updates": updates}))
    made = 0
    began = time.perf_counter()

    def note(progress: Any) -> None:
        nonlocal made
        made += progress.decisions
        if progress.cost is not None:
            table.add_row("ours", f"{time.perf_counter() - began:.0f}", f"{progress.cost:,.0f}", f"{made:,}")

    trainer.run(None, note)
    return made


def _theirs(table: Table, console: Console, train: Instance, validation: Window, budget: int) -> None:
    try:
        from stable_baselines3 import PPO
    except ModuleNotFoundError:
        console.print("stable-baselines3 is not installed: left out", markup=False)
        return
    from streamsched.learn.env import QueueEnv

    sampling = Sampling(jobs=(128, 128), load=(CONFIG.load_low, CONFIG.load_high), warm_jobs=200)
    for name in ("same networks", "as it comes"):
        env = QueueEnv(train, sampling, base=Rule.SJF, scale=1e5, choices=CONFIG.choices)
        model = PPO("MultiInputPolicy", env, n_steps=1_024, batch_size=CONFIG.minibatch, n_epochs=CONFIG.epochs,
                    learning_rate=CONFIG.learning_rate, gamma=0.999, gae_lambda=CONFIG.gae_lambda,
                    ent_coef=CONFIG.entropy, seed=0, device="cpu",
                    policy_kwargs=_same_networks() if name == "same networks" else None)  # fmt: skip
        if name == "same networks":
            _use_scores(model.policy)
        spent = 0.0
        for part in range(VALIDATIONS):
            began = time.perf_counter()
            model.learn(budget // VALIDATIONS, reset_num_timesteps=part == 0)
            spent += time.perf_counter() - began
            wait = _judged(model, validation, train)
            table.add_row(f"stable-baselines3, {name}", f"{spent:.0f}", f"{wait:,.0f}", f"{model.num_timesteps:,}")


def _same_networks() -> dict[str, Any]:
    """The features of its policy are our actor's scores and our critic's value."""
    import torch
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    from streamsched.learn import ppo
    from streamsched.policy.features import FEATURES, INDEX

    class Scores(BaseFeaturesExtractor):  # type: ignore[misc]
        def __init__(self, space: Any) -> None:
            super().__init__(space, CONFIG.choices + 1)
            self.actor = ppo.perceptron(len(FEATURES), CONFIG.width, CONFIG.depth, 0)
            inputs = len(FEATURES) + INDEX["free_gpus"]
            self.critic = ppo.perceptron(inputs, 2 * CONFIG.width, CONFIG.depth, 1)

        def forward(self, seen: Any) -> Any:
            mask = seen["mask"] > 0
            scores = self.actor(seen["features"])[:, :, 0].masked_fill(~mask, -1e8)
            summary = ppo._summary(seen["features"], mask | (mask.sum(1, keepdim=True) == 0))
            return torch.cat([scores, self.critic(summary)], 1)

    return {"features_extractor_class": Scores, "net_arch": {"pi": [], "vf": []}}


def _use_scores(policy: Any) -> None:
    """Instead of layers of its own behind the features."""
    import torch

    class Part(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, which: slice) -> None:
            super().__init__()
            self.which = which

        def forward(self, features: Any) -> Any:
            return features[:, self.which]

    policy.action_net, policy.value_net = Part(slice(CONFIG.choices)), Part(slice(CONFIG.choices, None))
    policy.optimizer = torch.optim.Adam(policy.parameters(), lr=CONFIG.learning_rate, eps=1e-5)


def _judged(model: Any, validation: Window, train: Instance) -> float:
    from streamsched.learn.env import QueueEnv

    env = QueueEnv(train, base=Rule.SJF, scale=1.0, choices=CONFIG.choices)
    seen, _ = env.reset(seed=0, options={"window": validation})
    return -sum(_played(model, env, seen)) / validation.new


def _played(model: Any, env: Any, seen: Any) -> Iterator[float]:
    over = False
    while not over:
        action, _ = model.predict(seen, deterministic=True)
        seen, reward, over, _, _ = env.step(np.int64(action))
        yield float(reward)
