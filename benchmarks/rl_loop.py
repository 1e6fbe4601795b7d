"""Reinforcement learning: our loop of PPO beside Stable-Baselines3's, on the same jobs, for as many decisions.

Ours begins from nothing (no imitation) here. Stable-Baselines3's PPO has its own multi-layer policy over the flattened
observation, and no mask: an action without a job starts the oldest job that fits. Jobs are drawn, not real. Both are
judged by the mean wait of the same validation window, ours in the order it would have live, the other by its best
action at each decision.

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
from streamsched.learn.windows import Reward, Sampling, Window, by_rule, cut, drawn_instance, first_of_instance
from streamsched.sim.fast import Rule
from streamsched.sim.scored import Instance

CONFIG = RlConfig(
    base="sjf", updates=40, window_jobs=128, warm_jobs=200, imitation_updates=0, nodes_low=1.0, threads=1,
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
    train, validation = first_of_instance(source, 2_000), cut(source, Rule.SJF, 2_000, 800, 200)
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
    env = QueueEnv(train, sampling, base=Rule.SJF, scale=1e5, choices=CONFIG.choices)
    model = PPO("MultiInputPolicy", env, n_steps=2_048, batch_size=CONFIG.minibatch, n_epochs=CONFIG.epochs,
                learning_rate=CONFIG.learning_rate, gamma=0.999, gae_lambda=CONFIG.gae_lambda,
                ent_coef=CONFIG.entropy, seed=0, device="cpu")  # fmt: skip
    began, spent = time.perf_counter(), 0.0
    for part in range(VALIDATIONS):
        model.learn(max(1, budget // VALIDATIONS), reset_num_timesteps=part == 0)
        spent = time.perf_counter() - began
        before = time.perf_counter()
        wait = _judged(model, validation, train)
        began += time.perf_counter() - before
        table.add_row("stable-baselines3", f"{spent:.0f}", f"{wait:,.0f}", f"{model.num_timesteps:,}")


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
