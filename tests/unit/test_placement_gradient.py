"""Where devices are shared, a worker goes where the free ones stay useful."""

from __future__ import annotations

from random import Random

import pytest

from streamsched.core.problem import Ask, Candidate, NodeClass, Problem
from streamsched.placement import SolveLimits, check, greedy, solve
from streamsched.placement.gradient import FIT_WEIGHT


def ask(gpus: int = 1, milli: int = 1000, cpu: int = 0, memory: int = 0, types: tuple[str, ...] = ()) -> Ask:
    return Ask(gpus, milli, 0, cpu, memory, types)


def node(node_id: str, idle: int, shares: tuple[int, ...] = (), cpu: int = -1, gpu_type: str = "T4") -> NodeClass:
    return NodeClass(gpu_type=gpu_type, free_gpus=idle, node_ids=(node_id,), shares=shares, free_cpu_milli=cpu)


def job(job_id: str = "j", milli: int = 1000, gpus: int = 1, cpu: int = 0) -> Candidate:
    return Candidate(job_id=job_id, attempt=0, chunks=((gpus, 1),), value=1.0, gpu_milli=milli, cpu_milli=cpu)


def asked(candidates: list[Candidate], classes: list[NodeClass], mix: list[tuple[Ask, int]]) -> Problem:
    return Problem(
        pool="p",
        window=1,
        now=0.0,
        policy="t",
        candidates=tuple(candidates),
        classes=tuple(classes),
        mix=tuple(mix),
    )


def where(p: Problem) -> dict[str, str]:
    return {a.job_id: a.workers[0][0] for a in greedy(p)}


def test_a_share_goes_where_the_rest_of_the_device_can_still_be_used() -> None:
    """Best fit by device would take n0, and leave 300 thousandths there for which nobody asks."""
    classes = [node("n0", 0, (800,)), node("n1", 0, (1000 - 1,))]
    mix = [(ask(milli=500), 1), (ask(milli=499), 3)]
    assert where(asked([job(milli=500)], classes, mix)) == {"j": "n1"}
    assert where(asked([job(milli=500)], classes, [])) == {"j": "n0"}


def test_a_node_whose_cpu_is_gone_gives_its_gpus_to_who_needs_none() -> None:
    classes = [node("a", 1, cpu=1000), node("b", 1, cpu=64_000)]
    mix = [(ask(milli=500, cpu=8000), 3), (ask(cpu=500), 1)]
    assert where(asked([job(cpu=500)], classes, mix)) == {"j": "a"}
    assert where(asked([job(cpu=500)], classes[::-1], mix)) == {"j": "a"}


def test_of_equal_nodes_the_first() -> None:
    mix = [(ask(milli=500), 1)]
    together = NodeClass(gpu_type="T4", free_gpus=2, node_ids=("n1", "n2", "n3"))
    assert where(asked([job(milli=500)], [together], mix)) == {"j": "n1"}
    assert where(asked([job(milli=500)], [node("n3", 2), node("n2", 2)], mix)) == {"j": "n2"}


def test_solve_keeps_the_nodes_that_the_gradient_chose() -> None:
    classes = [node("a", 1, cpu=1000), node("b", 1, cpu=64_000)]
    p = asked([job("x", cpu=500), job("y", cpu=32_000)], classes, [(ask(milli=500, cpu=8000), 1)])
    solution = solve(p, SolveLimits(time_s=None, gap=0.0))
    assert check(p, solution) == []
    assert {a.job_id: a.workers[0][0] for a in solution.assignments} == {"x": "a", "y": "b"}


# ── against the definition, in plain Python ──────────────────────────────────────────────────────────────────────────


def fragmentation(devices: list[int], cpu: int, gpu_type: str, mix: list[tuple[Ask, int]]) -> float:
    """Expected free GPU, in thousandths, that a worker of the mix could not use (section 4 of the paper)."""
    total = sum(count for _, count in mix)
    expected = 0.0
    for one, count in mix:
        usable = [d for d in devices if d >= one.gpu_milli]
        fits = len(usable) >= one.gpus and cpu >= one.cpu_milli and (not one.gpu_types or gpu_type in one.gpu_types)
        expected += count / total * (sum(devices) - sum(usable) if fits else sum(devices))
    return expected


def score(c: NodeClass, candidate: Candidate, mix: list[tuple[Ask, int]], cpu_most: int, gpu_most: int) -> float:
    devices = [*c.shares, *[1000] * c.free_gpus]
    usable = sorted(d for d in devices if d >= candidate.gpu_milli)
    gpus = candidate.chunks[0][0]
    if len(usable) < gpus or c.free_cpu_milli < candidate.cpu_milli:
        return float("inf")
    after = devices.copy()
    for device in usable[:gpus]:
        after[after.index(device)] -= candidate.gpu_milli
    cpu = c.free_cpu_milli - candidate.cpu_milli
    growth = fragmentation(after, cpu, c.gpu_type, mix) - fragmentation(devices, c.free_cpu_milli, c.gpu_type, mix)
    return round(growth + FIT_WEIGHT * 0.5 * (cpu / cpu_most + sum(after) / gpu_most), 6)


@pytest.mark.parametrize("seed", range(60))
def test_the_node_with_the_least_score_is_taken(seed: int) -> None:
    r = Random(seed)
    kinds = [(1, 250), (1, 500), (1, 700), (1, 1000), (2, 1000), (4, 1000)]
    mix = [
        (ask(*r.choice(kinds), cpu=r.choice((0, 2000, 9000)), types=r.choice(((), ("T4",), ("A10", "T4")))), count)
        for count in range(1, 6)
    ]
    classes = [
        node(
            f"n{i}",
            r.randint(0, 4),
            tuple(sorted(r.choice((100, 300, 500, 750)) for _ in range(r.randint(0, 3)))),
            r.choice((1000, 4000, 20_000)),
            r.choice(("T4", "A10")),
        )
        for i in range(12)
    ]
    gpus, milli = r.choice(kinds)
    candidate = job(milli=milli, gpus=gpus, cpu=r.choice((0, 2000, 9000)))
    cpu_most = max(c.free_cpu_milli for c in classes)
    gpu_most = max(sum(c.shares) + 1000 * c.free_gpus for c in classes)
    scores = {c.node_ids[0]: score(c, candidate, mix, cpu_most, gpu_most) for c in classes}
    least = min(scores.values())
    best = min((n for n, s in scores.items() if s == least), default="")
    assert where(asked([candidate], classes, mix)) == ({"j": best} if least < float("inf") else {})
