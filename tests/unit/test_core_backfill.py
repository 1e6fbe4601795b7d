"""EASY and conservative backfilling in the core: for whom nodes are kept free, and what the others are told."""

from __future__ import annotations

import pytest
from core_builder import placed, stops

from streamsched.core import events as ev
from streamsched.core.instructions import SolveWindow
from streamsched.core.run_times import Said
from streamsched.core.tenants import TenantPolicy


def asked(pool):
    return [c.job_id for i in pool.window() if isinstance(i, SolveWindow) for c in i.problem.candidates]


@pytest.fixture
def pool(make_pool):
    """Two nodes of 8: on n0 6 GPUs run until 100, on n1 7 until 200, as was said."""

    def make(backfill: str, **config):
        pool = make_pool(backfill=backfill, **config)
        pool.node("n0", 8)
        pool.node("n1", 8)
        pool.arrive("six", 6, estimate_s=100.0)
        pool.running("six")
        pool.arrive("seven", 7, estimate_s=200.0)
        pool.running("seven")
        pool.arrive("eight", 8, estimate_s=50.0)
        return pool

    return make


def test_easy_keeps_the_nodes_where_the_first_without_room_starts_first(pool):
    p = pool("easy")
    p.arrive("long", 2, estimate_s=1_000.0)
    p.arrive("unknown", 2)
    assert asked(p) == []
    assert p.why("eight").startswith("gpus: 1 x 8 of any type needed, room now for 0")
    assert p.why("eight").endswith("on n0 if runs end as said")
    assert p.why("long") == "behind: it would delay eight, for which nodes are kept free"
    assert p.why("unknown") == p.why("long")


def test_easy_lets_start_what_ends_in_time_or_elsewhere(pool):
    p = pool("easy")
    p.arrive("short", 2, estimate_s=20.0)
    p.arrive("long", 1, estimate_s=1_000.0)
    assert asked(p) == ["short", "long"]
    assert placed(p.solve()) == {"short": {"n0": 2}, "long": {"n1": 1}}


def test_easy_protects_one_job_and_conservative_all(pool):
    for backfill, expected in (("easy", ["long"]), ("conservative", [])):
        p = pool(backfill)
        p.arrive("eight more", 8, estimate_s=50.0)
        p.arrive("long", 1, estimate_s=1_000.0)
        assert asked(p) == expected


def test_no_time_is_known_where_nothing_is_said_of_the_runs(make_pool):
    p = make_pool(backfill="easy")
    p.node("n0", 8)
    p.arrive("six", 6)
    p.running("six")
    p.arrive("eight", 8)
    p.arrive("long", 2, estimate_s=1_000.0)
    assert asked(p) == ["long"]
    assert p.why("eight").endswith("no time is known at which it could start")


def test_who_cannot_start_for_a_reason_of_its_own_holds_up_nobody(pool):
    """A job over its quota is not without room."""
    p = pool("easy", tenants={"poor": TenantPolicy(quota_gpus=0.0)})
    p.command(ev.CancelRequested, "eight")
    p.arrive("over", 8, tenant="poor", estimate_s=50.0)
    p.arrive("long", 2, estimate_s=1_000.0)
    assert asked(p) == ["long"]


def test_with_kept_nodes_nobody_waits_for_a_run_to_be_stopped(make_pool):
    """It would neither start nor be protected: the small one behind it starts, and the run goes on."""
    p = make_pool(backfill="easy", preempt="class", preempt_interval_s=0.0)
    p.node("n0", 8)
    p.arrive("low", 7, estimate_s=500.0, preemptible=True, priority_class="low")
    p.running("low")
    p.arrive("high", 8, estimate_s=50.0, priority_class="high")
    p.arrive("small", 1, estimate_s=10.0)
    out = p.solve()
    assert stops(out) == []
    assert placed(out) == {"small": {"n0": 1}}


def test_parts_of_a_device_end_together(make_pool):
    """The two GPUs are idle when the last part on each has ended, at 100; long parts are not let in before."""
    p = make_pool(backfill="easy")
    p.node("n0", 2)
    for name in ("a", "b", "c"):
        p.arrive(name, 1, gpu_milli=600 if name != "c" else 300, estimate_s=100.0)
    p.running("a", "b", "c")
    p.arrive("whole", 2, estimate_s=10.0)
    p.arrive("long part", 1, gpu_milli=100, estimate_s=1e5)
    p.arrive("short part", 1, gpu_milli=100, estimate_s=50.0)
    assert asked(p) == ["short part"]
    assert p.why("whole").endswith("starts in 100 s on n0 if runs end as said")


def test_a_node_that_refused_the_job_is_not_kept_for_it(make_pool):
    p = make_pool(backfill="easy", backoff_s=1.0)
    p.node("n1", 8)
    p.arrive("runs", 1, estimate_s=282.0)
    p.running("runs")
    p.node("n0", 8)
    p.arrive("eight", 8, estimate_s=50.0)
    assert placed(p.solve()) == {"eight": {"n0": 8}}
    p.report(ev.RunRejected, "eight", reason="no", node_id="n0")
    p.later(2.0)
    p.arrive("long", 4, estimate_s=1e5)
    assert asked(p) == ["long"]
    assert p.why("eight").endswith("starts in 280 s on n1 if runs end as said")
    assert placed(p.solve()) == {"long": {"n0": 4}}


class Grown(Said):
    """A run that has gone on for 50 s will take 1,000 s more than was said, the job `sure` 10 s."""

    def total_s(self, jobs, ran_s):
        told = zip(jobs, ran_s, strict=True)
        return [
            10.0 if j.spec.job_id == "sure" else j.spec.estimate_s + (1_000.0 if ran >= 50 else 0) for j, ran in told
        ]


def test_nodes_are_kept_by_what_is_believed_after_so_much_running(pool):
    p = pool("easy")
    p.state.run_times = Grown()
    p.window()
    assert "starts in 100 s on n0" in p.why("eight")
    p.later(60.0)
    p.arrive("sure", 2, estimate_s=1e5)
    p.arrive("long", 2, estimate_s=1e5)
    assert asked(p) == ["sure"]
    assert "starts in 1040 s on n0" in p.why("eight")


def test_what_earlier_runs_did_counts_as_done(make_pool):
    """The job of 300 s ran for 100 s before its executor gave it back, so that its second run is to end after 200 s."""
    p = make_pool(backfill="easy")
    p.node("n0", 8)
    p.arrive("runs", 6, estimate_s=300.0)
    p.running("runs")
    p.later(100.0)
    p.report(ev.RunPreempted, "runs")
    p.later(1000.0)
    p.running("runs")
    p.arrive("eight", 8, estimate_s=50.0)
    p.window()
    assert "starts in 200 s on n0" in p.why("eight")


def test_run_times_of_all_that_wait_are_one_question(make_pool):
    class Counting(Said):
        def __init__(self):
            self.asked = []

        def total_s(self, jobs, ran_s):
            self.asked.append(len(jobs))
            return super().total_s(jobs, ran_s)

    pool = make_pool(backfill="easy")
    pool.nodes(2, 8)
    pool.arrive("a", 7, estimate_s=100.0)
    pool.arrive("b", 7, estimate_s=100.0)
    pool.running("a", "b")
    pool.arrive("big", 8, 2, estimate_s=10.0)
    for number in range(200):
        pool.arrive(f"w{number}", 1, estimate_s=1e6)
    pool.state.run_times = counting = Counting()
    pool.window()
    assert counting.asked.count(1) < 5
    assert len(counting.asked) < 10
