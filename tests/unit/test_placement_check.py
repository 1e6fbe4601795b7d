"""The check finds each kind of broken solution and accepts good ones."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from streamsched.core.model import TopologyLevel, TopologyWish
from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Solution, SolveStatus, Victim
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


# ── types, domains, names, parts of devices ──────────────────────────────────────────────────────────────────────────


def one_job(*classes: NodeClass, on: tuple[str, ...], victims: tuple[Victim, ...] = (), **more: object) -> list[str]:
    """Violations when one job has a worker of one GPU on each of these nodes."""
    after = more.pop("after", ())
    job = Candidate(job_id="j", attempt=0, chunks=((1, len(on)),), value=1.0, **more)  # type: ignore[arg-type]
    problem = Problem(pool="p", window=9, now=0.0, policy="t", candidates=(job,), classes=classes, victims=victims)
    workers = tuple((node_id, 1) for node_id in on)
    return check(problem, solution(Assignment(job_id="j", attempt=0, workers=workers, after=after)))  # type: ignore[arg-type]


A = NodeClass(gpu_type="A", free_gpus=2, node_ids=("a",), rack="r1", nvlink="v", gpu_memory_mib=1000)
A2 = NodeClass(gpu_type="A", free_gpus=2, node_ids=("a2",), rack="r2", nvlink="v")
B = NodeClass(gpu_type="B", free_gpus=2, node_ids=("b",), rack="r1", affinity_taken=("x",), mig="A30")


def within(level: TopologyLevel, *, required: bool = True) -> TopologyWish:
    return TopologyWish(level=level, required=required)


@pytest.mark.parametrize(
    ("on", "more", "says"),
    [
        (("a", "b"), {"one_type": True}, "workers on A and B, asked for one type"),
        (("a", "a2"), {"one_type": True}, ""),
        (("a", "a2"), {"topology": within(TopologyLevel.RACK)}, "workers in ['r1', 'r2'], has to be within one rack"),
        (("a", "b"), {"topology": within(TopologyLevel.RACK)}, ""),
        (("a", "a2"), {"topology": within(TopologyLevel.RACK, required=False)}, ""),
        (("a", "b"), {"topology": within(TopologyLevel.NVLINK)}, "workers in ['', 'v'], has to be within one nvlink"),
        (("b",), {"topology": within(TopologyLevel.NVLINK)}, "workers in [''], has to be within one nvlink"),
        (("a", "a2"), {"topology": within(TopologyLevel.NODE)}, "has to be within one node"),
        (("a", "a"), {"topology": within(TopologyLevel.NODE)}, ""),
        (("a", "a"), {"anti_affinity": "x"}, "several workers named x on node a"),
        (("b",), {"anti_affinity": "x"}, "node b has a worker named x already"),
        (("b",), {"anti_affinity": "y"}, ""),
        (("a2",), {"gpu_memory_mib": 1}, "node a2 declares no device memory"),
        (("a",), {"gpu_memory_mib": 1001}, "node a has no device with 1001 thousandths"),
        (("a",) * 3, {"gpu_memory_mib": 501}, "node a has no device with 501 thousandths"),
        (("a",) * 4, {"gpu_memory_mib": 500, "gpu_milli": 300}, ""),
        (("a",) * 3, {"gpu_memory_mib": 500, "gpu_milli": 600}, "node a has no device with 600 thousandths"),
        (("b",), {"gpu_milli": 100}, "node b is under MIG and gives no shares"),
        (("a",), {"mig_profile": "1g.6gb"}, "node a has no MIG profile 1g.6gb"),
        (("b",) * 8, {"mig_profile": "1g.6gb"}, ""),
        (("b",) * 9, {"mig_profile": "1g.6gb"}, "node b has no device with a free instance 1g.6gb"),
    ],
)
def test_types_domains_names_and_parts_of_devices(on: tuple[str, ...], more: dict[str, object], says: str) -> None:
    found = one_job(A, A2, B, on=on, **more)
    assert found == [] if not says else any(says in violation for violation in found), found


def test_names_are_kept_apart_between_jobs() -> None:
    jobs = tuple(Candidate(job_id=j, attempt=0, chunks=((1, 1),), value=1.0, anti_affinity="x") for j in "jk")
    p = Problem(pool="p", window=9, now=0.0, policy="t", candidates=jobs, classes=(A,))
    both = [Assignment(job_id=j, attempt=0, workers=(("a", 1),)) for j in "jk"]
    assert check(p, solution(*both)) == ["job k: node a has a worker named x already"]


# ── evictions ────────────────────────────────────────────────────────────────────────────────────────────────────────

FULL = NodeClass(gpu_type="A", free_gpus=1, node_ids=("a",), free_cpu_milli=0)


def run(placement_id: str, *held: tuple[str, int, int, int], level: int = 0, **more: object) -> Victim:
    return Victim(placement_id=placement_id, job_id="v", level=level, cost=1.0, held=held, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("on", "more", "says"),
    [
        (("a",) * 3, {"after": ("u",)}, ""),
        (("a",) * 3, {}, "node a: 3 GPUs of 1"),
        (("a",) * 4, {"after": ("u",)}, "node a: 4 GPUs of 3"),
        (("a",) * 4, {"after": ("u", "w")}, ""),
        (("a",) * 3, {"after": ("u", "w")}, "is evicted without need"),
        (("a",), {"after": ("w",)}, "run w is evicted without need"),
        (("a",), {"after": ("w",), "cpu_milli": 5}, ""),
        (("a",), {"after": ("w",), "cpu_milli": 6}, "node a: 6 milli-cores of 5"),
        (("a",) * 3, {"after": ("u", "u")}, "waits for u 2 times"),
        (("a",) * 3, {"after": ("u", "nobody")}, "waits for nobody, which is no victim"),
        (("a",) * 3, {"after": ("u", "far")}, "waits for far, which is on none of its nodes"),
        (("a",) * 3, {"after": ("u",), "level": 0}, "of level 0, waits for u of level 0"),
        (("a",) * 3, {"after": ("u",), "gpu_milli": 900}, "nobody makes room for shares"),
    ],
)
def test_each_kind_of_fault_of_an_eviction_is_found(on: tuple[str, ...], more: dict[str, object], says: str) -> None:
    victims = (run("u", ("a", 2, 0, 0)), run("w", ("a", 1, 5, 0)), run("far", ("b", 1, 0, 0)))
    found = one_job(FULL, B, on=on, victims=victims, **{"level": 1, **more})
    assert found == [] if not says else any(says in violation for violation in found), found


@pytest.mark.parametrize(
    ("levels", "afters", "fits"),
    [
        ((1, 2), (("low",), ("mid",)), True),
        ((1, 2), (("low",), ("low", "mid")), True),
        ((2, 2), (("mid",), ("mid",)), False),  # 4 of 2 + 1
        ((2, 2), (("low", "mid"), ("low", "mid")), True),
        ((2, 2), (("low",), ()), False),  # the second has only the free one
    ],
)
def test_what_is_freed_is_shared_out_exactly(
    levels: tuple[int, int], afters: tuple[tuple[str, ...], ...], fits: bool
) -> None:
    """1 GPU is free, `low` and `mid` of level 0 and 1 hold 2 each; two jobs of 2 GPUs."""
    jobs = tuple(
        Candidate(job_id=f"j{i}", attempt=0, chunks=((2, 1),), value=1.0, level=level) for i, level in enumerate(levels)
    )
    victims = (run("low", ("a", 2, 0, 0)), run("mid", ("a", 2, 0, 0), level=1))
    p = Problem(pool="p", window=9, now=0.0, policy="t", candidates=jobs, classes=(FULL,), victims=victims)
    found = check(
        p,
        solution(
            *(Assignment(job_id=f"j{i}", attempt=0, workers=(("a", 2),), after=after) for i, after in enumerate(afters))
        ),
    )
    assert (found == []) == fits, found


def test_a_name_is_free_once_all_who_keep_it_there_are_gone() -> None:
    keeper = run("k", ("b", 1, 0, 0), anti_affinity="x")
    assert one_job(B, on=("b",), victims=(keeper,), level=1, anti_affinity="x", after=("k",)) == []
    assert "has a worker named x already" in one_job(B, on=("b",), victims=(keeper,), level=1, anti_affinity="x")[0]
    other = run("o", ("b", 1, 0, 0))
    found = one_job(B, on=("b",), victims=(other,), level=1, anti_affinity="x", after=("o",))
    assert "has a worker named x already" in found[0]
