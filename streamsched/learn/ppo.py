"""Priorities by proximal policy optimisation (PPO: Schulman et al., arXiv 1707.06347), in one file.

The actor is a perceptron that scores each job by itself, so that it is `policy.network.Network` as it stands, and the
probability of a job is the softmax of the scores of those that fit. The critic sees the mean and the maximum over these
jobs, and the cluster. Episodes come from the compiled simulation (`windows.rollouts`).

Time between decisions is anything from none to hours, so discount goes by time: a semi-Markov decision process, in
which what comes t seconds later counts exp(-t / tau). Most of the variance of returns comes from the jobs that happen
to arrive, so several episodes are run on each window, and the mean return of the others at the same time is part of the
baseline (Mao et al., "Variance reduction for reinforcement learning in input-driven environments", ICLR 2019); the
critic learns what is left.

Before that the base rule is imitated: the decisions of the policy's own episodes, labelled with what the rule would do
(Ross et al., "A reduction of imitation learning and structured prediction to no-regret online learning", AISTATS 2011).

Validation is one schedule as the live scheduler ranks. What is returned is the best one validated, and never worse
there than the base rule, which is a network itself (`of_rule`). All randomness of an update follows from the seed and
its number, so a run that is taken up again at a checkpoint goes on as if it had never stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from streamsched.errors import UserError
from streamsched.policy import network as networks
from streamsched.policy.features import FEATURES, INDEX, Float32s, Floats
from streamsched.policy.formulas import SEE_RUN_TIMES
from streamsched.policy.network import Network
from streamsched.sim.fast import Ints, Rule
from streamsched.sim.scored import Instance, simulate_network

from .bases import FEATURE_OF
from .env import scaled
from .rl_config import BASES, RlConfig
from .windows import Reward, Rollout, Sampling, Window, by_rule, rollouts

try:
    import torch
    from torch import nn
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise UserError("reinforcement learning needs torch: pip install 'streamsched[train]'") from None

Tensor = Any
"""torch.Tensor"""

_CLUSTER: Final = INDEX["free_gpus"]


@dataclass(frozen=True)
class Progress:
    """After an update. Costs per job of the validation, in the reward's unit."""

    update: int
    updates: int
    cost: float | None
    """None: not validated this time."""
    best_cost: float
    base_cost: float
    loss: float
    entropy: float
    kl: float
    decisions: int


@dataclass(frozen=True)
class Trained:
    network: Network
    base: str
    base_cost: float
    best_cost: float
    best_update: int
    """The one whose validation was best: 0 for what was imitated, -1 where nothing was better than the base rule."""
    history: tuple[tuple[int, float], ...]
    """(update, cost) of the validations."""

    @property
    def is_base(self) -> bool:
        return self.best_update < 0


# ── networks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def perceptron(inputs: int, width: int, depth: int, seed: int) -> Any:
    """`depth` hidden layers, rectified, to one number."""
    torch.manual_seed(seed)
    sizes = [inputs, *[width] * depth]
    layers: list[Any] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 1))


def exported(actor: Any) -> Network:
    """The actor as the scheduler reads it."""
    linear = [layer for layer in actor if isinstance(layer, nn.Linear)]
    parts = [part.detach().numpy().ravel() for layer in linear for part in (layer.weight.T, layer.bias)]
    return Network.blank(*(layer.out_features for layer in linear[:-1])).with_weights(np.concatenate(parts))


def of_rule(name: str) -> Network:
    """A rule of `BASES`, exactly as far as its feature is within the usual range: one weight, and nothing hidden."""
    feature, sign = FEATURE_OF[name]
    weights = np.zeros(len(FEATURES) + 1)
    weights[INDEX[feature]] = sign
    return Network.blank().with_weights(weights)


def labels_of(name: str, features: Float32s, choices: Ints) -> Ints:
    """[decision] what the rule would choose of [decision, choice, feature]: the first to arrive of equals."""
    feature, sign = FEATURE_OF[name]
    value = sign * features[:, :, INDEX[feature]]
    behind = np.arange(features.shape[1]) >= choices[:, None]
    return np.asarray(np.argmax(np.where(behind, -np.inf, value), axis=1))


def _summary(features: Tensor, mask: Tensor) -> Tensor:
    """[decision, critic's input]: mean and maximum over the jobs, and the cluster."""
    jobs = features[:, :, :_CLUSTER]
    mean = jobs.sum(1) / mask.sum(1, keepdim=True)
    return torch.cat([mean, jobs.max(1).values, features[:, 0, _CLUSTER:]], 1)


def _log_p(actor: Any, features: Tensor, mask: Tensor) -> Tensor:
    """[decision, choice] of the softmax; -inf behind the last."""
    scores = torch.full(mask.shape, -torch.inf)
    scores[mask] = actor(features[mask])[:, 0]
    return torch.log_softmax(scores, 1)


# ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Decisions:
    """Of several episodes, one after the other: what was seen (scaled), chosen, and how good that was."""

    features: Tensor
    """[decision, choice, feature]"""
    mask: Tensor
    """[decision, choice]"""
    chosen: Tensor
    """[decision]"""
    log_p: Tensor
    values: Tensor
    """[decision] of the critic, then."""
    returns: Tensor
    """What the critic should say."""
    advantages: Tensor

    def __len__(self) -> int:
        return len(self.chosen)


def returns_to_go(gain: Floats, time_s: Floats, tau_s: float) -> Floats:
    """[step + 1] discounted sums of what is gained from each step on; `time_s` [step + 1]."""
    decay = np.exp(-np.diff(time_s) / tau_s)
    found = np.zeros(len(gain) + 1)
    for step in range(len(gain) - 1, -1, -1):
        found[step] = gain[step] + decay[step] * found[step + 1]
    return found


def advantages(gain: Floats, time_s: Floats, values: Floats, tau_s: float, weight: float) -> Floats:
    """[step] by generalised advantage estimation (Schulman et al., ICLR 2016, equation 16), `weight` its lambda, with
    the discount of the time that goes by. `values`: [step + 1], `time_s` as long."""
    decay = np.exp(-np.diff(time_s) / tau_s)
    found, ahead = np.zeros(len(gain)), 0.0
    for step in range(len(gain) - 1, -1, -1):
        error = gain[step] + decay[step] * values[step + 1] - values[step]
        ahead = error + decay[step] * weight * ahead
        found[step] = ahead
    return found


def input_baselines(times: Sequence[Floats], returns: Sequence[Floats]) -> list[Floats]:
    """[episode][step + 1] mean return of the other episodes of the same window at the same time; 0 without others."""
    found = []
    for this, time_s in enumerate(times):
        others = [np.interp(time_s, times[i], returns[i], right=0.0) for i in range(len(times)) if i != this]
        found.append(np.mean(others, axis=0) if others else np.zeros(len(time_s)))
    return found


def _gain(rollout: Rollout, scale: float) -> Floats:
    """[step] minus what the cost grows until the next."""
    return -np.diff(rollout.cost) / scale


def _tensors(done: Sequence[Rollout]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(features, mask, chosen, log_p) of the steps, as wide as the most choices among them."""
    choices = np.concatenate([one.episode.choices[one.counted] for one in done])
    wide = int(choices.max())
    rows = np.concatenate([one.episode.features[one.counted, :wide] for one in done])
    mask = np.arange(wide) < choices[:, None]
    features = np.where(mask[:, :, None], scaled(rows), np.float32(0.0))
    chosen, log_p = (np.concatenate([getattr(one.episode, name)[one.counted] for one in done])
                     for name in ("chosen", "log_p"))  # fmt: skip
    return (
        torch.from_numpy(features),
        torch.from_numpy(mask),
        torch.from_numpy(chosen),
        torch.from_numpy(log_p.astype(np.float32)),
    )


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Trainer:
    """`train` is learned from, `validation` chooses. Raises UserError for what does not go together."""

    def __init__(self, train: Instance, validation: Window, config: RlConfig) -> None:
        torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(True)
        self.config, self._train, self._validation = config, train, validation
        self.reward = Reward.parse(config.reward)
        self.base = _base(train, config, self.reward)
        self._rule = Rule.named(self.base)
        self._sampling = Sampling(
            jobs=(config.window_jobs, config.window_jobs),
            load=(config.load_low, config.load_high),
            nodes=(config.nodes_low, 1.0),
            warm_jobs=config.warm_jobs,
        )
        self.actor = perceptron(len(FEATURES), config.width, config.depth, config.seed)
        critics_inputs = 2 * _CLUSTER + len(FEATURES) - _CLUSTER
        self.critic = perceptron(critics_inputs, 2 * config.width, config.depth, config.seed + 1)
        self._parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self._optimiser = torch.optim.Adam(self._parameters, lr=config.learning_rate)
        self.update = 0
        """How many are done; the first begins with imitation."""
        base_cost = self.reward.cost(validation, by_rule(validation.instance, self._rule)) / validation.new
        self.base_cost = min(base_cost, self._cost(of_rule(self.base)))
        self.best, self.best_cost, self.best_update = of_rule(self.base), self.base_cost, -1
        self.history: list[tuple[int, float]] = []
        self.scale = self._scale()

    def run(self, folder: Path | None = None, on_update: Callable[[Progress], None] | None = None) -> Trained:
        """To the last update. `folder`: checkpoints are kept there, and taken up where there is one already."""
        path = None if folder is None else folder / "checkpoint.pt"
        if path is not None and path.exists():
            self.restore(path)
        if self.update == 0 and not self.history:
            self._imitate()
            self._validate()
        while self.update < self.config.updates:
            done = self._collect()
            loss, entropy, kl = self._improve(done)
            self.update += 1
            due = self.update % self.config.validate_every == 0 or self.update == self.config.updates
            cost = self._validate() if due else None
            if due and path is not None:
                self.keep(path)
            if on_update is not None:
                on_update(
                    Progress(
                        *(self.update, self.config.updates, cost, self.best_cost, self.base_cost),
                        *(loss, entropy, kl, len(done)),
                    )
                )
        return Trained(self.best, self.base, self.base_cost, self.best_cost, self.best_update, tuple(self.history))

    def _random(self, what: int) -> np.random.Generator:
        """Of an update, and of what it is for."""
        return np.random.default_rng([self.config.seed, self.update, what])

    def _windows(self, random: np.random.Generator, count: int) -> list[Window]:
        return [self._sampling.draw(self._train, self._rule, random) for _ in range(count)]

    def _scale(self) -> float:
        """Mean cost of a window under the base rule: returns are of the order of 1."""
        windows = self._windows(np.random.default_rng([self.config.seed, 1 << 30]), 16)
        costs = [self.reward.cost(window, by_rule(window.instance, self._rule)) for window in windows]
        return max(float(np.mean(costs)), 1.0)

    def _episodes(self, windows: Sequence[Window], random: np.random.Generator, each: int) -> list[Rollout]:
        """Of each window so many, one after the other."""
        listed = [window for window in windows for _ in range(each)]
        seeds = random.integers(0, 1 << 62, len(listed)).tolist()
        config = self.config
        return rollouts(listed, exported(self.actor), seeds, self.reward, config.choices, threads=config.threads)

    def _imitate(self) -> None:
        """Rounds of episodes, each decision labelled with the base rule's; cross-entropy over all rounds so far."""
        optimiser = torch.optim.Adam(self.actor.parameters(), lr=self.config.imitation_rate)
        seen: list[Rollout] = []
        for number in range(self.config.imitation_updates):
            random = np.random.default_rng([self.config.seed, number, 1 << 20])
            seen += self._episodes(self._windows(random, self.config.windows), random, 1)
            if not any(one.counted.any() for one in seen):
                continue
            features, mask, *_ = _tensors(seen)
            rows = [(one.episode.features[one.counted], one.episode.choices[one.counted]) for one in seen]
            labels = torch.from_numpy(np.concatenate([labels_of(self.base, *row) for row in rows]))
            for batch in self._batches(random, len(labels)):
                chosen = _log_p(self.actor, features[batch], mask[batch]).gather(1, labels[batch, None])
                optimiser.zero_grad()
                (-chosen.mean()).backward()
                optimiser.step()

    def _batches(self, random: np.random.Generator, count: int) -> list[Tensor]:
        order = torch.from_numpy(random.permutation(count))
        return list(torch.split(order, self.config.minibatch))

    def _collect(self) -> Decisions:
        """Episodes of one update."""
        random, config = self._random(0), self.config
        done = self._episodes(self._windows(random, config.windows), random, config.episodes)
        if not any(one.counted.any() for one in done):
            raise UserError("nothing is to be decided in the training windows: ask for more jobs or load")
        features, mask, chosen, log_p = _tensors(done)
        with torch.no_grad():
            critic = self.critic(_summary(features, mask))[:, 0].double().numpy()
        gains, times = [_gain(one, self.scale) for one in done], [one.time_s for one in done]
        returns = [returns_to_go(gain, time_s, config.tau_s) for gain, time_s in zip(gains, times, strict=True)]
        found, at = [], 0
        for first in range(0, len(done), config.episodes):
            group = slice(first, first + config.episodes)
            for gain, time_s, base in zip(
                gains[group], times[group], input_baselines(times[group], returns[group]), strict=True
            ):
                values = base.copy()
                values[:-1] += critic[at : at + len(gain)]
                values[-1] = 0.0
                found.append(advantages(gain, time_s, values, config.tau_s, config.gae_lambda))
                at += len(gain)
        advantage = np.concatenate(found)
        targets = torch.from_numpy((advantage + critic).astype(np.float32))
        spread = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        values, normal = (torch.from_numpy(array.astype(np.float32)) for array in (critic, spread))
        return Decisions(features, mask, chosen, log_p, values, targets, normal)

    def _improve(self, done: Decisions) -> tuple[float, float, float]:
        """(loss, entropy, divergence) at the end."""
        random, loss, entropy, kl = self._random(1), 0.0, 0.0, 0.0
        for _ in range(self.config.epochs):
            divergences = []
            for batch in self._batches(random, len(done)):
                loss, entropy, kl = self._step(done, batch)
                divergences.append(kl)
            kl = float(np.mean(divergences))
            if kl > self.config.kl_max:
                break
        return loss, entropy, kl

    def _step(self, done: Decisions, batch: Tensor) -> tuple[float, float, float]:
        config, mask = self.config, done.mask[batch]
        log_p = _log_p(self.actor, done.features[batch], mask)
        change = log_p.gather(1, done.chosen[batch, None])[:, 0] - done.log_p[batch]
        ratio, advantage = change.exp(), done.advantages[batch]
        policy = -torch.min(ratio * advantage, ratio.clamp(1 - config.clip, 1 + config.clip) * advantage).mean()
        entropy = -(log_p.exp() * log_p.masked_fill(~mask, 0.0)).sum(1).mean()
        loss = policy + config.value_weight * self._critics_loss(done, batch) - config.entropy * entropy
        self._optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, config.gradient_norm)
        self._optimiser.step()
        kl = float((ratio - 1 - change).mean().detach())
        return float(loss.detach()), float(entropy.detach()), kl

    def _critics_loss(self, done: Decisions, batch: Tensor) -> Tensor:
        said = self.critic(_summary(done.features[batch], done.mask[batch]))[:, 0]
        wanted, clip = done.returns[batch], self.config.value_clip
        loss = (said - wanted) ** 2
        if clip > 0:
            near = done.values[batch] + (said - done.values[batch]).clamp(-clip, clip)
            loss = torch.max(loss, (near - wanted) ** 2)
        return loss.mean()

    # ── validation and checkpoints ──

    def _cost(self, network: Network) -> float:
        """Per job that comes in the validation."""
        return self.reward.cost(self._validation, simulate_network(self._validation.instance, network)) / (
            self._validation.new
        )

    def _validate(self) -> float:
        network = exported(self.actor)
        cost = self._cost(network)
        self.history.append((self.update, cost))
        if cost < self.best_cost:
            self.best, self.best_cost, self.best_update = network, cost, self.update
        return cost

    def _asked(self) -> str:
        """What has to be equal for a run to be taken up; it may be asked to go on for longer."""
        asked = {name: value for name, value in asdict(self.config).items() if name not in ("updates", "threads")}
        return json.dumps({**asked, "jobs": len(self._train.jobs), "base_cost": self.base_cost}, sort_keys=True)

    def keep(self, path: Path) -> None:
        """Whole or not at all."""
        begun = path.with_name(path.name + ".part")
        state = {
            "asked": self._asked(),
            "update": self.update,
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "best": self.best.to_bytes().hex(),
            "best_cost": self.best_cost,
            "best_update": self.best_update,
            "history": self.history,
            "random": torch.get_rng_state(),
        }
        with begun.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(begun, path)

    def restore(self, path: Path) -> None:
        """Raises UserError for what is no checkpoint of these settings and jobs."""
        try:
            state = torch.load(path, weights_only=True)
            asked = state["asked"]
        except Exception as error:  # torch names no type for what it cannot read
            raise UserError(f"{path}: no checkpoint that can be read ({type(error).__name__})") from None
        if asked != self._asked():
            raise UserError(f"{path}: of other settings or jobs: take the same ones, or another --out")
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.update, self.best_cost, self.best_update = state["update"], state["best_cost"], state["best_update"]
        self.best = networks.from_bytes(bytes.fromhex(state["best"]), str(path))
        self.history = [(int(update), float(cost)) for update, cost in state["history"]]
        torch.set_rng_state(state["random"])


def _base(train: Instance, config: RlConfig, reward: Reward) -> str:
    known = train.jobs.estimate_s is not None
    if config.base in SEE_RUN_TIMES and not known:
        raise UserError(f"base {config.base} orders by run times: give --estimates user or predicted-before")
    if config.base != "best":
        return config.base
    whole = Window(train, float(train.jobs.submit_s[0]))
    names = [name for name in BASES if known or name not in SEE_RUN_TIMES]
    return min(names, key=lambda name: reward.cost(whole, by_rule(train, Rule.named(name))))
