"""Settings of reinforcement learning: what a TOML file may set, and the options of `streamsched train rl`, are the
fields of one dataclass. Apart from `ppo`, so that the command line does not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from streamsched.errors import UserError
from streamsched.sim.scenario import read_toml

from .es_config import CHOOSE_SHARE, TRAIN_SHARE

BASES: Final = ("fcfs", "smallest", "sjf", "qssf")
"""Of `bases.FEATURE_OF`, without preemption; of equals in training the first is taken."""


def _of(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class RlConfig:
    """Raises UserError for what makes no sense."""

    seed: int = _of(0, "All else follows from it.")
    reward: str = _of("wait", "wait, jct, bounded_slowdown, or a mix such as wait:1,bounded_slowdown:300.")
    base: str = _of("best", f"Rule to begin with and to beat: {', '.join(BASES)}, or the best of them in training.")
    width: int = _of(32, "Units of a hidden layer.")
    depth: int = _of(2, "Hidden layers.")
    choices: int = _of(32, "Waiting jobs that a decision is among, at most.")
    window_jobs: int = _of(256, "Jobs of a window.")
    warm_jobs: int = _of(1_000, "Jobs before a window that the base rule schedules.")
    load_low: float = _of(0.9, "Arrivals come so many times as fast, at least.")
    load_high: float = _of(1.2, "And at most.")
    nodes_low: float = _of(0.9, "Share of the nodes that windows have, at least.")
    updates: int = _of(60, "Updates of PPO.")
    windows: int = _of(8, "Windows of an update.")
    episodes: int = _of(4, "Episodes of each window: each is compared with the mean of the others.")
    epochs: int = _of(4, "Passes over the decisions of an update.")
    minibatch: int = _of(512, "Decisions of a step.")
    learning_rate: float = _of(3e-3, "Of Adam.")
    clip: float = _of(0.2, "Of the ratio of probabilities.")
    value_clip: float = _of(0.0, "Of the critic's change; 0: none.")
    entropy: float = _of(0.003, "Weight of the entropy bonus.")
    value_weight: float = _of(0.5, "Weight of the critic's loss.")
    gradient_norm: float = _of(0.5, "Largest norm of a gradient.")
    kl_max: float = _of(0.03, "Mean divergence from the old policy at which an update's passes end.")
    tau_s: float = _of(86_400.0, "What comes t seconds later counts exp(-t / tau).")
    gae_lambda: float = _of(0.98, "Of generalised advantage estimation.")
    imitation_updates: int = _of(20, "Rounds of imitating the base rule before; 0: none.")
    imitation_rate: float = _of(3e-3, "Learning rate of these.")
    validate_every: int = _of(5, "Updates from one validation, and checkpoint, to the next.")
    threads: int = _of(2, "Of torch and of the episodes.")
    train_share: float = _of(TRAIN_SHARE, "First part of the slice, which is learned from.")
    validation_share: float = _of(CHOOSE_SHARE, "Next part, by which the best is chosen; what is left stays unseen.")

    def __post_init__(self) -> None:
        positive = ("width", "window_jobs", "windows", "episodes", "epochs", "minibatch", "validate_every", "threads",
                    "learning_rate", "imitation_rate", "clip", "gradient_norm", "kl_max", "tau_s", "load_low",
                    "train_share", "validation_share")  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise UserError(f"{name} {getattr(self, name)}: expected more than 0")
        for name in ("seed", "warm_jobs", "updates", "imitation_updates", "entropy", "value_clip", "value_weight"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} {getattr(self, name)}: expected 0 or more")
        if self.base not in (*BASES, "best"):
            raise UserError(f"base {self.base!r}: expected best, {', '.join(BASES)}")
        if not 2 <= self.choices <= 1_024 or not 1 <= self.depth <= 7 or self.width > 512:
            raise UserError("expected 2 to 1,024 choices, and 1 to 7 hidden layers of at most 512 units")
        if self.load_high < self.load_low or not 0 < self.nodes_low <= 1 or not 0 <= self.gae_lambda <= 1:
            raise UserError("expected load_low <= load_high, nodes_low above 0 and at most 1, gae_lambda from 0 to 1")
        if self.train_share + self.validation_share > 1:
            raise UserError("train_share and validation_share are more than the whole slice")


def read_config(path: Path) -> dict[str, Any]:
    """What a TOML file sets. Raises UserError that names the file."""
    told = read_toml(path)
    if unknown := sorted(set(told) - set(RlConfig.__dataclass_fields__)):
        raise UserError(f"{path}: unknown key `{unknown[0]}`")
    try:
        msgspec.convert(told, RlConfig)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}") from None
    return told
