"""Candidates in rank order, each where it fits best: the fallback, the baseline and the MIP start of the model.

Best fit: the node with the fewest idle devices that suffice, then the lowest node id; a share goes to the smallest
free share that suffices, else to an idle device of the fullest node that has one. A gang is placed whole or not at
all, in the most valuable way in which it fits: on faster devices first, close together where it wishes so. Only one
that found no room has others make room for it (`making_room.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from streamsched.core.problem import Assignment, Candidate, Problem

from .making_room import make_room
from .plain import fill_plain, is_plain
from .request import is_sane, is_share
from .stock import Stock, Workers


def greedy(problem: Problem) -> tuple[Assignment, ...]:
    """Assignments in rank order, those that need nobody to make room first.

    Each is feasible after those before it, devices taken as the core takes them.
    """
    if is_plain(problem):
        return fill_plain(problem, filter(is_sane, problem.candidates))
    return fill(Stock(problem), problem.candidates, in_order=problem.in_order)


def fill(
    stock: Stock,
    candidates: Iterable[Candidate],
    *,
    open_devices: bool = True,
    as_whole: bool = False,
    failed: dict[str, str] | None = None,
    in_order: bool = False,
) -> tuple[Assignment, ...]:
    """Place what still fits into `stock`, which changes. A job is placed once even if it is named twice.

    `open_devices` and `as_whole` as in `Stock.place`; where a share takes a whole device it has nobody evicted either.
    `in_order`: the first that does not fit is the last looked at.

    With `failed`, a candidate that raises is left out, and what it raised is written there under its job id.
    """
    placed: dict[str, Assignment] = {}
    looked_at = 0
    for candidate in candidates:
        if candidate.job_id in placed:
            continue
        if in_order and len(placed) < looked_at:
            break
        looked_at += 1
        if not is_sane(candidate):
            continue
        try:
            workers, after = _seat(stock, candidate, open_devices, as_whole)
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
                after=after,
            )
    return tuple(sorted(placed.values(), key=lambda assignment: bool(assignment.after)))


def _seat(
    stock: Stock, candidate: Candidate, open_devices: bool, as_whole: bool
) -> tuple[Workers | None, tuple[str, ...]]:
    """(nodes or None, victims that have to go first)."""
    workers = stock.place(candidate, open_devices=open_devices, as_whole=as_whole)
    if workers is not None or not stock.freed.victims or is_share(candidate):
        return workers, ()
    return make_room(stock, candidate) or (None, ())
