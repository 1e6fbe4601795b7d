"""The predictor to use: for each job the member that was best lately on jobs like it, calibrated.

    expect(submitted jobs)    what every member says now is kept, to be judged by the ends
    observe(finished job)     judge, recalibrate, then learn
    predict(job, age, ...)    the best member's curve, calibrated, given age and progress

Steps are predicted like run times, from what the same user's jobs of like names did: a job that reports steps and not
of how many is as far as these say (iterations instead of times: A-SRPT, arXiv 2501.05563).

Members are judged by the pinball loss of their calibrated quantiles in ln(seconds), as they were when the job was
submitted (or at its end, for a job that was never announced), with the last `_HALF_LIFE` jobs of the job's tenant
weighing most and everybody's standing in for those of a tenant with few.
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

from .boosting import Boosting, BoostingState
from .calibration import Calibrator, CalibratorState, blend, calibrated
from .curves import BINS, LONGEST_S, remaining, times
from .jobs import LEVELS, Features, Finished, Floats, gpu_class, part, usable
from .ladders import Ladder, LadderState, history, survival
from .neighbours import Neighbours, NeighboursState
from .pinball import pinball
from .predictor import Predictor

MEMBERS: Final = ("survival", "history", "neighbours", "boosting")
_ALWAYS: Final = 3
"""The first so many of them always answer."""
PENDING_MAX: Final = 100_000
"""Announced jobs that are kept; the oldest are forgotten first, and judged at their ends."""
GROUPS_MAX: Final = 4_096
_HALF_LIFE: Final = 2_000.0
_DECAY: Final = 2.0 ** (-1.0 / _HALF_LIFE)
_SHRINK: Final = 200.0
"""Jobs as which everybody's loss counts in a group."""
_RECENT: Final = 1.0 / 200.0
_LONG: Final = 1.0 / 5_000.0
_DRIFT_JOBS: Final = 200
_DRIFT_COVERAGE: Final = 0.08
"""The standard deviation of a coverage over so many independent jobs is 0.015; jobs come in batches of alike ones."""
_DRIFT_MEDIAN: Final = 0.2
_DRIFT_LOSS: Final = 1.5
_SKETCH: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995, 0.999)
"""Levels at which a curve is kept until its job ends."""
_SKETCHED: Final = np.array(_SKETCH)
_NOMINAL: Final = (0.0, *LEVELS, 1.0)
_ANSWERS: Final = "answers"
"""The calibrator of what is answered, whichever member it is from."""

Member = Ladder | Neighbours | Boosting


class Losses(Struct):
    """Decayed sums by member: losses, how far these were above the mean loss of the members that always answer (so
    that a member that was not there for hard jobs is not the better for it), and the number of jobs."""

    sums: list[float]
    above: list[float]
    jobs: list[float]

    def add(self, losses: Sequence[float | None]) -> None:
        always = [loss for loss in losses[:_ALWAYS] if loss is not None]
        mean = math.fsum(always) / len(always) if always else 0.0
        for member, loss in enumerate(losses):
            if loss is not None:
                self.sums[member] = _DECAY * self.sums[member] + loss
                self.above[member] = _DECAY * self.above[member] + loss - mean
                self.jobs[member] = _DECAY * self.jobs[member] + 1.0

    def excess(self, member: int, prior: float = 0.0) -> float:
        """Mean of `above`, drawn towards the prior as if `_SHRINK` jobs had shown that."""
        return (self.above[member] + _SHRINK * prior) / (self.jobs[member] + _SHRINK)


def _no_losses() -> Losses:
    return Losses(*([0.0] * len(MEMBERS) for _ in range(3)))


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
    """What each member said of a job; an empty sketch: it had nothing to say."""

    sketches: tuple[bytes, ...]
    """float32 ln(s) at `_SKETCH` by the raw curve."""
    quantiles: tuple[tuple[float, ...], ...]
    """ln(s) at `LEVELS`, calibrated."""
    chosen: int
    """The member whose answer was given."""
    answer: tuple[float, ...]
    """ln(s) at `LEVELS`, as given."""


class CombinationState(Struct, frozen=True, kw_only=True):
    survival: LadderState
    history: LadderState
    neighbours: NeighboursState
    boosting: BoostingState
    steps: LadderState
    losses: dict[str, Losses]
    calibrators: dict[str, CalibratorState]
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
        self.loss: Losses = _no_losses()
        """Of everybody."""
        self.losses: OrderedDict[str, Losses] = OrderedDict()
        """By tenant, those longest unused first."""
        self.calibrators: dict[str, Calibrator] = {}
        """By member, and by member and GPU class."""
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
        out = np.empty((len(jobs), BINS + 1))
        best: dict[str, int] = {}
        for job in jobs:
            if job.tenant not in best:
                best[job.tenant] = self._best(job)
        chosen = np.array([best[job.tenant] for job in jobs], np.int64)
        sizes = np.array([gpu_class(job.gpus) for job in jobs], np.int64)
        for number in np.unique(chosen).tolist():
            of_member = np.flatnonzero(chosen == number)
            raw = self.members[number].curves([jobs[i] for i in of_member.tolist()])
            for size in np.unique(sizes[of_member]).tolist():
                same = sizes[of_member] == size
                out[of_member[same]] = calibrated(raw[same], self._levels(number, size))
        return calibrated(out, self._levels_of_answers()) if jobs else out

    def expected_steps(self, job: Features, done: float) -> float:
        if not self.steps.knows(job):
            return 0.0
        left, _ = remaining(self.steps.curves([job]), np.array([min(done, LONGEST_S)]), (0.5,))
        return done + float(left[0, 0])

    def chosen(self, job: Features) -> str:
        """The member that answers for this job now."""
        return MEMBERS[self._best(job)]

    def _best(self, job: Features) -> int:
        everybody, group = self.loss, self.losses.get(_group(job))
        best, least = 0, math.inf
        for member in range(len(MEMBERS)):
            if everybody.jobs[member] <= 0 or not self._able(member):
                continue
            loss = everybody.excess(member)
            if group is not None:
                loss = group.excess(member, loss)
            if loss < least:
                best, least = member, loss
        return best

    def _able(self, member: int) -> bool:
        return MEMBERS[member] != "boosting" or self.boosting.trees is not None

    def _levels(self, member: int, size: int) -> Floats:
        everybody = self.calibrators.get(MEMBERS[member])
        if everybody is None:
            return np.array(LEVELS)
        return blend(self.calibrators.get(f"{MEMBERS[member]} {size}"), everybody)

    def _levels_of_answers(self) -> Floats:
        """Whoever is the best of several was lucky too: answers are narrower than the members', so they are calibrated
        once more."""
        own = self.calibrators.get(_ANSWERS)
        return np.array(LEVELS if own is None else own.levels)

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
        sketches: list[list[bytes]] = [[] for _ in jobs]
        quantiles: list[list[tuple[float, ...]]] = [[] for _ in jobs]
        sizes = [gpu_class(job.gpus) for job in jobs]
        for number, member in enumerate(self.members):
            if not self._able(number):
                for i in range(len(jobs)):
                    sketches[i].append(b"")
                    quantiles[i].append(())
                continue
            raw = member.curves(jobs)
            sketch = np.log(times(raw, np.broadcast_to(1.0 - _SKETCHED, (len(jobs), len(_SKETCH))))).astype(np.float32)
            for i, size in enumerate(sizes):
                told = self._levels(number, size)
                sketches[i].append(sketch[i].tobytes())
                # the calibrated quantile at p is the raw one at a(p)
                quantiles[i].append(tuple(np.interp(told, _SKETCHED, sketch[i]).tolist()))
        levels = np.minimum(np.maximum.accumulate(self._levels_of_answers()), 1.0)
        out = []
        for i, job in enumerate(jobs):
            best = self._best(job)
            sketched = np.frombuffer(sketches[i][best], np.float32)
            raw = np.interp(levels, _NOMINAL, [0.0, *np.maximum.accumulate(self._levels(best, sizes[i])), 1.0])
            answer = tuple(np.interp(raw, _SKETCHED, sketched).tolist())
            out.append(Expected(tuple(sketches[i]), tuple(quantiles[i]), best, answer))
        return out

    def _judge(self, job: Finished, expected: Expected) -> None:
        value = math.log(min(max(job.run_s, 1.0), LONGEST_S))
        size = gpu_class(job.features.gpus)
        losses: list[float | None] = [None] * len(MEMBERS)
        self._judge_answer(value, expected, job.censored)
        for number, (name, sketch, told) in enumerate(zip(MEMBERS, expected.sketches, expected.quantiles, strict=True)):
            if not sketch:
                continue
            u = float(np.interp(value, np.frombuffer(sketch, np.float32), _SKETCHED, left=0.0, right=1.0))
            for key in (name, f"{name} {size}"):
                self.calibrators.setdefault(key, Calibrator()).observe(u, job.censored)
            if not job.censored:
                losses[number] = pinball(told, value)
        if job.censored:
            return
        self.loss.add(losses)
        group = _group(job.features)
        self.losses.setdefault(group, _no_losses()).add(losses)
        self.losses.move_to_end(group)
        if len(self.losses) > GROUPS_MAX:
            self.losses.popitem(last=False)

    def _judge_answer(self, value: float, expected: Expected, censored: bool) -> None:
        sketch = np.frombuffer(expected.sketches[expected.chosen], np.float32)
        levels = np.interp(expected.quantiles[expected.chosen], sketch, _SKETCHED)
        raw = np.interp(value, sketch, _SKETCHED, left=0.0, right=1.0)
        u = float(np.interp(raw, [0.0, *levels, 1.0], _NOMINAL))
        self.calibrators.setdefault(_ANSWERS, Calibrator()).observe(u, censored)
        if not censored:
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

    def recent_coverage(self) -> dict[str, float]:
        """Member -> share of recent jobs within its calibrated 90 % interval, whether it was chosen or not."""
        return {name: self.calibrators[name].coverage for name in MEMBERS if name in self.calibrators}

    def recent_loss(self) -> dict[str, float]:
        """Member -> mean pinball loss (ln s) of recent jobs."""
        rows = zip(MEMBERS, self.loss.sums, self.loss.jobs, strict=True)
        return {name: total / jobs for name, total, jobs in rows if jobs > 0}

    @property
    def memory_bytes(self) -> int:
        """Roughly, of what grows; bounded by the limits of its parts."""
        parts = sum(member.memory_bytes for member in self.members) + self.steps.memory_bytes
        return parts + 1_200 * len(self.expected) + 400 * len(self.losses)

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> CombinationState:
        return CombinationState(
            survival=self.survival.state(),
            history=self.history.state(),
            neighbours=self.neighbours.state(),
            boosting=self.boosting.state(),
            steps=self.steps.state(),
            losses={"": self.loss, **self.losses},
            calibrators={key: calibrator.state() for key, calibrator in self.calibrators.items()},
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
        if "" not in state.losses or any(_odd(losses) for losses in state.losses.values()):
            raise ValueError("losses are not those of these members")
        if any(_odd_expected(expected) for expected in state.expected.values()):
            raise ValueError("what was expected is not of these members")
        found.losses = OrderedDict(state.losses)
        found.loss = found.losses.pop("")
        found.calibrators = {key: Calibrator.restored(value) for key, value in state.calibrators.items()}
        found.expected, found.watched = OrderedDict(state.expected), state.watched
        found.observed = state.observed
        return found


def _group(job: Features) -> str:
    return part(job.tenant) or "-"


def _odd(losses: Losses) -> bool:
    sizes = {len(losses.sums), len(losses.above), len(losses.jobs)}
    return (
        sizes != {len(MEMBERS)}
        or not all(0.0 <= number < math.inf for number in (*losses.sums, *losses.jobs))
        or not all(map(math.isfinite, losses.above))
    )


def _odd_expected(expected: Expected) -> bool:
    if len(expected.sketches) != len(MEMBERS) or len(expected.quantiles) != len(MEMBERS):
        return True
    if not 0 <= expected.chosen < len(MEMBERS) or not expected.sketches[expected.chosen]:
        return True
    if len(expected.answer) != len(LEVELS) or not all(map(math.isfinite, expected.answer)):
        return True
    return any(
        (len(sketch), len(told)) not in ((0, 0), (4 * len(_SKETCH), len(LEVELS))) or not all(map(math.isfinite, told))
        for sketch, told in zip(expected.sketches, expected.quantiles, strict=True)
    )
