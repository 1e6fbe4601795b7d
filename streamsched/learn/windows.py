"""What reinforcement learning is done on: windows of a workload, what they cost, and episodes of many of them at once.

A window is some hundred jobs of a longer workload on a cluster that is not empty: the jobs before it are scheduled by
the base rule, and what runs or waits when the window begins is carried over. In the arrays that the compiled simulation
takes, all that runs starts just before the first carried job came, one after the other, so nothing is decided about it,
and goes on to its own end. Carried jobs keep their times of submission: they did not fit when the window began, and do
not before. Placement is made anew, the largest first, so that now and then one of them fits after all.

What a window costs is a sum of ramps, one per job: nothing until it begins, then so much per second, until it ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from streamsched.errors import UserError
from streamsched.policy.network import Network
from streamsched.sim.fast import Backfill, Bools, Floats, Outcome, Rule, Workload, fits_cluster, simulate
from streamsched.sim.scored import Episode, Instance, episode

REWARDS: Final = ("wait", "jct", "bounded_slowdown")
BOUND_S: Final = 10.0
"""Of the bounded slowdown (Feitelson et al., JSSPP 1997)."""
_LEAD_S: Final = 1.0
"""Before the first carried job comes: all that runs starts within half of it."""


# ── what it costs ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Ramps:
    """[ramp] each: cost grows by `slope` per second from `begin_s` to `end_s` (inf: still growing)."""

    begin_s: Floats
    end_s: Floats
    slope: Floats

    def until(self, times_s: Floats) -> Floats:
        """[time] cost that has grown by then."""
        grown = np.minimum(times_s[:, None], self.end_s) - self.begin_s
        return np.asarray(np.maximum(grown, 0.0) @ self.slope)

    def total(self) -> float:
        return float(np.maximum(self.end_s - self.begin_s, 0.0) @ self.slope)


@dataclass(frozen=True)
class Reward:
    """Minus a weighted sum over jobs of `wait` (s), `jct` (s from submission to end) and `bounded_slowdown` (what it is
    above 1): (name, weight) of each."""

    weights: tuple[tuple[str, float], ...] = (("wait", 1.0),)

    @classmethod
    def parse(cls, text: str) -> Self:
        """`wait`, or a mix as `wait:1,bounded_slowdown:300`. Raises UserError."""
        found = []
        for part in text.split(","):
            name, colon, weight = part.strip().partition(":")
            try:
                value = float(weight) if colon else 1.0
            except ValueError:
                value = -1.0
            if name not in REWARDS or not 0.0 < value < np.inf:
                raise UserError(
                    f"reward {text!r}: expected NAME[:WEIGHT][,...] of {', '.join(REWARDS)}, weights above 0"
                )
            found.append((name, value))
        return cls(tuple(found))

    def ramps(self, jobs: Workload, start_s: Floats, finish_s: Floats) -> Ramps:
        """`start_s`, `finish_s`: [job], inf where it is yet to come."""
        submit, duration = jobs.submit_s, jobs.duration_s
        least = np.maximum(duration, BOUND_S)
        one = np.ones(len(jobs))
        of = {
            "wait": (submit, start_s, one),
            "jct": (submit, finish_s, one),
            "bounded_slowdown": (submit + least - duration, start_s, 1.0 / least),
        }
        parts = [(*of[name][:2], weight * of[name][2]) for name, weight in self.weights]
        begin, end, slope = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Ramps(begin, end, slope)

    def cost(self, window: Window, outcome: Outcome) -> float:
        """From the beginning of the window to the last end."""
        ramps = self.ramps(window.instance.jobs, outcome.start_s, outcome.finish_s)
        return ramps.total() - float(ramps.until(np.array([window.begin_s]))[0])


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Window:
    instance: Instance
    begin_s: float
    """What is carried over was submitted before."""

    @property
    def new(self) -> int:
        """Jobs that come in the window."""
        return int((self.instance.jobs.submit_s >= self.begin_s).sum())


@dataclass(frozen=True)
class Sampling:
    """How windows are drawn, each range uniformly, the window's begin anywhere in the workload."""

    jobs: tuple[int, int] = (256, 256)
    load: tuple[float, float] = (1.0, 1.0)
    """Arrivals come so many times as fast."""
    nodes: tuple[float, float] = (1.0, 1.0)
    """Share of the cluster's nodes, from the first on; jobs that never fit these are left out."""
    warm_jobs: int = 1_000
    """Jobs before the window that the base rule schedules, at most; 0: the cluster is empty."""

    def draw(self, source: Instance, base: Rule, random: np.random.Generator) -> Window:
        """Raises UserError where no job of the stretch fits the cluster."""
        count = min(int(random.integers(self.jobs[0], self.jobs[1] + 1)), len(source.jobs))
        first = int(random.integers(0, len(source.jobs) - count + 1))
        nodes = max(1, round(len(source.node_gpus) * random.uniform(*self.nodes)))
        return cut(source, base, first, count, self.warm_jobs, random.uniform(*self.load), nodes)


def cut(
    source: Instance,
    base: Rule,
    first: int,
    count: int,
    warm_jobs: int = 0,
    load: float = 1.0,
    nodes: int | None = None,
) -> Window:
    """`count` jobs of `source` from number `first` on, after `warm_jobs` under `base`; `nodes`: the first so many."""
    node_gpus = list(source.node_gpus[:nodes])
    begin = max(0, first - warm_jobs)
    places = np.arange(begin, first + count)
    places = places[fits_cluster(source.jobs.gpus[places], node_gpus)]
    before, inside = places[places < first], places[places >= first]
    if not len(inside):
        raise UserError(f"no job of the {count} from {first} on fits {len(node_gpus)} nodes")
    submit = (source.jobs.submit_s - source.jobs.submit_s[begin]) / load
    now = float(submit[inside[0]])
    if not len(before):
        return Window(source.take(inside, node_gpus, submit_s=submit[inside]), now)
    past = source.jobs.take(before, submit_s=submit[before])
    outcome = simulate(past, node_gpus, base, Backfill.SKIP)
    runs, waits = (outcome.start_s < now) & (outcome.finish_s >= now), outcome.start_s >= now
    running = before[runs]
    order = np.argsort(-source.jobs.gpus[running], kind="stable")
    since = float(submit[before[waits]].min(initial=now)) - _LEAD_S
    starts = since + np.linspace(0.0, _LEAD_S / 2, len(running), endpoint=False)
    rest = np.concatenate([before[waits], inside])
    return Window(
        source.take(
            np.concatenate([running[order], rest]),
            node_gpus,
            submit_s=np.concatenate([starts, submit[rest]]),
            duration_s=np.concatenate([outcome.finish_s[runs][order] - starts, source.jobs.duration_s[rest]]),
        ),
        now,
    )


def drawn_instance(seed: int, jobs: int = 2_000, nodes: int = 4, load: float = 1.1) -> Instance:
    """Jobs of 1 to 8 GPUs, log-normal run times, estimates wrong by a factor of about two, Poisson arrivals."""
    random = np.random.default_rng(seed)
    gpus = random.choice([1, 1, 1, 2, 4, 8], jobs)
    duration = np.exp(random.normal(6.0, 1.5, jobs))
    submit = np.cumsum(random.exponential((duration * gpus).mean() / (8 * nodes * load), jobs))
    estimate = duration * np.exp(0.7 * random.standard_normal(jobs))
    return Instance(Workload(submit - submit[0], duration, gpus, estimate), [8] * nodes)


def by_rule(instance: Instance, rule: Rule) -> Outcome:
    """The schedule of a base rule; what fits behind a job that does not is started."""
    return simulate(instance.jobs, instance.node_gpus, rule, Backfill.SKIP)


# ── episodes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Rollout:
    """An episode of a window: `counted` [decision] of it, those from the window's beginning on, are the steps."""

    window: Window
    episode: Episode
    counted: Bools
    cost: Floats
    """[step + 1] grown by each step since the window's beginning, and to the end."""

    @property
    def time_s(self) -> Floats:
        """[step + 1] of each, and of the last end."""
        return np.append(self.episode.time_s[self.counted], self.episode.outcome.finish_s.max())


def rollouts(
    windows: Sequence[Window],
    network: Network,
    seeds: Sequence[int],
    reward: Reward = Reward(),
    choices: int = 64,
    temperature: float = 1.0,
    threads: int | None = None,
) -> list[Rollout]:
    """One for each window with its seed, the same for any number of threads (None: one per core)."""

    def run(task: tuple[Window, int]) -> Rollout:
        window, seed = task
        done = episode(window.instance, network, seed, choices, temperature)
        ramps = reward.ramps(window.instance.jobs, done.outcome.start_s, done.outcome.finish_s)
        counted = done.time_s >= window.begin_s
        moments = np.concatenate([[window.begin_s], done.time_s[counted], [done.outcome.finish_s.max()]])
        cost = ramps.until(moments)
        return Rollout(window, done, counted, cost[1:] - cost[0])

    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(run, zip(windows, seeds, strict=True)))
