"""Why a candidate was not placed, for its owner: a code, then words.

Codes: invalid, type, avoided, cpu, memory, gpus, outranked; and from `solve.py` window (beyond what one window
handles) and failed (a bug). They are judged against the window's free resources
before anything was placed; `outranked` means that the candidate alone would have fitted, or that no single resource
is short.
"""

from __future__ import annotations

from streamsched.core.problem import Candidate, NodeClass, Problem

from .request import NO_LIMIT, Request, how_many, is_sane, requests_of


def never_fits(problem: Problem, candidate: Candidate) -> str | None:
    """Why it would not fit even with all free resources of the window to itself; None when it may.

    Looks at one chunk size at a time: a necessary condition, exact for gangs of equal workers.
    """
    if not is_sane(candidate):
        return f"invalid: chunks {candidate.chunks} with {candidate.gpu_milli} thousandths of a device"
    for request, count in _summed(candidate):
        classes = [c for c in problem.classes if request.allows(c.gpu_type)]
        if not classes:
            return f"type: no free node of type {_types(request)}"
        seats = sum(how_many(request, c) * _open_nodes(request, c) for c in classes)
        if seats < count:
            return _short_of(request, count, seats, classes)
    return None


def _summed(candidate: Candidate) -> list[tuple[Request, int]]:
    """Equal workers together, also from several chunks."""
    counts: dict[Request, int] = {}
    for request, count in requests_of(candidate):
        counts[request] = counts.get(request, 0) + count
    return list(counts.items())


def outranked(problem: Problem, candidate: Candidate) -> str:
    """For a candidate that `never_fits` says nothing against."""
    others = len(problem.candidates) - 1
    return f"outranked: would fit alone, but not beside what was placed of the window's {others} other jobs"


def _open_nodes(request: Request, node_class: NodeClass) -> int:
    avoided = request.avoid_nodes.intersection(node_class.node_ids) if request.avoid_nodes else ()
    return len(node_class.node_ids) - len(avoided)


def _short_of(request: Request, count: int, seats: int, classes: list[NodeClass]) -> str:
    kind, of = _gpus(request), _types(request)
    if seats:
        return f"gpus: needs {count} workers with {kind} each on {of}, there is room for {seats}"
    with_gpus = [c for c in classes if _has_gpus(request, c)]
    if not with_gpus:
        best = max(c.free_gpus for c in classes)
        if not request.whole:
            share = max((s for c in classes for s in c.shares), default=0)
            return f"gpus: needs {kind} of {of}, the largest free share is {share}"
        return f"gpus: needs {kind} on one node of {of}, best node has {best}"
    for code, unit, need, limits in (
        ("cpu", "milli-cores", request.cpu_milli, [c.free_cpu_milli for c in with_gpus]),
        ("memory", "MiB", request.memory_mib, [c.free_memory_mib for c in with_gpus]),
    ):
        if NO_LIMIT not in limits and max(limits) < need:
            return f"{code}: needs {need} {unit} beside {kind} on one node of {of}, best node has {max(limits)}"
    if all(how_many(request, c) == 0 for c in with_gpus):
        return f"cpu: no node of {of} has {request.cpu_milli} milli-cores and {request.memory_mib} MiB beside {kind}"
    return f"avoided: only nodes that refused it lately have {kind} of {of}"


def _has_gpus(request: Request, node_class: NodeClass) -> bool:
    if request.whole:
        return node_class.free_gpus >= request.gpus
    return node_class.free_gpus > 0 or any(s >= request.gpu_milli for s in node_class.shares)


def _gpus(request: Request) -> str:
    if request.whole:
        return f"{request.gpus} free GPU{'s' if request.gpus > 1 else ''}"
    return f"{request.gpu_milli} thousandths of a device"


def _types(request: Request) -> str:
    return " or ".join(request.gpu_types) or "any type"
