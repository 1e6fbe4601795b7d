"""Run times learned while a simulation goes on: beliefs from what had finished by then, and from nothing else."""

from __future__ import annotations

from typing import Protocol

from streamsched.core.run_times import RunTimes
from streamsched.predict import Combination, Ending, Finished, features_of
from streamsched.predict.run_times import Predicted, as_said

from .workload import SimJob


class Estimator(RunTimes, Protocol):
    """Told of each job at its submission and at its end; what it believes is asked for by the core."""

    def submitted(self, job: SimJob, now: float) -> None: ...

    def observe(self, job: SimJob, now: float) -> None: ...


class Learned(Predicted):
    """By `predict.Combination`: of like jobs, by whichever way was best lately."""

    def __init__(self) -> None:
        self._combination = Combination()
        self._now = 0.0
        super().__init__(self._combination, lambda: self._now)

    def submitted(self, job: SimJob, now: float) -> None:
        self._now = now
        self._combination.expect([features_of(job.spec)])
        self.said(as_said(self._combination, [job.spec.job_id]))

    def observe(self, job: SimJob, now: float) -> None:
        self._now = now
        ending = Ending.CLAMPED if job.clamped else Ending.COMPLETED
        finished = Finished(features=features_of(job.spec), run_s=job.run_s, ending=ending, ended_at=now)
        self._combination.observe(finished)
        self.forget(job.spec.job_id)
