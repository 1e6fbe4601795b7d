"""What is believed of run times: the one place where the core and the rules ask for them.

Times a job has run (`ran_s`) are of all its runs, what a stopped one lost included: nobody tells how much that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .model import WHOLE_GPU, Job

if TYPE_CHECKING:
    from .cluster import ClusterState


class RunTimes(Protocol):
    """Beliefs, in s but for `spread`, one for each of the jobs asked about; None: nothing is known.

    Ask of many jobs at once where there are many. Nothing that is folded into the state may depend on the answers: a
    replay does not have them.
    """

    def whole_s(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        """Of the whole, as it was believed when the job was submitted."""
        ...

    def spread(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        """How sure that was: ln of the 95 % over the 5 % quantile; 0 of a number that stands for itself."""
        return [None if whole is None else 0.0 for whole in self.whole_s(jobs)]

    def total_s(self, jobs: Sequence[Job], ran_s: Sequence[float]) -> Sequence[float | None]:
        """Of the whole, as it is believed after so many s of running; less than those where a job is overdue."""
        ...

    def gittins_s(self, jobs: Sequence[Job], ran_s: Sequence[float]) -> Sequence[float | None]:
        """Gittins' rank: s of service for one completion, after so many s of running. The least goes first."""
        ...

    def remaining_s(self, jobs: Sequence[Job], ran_s: Sequence[float]) -> Sequence[float | None]:
        """The median of what is left after so many s of running."""
        totals = self.total_s(jobs, ran_s)
        return [None if total is None else max(0.0, total - ran) for total, ran in zip(totals, ran_s, strict=True)]


class Said(RunTimes):
    """What was said of the jobs when they were submitted (`estimate_s`), and nothing else."""

    def whole_s(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        return [job.spec.estimate_s for job in jobs]

    def total_s(self, jobs: Sequence[Job], ran_s: Sequence[float]) -> Sequence[float | None]:
        return self.whole_s(jobs)

    def gittins_s(self, jobs: Sequence[Job], ran_s: Sequence[float]) -> Sequence[float | None]:
        """Of a job whose run time is known it is what remains."""
        return self.remaining_s(jobs, ran_s)


def attained_gpu_s(job: Job, state: ClusterState, now: float) -> float:
    """GPU-seconds that the job has had, those of its present run included."""
    run = state.runs.get(job.placement_id) if job.placement_id is not None else None
    if run is None or run.started_at is None:
        return job.attained_gpu_s
    return job.attained_gpu_s + (now - run.started_at) * job.spec.total_gpu_milli / WHOLE_GPU


def ran_s(job: Job, state: ClusterState, now: float) -> float:
    """How long the job has run, all its runs together, on all the GPUs that it asked for."""
    return attained_gpu_s(job, state, now) / gpus_of(job)


def gpus_of(job: Job) -> float:
    return job.spec.total_gpu_milli / WHOLE_GPU
