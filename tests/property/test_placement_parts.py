"""Windows solved in parts: dividing loses and doubles nothing; the answer is allowed and no worse than greedy's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement_full import problems

from streamsched.core.model import TopologyLevel, TopologyWish
from streamsched.core.problem import Candidate, NodeClass, Problem, Solution, SolveStatus
from streamsched.placement import SolveLimits, check, greedy, solve, solve_in_parts, split
from streamsched.placement.objective import objective
from streamsched.placement.reasons import never_fits

IN_PARTS = SolveLimits(time_s=None, gap=0.0, parts_max=3, part_jobs=1)


@given(p=problems(shares=True), parts=st.integers(1, 4))
@settings(max_examples=150)
def test_every_node_victim_and_candidate_is_in_exactly_one_part(p: Problem, parts: int) -> None:
    divided = split(p, parts)
    assert 1 <= len(divided) <= parts
    assert divided == split(p, parts)
    candidates = Counter(c for part in divided for c in part.candidates)
    assert candidates == Counter(p.candidates)
    nodes = Counter(n for part in divided for c in part.classes for n in c.node_ids)
    assert max(nodes.values(), default=1) == 1
    for part in divided:
        here = {n for c in part.classes for n in c.node_ids}
        assert all(n in here for victim in part.victims for n, *_ in victim.held)
        assert [c for c in p.candidates if c in part.candidates] == list(part.candidates)  # in rank order


@given(p=problems(shares=True), parts=st.integers(2, 4))
@settings(max_examples=150)
def test_who_fits_the_window_fits_its_part(p: Problem, parts: int) -> None:
    for part in split(p, parts):
        for candidate in part.candidates:
            if never_fits(p, candidate) is None:
                assert never_fits(part, candidate) is None


@given(p=problems(shares=True))
@settings(max_examples=150)
def test_the_answer_in_parts_is_allowed_and_between_greedys_and_the_optimum(p: Problem) -> None:
    solution = solve_in_parts(p, IN_PARTS)
    assert check(p, solution) == []
    assert solution.note == ""
    assert solution.objective == pytest.approx(objective(p, solution.assignments), abs=1e-6)
    assert solution.objective >= objective(p, greedy(p)) - 1e-6
    assert solution.bound is None or solution.bound >= solve(p, SolveLimits(time_s=None, gap=0.0)).objective - 1e-6
    assert {a.job_id for a in solution.assignments}.isdisjoint(solution.unplaced)
    assert {a.job_id for a in solution.assignments} | solution.unplaced.keys() == {c.job_id for c in p.candidates}


def job(name: str, gpus: int, workers: int = 1, **more: object) -> Candidate:
    return Candidate(job_id=name, attempt=0, chunks=((gpus, workers),), value=float(gpus * workers), **more)  # type: ignore[arg-type]


def window(candidates: Sequence[Candidate], *classes: NodeClass) -> Problem:
    return Problem(pool="p", window=1, now=0.0, policy="t", candidates=tuple(candidates), classes=classes)


def nodes(count: int, free: int = 8, first: int = 0, **more: object) -> NodeClass:
    ids = tuple(f"n{first + i:03}" for i in range(count))
    return NodeClass(gpu_type="A", free_gpus=free, node_ids=ids, total_gpus=8, **more)  # type: ignore[arg-type]


def test_nodes_of_a_domain_that_is_asked_for_stay_together() -> None:
    racks = [nodes(4, first=4 * r, rack=f"r{r}", nvlink=f"v{r}") for r in range(4)]
    wish = TopologyWish(level=TopologyLevel.RACK, required=True)
    parts = split(window([job("a", 8, 4, topology=wish), *(job(f"b{i}", 8) for i in range(7))], *racks), 4)
    assert len(parts) == 4
    assert sorted(len(c.node_ids) for part in parts for c in part.classes) == [4, 4, 4, 4]


def test_no_part_is_too_small_for_a_job_that_fits_the_window() -> None:
    small = [job(f"b{i}", 8) for i in range(8)]
    assert [len(p.classes[0].node_ids) for p in split(window([job("a", 8, 4), *small], nodes(8)), 4)] == [4, 4]
    whole = window([job("a", 8, 5), *small], nodes(8))
    assert split(whole, 4) == (whole,)


def test_what_the_parts_leave_is_filled_across_them() -> None:
    """`c` is dealt to a part where it will not fit, which sends `e` to the other one, that has no room left for it."""
    by_parts: list[Solution] = []

    def run(parts: Sequence[Problem], limits: SolveLimits) -> list[Solution]:
        by_parts.extend(solve(part, limits) for part in parts)
        return by_parts

    p = window([job("a", 5), job("b", 5), job("c", 4), job("d", 3), job("e", 3)], nodes(2))
    solution = solve_in_parts(p, IN_PARTS, run=run)
    assert sorted(a.job_id for part in by_parts for a in part.assignments) == ["a", "b", "d"]
    assert sorted(a.job_id for a in solution.assignments) == ["a", "b", "d", "e"]


def test_a_part_that_fails_leaves_greedys_answer() -> None:
    def broken(parts: Sequence[Problem], limits: SolveLimits) -> list[Solution]:
        raise OSError("gone")

    p = window([job("a", 5), job("b", 8), job("c", 3), job("d", 8)], nodes(2))
    seen: list[Solution] = []
    solution = solve_in_parts(p, IN_PARTS, seen.append, broken)
    assert solution.assignments == seen[0].assignments == greedy(p)
    assert solution.status is SolveStatus.GREEDY
    assert "OSError: gone" in solution.note


def test_an_answer_that_is_not_allowed_is_left_out_and_noted() -> None:
    def twice(parts: Sequence[Problem], limits: SolveLimits) -> list[Solution]:
        return [solve(parts[0], limits)] * 2

    p = window([job("a", 5), job("b", 8), job("c", 3), job("d", 8)], nodes(2))
    solution = solve_in_parts(p, IN_PARTS, run=twice)
    assert check(p, solution) == []
    assert "refused by the check" in solution.note
