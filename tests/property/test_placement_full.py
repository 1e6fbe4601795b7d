"""The full placement model against brute force (tiny windows) and a plain model per node (mid-size ones)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import reduce

import msgspec
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from placement_references import best_objective, mix_of, nodes_of, plain_optimum, value_of, worth

from streamsched.core.model import TopologyLevel, TopologyWish
from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Solution, SolveStatus, Victim
from streamsched.placement import SolveLimits, check, greedy, solve
from streamsched.placement.objective import objective
from streamsched.placement.reasons import never_fits

EXACT = SolveLimits(time_s=None, gap=0.0)
TYPES = ("A", "B")
LEVELS = tuple(TopologyLevel)


@st.composite
def nodes(draw: st.DrawFn, *, shares: bool = False) -> list[NodeClass]:
    """One to four nodes in up to three classes."""
    classes: list[NodeClass] = []
    first = 0
    for _ in range(draw(st.integers(1, 3))):
        count = min(draw(st.integers(1, 2)), 4 - first)
        if not count:
            break
        under_mig = shares and draw(st.booleans())
        classes.append(
            NodeClass(
                gpu_type=draw(st.sampled_from(TYPES)),
                free_gpus=draw(st.integers(0, 4)),
                node_ids=tuple(f"n{first + i}" for i in range(count)),
                free_cpu_milli=draw(st.sampled_from([-1, -1, 3000, 5000])),
                free_memory_mib=draw(st.sampled_from([-1, -1, 40])),
                nvlink=draw(st.sampled_from(["", "v1", "v2"])),
                rack=draw(st.sampled_from(["", "r1", "r2"])),
                zone=draw(st.sampled_from(["", "z1"])),
                affinity_taken=draw(st.sampled_from([(), (), ("x",)])),
                gpu_memory_mib=draw(st.sampled_from([0, 80, 100])) if shares else 0,
                shares=tuple(sorted(draw(st.lists(st.sampled_from([200, 500, 750]), max_size=2))))
                if shares and not under_mig
                else (),
                mig="A30" if under_mig else "",
                instances=draw(st.sampled_from([(), (("1g.6gb", 2),), (("2g.12gb", 1),)])) if under_mig else (),
            )
        )
        first += count
    return classes


@st.composite
def jobs(draw: st.DrawFn, *, shares: bool = False) -> list[Candidate]:
    found = []
    for j in range(draw(st.integers(1, 5))):
        part = shares and draw(st.booleans())
        chunks = [(1 if part else draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3])))]
        if not part and chunks[0][0] > 1 and draw(st.integers(0, 3)) == 0:
            chunks = [(chunks[0][0], 1), (draw(st.integers(1, chunks[0][0] - 1)), 1)]
        kind = draw(st.sampled_from(["milli", "memory", "both", "mig"])) if part else ""
        wish = draw(st.sampled_from([None, None, None, True, False, False]))
        found.append(
            Candidate(
                job_id=f"j{j}",
                attempt=j,
                chunks=tuple(chunks),
                value=float(draw(st.integers(1, 12))),
                gpu_types=draw(st.sampled_from([(), (), (), (), ("A",), ("B", "C")])),
                one_type=draw(st.booleans()),
                speeds=draw(st.sampled_from([(), (("A", 2.0),), (("A", 0.5), ("B", 1.5)), (("B", 1.0), ("C", 9.0))])),
                gpu_milli=draw(st.sampled_from([200, 300, 500, 800])) if kind in ("milli", "both") else 1000,
                gpu_memory_mib=draw(st.sampled_from([20, 40, 90])) if kind in ("memory", "both") else 0,
                mig_profile=draw(st.sampled_from(["1g.6gb", "2g.12gb"])) if kind == "mig" else "",
                cpu_milli=draw(st.sampled_from([0, 1000, 1500, 2500])),
                memory_mib=draw(st.sampled_from([0, 10, 15, 25])),
                topology=None if wish is None else TopologyWish(level=draw(st.sampled_from(LEVELS)), required=wish),
                anti_affinity=draw(st.sampled_from(["", "", "x", "y"])),
                avoid_nodes=draw(st.sampled_from([(), (), ("n0",), ("gone",)])),
                level=draw(st.integers(0, 2)),
            )
        )
    return found


@st.composite
def problems(draw: st.DrawFn, *, shares: bool = False) -> Problem:
    """At most 4 nodes, 5 jobs and 3 victims, with every feature."""
    classes = draw(nodes(shares=shares))
    on = [n for c in classes for n in c.node_ids]
    named = {n for c in classes for n in c.node_ids if c.affinity_taken}
    victims = []
    for v in range(draw(st.integers(0, 3))):
        held_on = draw(st.lists(st.sampled_from(on), min_size=1, max_size=2, unique=True))
        name = "x" if named.intersection(held_on) and draw(st.booleans()) else ""
        named -= set(held_on) if name else set()
        victims.append(
            Victim(
                placement_id=f"p{v}",
                job_id=f"v{v}",
                level=draw(st.integers(-1, 1)),
                cost=draw(st.sampled_from([0.5, 1.0, 3.0])),
                held=tuple((n, draw(st.integers(1, 2)), 1000, 10) for n in held_on),
                anti_affinity=name,
            )
        )
    candidates = tuple(draw(jobs(shares=shares)))
    return Problem(
        pool="p",
        window=1,
        now=0.0,
        policy="t",
        candidates=candidates,
        classes=tuple(classes),
        victims=tuple(victims),
        mix=mix_of(candidates) if shares and draw(st.booleans()) else (),
    )


def answer(p: Problem, assignments: tuple[Assignment, ...]) -> Solution:
    return Solution(window=p.window, status=SolveStatus.GREEDY, assignments=assignments)


# ── tiny windows ─────────────────────────────────────────────────────────────────────────────────────────────────────


@given(p=problems())
@settings(max_examples=150)
def test_the_optimum_of_brute_force_is_found_with_every_feature(p: Problem) -> None:
    solution = solve(p, EXACT)
    assert check(p, solution) == []
    assert solution.objective == pytest.approx(value_of(p, solution.assignments), abs=1e-6)
    assert solution.objective == pytest.approx(best_objective(p), abs=1e-6)
    assert solution.note == ""


@given(p=problems())
@settings(max_examples=150)
def test_greedy_is_allowed_and_worth_what_it_says_and_no_more_than_the_best(p: Problem) -> None:
    assignments = greedy(p)
    assert check(p, answer(p, assignments)) == []
    assert objective(p, assignments) == pytest.approx(value_of(p, assignments), abs=1e-9)
    assert objective(p, assignments) <= best_objective(p) + 1e-6


@given(p=problems(shares=True))
@settings(max_examples=150)
def test_with_shares_and_instances_answers_are_allowed_and_never_below_greedy(p: Problem) -> None:
    assignments = greedy(p)
    assert check(p, answer(p, assignments)) == []
    solution = solve(p, EXACT)
    assert check(p, solution) == []
    assert solution.note == ""
    assert solution.objective == pytest.approx(objective(p, solution.assignments), abs=1e-6)
    assert solution.objective >= objective(p, assignments) - 1e-9
    assert {a.job_id for a in solution.assignments} | set(solution.unplaced) == {c.job_id for c in p.candidates}


@given(p=problems(shares=True))
@settings(max_examples=100)
def test_what_can_never_fit_is_not_placed_by_greedy(p: Problem) -> None:
    """Nobody is told that it can never fit who does."""
    placed = {a.job_id for a in greedy(p)}
    for candidate in p.candidates:
        if never_fits(p, candidate) is not None:
            assert candidate.job_id not in placed


@given(p=problems(shares=True))
@settings(max_examples=60)
def test_the_order_of_classes_and_victims_changes_nothing(p: Problem) -> None:
    other = msgspec.structs.replace(p, classes=p.classes[::-1], victims=p.victims[::-1])
    assert greedy(other) == greedy(p)


# ── mid-size windows ─────────────────────────────────────────────────────────────────────────────────────────────────


def mid_size(seed: int) -> Problem:
    """Up to 40 nodes, 20 jobs and 8 victims, where not everything fits."""
    r = random.Random(seed)
    classes = []
    for i in range(r.randint(8, 13)):
        classes.append(
            NodeClass(
                gpu_type=r.choice(("A", "B", "C")),
                free_gpus=r.choice([0, 2, 4, 5, 8]),
                node_ids=tuple(f"n{i:02}-{k}" for k in range(r.randint(1, 3))),
                free_cpu_milli=r.choice([-1, -1, 8000, 20000]),
                nvlink=r.choice(["", "v1", "v2", "v3"]),
                rack=f"r{i % 4}",
                zone=f"z{i % 2}",
                affinity_taken=r.choice([(), (), ("x",)]),
            )
        )
    on = [(n, c) for c in classes for n in c.node_ids]
    victims = []
    for v, (n, c) in enumerate(r.sample(on, 8)):
        victims.append(
            Victim(
                placement_id=f"p{v}",
                job_id=f"v{v}",
                level=r.choice([0, 1]),
                cost=r.uniform(0.5, 4.0),
                held=((n, r.choice([2, 4, 8]), 4000, 0),),
                anti_affinity="x" if c.affinity_taken else "",
            )
        )
    candidates = []
    for j in range(r.randint(12, 20)):
        gpus = r.choice([1, 2, 4, 4, 8])
        wish = r.choice([None, None, True, False])
        candidates.append(
            Candidate(
                job_id=f"j{j:02}",
                attempt=0,
                chunks=((gpus, r.choice([1, 1, 2, 3])),),
                value=gpus * r.uniform(1.0, 2.0),
                gpu_types=r.choice([(), (), ("A", "B"), ("C",)]),
                one_type=r.random() < 0.7,
                speeds=r.choice([(), (("A", 1.0), ("B", 0.7), ("C", 0.4))]),
                cpu_milli=r.choice([0, 1000, 3000]),
                topology=None if wish is None else TopologyWish(level=r.choice(LEVELS), required=wish),
                anti_affinity=r.choice(["", "", "x"]),
                level=r.choice([0, 1, 2]),
            )
        )
    return Problem(
        pool="p",
        window=1,
        now=0.0,
        policy="t",
        candidates=tuple(candidates),
        classes=tuple(classes),
        victims=tuple(victims),
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_plain_model_per_node_agrees(seed: int) -> None:
    p = mid_size(seed)
    solution = solve(p, EXACT)
    assert check(p, solution) == []
    assert solution.note == ""
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.objective == pytest.approx(plain_optimum(p), rel=1e-5)
    assert solution.objective >= objective(p, greedy(p)) - 1e-9


@given(p=problems())
@settings(max_examples=25)
def test_the_plain_model_per_node_agrees_with_brute_force(p: Problem) -> None:
    """Two references that share little: what they agree on is what the contract says."""
    assert plain_optimum(p) == pytest.approx(best_objective(p), abs=1e-5)


# ── the check against broken answers ─────────────────────────────────────────────────────────────────────────────────

Mutate = Callable[[Problem], Problem]


def _candidates(p: Problem, **changes: object) -> Problem:
    changed = tuple(msgspec.structs.replace(c, **changes) for c in p.candidates)
    return msgspec.structs.replace(p, candidates=changed)


def _classes(p: Problem, **changes: object) -> Problem:
    return msgspec.structs.replace(p, classes=tuple(msgspec.structs.replace(c, **changes) for c in p.classes))


FAMILIES: dict[str, Mutate] = {
    "gpus": lambda p: _classes(p, free_gpus=9),
    "cpu": lambda p: _candidates(p, cpu_milli=0),
    "memory": lambda p: _candidates(p, memory_mib=0),
    "types": lambda p: _candidates(p, gpu_types=()),
    "one type": lambda p: _candidates(p, one_type=False),
    "topology": lambda p: _candidates(p, topology=None),
    "anti-affinity": lambda p: _candidates(p, anti_affinity=""),
    "names taken": lambda p: _classes(p, affinity_taken=()),
    "avoided nodes": lambda p: _candidates(p, avoid_nodes=()),
    "levels": lambda p: _candidates(p, level=9),
    "memory of devices": lambda p: _classes(p, gpu_memory_mib=10_000),
    "thousandths": lambda p: msgspec.structs.replace(
        p,
        candidates=tuple(msgspec.structs.replace(c, gpu_milli=1) if c.gpu_milli < 1000 else c for c in p.candidates),
    ),
    "instances": lambda p: _classes(p, instances=(("1g.6gb", 9), ("2g.12gb", 9))),
}
"""A constraint family -> the problem without it."""
HIDING = ("cpu", "memory", "types", "one type", "topology", "anti-affinity", "names taken", "avoided nodes")
NEEDS = {"names taken": "anti-affinity"}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_to_the_problem_without_one_constraint_family_is_refused(family: str) -> None:
    """There are problems whose answer is refused only because of this family.

    They have nothing of the other ones that is easily taken out: else they would hide it.
    """
    shares = family in ("memory of devices", "thousandths", "instances")
    others = [FAMILIES[name] for name in HIDING if name not in (family, NEEDS.get(family))]

    def is_refused(p: Problem) -> bool:
        p = reduce(lambda left, without: without(left), others, p)
        relaxed = FAMILIES[family](p)
        assignments = greedy(relaxed)
        return check(relaxed, answer(relaxed, assignments)) == [] and check(p, answer(p, assignments)) != []

    find(
        problems(shares=shares),
        is_refused,
        settings=settings(max_examples=3000, database=None, phases=[Phase.generate]),
    )


@given(p=problems())
@settings(max_examples=100)
def test_whatever_the_reference_forbids_is_refused(p: Problem) -> None:
    """Types, one type, avoided nodes, anti-affinity within a gang and required topology: never let through."""
    relaxed = _candidates(p, gpu_types=(), one_type=False, topology=None, anti_affinity="", avoid_nodes=())
    nodes_by_id, by_id = nodes_of(p), {c.job_id: c for c in p.candidates}
    for assignment in greedy(relaxed):
        where = [(n, nodes_by_id[n]) for n, _ in assignment.workers]
        if worth(p, by_id[assignment.job_id], where) is None:
            assert check(p, answer(p, (assignment,))) != []


@given(p=problems())
@settings(max_examples=100)
def test_without_the_evictions_it_waits_for_an_assignment_is_refused(p: Problem) -> None:
    assignments = greedy(p)
    for name in {name for a in assignments for name in a.after}:
        less = tuple(msgspec.structs.replace(a, after=tuple(v for v in a.after if v != name)) for a in assignments)
        assert check(p, answer(p, less)) != []
