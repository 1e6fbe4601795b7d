"""The model of one pool: what ranks its windows, what is compared with it, and what came of it.

A model that fails while it ranks is stood in for by its base rule, for that queue: told once, counted ever after.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.instructions import Decision, Place
from streamsched.core.model import Job
from streamsched.core.queue import is_static
from streamsched.core.window import Ranker, rank
from streamsched.policy import by_name
from streamsched.policy.features import Features
from streamsched.policy.models import Model
from streamsched.policy.shares import ByShares, Likeness, Share, likeness
from streamsched.routing.least_loaded import CanarySummary, ModelSummary, ShadowSummary

from .models import InUse, ModelFolder, is_model
from .settings import Settings

log = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 1.0
_LOOK_REST: Final = 50.0
"""Times as long as the last look at a queue took until the next: two orders of ten thousand jobs take 20 ms."""
_TELL_EVERY_S: Final = 60.0
_DRIFT_HALF_LIFE_S: Final = 300.0
DRIFTS: Final = 0.1
"""Share of the jobs outside of the range of training that is an alarm; half of it is the end of one."""
DRIFT_JOBS: Final = 100.0
"""Least number of jobs seen (each as often as it was looked at) for one."""


def ranker_now(settings: Settings) -> tuple[Ranker, tuple[str, ...]]:
    """By what a window would be ranked that was made now, and what is wrong with it; for commands. Raises UserError."""
    if not is_model(settings):
        return by_name(settings.scheduler.policy), ()
    folder = ModelFolder(settings)
    folder.poll(0.0)
    return PoolModel("", folder, settings.scheduler).ranker, folder.in_use.problems


@dataclass(slots=True)
class _Waits:
    """Of jobs that were placed."""

    placed: int = 0
    sum_s: float = 0.0

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.placed if self.placed else 0.0


@dataclass(slots=True)
class Drift:
    """Which features are outside of the range of training, of late: means over looks at the queue that fade by half in
    five minutes."""

    jobs: float = 0.0
    outside: dict[str, float] = field(default_factory=dict)
    """Jobs outside, by feature; as `jobs`."""
    alarms: set[str] = field(default_factory=set)
    _looked_at: float = -math.inf

    def look(self, now: float, jobs: int, shares: Mapping[str, float]) -> bool:
        """Whether there are other alarms than before."""
        kept = 0.5 ** (max(0.0, now - self._looked_at) / _DRIFT_HALF_LIFE_S)
        self._looked_at = now
        self.jobs = self.jobs * kept + jobs
        self.outside = {name: self.outside.get(name, 0.0) * kept + jobs * share for name, share in shares.items()}
        before = set(self.alarms)
        for name in self.outside:
            share = self.share(name)
            if share < DRIFTS / 2:
                self.alarms.discard(name)
            elif share >= DRIFTS and self.jobs >= DRIFT_JOBS:
                self.alarms.add(name)
        return self.alarms != before

    def share(self, name: str) -> float:
        return self.outside.get(name, 0.0) / self.jobs if self.jobs else 0.0


class PoolModel:
    """What ranks one pool. `refresh` before `ranker` is used, `placed` after a commit, `look` now and then."""

    def __init__(self, pool: str, folder: ModelFolder, config: SchedulerConfig) -> None:
        self._pool, self._folder, self._config = pool, folder, config
        self._features = Features()
        self.failures: Counter[str] = Counter()
        """What the model could not do, by kind."""
        self._drift = Drift()
        self._share: Share | None = None
        self._shadow: Ranker | None = None
        self._likeness: Likeness | None = None
        self._shadow_scores: dict[str, float] = {}
        self._looks = 0
        self._canary, self._others = _Waits(), _Waits()
        self._looked_at, self._told_at, self._look_pause = -math.inf, -math.inf, _LOOK_EVERY_S
        self._in_use = folder.in_use
        self.ranker = self._made()

    def refresh(self) -> bool:
        """Whether the pool is ranked by something else from now on."""
        before, used = self._in_use, self._folder.in_use
        if used is before:
            return False
        self._in_use = used
        if used.model is not before.model:
            self._drift = Drift()
        if used.shadow is not before.shadow:
            self._likeness, self._looks, self._shadow_scores = None, 0, {}
            self._shadow = self._shadow_ranker()
        if _ranks(used) == _ranks(before):
            return False
        if (used.canary, used.canary_share) != (before.canary, before.canary_share):
            self._canary, self._others = _Waits(), _Waits()
        self.ranker = self._made()
        return True

    def _made(self) -> Ranker:
        used = self._in_use
        base = by_name(used.base)
        main = base if used.model is None else _Guarded(used.model.ranker(self._features), base, self._failed)
        self._shadow = self._shadow_ranker()
        self._share = None
        if used.canary is None or used.canary_share is None:
            return main
        self._share = Share(used.canary_share.fraction, used.canary_share.tenants, used.canary.name)
        both = ByShares(main, used.canary.ranker(self._features), self._share)
        return _Guarded(both, main, self._failed)

    def _shadow_ranker(self) -> Ranker | None:
        return self._in_use.shadow.ranker(self._features) if self._in_use.shadow is not None else None

    def _failed(self, what: str, error: Exception | None) -> None:
        self.failures[what] += 1
        if self.failures[what] == 1:
            log.error("pool %s: %s. Told once", self._pool, what, exc_info=error)

    # ── what came of it ──────────────────────────────────────────────────────────────────────────────────────────────

    def placed(self, decisions: Sequence[Decision], state: ClusterState) -> None:
        """After they were made."""
        if self._share is None:
            return
        for decision in decisions:
            job = state.jobs.get(decision.job_id) if isinstance(decision, Place) else None
            if job is not None:
                group = self._canary if job.spec in self._share else self._others
                group.placed += 1
                group.sum_s += job.waited_s

    def look(self, state: ClusterState, clock: Callable[[], float]) -> None:
        """At the queue as it is: whether the model knows such jobs, and what the shadow makes of them."""
        now = clock()
        if 0.0 <= now - self._looked_at < self._look_pause:  # a clock that was set back does not put off the next look
            return
        try:
            self._look(state, now)
        except Exception as error:
            self._failed(f"looking at the queue for {self.ranker.name}: {type(error).__name__}", error)
        self._looked_at = clock()
        self._look_pause = max(_LOOK_EVERY_S, _LOOK_REST * (self._looked_at - now))

    def _look(self, state: ClusterState, now: float) -> None:
        used, jobs = self._in_use, state.queued_jobs()
        if not jobs:
            self._shadow_scores = {}
            return
        if used.model is not None:
            outside = used.model.outside(self._features(jobs, state, now))
            if self._drift.look(now, len(jobs), outside):
                self._tell_drift(used.model)
        if self._shadow is not None:
            self._compare(self._shadow, state, now)

    def _compare(self, shadow: Ranker, state: ClusterState, now: float) -> None:
        theirs = rank(state, shadow, now)
        alike = self._likeness = likeness(rank(state, self.ranker, now), theirs, self._config.window_jobs)
        self._shadow_scores = {job.spec.job_id: -theirs.key(place).score for place, job in theirs}
        self._looks += 1
        if 0.0 <= now - self._told_at < _TELL_EVERY_S:
            return
        self._told_at = now
        log.info(
            "pool %s: shadow %s against %s: %d jobs, correlation of places %.3f, %.0f%% of the first %d the same",
            *(
                self._pool,
                shadow.name,
                self.ranker.name,
                alike.jobs,
                alike.correlation,
                100.0 * alike.first,
                alike.among,
            ),
        )

    def _tell_drift(self, model: Model) -> None:
        if not self._drift.alarms:
            log.warning("pool %s: model %s: jobs are within the range of training again", self._pool, model.name)
            return
        told = ", ".join(f"{name} {100.0 * self._drift.share(name):.0f}%" for name in sorted(self._drift.alarms))
        log.warning(
            "pool %s: model %s drifts: jobs outside of the range of training, by feature: %s",
            *(self._pool, model.name, told),
        )

    @property
    def shadow_scores(self) -> Mapping[str, float]:
        """By job id, as of the last look; empty without a shadow."""
        return self._shadow_scores

    def summary(self) -> ModelSummary:
        used, alike = self._in_use, self._likeness
        shadow = canary = None
        if used.shadow is not None and alike is not None:
            shadow = ShadowSummary(
                model=used.shadow.name,
                jobs=alike.jobs,
                correlation=alike.correlation,
                first=alike.first,
                among=alike.among,
                looks=self._looks,
            )
        if used.canary is not None:
            canary = CanarySummary(
                model=used.canary.name,
                placed=self._canary.placed,
                wait_s=self._canary.mean_s,
                others_placed=self._others.placed,
                others_wait_s=self._others.mean_s,
            )
        return ModelSummary(
            wanted=used.wanted,
            used=used.model.name if used.model is not None else "",
            base=used.base,
            digest=used.model.digest[:12] if used.model is not None else "",
            problems=used.problems,
            failures=sum(self.failures.values()),
            drift={name: self._drift.share(name) for name in sorted(self._drift.alarms)},
            shadow=shadow,
            canary=canary,
        )


def _ranks(used: InUse) -> InUse:
    """What of it decides the order."""
    return used._replace(wanted="", shadow=None, problems=())


class _Guarded:
    """The rule, and another one for the queues that it fails on."""

    def __init__(self, ranker: Ranker, instead: Ranker, failed: Callable[[str, Exception | None], None]) -> None:
        self.name = ranker.name
        self.static = is_static(ranker)
        self._ranker, self._instead, self._failed = ranker, instead, failed

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> Sequence[float]:
        try:
            found = self._ranker.scores(jobs, state, now)
        except Exception as error:
            self._failed(f"{self.name}: {type(error).__name__}; {self._instead.name} ranks that queue", error)
        else:
            if len(found) == len(jobs) and math.isfinite(sum(found)):
                return found
            self._failed(f"{self.name}: scores that are no numbers; {self._instead.name} ranks that queue", None)
        return self._instead.scores(jobs, state, now)
