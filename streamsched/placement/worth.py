"""What placing a candidate in some way is worth: the rate of its slowest worker, and wishes that are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from streamsched.core.model import TopologyLevel
from streamsched.core.problem import TOPOLOGY_BONUS, Candidate, NodeClass
from streamsched.core.room import Located, domain_of

KEPT = 1.0 + TOPOLOGY_BONUS
"""Factor of a candidate's value where its wish is kept."""


def rates(candidate: Candidate, gpu_types: Iterable[str]) -> dict[str, float]:
    """GPU type -> speed relative to the fastest, for those of the problem's types that the candidate allows."""
    speeds = dict(candidate.speeds)
    allowed = {t: speeds.get(t, 1.0) for t in gpu_types if not candidate.gpu_types or t in candidate.gpu_types}
    fastest = max(allowed.values(), default=1.0)
    return {t: speed / fastest if fastest > 0 else 1.0 for t, speed in allowed.items()}


def wishes(candidate: Candidate) -> bool:
    """Whether it has a topology wish that is worth something and not required."""
    return candidate.topology is not None and not candidate.topology.required


def together(level: TopologyLevel, nodes: Sequence[tuple[str, Located]]) -> bool:
    """Whether these (node_id, where it is) are all in one domain that has a name."""
    domains = {domain_of(level, where, node_id) for node_id, where in nodes}
    return len(domains) == 1 and "" not in domains


def worth_of(candidate: Candidate, nodes: Sequence[tuple[str, NodeClass]], gpu_types: Iterable[str]) -> float:
    """Of a candidate whose workers are on these (node_id, class); `gpu_types`: all those of the problem."""
    rate = rates(candidate, gpu_types)
    value = candidate.value * min(rate[node_class.gpu_type] for _, node_class in nodes)
    wish = candidate.topology
    if wish is None or wish.required or not together(wish.level, nodes):
        return value
    return value * KEPT


def at_most(candidate: Candidate) -> float:
    """The most that placing it can be worth."""
    return max(0.0, candidate.value) * (KEPT if wishes(candidate) else 1.0)
