"""Placement by types and speeds, topology, anti-affinity, memory, MIG and evictions: golden and field cases."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from streamsched.core.model import TopologyLevel, TopologyWish
from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Solution, SolveStatus, Victim
from streamsched.placement import SolveLimits, check, greedy, making_room, solve
from streamsched.placement.objective import objective
from streamsched.placement.stock import Place, Stock

EXACT = SolveLimits(time_s=None, gap=0.0)


def job(job_id: str, gpus: int = 1, workers: int = 1, value: float = 1.0, **more: object) -> Candidate:
    return Candidate(job_id=job_id, attempt=0, chunks=((gpus, workers),), value=value, **more)  # type: ignore[arg-type]


def nodes(*node_ids: str, free: int = 0, gpu_type: str = "T", **more: object) -> NodeClass:
    return NodeClass(gpu_type=gpu_type, free_gpus=free, node_ids=node_ids, **more)  # type: ignore[arg-type]


def victim(placement_id: str, cost: float, *held: tuple[str, int], level: int = 0, **more: object) -> Victim:
    return Victim(
        placement_id=placement_id,
        job_id=placement_id,
        level=level,
        cost=cost,
        held=tuple((node_id, gpus, 0, 0) for node_id, gpus in held),
        **more,  # type: ignore[arg-type]
    )


def problem(candidates: list[Candidate], classes: list[NodeClass], *victims: Victim) -> Problem:
    return Problem(
        pool="p",
        window=4,
        now=0.0,
        policy="t",
        candidates=tuple(candidates),
        classes=tuple(classes),
        victims=victims,
    )


def by(assignments: tuple[Assignment, ...]) -> dict[str, list[str]]:
    return {a.job_id: [n for n, _ in a.workers] for a in assignments}


def after(assignments: tuple[Assignment, ...]) -> dict[str, tuple[str, ...]]:
    return {a.job_id: a.after for a in assignments}


def within(level: TopologyLevel) -> TopologyWish:
    return TopologyWish(level=level, required=True)


def both(p: Problem) -> tuple[tuple[Assignment, ...], tuple[Assignment, ...]]:
    """Greedy's and the solver's answers, checked."""
    by_greedy, solution = greedy(p), solve(p, EXACT)
    assert check(p, Solution(window=4, status=SolveStatus.GREEDY, assignments=by_greedy)) == []
    assert check(p, solution) == []
    assert solution.objective == pytest.approx(objective(p, solution.assignments))
    return by_greedy, solution.assignments


# ── shares by memory ─────────────────────────────────────────────────────────────────────────────────────────────────

DEVICE_MIB = 16_276


def of_memory(*free_mib: int) -> tuple[int, ...]:
    return tuple(sorted(1000 * mib // DEVICE_MIB for mib in free_mib if mib < DEVICE_MIB))


def test_free_memory_of_two_devices_is_not_added_up() -> None:
    """A share of 8,138 MiB; a node with 4,069 + 4,069 MiB free is refused."""
    small = nodes("n1", shares=of_memory(4_069, 4_069), gpu_memory_mib=DEVICE_MIB)
    p = problem([job("j", gpu_memory_mib=8_138)], [small])
    assert both(p) == ((), ())
    assert solve(p).unplaced == {
        "j": "share: needs 8138 MiB of a device of any type, the largest free share has 4069 MiB"
    }


@pytest.mark.parametrize("order", [*itertools.permutations((12_207, 8_138, 4_069, 16_276))])
def test_the_device_that_fits_best_is_taken(order: tuple[int, ...]) -> None:
    """Of nodes with 12,207, 8,138, 4,069 and 16,276 MiB free on a device, that with 8,138 is taken."""
    classes = [
        nodes(f"n{i}-{mib}", free=int(mib == DEVICE_MIB), shares=of_memory(mib), gpu_memory_mib=DEVICE_MIB)
        for i, mib in enumerate(order)
    ]
    for assignments in both(problem([job("j", gpu_memory_mib=8_138)], classes)):
        ((where,),) = by(assignments).values()
        assert where.endswith("-8138")


def test_on_one_node_the_device_that_fits_best_is_taken() -> None:
    one = nodes("n", free=1, shares=of_memory(12_207, 8_138, 4_069), gpu_memory_mib=DEVICE_MIB)
    p = problem([job("j", gpu_memory_mib=8_138)], [one])
    stock = Stock(p)
    assert stock.place(p.candidates[0]) == (("n", 1),)
    # What is left takes 12,207 MiB whole, a whole device and 4,069, and no second share of 8,138 beside them.
    rest = [job("a", gpu_memory_mib=12_207), job("b", gpu_memory_mib=DEVICE_MIB), job("c", gpu_memory_mib=4_069)]
    assert set(by(greedy(problem([*p.candidates, *rest], [one])))) == {"j", "a", "b", "c"}


def test_a_share_takes_the_larger_of_compute_and_memory() -> None:
    one = nodes("n", free=1, gpu_memory_mib=1_000)
    p = problem([job("a", gpu_milli=600, gpu_memory_mib=300), job("b", gpu_milli=100, gpu_memory_mib=401)], [one])
    assert set(by(greedy(p))) == {"a"}
    p = problem([job("a", gpu_milli=600, gpu_memory_mib=300), job("b", gpu_milli=100, gpu_memory_mib=400)], [one])
    assert set(by(greedy(p))) == {"a", "b"}


def test_devices_that_do_not_declare_memory_give_no_shares_of_it() -> None:
    p = problem([job("j", gpu_memory_mib=1)], [nodes("n", free=4)])
    assert both(p) == ((), ())
    assert solve(p).unplaced == {"j": "share: needs 1 MiB of a device, no free node of any type declares device memory"}
    p = problem([job("j", gpu_memory_mib=101)], [nodes("n", free=4, gpu_memory_mib=100)])
    assert solve(p).unplaced == {"j": "share: needs 101 MiB of a device of any type, the largest has 100"}


# ── MIG ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

A100 = "A100-40GB"
PROFILES = ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")
GEOMETRIES = {(7, 0, 0, 0), (1, 3, 0, 0), (0, 0, 2, 0), (0, 0, 0, 1)}
"""Instances by profile: 7x1g, 3x2g + 1x1g, 2x3g, 1x7g."""


@pytest.mark.parametrize("wanted", [*itertools.product(range(8), range(4), range(3), range(2))])
def test_one_device_is_partitioned_into_its_geometries_and_no_others(wanted: tuple[int, ...]) -> None:
    """Largest profiles first, so that 1g takes what 2g leaves."""
    device = nodes("n", free=1, mig=A100)
    asked = [(p, n) for p, n in reversed([*zip(PROFILES, wanted, strict=True)]) if n]
    p = problem([job(profile, workers=n, mig_profile=profile) for profile, n in asked], [device])
    fits = any(all(a <= b for a, b in zip(wanted, geometry, strict=True)) for geometry in GEOMETRIES)
    assignments = greedy(p)
    assert (len(assignments) == len(asked)) == fits
    everything = tuple(Assignment(job_id=c.job_id, attempt=0, workers=(("n", 1),) * c.total_gpus) for c in p.candidates)
    assert (check(p, Solution(window=4, status=SolveStatus.GREEDY, assignments=everything)) == []) == fits


def test_instances_that_are_there_are_used_before_an_idle_device_is_opened() -> None:
    classes = [nodes("a", free=1, mig=A100), nodes("b", free=1, mig=A100, instances=(("2g.10gb", 1),))]
    for assignments in both(problem([job("j", mig_profile="2g.10gb")], classes)):
        assert by(assignments) == {"j": ["b"]}


def test_a_device_under_mig_gives_no_shares_but_can_be_had_whole() -> None:
    p = problem([job("share", gpu_milli=100), job("whole", value=2.0)], [nodes("n", free=1, mig=A100)])
    assert [by(a) for a in both(p)] == [{"whole": ["n"]}] * 2
    assert solve(p, EXACT).unplaced["share"].startswith("share: ")
    p = problem([job("j", mig_profile="4g.24gb")], [nodes("n", free=1, mig=A100), nodes("o", free=1)])
    assert solve(p).unplaced == {"j": "mig: no free node of any type has the MIG profile 4g.24gb"}


# ── types and speeds ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fastest", ["K80", "P100", "V100"])
def test_throughput_per_type_decides_and_permuting_the_types_changes_the_result(fastest: str) -> None:
    """Field case 27."""
    types = ("K80", "P100", "V100")
    at = types.index(fastest)
    speeds = tuple(sorted(zip(types[at:] + types[:at], (4.0, 2.0, 1.0), strict=True)))
    classes = [nodes(f"n-{t}", free=1, gpu_type=t) for t in types]
    one = problem([job("j", speeds=speeds)], classes)
    for assignments in both(one):
        assert by(assignments) == {"j": [f"n-{fastest}"]}
        assert objective(one, assignments) == pytest.approx(1.0)
    two = problem([job("j", speeds=speeds), job("k", speeds=speeds, value=0.9)], classes)
    assert {n for ns in by(solve(two, EXACT).assignments).values() for n in ns} == {
        f"n-{fastest}",
        f"n-{types[(at + 1) % 3]}",
    }


def test_jobs_go_where_each_gains_most() -> None:
    """One fast node: it goes to the job that is ten times as fast there, not to the first."""
    classes = [nodes("fast", free=1, gpu_type="V100"), nodes("slow", free=1, gpu_type="K80")]
    p = problem([job("a", speeds=(("V100", 1.1),), value=1.1), job("b", speeds=(("V100", 10.0),))], classes)
    assert by(solve(p, EXACT).assignments) == {"a": ["slow"], "b": ["fast"]}


def test_workers_on_one_type_are_not_spread_and_mixed_ones_run_at_the_slowest() -> None:
    classes = [nodes("a1", "a2", free=1, gpu_type="A"), nodes("b1", free=1, gpu_type="B")]
    for assignments in both(problem([job("j", workers=2, one_type=True)], classes)):
        assert by(assignments) == {"j": ["a1", "a2"]}
    p = problem([job("j", workers=3, one_type=True)], classes)
    assert both(p) == ((), ())
    assert solve(p).unplaced == {"j": "one_type: needs 3 workers on one type, A has room for 2"}
    mixed = problem([job("j", workers=3, speeds=(("A", 4.0),))], classes)
    for assignments in both(mixed):
        assert objective(mixed, assignments) == pytest.approx(0.25)


# ── topology ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def racks(*free: int) -> list[NodeClass]:
    """A rack per number, with so many nodes of two GPUs."""
    return [nodes(*(f"r{i}-{k}" for k in range(n)), free=2, rack=f"r{i}") for i, n in enumerate(free)]


def test_a_gang_goes_into_the_domain_with_the_least_room_that_suffices() -> None:
    p = problem([job("j", 2, 3, topology=within(TopologyLevel.RACK))], racks(2, 5, 3, 9))
    assert by(greedy(p)) == {"j": ["r2-0", "r2-1", "r2-2"]}
    assert {n[:2] for n in by(solve(p, EXACT).assignments)["j"]} <= {"r1", "r2", "r3"}


def test_a_gang_that_no_domain_holds_waits_and_says_so_and_a_wish_gives_way() -> None:
    hard = problem([job("j", 2, 4, topology=within(TopologyLevel.RACK))], [*racks(3, 3), nodes("lone", free=8)])
    assert both(hard) == ((), ())
    assert solve(hard).unplaced == {"j": "topology: needs 4 workers within one rack, r0 has room for 3"}
    wish = problem([job("j", 2, 4, topology=TopologyWish(level=TopologyLevel.RACK))], racks(3, 3))
    for assignments in both(wish):
        assert objective(wish, assignments) == pytest.approx(1.0)
    kept = problem([job("j", 2, 3, topology=TopologyWish(level=TopologyLevel.RACK))], racks(2, 3))
    for assignments in both(kept):
        assert by(assignments) == {"j": ["r1-0", "r1-1", "r1-2"]}
        assert objective(kept, assignments) == pytest.approx(1.1)


def test_nodes_without_a_name_are_in_no_domain() -> None:
    p = problem([job("j", 1, 2, topology=within(TopologyLevel.ZONE))], [nodes("a", "b", free=8)])
    assert both(p) == ((), ())
    assert solve(p).unplaced == {"j": "topology: no free node is in a zone"}


def test_all_workers_on_one_node() -> None:
    p = problem([job("j", 2, 3, topology=within(TopologyLevel.NODE))], [nodes("a", "b", free=5), nodes("c", free=7)])
    for assignments in both(p):
        assert by(assignments) == {"j": ["c"] * 3}
    shares = problem(
        [job("j", workers=3, gpu_milli=500, topology=within(TopologyLevel.NODE))],
        [nodes("a", shares=(500, 900)), nodes("b", free=2)],
    )
    assert by(greedy(shares)) == {"j": ["b"] * 3}


def test_contradictory_topology_is_told() -> None:
    p = problem([job("j", 1, 2, topology=within(TopologyLevel.NODE), anti_affinity="x")], [nodes("a", free=8)])
    assert solve(p).unplaced == {"j": "topology: 2 workers on one node contradict the anti-affinity x"}


# ── anti-affinity ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_workers_of_one_name_are_on_different_nodes_also_of_different_jobs() -> None:
    classes = [nodes("a", "b", free=8), nodes("c", free=8, affinity_taken=("db",))]
    p = problem([job("j", anti_affinity="db"), job("k", anti_affinity="db"), job("l", anti_affinity="web")], classes)
    for assignments in both(p):
        found = by(assignments)
        assert sorted(found["j"] + found["k"]) == ["a", "b"]
    p = problem([job("j", workers=3, anti_affinity="db")], classes)
    assert both(p) == ((), ())
    assert solve(p).unplaced == {
        "j": "affinity: needs 3 nodes of any type without a worker named db, there is room on 2"
    }


def test_each_node_has_one_already() -> None:
    p = problem([job("j", anti_affinity="db")], [nodes("c", free=8, affinity_taken=("db",))])
    assert solve(p).unplaced == {
        "j": "affinity: each node that has 1 free GPU of any type has a worker named db already"
    }


# ── making room ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nobody_is_evicted_unless_the_preemptor_then_fits() -> None:
    """Field case 25: the node would still be too small, or the rest of the gang has no room."""
    alone = problem([job("j", 8, value=100.0, level=1)], [nodes("a"), nodes("b", free=4)], victim("v", 0.1, ("a", 4)))
    assert both(alone) == ((), ())
    assert solve(alone).unplaced["j"].startswith("gpus: needs 8 free GPUs on one node")
    gang = problem([job("j", 8, 3, value=100.0, level=1)], [nodes("a"), nodes("b", free=8)], victim("v", 0.1, ("a", 8)))
    assert both(gang) == ((), ())
    fits = problem([job("j", 8, 2, value=100.0, level=1)], [nodes("a"), nodes("b", free=8)], victim("v", 0.1, ("a", 8)))
    for assignments in both(fits):
        assert after(assignments) == {"j": ("v",)}


def test_the_cheapest_evictions_that_suffice_and_no_others() -> None:
    p = problem(
        [job("j", 4, value=10.0, level=1)],
        [nodes("a", "b", free=1)],
        victim("a1", 1.0, ("a", 1)),
        victim("a2", 1.0, ("a", 1)),
        victim("a3", 1.0, ("a", 1)),
        victim("b1", 2.5, ("b", 3)),
        victim("b2", 0.1, ("b", 1)),
    )
    for assignments in both(p):
        assert after(assignments) == {"j": ("b1",)}
        assert objective(p, assignments) == pytest.approx(7.5)


def test_what_costs_more_than_it_gains_is_not_done() -> None:
    p = problem([job("j", 4, value=2.0, level=1)], [nodes("a")], victim("v", 2.5, ("a", 4)))
    assert both(p) == ((), ())
    assert solve(p, EXACT).unplaced["j"].startswith("outranked: would fit only where other runs make room")


def test_only_lower_levels_make_room() -> None:
    p = problem([job("j", 4, value=9.0, level=1)], [nodes("a")], victim("v", 1.0, ("a", 4), level=1))
    assert both(p) == ((), ())


def test_who_fits_without_evictions_evicts_nobody_and_comes_first() -> None:
    p = problem(
        [job("big", 8, value=9.0, level=1), job("small", 2, level=1)],
        [nodes("a"), nodes("b", free=2)],
        victim("v", 1.0, ("a", 8)),
    )
    for assignments in both(p):
        assert after(assignments) == {"small": (), "big": ("v",)}
    assert [a.job_id for a in greedy(p)] == ["small", "big"]


def test_what_an_eviction_leaves_is_used_by_others_of_a_higher_level_who_wait_too() -> None:
    p = problem(
        [job("a", 3, value=9.0, level=1), job("b", 3, value=9.0, level=2), job("c", 2, value=9.0, level=0)],
        [nodes("n")],
        victim("v", 4.0, ("n", 8)),
    )
    for assignments in both(p):
        assert after(assignments) == {"a": ("v",), "b": ("v",)}
        assert objective(p, assignments) == pytest.approx(14.0, abs=1.0)


def test_what_was_in_vain_for_less_is_tried_for_more() -> None:
    p = problem(
        [job("poor", 4, value=2.0, level=1), job("rich", 4, value=9.0, level=1)],
        [nodes("a")],
        victim("v", 4.0, ("a", 4)),
    )
    assert after(greedy(p)) == {"rich": ("v",)}


def test_what_was_in_vain_is_tried_again_when_somebody_has_gone() -> None:
    """Two GPUs are not worth the victim, three are; then two of what it leaves cost nothing more."""
    p = problem(
        [job("first", 2, value=2.0, level=1), job("big", 3, value=9.0, level=1), job("second", 2, value=2.0, level=1)],
        [nodes("a")],
        victim("v", 4.0, ("a", 8)),
    )
    assert after(greedy(p)) == {"big": ("v",), "second": ("v",)}


def test_shares_have_nobody_evicted() -> None:
    p = problem([job("j", value=9.0, gpu_milli=500, level=1)], [nodes("a")], victim("v", 1.0, ("a", 1)))
    assert both(p) == ((), ())


def test_a_name_that_a_victim_keeps_is_free_once_it_is_gone() -> None:
    taken = nodes("a", free=4, affinity_taken=("db",))
    p = problem([job("j", value=9.0, level=1, anti_affinity="db")], [taken], victim("v", 1.0, ("a", 1)))
    assert both(p) == ((), ())
    named = victim("v", 1.0, ("a", 1), anti_affinity="db")
    p = problem([job("j", value=9.0, level=1, anti_affinity="db")], [taken], named)
    for assignments in both(p):
        assert after(assignments) == {"j": ("v",)}


def test_the_search_for_victims_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem([job("j", 8, value=9.0, level=1)], [nodes("a")], victim("v", 1.0, ("a", 8)))
    assert after(greedy(p)) == {"j": ("v",)}
    monkeypatch.setattr(making_room, "EFFORT_MAX", -1)
    assert greedy(p) == ()


# ── the cost of a window ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"topology": TopologyWish(level=TopologyLevel.RACK)},
        {"anti_affinity": "x"},
        {"one_type": True, "speeds": (("T", 2.0),)},
    ],
    ids=["plain", "topology", "anti-affinity", "types"],
)
def test_the_work_of_placing_does_not_grow_with_the_nodes(
    more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    admits = Place.admits

    def counted(place: object, request: object) -> bool:
        nonlocal looks
        looks += 1
        return bool(admits(place, request))

    monkeypatch.setattr(Place, "admits", counted)
    work = []
    for per_rack in (50, 500):
        classes = [nodes(*(f"r{r}-{i:03}" for i in range(per_rack)), free=4, rack=f"r{r}") for r in range(4)]
        looks = 0
        assert len(greedy(problem([job(f"j{i}", 2, 8, **more) for i in range(5)], classes))) == 5
        work.append(looks)
    assert work[0] == work[1]


# ── strict order ─────────────────────────────────────────────────────────────────────────────────────────────────────


def in_strict_order(*gpus: int) -> Problem:
    candidates = tuple(
        Candidate(job_id=f"j{n}", attempt=0, chunks=((size, 1),), value=10.0 - n) for n, size in enumerate(gpus)
    )
    node = NodeClass(gpu_type="V", free_gpus=8, node_ids=("n",), total_gpus=8)
    return Problem(pool="p", window=1, now=0.0, policy="t", candidates=candidates, classes=(node,), in_order=True)


@pytest.mark.parametrize(
    ("gpus", "placed"),
    [((4, 6, 2), ["j0"]), ((4, 4, 8), ["j0", "j1"]), ((9, 1), []), ((2, 3, 9, 1), ["j0", "j1"])],
)
def test_in_strict_order_the_first_that_does_not_fit_is_the_last(gpus: tuple[int, ...], placed: list[str]) -> None:
    p = in_strict_order(*gpus)
    solution = solve(p)
    assert [a.job_id for a in solution.assignments] == placed
    assert check(p, solution) == []
    assert set(solution.unplaced) == {c.job_id for c in p.candidates} - set(placed)


def test_an_answer_out_of_order_is_refused() -> None:
    p = in_strict_order(4, 6, 2)
    at_will = solve(msgspec.structs.replace(p, in_order=False))
    assert "j2" in {a.job_id for a in at_will.assignments}
    assert check(p, at_will) == ["job j2 is placed, job j1 before it is not"]
