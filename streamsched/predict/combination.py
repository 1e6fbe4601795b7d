"""The predictor to use: a weighted mean of the members' curves, calibrated.

    expect(submitted jobs)    what every member says now is kept, to be judged by the ends
    observe(finished job)     judge, recalibrate, then learn
    predict(job, age, ...)    the pooled curve, calibrated, given age and progress

The pool is linear (Stone 1961): P(T > t) = sum of share x P(T > t) by the member, so it is a curve again, and where
members disagree it is wide. The shares are those under which the pool finds what happens most likely (stacking of
distributions: Yao et al., Bayesian Analysis 13, 2018), found by expectation maximisation online:

    share <- share + step (share x density by the member / density by the pool - share)

with densities of ln(run time) from the curves as they were when the job was submitted (or at its end, for a job that
was never announced). A member with next to no share is not asked for answers, but still judged.

Steps are predicted like run times, from what the same user's jobs of like names did: a job that reports steps and not
of how many is as far as these say (iterations instead of times: A-SRPT, arXiv 2501.05563).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from .boosting import Boosting, BoostingState
from .calibration import Calibrator, CalibratorState, calibrated
from .curves import BINS, EDGES_LN, LONGEST_S, remaining, times
from .jobs import LEVELS, Features, Finished, Floats, usable
from .ladders import Ladder, LadderState, history, survival
from .neighbours import Neighbours, NeighboursState
from .pinball import pinball
from .predictor import Predictor

MEMBERS: Final = ("survival", "history", "neighbours", "boosting")
PENDING_MAX: Final = 100_000
"""Announced jobs that are kept; the oldest are forgotten first, and judged at their ends."""
_STEP: Final = 0.003
_STEP_FIRST: Final = 0.5
"""Of the first jobs; then it falls as 2 / jobs."""
_SHARE_LEAST: Final = 0.01
"""Stays with every member: it may be right again."""
_SHARE_ASKED: Final = 0.02
_NEAR_LN: Final = 1.5 * float(EDGES_LN[1])
"""The density is that of the run times no further than this."""
_DENSITY_LEAST: Final = 1e-5
_RECENT: Final = 1.0 / 200.0
_LONG: Final = 1.0 / 5_000.0
_DRIFT_JOBS: Final = 200
_DRIFT_COVERAGE: Final = 0.08
"""The standard deviation of a coverage over so many independent jobs is 0.015; jobs come in batches of alike ones."""
_DRIFT_MEDIAN: Final = 0.2
_DRIFT_LOSS: Final = 1.5
_KEPT: Final = 2
"""A curve is kept at every other edge until its job ends."""
_KEPT_LN: Final = EDGES_LN[::_KEPT]
_SCALE: Final = 65_535

Member = Ladder | Neighbours | Boosting


class Shares(Struct):
    """How far each member counts; they add up to 1."""

    of: list[float]
    jobs: int = 0

    def add(self, densities: Sequence[float]) -> None:
        """By each member of what happened; 0: it had nothing to say, and loses share to those that had."""
        pool = math.fsum(share * density for share, density in zip(self.of, densities, strict=True))
        if pool <= 0:
            return
        self.jobs += 1
        step = max(_STEP, min(_STEP_FIRST, 2.0 / (1.0 + self.jobs)))
        pairs = zip(self.of, densities, strict=True)
        moved = [max(share + step * share * (density / pool - 1.0), _SHARE_LEAST) for share, density in pairs]
        total = math.fsum(moved)
        self.of = [share / total for share in moved]


class Watched(Struct):
    """Decayed means of what the answers given turned out to be worth: over the last few hundred jobs, and over the
    last few thousand."""

    jobs: int = 0
    covered: float = 0.9
    """Within their 90 % interval."""
    below: float = 0.5
    """Below their median."""
    loss: float = 0.0
    """Pinball, ln s."""
    loss_long: float = 0.0

    def add(self, covered: bool, below: float, loss: float) -> None:
        self.jobs += 1
        fast, slow = max(_RECENT, 1.0 / (self.jobs + 1.0)), max(_LONG, 1.0 / self.jobs)
        self.covered += fast * (covered - self.covered)
        self.below += fast * (below - self.below)
        self.loss += max(_RECENT, 1.0 / self.jobs) * (loss - self.loss)
        self.loss_long += slow * (loss - self.loss_long)


class Drift(Struct, frozen=True, kw_only=True):
    """How the answers of late compare with what they promise; `reasons` is empty where they hold."""

    jobs: int
    coverage: float
    """Should be 0.9."""
    below_median: float
    """Should be 0.5; more: jobs became shorter than predicted."""
    loss: float
    loss_long: float
    reasons: tuple[str, ...]


class Expected(Struct, frozen=True, array_like=True):
    """What was said of a job."""

    curves: bytes
    """uint16 [member and the pool, edge]: P(T <= edge) x 65,535 at every other edge of the grid, not calibrated; only
    zeros: the member had nothing to say."""
    outer: tuple[float, float]
    """The calibrated levels of the 90 % interval."""
    answer: tuple[float, ...]
    """ln(s) at `LEVELS`, as given."""


class CombinationState(Struct, frozen=True, kw_only=True):
    survival: LadderState
    history: LadderState
    neighbours: NeighboursState
    boosting: BoostingState
    steps: LadderState
    shares: Shares
    calibration: CalibratorState
    expected: dict[str, Expected]
    watched: Watched
    observed: int


class Combination(Predictor):
    """See the module's text."""

    def __init__(self) -> None:
        self.survival: Ladder = survival()
        self.history: Ladder = history()
        self.neighbours = Neighbours()
        self.boosting = Boosting()
        self.steps: Ladder = history(keys_max=8_192)
        """Of training steps in place of seconds."""
        self.shares = Shares([1.0 / len(MEMBERS)] * len(MEMBERS))
        self.calibration = Calibrator()
        self.expected: OrderedDict[str, Expected] = OrderedDict()
        self.watched = Watched()
        self.observed = 0

    @property
    def members(self) -> tuple[Member, ...]:
        """In the order of `MEMBERS`."""
        return self.survival, self.history, self.neighbours, self.boosting

    # ── being asked ──────────────────────────────────────────────────────────────────────────────────────────────────

    def curves(self, jobs: Sequence[Features]) -> Floats:
        """[job, edge] calibrated survival curves of the whole run time."""
        if not jobs:
            return np.empty((0, BINS + 1))
        weights = self.weights().items()
        pool = sum(weight * getattr(self, name).curves(jobs) for name, weight in weights if weight)
        return calibrated(np.asarray(pool), np.array(self.calibration.levels))

    def expected_steps(self, job: Features, done: float) -> float:
        if not self.steps.knows(job):
            return 0.0
        left, _ = remaining(self.steps.curves([job]), np.array([min(done, LONGEST_S)]), (0.5,))
        return done + float(left[0, 0])

    def weights(self) -> dict[str, float]:
        """How far each member counts in an answer given now; they add up to 1."""
        asked = [
            share if share >= _SHARE_ASKED and self._able(name) else 0.0
            for name, share in zip(MEMBERS, self.shares.of, strict=True)
        ]
        total = math.fsum(asked)
        return {name: share / total for name, share in zip(MEMBERS, asked, strict=True)}

    def _able(self, member: str) -> bool:
        return member != "boosting" or self.boosting.trees is not None

    # ── being told ───────────────────────────────────────────────────────────────────────────────────────────────────

    def set_running(self, jobs: Sequence[Features], ages_s: Sequence[float]) -> None:
        """All jobs that run now, and for how long: they count as censored until this is told again."""
        for member in (self.survival, self.history, self.neighbours):
            member.set_running(jobs, ages_s)

    def expect(self, jobs: Sequence[Features]) -> None:
        """Jobs that were submitted just now. Those without an id cannot be kept."""
        named = [job for job in jobs if job.job_id]
        for job, expected in zip(named, self._expectations(named), strict=True):
            self.expected[job.job_id] = expected
        while len(self.expected) > PENDING_MAX:
            self.expected.popitem(last=False)

    def forget(self, job_id: str) -> None:
        """A job that will never run."""
        self.expected.pop(job_id, None)

    def observe(self, job: Finished) -> None:
        """O(1) (a job that was not announced costs a prediction). A run time that is none is not learned from."""
        expected = self.expected.pop(job.features.job_id, None)
        if not usable(job.run_s):
            return
        self._judge(job, expected or self._expectations([job.features])[0])
        for member in self.members:
            member.observe(job)
        if usable(job.steps) and job.steps > 0:
            self.steps.observe(replace(job, run_s=job.steps))
        self.observed += 1

    def _expectations(self, jobs: Sequence[Features]) -> list[Expected]:
        if not jobs:
            return []
        kept = np.zeros((len(jobs), len(MEMBERS) + 1, len(_KEPT_LN)), np.uint16)
        pool = np.zeros((len(jobs), BINS + 1))
        for row, (name, weight) in enumerate(self.weights().items()):
            if self._able(name):
                curves = getattr(self, name).curves(jobs)
                pool += weight * curves
                kept[:, row] = _as_kept(curves)
        kept[:, -1] = _as_kept(pool)
        told = times(
            calibrated(pool, np.array(self.calibration.levels)),
            np.broadcast_to(1.0 - np.array(LEVELS), (len(jobs), len(LEVELS))),
        )
        outer, answers = self.calibration.outer, np.log(told).tolist()
        return [Expected(kept[i].tobytes(), outer, tuple(answer)) for i, answer in enumerate(answers)]

    def _judge(self, job: Finished, expected: Expected) -> None:
        value = math.log(min(max(job.run_s, 1.0), LONGEST_S))
        kept = np.frombuffer(expected.curves, np.uint16).reshape(len(MEMBERS) + 1, -1)
        self.calibration.observe(float(_below(kept[-1:], value)[0]), job.censored, expected.outer)
        if job.censored:
            return
        near = _below(kept[:-1], value + _NEAR_LN) - _below(kept[:-1], value - _NEAR_LN)
        self.shares.add(np.where(kept[:-1, -1] > 0, near + _DENSITY_LEAST, 0.0).tolist())
        told = expected.answer
        middle = told[len(told) // 2]
        below = 0.5 if value == middle else float(value < middle)
        self.watched.add(told[0] <= value <= told[-1], below, pinball(told, value))

    # ── how it is doing ──────────────────────────────────────────────────────────────────────────────────────────────

    def drift(self) -> Drift:
        """Of the answers given: what a gauge shows, and what an alert is raised for."""
        seen, reasons = self.watched, []
        if seen.jobs >= _DRIFT_JOBS:
            if abs(seen.covered - 0.9) > _DRIFT_COVERAGE:
                reasons.append(f"the 90 % interval covers {100 * seen.covered:.0f} %")
            if abs(seen.below - 0.5) > _DRIFT_MEDIAN:
                way = "shorter" if seen.below > 0.5 else "longer"
                reasons.append(f"jobs are {way} than predicted: {100 * seen.below:.0f} % are below the median")
            if seen.loss > _DRIFT_LOSS * seen.loss_long:
                reasons.append(f"the loss is {seen.loss:.2f}, over a longer time it was {seen.loss_long:.2f}")
        return Drift(
            jobs=seen.jobs,
            coverage=seen.covered,
            below_median=seen.below,
            loss=seen.loss,
            loss_long=seen.loss_long,
            reasons=tuple(reasons),
        )

    @property
    def memory_bytes(self) -> int:
        """Roughly, of what grows; bounded by the limits of its parts."""
        parts = sum(member.memory_bytes for member in self.members) + self.steps.memory_bytes
        return parts + 1_300 * len(self.expected)

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> CombinationState:
        return CombinationState(
            survival=self.survival.state(),
            history=self.history.state(),
            neighbours=self.neighbours.state(),
            boosting=self.boosting.state(),
            steps=self.steps.state(),
            shares=self.shares,
            calibration=self.calibration.state(),
            expected=self.expected,
            watched=self.watched,
            observed=self.observed,
        )

    @classmethod
    def restored(cls, state: CombinationState) -> Combination:
        """Raises ValueError where the state does not hold together."""
        found = cls()
        found.survival, found.history = Ladder.restored(state.survival), Ladder.restored(state.history)
        found.neighbours = Neighbours.restored(state.neighbours)
        found.boosting = Boosting.restored(state.boosting)
        found.steps = Ladder.restored(state.steps)
        if (found.survival.kind, found.history.kind, found.steps.kind) != ("survival", "history", "history"):
            raise ValueError("curves of another kind")
        if not all(map(math.isfinite, msgspec.structs.astuple(state.watched))) or state.observed < 0:
            raise ValueError("what was watched is not finite")
        shares = state.shares
        if len(shares.of) != len(MEMBERS) or not all(0 < share <= 1 for share in shares.of) or shares.jobs < 0:
            raise ValueError("shares are not those of these members")
        if any(_odd(expected) for expected in state.expected.values()):
            raise ValueError("what was expected is not of these members")
        found.shares, found.calibration = shares, Calibrator.restored(state.calibration)
        found.expected, found.watched = OrderedDict(state.expected), state.watched
        found.observed = state.observed
        return found


def _as_kept(curves: Floats) -> Floats:
    return np.rint((1.0 - curves[:, ::_KEPT]) * _SCALE)


def _below(kept: NDArray[np.uint16], value: float) -> Floats:
    """[row] P(ln T <= value) of kept curves."""
    place = min(max(value, 0.0), float(_KEPT_LN[-1])) / float(_KEPT_LN[1])
    edge = min(int(place), len(_KEPT_LN) - 2)
    low, high = kept[:, edge] / _SCALE, kept[:, edge + 1] / _SCALE
    return np.asarray(low + (high - low) * (place - edge))


def _odd(expected: Expected) -> bool:
    return (
        len(expected.curves) != 2 * (len(MEMBERS) + 1) * len(_KEPT_LN)
        or not all(0 < level < 1 for level in expected.outer)
        or len(expected.answer) != len(LEVELS)
        or not all(map(math.isfinite, expected.answer))
    )
