"""Occupancy of nodes over time: counted by hand for two nodes and three jobs, and equal from both ways to simulate."""

from __future__ import annotations

import numpy as np
import pytest

from streamsched.core.config import SchedulerConfig
from streamsched.policy import by_name
from streamsched.sim import fast
from streamsched.sim.metrics import Schedule, from_core, from_fast, intervals, summary
from streamsched.sim.simulator import SimOptions, simulate
from streamsched.sim.timeline import Fragmentation, Runs, fragmentation, heat, means
from streamsched.sim.workload import job, nodes_of

# Two nodes of 4 GPUs. Node 0: 2 GPUs in [0, 4), 4 GPUs in [4, 6). Node 1: 1 GPU in [2, 8).
RUNS = Runs(
    node=np.array([0, 0, 1]),
    gpus=np.array([2, 4, 1]),
    start_s=np.array([0.0, 4.0, 2.0]),
    end_s=np.array([4.0, 6.0, 8.0]),
    node_gpus=np.array([4, 4]),
)
ASKED = np.array([2, 4, 1])


def by_span(told: Fragmentation, what: str, edges: list[float]) -> list[float]:
    found = means(told.time_s, getattr(told, what), np.array(edges))
    return [round(x, 12) for x in found.tolist()]


def test_free_gpus_on_partly_used_nodes_are_fragmented() -> None:
    told = fragmentation(RUNS, ASKED, 0.0)
    # [0, 2): 2 of 6 free ones; [2, 4): all 5; [4, 6): 3 of 3; [6, 8): 3 of 7; then none of 8.
    assert by_span(told, "partly", [0, 2, 4, 6, 8, 9]) == [round(x, 12) for x in (2 / 6, 1.0, 1.0, 3 / 7, 0.0)]


def test_expected_fragmentation_is_what_a_job_of_the_workload_cannot_have() -> None:
    told = fragmentation(RUNS, ASKED, 0.0)
    # With 2 free on a node one job of three (of 4 GPUs) cannot have them; with 3 free so; with 4 free all can.
    expected = (2 / 6 / 3, 1 / 3, 1 / 3, 3 / 7 / 3, 0.0)
    assert by_span(told, "expected", [0, 2, 4, 6, 8, 9]) == [round(x, 12) for x in expected]


def test_a_full_cluster_and_an_empty_one_are_not_fragmented() -> None:
    full = Runs(np.array([0, 1]), np.array([4, 4]), np.zeros(2), np.full(2, 5.0), np.array([4, 4]))
    told = fragmentation(full, np.array([8]), -1.0)
    assert by_span(told, "partly", [-1, 0, 5, 6]) == [0.0, 0.0, 0.0]
    assert by_span(told, "expected", [-1, 0, 5, 6]) == [0.0, 0.0, 0.0]


def test_a_node_too_small_for_some_jobs_is_fragmented_also_when_empty() -> None:
    runs = Runs(np.array([0]), np.array([4]), np.array([1.0]), np.array([2.0]), np.array([4, 2]))
    told = fragmentation(runs, np.array([4, 1]), 0.0)
    # Of 6 free GPUs the 2 of the small node are lost to half of the jobs; then they are all that is free.
    assert by_span(told, "expected", [0, 1, 2, 3]) == [round(2 / 6 / 2, 12), 0.5, round(2 / 6 / 2, 12)]
    assert by_span(told, "partly", [0, 1, 2, 3]) == [0.0, 0.0, 0.0]


def test_a_job_without_duration_leaves_no_trace() -> None:
    runs = Runs(np.array([0]), np.array([4]), np.array([1.0]), np.array([1.0]), np.array([4]))
    assert fragmentation(runs, np.array([4]), 0.0).partly.tolist() == [0.0, 0.0]


def test_what_follows_at_once_on_a_node_does_not_show_between() -> None:
    """At 4 the node goes from 2 GPUs to 4 in use: at no moment are all free."""
    told = fragmentation(RUNS, ASKED, 0.0)
    assert told.time_s.tolist() == [0.0, 0.0, 2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize(
    ("edges", "expected"),
    [([0, 10], [(0 * 2 + 2 * 3 + 4 * 5) / 10]), ([0, 2, 4, 10], [0.0, 2.0, 22 / 6]), ([9, 11], [4.0])],
)
def test_means_of_steps(edges: list[float], expected: list[float]) -> None:
    found = means(np.array([2.0, 5.0]), np.array([2, 4]), np.array(edges, dtype=np.float64))
    assert found.tolist() == pytest.approx(expected)


def test_the_heat_map_has_each_nodes_share_in_use() -> None:
    shares = heat(RUNS, 0.0, 8.0, columns=4)
    assert shares.tolist() == [[0.5, 0.5, 1.0, 0.0], [0.0, 0.25, 0.25, 0.25]]
    # Within a column it is the mean: node 0 has 2 GPUs until 4 and 4 until 6.
    assert heat(RUNS, 0.0, 10.0, columns=2)[0].tolist() == pytest.approx([(4 * 2 + 1 * 4) / 20, 1 * 4 / 20])


def test_nodes_share_rows_of_the_heat_map_when_there_are_many() -> None:
    assert heat(RUNS, 0.0, 8.0, rows=1, columns=4).tolist() == [[0.25, 0.375, 0.625, 0.125]]


def test_what_lies_outside_the_heat_map_is_cut() -> None:
    assert heat(RUNS, 5.0, 7.0, columns=2).tolist() == [[1.0, 0.0], [0.25, 0.25]]
    assert not heat(RUNS, 8.0, 8.0, columns=2).any()


# ── from both ways ───────────────────────────────────────────────────────────────────────────────────────────────────

# (submit, run time, GPUs) on two nodes of 8: the third is a gang of a whole node and 3 GPUs.
JOBS = [(0.0, 10.0, 6), (1.0, 5.0, 8), (2.0, 20.0, 11), (3.0, 4.0, 2)]


def by_core(jobs: list[tuple[float, float, int]], nodes: int, policy: str = "fcfs") -> Schedule:
    """`las` with preemption."""
    stops = policy == "las"
    config = SchedulerConfig(
        policy=policy, window_jobs=100, reservations_max=0, preempt="score" if stops else "off", restart_s=7.0
    )
    known = [job(n, submit, run, gpus, preemptible=stops) for n, (submit, run, gpus) in enumerate(jobs)]
    options = SimOptions(checkpoint_s=30.0)
    return from_core(simulate(known, nodes_of([(nodes, 8, "V")]), config, by_name(policy), options))


def rows(runs: Runs | None) -> list[tuple[int, int, float, float]]:
    assert runs is not None
    columns = (runs.node, runs.gpus, runs.start_s, runs.end_s)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_core_and_compiled_path_tell_the_same_runs_and_figures() -> None:
    submit, run_s, gpus = (np.array(column) for column in zip(*JOBS, strict=True))
    workload = fast.Workload(submit, run_s, gpus.astype(np.int64))
    compiled = from_fast(workload, fast.simulate(workload, [8, 8]), np.full(4, True), ("default",) * 4, [8, 8])
    core = by_core(JOBS, 2)
    # The gang starts when both nodes have room: at 10, as the first job ends.
    small, gang = [(0, 2, 3.0, 7.0), (0, 6, 0.0, 10.0), (1, 8, 1.0, 6.0)], [(0, 8, 10.0, 30.0), (1, 3, 10.0, 30.0)]
    assert rows(core.runs) == sorted(small + gang)
    assert rows(compiled.runs) == rows(core.runs)
    assert summary(compiled, 0, 0.0) == summary(core, 0, 0.0)
    assert intervals(compiled) == intervals(core)
    # Until the last submission at 3: [0, 1) 2 of 10 free GPUs, [1, 3) both that are.
    assert summary(core, 0, 0.0)["mean_fragmentation"] == pytest.approx((1 * 2 / 10 + 2 * 1) / 3)


def test_a_stopped_run_ends_where_it_was_stopped() -> None:
    """After 400 s the first job makes room for 20 s; 390 s of its work are safe, and to start again takes 7 s."""
    schedule = by_core([(0.0, 500.0, 8), (400.0, 20.0, 8)], 1, "las")
    assert schedule.preemptions.tolist() == [1, 0]
    assert rows(schedule.runs) == [(0, 8, 0.0, 400.0), (0, 8, 400.0, 420.0), (0, 8, 420.0, 537.0)]
    # The node was full all the time, and not for a moment more than full.
    assert schedule.runs is not None
    assert by_span(fragmentation(schedule.runs, schedule.gpus, 0.0), "partly", [0, 400, 420, 537]) == [0.0, 0.0, 0.0]
    assert heat(schedule.runs, 0.0, 537.0, columns=3).tolist() == [[1.0, 1.0, 1.0]]


def test_the_compiled_path_tells_where_stopped_jobs_ran() -> None:
    """The first job gives way at 12.5 s, as it has had 150 GPU-seconds; 12 s of its work are safe."""
    workload = fast.Workload(np.array([0.0, 10.0]), np.array([500.0, 20.0]), np.array([12, 8]))
    outcome = fast.simulate_las(workload, [8, 8], levels_gpu_s=(150.0,), restart_s=7.0, checkpoint_s=1.0)
    schedule = from_fast(workload, outcome, np.full(2, True), ("a", "b"), [8, 8])
    first = [(0, 8, 0.0, 12.5), (1, 4, 0.0, 12.5), (0, 8, 32.5, 527.5), (1, 4, 32.5, 527.5)]
    assert rows(schedule.runs) == sorted([*first, (0, 8, 12.5, 32.5)])
    told = summary(schedule, 0, 0.0)
    assert told["preemptions"] == 1
    # From 0 to 10, the last submission, the 12 GPUs of the first.
    assert told["gpu_utilisation"] == pytest.approx(12 / 16)
    assert schedule.lines.queued.tolist() == [0, 1, 1, 0, 0]
    assert schedule.lines.busy_gpus.tolist() == [12, 12, 8, 12, 0]
