"""The semantics of simulated scheduling in the plainest form: lists, sorting, no shortcuts. For small workloads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

WHOLE = 8


@dataclass
class RefJob:
    number: int
    submit: float
    run: float
    gpus: int
    estimate: float
    start: float = math.nan
    held: dict[int, int] = field(default_factory=dict)

    @property
    def finish(self) -> float:
        return self.start + self.run

    def expected_end(self, now: float) -> float:
        """An overdue job is taken to end right now."""
        return max(now, self.start + max(1.0, self.estimate))


def place(free: list[int], gpus: int) -> dict[int, int] | None:
    """Best fit: fewest free GPUs that suffice, lowest node first; larger jobs take whole nodes and one more."""
    chunks = [gpus] if gpus <= WHOLE else [WHOLE] * (gpus // WHOLE) + [gpus % WHOLE] * bool(gpus % WHOLE)
    taken: dict[int, int] = {}
    for chunk in chunks:
        fitting = [(free[node], node) for node in range(len(free)) if node not in taken and free[node] >= chunk]
        if not fitting:
            return None
        taken[min(fitting)[1]] = chunk
    return taken


def simulate(
    jobs: list[RefJob], nodes: list[int], lower_first: Callable[[RefJob, float], float], backfill: str
) -> list[float]:
    """Start times; NaN for what an empty cluster could not hold. At each moment completions, arrivals, one pass."""
    free = list(nodes)
    coming = [job for job in jobs if place(list(nodes), job.gpus) is not None]
    queue: list[RefJob] = []
    running: list[RefJob] = []

    def begin(job: RefJob, now: float, held: dict[int, int]) -> None:
        job.start, job.held = now, held
        for node, gpus in held.items():
            free[node] -= gpus
        queue.remove(job)
        running.append(job)

    while coming or running:
        now = min([job.submit for job in coming[:1]] + [job.finish for job in running])
        for job in [job for job in running if job.finish == now]:
            running.remove(job)
            for node, gpus in job.held.items():
                free[node] += gpus
        while coming and coming[0].submit == now:
            queue.append(coming.pop(0))
        head: RefJob | None = None
        for job in sorted(queue, key=lambda job: (lower_first(job, now), job.number)):
            held = place(free, job.gpus)
            if head is not None and held is not None and delays(job, held, head, now, free, running):
                held = None
            if held is not None:
                begin(job, now, held)
            elif backfill == "none":
                break
            elif backfill == "easy" and head is None:
                head = job
    return [job.start for job in jobs]


def delays(job: RefJob, held: dict[int, int], head: RefJob, now: float, free: list[int], running: list[RefJob]) -> bool:
    """Whether the head could not start at its shadow time if this job started now."""
    shadow = shadow_time(head, now, free, running)
    if now + max(1.0, job.estimate) <= shadow:
        return False
    later = list(free)
    for other in running:
        if other.expected_end(now) <= shadow:
            for node, gpus in other.held.items():
                later[node] += gpus
    for node, gpus in held.items():
        later[node] -= gpus
    return place(later, head.gpus) is None


def shadow_time(head: RefJob, now: float, free: list[int], running: list[RefJob]) -> float:
    """When the head fits, if running jobs end as estimated."""
    for end in sorted({other.expected_end(now) for other in running}):
        later = list(free)
        for other in running:
            if other.expected_end(now) <= end:
                for node, gpus in other.held.items():
                    later[node] += gpus
        if place(later, head.gpus) is not None:
            return end
    return math.inf
