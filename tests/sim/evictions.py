"""A small solver that also has runs stopped: greedy's answer, then whoever is left takes the place of lower levels."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Victim
from streamsched.placement.greedy import greedy


def solve(problem: Problem) -> tuple[Assignment, ...]:
    """Nobody is stopped in vain; who has runs stopped gets nodes that this answer uses for nobody else."""
    found = list(greedy(replace(problem, victims=())))
    used = {node_id for assignment in found for node_id, _ in assignment.workers}
    placed = {assignment.job_id for assignment in found}
    for candidate in problem.candidates:
        if candidate.job_id in placed:
            continue
        below = [v for v in problem.victims if v.level < candidate.level and not used & {n for n, *_ in v.held}]
        assignment = _with_room(problem, candidate, below, used)
        if assignment is not None:
            found.append(assignment)
            used |= {node_id for node_id, _ in assignment.workers}
            gone = [v for v in problem.victims if v.placement_id in assignment.after]
            used |= {node_id for victim in gone for node_id, *_ in victim.held}
    return tuple(found)


def _with_room(
    problem: Problem, candidate: Candidate, victims: Sequence[Victim], used: Collection[str]
) -> Assignment | None:
    if not victims:
        return None
    needed = list(victims)
    found = _alone(problem, candidate, needed, used)
    for victim in reversed(victims):
        rest = [other for other in needed if other is not victim]
        without = _alone(problem, candidate, rest, used) if found else None
        if without is not None:
            needed, found = rest, without
    return found and replace(found, after=tuple(victim.placement_id for victim in needed))


def _alone(problem: Problem, candidate: Candidate, gone: Sequence[Victim], used: Collection[str]) -> Assignment | None:
    """Where the candidate would be placed if it were alone and these victims had gone."""
    classes = [_node(c, node_id, gone) for c in problem.classes for node_id in c.node_ids if node_id not in used]
    found = greedy(replace(problem, candidates=(candidate,), classes=tuple(classes), victims=()))
    return found[0] if found else None


def _node(node_class: NodeClass, node_id: str, gone: Sequence[Victim]) -> NodeClass:
    back = sum(gpus for victim in gone for name, gpus, _, _ in victim.held if name == node_id)
    return replace(node_class, node_ids=(node_id,), free_gpus=node_class.free_gpus + back)
