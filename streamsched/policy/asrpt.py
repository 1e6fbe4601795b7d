"""A-SRPT: the order in which one fast machine would complete the jobs (Luo et al., arXiv 2501.05563).

All jobs are given to a *virtual machine* as fast as the whole cluster: a job's work is its predicted run time times its
GPUs, the machine does as much per second as the cluster has GPUs, and it always works on the job with least work left
(preemptive SRPT: Schrage, Operations Research 16(3), 1968). Its order of completion is the order in which the cluster
starts jobs. So a job of little work overtakes those that wait, and none that is nearly through.

Two forms:

- *released* (the paper's): the cluster may start a job once the virtual machine has completed it.
- *ranked early* (`AdaptiveSrpt`): it may be started before, behind those that are further: what is completed goes by
  the time of completion, the rest by what is left. GPUs are not idle for a machine that does not exist.

Of two jobs that are both there the one that the virtual machine completes first is always ahead: only the least work
left grows less, so no later arrival changes their order. The order of ranking early is hence that of the times of
completion, whatever comes in between (`completions`), though these themselves depend on jobs to come.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from streamsched.core.cluster import ClusterState
from streamsched.core.model import TERMINAL, Job
from streamsched.core.run_times import gpus_of

from .rules import UNKNOWN_RUN_S

Array = np.ndarray[tuple[int], np.dtype[np.float64]]

HEAVY_LABEL: Final = ("communication", "heavy")
"""Label of a job that says of itself that it is communication-heavy."""
PATIENCE: Final = 0.1
"""Share of its predicted run time that a communication-heavy job waits for few nodes."""
_FORGET_FROM: Final = 1_000


class VirtualMachine:
    """Preemptive SRPT on one machine. Jobs are numbers; of equal work left the lower number goes first."""

    def __init__(self, speed: float) -> None:
        """`speed`: work per second. Raises ValueError unless above 0."""
        if not speed > 0:
            raise ValueError("the speed of a virtual machine is above 0")
        self.speed = speed
        self.now = -np.inf
        self._open: list[tuple[float, int]] = []
        """Heap of (work left, job): the first is worked on, so that only the least ever changes."""

    def add(self, job: int, work: float, now: float) -> list[tuple[int, float]]:
        """A job arrives; returns what was completed by then, as `advance`. `now` never goes back."""
        completed = self.advance(now)
        heapq.heappush(self._open, (work, job))
        return completed

    def advance(self, now: float) -> list[tuple[int, float]]:
        """(job, time) of the completions up to `now`, in order. Raises ValueError when time goes back."""
        if now < self.now:
            raise ValueError("a virtual machine's time does not go back")
        completed = []
        while self._open:
            work, job = self._open[0]
            ends = self.now + work / self.speed
            if ends > now:
                heapq.heapreplace(self._open, (work - (now - self.now) * self.speed, job))
                break
            heapq.heappop(self._open)
            completed.append((job, ends))
            self.now = ends
        self.now = now
        return completed

    def drain(self) -> list[tuple[int, float]]:
        """(job, time) of the completions that follow when nothing more arrives."""
        completed = []
        for work, job in sorted(self._open):
            self.now += work / self.speed
            completed.append((job, self.now))
        self._open.clear()
        return completed

    def keep(self, jobs: Collection[int]) -> None:
        """All others are dropped."""
        self._open = [(work, job) for work, job in self._open if job in jobs]
        heapq.heapify(self._open)

    def left(self) -> dict[int, float]:
        """Work left of each job that is not completed."""
        return {job: work for work, job in self._open}


def completions(submit_s: Array, work: Array, speed: float) -> Array:
    """[job] when the virtual machine completes each; jobs in order of submission."""
    machine = VirtualMachine(speed)
    found = np.empty(len(submit_s))
    for job, (now, of_job) in enumerate(zip(submit_s.tolist(), work.tolist(), strict=True)):
        for number, ends in machine.add(job, of_job, now):
            found[number] = ends
    for number, ends in machine.drain():
        found[number] = ends
    return found


class AdaptiveSrpt:
    """The rule, ranking early. Scores are places in the order, the first 0, the others below.

    The virtual machine is this object's memory: it goes on with each job that is seen for the first time. A new owner
    of the pool builds it anew from the jobs that the state has, so that it may take another order for those that
    forgotten jobs once delayed. Its speed is that of the GPUs there are when a job comes. Run times are those believed
    at the submission (`RunTimes.whole_s`). A job that ends sooner, or is cancelled, stays in the virtual machine until
    the state forgets it.
    """

    name = "asrpt"

    def __init__(self) -> None:
        self._machine: VirtualMachine | None = None
        self._seen: set[int] = set()
        """Jobs by `Job.seq`."""
        self._completed: dict[int, float] = {}

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        left = self._told(jobs, state, now).left()

        def key(place: int) -> tuple[bool, float, int]:
            seq = jobs[place].seq
            completed = self._completed.get(seq)
            return (True, left[seq], seq) if completed is None else (False, completed, seq)

        scores = [0.0] * len(jobs)
        for rank, place in enumerate(sorted(range(len(jobs)), key=key)):
            scores[place] = -float(rank)
        return scores

    def wants_consolidation(self, job: Job, state: ClusterState, now: float) -> bool:
        """Whether a waiting job had better wait for a placement on the fewest nodes that could hold it: one that is
        communication-heavy, by its label or because it is larger than a node, and only for a share of its run time
        (the paper's delay of communication-heavy jobs)."""
        largest = max((node.spec.gpus for node in state.inventory), default=0)
        name, value = HEAVY_LABEL
        heavy = job.spec.labels.get(name) == value or job.spec.total_gpus > largest
        return heavy and job.waited_s + now - job.queued_at < PATIENCE * _run_s([job], state)[0]

    def _told(self, jobs: Sequence[Job], state: ClusterState, now: float) -> VirtualMachine:
        """The machine after all of these and, at first, all that the state knows."""
        if self._machine is None:
            open_jobs = [job for job in state.jobs.values() if job.state not in TERMINAL]
            self._machine, jobs = VirtualMachine(1.0), open_jobs
        machine = self._machine
        fresh = sorted((job for job in jobs if job.seq not in self._seen), key=lambda job: job.seq)
        machine.speed = float(max(1, sum(node.spec.gpus for node in state.inventory)))
        for job, run_s in zip(fresh, _run_s(fresh, state), strict=True):
            at = max(machine.now, min(now, job.spec.submitted_at))
            self._completed.update(machine.add(job.seq, run_s * gpus_of(job), at))
            self._seen.add(job.seq)
        if len(self._seen) > 2 * len(state.jobs) + _FORGET_FROM:
            self._seen &= {job.seq for job in state.jobs.values()}
            self._completed = {seq: at for seq, at in self._completed.items() if seq in self._seen}
            machine.keep(self._seen)
        return machine


def _run_s(jobs: Sequence[Job], state: ClusterState) -> list[float]:
    return [UNKNOWN_RUN_S if told is None else told for told in state.run_times.whole_s(jobs)]
