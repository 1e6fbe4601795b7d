"""What the window is worth: the values of the placed jobs, less a little for stranded GPUs.

    objective = sum of value over placed jobs - weight * stranded GPUs

Stranded GPUs are the idle devices left on nodes from which the window took at least one idle device. For a given
set of placed jobs the fewest are stranded when partly used nodes are filled before whole nodes are broken into. The
weight is so small that all that can be stranded together costs half of the least valuable job: no job is given up
for tidiness.
"""

from __future__ import annotations

import math

from streamsched.core.model import TopologyLevel
from streamsched.core.problem import TOPOLOGY_BONUS, Assignment, Candidate, NodeClass, Problem


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
    """Value at the rate of the slowest worker, with the bonus of kept wishes, less the cost of all evictions."""
    candidates = {c.job_id: c for c in problem.candidates}
    class_of = {n: c for c in problem.classes for n in c.node_ids}
    cost = {v.placement_id: v.cost for v in reversed(problem.victims)}
    gained = [_worth(candidates[a.job_id], [class_of[n] for n, _ in a.workers], problem, a) for a in assignments]
    return math.fsum([*gained, *(-cost[v] for v in sorted({v for a in assignments for v in a.after}))])


def _worth(candidate: Candidate, nodes: list[NodeClass], problem: Problem, assignment: Assignment) -> float:
    speeds = dict(candidate.speeds)
    allowed = {c.gpu_type for c in problem.classes if not candidate.gpu_types or c.gpu_type in candidate.gpu_types}
    fastest = max(speeds.get(t, 1.0) for t in allowed)
    rate = min(speeds.get(node.gpu_type, 1.0) for node in nodes) / fastest
    wish = candidate.topology
    if wish is None or wish.required:
        return candidate.value * rate
    if wish.level is TopologyLevel.NODE:
        kept = len({n for n, _ in assignment.workers}) == 1
    else:
        names = {getattr(node, wish.level.value) for node in nodes}
        kept = len(names) == 1 and names != {""}
    return candidate.value * rate * (1 + TOPOLOGY_BONUS if kept else 1)
