"""Candidates in rank order, each where it fits best: the fallback, the baseline and the MIP start of the model.

Best fit: the node with the fewest idle devices that suffice, then the lowest node id; a share goes to the smallest
free share that suffices, else to an idle device of the fullest node that has one. A gang is placed whole or not at
all.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamsched.core.problem import Assignment, Candidate, Problem

from .request import is_sane
from .stock import Stock


def greedy(problem: Problem) -> tuple[Assignment, ...]:
    """Assignments in rank order. Each is feasible after those before it, devices taken as the core takes them."""
    return fill(Stock(problem), problem.candidates)


def fill(
    stock: Stock,
    candidates: Iterable[Candidate],
    *,
    open_devices: bool = True,
    failed: dict[str, str] | None = None,
) -> tuple[Assignment, ...]:
    """Place what still fits into `stock`, which changes. A job is placed once even if it is named twice.

    With `failed`, a candidate that raises is left out, and what it raised is written there under its job id.
    """
    placed: dict[str, Assignment] = {}
    for candidate in candidates:
        if candidate.job_id in placed or not is_sane(candidate):
            continue
        try:
            workers = stock.place(candidate, open_devices=open_devices)
        except Exception as error:
            if failed is None:
                raise
            failed[candidate.job_id] = f"failed: {type(error).__name__}: {error}"
            continue
        if workers is not None:
            placed[candidate.job_id] = Assignment(
                job_id=candidate.job_id,
                attempt=candidate.attempt,
                workers=workers,
                score=candidate.score,
            )
    return tuple(placed.values())
