"""Rules that look at the cluster's state: cases counted by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.instructions import Place, SolveWindow
from streamsched.core.model import Job, JobSpec, NodeSpec
from streamsched.core.problem import Solution, SolveStatus
from streamsched.core.run_times import Said
from streamsched.core.tenants import TenantPolicy
from streamsched.placement import greedy
from streamsched.policy import by_name
from streamsched.policy.gittins import in_steps
from streamsched.policy.rules import UNKNOWN_RUN_S


def cluster(weights: Mapping[str, float] | None = None) -> ClusterState:
    """Two nodes of 8."""
    tenants = {name: TenantPolicy(weight=weight) for name, weight in (weights or {}).items()}
    state = ClusterState("p", SchedulerConfig(tenants=tenants), by_name("fcfs"))
    for name in ("a", "b"):
        state.handle(ev.NodeJoined(spec=NodeSpec(node_id=name, gpu_type="V", gpus=8)), 0.0)
    return state


def arrive(state: ClusterState, *jobs: tuple[str, str, int], now: float = 0.0, estimate_s: float | None = None) -> None:
    """(id, tenant, GPUs) of each."""
    for job_id, tenant, gpus in jobs:
        spec = JobSpec(
            job_id=job_id,
            submitted_at=now,
            tenant=tenant,
            gpus_per_worker=gpus,
            estimate_s=estimate_s,
            preemptible=True,
        )
        state.handle(ev.JobArrived(spec=spec), now)


def start(state: ClusterState, now: float = 0.0) -> None:
    [ask] = [i for i in state.handle(ev.WindowElapsed(), now) if isinstance(i, SolveWindow)]
    assignments = greedy(ask.problem)
    solution = Solution(window=ask.problem.window, status=SolveStatus.GREEDY, assignments=assignments)
    for place in state.handle(ev.WindowSolved(solution=solution), now):
        if isinstance(place, Place):
            state.handle(ev.RunStarted(placement_id=place.placement_id, job_id=place.job_id, time=now), now)


def scores(state: ClusterState, rule: str, now: float) -> dict[str, float]:
    jobs = list(state.jobs.values())
    return dict(zip((job.spec.job_id for job in jobs), by_name(rule).scores(jobs, state, now), strict=True))


def order(state: ClusterState, rule: str, now: float = 0.0) -> list[str]:
    """Of the waiting jobs."""
    jobs = list(state.queued_jobs())
    found = by_name(rule).scores(jobs, state, now)
    return [jobs[place].spec.job_id for place in sorted(range(len(jobs)), key=lambda p: (-found[p], jobs[p].seq))]


def test_max_min_serves_who_holds_least_and_deals_out_in_turns() -> None:
    """Red holds 12 of 16 GPUs, blue none: blue's 8 and 4 bring it to 12, level with red, whose job came first."""
    state = cluster()
    arrive(state, ("r1", "red", 8), ("r2", "red", 4))
    start(state)
    arrive(state, ("r3", "red", 8), ("r4", "red", 8), ("b1", "blue", 8), ("b2", "blue", 4), ("b3", "blue", 4))
    assert order(state, "maxmin") == ["b1", "b2", "r3", "b3", "r4"]


def test_max_min_counts_by_weight() -> None:
    """12 GPUs of weight 4 are 3 of weight 1: red's next (2 more of its share) comes before blue's second."""
    state = cluster({"red": 4.0})
    arrive(state, ("r1", "red", 8), ("r2", "red", 4))
    start(state)
    arrive(state, ("r3", "red", 8), ("b1", "blue", 8), ("b2", "blue", 4))
    assert order(state, "maxmin") == ["b1", "r3", "b2"]


def test_multifactor_adds_age_size_and_fair_share() -> None:
    """Red has used everything so far: its factor is 2^-(1 / 0.5), blue's is 1."""
    state = cluster()
    arrive(state, ("r1", "red", 8))
    start(state)
    arrive(state, ("r2", "red", 16), ("b1", "blue", 4), now=100.0)
    told = scores(state, "multifactor-fairshare", 100.0 + 302_400.0)
    assert told["b1"] == pytest.approx(500 + 1_000 * 4 / 16 + 10_000)
    assert told["r2"] == pytest.approx(500 + 1_000 + 10_000 / 4)
    assert scores(state, "multifactor", 100.0 + 302_400.0)["r2"] == pytest.approx(1_500)


def test_nobody_has_used_anything_yet() -> None:
    state = cluster()
    arrive(state, ("r1", "red", 8), ("b1", "blue", 16))
    assert scores(state, "multifactor-fairshare", 0.0) == {"r1": 10_500, "b1": 11_000}


def test_what_remains_is_the_estimate_without_what_was_had() -> None:
    state = cluster()
    arrive(state, ("long", "t", 8), estimate_s=1_000.0)
    start(state)
    arrive(state, ("short", "t", 8), estimate_s=300.0)
    arrive(state, ("unknown", "t", 8))
    assert scores(state, "srtf", 0.0) == {"long": -1_000, "short": -300, "unknown": -UNKNOWN_RUN_S}
    assert scores(state, "srtf", 750.0) == {"long": -250, "short": -300, "unknown": -UNKNOWN_RUN_S}
    assert scores(state, "srtf", 5_000.0)["long"] == 0


def test_least_attained_service_goes_by_levels_of_gpu_seconds() -> None:
    """8 GPUs reach the level of 300 GPU-seconds after 37.5 s."""
    state = cluster()
    arrive(state, ("runs", "t", 8))
    start(state)
    arrive(state, ("waits", "t", 8))
    assert scores(state, "las", 37.0) == {"runs": 0, "waits": 0}
    assert scores(state, "las", 38.0) == {"runs": -1, "waits": 0}


def test_max_min_does_not_count_running_jobs_twice() -> None:
    """Red runs 4 and waits with 4, so does blue: running and waiting jobs of both are dealt out in turns by arrival."""
    state = cluster()
    arrive(state, ("r1", "red", 4), ("b1", "blue", 4))
    start(state)
    arrive(state, ("r2", "red", 4), ("b2", "blue", 4))
    assert scores(state, "maxmin", 0.0) == {"r1": 0, "b1": -1, "r2": -2, "b2": -3}


class Believed(Said):
    """Other run times than the jobs say, and ranks that are not what remains."""

    def whole_s(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        return [{"a": 30.0, "b": 20.0}.get(job.spec.job_id) for job in jobs]

    def gittins_s(self, jobs: Sequence[Job], ran_s: Sequence[float]) -> Sequence[float | None]:
        return [{"a": 5.0, "b": 10.0 + ran}.get(job.spec.job_id) for job, ran in zip(jobs, ran_s, strict=True)]


def test_rules_go_by_what_is_believed_not_by_what_was_said() -> None:
    state = cluster()
    arrive(state, ("a", "t", 8), ("b", "t", 8), ("unknown", "t", 8), estimate_s=7.0)
    assert order(state, "sjf") == ["a", "b", "unknown"]
    state.run_times = Believed()
    assert order(state, "sjf") == ["b", "a", "unknown"]
    assert scores(state, "srtf", 0.0) == {"a": -30, "b": -20, "unknown": -UNKNOWN_RUN_S}
    assert scores(state, "gittins", 0.0) == {"a": -1, "b": -1, "unknown": -8}, "in steps of a factor of four"


def test_ranks_are_of_jobs_that_have_run_so_long() -> None:
    state = cluster()
    state.run_times = Believed()
    arrive(state, ("a", "t", 8), ("b", "t", 8))
    start(state)
    assert scores(state, "gittins", 60.0) == {"a": -1, "b": -3}
    assert scores(state, "srtf", 40.0) == {"a": 0, "b": 0}


def test_by_estimates_gittins_is_srtf_in_steps() -> None:
    state = cluster()
    arrive(state, ("long", "t", 8), estimate_s=1_000.0)
    start(state)
    arrive(state, ("short", "t", 8), estimate_s=300.0)
    for now in (0.0, 750.0, 5_000.0):
        left = np.array([-score for score in scores(state, "srtf", now).values()])
        assert list(scores(state, "gittins", now).values()) == list(-in_steps(left))


def test_the_queue_is_ranked_anew_where_other_run_times_are_believed() -> None:
    state = cluster()
    state.ranker = by_name("sjf")
    arrive(state, ("a", "t", 8), ("b", "t", 8), estimate_s=7.0)

    def first() -> str:
        [ask] = [i for i in state.handle(ev.WindowElapsed(), 0.0) if isinstance(i, SolveWindow)]
        return ask.problem.candidates[0].job_id

    assert first() == "a"
    state.run_times = Believed()
    assert first() == "b"
