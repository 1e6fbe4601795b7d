"""What the window is worth: the values of the placed jobs, less evictions and a little for stranded GPUs.

    objective = sum over placed jobs of value * rate * (1 + bonus where a topology wish is kept)
                - weight * stranded GPUs - sum of the costs of evicted victims

The rate is that of the job's slowest worker (`worth.py`). A victim is paid for once, however many wait for it.

Stranded GPUs are the devices left idle on nodes from which the window took at least one, with those that evictions
free there. For a given set of placed jobs the fewest are stranded when partly used nodes are filled before whole nodes
are broken into. The weight is so small that all that can be stranded together costs half of the least valuable job on
its slowest type: no job is given up for tidiness. Where jobs share devices (`Problem.mix`) it is zero: whole idle
devices are not what counts there, and greedy keeps the free ones useful (`gradient.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from streamsched.core.problem import Assignment, Problem

from .freed import Freed
from .stock import Stock
from .worth import rates, worth_of


class BadValue(ValueError):
    """A candidate's value is not a finite number: the policy that scored it is broken."""


def fragmentation_weight(problem: Problem) -> float:
    """Value of one stranded GPU; none where devices are shared (`gradient.py` is for that)."""
    for candidate in problem.candidates:
        if not math.isfinite(candidate.value):
            raise BadValue(f"job {candidate.job_id}: value {candidate.value} is not finite")
    if problem.mix:
        return 0.0
    types = sorted({c.gpu_type for c in problem.classes})
    least = min(
        (c.value * min(rates(c, types).values(), default=1.0) for c in problem.candidates if c.value > 0), default=0.0
    )
    workers = sum(count for c in problem.candidates for _, count in c.chunks)
    widest = max((c.free_gpus for c in problem.classes), default=1) + Freed(problem).most_gpus
    return least / (2 * max(1, workers * (widest - 1)))


def placed_value(problem: Problem, assignments: Iterable[Assignment]) -> float:
    """The objective without the term for stranded GPUs."""
    candidates = {c.job_id: c for c in problem.candidates}
    class_of = {node_id: c for c in problem.classes for node_id in c.node_ids}
    types = sorted({c.gpu_type for c in problem.classes})
    costs = {v.placement_id: v.cost for v in reversed(problem.victims)}
    worths: list[float] = []
    evicted: set[str] = set()
    for assignment in assignments:
        nodes = [(node_id, class_of[node_id]) for node_id, _ in assignment.workers]
        worths.append(worth_of(candidates[assignment.job_id], nodes, types))
        evicted.update(assignment.after)
    return math.fsum(worths) - math.fsum(costs[name] for name in sorted(evicted))


def stranded_gpus(problem: Problem, assignments: Iterable[Assignment]) -> int:
    """Of assignments that can be carried out in this order."""
    stock = Stock(problem)
    candidates = {c.job_id: c for c in problem.candidates}
    for assignment in assignments:
        stock.put(candidates[assignment.job_id], assignment.workers, assignment.after)
    return stock.stranded_gpus()


def objective(problem: Problem, assignments: Sequence[Assignment]) -> float:
    """Of assignments that can be carried out in this order; to be maximised."""
    weight = fragmentation_weight(problem)
    return placed_value(problem, assignments) - weight * stranded_gpus(problem, assignments)
