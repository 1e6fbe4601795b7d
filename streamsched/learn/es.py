"""Priorities by evolution strategies: a policy search that needs returns of whole schedules and no gradient.

A network (`policy.network`) is varied by Gaussian noise in antithetic pairs. Each is run in the compiled simulation on
the same jobs, and the weights follow the ranks of the results (Salimans et al., arXiv 1703.03864; natural evolution
strategies: Wierstra et al., JMLR 15, 2014), by Adam's rule (Kingma and Ba, ICLR 2015). What a whole schedule returns
has no credit to assign to single decisions. That is what is hard for gradients of single decisions where thousands of
jobs wait for each other, and where runs are stopped.

What it begins with *is* a rule: one hidden unit passes its feature on, the others count nothing. Each generation sees
another window of the training part, on a cluster and under a load drawn for it. A second part, which it is never
trained on, chooses among what was found. The rule is among it: where nothing is better, the rule is what is returned.

Equal jobs and an equal configuration give an equal result, on any number of threads, whether interrupted or not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from streamsched.errors import UserError
from streamsched.policy.features import FEATURES, FIXED, INDEX, Floats
from streamsched.policy.network import Network
from streamsched.sim.fast import Outcome, fits_cluster
from streamsched.sim.ranked import Ranks
from streamsched.sim.scored import Instance, simulate_network

from .es_config import BASES, EsConfig

LEVELS_GPU_S: Final = tuple(2.0**octave for octave in range(6, 27))
"""Service at which ranks may change: each octave from a minute to two years of one GPU."""
_STEPS: Final = 2.5
"""What a weight of 1 changes of ranks for preemption, which are whole numbers."""


# ── networks as vectors ──────────────────────────────────────────────────────────────────────────────────────────────


class Form:
    """Weights that are searched for, as a vector, and the network that they make.

    A linear part passes on what the network may see (a hidden unit for each feature, which is not negative), and
    `hidden` rectified units are added to it.
    """

    def __init__(self, config: EsConfig) -> None:
        self._hidden = config.hidden
        self._levels = LEVELS_GPU_S if config.preemptive else ()
        cluster = range(INDEX["free_gpus"], len(FEATURES))
        moving = [INDEX["attained_gpu_s"]] if config.preemptive else [INDEX["wait_s"], *cluster]
        self._seen = np.array([place for place in (*FIXED, *moving) if place != INDEX["weight"]])
        self._base = np.zeros(len(self._seen))
        name, weight = BASES[config.base]
        self._base[self._seen.tolist().index(INDEX[name])] = weight
        self._unit = _STEPS if config.preemptive else 1.0

    @property
    def length(self) -> int:
        inputs = len(self._seen)
        return inputs + inputs * self._hidden + 2 * self._hidden

    def start(self, random: np.random.Generator) -> Floats:
        """The base rule, and random units that count nothing yet."""
        inputs = len(self._seen)
        units = random.normal(0.0, 1.0, inputs * self._hidden), random.normal(0.0, 0.5, self._hidden)
        return np.concatenate([np.zeros(inputs), *units, np.zeros(self._hidden)])

    def network(self, vector: Floats) -> Network:
        inputs, hidden = len(self._seen), self._hidden
        linear, units, bias, out = np.split(vector, np.cumsum([inputs, inputs * hidden, hidden]))
        first = np.zeros((len(FEATURES), inputs + hidden))
        first[self._seen, np.arange(inputs)] = 1.0
        first[self._seen, inputs:] = units.reshape(inputs, hidden)
        last = np.concatenate([self._base + self._unit * linear, self._unit * out])
        weights = np.concatenate([first.ravel(), np.zeros(inputs), bias, last, [0.0]])
        return Network.blank(inputs + hidden, levels_gpu_s=self._levels).with_weights(weights)


# ── schedules ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Course:
    """What is trained on and what chooses: jobs by submission, those before `choose_from` are the training's."""

    jobs: Instance
    """With predictions as estimates."""
    choose_from_s: float
    until_s: float
    """Jobs submitted from then on are not looked at."""

    @cached_property
    def trained(self) -> int:
        return int(np.searchsorted(self.jobs.jobs.submit_s, self.choose_from_s))

    @cached_property
    def known(self) -> int:
        return int(np.searchsorted(self.jobs.jobs.submit_s, self.until_s))

    def part(self, first: int, last: int, load: float = 1.0, nodes: float = 1.0) -> Instance | None:
        """Jobs by number, submitted `load` times as fast, on `nodes` times as many nodes; those that no longer fit are
        left out. None where no two are left."""
        given, gpus = self.jobs, list(self.jobs.node_gpus)
        count = max(1, round(len(gpus) * nodes))
        cluster = (gpus * (1 + count // len(gpus)))[:count]
        which = np.arange(first, last)[fits_cluster(given.jobs.gpus[first:last], cluster)]
        if len(which) < 2:
            return None
        return given.take(which, cluster, submit_s=given.jobs.submit_s[which] / load)


class Runs:
    """Schedules of one instance under networks."""

    def __init__(self, instance: Instance, config: EsConfig) -> None:
        self._config = config
        self._kept = replace(instance, reserve_after_s=config.reserve_after_s, reservations_max=1)
        self._ranks = Ranks(instance, LEVELS_GPU_S) if config.preemptive else None

    def outcome(self, network: Network) -> Outcome:
        if self._ranks is not None:
            return self._ranks.simulate(network, self._config.preemption)
        return simulate_network(self._kept, network)


def waits(outcome: Outcome, first: int = 0) -> tuple[float, float]:
    """(mean, p99) of the jobs from `first` on, s."""
    wait = outcome.wait_s[first:]
    return float(wait.mean()), float(np.percentile(wait, 99))


def cost(found: tuple[float, float], base: tuple[float, float], config: EsConfig) -> float:
    """1 is the base rule; p99 counts from a minute on."""
    beyond = found[1] / max(base[1], 60.0) - 1.0
    return found[0] / max(base[0], 1e-9) + config.tail * max(0.0, beyond)


# ── search ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Check(msgspec.Struct, frozen=True):
    """A look at the choosing part."""

    generation: int
    cost: float
    waits: list[tuple[float, float]]
    """(mean, p99) at each of `choose_loads`, s"""


@dataclass(eq=False)
class State:
    """All that a search goes on from."""

    vector: Floats
    mean: Floats
    """Of the last vectors (Polyak's average), which is what is looked at."""
    first: Floats
    second: Floats
    """Moments of the gradient."""
    random: dict[str, Any]
    generation: int = 0
    best: Floats | None = None
    """None: the base rule."""
    checks: list[Check] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Found:
    config: EsConfig
    network: Network
    checks: tuple[Check, ...]
    """The first is the base rule's."""

    @property
    def chosen(self) -> Check:
        return min(self.checks, key=lambda check: (check.cost, check.generation))

    def to_json(self) -> bytes:
        told = {"config": asdict(self.config), "chosen": self.chosen, "checks": self.checks}
        return msgspec.json.format(msgspec.json.encode(told))


def search(
    course: Course,
    config: EsConfig,
    checkpoint: Path | None = None,
    progress: Callable[[Check], None] = lambda check: None,
    threads: int | None = None,
) -> Found:
    """Train, and return what is best on the choosing part.

    With `checkpoint`, goes on from there if it is a file, and writes it at each look. `progress` gets each look. Raises
    ValueError for a course without jobs.
    """
    if not 0 < course.trained < course.known:
        raise ValueError("jobs are needed to train on, and others to choose by")
    form = Form(config)
    parts = [course.part(0, course.known, load) for load in config.choose_loads]
    choosing = [Runs(part, config) for part in parts if part is not None]
    state = _read(checkpoint, config) or _fresh(form, config)
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        if not state.checks:
            state.checks.append(_look(choosing, form.network(state.vector), course, config, None, pool))
            progress(state.checks[-1])
        while state.generation < config.generations:
            _step(state, form, course, config, pool)
            if state.generation % config.check_every == 0 or state.generation == config.generations:
                check = _look(choosing, form.network(state.mean), course, config, state, pool)
                if check.cost < min(known.cost for known in state.checks):
                    state.best = state.mean.copy()
                state.checks.append(check)
                if checkpoint is not None:
                    _write(checkpoint, state, config)
                progress(check)
    start = form.start(np.random.default_rng(config.seed))
    return Found(config, form.network(start if state.best is None else state.best), tuple(state.checks))


def _fresh(form: Form, config: EsConfig) -> State:
    random = np.random.default_rng(config.seed)
    start = form.start(random)
    nothing = np.zeros_like(start)
    return State(start, start.copy(), nothing, nothing, dict(random.bit_generator.state))


def _look(
    choosing: list[Runs],
    network: Network,
    course: Course,
    config: EsConfig,
    state: State | None,
    pool: ThreadPoolExecutor,
) -> Check:
    found = list(pool.map(lambda runs: waits(runs.outcome(network), course.trained), choosing))
    base = found if state is None else state.checks[0].waits
    costs = [cost(now, then, config) for now, then in zip(found, base, strict=True)]
    return Check(0 if state is None else state.generation, float(np.mean(costs)), found)


_FIRST: Final = 0.8
_SECOND: Final = 0.95
_MEAN: Final = 0.9


def _step(state: State, form: Form, course: Course, config: EsConfig, pool: ThreadPoolExecutor) -> None:
    random = np.random.default_rng()
    random.bit_generator.state = state.random
    base_network = form.network(form.start(np.random.default_rng(config.seed)))
    runs, base = _window(random, course, config, base_network)
    noise = random.standard_normal((config.pairs, form.length))
    vectors = state.vector + config.sigma * np.concatenate([noise, -noise])
    costs = list(pool.map(lambda vector: cost(waits(runs.outcome(form.network(vector))), base, config), vectors))
    place = np.argsort(np.argsort(costs, kind="stable")) / (2 * config.pairs - 1) - 0.5
    slope = ((place[: config.pairs] - place[config.pairs :])[:, None] * noise).mean(axis=0)
    state.generation += 1
    state.first = _FIRST * state.first + (1 - _FIRST) * slope
    state.second = _SECOND * state.second + (1 - _SECOND) * slope**2
    first = state.first / (1 - _FIRST**state.generation)
    second = state.second / (1 - _SECOND**state.generation)
    state.vector = state.vector - config.rate * config.sigma * first / (np.sqrt(second) + 1e-8)
    state.mean = _MEAN * state.mean + (1 - _MEAN) * state.vector
    state.random = dict(random.bit_generator.state)


_TRIES: Final = 50


def _window(
    random: np.random.Generator, course: Course, config: EsConfig, base: Network
) -> tuple[Runs, tuple[float, float]]:
    """A window of the training part in which somebody waits, and what the base rule has there; the whole part where no
    window is found."""
    submit_s, length_s = course.jobs.jobs.submit_s, config.window_days * 86_400.0
    for _ in range(_TRIES):
        begin_s = submit_s[0] + random.uniform(0.0, max(0.0, course.choose_from_s - submit_s[0] - length_s))
        first, last = np.searchsorted(submit_s, [begin_s, begin_s + length_s])
        load, nodes = random.uniform(*config.load), random.uniform(*config.nodes)
        instance = course.part(int(first), min(int(last), course.trained), load, nodes)
        if instance is not None:
            runs = Runs(instance, config)
            found = waits(runs.outcome(base))
            if found[0] >= config.least_wait_s:
                return runs, found
    whole = course.part(0, course.trained)
    assert whole is not None
    runs = Runs(whole, config)
    return runs, waits(runs.outcome(base))


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    config: dict[str, Any]
    generation: int
    arrays: list[bytes]
    """vector, mean, first, second, float64"""
    best: bytes | None
    random: str
    """JSON: numbers of 128 bits"""
    checks: list[Check]


def _write(path: Path, state: State, config: EsConfig) -> None:
    arrays = [array.tobytes() for array in (state.vector, state.mean, state.first, state.second)]
    best = None if state.best is None else state.best.tobytes()
    kept = _Kept(_told(config), state.generation, arrays, best, json.dumps(state.random), state.checks)
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(msgspec.msgpack.encode(kept))
    beside.replace(path)


def _read(path: Path | None, config: EsConfig) -> State | None:
    """Raises UserError for a file that is no checkpoint, or one of another configuration."""
    if path is None or not path.exists():
        return None
    try:
        kept = msgspec.msgpack.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"checkpoint {path}: {error}") from None
    if kept.config | {"generations": 0} != _told(config) | {"generations": 0}:
        raise UserError(f"checkpoint {path}: of another configuration; remove it, or give another --out")
    vector, mean, first, second = (np.frombuffer(data).copy() for data in kept.arrays)
    best = None if kept.best is None else np.frombuffer(kept.best).copy()
    return State(vector, mean, first, second, json.loads(kept.random), kept.generation, best, kept.checks)


def _told(config: EsConfig) -> dict[str, Any]:
    """As it comes back from a file."""
    told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(asdict(config)))
    return told
