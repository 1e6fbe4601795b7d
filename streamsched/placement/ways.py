"""The ways in which a candidate may be placed, best first: on which devices, and how close together."""

from __future__ import annotations

from typing import NamedTuple

from streamsched.core.model import TopologyLevel
from streamsched.core.problem import Candidate

from .request import Make, Request, workers_of
from .worth import KEPT, rates, wishes


class Way(NamedTuple):
    """All workers on devices of these makes, within one domain of the level if there is one."""

    worth: float
    """What the candidate is worth so, at least."""
    makes: tuple[int, ...]
    """Indexes into the makes of the problem."""
    level: TopologyLevel | None


def ways_of(candidate: Candidate, request: Request, makes: list[Make]) -> list[Way]:
    """By worth; of equal ones close together first. `request`: any worker of the candidate.

    On one type: a way per type. Else one per speed, with all types that are no slower.
    """
    rate = rates(candidate, [make.gpu_type for make in makes])
    of_type: dict[str, list[int]] = {}
    for index, make in enumerate(makes):
        if make.gpu_type in rate and request.suits(make):
            of_type.setdefault(make.gpu_type, []).append(index)
    if candidate.one_type and workers_of(candidate) > 1:
        sets = [(rate[gpu_type], tuple(indexes)) for gpu_type, indexes in of_type.items()]
    else:
        sets = [
            (
                least,
                tuple(sorted(i for gpu_type, indexes in of_type.items() if rate[gpu_type] >= least for i in indexes)),
            )
            for least in {rate[gpu_type] for gpu_type in of_type}
        ]
    ways = [
        Way(candidate.value * factor * speed, indexes, level)
        for speed, indexes in sets
        for factor, level in _levels(candidate)
    ]
    return sorted(ways, key=lambda way: (-way.worth, way.level is None))


def _levels(candidate: Candidate) -> list[tuple[float, TopologyLevel | None]]:
    """(factor of the value, level)."""
    if candidate.topology is None:
        return [(1.0, None)]
    level = candidate.topology.level
    if level is TopologyLevel.NODE and candidate.anti_affinity and workers_of(candidate) > 1:
        return [(1.0, None)] if wishes(candidate) else []
    if wishes(candidate):
        return [(KEPT, level), (1.0, None)]
    return [(1.0, level)]
