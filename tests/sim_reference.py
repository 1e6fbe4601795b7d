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
    "qssf": lambda job, now: -job.estimate * job.gpus,
    "smallest": lambda job, now: -job.gpus,
    "largest": lambda job, now: job.gpus,
    "wfp3": wfp3,
    "unicep": unicep,
    "f1": lambda job, now: -(float(np.log10(r_of(job))) * job.gpus + 870 * log_s_of(job)),
    "f2": lambda job, now: -(math.sqrt(r_of(job)) * job.gpus + 25_600 * log_s_of(job)),
    "f3": lambda job, now: -(r_of(job) * job.gpus + 6_860_000 * log_s_of(job)),
    "f4": lambda job, now: -(r_of(job) * math.sqrt(job.gpus) + 530_000 * log_s_of(job)),
}


def score_of(rule: str, nodes: Sequence[int]) -> Score:
    def multifactor(job: Job, now: float) -> float:
        return 1_000.0 * min(1.0, (now - job.submit) / 604_800.0) + 1_000.0 * (job.gpus / sum(nodes))

    return multifactor if rule == "multifactor" else SCORES[rule]


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


# ── index policies, with preemption ──────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Share(Job):
    """A job that can be evicted; `start` is its first, `since` that of the present stretch."""

    kind: int = 0
    remaining: float = 0.0
    left: float = 0.0
    """Of the estimate."""
    attained: float = 0.0
    level: int = 0
    since: float = 0.0
    restart: float = 0.0
    preemptions: int = 0
    runs: bool = False
    urgent: bool = False
    done: float = math.nan


@dataclass
class Order:
    """By `table[kind][level]` of attained service, or, without a table, by what remains of the estimates."""

    levels: Sequence[float] = ()
    table: Sequence[Sequence[float]] | None = None
    by_gpu_time: bool = True
    restart_s: float = 0.0
    checkpoint_s: float = 1.0
    bound_s: float = math.inf
    move_after_s: float = math.inf
    least_loss: bool = False


class SharedCluster:
    def __init__(self, nodes: Sequence[int], order: Order) -> None:
        self.free, self.whole, self.order = list(nodes), max(nodes), order

    def completion(self, job: Share) -> float:
        return job.since + job.restart + job.remaining

    def rate(self, job: Share) -> float:
        return job.gpus if self.order.by_gpu_time else 1

    def next_level(self, job: Share) -> int:
        """Behind this one its rank changes."""
        levels = range(job.level, len(self.order.levels))
        ranks = self.order.table[job.kind] if self.order.table is not None else []
        return next((level for level in levels if ranks[level + 1] != ranks[level]), len(self.order.levels))

    def crossing(self, job: Share) -> float:
        """When it reaches another rank."""
        level = self.next_level(job)
        if level == len(self.order.levels):
            return math.inf
        return max(job.since, job.since + (self.order.levels[level] - job.attained) / self.rate(job))

    def urgent_at(self, job: Share) -> float:
        return job.submit + self.order.bound_s + (job.duration - job.remaining)

    def rank(self, job: Share, now: float) -> tuple[float, int]:
        """Lower first; ties by arrival."""
        if job.urgent:
            return -math.inf, job.seq
        if self.order.table is not None:
            return self.order.table[job.kind][job.level], job.seq
        worked = max(0.0, now - job.since - job.restart) if job.runs else 0.0
        return self.rate(job) * (job.left - worked), job.seq

    def run(self, job: Share, now: float) -> None:
        found = place(self.free, job.gpus, self.whole)
        assert found is not None
        job.placement, job.since, job.runs = found, now, True
        if math.isnan(job.start):
            job.start = now
        else:
            job.restart = self.order.restart_s
        occupy(self.free, job, -1)

    def stop(self, job: Share, now: float) -> None:
        occupy(self.free, job, 1)
        job.attained += self.rate(job) * (now - job.since)
        job.runs = False

    def evict(self, job: Share, now: float) -> None:
        self.stop(job, now)
        worked = max(0.0, now - job.since - job.restart)
        saved = math.floor(worked / self.order.checkpoint_s) * self.order.checkpoint_s
        job.remaining -= saved
        job.left -= saved
        job.preemptions += 1

    def last_in_order(self, job: Share, now: float) -> tuple[float, float, int]:
        loss = self.loss(job, now) if self.order.least_loss else 0.0
        return -self.rank(job, now)[0], loss, -job.seq

    def victims(self, job: Share, running: list[Share], now: float) -> list[Share] | None:
        """Whom to evict for `job`; None where not even all of higher rank would do."""
        free, chosen = list(self.free), []
        for victim in sorted(running, key=lambda v: self.last_in_order(v, now)):
            if place(free, job.gpus, self.whole) is None and self.rank(victim, now)[0] > self.rank(job, now)[0]:
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

    def loss(self, job: Share, now: float) -> float:
        worked = max(0.0, now - job.since - job.restart)
        return self.order.restart_s + worked - math.floor(worked / self.order.checkpoint_s) * self.order.checkpoint_s

    def moves(self, job: Share, running: list[Share], now: float) -> list[Share]:
        """Who leaves so that `job` fits, when those that it does not outrank go on elsewhere; [] if that cannot be."""
        free, leaving, taken = list(self.free), [], []
        by_loss = sorted(running, key=lambda other: (self.loss(other, now), other.seq))
        workers = [self.whole] * (job.gpus // self.whole) + [job.gpus % self.whole] * (job.gpus % self.whole > 0)
        for need in workers:
            ways = []
            for node in set(range(len(free))) - set(taken):
                found = self.vacate(job, node, need, [o for o in by_loss if o not in leaving], free, taken, now)
                if found is not None:
                    ways.append((sum(self.loss(other, now) for other in found[0]), node, *found))
            if not ways:
                return []
            _, node, gone, free = min(ways, key=lambda way: way[:2])
            leaving += gone
            taken.append(node)
            free[node] -= need
        return sorted(leaving, key=lambda other: other.seq)

    def vacate(
        self, job: Share, node: int, need: int, by_loss: list[Share], free: list[int], taken: list[int], now: float
    ) -> tuple[list[Share], list[int]] | None:
        free, gone = list(free), []
        here = [other for other in by_loss if node in {n for n, _ in other.placement}]
        outranked = [other for other in here if self.rank(other, now)[0] > self.rank(job, now)[0]]
        for other in outranked:
            if free[node] < need:
                occupy(free, other, 1)
                gone.append(other)
        for other in here:
            settled = len(other.placement) == 1 and now - other.since >= self.order.move_after_s
            if free[node] < need and other not in outranked and settled:
                goals = [n for n in range(len(free)) if n != node and n not in taken and free[n] >= other.gpus]
                if goals:
                    free[min(goals, key=lambda n: (free[n], n))] -= other.gpus
                    free[node] += other.gpus
                    gone.append(other)
        return (gone, free) if free[node] >= need else None


def occupy(free: list[int], job: Job, sign: int) -> None:
    for node, gpus in job.placement:
        free[node] += sign * gpus


def simulate_order(jobs: list[Share], nodes: Sequence[int], order: Order) -> None:
    """Sets `start`, `done` and `preemptions` of the jobs."""
    cluster, here, coming = SharedCluster(nodes, order), [], list(jobs)
    now = 0.0
    while coming or here:
        running = [job for job in here if job.runs]
        moments = [min(cluster.completion(job), cluster.crossing(job)) for job in running]
        moments += [max(now, cluster.urgent_at(job)) for job in here if not job.runs and not job.urgent]
        now = min([job.submit for job in coming[:1]] + moments)
        for job in running:
            while cluster.crossing(job) <= now < cluster.completion(job):
                job.level = cluster.next_level(job) + 1
            if cluster.completion(job) <= now:
                cluster.stop(job, now)
                job.done = now
                here.remove(job)
        for job in here:
            job.urgent = job.urgent or (not job.runs and cluster.urgent_at(job) <= now)
        while coming and coming[0].submit == now:
            here.append(coming.pop(0))
        # Who is evicted in this pass may start again in it, elsewhere.
        passed: set[int] = set()
        while True:
            waiting = [job for job in here if not job.runs and job.gpus not in passed]
            waiting = [job for job in waiting if job.gpus < min(passed, default=math.inf)]
            if not waiting:
                break
            job = min(waiting, key=lambda job: cluster.rank(job, now))
            if place(cluster.free, job.gpus, cluster.whole) is None:
                running = [other for other in here if other.runs]
                victims, moved = cluster.victims(job, running, now), []
                if victims is None and order.move_after_s < math.inf and sum(cluster.free):
                    victims = cluster.moves(job, running, now) or None
                    moved = [v for v in victims or [] if cluster.rank(v, now)[0] <= cluster.rank(job, now)[0]]
                if victims is None:
                    passed.add(job.gpus)
                    continue
                for victim in victims:
                    cluster.evict(victim, now)
                cluster.run(job, now)
                for other in moved:
                    if place(cluster.free, other.gpus, cluster.whole) is not None:
                        cluster.run(other, now)
                continue
            cluster.run(job, now)
