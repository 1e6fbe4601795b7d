"""The queue as a Gymnasium environment, `streamsched/Queue-v0` once this module is imported.

One step starts one job: whichever of the first `choices` waiting jobs that fit. Where one alone fits there is nothing
to decide, and it is started without a step. That is what `sim.scored.episode` does, in plain Python: a test holds both
equal, decision by decision.

Observation: `features` [choices, feature], the features of `policy.features` scaled as `policy.network` scales its
inputs, from 0 to 1, rows behind the last choice 0; `mask` [choices], 1 where there is a job. The mask is
`info["action_mask"]` too, as bools. An action without a job starts the oldest job that fits, and `info["invalid"]` is
True: agents without masks can learn, and no step raises.

Reward: minus what the window's cost (`windows.Reward`) grows until the next step, by `scale`. With `relative`, what the
base rule's cost on the same window grows in that time is added, so that an episode's sum is what is saved against it.
"""

from __future__ import annotations

import heapq
from typing import Any, Final, SupportsFloat

import numpy as np

from streamsched.errors import UserError
from streamsched.policy.features import (
    FEATURES,
    INDEX,
    Float32s,
    Floats,
    fragmentation,
    largest_free,
    load,
    wait_s,
)
from streamsched.policy.network import Network
from streamsched.sim.fast import Rule
from streamsched.sim.scored import Instance

from .windows import Ramps, Reward, Sampling, Window, by_rule, drawn_instance

try:
    import gymnasium
    from gymnasium import spaces
except ModuleNotFoundError as error:
    if error.name != "gymnasium":
        raise
    raise UserError("the environment needs gymnasium: pip install 'streamsched[train]'") from None

Observation = dict[str, np.ndarray[Any, Any]]

_CLUSTER: Final = INDEX["free_gpus"]
_DRAWS: Final = 100
"""Windows in which nothing is to be decided, one after the other, before giving up."""


_SCALE: Final = Network.blank()


def scaled(features: Float32s) -> Float32s:
    """[..., feature] as networks take them, 0 to 1."""
    rows = features.reshape(-1, len(FEATURES))
    return _SCALE.inputs(rows, slice(None)).astype(np.float32).reshape(features.shape)


SMALL_WINDOWS: Final = Sampling(jobs=(64, 64), warm_jobs=200)


class World:
    """One schedule, from decision to decision. `choices`: how many are looked at."""

    def __init__(self, instance: Instance, choices: int) -> None:
        self.jobs, self._choices = instance.jobs, choices
        self._fixed, nodes = instance.arrays[3], instance.arrays[4]
        self._free: list[int] = nodes.tolist()
        self._whole, self._capacity = int(nodes.max()), int(nodes.sum())
        self._running: list[tuple[float, int, list[tuple[int, int]]]] = []
        self._arrived = 0
        self.waiting: list[int] = []
        self.now = float(self.jobs.submit_s[0])
        self.start_s = np.full(len(self.jobs), np.inf)
        self.fitting: list[int] = []
        """What is to be decided on, oldest first: two jobs at least, or none when all is over."""

    @property
    def finish_s(self) -> Floats:
        """[job] inf where it has not started."""
        return self.start_s + self.jobs.duration_s

    def advance(self) -> None:
        """To the next decision, or to the end."""
        while True:
            self.fitting = self._fitting()
            if len(self.fitting) > 1:
                return
            if self.fitting:
                self.begin(self.fitting[0])
            elif not self._next_moment():
                return

    def begin(self, job: int) -> None:
        """Best fit, the first of equal nodes; a job larger than the largest node takes whole ones and a rest."""
        gpus, placed = int(self.jobs.gpus[job]), []
        while gpus > 0:
            part = min(gpus, self._whole)
            node = min((free, node) for node, free in enumerate(self._free) if free >= part)[1]
            self._free[node] -= part
            placed.append((node, part))
            gpus -= part
        self.waiting.remove(job)
        self.start_s[job] = self.now
        heapq.heappush(self._running, (self.now + float(self.jobs.duration_s[job]), job, placed))

    def features(self) -> Float32s:
        """[choice, feature] of `fitting`, unscaled."""
        found = np.zeros((len(self.fitting), len(FEATURES)), np.float32)
        found[:, : len(self._fixed)] = self._fixed[:, self.fitting].T
        since: Floats = self.jobs.submit_s[self.fitting]
        found[:, INDEX["wait_s"]] = wait_s(np.zeros(len(since)), since, self.now)
        found[:, _CLUSTER:] = self._cluster()
        return found

    def _cluster(self) -> list[float]:
        """The features of the cluster, in their order."""
        having = np.bincount(self._free, minlength=self._whole + 1)
        asked = self.jobs.gpus[self.waiting]
        demand = np.bincount(np.minimum(asked, self._whole), minlength=self._whole + 1)
        free, queued = float(sum(self._free)), float(asked.sum())
        return [
            free,
            float(largest_free(having)),
            float(len(self.waiting)),
            queued,
            load(self._capacity - free, queued, float(self._capacity)),
            fragmentation(having, demand, len(self.waiting)),
        ]

    def _fitting(self) -> list[int]:
        whole = sum(free == self._whole for free in self._free)
        rest = max((free for free in self._free if free < self._whole), default=0)
        limit = whole * self._whole + rest
        found: list[int] = []
        for job in self.waiting:
            if len(found) == self._choices:
                break
            if self.jobs.gpus[job] <= limit:
                found.append(job)
        return found

    def _next_moment(self) -> bool:
        """All completions, then all arrivals; False when there is nothing more."""
        submit, total = self.jobs.submit_s, len(self.jobs)
        ends = self._running[0][0] if self._running else np.inf
        comes = float(submit[self._arrived]) if self._arrived < total else np.inf
        if min(ends, comes) == np.inf:
            return False
        self.now = min(ends, comes)
        while self._running and self._running[0][0] <= self.now:
            for node, gpus in heapq.heappop(self._running)[2]:
                self._free[node] += gpus
        while self._arrived < total and submit[self._arrived] <= self.now:
            self.waiting.append(self._arrived)
            self._arrived += 1
        return True


class QueueEnv(gymnasium.Env[Observation, np.int64]):
    """The module says what is seen, done and rewarded. `source`: the workload that windows are cut from (None: a drawn
    one); `reward`: as `Reward.parse` takes it, or name -> weight; `base`: schedules what is before a window. An episode
    is given a window by `reset(options={"window": Window})`, or draws one."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own)

    def __init__(
        self,
        source: Instance | None = None,
        sampling: Sampling = SMALL_WINDOWS,
        reward: str | dict[str, float] = "wait",
        base: Rule = Rule.FCFS,
        relative: bool = False,
        scale: float = 3_600.0,
        choices: int = 32,
    ) -> None:
        if choices < 2:
            raise ValueError("2 choices at least")
        self._source, self._sampling, self._base = source or drawn_instance(0), sampling, base
        text = reward if isinstance(reward, str) else ",".join(f"{name}:{weight!r}" for name, weight in reward.items())
        self._reward, self._relative, self._scale, self._choices = Reward.parse(text), relative, scale, choices
        self.observation_space: spaces.Space[Any] = spaces.Dict(
            {
                "features": spaces.Box(0.0, 1.0, (choices, len(FEATURES)), np.float32),
                "mask": spaces.MultiBinary(choices),
            }
        )
        self.action_space = spaces.Discrete(choices)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Raises UserError where nothing is to be decided, in the window that is given or in a hundred drawn ones."""
        super().reset(seed=seed)
        given: Window | None = (options or {}).get("window")
        for _ in range(1 if given is not None else _DRAWS):
            self.window = given or self._sampling.draw(self._source, self._base, self.np_random)
            self.world = World(self.window.instance, self._choices)
            self.world.advance()
            if self.world.fitting:
                self._base_ramps = self._ramps_of_base()
                self._counting = False
                self._count_from_begin()
                return self._seen(), self._info(False)
        raise UserError("nothing is to be decided in these windows: ask for more jobs, load or choices")

    def step(self, action: np.int64) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        world = self.world
        invalid = not 0 <= action < len(world.fitting)
        if world.fitting:
            world.begin(world.fitting[0 if invalid else int(action)])
            world.advance()
        reward = self._gain()
        return self._seen(), reward, not world.fitting, False, self._info(invalid)

    def raw(self) -> Float32s:
        """[choice, feature] unscaled, of the jobs that can be chosen."""
        return self.world.features()

    def _count_from_begin(self) -> None:
        """As soon as the window has begun: what starts before that is known by then."""
        if not self._counting and (self.world.now >= self.window.begin_s or not self.world.fitting):
            self._counting, begin = True, self.window.begin_s
            self._cost_before, self._base_before = self._cost_by(begin), self._cost_of_base(begin)

    def _gain(self) -> float:
        """Since the last step; the first step that counts has what came since the window began."""
        self._count_from_begin()
        if not self._counting:
            return 0.0
        now = self.world.now if self.world.fitting else np.inf
        cost, base = self._cost_by(now), self._cost_of_base(now)
        gain = self._cost_before - cost + base - self._base_before
        self._cost_before, self._base_before = cost, base
        return gain / self._scale

    def _cost_by(self, moment: float) -> float:
        world = self.world
        return float(self._reward.ramps(world.jobs, world.start_s, world.finish_s).until(np.array([moment]))[0])

    def _ramps_of_base(self) -> Ramps | None:
        if not self._relative:
            return None
        outcome = by_rule(self.window.instance, self._base)
        return self._reward.ramps(self.window.instance.jobs, outcome.start_s, outcome.finish_s)

    def _cost_of_base(self, moment: float) -> float:
        return 0.0 if self._base_ramps is None else float(self._base_ramps.until(np.array([moment]))[0])

    def _seen(self) -> Observation:
        features = np.zeros((self._choices, len(FEATURES)), np.float32)
        mask = np.zeros(self._choices, np.int8)
        if self.world.fitting:
            features[: len(self.world.fitting)] = scaled(self.raw())
            mask[: len(self.world.fitting)] = 1
        return {"features": features, "mask": mask}

    def _info(self, invalid: bool) -> dict[str, Any]:
        mask = np.arange(self._choices) < len(self.world.fitting)
        return {"action_mask": mask, "invalid": invalid, "time_s": self.world.now}


gymnasium.register(id="streamsched/Queue-v0", entry_point="streamsched.learn.env:QueueEnv")
