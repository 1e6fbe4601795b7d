"""A-SRPT against preemptive SRPT that is stepped second by second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.model import JobSpec, NodeSpec
from streamsched.policy.asrpt import AdaptiveSrpt, completions
from streamsched.sim.fast import Preemption, Workload
from streamsched.sim.foresight import Foreseen, by_virtual_machine

FREE = Preemption(restart_s=0.0, checkpoint_s=1.0)
"""Whole seconds and checkpoints every second: nothing is lost."""


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Whole seconds of submission, ascending, and run times of at least one; few distinct ones, so that they tie."""
    rows = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=25))
    return np.cumsum([gap for gap, _ in rows]).tolist(), [run for _, run in rows]


def stepped(submit: Sequence[int], run: Sequence[int]) -> tuple[list[int], list[int]]:
    """(first starts, finishes): each second goes to the job with least left, of equal ones to the first that came."""
    left, start, finish = list(run), [-1] * len(run), [-1] * len(run)
    now = 0
    while any(left):
        here = [job for job in range(len(run)) if submit[job] <= now and left[job]]
        if here:
            job = min(here, key=lambda job: (left[job], job))
            start[job] = now if start[job] < 0 else start[job]
            left[job] -= 1
            finish[job] = now + 1 if not left[job] else -1
        now += 1
    return start, finish


@given(arrivals())
def test_with_perfect_predictions_on_one_gpu_it_is_exact_preemptive_srpt(case: tuple[list[int], list[int]]) -> None:
    submit, run = case
    start, finish = stepped(submit, run)
    jobs = Workload(np.array(submit, float), np.array(run, float), np.ones(len(run), np.int64))
    known = Foreseen(jobs.duration_s[:, None], np.arange(len(run)))
    outcome = by_virtual_machine([1], preemption=FREE).run(jobs, known)
    assert outcome.start_s.tolist() == start
    assert outcome.finish_s.tolist() == finish
    assert completions(jobs.submit_s, jobs.duration_s, 1.0).tolist() == finish


@given(arrivals())
def test_released_jobs_start_when_the_virtual_machine_has_completed_them(case: tuple[list[int], list[int]]) -> None:
    """On a cluster with room for all of them, so that nobody waits for anything else."""
    submit, run = case
    _, finish = stepped(submit, run)
    jobs = Workload(np.array(submit, float), np.array(run, float), np.full(len(run), 8))
    nodes = [8] * len(run)
    known = Foreseen(jobs.duration_s[:, None] * len(run), np.arange(len(run)))
    outcome = by_virtual_machine(nodes, released=True).run(jobs, known)
    assert outcome.start_s.tolist() == finish
    assert outcome.wait_s.tolist() == [ends - begins for ends, begins in zip(finish, submit, strict=True)]
    assert outcome.finish_s.tolist() == [ends + took for ends, took in zip(finish, run, strict=True)]
    assert len(outcome.placed) == len(run)


@given(arrivals())
def test_the_order_at_any_moment_is_that_of_the_times_of_completion(case: tuple[list[int], list[int]]) -> None:
    """What the live rule says of the jobs that are there, and what is reckoned afterwards from all of them."""
    submit, run = case
    due = completions(np.array(submit, float), np.array(run, float), 1.0)
    rule = AdaptiveSrpt()
    state = ClusterState("p", SchedulerConfig(), rule)
    state.handle(ev.NodeJoined(spec=NodeSpec(node_id="n", gpu_type="V", gpus=1)), 0.0)
    for number, (now, run_s) in enumerate(zip(submit, run, strict=True)):
        spec = JobSpec(job_id=f"j{number}", submitted_at=float(now), gpus_per_worker=1, estimate_s=float(run_s))
        state.handle(ev.JobArrived(spec=spec), float(now))
        scores = rule.scores(list(state.jobs.values()), state, float(now))
        assert np.argsort(-np.array(scores)).tolist() == np.argsort(due[: number + 1], kind="stable").tolist()
