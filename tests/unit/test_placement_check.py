"""The check finds each kind of broken solution and accepts good ones."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Solution, SolveStatus
from streamsched.placement import check
from streamsched.placement.check import sift

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
        (solution(SHY, SHY), "job shy is placed more than once"),
        (solution(SHY, unplaced={"shy": "x"}), "both placed and explained"),
        (solution(swap(SHY, job_id="nobody")), "job nobody is not a candidate"),
        (solution(swap(SHY, ("zz", 1))), "no node zz"),
        (solution(swap(SHY, ("a1", 1))), "node a1 is to be avoided"),
        (solution(swap(GANG, ("a1", 4), ("b1", 4), ("a2", 1))), "node b1 has A100-80GB, asked for A100"),
        (solution(swap(GANG, ("a1", 4), ("a1", 4), ("a2", 1))), "node a1: 8 GPUs of 5"),
        (solution(swap(SHARE, ("b1", 1), ("b1", 1))), "node b1: 10 MiB of 9"),
        (solution(GANG, swap(SHARE, ("a1", 1), ("a1", 1))), "job share: node a1 has no device with 600"),
        (msgspec.structs.replace(solution(), window=8), "solution of window 8 for window 9"),
    ],
)
def test_each_kind_of_fault_is_found(broken: Solution, says: str) -> None:
    assert any(says in violation for violation in check(PROBLEM, broken)), check(PROBLEM, broken)


def test_cpu_is_summed_over_jobs() -> None:
    tight = msgspec.structs.replace(PROBLEM.classes[0], free_cpu_milli=19)
    p = msgspec.structs.replace(PROBLEM, classes=(tight, PROBLEM.classes[1]))
    assert check(p, solution(GANG)) == ["job gang: node a1: 20 milli-cores of 19"]


def one_node(jobs: list[int], *, free: int, workers: int = 1) -> tuple[Problem, list[Assignment]]:
    """Jobs of so many thousandths on node n, in this order."""
    candidates = [
        Candidate(job_id=f"j{i}", attempt=0, chunks=((1, workers),), value=1.0, gpu_milli=milli)
        for i, milli in enumerate(jobs)
    ]
    node = NodeClass(gpu_type="T4", free_gpus=free, node_ids=("n",))
    problem = Problem(pool="p", window=9, now=0.0, policy="t", candidates=tuple(candidates), classes=(node,))
    return problem, [Assignment(job_id=c.job_id, attempt=0, workers=(("n", 1),) * workers) for c in candidates]


def test_shares_are_replayed_in_order_on_the_fullest_device() -> None:
    good = one_node([500, 500, 300, 300, 200, 200], free=2)
    assert check(good[0], solution(*good[1])) == []
    # A packing exists, but carried out in this order the last share finds no device.
    bad, assignments = one_node([400, 400, 600, 600], free=2)
    assert len(check(bad, solution(*assignments))) == 1


def test_a_job_of_very_many_shares_is_checked() -> None:
    problem, assignments = one_node([1], free=8, workers=8000)
    assert check(problem, solution(*assignments)) == []
    problem, assignments = one_node([1], free=8, workers=8001)
    assert len(check(problem, solution(*assignments))) == 1


def test_shares_that_fill_a_node_exactly_are_checked_without_search() -> None:
    r = random.Random(4)
    sizes: list[int] = []
    for _ in range(8):
        cuts = sorted(r.sample(range(1, 1000), 3))
        sizes += [b - a for a, b in pairwise([0, *cuts, 1000])]
    problem, assignments = one_node(sizes, free=8)
    assert check(problem, solution(*assignments)) == []
    r.shuffle(sizes)
    problem, assignments = one_node(sizes, free=8)
    kept, _ = sift(problem, assignments)
    assert check(problem, solution(*kept)) == []


def test_sift_keeps_the_others() -> None:
    """What is refused takes nothing: the job after it has its room."""
    too_much = swap(GANG, ("a1", 4), ("a1", 4), ("a2", 1))
    kept, violations = sift(PROBLEM, (too_much, SHARE, SHY))
    assert kept == (SHARE, SHY)
    assert violations == ["job gang: node a1: 8 GPUs of 5"]
