"""What fits where: types, topology, anti-affinity, shares by memory. Against brute force over tiny inventories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from core_builder import Pool, codes, placed
from hypothesis import given, settings
from hypothesis import strategies as st

from streamsched.core import events as ev
from streamsched.core import mig
from streamsched.core.capability import Capabilities
from streamsched.core.chances import Chances
from streamsched.core.instructions import SolveWindow
from streamsched.core.inventory import Inventory
from streamsched.core.model import (
    WHOLE_GPU,
    Allocation,
    Job,
    JobSpec,
    JobState,
    NodeSpec,
    NodeState,
    TopologyLevel,
    TopologyWish,
)
from streamsched.core.node import Node, NodeRecord
from streamsched.core.problem import Assignment, Solution, SolveStatus
from streamsched.core.reservations import choose_nodes, lay_out
from streamsched.core.room import slots
from streamsched.core.tenants import TenantPolicy

T4_MIB = 16_276


def one(level: str, required: bool = True) -> TopologyWish:
    return TopologyWish(level=TopologyLevel(level), required=required)


def node_spec(name: str, gpus: int = 8, gpu_type: str = "A", **more: Any) -> NodeSpec:
    return NodeSpec(node_id=name, gpu_type=gpu_type, gpus=gpus, **more)


def node(name: str, gpus: int = 8, gpu_type: str = "A", **more: Any) -> Node:
    return Node(NodeRecord(spec=node_spec(name, gpus, gpu_type, **more), capacity=gpus))


def inventory(*nodes: Node) -> Inventory:
    pool = Inventory()
    for each in nodes:
        pool.add(each)
    return pool


def ask(gpus: int = 1, workers: int = 1, **more: Any) -> JobSpec:
    return JobSpec(job_id="j", submitted_at=0.0, gpus_per_worker=gpus, workers=workers, **more)


def assign(pool: Pool, job_id: str, *workers: tuple[str, int]) -> list[Any]:
    """Commit this placement as if a solver had answered it."""
    assignment = Assignment(job_id=job_id, attempt=pool.job(job_id).attempt, workers=workers)
    solution = Solution(window=1, status=SolveStatus.OPTIMAL, assignments=(assignment,))
    return pool.send(ev.WindowSolved(solution=solution))


def refused(out: list[Any]) -> str:
    """Why an assignment was left out."""
    assert codes(out) == ["absorb:stale-assignment"]
    detail: str = out[0].detail
    return detail


# ── brute force ──────────────────────────────────────────────────────────────────────────────────────────────────────

Bench = tuple[Any, ...]
"""(devices, cpu or None, memory or None, names present); a device is its free thousandths, or under MIG the free
instances of each profile, "idle" or "taken"."""


def benches(nodes: Iterable[Node], empty: bool) -> list[tuple[NodeSpec, Bench]]:
    """The nodes as they are now, or as if nothing were on them."""
    found = []
    for n in nodes:
        now = Node(n.record) if empty else n
        devices: list[Any] = []
        for i, free in enumerate(now.free_milli[: n.record.capacity]):
            if not n.spec.mig:
                devices.append(free)
            elif free == WHOLE_GPU:
                devices.append("idle")
            elif i in now._partitions:
                partition = now._partitions[i]
                devices.append({profile: len(partition.free(profile)) for profile, _ in partition.geometry})
            else:
                devices.append("taken")
        cpu = now.free_cpu_milli if n.spec.cpu_milli else None
        memory = now.free_memory_mib if n.spec.memory_mib else None
        found.append((n.spec, (devices, cpu, memory, frozenset(now.affinity_taken()))))
    return found


def possible(job: JobSpec, nodes: list[tuple[NodeSpec, Bench]]) -> bool:
    """Whether there is any way at all to put all workers on the nodes."""
    if job.gpu_types:
        nodes = [(spec, bench) for spec, bench in nodes if spec.gpu_type in job.gpu_types]
    if not job.mixed_types:
        groups = [[(s, b) for s, b in nodes if s.gpu_type == kind] for kind in {s.gpu_type for s, _ in nodes}]
    else:
        groups = [nodes]
    if job.topology and job.topology.required:
        level = job.topology.level
        groups = [[(s, b) for s, b in g if _domain(s, level) == name] for g in groups for name in _names(g, level)]
    return any(_search([gpus for gpus, count in job.chunks() for _ in range(count)], job, group) for group in groups)


def _domain(spec: NodeSpec, level: str) -> str:
    return spec.node_id if level == "node" else getattr(spec, level)


def _names(nodes: list[tuple[NodeSpec, Bench]], level: str) -> set[str]:
    return {_domain(spec, level) for spec, _ in nodes} - {""}


def _search(workers: list[int], job: JobSpec, nodes: list[tuple[NodeSpec, Bench]]) -> bool:
    if not workers:
        return True
    return any(
        _search(workers[1:], job, [*nodes[:i], (spec, after), *nodes[i + 1 :]])
        for i, (spec, bench) in enumerate(nodes)
        for after in _ways(workers[0], job, spec, bench)
    )


def _ways(gpus: int, job: JobSpec, spec: NodeSpec, bench: Bench) -> Iterator[Bench]:
    devices, cpu, memory, names = bench
    if job.anti_affinity and job.anti_affinity in names:
        return
    if (cpu is not None and 0 < job.cpu_milli > cpu) or (memory is not None and 0 < job.memory_mib > memory):
        return
    left = (
        None if cpu is None else cpu - job.cpu_milli,
        None if memory is None else memory - job.memory_mib,
        names | {job.anti_affinity} if job.anti_affinity else names,
    )
    for after in _device_ways(gpus, job, spec, devices):
        yield (after, *left)


def _device_ways(gpus: int, job: JobSpec, spec: NodeSpec, devices: list[Any]) -> Iterator[list[Any]]:
    def with_device(i: int, after: Any) -> list[Any]:
        return [*devices[:i], after, *devices[i + 1 :]]

    if job.mig_profile:
        for i, device in enumerate(devices):
            if isinstance(device, dict) and device.get(job.mig_profile):
                yield with_device(i, device | {job.mig_profile: device[job.mig_profile] - 1})
            elif device == "idle":
                for geometry in map(dict, mig.TABLES[spec.mig]):
                    if job.mig_profile in geometry:
                        yield with_device(i, geometry | {job.mig_profile: geometry[job.mig_profile] - 1})
    elif job.gpu_memory_mib or job.gpu_milli < WHOLE_GPU:
        for i, free in enumerate(devices):
            if isinstance(free, int) and (milli := _milli(job, spec)) is not None and milli <= free:
                yield with_device(i, free - milli)
    else:
        idle = [i for i, device in enumerate(devices) if device in (WHOLE_GPU, "idle")][:gpus]
        if len(idle) == gpus:
            yield ["taken" if i in idle and spec.mig else 0 if i in idle else d for i, d in enumerate(devices)]


def _milli(job: JobSpec, spec: NodeSpec) -> int | None:
    """The least number of thousandths whose memory is enough, and not less than asked for."""
    least = job.gpu_milli if job.gpu_milli < WHOLE_GPU else 1
    if not job.gpu_memory_mib:
        return least
    enough = (m for m in range(least, WHOLE_GPU + 1) if m * spec.gpu_memory_mib >= job.gpu_memory_mib * WHOLE_GPU)
    return next(enough, None)


@st.composite
def nodes(draw: st.DrawFn) -> list[Node]:
    found = []
    for i in range(draw(st.integers(0, 4))):
        spec = node_spec(
            f"n{i}",
            draw(st.integers(0, 3)),
            draw(st.sampled_from("AAB")),
            cpu_milli=draw(st.sampled_from([0, 0, 2, 5])),
            memory_mib=draw(st.sampled_from([0, 0, 3])),
            gpu_memory_mib=draw(st.sampled_from([0, 7, 16])),
            mig=draw(st.sampled_from(["", "", "A30", "A100-40GB"])),
            nvlink=draw(st.sampled_from(["", "v"])),
            rack=draw(st.sampled_from(["", "r", "s"])),
            zone=draw(st.sampled_from(["z", "y"])),
        )
        found.append(Node(NodeRecord(spec=spec, capacity=draw(st.integers(max(0, spec.gpus - 1), spec.gpus)))))
    return found


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    kind = draw(st.sampled_from(["whole", "whole", "share", "memory", "both", "mig"]))
    gpus = draw(st.integers(1, 3)) if kind == "whole" else 1
    level = draw(st.none() | st.sampled_from(TopologyLevel))
    profiles = ["1g.6gb", "2g.12gb", "4g.24gb", "1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb", "9g.90gb"]
    return ask(
        gpus,
        draw(st.integers(1, 4)),
        remainder_gpus=draw(st.integers(0, gpus - 1)),
        gpu_milli=draw(st.sampled_from([500, 300, 999])) if kind in ("share", "both") else WHOLE_GPU,
        gpu_memory_mib=draw(st.sampled_from([1, 2, 7, 8, 17])) if kind in ("memory", "both") else 0,
        mig_profile=draw(st.sampled_from(profiles)) if kind == "mig" else "",
        gpu_types=draw(st.sampled_from([(), (), ("A",), ("B",), ("A", "B"), ("C",)])),
        mixed_types=draw(st.booleans()),
        topology=TopologyWish(level=level, required=draw(st.sampled_from([True, True, False]))) if level else None,
        anti_affinity=draw(st.sampled_from(["", "", "x"])),
        cpu_milli=draw(st.integers(0, 3)),
        memory_mib=draw(st.integers(0, 2)),
    )


def occupy(some: list[Node], others: list[tuple[int, JobSpec]]) -> None:
    """One worker of each job on the node of this number, where there is room."""
    for number, (i, job) in enumerate(others):
        if i < len(some) and (not job.mig_profile or job.mig_profile in mig.MILLI) and slots(some[i].room(), job):
            some[i].take(f"p{number}", some[i].allocate(job, job.gpus_per_worker))


tenants = st.lists(st.tuples(st.integers(0, 3), jobs()), max_size=5)


@settings(max_examples=120)
@given(nodes(), jobs(), tenants)
def test_never_fits_is_exact(some, job, others):
    occupy(some, others)  # must not matter
    assert (inventory(*some).never_fits(job) is None) == possible(job, benches(some, empty=True))


@settings(max_examples=120)
@given(nodes(), jobs(), tenants)
def test_what_could_start_alone_is_exact(some, job, others):
    occupy(some, others)
    could = possible(job, benches(some, empty=False))
    assert (Chances(inventory(*some).classes()).why_not(job) == "") == could
    workers = lay_out(job, some)
    assert (workers is not None) == could
    for number, (node_id, gpus) in enumerate(workers or ()):
        (there,) = (n for n in some if n.node_id == node_id)
        there.take(f"j{number}", there.allocate(job, gpus))


@settings(max_examples=80)
@given(nodes(), jobs(), tenants, st.sets(st.sampled_from(["n0", "n1", "n2"]), max_size=2))
def test_nodes_are_kept_free_when_and_only_when_the_job_would_fit_there(some, job, others, taken):
    occupy(some, others)
    pool = inventory(*some)
    waiting = Job(spec=job, seq=0, state=JobState.QUEUED, queued_at=0.0)
    chosen = choose_nodes(waiting, some, dict.fromkeys(taken, "other"))
    rest = [n for n in some if n.node_id not in taken]
    could = possible(job, benches(rest, empty=True))
    assert bool(chosen) == could == pool.holds_without(job, taken)
    if chosen:
        kept = [Node(n.record) for n in rest if n.node_id in chosen]
        assert pool.would_hold(job, chosen)
        assert lay_out(job, kept) is not None
        assert len(chosen) <= job.workers + bool(job.remainder_gpus)


@settings(max_examples=50)
@given(nodes(), nodes(), st.lists(st.sampled_from(list(NodeState)), min_size=4, max_size=4))
def test_counting_follows_every_change(before, after, states):
    pool = inventory(*before)
    for new, state in zip(after, states, strict=False):
        known = pool.nodes.get(new.node_id)
        if known is None:
            pool.add(new)
        else:
            known.adopt(NodeRecord(spec=new.spec, capacity=new.record.capacity, state=state))
            pool.refile(known)
    assert pool.capabilities == Capabilities.of(pool)
    assert pool.usable == Capabilities.of(n for n in pool if n.usable)


# ── reasons ──────────────────────────────────────────────────────────────────────────────────────────────────────────

BIG = (
    node("a0", 8, "A", rack="r1", nvlink="v1", gpu_memory_mib=T4_MIB),
    node("a1", 8, "A", rack="r1", gpu_memory_mib=T4_MIB),
    node("a2", 8, "A", rack="r2", gpu_memory_mib=T4_MIB),
    node("b0", 4, "B", mig="A100-40GB"),
)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (ask(8, 3, topology=one("rack")), "topology: no rack domain has room for 3 workers, the largest for 2"),
        (ask(8, 2, topology=one("node")), "topology: no node has room for 2 workers, the largest for 1"),
        (ask(8, 2, topology=one("nvlink")), "topology: no nvlink domain has room for 2 workers, the largest for 1"),
        (ask(8, 1, topology=one("zone")), "topology: no node that it may use names its zone domain"),
        (ask(4, 7), "gpu_type: no single type has room for 7 workers, at best for 6; mixed_types is not set"),
        (ask(4, 4, anti_affinity="x", gpu_types=("A",)), "anti_affinity: 4 nodes are needed, 3 could hold a worker"),
        (
            ask(8, 3, remainder_gpus=1, anti_affinity="x", gpu_types=("A",)),
            "anti_affinity: no node is left for the worker of 1 GPUs",
        ),
        (
            ask(gpu_memory_mib=T4_MIB + 1),
            "gpu_memory: a worker needs 16277 MiB of one device, the largest has 16276",
        ),
        (ask(mig_profile="1g.10gb"), "mig: no node has devices for instances of 1g.10gb"),
        (ask(mig_profile="1g.5gb", gpu_types=("A",)), "mig: no node has devices for instances of 1g.5gb"),
        (
            ask(1, 13, mig_profile="2g.10gb"),
            "mig: 13 instances of 2g.10gb are needed, all nodes together could hold 12",
        ),
        (
            ask(gpu_milli=500, gpu_types=("B",)),
            "gpus: devices under MIG are given whole or as instances, not in shares",
        ),
    ],
)
def test_the_reason_names_what_is_short(job, reason):
    assert inventory(*BIG).never_fits(job) == reason


def test_without_declared_memory_no_share_by_memory():
    assert inventory(node("n", 8)).never_fits(ask(gpu_memory_mib=1)) == (
        "gpu_memory: no node declares the memory of its devices"
    )


def test_an_impossible_request_is_told_at_arrival_and_looked_at_again(make_pool):
    pool = make_pool()
    pool.node("n0", 8, rack="r1")
    pool.node("n1", 8, rack="r2")
    pool.arrive("far", 8, 2, topology=one("rack"))
    pool.arrive("wish", 8, 2, topology=one("rack", required=False))
    assert pool.states("far", "wish") == ["unfit", "queued"]
    assert pool.job("far").reason == (
        "can never fit: topology: no rack domain has room for 2 workers, the largest for 1"
    )
    pool.node("n2", 8, rack="r2")
    pool.window()
    assert pool.states("far") == ["queued"]
    pool.verify()


def test_a_gang_is_on_one_type_unless_types_may_be_mixed(make_pool):
    pool = make_pool()
    pool.node("a", 8, "A")
    pool.node("b", 8, "B")
    pool.arrive("same", 8, 2)
    pool.arrive("mixed", 8, 2, mixed_types=True)
    assert pool.states("same", "mixed") == ["unfit", "queued"]
    assert placed(assign(pool, "mixed", ("a", 8), ("b", 8))) == {"mixed": {"a": 8, "b": 8}}
    pool.verify()


# ── the window ───────────────────────────────────────────────────────────────────────────────────────────────────────


def candidates(pool: Pool) -> dict[str, Any]:
    return {c.job_id: c for i in pool.window() if isinstance(i, SolveWindow) for c in i.problem.candidates}


def test_a_candidate_says_what_the_job_asks_for(make_pool):
    pool = make_pool()
    pool.nodes(2, 8, rack="r", gpu_memory_mib=T4_MIB)
    pool.arrive("gang", 2, 2, topology=one("rack"), anti_affinity="db", speeds={"V100": 2.0, "A100": 5.0})
    pool.arrive("mixed", 2, 2, mixed_types=True)
    pool.arrive("single", 2)
    pool.arrive("share", gpu_memory_mib=8138)
    found = candidates(pool)
    gang = found["gang"]
    assert (gang.one_type, gang.topology, gang.anti_affinity) == (True, one("rack"), "db")
    assert gang.speeds == (("A100", 5.0), ("V100", 2.0))
    assert [found[name].one_type for name in ("mixed", "single")] == [False, False]
    assert found["share"].gpu_memory_mib == 8138


def test_a_window_says_why_a_gang_cannot_start_now(make_pool):
    pool = make_pool()
    for i, (kind, rack) in enumerate([("A", "r1"), ("A", "r2"), ("B", "r1"), ("B", "r2")]):
        pool.node(f"n{i}", 8, kind, rack=rack)
    pool.node("n4", 8, "A", rack="r1")
    pool.arrive("r", 8, gpu_types=("A",))
    pool.running("r")  # on n0: what is left of A is in two racks
    pool.arrive("racks", 8, 2, gpu_types=("A",), topology=one("rack"))
    pool.arrive("types", 8, 3)
    pool.arrive("apart", 1, 3, anti_affinity="db", gpu_types=("A",))
    pool.window()
    assert pool.why("racks") == "topology: no rack has room now for 2 x 8 GPUs"
    assert pool.why("types") == "gpu_type: no single type has room now for 3 x 8 GPUs"
    assert pool.why("apart") == (
        "gpus: 3 x 1 of A needed, each on a node without its like, room now for 2 (16 GPUs free)"
    )


# ── the commit ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_last_look_sees_types_domains_and_workers_that_are_to_be_apart(make_pool):
    pool = make_pool()
    pool.node("a0", 8, "A", rack="r1")
    pool.node("a1", 8, "A", rack="r1")
    pool.node("a2", 8, "A", rack="r2")
    pool.node("a3", 8, "A")
    pool.node("b0", 8, "B", rack="r1")
    pool.node("b1", 8, "B", rack="r1")
    pool.arrive("type", 4, 2)
    assert "one type" in refused(assign(pool, "type", ("a0", 4), ("b0", 4)))
    pool.arrive("rack", 4, 2, topology=one("rack"))
    assert "2 domains of level rack" in refused(assign(pool, "rack", ("a0", 4), ("a2", 4)))
    assert "node a3 names no rack" in refused(assign(pool, "rack", ("a3", 4), ("a3", 4)))
    pool.arrive("node", 4, 2, topology=one("node"))
    assert "2 domains of level node" in refused(assign(pool, "node", ("a0", 4), ("a1", 4)))
    pool.arrive("apart", 1, 2, anti_affinity="db")
    assert "wants them apart" in refused(assign(pool, "apart", ("a0", 1), ("a0", 1)))
    assert assign(pool, "apart", ("a0", 1), ("a1", 1))
    pool.arrive("too", 1, anti_affinity="db")
    assert "has a worker of db already" in refused(assign(pool, "too", ("a1", 1)))
    pool.arrive("other", 1, anti_affinity="web")
    assert set(placed(assign(pool, "other", ("a1", 1)))) == {"other"}
    pool.verify()


def test_a_name_is_on_a_node_until_its_worker_is_gone(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("a", 1, anti_affinity="db")
    pool.running("a")
    (shown,) = pool.state.inventory.classes()
    assert shown.affinity_taken == ("db",)
    pool.arrive("b", 1, anti_affinity="db")
    pool.window()
    assert pool.why("b").startswith("gpus: 1 x 1 of any type needed, each on a node without its like, room now for 0")
    pool.crash()
    pool.verify()
    pool.complete("a")
    (shown,) = pool.state.inventory.classes()
    assert shown.affinity_taken == ()
    assert set(placed(pool.solve())) == {"b"}


# ── reservations ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nodes_kept_free_are_in_one_domain_and_of_one_type(make_pool):
    pool = make_pool(reserve_after_s=60.0)
    for i, (kind, rack) in enumerate([("A", "r1"), ("B", "r2"), ("A", "r2"), ("A", "r2")]):
        pool.node(f"n{i}", 8, kind, rack=rack)
    pool.arrive("r", 1, gpu_types=("A",))
    pool.running("r")  # on n0
    pool.arrive("s", 8, 2, gpu_types=("A",))
    assign(pool, "s", ("n2", 8), ("n3", 8))
    pool.start("s")
    pool.arrive("gang", 8, 2, topology=one("rack"))
    pool.later(61)
    pool.window()
    assert pool.state.reserved == {"n2": "gang", "n3": "gang"}
    pool.complete("s")
    assert placed(pool.window()) == {"gang": {"n2": 8, "n3": 8}}
    pool.verify()


def test_nodes_kept_free_for_workers_that_are_to_be_apart(make_pool):
    pool = make_pool(reserve_after_s=60.0)
    pool.nodes(3)
    for name in ("r0", "r1", "r2"):
        pool.arrive(name, 8)
    pool.running("r0", "r1", "r2")
    pool.arrive("gang", 1, 3, anti_affinity="db")
    pool.later(61)
    pool.window()
    assert set(pool.state.reserved) == {"n0", "n1", "n2"}
    pool.complete("r0")
    assert placed(pool.window()) == {}
    pool.complete("r1")
    pool.complete("r2")
    assert placed(pool.window()) == {"gang": {"n0": 1, "n1": 1, "n2": 1}}


# ── shares by memory ─────────────────────────────────────────────────────────────────────────────────────────────────


def used(there: Node, device: int, memory_mib: int) -> None:
    milli = memory_mib * WHOLE_GPU // there.spec.gpu_memory_mib
    there.take(f"d{device}", Allocation(node_id=there.node_id, gpus=(device,), gpu_milli=milli))


def test_memory_on_two_devices_is_not_memory_on_one():
    there = node("n", 2, gpu_memory_mib=T4_MIB)
    used(there, 0, 12_207)
    used(there, 1, 12_207)
    assert [free * T4_MIB // WHOLE_GPU for free in there.free_milli] == [4069, 4069]
    assert slots(there.room(), ask(gpu_memory_mib=8138)) == 0
    assert Chances(inventory(there).classes()).why_not(ask(gpu_memory_mib=8138))
    assert slots(there.room(), ask(gpu_memory_mib=4069)) == 2


def test_the_fullest_device_with_room_is_taken():
    there = node("n", 4, gpu_memory_mib=T4_MIB)
    for device, free in enumerate([12_207, 8138, 4069]):
        used(there, device, T4_MIB - free)
    assert [free * T4_MIB // WHOLE_GPU for free in there.free_milli] == [12_207, 8138, 4069, 16_276]
    assert slots(there.room(), ask(gpu_memory_mib=8138)) == 1 + 1 + 2
    taken = there.allocate(ask(gpu_memory_mib=8138), 1)
    assert (taken.gpus, taken.gpu_milli) == ((1,), 500)


@pytest.mark.parametrize(
    ("memory", "milli", "device", "taken"),
    [
        (1, WHOLE_GPU, T4_MIB, 1),
        (8138, WHOLE_GPU, T4_MIB, 500),
        (8139, WHOLE_GPU, T4_MIB, 501),
        (8138, 250, T4_MIB, 500),
        (8138, 750, T4_MIB, 750),
        (8138, WHOLE_GPU, 81_920, 100),
        (T4_MIB, WHOLE_GPU, T4_MIB, 1000),
        (2**50, WHOLE_GPU, 2**50, 1000),
        (2**50 - 1, WHOLE_GPU, 2**50, 1000),
    ],
)
def test_what_a_share_takes_of_a_device(memory, milli, device, taken):
    there = node("n", 1, gpu_memory_mib=device)
    assert there.allocate(ask(gpu_memory_mib=memory, gpu_milli=milli), 1).gpu_milli == taken


def test_a_share_is_charged_as_what_it_takes(make_pool):
    pool = make_pool()
    pool.node("n", 1, gpu_memory_mib=T4_MIB)
    for name in ("a", "b", "c"):
        pool.arrive(name, gpu_memory_mib=8138, tenant="t")
        assign(pool, name, ("n", 1))
    assert pool.states("a", "b", "c") == ["placed", "placed", "queued"]
    assert pool.state.usage("t").held_milli == 1000
    pool.verify()
    pool.start("a")
    pool.complete("a")
    assert pool.state.usage("t").held_milli == 500
    assert pool.state.inventory.nodes["n"].free_milli == [500]


def test_a_quota_is_used_up_by_what_shares_take_at_most(make_pool):
    pool = make_pool(tenants={"t": TenantPolicy(quota_gpus=0.5)})
    pool.node("small", 4, "T4", gpu_memory_mib=T4_MIB)
    pool.node("large", 4, "A100", gpu_memory_mib=81_920)
    pool.node("undeclared", 4, "V100")
    for name in ("a", "b", "c"):
        pool.arrive(name, gpu_memory_mib=4069, tenant="t")
    assert sorted(candidates(pool)) == ["a", "b"]
    assert pool.why("c") == "quota: tenant t may hold 0 more GPUs"
    assign(pool, "a", ("large", 1))
    assert pool.state.usage("t").held_milli == 50
    assign(pool, "b", ("small", 1))
    assert pool.state.usage("t").held_milli == 300
    assert "is at its quota" in refused(assign(pool, "c", ("small", 1)))
    pool.arrive("d", gpu_memory_mib=4069, tenant="t", gpu_types=("A100",))
    assert assign(pool, "d", ("large", 1))
    assert pool.states("d") == ["placed"]
    pool.verify()
