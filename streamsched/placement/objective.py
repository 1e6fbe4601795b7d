"""What the window is worth: the values of the placed jobs, less a little for stranded GPUs.

    objective = sum of value * rate over placed jobs - weight * stranded GPUs

A job's rate is the speed of its slowest worker over that of the fastest type it may use of those in the window (1 for
jobs that tell no speeds).

Stranded GPUs are the idle devices left on nodes from which the window took at least one idle device. For a given
set of placed jobs the fewest are stranded when partly used nodes are filled before whole nodes are broken into. The
weight is so small that all that can be stranded together costs half of the least valuable job: no job is given up
for tidiness.
"""

from __future__ import annotations

import math

from streamsched.core.problem import Assignment, Candidate, Problem

from .request import variants


class BadValue(ValueError):
    """A candidate's value is not a finite number: the policy that scored it is broken."""


def fragmentation_weight(problem: Problem) -> float:
    """Value of one stranded GPU."""
    for candidate in problem.candidates:
        if not math.isfinite(candidate.value):
            raise BadValue(f"job {candidate.job_id}: value {candidate.value} is not finite")
    there = gpu_types(problem)
    least = min((c.value * variants(c, there)[-1][1] for c in problem.candidates if c.value > 0), default=0.0)
    workers = sum(count for c in problem.candidates for _, count in c.chunks)
    widest = max((c.free_gpus for c in problem.classes), default=1)
    return least / (2 * max(1, workers * (widest - 1)))


def gpu_types(problem: Problem) -> frozenset[str]:
    return frozenset(c.gpu_type for c in problem.classes)


def placed_value(problem: Problem, assignments: tuple[Assignment, ...]) -> float:
    """The first sum of the objective."""
    by_id = {c.job_id: c for c in problem.candidates}
    if not any(c.speeds for c in problem.candidates):
        return math.fsum(by_id[a.job_id].value for a in assignments)
    there, type_of = gpu_types(problem), {n: c.gpu_type for c in problem.classes for n in c.node_ids}
    return math.fsum(
        by_id[a.job_id].value * _rate(by_id[a.job_id], {type_of[n] for n, _ in a.workers}, there) for a in assignments
    )


def _rate(candidate: Candidate, used: set[str], there: frozenset[str]) -> float:
    for kept, rate in variants(candidate, there):
        if not kept.gpu_types or used <= {*kept.gpu_types}:
            return rate
    return 1.0
