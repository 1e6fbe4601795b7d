"""What the window is worth: the values of the placed jobs, less a little for stranded GPUs.

    objective = sum of value over placed jobs - weight * stranded GPUs

Stranded GPUs are the idle devices left on nodes from which the window took at least one idle device. For a given
set of placed jobs the fewest are stranded when partly used nodes are filled before whole nodes are broken into. The
weight is so small that all that can be stranded together costs half of the least valuable job: no job is given up
for tidiness.
"""

from __future__ import annotations

import math

from streamsched.core.problem import Assignment, Problem


class BadValue(ValueError):
    """A candidate's value is not a finite number: the policy that scored it is broken."""


def fragmentation_weight(problem: Problem) -> float:
    """Value of one stranded GPU."""
    for candidate in problem.candidates:
        if not math.isfinite(candidate.value):
            raise BadValue(f"job {candidate.job_id}: value {candidate.value} is not finite")
    least = min((c.value for c in problem.candidates if c.value > 0), default=0.0)
    workers = sum(count for c in problem.candidates for _, count in c.chunks)
    widest = max((c.free_gpus for c in problem.classes), default=1)
    return least / (2 * max(1, workers * (widest - 1)))


def placed_value(problem: Problem, assignments: tuple[Assignment, ...]) -> float:
    values = {c.job_id: c.value for c in problem.candidates}
    return math.fsum(values[a.job_id] for a in assignments)
