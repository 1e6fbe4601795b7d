"""Compiled simulation under learned priorities: expressions, many at once, and networks.

The loop is in `scored_kernel.py`; what it means is what `sim.simulator` over the core does with `ByExpression` or
`ByNetwork` and `backfill` skip: a test compares them, start by start. Needs the extra `fast`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from streamsched.policy.expression import Expression
from streamsched.policy.features import FEATURES, INDEX, UNKNOWN_SPREAD, Float32s, work_gpu_s
from streamsched.policy.network import Network
from streamsched.policy.rules import UNKNOWN_RUN_S

from .fast import (
    Bools,
    Floats,
    Ints,
    Outcome,
    Stretches,
    Workload,
    _outcome,
    _refuse_what_cannot_run,
    compiled,
    workers_of,
)

Codes = np.ndarray[Any, np.dtype[np.int16]]

MEASURES = ("weighted_wait_s", "weighted_wait_max_s", "utilisation", "mean_wait_s", "max_wait_s", "slowdown")
"""Of a schedule: mean (by weight) and maximum of weight x wait, useful share of the GPU time, mean and maximum wait,
mean of (wait + run time) / run time with at least 10 s below (bounded slowdown: Feitelson et al., JSSPP 1997)."""

_CHUNK = 32
"""Programs that a thread takes at a time."""


@dataclass(frozen=True, eq=False)
class Instance:
    """Jobs and a cluster. Raises UserError where a job could never run; ValueError for arrays that do not match."""

    jobs: Workload
    """Of `estimate_s` policies see run_s; without estimates nothing is known of the run times."""
    node_gpus: Sequence[int]
    weight: Floats | None = None
    """[job]; None: 1."""
    spread: Floats | None = None
    """[job] of the predictions; None: 0, or the widest where nothing is known."""
    reserve_after_s: float = math.inf
    """A job that has waited so long gets nodes of its own, as in the core (ADR 0014): at the next arrival or completion
    those with most room then, which nobody else may use until it starts, there or elsewhere."""
    reservations_max: int = 4
    """At a time, the first to arrive first."""

    def __post_init__(self) -> None:
        _refuse_what_cannot_run(self.jobs, self.node_gpus)
        for given in (self.weight, self.spread):
            if given is not None and (given.shape != (len(self.jobs),) or not np.isfinite(given).all()):
                raise ValueError(f"{len(self.jobs)} finite numbers expected for weight and spread")
        if not self.reserve_after_s >= 0 or self.reservations_max < 0:
            raise ValueError("reserve_after_s and reservations_max are at least 0")

    def take(
        self,
        which: Ints | Bools | slice,
        node_gpus: Sequence[int] | None = None,
        *,
        submit_s: Floats | None = None,
        duration_s: Floats | None = None,
    ) -> Instance:
        """These jobs (`Workload.take`) on the same cluster, or on nodes of `node_gpus`. Raises as `Instance` does."""
        weight, spread = (None if given is None else given[which] for given in (self.weight, self.spread))
        jobs = self.jobs.take(which, submit_s=submit_s, duration_s=duration_s)
        nodes = self.node_gpus if node_gpus is None else node_gpus
        return replace(self, jobs=jobs, node_gpus=nodes, weight=weight, spread=spread)

    @cached_property
    def arrays(self) -> tuple[Floats, Floats, Ints, Floats, Ints, float, int]:
        """What the compiled loop takes: (submit, duration, GPUs, fixed features [feature, job], GPUs of nodes, when
        nodes are kept, for how many)."""
        jobs, known = self.jobs, self.jobs.estimate_s is not None
        run_s = jobs.estimate_s if jobs.estimate_s is not None else np.full(len(jobs), UNKNOWN_RUN_S)
        spread = np.full(len(jobs), 0.0 if known else UNKNOWN_SPREAD) if self.spread is None else self.spread
        weight = np.ones(len(jobs)) if self.weight is None else self.weight
        gpus = jobs.gpus.astype(np.float64)
        nodes = workers_of(jobs.gpus, self.node_gpus).astype(np.float64)
        fixed = np.array([gpus, nodes, run_s, spread, work_gpu_s(run_s, gpus), weight], np.float64)
        return (
            np.ascontiguousarray(jobs.submit_s, np.float64),
            np.ascontiguousarray(jobs.duration_s, np.float64),
            np.ascontiguousarray(jobs.gpus, np.int64),
            fixed.astype(np.float32).astype(np.float64),
            np.asarray(self.node_gpus, np.int64),
            float(self.reserve_after_s),
            int(self.reservations_max),
        )


def simulate_expression(instance: Instance, expression: Expression) -> Outcome:
    """All jobs to their ends; what fits behind a job that does not is started."""
    kernel = compiled("scored_kernel")
    codes, constants = np.array(expression.codes, np.int16), np.array(expression.constants, np.float64)
    given = kernel.Instance(*instance.arrays)
    return _outcome_of(instance, kernel.run_program(given, codes, constants, expression.stack))


def simulate_network(instance: Instance, network: Network) -> Outcome:
    """As `simulate_expression`."""
    kernel = compiled("scored_kernel")
    return _outcome_of(instance, kernel.run_network(kernel.Instance(*instance.arrays), _layers(kernel, network)))


@dataclass(frozen=True, eq=False)
class Episode:
    """A schedule made by decisions, and each of them. A moment at which one job alone fits is none."""

    outcome: Outcome
    features: Float32s
    """[decision, choice, feature] of the jobs that could be chosen, 0 behind them."""
    choices: Ints
    """[decision] how many there were, 2 at least."""
    chosen: Ints
    """[decision] which of them."""
    job: Ints
    """[decision] its number."""
    time_s: Floats
    """[decision]"""
    log_p: Floats
    """[decision] ln of the probability of the choice; 0 where always the best was taken."""
    queue_job_s: Floats
    """[decision] integral of the queue's length until then: its negative increments are a reward for waiting times."""


def episode(instance: Instance, network: Network, seed: int, choices: int = 64, temperature: float = 1.0) -> Episode:
    """Start one job after the other, each drawn by the softmax of scores / `temperature` from the first `choices` in
    the queue that fit, seen as they are then; at temperature 0 the best one. Equal seeds give equal episodes."""
    if choices < 1:
        raise ValueError("a decision needs a choice")
    kernel = compiled("scored_kernel")
    given = kernel.Instance(*instance.arrays), _layers(kernel, network)
    done, trail = kernel.run_episode(*given, choices, float(temperature), seed)
    count = int(trail.length[0])
    kept = (trail.features, trail.choices, trail.chosen, trail.job, trail.time, trail.log_p, trail.queue_job_s)
    return Episode(_outcome_of(instance, done), *(array[:count] for array in kept))


def _layers(kernel: ModuleType, network: Network) -> Any:
    sizes, weights = np.array(network.sizes, np.int64), network.weights.astype(np.float64)
    return kernel.Layers(sizes, weights, *network.scale, np.zeros(len(FEATURES) - INDEX["free_gpus"]))


def _outcome_of(instance: Instance, done: tuple[Floats, Floats, Ints, Ints, Floats]) -> Outcome:
    start, finish, placed_at, placed, sums = done
    jobs = instance.jobs
    runs = Stretches(np.arange(len(jobs)), start, finish, placed_at, placed)
    preemptions = np.zeros(len(jobs), np.int64)
    wait = start - jobs.submit_s
    return _outcome(jobs, instance.node_gpus, start, finish, wait, preemptions, runs, placed_at, placed, sums)


def measure(instances: Sequence[Instance], expressions: Sequence[Expression], threads: int | None = None) -> Floats:
    """[instance, expression, measure] of all schedules (`MEASURES`), the same for any number of threads (None: one per
    core)."""
    kernel = compiled("scored_kernel")
    arrays = [kernel.Instance(*instance.arrays) for instance in instances]
    chunks = [expressions[first : first + _CHUNK] for first in range(0, len(expressions), _CHUNK)]
    packed = [_packed(chunk) for chunk in chunks]
    found = np.empty((len(instances), len(expressions), len(MEASURES)))

    def work(task: tuple[int, int]) -> None:
        place, number = task
        first = number * _CHUNK
        found[place, first : first + _CHUNK] = kernel.measure_programs(arrays[place], *packed[number])

    tasks = [(place, number) for place in range(len(instances)) for number in range(len(chunks))]
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        list(pool.map(work, tasks))
    return found


def _packed(expressions: Sequence[Expression]) -> tuple[Codes, Ints, Floats, int]:
    """(codes [program, place], lengths, constants [program, constant], most values on the stack)."""
    lengths = np.array([len(expression.codes) for expression in expressions], np.int64)
    codes = np.zeros((len(expressions), int(lengths.max())), np.int16)
    constants = np.zeros((len(expressions), max(len(expression.constants) for expression in expressions)))
    for row, expression in enumerate(expressions):
        codes[row, : lengths[row]] = expression.codes
        constants[row, : len(expression.constants)] = expression.constants
    return codes, lengths, constants, max(expression.stack for expression in expressions)
