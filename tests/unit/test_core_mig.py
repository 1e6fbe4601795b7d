"""MIG: the published geometries, and devices that are partitioned only while they are idle."""

from __future__ import annotations

from typing import Any

import pytest
from core_builder import Pool, placed
from hypothesis import given, settings
from hypothesis import strategies as st

from streamsched.core import events as ev
from streamsched.core import mig
from streamsched.core.errors import BrokenInvariant
from streamsched.core.model import WHOLE_GPU, Allocation, JobSpec, NodeSpec
from streamsched.core.node import Node, NodeRecord
from streamsched.core.problem import Assignment, Solution, SolveStatus

SEVEN_1G = (("1g.5gb", 7),)
THREE_2G = (("2g.10gb", 3), ("1g.5gb", 1))
TWO_3G = (("3g.20gb", 2),)


def geometries(table: str) -> set[frozenset[tuple[str, int]]]:
    return {frozenset(geometry) for geometry in mig.TABLES[table]}


def test_the_geometries_of_an_a100_40gb_are_these_and_no_others():
    assert sorted(mig.TABLES["A100-40GB"]) == sorted([SEVEN_1G, THREE_2G, TWO_3G, (("7g.40gb", 1),)])


def test_the_geometries_of_the_other_devices():
    eighty = {
        frozenset({("1g.10gb", 7)}),
        frozenset({("2g.20gb", 3), ("1g.10gb", 1)}),
        frozenset({("3g.40gb", 2)}),
        frozenset({("7g.80gb", 1)}),
    }
    assert geometries("A100-80GB") == geometries("H100-80GB") == eighty
    assert geometries("A30") == {frozenset({("1g.6gb", 4)}), frozenset({("2g.12gb", 2)}), frozenset({("4g.24gb", 1)})}
    assert set(mig.TABLES) == {"A100-40GB", "A100-80GB", "H100-80GB", "A30"}


def test_the_instances_of_a_device_are_never_more_than_the_device():
    for table, parts, memory_gb in (("A100-40GB", 7, 40), ("A100-80GB", 7, 80), ("H100-80GB", 7, 80), ("A30", 4, 24)):
        for geometry in mig.TABLES[table]:
            assert sum(mig.slices(profile) * count for profile, count in geometry) <= parts
            assert sum(mig.MILLI[profile] * count for profile, count in geometry) <= WHOLE_GPU
            assert sum(int(p.split(".")[1].removesuffix("gb")) * count for p, count in geometry) <= memory_gb


def test_what_an_instance_counts():
    sevenths = [mig.MILLI[profile] for profile in ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")]
    assert sevenths == [142, 285, 428, 1000]
    assert [mig.MILLI[profile] for profile in ("1g.6gb", "2g.12gb", "4g.24gb")] == [250, 500, 1000]


@pytest.mark.parametrize(
    ("profile", "geometry"),
    [
        ("1g.5gb", SEVEN_1G),
        ("2g.10gb", THREE_2G),
        ("3g.20gb", TWO_3G),
        ("7g.40gb", (("7g.40gb", 1),)),
        ("1g.6gb", None),
    ],
)
def test_an_idle_device_becomes_what_has_most_of_the_profile(profile, geometry):
    assert mig.opened("A100-40GB", profile) == geometry


# ── one node ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def node(gpus: int = 1, table: str = "A100-40GB", **more: Any) -> Node:
    return Node(NodeRecord(spec=NodeSpec(node_id="n", gpu_type="A", gpus=gpus, mig=table, **more), capacity=gpus))


def ask(profile: str = "", gpus: int = 1, **more: Any) -> JobSpec:
    return JobSpec(job_id="j", submitted_at=0.0, gpus_per_worker=gpus, mig_profile=profile, **more)


def put(there: Node, run: str, profile: str = "", gpus: int = 1) -> Allocation:
    allocation = there.allocate(ask(profile, gpus), gpus)
    there.take(run, allocation)
    return allocation


def test_the_first_instance_fixes_the_geometry_until_the_device_is_idle_again():
    there = node()
    first = put(there, "a", "2g.10gb")
    assert (first.gpus, first.gpu_milli, first.mig_geometry, first.mig_instance) == ((0,), 285, THREE_2G, 0)
    assert there.instances() == (("1g.5gb", 1), ("2g.10gb", 2))
    small = put(there, "b", "1g.5gb")
    there.give_back("a", first)
    assert there.instances() == (("2g.10gb", 3),), "still three times 2g, though only 1g is used"
    there.give_back("b", small)
    assert there.instances() == ()
    assert there.free_gpus() == 1
    assert put(there, "c", "3g.20gb").mig_geometry == TWO_3G
    assert there.instances() == (("3g.20gb", 1),)


def test_the_fullest_partitioned_device_first_then_the_lowest_then_an_idle_one():
    there = node(4)
    assert put(there, "a", "3g.20gb").gpus == (0,)
    ones = [put(there, f"b{i}", "1g.5gb") for i in range(8)]
    assert [one.gpus for one in ones] == [(1,)] * 7 + [(2,)]
    assert [one.mig_instance for one in ones] == [*range(7), 0]
    for i in (1, 5):
        there.give_back(f"b{i}", ones[i])
    again = put(there, "c", "1g.5gb")
    assert (again.gpus, again.mig_instance) == ((1,), 1), "device 1 has less left than device 2"
    assert put(there, "d", "2g.10gb").gpus == (3,)
    assert put(there, "e", "1g.5gb").gpus == (1,)
    assert put(there, "f", "1g.5gb").gpus == (3,), "the one beside three 2g: 715 thousandths left, device 2 has 858"


def test_a_whole_device_is_an_idle_one_and_gives_no_instances():
    there = node(2)
    part = put(there, "a", "1g.5gb")
    whole = put(there, "b", gpus=1)
    assert (whole.gpus, whole.mig_geometry) == ((1,), ())
    assert (there.free_gpus(), there.instances(), there.shares()) == (0, (("1g.5gb", 6),), ())
    there.give_back("a", part)
    assert there.free_gpus() == 1
    seven = put(there, "c", "7g.40gb")
    assert (seven.gpus, seven.gpu_milli, there.free_gpus(), there.instances()) == ((0,), 1000, 0, ())


@pytest.mark.parametrize(
    "second",
    [
        {"mig_profile": "1g.5gb", "mig_geometry": SEVEN_1G, "mig_instance": 0},
        {"mig_profile": "1g.5gb", "mig_geometry": SEVEN_1G, "mig_instance": 7},
        {"mig_profile": "1g.5gb", "mig_geometry": THREE_2G, "mig_instance": 0},
        {"mig_profile": "3g.20gb", "mig_geometry": SEVEN_1G, "mig_instance": 0},
        {},
    ],
    ids=["given twice", "not there", "another geometry", "another profile", "no instance"],
)
def test_what_a_device_does_not_have_cannot_be_taken(second):
    there = node()
    put(there, "a", "1g.5gb")
    with pytest.raises(BrokenInvariant):
        there.take("b", Allocation(node_id="n", gpus=(0,), gpu_milli=142, **second))


def test_a_device_that_is_shared_cannot_be_partitioned():
    there = node()
    there.take("a", Allocation(node_id="n", gpus=(0,), gpu_milli=100))  # from before the node had MIG
    assert (there.shares(), there.instances(), there.free_gpus()) == ((), (), 0)
    with pytest.raises(BrokenInvariant):
        there.take("b", Allocation(node_id="n", gpus=(0,), gpu_milli=142, mig_profile="1g.5gb", mig_geometry=SEVEN_1G))


def test_a_node_that_says_another_table_gives_no_more_of_the_old_geometry():
    there = node()
    first = put(there, "a", "2g.10gb")
    there.adopt(NodeRecord(spec=NodeSpec(node_id="n", gpu_type="A", gpus=1, mig="A30"), capacity=1))
    assert (there.instances(), there.free_gpus()) == ((), 0)
    there.give_back("a", first)
    assert put(there, "b", "1g.6gb").gpu_milli == 250


def test_a_node_that_shrank_gives_nothing_of_the_devices_it_lost():
    there = node(2)
    put(there, "a", "3g.20gb")
    put(there, "b", "2g.10gb")
    there.adopt(NodeRecord(spec=there.spec, capacity=1))
    assert there.instances() == (("3g.20gb", 1),)


# ── in a pool ────────────────────────────────────────────────────────────────────────────────────────────────────────


def assign(pool: Pool, job_id: str, *workers: tuple[str, int]) -> list[Any]:
    assignment = Assignment(job_id=job_id, attempt=pool.job(job_id).attempt, workers=workers)
    solution = Solution(window=1, status=SolveStatus.OPTIMAL, assignments=(assignment,))
    return pool.send(ev.WindowSolved(solution=solution))


def test_instances_only_where_there_is_mig_and_shares_only_where_there_is_none(make_pool):
    pool = make_pool()
    pool.node("plain", 1, "A", gpu_memory_mib=40_000)
    pool.node("mig", 1, "A", mig="A100-40GB", gpu_memory_mib=40_000)
    pool.arrive("instance", mig_profile="1g.5gb")
    pool.arrive("share", gpu_milli=500)
    pool.arrive("memory", gpu_memory_mib=1000)
    for job_id, wrong in (("instance", "plain"), ("share", "mig"), ("memory", "mig")):
        assert "has no room" in assign(pool, job_id, (wrong, 1))[0].detail
    assign(pool, "instance", ("mig", 1))
    assign(pool, "share", ("plain", 1))
    assign(pool, "memory", ("plain", 1))
    assert pool.states("instance", "share", "memory") == ["placed"] * 3
    by_node = {c.node_ids[0]: c for c in pool.state.inventory.classes()}
    assert (by_node["mig"].mig, by_node["mig"].instances, by_node["mig"].free_gpus) == (
        "A100-40GB",
        (("1g.5gb", 6),),
        0,
    )
    assert (by_node["plain"].instances, by_node["plain"].shares) == ((), (475,))
    pool.verify()


def test_a_gang_of_instances_opens_devices_as_it_needs_them(make_pool):
    pool = make_pool()
    pool.node("n", 2, "A", mig="A100-40GB")
    pool.arrive("gang", workers=5, mig_profile="2g.10gb", tenant="t")
    pool.arrive("more", workers=2, mig_profile="2g.10gb")
    assert placed(assign(pool, "gang", *[("n", 1)] * 5)) == {"gang": {"n": 5}}
    assert [a.gpus for a in pool.run("gang").allocations] == [(0,)] * 3 + [(1,)] * 2
    assert pool.state.usage("t").held_milli == 5 * 285
    pool.window()
    assert pool.why("more") == "mig: 2 x 2g.10gb needed, room now for 1"
    pool.verify()


def test_the_geometry_outlives_the_instance_that_it_was_chosen_for_and_the_process(make_pool):
    pool = make_pool()
    pool.node("n", 1, "A", mig="A100-40GB")
    pool.arrive("two", mig_profile="2g.10gb")
    assign(pool, "two", ("n", 1))
    pool.start("two")
    pool.arrive("one", mig_profile="1g.5gb")
    assign(pool, "one", ("n", 1))
    pool.start("one")
    pool.complete("two")
    pool.crash()
    pool.verify()
    assert pool.state.inventory.nodes["n"].instances() == (("2g.10gb", 3),)
    pool.arrive("three", mig_profile="3g.20gb")
    pool.window()
    assert pool.why("three") == "mig: 1 x 3g.20gb needed, room now for 0"
    pool.complete("one")
    assert set(placed(assign(pool, "three", ("n", 1)))) == {"three"}
    pool.verify()


@settings(max_examples=60)
@given(st.data())
def test_any_course_of_events_keeps_the_books(data):
    """Instances and whole devices come and go; what a node gives follows from its runs alone."""
    pool = Pool()
    pool.node("a", 2, "A", mig="A100-40GB")
    pool.node("b", 2, "B", mig="A30")
    running: list[str] = []
    profiles = ["", *mig.MILLI]
    for i in range(data.draw(st.integers(1, 15))):
        if running and data.draw(st.booleans()):
            pool.complete(running.pop(data.draw(st.integers(0, len(running) - 1))))
            continue
        job_id, profile = f"j{i}", data.draw(st.sampled_from(profiles))
        pool.arrive(job_id, mig_profile=profile)
        if pool.states(job_id) == ["queued"] and placed(assign(pool, job_id, (data.draw(st.sampled_from("ab")), 1))):
            pool.start(job_id)
            running.append(job_id)
    pool.state.verify()
    for there in pool.state.inventory:
        for device, free in enumerate(there.free_milli):
            owners = [a for r in pool.state.runs.values() for a in r.allocations if a.gpus == (device,)]
            owners = [a for a in owners if a.node_id == there.node_id]
            assert len({a.mig_geometry for a in owners}) <= 1
            assert len({(a.mig_profile, a.mig_instance) for a in owners}) == len(owners)
            assert free == WHOLE_GPU - sum(a.gpu_milli for a in owners)
    for job_id in running:
        pool.complete(job_id)
    assert all(there.free_gpus() == 2 and not there.instances() for there in pool.state.inventory)
    pool.verify()
