"""Simulated scheduling in plain Python, as slow and as plain as can be: what `streamsched.sim.fast` must agree with.

At one moment all completions, then all arrivals, then one pass; at each pass the whole queue is sorted. Nothing here is
taken from the package but the names of the modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Placement = list[tuple[int, int]]
"""(node, GPUs) of each worker."""

OVERDUE_S = 0.001


@dataclass(eq=False)
class Job:
    seq: int
    submit: float
    duration: float
    gpus: int
    estimate: float = 0.0
    start: float = math.nan
    placement: Placement = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.start + self.duration


Score = Callable[[Job, float], float]
"""(job, now) -> higher first."""


def r_of(job: Job) -> float:
    return max(job.estimate, 1.0)


def log_s_of(job: Job) -> float:
    """With the first job submitted at 0."""
    return float(np.log10(max(job.submit, 1.0)))


def unicep(job: Job, now: float) -> float:
    return (now - job.submit) / (r_of(job) * float(np.log2(job.gpus + 1.0)))


def wfp3(job: Job, now: float) -> float:
    ratio = (now - job.submit) / r_of(job)
    return ratio * ratio * ratio * job.gpus


SCORES: dict[str, Score] = {
    "fcfs": lambda job, now: -job.seq,
    "lcfs": lambda job, now: job.seq,
    "sjf": lambda job, now: -job.estimate,
    "saf": lambda job, now: -job.estimate * job.gpus,
    "smallest": lambda job, now: -job.gpus,
    "largest": lambda job, now: job.gpus,
    "wfp3": wfp3,
    "unicep": unicep,
    "f1": lambda job, now: -(float(np.log10(r_of(job))) * job.gpus + 870 * log_s_of(job)),
    "f2": lambda job, now: -(math.sqrt(r_of(job)) * job.gpus + 25_600 * log_s_of(job)),
    "f3": lambda job, now: -(r_of(job) * job.gpus + 6_860_000 * log_s_of(job)),
    "f4": lambda job, now: -(r_of(job) * math.sqrt(job.gpus) + 530_000 * log_s_of(job)),
}


def place(free: Sequence[int], gpus: int, whole: int) -> Placement | None:
    """Best fit; a job larger than the largest node takes whole ones, the rest goes to one more."""
    workers = [gpus] if gpus <= whole else [whole] * (gpus // whole) + [gpus % whole] * (gpus % whole > 0)
    taken: Placement = []
    for worker in workers:
        others = [node for node in range(len(free)) if free[node] >= worker and node not in {n for n, _ in taken}]
        if not others:
            return None
        taken.append((min(others, key=lambda node: (free[node], node)), worker))
    return taken


class Cluster:
    def __init__(self, nodes: Sequence[int]) -> None:
        self.free = list(nodes)
        self.whole = max(nodes)
        self.running: list[Job] = []

    def start(self, job: Job, now: float) -> None:
        found = place(self.free, job.gpus, self.whole)
        assert found is not None
        self.start_on(job, found, now)

    def start_on(self, job: Job, found: Placement, now: float) -> None:
        job.start, job.placement = now, found
        for node, gpus in found:
            self.free[node] -= gpus
        self.running.append(job)

    def complete(self, job: Job) -> None:
        for node, gpus in job.placement:
            self.free[node] += gpus
        self.running.remove(job)

    def fits(self, job: Job) -> bool:
        return place(self.free, job.gpus, self.whole) is not None


def simulate(
    jobs: list[Job],
    nodes: Sequence[int],
    score: Score,
    backfill: str,
    after_pass: Callable[[Cluster, list[Job]], None] = lambda cluster, queue: None,
) -> list[float]:
    """Starts by job."""
    cluster, queue, coming = Cluster(nodes), [], list(jobs)
    while coming or cluster.running:
        now = min([job.submit for job in coming[:1]] + [job.end for job in cluster.running])
        for job in [job for job in cluster.running if job.end == now]:
            cluster.complete(job)
        while coming and coming[0].submit == now:
            queue.append(coming.pop(0))
        scores = {job: score(job, now) for job in queue}
        queue.sort(key=lambda job: (-scores[job], job.seq))
        scheduling_pass(cluster, queue, backfill, now)
        queue = [job for job in queue if math.isnan(job.start)]
        after_pass(cluster, queue)
    assert not queue
    return [job.start for job in jobs]


def scheduling_pass(cluster: Cluster, ordered: list[Job], backfill: str, now: float) -> None:
    if backfill in ("easy", "conservative"):
        while planned_pass(cluster, ordered, now, 1 if backfill == "easy" else len(ordered)):
            pass
        return
    for job in ordered:
        if cluster.fits(job):
            cluster.start(job, now)
        elif backfill == "none":
            return


def planned_pass(cluster: Cluster, ordered: list[Job], now: float, reservations: int) -> bool:
    """Nodes are kept for so many jobs without room, chosen before anybody starts behind them; whether any started."""
    kept = [math.inf] * len(cluster.free)
    started = False
    for job in ordered:
        if not math.isnan(job.start):
            continue
        free = [free if now + job.estimate <= until else 0 for free, until in zip(cluster.free, kept, strict=True)]
        found = place(free, job.gpus, cluster.whole)
        if found is not None:
            cluster.start_on(job, found, now)
            started = True
        elif reservations:
            if started:
                return True
            at = earliest(cluster, job, kept, now)
            if at is not None:
                reservations -= 1
                for node, _ in at[1]:
                    kept[node] = at[0]
            elif reservations == 1:
                reservations = 0
    return started


def estimated_end(job: Job, now: float) -> float:
    return max(job.start + job.estimate, now + OVERDUE_S)


def earliest(cluster: Cluster, job: Job, kept: Sequence[float], now: float) -> tuple[float, Placement] | None:
    """When and where it fits on nodes that are kept for nobody, when all runs end as estimated."""
    for time in sorted({estimated_end(other, now) for other in cluster.running}):
        free = list(cluster.free)
        for other in cluster.running:
            if estimated_end(other, now) <= time:
                for node, gpus in other.placement:
                    free[node] += gpus
        unkept = [free[node] if math.isinf(kept[node]) else 0 for node in range(len(free))]
        found = place(unkept, job.gpus, cluster.whole)
        if found is not None:
            return time, found
    return None


# ── least attained service, with preemption ──────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Share(Job):
    """A job that can be evicted; `start` is its first, `since` that of the present stretch."""

    remaining: float = 0.0
    attained: float = 0.0
    level: int = 0
    since: float = 0.0
    restart: float = 0.0
    preemptions: int = 0
    runs: bool = False
    done: float = math.nan

    @property
    def order(self) -> tuple[int, int]:
        return self.level, self.seq


class SharedCluster:
    def __init__(self, nodes: Sequence[int], levels: Sequence[float], restart_s: float, checkpoint_s: float) -> None:
        self.free, self.whole = list(nodes), max(nodes)
        self.levels, self.restart_s, self.checkpoint_s = levels, restart_s, checkpoint_s

    def completion(self, job: Share) -> float:
        return job.since + job.restart + job.remaining

    def crossing(self, job: Share) -> float:
        """When it reaches the next level."""
        if job.level == len(self.levels):
            return math.inf
        return max(job.since, job.since + (self.levels[job.level] - job.attained) / job.gpus)

    def run(self, job: Share, now: float) -> None:
        found = place(self.free, job.gpus, self.whole)
        assert found is not None
        job.placement, job.since, job.runs = found, now, True
        if math.isnan(job.start):
            job.start = now
        else:
            job.restart = self.restart_s
        occupy(self.free, job, -1)

    def stop(self, job: Share, now: float) -> None:
        occupy(self.free, job, 1)
        job.attained += job.gpus * (now - job.since)
        job.runs = False

    def evict(self, job: Share, now: float) -> None:
        self.stop(job, now)
        worked = max(0.0, now - job.since - job.restart)
        job.remaining -= math.floor(worked / self.checkpoint_s) * self.checkpoint_s
        job.preemptions += 1

    def victims(self, job: Share, running: list[Share]) -> list[Share] | None:
        """Whom to evict for `job`; None where not even all of higher levels would do."""
        free, chosen = list(self.free), []
        for victim in sorted(running, key=lambda v: v.order, reverse=True):
            if place(free, job.gpus, self.whole) is None and victim.level > job.level:
                occupy(free, victim, 1)
                chosen.append(victim)
        if place(free, job.gpus, self.whole) is None:
            return None
        for victim in reversed(list(chosen)):
            occupy(free, victim, -1)
            if place(free, job.gpus, self.whole) is None:
                occupy(free, victim, 1)
            else:
                chosen.remove(victim)
        return chosen


def occupy(free: list[int], job: Job, sign: int) -> None:
    for node, gpus in job.placement:
        free[node] += sign * gpus


def simulate_las(
    jobs: list[Share], nodes: Sequence[int], levels: Sequence[float], restart_s: float, checkpoint_s: float
) -> None:
    """Sets `start`, `done` and `preemptions` of the jobs."""
    cluster, here, coming = SharedCluster(nodes, levels, restart_s, checkpoint_s), [], list(jobs)
    while coming or here:
        running = [job for job in here if job.runs]
        moments = [min(cluster.completion(job), cluster.crossing(job)) for job in running]
        now = min([job.submit for job in coming[:1]] + moments)
        for job in running:
            while cluster.crossing(job) <= now < cluster.completion(job):
                job.level += 1
            if cluster.completion(job) <= now:
                cluster.stop(job, now)
                job.done = now
                here.remove(job)
        while coming and coming[0].submit == now:
            here.append(coming.pop(0))
        for job in sorted(here, key=lambda job: job.order):
            if not job.runs:
                for victim in cluster.victims(job, [other for other in here if other.runs]) or []:
                    cluster.evict(victim, now)
                if place(cluster.free, job.gpus, cluster.whole) is not None:
                    cluster.run(job, now)
