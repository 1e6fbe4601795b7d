"""What could ever fit: against brute force over tiny inventories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsched.core.inventory import Inventory
from streamsched.core.model import WHOLE_GPU, JobSpec, NodeSpec, NodeState
from streamsched.core.node import Node, NodeRecord


def inventory(*specs: NodeSpec) -> Inventory:
    pool = Inventory()
    for spec in specs:
        pool.add(Node(NodeRecord(spec=spec, capacity=spec.gpus)))
    return pool


def node(name: str, gpus: int, gpu_type: str = "A", **more: int) -> NodeSpec:
    return NodeSpec(node_id=name, gpu_type=gpu_type, gpus=gpus, **more)


def ask(gpus: int, workers: int = 1, **more: object) -> JobSpec:
    return JobSpec(job_id="j", submitted_at=0.0, gpus_per_worker=gpus, workers=workers, **more)


@st.composite
def node_specs(draw: st.DrawFn) -> tuple[NodeSpec, ...]:
    count = draw(st.integers(0, 3))
    return tuple(
        node(
            f"n{i}",
            draw(st.integers(0, 4)),
            draw(st.sampled_from("AB")),
            cpu_milli=draw(st.integers(0, 4)),
            memory_mib=draw(st.integers(0, 4)),
        )
        for i in range(count)
    )


@st.composite
def job_specs(draw: st.DrawFn) -> JobSpec:
    gpus = draw(st.integers(1, 4))
    share = draw(st.sampled_from([WHOLE_GPU, WHOLE_GPU, 999, 500, 400, 334]))
    return ask(
        gpus if share == WHOLE_GPU else 1,
        draw(st.integers(1, 5)),
        remainder_gpus=draw(st.integers(0, gpus - 1)) if share == WHOLE_GPU else 0,
        gpu_milli=share,
        gpu_types=draw(st.sampled_from([(), ("A",), ("B",), ("A", "B"), ("C",)])),
        mixed_types=draw(st.booleans()),
        cpu_milli=draw(st.integers(0, 3)),
        memory_mib=draw(st.integers(0, 3)),
    )


def could_fit(specs: tuple[NodeSpec, ...], job: JobSpec) -> bool:
    """Every way to put the workers on nodes, devices one by one; on one type unless types may be mixed."""
    if job.mixed_types:
        return _could_fit_mixed(specs, job)
    return any(_could_fit_mixed(tuple(s for s in specs if s.gpu_type == t), job) for t in "AB")


def _could_fit_mixed(specs: tuple[NodeSpec, ...], job: JobSpec) -> bool:
    workers = [gpus for gpus, count in job.chunks() for _ in range(count)]
    room = [([WHOLE_GPU] * s.gpus, s.cpu_milli or None, s.memory_mib or None) for s in specs]
    return _search(workers, job, specs, room)


def _search(workers, job, specs, room) -> bool:
    if not workers:
        return True
    for i, (devices, cpu, memory) in enumerate(room):
        if job.gpu_types and specs[i].gpu_type not in job.gpu_types:
            continue
        if (cpu is not None and cpu < job.cpu_milli) or (memory is not None and memory < job.memory_mib):
            continue
        roomy = [d for d, free in enumerate(devices) if free >= job.gpu_milli][: workers[0]]
        if len(roomy) < workers[0]:
            continue
        taken = [free - job.gpu_milli if d in roomy else free for d, free in enumerate(devices)]
        left = (
            taken,
            None if cpu is None else cpu - job.cpu_milli,
            None if memory is None else memory - job.memory_mib,
        )
        if _search(workers[1:], job, specs, [*room[:i], left, *room[i + 1 :]]):
            return True
    return False


@given(node_specs(), job_specs())
def test_never_fits_is_exact(specs, job):
    why = inventory(*specs).never_fits(job)
    assert (why is None) == could_fit(specs, job), why


@given(node_specs(), job_specs(), st.sets(st.sampled_from(["n0", "n1", "n2"])))
def test_holds_without_is_exact(specs, job, without):
    rest = tuple(s for s in specs if s.node_id not in without)
    assert inventory(*specs).holds_without(job, frozenset(without)) == could_fit(rest, job)


def test_holds_without_leaves_out_what_is_not_in_use():
    pool = inventory(node("n0", 4), node("n1", 4))
    assert pool.holds_without(ask(4), frozenset({"n0"}))
    pool.nodes["n1"].adopt(NodeRecord(spec=node("n1", 4), capacity=4, state=NodeState.CORDONED))
    pool.refile(pool.nodes["n1"])
    assert not pool.holds_without(ask(4), frozenset({"n0"}))


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (ask(1, gpu_types=("X", "Y")), "gpu_type: the pool has no X or Y node"),
        (ask(9), "gpus: a worker needs 9 GPUs, the largest node has 8"),
        (ask(8, 2), "gpus: 2 workers are needed, all nodes together could hold 1"),
        (ask(1, cpu_milli=101), "cpu: a worker needs 101 milli-cores, the largest node has 100"),
        (ask(1, memory_mib=201), "memory: a worker needs 201 MiB, the largest node has 200"),
        (ask(5, 1, remainder_gpus=4), "gpus: no room for the worker of 4 GPUs beside 1 full ones"),
    ],
    ids=["type", "worker", "gang", "cpu", "memory", "remainder"],
)
def test_the_reason_names_the_resource(job, reason):
    assert inventory(node("n0", 8, cpu_milli=100, memory_mib=200)).never_fits(job) == reason


def test_an_empty_pool_fits_nothing():
    assert inventory().never_fits(ask(1)) == "gpu_type: the pool has no any type node"


def test_classes_follow_each_change():
    pool = inventory(node("n1", 8), node("n0", 8), node("n2", 4))
    assert [c.node_ids for c in pool.classes()] == [("n2",), ("n0", "n1")]
    again = pool.nodes["n0"]
    again.adopt(NodeRecord(spec=again.spec, capacity=8, lost=True))
    pool.refile(again)
    assert [c.node_ids for c in pool.classes()] == [("n2",), ("n1",)]
    again.adopt(NodeRecord(spec=node("n0", 8), capacity=4))
    pool.refile(again)
    assert [(c.node_ids, c.free_gpus, c.total_gpus) for c in pool.classes()] == [(("n0", "n2"), 4, 4), (("n1",), 8, 8)]
