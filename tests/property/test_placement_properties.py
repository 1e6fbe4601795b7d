"""Placement against brute force, and what must hold of every solution."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_references import mix_of

from streamsched.core.problem import Candidate, NodeClass, Problem, Solution, SolveStatus
from streamsched.placement import SolveLimits, check, greedy, solve
from streamsched.placement.greedy import fill
from streamsched.placement.plain import fill_plain, is_plain
from streamsched.placement.stock import Stock

EXACT = SolveLimits(time_s=None, gap=0.0)
TYPES = ("A100", "A100-80GB", "A10")


def problem(candidates: list[Candidate], classes: list[NodeClass]) -> Problem:
    return Problem(pool="p", window=1, now=0.0, policy="t", candidates=tuple(candidates), classes=tuple(classes))


@st.composite
def problems(draw: st.DrawFn, *, shares: bool = False) -> Problem:
    """At most 4 nodes and 4 jobs; cpu and memory bind in some classes, some nodes are to be avoided."""
    classes, node = [], 0
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 2))
        if node + count > 4:
            break
        classes.append(
            NodeClass(
                gpu_type=draw(st.sampled_from(TYPES)),
                free_gpus=draw(st.integers(0 if shares else 1, 4)),
                node_ids=tuple(f"n{node + i}" for i in range(count)),
                shares=tuple(sorted(draw(st.lists(st.sampled_from([200, 500, 700]), max_size=2)))) if shares else (),
                free_cpu_milli=draw(st.sampled_from([-1, 3000, 5000, 16000])),
                free_memory_mib=draw(st.sampled_from([-1, -1, 40])),
            )
        )
        node += count
    candidates = []
    for j in range(draw(st.integers(1, 4))):
        share = shares and draw(st.booleans())
        chunks = [(1 if share else draw(st.integers(1, 4)), draw(st.integers(1, 3)))]
        if not share and chunks[0][0] > 1 and draw(st.booleans()):
            chunks = [(chunks[0][0], 1), (draw(st.integers(1, chunks[0][0] - 1)), 1)]
        candidates.append(
            Candidate(
                job_id=f"j{j}",
                attempt=j,
                chunks=tuple(chunks),
                value=float(draw(st.integers(1, 12))),
                gpu_milli=draw(st.sampled_from([200, 300, 500, 800])) if share else 1000,
                gpu_types=tuple(draw(st.lists(st.sampled_from(TYPES), max_size=2, unique=True))),
                cpu_milli=draw(st.sampled_from([0, 1000, 1500, 2500])),
                memory_mib=draw(st.sampled_from([0, 10, 25])),
                avoid_nodes=tuple(draw(st.lists(st.sampled_from(["n0", "n2", "gone"]), max_size=1))),
            )
        )
    mix = mix_of(candidates) if shares and draw(st.booleans()) else ()
    return msgspec.structs.replace(problem(candidates, classes), mix=mix)


class Node:
    """A node of the brute force: numbers and nothing else."""

    def __init__(self, node_id: str, c: NodeClass) -> None:
        self.id, self.type = node_id, c.gpu_type
        self.room = [
            c.free_gpus,
            10**9 if c.free_cpu_milli == -1 else c.free_cpu_milli,
            10**9 if c.free_memory_mib == -1 else c.free_memory_mib,
        ]
        self.start = c.free_gpus

    def stranded(self) -> int:
        return self.room[0] if self.room[0] < self.start else 0


def best_objective(p: Problem) -> float:
    """The optimum over every way to seat every subset of the jobs (whole GPUs)."""
    nodes = [Node(n, c) for c in p.classes for n in c.node_ids]
    most = sum(n for c in p.candidates for _, n in c.chunks) * (max(c.free_gpus for c in p.classes) - 1)
    weight = min(c.value for c in p.candidates) / (2 * max(1, most))

    def search(jobs: tuple[Candidate, ...], value: float) -> float:
        if not jobs:
            return value - weight * sum(n.stranded() for n in nodes)
        job, rest = jobs[0], jobs[1:]
        best = search(rest, value)
        choices = [itertools.combinations_with_replacement(range(len(nodes)), count) for _, count in job.chunks]
        for seats in itertools.product(*choices):
            taken = []
            for (gpus, _), where in zip(job.chunks, seats, strict=True):
                for i in where:
                    need = (gpus, job.cpu_milli, job.memory_mib)
                    nodes[i].room = [a - b for a, b in zip(nodes[i].room, need, strict=True)]
                    taken.append((i, need))
            if all(
                min(nodes[i].room) >= 0
                and nodes[i].id not in job.avoid_nodes
                and (not job.gpu_types or nodes[i].type in job.gpu_types)
                for i, _ in taken
            ):
                best = max(best, search(rest, value + job.value))
            for i, need in taken:
                nodes[i].room = [a + b for a, b in zip(nodes[i].room, need, strict=True)]
        return best

    return search(p.candidates, 0.0)


@pytest.mark.parametrize("patterns_max", [300, 0], ids=["patterns", "single nodes"])
@given(p=problems())
@settings(max_examples=60, deadline=None)
def test_the_optimum_of_brute_force_is_found_and_proved(p: Problem, patterns_max: int) -> None:
    solution = solve(p, msgspec.structs.replace(EXACT, patterns_max=patterns_max))
    assert solution.objective == pytest.approx(best_objective(p), abs=1e-6)
    assert solution.status in (SolveStatus.OPTIMAL, SolveStatus.EMPTY)
    assert (solution.status is SolveStatus.EMPTY) == (not solution.assignments)
    assert solution.note == ""


@given(p=problems(shares=True))
@settings(max_examples=150, deadline=None)
def test_every_answer_passes_the_check_explains_the_rest_and_is_never_below_greedy(p: Problem) -> None:
    first = []
    solution = solve(p, EXACT, first.append)
    assert check(p, solution) == []
    assert solution.note == ""
    assert {a.job_id for a in solution.assignments} | set(solution.unplaced) == {c.job_id for c in p.candidates}
    assert all(why.split(":")[0].isalpha() for why in solution.unplaced.values())
    assert solution.bound is None or solution.bound >= solution.objective
    for by_greedy in first:
        assert check(p, by_greedy) == []
        assert solution.objective >= by_greedy.objective


@given(p=problems(shares=True), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_order_of_the_classes_changes_nothing(p: Problem, seed: int) -> None:
    classes = list(p.classes)
    random.Random(seed).shuffle(classes)
    other = msgspec.structs.replace(p, classes=tuple(classes))
    assert greedy(other) == greedy(p)
    assert timeless(other) == timeless(p)


def timeless(p: Problem) -> bytes:
    return msgspec.json.encode(solve(p, SolveLimits(time_s=None), clock=lambda: 0.0))


def scarce(seed: int) -> Problem:
    r = random.Random(seed)
    classes = [
        NodeClass(
            gpu_type=r.choice(TYPES),
            free_gpus=r.randint(1, 8),
            node_ids=tuple(f"n{i}-{k}" for k in range(3)),
            free_cpu_milli=r.choice([-1, 8000, 30000]),
        )
        for i in range(8)
    ]
    jobs = [
        Candidate(
            job_id=f"j{i}",
            attempt=0,
            chunks=((r.choice([1, 2, 4, 8]), r.choice([1, 1, 2, 4])),),
            value=r.uniform(1, 20),
            gpu_types=tuple(r.sample(TYPES, r.randint(0, 2))),
            cpu_milli=r.choice([0, 2000, 5000]),
        )
        for i in range(32)
    ]
    return problem(jobs, classes)


def test_equal_problems_have_equal_solutions_in_another_process() -> None:
    here = [timeless(scarce(seed)) for seed in range(3)]
    code = (
        "import sys; from test_placement_properties import scarce, timeless\n"
        "for seed in range(3): sys.stdout.buffer.write(timeless(scarce(seed)) + b'\\n')"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert done.stdout.splitlines() == here


@st.composite
def plain_problems(draw: st.DrawFn) -> Problem:
    """Whole devices of one type and nothing else."""
    classes, node = [], 0
    for _ in range(draw(st.integers(0, 4))):
        ids = tuple(f"n{node + i}" for i in range(draw(st.integers(1, 3))))
        node += len(ids)
        classes.append(NodeClass(gpu_type="A10", free_gpus=draw(st.integers(0, 8)), node_ids=ids))
    candidates = []
    for j in range(draw(st.integers(0, 8))):
        gpus = draw(st.integers(1, 8))
        chunks = [(gpus, draw(st.integers(1, 3)))]
        if gpus > 1 and draw(st.booleans()):
            chunks.append((draw(st.integers(1, gpus - 1)), 1))
        candidates.append(
            Candidate(job_id=f"j{j}", attempt=j, chunks=tuple(chunks), value=1.0, one_type=draw(st.booleans()))
        )
    made = problem(candidates, classes)
    return msgspec.structs.replace(made, in_order=draw(st.booleans()))


@given(asked=plain_problems())
@settings(max_examples=500)
def test_the_short_way_for_plain_problems_gives_what_the_stock_gives(asked: Problem) -> None:
    assert is_plain(asked)
    found = fill_plain(asked, asked.candidates)
    assert found == fill(Stock(asked), asked.candidates, in_order=asked.in_order)
    assert found == greedy(asked)
    status = SolveStatus.GREEDY if found else SolveStatus.EMPTY
    assert check(asked, Solution(window=asked.window, status=status, policy="t", assignments=found)) == []


@given(asked=problems())
def test_what_asks_for_more_is_not_plain(asked: Problem) -> None:
    wants = any(c.gpu_types or c.cpu_milli or c.memory_mib or c.topology for c in asked.candidates)
    if wants or len({c.gpu_type for c in asked.classes}) > 1:
        assert not is_plain(asked)
