"""The check finds each kind of broken solution and accepts good ones."""

from __future__ import annotations

import msgspec
import pytest

from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Solution, SolveStatus
from streamsched.placement import check
from streamsched.placement.check import shares_fit

PROBLEM = Problem(
    pool="p",
    window=9,
    now=0.0,
    policy="t",
    candidates=(
        Candidate(job_id="gang", attempt=2, chunks=((4, 2), (1, 1)), value=1.0, gpu_types=("A100",), cpu_milli=10),
        Candidate(job_id="share", attempt=0, chunks=((1, 2),), value=1.0, gpu_milli=600, memory_mib=5),
        Candidate(job_id="shy", attempt=0, chunks=((1, 1),), value=1.0, avoid_nodes=("a1",)),
    ),
    classes=(
        NodeClass(gpu_type="A100", free_gpus=5, node_ids=("a1", "a2"), free_cpu_milli=20, shares=(600,)),
        NodeClass(gpu_type="A100-80GB", free_gpus=4, node_ids=("b1",), free_memory_mib=9),
    ),
)
GANG = Assignment(job_id="gang", attempt=2, workers=(("a1", 4), ("a2", 4), ("a1", 1)))
SHARE = Assignment(job_id="share", attempt=0, workers=(("a1", 1), ("a2", 1)))
SHY = Assignment(job_id="shy", attempt=0, workers=(("a2", 1),))


def solution(*assignments: Assignment, **more: object) -> Solution:
    return Solution(window=9, status=SolveStatus.GREEDY, assignments=assignments, **more)  # type: ignore[arg-type]


def test_a_good_solution_has_no_violations() -> None:
    assert check(PROBLEM, solution(GANG, SHARE, SHY)) == []
    assert check(PROBLEM, solution()) == []


def swap(assignment: Assignment, *workers: tuple[str, int], **more: object) -> Assignment:
    return msgspec.structs.replace(assignment, **({"workers": workers} if workers else {}), **more)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (solution(swap(GANG, ("a1", 4), ("a2", 4))), "workers of [4, 4] GPUs, asked for [4, 4, 1]"),
        (solution(swap(GANG, ("a1", 4), ("a2", 3), ("a2", 1))), "workers of [4, 3, 1]"),
        (solution(swap(GANG, attempt=1)), "attempt 1, asked for 2"),
        (solution(SHY, SHY), "job shy is placed 2 times"),
        (solution(SHY, unplaced={"shy": "x"}), "both placed and explained"),
        (solution(swap(SHY, job_id="nobody")), "job nobody is not a candidate"),
        (solution(swap(SHY, ("zz", 1))), "no node zz"),
        (solution(swap(SHY, ("a1", 1))), "node a1 is to be avoided"),
        (solution(swap(GANG, ("a1", 4), ("b1", 4), ("a2", 1))), "node b1 has A100-80GB, asked for A100"),
        (solution(swap(GANG, ("a1", 4), ("a1", 4), ("a2", 1))), "node a1: 8 GPUs of 5"),
        (solution(swap(SHARE, ("b1", 1), ("b1", 1))), "node b1: 10 MiB of 9"),
        (solution(GANG, swap(SHARE, ("a1", 1), ("a1", 1))), "node a1: shares [600, 600] do not fit beside 5"),
        (msgspec.structs.replace(solution(), window=8), "solution of window 8 for window 9"),
    ],
)
def test_each_kind_of_fault_is_found(broken: Solution, says: str) -> None:
    assert any(says in violation for violation in check(PROBLEM, broken)), check(PROBLEM, broken)


def test_cpu_is_summed_over_jobs() -> None:
    tight = msgspec.structs.replace(PROBLEM.classes[0], free_cpu_milli=19)
    p = msgspec.structs.replace(PROBLEM, classes=(tight, PROBLEM.classes[1]))
    assert check(p, solution(GANG)) == ["node a1: 20 milli-cores of 19"]


def test_shares_are_packed_exactly_not_greedily() -> None:
    """Best fit decreasing fails here; a packing exists."""
    assert shares_fit([500, 300, 300, 200, 200, 500], [1000, 1000])
    assert shares_fit([400, 400, 300, 300, 300, 300], [1000, 1000])
    assert not shares_fit([600, 600, 600], [1000, 1000])
    assert not shares_fit([8138], [4069, 4069])
    assert shares_fit([], [])
