"""A-SRPT: the virtual machine counted by hand, and the rule on a cluster's state."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from core_builder import Pool

from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.model import JobSpec, NodeSpec
from streamsched.core.run_times import Said
from streamsched.policy import asrpt, by_name
from streamsched.policy.asrpt import PATIENCE, AdaptiveSrpt, VirtualMachine, completions


def test_the_virtual_machine_counted_by_hand() -> None:
    """Speed 2. Job 0 has 20 of work; at 1, with 18 left, job 1 comes with 4 and takes over until 3; at 2 job 2 comes
    with 2, as much as job 1 has left, and waits for it until 3; then it takes until 4, and job 0 the 9 that follow."""
    machine = VirtualMachine(2.0)
    assert machine.add(0, 20.0, 0.0) == []
    assert machine.add(1, 4.0, 1.0) == []
    assert machine.left() == {0: 18.0, 1: 4.0}
    assert machine.add(2, 2.0, 2.0) == []
    assert machine.left() == {0: 18.0, 1: 2.0, 2: 2.0}
    assert machine.advance(3.5) == [(1, 3.0)]
    assert machine.left() == {0: 18.0, 2: 1.0}
    assert machine.drain() == [(2, 4.0), (0, 13.0)]
    assert machine.left() == {}
    assert completions(np.array([0.0, 1.0, 2.0]), np.array([20.0, 4.0, 2.0]), 2.0).tolist() == [13.0, 3.0, 4.0]


def test_time_does_not_go_back_and_a_machine_moves() -> None:
    machine = VirtualMachine(1.0)
    machine.advance(5.0)
    with pytest.raises(ValueError, match="does not go back"):
        machine.add(0, 1.0, 4.0)
    with pytest.raises(ValueError, match="above 0"):
        VirtualMachine(0.0)


def cluster(rule: AdaptiveSrpt) -> ClusterState:
    """Two nodes of 8: the virtual machine does 16 GPU-seconds a second."""
    state = ClusterState("p", SchedulerConfig(), rule)
    for name in ("a", "b"):
        state.handle(ev.NodeJoined(spec=NodeSpec(node_id=name, gpu_type="V", gpus=8)), 0.0)
    return state


def arrive(
    state: ClusterState,
    job_id: str,
    now: float,
    estimate_s: float | None,
    gpus: int = 8,
    workers: int = 1,
    labels: Mapping[str, str] | None = None,
) -> None:
    spec = JobSpec(
        job_id=job_id,
        submitted_at=now,
        workers=workers,
        gpus_per_worker=gpus,
        estimate_s=estimate_s,
        labels=dict(labels or {}),
    )
    state.handle(ev.JobArrived(spec=spec), now)


def order(rule: AdaptiveSrpt, state: ClusterState, now: float) -> list[str]:
    jobs = list(state.jobs.values())
    scores = rule.scores(jobs, state, now)
    return [job.spec.job_id for _, job in sorted(zip(scores, jobs, strict=True), key=lambda pair: -pair[0])]


def test_what_the_virtual_machine_has_completed_goes_before_what_it_has_not() -> None:
    """`long` needs 100 s of the whole machine. `short` (20 s) is there from 10 to 30; `shorter` (1 s) comes at 40."""
    rule = by_name("asrpt")
    assert isinstance(rule, AdaptiveSrpt)
    state = cluster(rule)
    arrive(state, "long", 0.0, 200.0)
    arrive(state, "short", 10.0, 40.0)
    assert order(rule, state, 10.0) == ["short", "long"]
    arrive(state, "shorter", 40.0, 2.0)
    assert order(rule, state, 40.0) == ["short", "shorter", "long"]
    # At 125 the 79 s that `long` had left at 41 are over: who comes then is behind it, however short.
    arrive(state, "late", 125.0, 1.0)
    assert order(rule, state, 125.0) == ["short", "shorter", "long", "late"]


def test_a_new_owner_comes_to_the_same_order() -> None:
    rule = AdaptiveSrpt()
    state = cluster(rule)
    for number, estimate_s in enumerate([300.0, 10.0, None, 80.0, 80.0]):
        arrive(state, f"j{number}", 20.0 * number, estimate_s)
        order(rule, state, 20.0 * number)
    assert order(AdaptiveSrpt(), state, 100.0) == order(rule, state, 100.0)


def test_what_the_state_forgets_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gone` (10 s of the machine) is cancelled and forgotten, `long` has had 20 s by the time `late` comes: with
    `gone` in the machine until 10 it would have 40 s left, without it 30 s."""
    monkeypatch.setattr(asrpt, "_FORGET_FROM", -4)
    rule = AdaptiveSrpt()
    state = cluster(rule)
    arrive(state, "gone", 0.0, 20.0)
    arrive(state, "long", 0.0, 100.0)
    order(rule, state, 0.0)
    del state.jobs["gone"]
    order(rule, state, 0.0)
    arrive(state, "late", 20.0, 65.0)
    assert order(rule, state, 20.0) == ["long", "late"]


@pytest.mark.parametrize(
    ("gpus", "workers", "labels", "waits"),
    [
        (8, 1, {}, False),
        (8, 1, {"communication": "heavy"}, True),
        (8, 1, {"communication": "light"}, False),
        (8, 2, {}, True),
    ],
)
def test_heavy_jobs_wait_for_few_nodes_but_not_for_long(
    gpus: int, workers: int, labels: dict[str, str], waits: bool
) -> None:
    rule = AdaptiveSrpt()
    state = cluster(rule)
    arrive(state, "j", 0.0, 1_000.0, gpus, workers, labels)
    assert rule.wants_consolidation(state.jobs["j"], state, 0.0) is waits
    assert rule.wants_consolidation(state.jobs["j"], state, PATIENCE * 1_000.0 - 1.0) is waits
    assert not rule.wants_consolidation(state.jobs["j"], state, PATIENCE * 1_000.0)


def test_jobs_that_are_over_are_not_asked_about():
    class Noting(Said):
        def __init__(self):
            self.asked = []

        def whole_s(self, jobs):
            self.asked += [job.spec.job_id for job in jobs]
            return super().whole_s(jobs)

    pool = Pool(ranker=AdaptiveSrpt())
    pool.node("n0", 8)
    for job_id in ("over", "waits"):
        pool.arrive(job_id, 8, estimate_s=10.0)
    pool.command(ev.CancelRequested, "over")
    pool.state.run_times = noting = Noting()
    AdaptiveSrpt().scores(pool.state.queued_jobs(), pool.state, pool.now)
    assert noting.asked == ["waits"]
