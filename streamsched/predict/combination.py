"""The predictor to use: for each job the member that was best lately on jobs like it, calibrated.

    expect(submitted jobs)    what every member says now is kept, to be judged by the ends
    observe(finished job)     judge, recalibrate, then learn
    predict(job, age, ...)    the best member's curve, calibrated, given age and progress

Members are judged by the pinball loss of their calibrated quantiles in ln(seconds), as they were when the job was
submitted (or at its end, for a job that was never announced), with the last `_HALF_LIFE` jobs of the job's tenant
weighing most and everybody's standing in for those of a tenant with few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from .boosting import Boosting, BoostingState
from .calibration import Calibrator, CalibratorState, blend, calibrated
from .curves import BINS, LONGEST_S, answers, times
from .jobs import LEVELS, Features, Finished, Floats, Quantiles, gpu_class, usable
from .ladders import Ladder, LadderState, history, survival
from .neighbours import Neighbours, NeighboursState
from .pinball import pinball

MEMBERS: Final = ("survival", "history", "neighbours", "boosting")
PENDING_MAX: Final = 100_000
"""Announced jobs that are kept; the oldest are forgotten first, and judged at their ends."""
GROUPS_MAX: Final = 4_096
_HALF_LIFE: Final = 200.0
_DECAY: Final = 2.0 ** (-1.0 / _HALF_LIFE)
_SHRINK: Final = 20.0
"""Jobs as which everybody's loss counts in a group."""
_SKETCH: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995, 0.999)
"""Levels at which a curve is kept until its job ends."""
_SKETCHED: Final = np.array(_SKETCH)

Member = Ladder | Neighbours | Boosting


class Losses(Struct):
    """Decayed sums of losses by member, and the decayed number of jobs each was judged on."""

    sums: list[float]
    jobs: list[float]

    def add(self, losses: Sequence[float | None]) -> None:
        for member, loss in enumerate(losses):
            if loss is not None:
                self.sums[member] = _DECAY * self.sums[member] + loss
                self.jobs[member] = _DECAY * self.jobs[member] + 1.0


def _no_losses() -> Losses:
    return Losses([0.0] * len(MEMBERS), [0.0] * len(MEMBERS))


class Expected(Struct, frozen=True, array_like=True):
    """What each member said of a job; an empty sketch: it had nothing to say."""

    sketches: tuple[bytes, ...]
    """float32 ln(s) at `_SKETCH` by the raw curve."""
    quantiles: tuple[tuple[float, ...], ...]
    """ln(s) at `LEVELS`, calibrated."""


class CombinationState(Struct, frozen=True, kw_only=True):
    survival: LadderState
    history: LadderState
    neighbours: NeighboursState
    boosting: BoostingState
    losses: dict[str, Losses]
    calibrators: dict[str, CalibratorState]
    expected: dict[str, Expected]
    observed: int


class Combination:
    """See the module's text."""

    def __init__(self) -> None:
        self.survival: Ladder = survival()
        self.history: Ladder = history()
        self.neighbours = Neighbours()
        self.boosting = Boosting()
        self.losses: dict[str, Losses] = {"": _no_losses()}
        """By tenant, those longest unused first; "": of everybody."""
        self.calibrators: dict[str, Calibrator] = {}
        """By member, and by member and GPU class."""
        self.expected: dict[str, Expected] = {}
        self.observed = 0

    @property
    def members(self) -> tuple[Member, ...]:
        """In the order of `MEMBERS`."""
        return self.survival, self.history, self.neighbours, self.boosting

    # ── being asked ──────────────────────────────────────────────────────────────────────────────────────────────────

    def predict(self, job: Features, age_s: float = 0.0, progress: float | None = None) -> Quantiles:
        """Of the run time that is left to a job that has run `age_s` and done the fraction `progress`."""
        return self.predict_many([job], [age_s], [progress])[0]

    def predict_many(
        self,
        jobs: Sequence[Features],
        ages_s: Sequence[float] | None = None,
        progress: Sequence[float | None] | None = None,
    ) -> list[Quantiles]:
        """Ages that are no times count as 0, fractions outside (0, 1] as not told."""
        if not jobs:
            return []
        ages = np.zeros(len(jobs)) if ages_s is None else np.array([_age(age) for age in ages_s])
        fractions = None if progress is None else np.array([_fraction(part) for part in progress])
        return answers(self.curves(jobs), ages, fractions)

    def curves(self, jobs: Sequence[Features]) -> Floats:
        """[job, edge] calibrated survival curves of the whole run time (for an index such as Gittins')."""
        out = np.empty((len(jobs), BINS + 1))
        chosen = np.array([self._best(job) for job in jobs], np.int64)
        sizes = np.array([gpu_class(job.gpus) for job in jobs], np.int64)
        for number in np.unique(chosen):
            of_member = np.flatnonzero(chosen == number)
            raw = self.members[number].curves([jobs[i] for i in of_member.tolist()])
            for size in np.unique(sizes[of_member]):
                same = sizes[of_member] == size
                out[of_member[same]] = calibrated(raw[same], self._levels(int(number), int(size)))
        return out

    def chosen(self, job: Features) -> str:
        """The member that answers for this job now."""
        return MEMBERS[self._best(job)]

    def _best(self, job: Features) -> int:
        everybody, group = self.losses[""], self.losses.get(_group(job))
        best, least = 0, math.inf
        for member in range(len(MEMBERS)):
            if everybody.jobs[member] <= 0 or not self._able(member):
                continue
            loss = everybody.sums[member] / everybody.jobs[member]
            if group is not None:
                loss = (group.sums[member] + _SHRINK * loss) / (group.jobs[member] + _SHRINK)
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
            del self.expected[next(iter(self.expected))]

    def forget(self, job_id: str) -> None:
        """A job that will never run."""
        self.expected.pop(job_id, None)

    def observe(self, job: Finished) -> None:
        """O(1) (a job that was not announced costs a prediction). A run time that is none is not learned from."""
        if not usable(job.run_s):
            return
        expected = self.expected.pop(job.features.job_id, None) or self._expectations([job.features])[0]
        self._judge(job, expected)
        for member in self.members:
            member.observe(job)
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
        return [Expected(tuple(s), tuple(q)) for s, q in zip(sketches, quantiles, strict=True)]

    def _judge(self, job: Finished, expected: Expected) -> None:
        value = math.log(min(max(job.run_s, 1.0), LONGEST_S))
        losses: list[float | None] = [None] * len(MEMBERS)
        for number, (name, sketch, told) in enumerate(zip(MEMBERS, expected.sketches, expected.quantiles, strict=True)):
            if not sketch:
                continue
            u = float(np.interp(value, np.frombuffer(sketch, np.float32), _SKETCHED, left=0.0, right=1.0))
            for key in (name, f"{name} {gpu_class(job.features.gpus)}"):
                self.calibrators.setdefault(key, Calibrator()).observe(u, job.censored)
            if not job.censored:
                losses[number] = pinball(told, value)
        if not job.censored:
            self.losses[""].add(losses)
            group = _group(job.features)
            of_group = self.losses.pop(group, None) or _no_losses()
            of_group.add(losses)
            self.losses[group] = of_group
            if len(self.losses) > GROUPS_MAX:
                del self.losses[next(key for key in self.losses if key)]

    # ── how it is doing ──────────────────────────────────────────────────────────────────────────────────────────────

    def recent_coverage(self) -> dict[str, float]:
        """Member -> share of recent jobs within its calibrated 90 % interval: far from 0.9, the workload drifts."""
        return {name: self.calibrators[name].coverage for name in MEMBERS if name in self.calibrators}

    def recent_loss(self) -> dict[str, float]:
        """Member -> mean pinball loss (ln s) of recent jobs."""
        everybody = self.losses[""]
        rows = zip(MEMBERS, everybody.sums, everybody.jobs, strict=True)
        return {name: total / jobs for name, total, jobs in rows if jobs > 0}

    @property
    def memory_bytes(self) -> int:
        """Roughly, of what grows; bounded by the limits of its parts."""
        return sum(member.memory_bytes for member in self.members) + 1_200 * len(self.expected) + 400 * len(self.losses)

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> CombinationState:
        return CombinationState(
            survival=self.survival.state(),
            history=self.history.state(),
            neighbours=self.neighbours.state(),
            boosting=self.boosting.state(),
            losses=self.losses,
            calibrators={key: calibrator.state() for key, calibrator in self.calibrators.items()},
            expected=self.expected,
            observed=self.observed,
        )

    @classmethod
    def restored(cls, state: CombinationState) -> Combination:
        """Raises ValueError where the state does not hold together."""
        found = cls()
        found.survival, found.history = Ladder.restored(state.survival), Ladder.restored(state.history)
        found.neighbours = Neighbours.restored(state.neighbours)
        found.boosting = Boosting.restored(state.boosting)
        if (found.survival.kind, found.history.kind) != ("survival", "history"):
            raise ValueError("curves of another kind")
        if "" not in state.losses or any(_odd(losses) for losses in state.losses.values()):
            raise ValueError("losses are not those of these members")
        if any(_odd_expected(expected) for expected in state.expected.values()):
            raise ValueError("what was expected is not of these members")
        found.losses = dict(state.losses)
        found.calibrators = {key: Calibrator.restored(value) for key, value in state.calibrators.items()}
        found.expected = dict(state.expected)
        found.observed = state.observed
        return found


def _group(job: Features) -> str:
    return job.tenant or "-"


def _age(age_s: float) -> float:
    return float(age_s) if usable(age_s) else 0.0


def _fraction(part: float | None) -> float:
    return float(part) if part is not None and 0.0 < part <= 1.0 else math.nan


def _odd(losses: Losses) -> bool:
    numbers = [*losses.sums, *losses.jobs]
    return len(losses.sums) != len(MEMBERS) or len(numbers) != 2 * len(MEMBERS) or not all(map(math.isfinite, numbers))


def _odd_expected(expected: Expected) -> bool:
    sizes = {len(sketch) for sketch in expected.sketches} - {0, 4 * len(_SKETCH)}
    return bool(sizes) or len(expected.sketches) != len(MEMBERS) or len(expected.quantiles) != len(MEMBERS)
