"""The queue that is kept in order against one that is sorted anew for each window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from core_builder import first_fit
from hypothesis import given, settings
from hypothesis import strategies as st

from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.instructions import Place, SolveWindow
from streamsched.core.model import Job, JobSpec, JobState, NodeSpec, TopologyLevel, TopologyWish
from streamsched.core.problem import Problem
from streamsched.core.queue import Queue
from streamsched.core.tenants import TenantPolicy
from streamsched.policy import by_name


class NotStatic:
    """A static rule that does not say so."""

    def __init__(self, name: str) -> None:
        self._rule = by_name(name)
        self.name = name

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> Sequence[float]:
        return self._rule.scores(jobs, state, now)


SPECS = st.builds(
    dict,
    gpus_per_worker=st.integers(1, 4),
    workers=st.sampled_from([1, 1, 1, 2]),
    tenant=st.sampled_from(["a", "b"]),
    priority_class=st.sampled_from(["normal", "normal", "high"]),
    estimate_s=st.sampled_from([None, 10.0, 100.0]),
    topology=st.sampled_from([None, None, TopologyWish(level=TopologyLevel.NODE)]),
)
STEPS = st.one_of(
    st.tuples(st.just("arrive"), SPECS),
    st.tuples(st.sampled_from(["hold", "release", "cancel", "raise"]), st.integers(0, 20)),
    st.tuples(st.sampled_from(["complete", "reject", "window"]), st.integers(0, 20)),
    st.tuples(st.just("later"), st.sampled_from([1, 3, 50])),
)


class _Two:
    """The same events to two pools: one with a static rule, one sorting its queue for each window."""

    def __init__(self, rule: str, config: SchedulerConfig) -> None:
        self.kept = ClusterState("p", config, by_name(rule))
        self.sorted = ClusterState("p", config, NotStatic(rule))
        self.now, self.jobs = 1000.0, 0

    def send(self, event: ev.CoreEvent) -> list[Any]:
        out = self.kept.handle(event, self.now)
        assert out == self.sorted.handle(event, self.now)
        return out

    def window(self) -> Problem | None:
        out = self.send(ev.WindowElapsed())
        assert self.kept.window is not None or not self.kept.waiting()
        asked = [i.problem for i in out if isinstance(i, SolveWindow)]
        if self.kept.window is not None and self.kept.waiting():
            assert self.sorted.window is not None
            assert list(self.kept.window.ranking) == list(self.sorted.window.ranking)
            assert self.kept.window.complete == self.sorted.window.complete
        return asked[0] if asked else None

    def step(self, kind: str, what: Any) -> None:
        names = sorted(self.kept.jobs)
        job = self.kept.jobs[names[what % len(names)]] if isinstance(what, int) and names else None
        match kind, job:
            case "arrive", _:
                spec = JobSpec(job_id=f"j{self.jobs}", submitted_at=self.now, **what)
                self.jobs += 1
                self.send(ev.JobArrived(spec=spec))
            case "later", _:
                self.now += what
            case "window", _:
                problem = self.window()
                if problem is not None:
                    for placed in self.send(ev.WindowSolved(solution=first_fit(problem))):
                        if isinstance(placed, Place):
                            self.send(
                                ev.RunStarted(placement_id=placed.placement_id, job_id=placed.job_id, time=self.now)
                            )
            case (("hold" | "release" | "cancel" | "raise"), Job()):
                name = job.spec.job_id
                commands: dict[str, ev.CoreEvent] = {
                    "hold": ev.HoldRequested(job_id=name),
                    "release": ev.ReleaseRequested(job_id=name),
                    "cancel": ev.CancelRequested(job_id=name),
                    "raise": ev.ReprioritiseRequested(job_id=name, priority_class="high"),
                }
                self.send(commands[kind])
            case (("complete" | "reject"), Job(state=JobState.RUNNING, placement_id=str(run))):
                made = ev.RunCompleted if kind == "complete" else ev.RunRejected
                self.send(made(placement_id=run, job_id=job.spec.job_id, time=self.now))


@pytest.mark.parametrize("backfill", ["skip", "none"])
@given(
    rule=st.sampled_from(["fcfs", "sjf", "smallest", "lcfs"]),
    steps=st.lists(STEPS, max_size=40),
    window_jobs=st.sampled_from([2, 64]),
    quota=st.sampled_from([None, 3.0]),
)
@settings(max_examples=150)
def test_kept_in_order_and_sorted_anew_give_the_same_windows(
    rule: str, steps: list[tuple[str, Any]], window_jobs: int, quota: float | None, backfill: Any
) -> None:
    config = SchedulerConfig(
        policy=rule, backfill=backfill, window_jobs=window_jobs, reserve_after_s=40.0,
        tenants={"a": TenantPolicy(quota_gpus=quota)},
    )  # fmt: skip
    two = _Two(rule, config)
    for i, gpus in enumerate([4, 3]):
        two.send(ev.NodeJoined(spec=NodeSpec(node_id=f"n{i}", gpu_type="V100", gpus=gpus)))
    for kind, what in [*steps, ("window", 0), ("later", 100), ("window", 0)]:
        two.step(kind, what)
        _sound(two.kept)
    two.kept.verify()


def _sound(state: ClusterState) -> None:
    """The kept queue holds what another that is filled at once would hold."""
    assert state.ranker is not None
    state.queue.refresh(state, state.ranker, state.now)
    fresh = Queue()
    for job_id in state.index.queued:
        fresh.file(state.jobs[job_id])
    fresh.refresh(state, state.ranker, state.now)
    assert list(fresh.in_order()) == list(state.queue.in_order())
