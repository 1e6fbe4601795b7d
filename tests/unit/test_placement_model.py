"""The model alone (no greedy, no check): small windows whose optimum can be reckoned by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from streamsched.core.model import TopologyLevel, TopologyWish
from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Victim
from streamsched.placement import SolveLimits, milp, options, solve
from streamsched.placement.cells import Layout, expand, layout_of
from streamsched.placement.evictions import settle
from streamsched.placement.groups import groups_of
from streamsched.placement.objective import fragmentation_weight
from streamsched.placement.options import Options, options_of
from streamsched.placement.pools import pools_of
from streamsched.placement.spots import Victims, spots_of
from streamsched.placement.stock import Stock

SLACK = 0.5
"""The fragmentation term costs less than half of the least value."""


def job(job_id: str, gpus: int, workers: int = 1, value: float = 1.0, **more: object) -> Candidate:
    return Candidate(job_id=job_id, attempt=0, chunks=((gpus, workers),), value=value, **more)  # type: ignore[arg-type]


def nodes(gpu_type: str, free: int, *node_ids: str, **more: object) -> NodeClass:
    return NodeClass(gpu_type=gpu_type, free_gpus=free, node_ids=node_ids, total_gpus=8, **more)  # type: ignore[arg-type]


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


def victim(name: str, level: int, cost: float, *held: tuple[str, int], **more: object) -> Victim:
    return Victim(
        placement_id=name,
        job_id=f"job of {name}",
        level=level,
        cost=cost,
        held=tuple((node_id, gpus, 0, 0) for node_id, gpus in held),
        **more,  # type: ignore[arg-type]
    )


def within(level: TopologyLevel, *, required: bool = True) -> TopologyWish:
    return TopologyWish(level=level, required=required)


@dataclass(frozen=True)
class Found:
    offer: Options
    layout: Layout
    assignments: tuple[Assignment, ...]
    bound: float

    @property
    def where(self) -> dict[str, list[str]]:
        return {a.job_id: [n for n, _ in a.workers] for a in self.assignments}

    @property
    def after(self) -> dict[str, tuple[str, ...]]:
        return {a.job_id: a.after for a in self.assignments if a.after}


def by_model(p: Problem, domains_max: int = 99, patterns_max: int = 300) -> Found:
    """The model's proved optimum, made concrete."""
    victims = Victims(p)
    stock = Stock(p)
    offer = options_of(p.candidates, p, spots_of(stock.lots(), p, victims), victims, domains_max, {})
    if not offer.demands:
        return Found(offer, Layout([], [], [], [], victims), (), 0.0)
    layout = layout_of(offer.kinds, offer.demands, groups_of(offer.spots, offer.kinds), victims, patterns_max)
    model = milp.Model(layout, fragmentation_weight(p))
    answer = milp.run(model, time_s=None, gap=0.0, nodes_max=None, seed=0, presolve=False, warm=False)
    assert answer.plan is not None
    assert answer.bound is not None
    by_id = {c.job_id: c for c in p.candidates}
    taken = {n: c.affinity_taken for c in p.classes for n in c.node_ids}
    seated = expand(answer.plan, by_id, layout)
    return Found(offer, layout, settle(seated, by_id, victims, answer.plan.evicted, stock.left_on, taken), answer.bound)


@pytest.fixture(params=[300, 0], ids=["patterns", "single nodes"])
def patterns_max(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# ── types and speeds ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gang_of_one_type_is_not_spread_over_types() -> None:
    classes = [nodes("A", 4, "a1"), nodes("B", 4, "b1", "b2")]
    assert by_model(problem([job("j", 4, 2, one_type=True)], classes)).where == {"j": ["b1", "b2"]}
    three = problem([job("j", 4, 3, one_type=True), job("mixed", 4, 3)], classes)
    assert set(by_model(three).where) == {"mixed"}


def test_the_fast_node_goes_to_whom_it_helps() -> None:
    """a is worth 4 on F and 2 on S, b 3 on either: 7 against 5."""
    p = problem(
        [job("a", 4, value=4.0, speeds=(("F", 2.0),)), job("b", 4, value=3.0)], [nodes("F", 4, "f"), nodes("S", 4, "s")]
    )
    found = by_model(p)
    assert found.where == {"a": ["f"], "b": ["s"]}
    assert found.bound == pytest.approx(7.0)


def test_a_mixed_gang_runs_at_the_speed_of_its_slowest_worker() -> None:
    """Two workers, one fast node: worth 9 * 1 / 3, so less than the single job worth 4 that wants the slow node."""
    classes = [nodes("F", 4, "f"), nodes("S", 4, "s")]
    gang = job("gang", 4, 2, value=9.0, speeds=(("F", 3.0),))
    assert by_model(problem([gang], classes)).bound == pytest.approx(3.0)
    assert set(by_model(problem([gang, job("one", 4, value=4.0, gpu_types=("S",))], classes)).where) == {"one"}


def test_equal_speeds_and_no_topology_need_one_option() -> None:
    p = problem(
        [job("a", 4, 2), job("b", 1, speeds=(("A", 2.0), ("B", 2.0)))], [nodes("A", 4, "a"), nodes("B", 4, "b")]
    )
    assert [len(d.options) for d in by_model(p).offer.demands] == [1, 1]


# ── topology ─────────────────────────────────────────────────────────────────────────────────────────────────────────

RACKS = [
    nodes("A", 4, "n1", rack="r1", zone="z"),
    nodes("A", 4, "n2", rack="r1", zone="z"),
    nodes("A", 4, "n3", rack="r2"),
    nodes("A", 4, "n4"),
]


@pytest.mark.parametrize("level", [TopologyLevel.RACK, TopologyLevel.ZONE])
def test_a_required_domain_is_kept(level: TopologyLevel, patterns_max: int) -> None:
    p = problem([job("j", 4, 2, topology=within(level)), job("k", 4, 2)], RACKS)
    assert by_model(p, patterns_max=patterns_max).where == {"j": ["n1", "n2"], "k": ["n3", "n4"]}


def test_no_name_is_no_domain() -> None:
    """n4 alone is in no rack; two nodes without a name are not together."""
    p = problem(
        [job("j", 4, 2, topology=within(TopologyLevel.NVLINK)), job("k", 4, topology=within(TopologyLevel.ZONE))], RACKS
    )
    assert set(by_model(p).where) == {"k"}
    assert by_model(p).where["k"] in (["n1"], ["n2"])


def test_a_kept_wish_is_worth_a_tenth() -> None:
    wish = within(TopologyLevel.RACK, required=False)
    assert by_model(problem([job("j", 4, 2, topology=wish)], RACKS)).bound == pytest.approx(1.1)
    assert by_model(problem([job("j", 4, 2, topology=wish)], RACKS[1:])).bound == pytest.approx(1.0)
    assert by_model(problem([job("j", 4, topology=wish)], RACKS)).bound == pytest.approx(1.1)
    assert by_model(problem([job("j", 4, topology=wish)], RACKS[3:])).bound == pytest.approx(1.0)


def test_two_gangs_that_wish_for_the_same_rack_share_what_there_is() -> None:
    """Either may have r1: the one that is worth 3 keeps its wish, the other goes without."""
    wish = within(TopologyLevel.RACK, required=False)
    found = by_model(
        problem([job("j", 4, 2, topology=wish, value=2.0), job("k", 4, 2, topology=wish, value=3.0)], RACKS)
    )
    assert found.where == {"k": ["n1", "n2"], "j": ["n3", "n4"]}
    assert found.bound == pytest.approx(5.3)


def test_on_one_node_the_workers_are_one_worker_of_the_sum(patterns_max: int) -> None:
    classes = [nodes("A", 8, "big", free_cpu_milli=2000), nodes("A", 4, "n1", "n2", free_cpu_milli=9000)]
    gang = job("j", 2, 3, topology=within(TopologyLevel.NODE), cpu_milli=600)
    assert by_model(problem([gang], classes), patterns_max=patterns_max).where == {"j": ["big"] * 3}
    thirsty = job("j", 2, 3, topology=within(TopologyLevel.NODE), cpu_milli=700)
    assert by_model(problem([thirsty, job("k", 1)], classes), patterns_max=patterns_max).where.keys() == {"k"}


# ── domains that stand for each other ────────────────────────────────────────────────────────────────────────────────


def racks(count: int, *free: int) -> list[NodeClass]:
    return [
        nodes("A", gpus, f"r{r:02}-{i}", rack=f"r{r:02}", nvlink=f"v{r:02}-{i // 2}")
        for r in range(count)
        for i, gpus in enumerate(free)
    ]


def gangs(count: int) -> list[Candidate]:
    """Of one rack at most two find room."""
    levels = (TopologyLevel.RACK, TopologyLevel.NVLINK)
    return [job(f"j{i}", 3, 2, value=1.0 + i, topology=within(levels[i % 2], required=i % 3 > 0)) for i in range(count)]


def test_of_equal_domains_as_many_as_there_are_gangs_are_named() -> None:
    found = by_model(problem(gangs(3), racks(20, 4, 4, 2, 2)))
    assert {k.domain for k in found.offer.kinds if k.level == "rack"} == {"r00", "r01", "r02"}
    assert {k.domain for k in found.offer.kinds if k.level == "nvlink"} == {"v00-0", "v01-0", "v02-0"}
    assert not found.offer.cut
    assert found.bound == pytest.approx(
        sum(c.value * (1.0 if c.topology.required else 1.1) for c in gangs(3)), abs=SLACK
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_copies_of_domains_lose_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem([*gangs(count), job("plain", 4, 3, value=2.5)], [*racks(4, 4, 3, 3), nodes("A", 5, "lone", rack="r99")])
    with_copies = by_model(p)
    monkeypatch.setattr(
        options,
        "_distinct_domains",
        lambda spots, *_: {level: {s.domain(level) for s in spots} for level in options.WIDE_TO_NARROW},
    )
    assert with_copies.bound == pytest.approx(by_model(p).bound)


def test_a_rack_that_differs_in_a_narrower_level_is_no_copy() -> None:
    """Equal nodes, but only in r01 two of them are in one NVLink domain."""
    apart = [nodes("A", 4, f"r00-{i}", rack="r00", nvlink=f"a{i}") for i in range(2)]
    together = [nodes("A", 4, f"r01-{i}", rack="r01", nvlink="b") for i in range(2)]
    gang = job("j", 4, 2, topology=within(TopologyLevel.NVLINK))
    by_rack = job("k", 4, 2, topology=within(TopologyLevel.RACK))
    assert by_model(problem([gang, by_rack], apart + together)).where == {
        "j": ["r01-0", "r01-1"],
        "k": ["r00-0", "r00-1"],
    }


def test_left_out_domains_are_said_and_the_bound_covers_them() -> None:
    classes = [nodes("A", 2 + r, f"n{r}", f"m{r}", rack=f"r{r}") for r in range(5)]
    wanting = [job(f"j{i}", 2, 2, value=2.0, topology=within(TopologyLevel.RACK)) for i in range(6)]
    p = problem([*wanting, job("all", 7, 2, value=1.0)], classes)
    few = solve(p, SolveLimits(time_s=None, gap=0.0, domains_max=1))
    every = solve(p, SolveLimits(time_s=None, gap=0.0))
    assert "6 candidates could choose among 1 domains" in few.note
    assert few.bound is not None
    assert few.bound >= every.objective
    assert every.note == ""


# ── anti-affinity ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_workers_of_one_name_are_apart(patterns_max: int) -> None:
    classes = [nodes("A", 4, "n1", "n2"), nodes("A", 4, "n3", affinity_taken=("x",))]
    found = by_model(problem([job("j", 1, 2, anti_affinity="x"), job("k", 1)], classes), patterns_max=patterns_max)
    assert sorted(found.where["j"]) == ["n1", "n2"]
    assert set(found.where) == {"j", "k"}
    three = problem([job("j", 1, 3, anti_affinity="x")], classes)
    assert by_model(three, patterns_max=patterns_max).where == {}


def test_jobs_of_one_name_are_apart_and_others_are_not_in_the_way(patterns_max: int) -> None:
    jobs = [
        job("a", 1, anti_affinity="x", value=2.0),
        job("b", 2, anti_affinity="x", value=3.0),
        job("c", 1, anti_affinity="y"),
        job("d", 1),
    ]
    found = by_model(problem(jobs, [nodes("A", 4, "n")]), patterns_max=patterns_max)
    assert set(found.where) == {"b", "c", "d"}


# ── victims ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("cost", "level", "evicted"), [(1.0, 0, True), (3.0, 0, False), (1.0, 1, False)])
def test_a_lower_victim_goes_when_that_pays(cost: float, level: int, evicted: bool) -> None:
    p = problem([job("j", 4, value=2.0, level=1)], [nodes("A", 1, "n")], victim("v", level, cost, ("n", 3)))
    found = by_model(p)
    assert found.after == ({"j": ("v",)} if evicted else {})
    assert found.where == ({"j": ["n"]} if evicted else {})


def test_a_victim_pays_once_for_all_its_nodes() -> None:
    """The victim costs 3; only both jobs together are worth that."""
    classes = [nodes("A", 0, "n1", "n2")]
    v = victim("v", 0, 3.0, ("n1", 4), ("n2", 4))
    jobs = [job("a", 4, value=2.0, level=1), job("b", 4, value=2.0, level=1)]
    found = by_model(problem(jobs, classes, v))
    assert found.after == {"a": ("v",), "b": ("v",)}
    assert found.bound == pytest.approx(1.0)
    assert by_model(problem(jobs[:1], classes, v)).where == {}


def test_what_is_freed_for_a_high_level_is_not_for_lower_ones() -> None:
    """high may displace v, low may not: low can only have the free device."""
    v = victim("v", 1, 0.5, ("n", 3))
    high, low = job("high", 3, value=5.0, level=2), job("low", 1, value=1.0, level=1)
    found = by_model(problem([high, low], [nodes("A", 1, "n")], v))
    assert found.after == {"high": ("v",)}
    assert set(found.where) == {"high", "low"}
    wide = job("low", 2, value=1.0, level=1)
    assert set(by_model(problem([high, wide], [nodes("A", 1, "n")], v)).where) == {"high"}
    small = job("high", 1, value=5.0, level=2)
    found = by_model(problem([small, wide], [nodes("A", 2, "n")], v))
    assert [a.job_id for a in found.assignments] == ["low", "high"]
    assert found.after == {"high": ("v",)}


def test_only_who_relies_on_a_victim_waits_for_it() -> None:
    jobs = [job("a", 2, value=3.0, level=1), job("b", 2, value=3.0, level=1)]
    found = by_model(problem(jobs, [nodes("A", 2, "n")], victim("v", 0, 0.5, ("n", 2))))
    assert found.after in ({"b": ("v",)}, {"a": ("v",)})


def test_an_eviction_that_nobody_needs_is_undone() -> None:
    p = problem(
        [job("j", 2, level=1)], [nodes("A", 2, "n")], victim("v", 0, 0.1, ("n", 2)), victim("w", 0, 0.2, ("n", 2))
    )
    by_id = {"j": p.candidates[0]}
    found = Assignment(job_id="j", attempt=0, workers=(("n", 2),))
    for free, after in ((2, ()), (0, ("v",)), (1, ("v",))):
        (settled,) = settle([found], by_id, Victims(p), {0, 1}, lambda _, free=free: (free, -1, -1), {})
        assert settled.after == after


def test_a_name_that_a_victim_keeps_is_free_when_it_goes() -> None:
    v = victim("v", 0, 0.5, ("n", 1), anti_affinity="x")
    classes = [nodes("A", 2, "n", affinity_taken=("x",))]
    found = by_model(problem([job("j", 1, anti_affinity="x", level=1), job("k", 1)], classes, v))
    assert found.after == {"j": ("v",)}
    assert set(found.where) == {"j", "k"}
    assert by_model(problem([job("j", 1, anti_affinity="x", level=0)], classes, v)).where == {}


def test_victims_free_cpu_too() -> None:
    v = Victim(placement_id="v", job_id="v", level=0, cost=0.1, held=(("n", 1, 3000, 10),))
    p = problem([job("j", 1, cpu_milli=4000, level=1)], [nodes("A", 1, "n", free_cpu_milli=1000, free_memory_mib=0)], v)
    assert by_model(p).after == {"j": ("v",)}


def test_odd_victims_are_left_alone() -> None:
    odd = [
        victim("nan", 0, float("nan"), ("n", 8)),
        victim("minus", 0, -1.0, ("n", 8)),
        victim("gone", 0, 0.1, ("nowhere", 8)),
    ]
    assert by_model(problem([job("j", 4, level=1), job("k", 1)], [nodes("A", 1, "n")], *odd)).where == {"k": ["n"]}


# ── size and sameness ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_model_does_not_grow_with_nodes_nor_with_racks() -> None:
    def size(count: int) -> int:
        found = by_model(
            problem(gangs(4), [*racks(count, 4, 4, 2, 2), nodes("A", 8, *(f"x{i}" for i in range(count)))])
        )
        return found.layout.size

    assert size(10) == size(200)


def test_equal_problems_have_equal_answers() -> None:
    p = problem([*gangs(5), job("plain", 4, 3)], racks(4, 4, 3, 3))
    assert by_model(p).assignments == by_model(p).assignments


def test_sets_that_cross_are_counted_by_atoms() -> None:
    """Kind 0 goes to cells 0 and 1, kind 1 to 1 and 2, kind 2 to 1 alone, kind 3 anywhere."""
    slot = (1, 0, 0, "")
    fits = {0: (0, 3), 1: (0, 1, 2, 3), 2: (1, 3)}
    pools = pools_of((c, "A", dict.fromkeys(kinds, slot)) for c, kinds in fits.items())
    for a in pools:
        for b in pools:
            assert set(a.cells) <= set(b.cells) or set(b.cells) <= set(a.cells) or not set(a.cells) & set(b.cells)
    reach: dict[int, Counter[int]] = {}
    for pool in pools:
        for kind in pool.kinds:
            reach.setdefault(kind, Counter()).update(pool.cells)
    assert reach == {0: {0: 1, 1: 1}, 1: {1: 1, 2: 1}, 2: {1: 1}, 3: {0: 1, 1: 1, 2: 1}}
    for q, pool in enumerate(pools):
        inside = {i for i, other in enumerate(pools) if i != q and set(other.cells) < set(pool.cells)}
        assert set(pool.inner) == inside
