"""Run times learned while a simulation goes on: estimates from what had finished by then, and from nothing else."""

from __future__ import annotations

from typing import Protocol

from streamsched.predict import Combination, Ending, Finished, features_of

from .workload import SimJob


class Estimator(Protocol):
    """Asked for each job at its submission, told of each at its end."""

    def estimate(self, job: SimJob) -> float | None:
        """s"""
        ...

    def observe(self, job: SimJob, now: float) -> None: ...


class Learned:
    """Medians of `predict.Combination`: of like jobs, by whichever way was best lately."""

    def __init__(self) -> None:
        self._predictor = Combination()

    def estimate(self, job: SimJob) -> float:
        features = features_of(job.spec)
        self._predictor.expect([features])
        return float(self._predictor.times([features]).total_median_s[0])

    def observe(self, job: SimJob, now: float) -> None:
        ending = Ending.CLAMPED if job.clamped else Ending.COMPLETED
        self._predictor.observe(Finished(features=features_of(job.spec), run_s=job.run_s, ending=ending, ended_at=now))
