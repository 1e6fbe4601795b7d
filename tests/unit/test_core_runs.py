"""Runs: every report in every state of a run, leases, backoff, refusals, shares of devices, late and odd reports."""

from __future__ import annotations

import pytest
from core_builder import codes, first_fit, placed, stops
from msgspec.structs import replace

from streamsched.core import events as ev
from streamsched.core.instructions import Place, SolveWindow
from streamsched.core.model import RunState

BAD_EXIT = {"exit_code": 1}


def run_in(make_pool, situation):
    """A pool with job `a` whose run on n0 is as the name says. Nothing else can hold the job."""
    pool = make_pool(lost_grace_s=30.0, backoff_s=2.0)
    pool.node("n0", 8)
    pool.arrive("a", 8, preemptible=True)
    pool.solve()
    if situation in ("running", "preempting", "cancelling", "lost-running"):
        pool.later(10)
        pool.start("a")
    pool.later(10)
    match situation:
        case "preempting":
            pool.send(ev.NodeDrained(node_id="n0"))
        case "cancelling":
            pool.command(ev.CancelRequested, "a")
        case "lost-placed" | "lost-running":
            pool.lose("n0")
        case "given-up":
            pool.lose("n0")
            pool.later(30)
            assert stops(pool.window()) == [("revoke", "a:0:1")]
    pool.later(10)
    return pool


# What becomes of the job, and whether the run is over, by (situation, report). Times of reports are after any stop.
OUTCOMES = {
    "placed": {
        "started": ("running", False),
        "progress": ("placed", False),
        "completed": ("completed", True),
        "exit 1": ("failed", True),
        "failed": ("failed", True),
        "failed, retryable": ("queued", True),
        "preempted": ("queued", True),
        "rejected": ("queued", True),
        "released": ("queued", True),
    },
    "running": {
        "started": ("running", False),
        "progress": ("running", False),
        "completed": ("completed", True),
        "exit 1": ("failed", True),
        "failed": ("failed", True),
        "failed, retryable": ("queued", True),
        "preempted": ("queued", True),
        "rejected": ("queued", True),
        "released": ("queued", True),
    },
    "preempting": {
        "started": ("stopping", False),
        "progress": ("stopping", False),
        "completed": ("queued", True),
        "exit 1": ("queued", True),
        "failed": ("queued", True),
        "failed, retryable": ("queued", True),
        "preempted": ("queued", True),
        "rejected": ("queued", True),
        "released": ("queued", True),
    },
    "cancelling": {
        "started": ("stopping", False),
        "progress": ("stopping", False),
        "completed": ("cancelled", True),
        "exit 1": ("cancelled", True),
        "failed": ("cancelled", True),
        "failed, retryable": ("cancelled", True),
        "preempted": ("cancelled", True),
        "rejected": ("cancelled", True),
        "released": ("cancelled", True),
    },
    "lost-placed": {
        "started": ("placed", False),
        "progress": ("placed", False),
        "completed": ("completed", True),
        "exit 1": ("failed", True),
        "failed": ("failed", True),
        "failed, retryable": ("queued", True),
        "preempted": ("queued", True),
        "rejected": ("queued", True),
        "released": ("queued", True),
    },
    "lost-running": {
        "started": ("running", False),
        "progress": ("running", False),
        "completed": ("completed", True),
        "exit 1": ("failed", True),
        "failed": ("failed", True),
        "failed, retryable": ("queued", True),
        "preempted": ("queued", True),
        "rejected": ("queued", True),
        "released": ("queued", True),
    },
    "given-up": {
        "started": ("queued", False),
        "progress": ("queued", False),
        "completed": ("completed", True),
        "exit 1": ("queued", True),
        "failed": ("queued", True),
        "failed, retryable": ("queued", True),
        "preempted": ("queued", True),
        "rejected": ("queued", True),
        "released": ("queued", True),
    },
}

REPORTS = {
    "started": (ev.RunStarted, {}),
    "progress": (ev.RunProgressed, {"fraction": 0.5, "checkpointed": True}),
    "completed": (ev.RunCompleted, {}),
    "exit 1": (ev.RunCompleted, BAD_EXIT),
    "failed": (ev.RunFailed, BAD_EXIT),
    "failed, retryable": (ev.RunFailed, {"retryable": True}),
    "preempted": (ev.RunPreempted, {}),
    "rejected": (ev.RunRejected, {"node_id": "n0"}),
    "released": (ev.RunReleased, {}),
}


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("situation", OUTCOMES)
def test_each_report_in_each_state_of_a_run(make_pool, situation, report):
    pool = run_in(make_pool, situation)
    kind, fields = REPORTS[report]
    state, over = OUTCOMES[situation][report]
    out = pool.report(kind, "a", **fields)
    assert pool.states("a") == [state]
    assert ("a:0:1" not in pool.state.runs) == over
    assert not stops(out)
    if over:
        assert pool.state.inventory.nodes["n0"].free_gpus() == 8
        before = pool.job("a")
        for again, more in REPORTS.values():
            assert codes(pool.report(again, "a", **more)) == ["absorb:stale-run"]
        assert pool.job("a") == before


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_whose_names_do_not_match_is_refused(make_pool, report):
    pool = run_in(make_pool, "running")
    kind, fields = REPORTS[report]
    before = pool.job("a")
    event = kind(placement_id="a:0:1", job_id="other", time=pool.now, **fields)
    assert codes(pool.send(event)) == ["refuse:invalid"]
    assert codes(pool.send(kind(placement_id="never", job_id="a", time=pool.now, **fields))) == ["absorb:stale-run"]
    assert pool.job("a") == before


def test_a_completion_from_before_the_stop_is_genuine(make_pool):
    pool = run_in(make_pool, "preempting")
    pool.complete("a", time=pool.now - 10)
    assert pool.states("a") == ["completed"]


@pytest.mark.parametrize(("after_s", "state"), [(-1, "completed"), (0, "completed"), (0.1, "queued")])
def test_only_a_completion_of_before_the_stop_was_said_ends_the_job(make_pool, after_s, state):
    pool = run_in(make_pool, "preempting")
    stop_at = pool.run("a").stop_at
    pool.complete("a", time=stop_at + after_s)
    assert pool.states("a") == [state]


def test_a_completion_without_a_start_completes(make_pool):
    pool = run_in(make_pool, "placed")
    pool.complete("a")
    assert pool.states("a") == ["completed"]
    assert codes(pool.start("a")) == ["absorb:stale-run"]


def test_a_second_start_is_absorbed_and_does_not_move_the_first(make_pool):
    pool = run_in(make_pool, "running")
    before = pool.run("a")
    pool.later(10)
    assert codes(pool.start("a")) == ["absorb:duplicate-start"]
    assert pool.run("a") == before


@pytest.mark.parametrize("time", [0.0, 1e10])
def test_the_clock_of_an_executor_cannot_bend_what_a_job_is_charged(make_pool, time):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("a", 4)
    pool.solve()
    pool.later(10)
    pool.report(ev.RunStarted, "a", time=time)
    pool.report(ev.RunProgressed, "a", time=time, checkpointed=True)
    run = pool.run("a")
    assert run.placed_at <= run.started_at <= pool.now
    assert run.last_checkpoint_at is not None
    assert run.placed_at <= run.last_checkpoint_at <= pool.now
    pool.later(10)
    pool.complete("a")
    assert pool.job("a").attained_gpu_s in (4 * 10, 4 * 20)


def test_progress_goes_to_the_job_only_from_its_present_run(make_pool):
    pool = run_in(make_pool, "given-up")
    first = pool.placements["a"]
    pool.report(ev.RunProgressed, "a", first, fraction=0.9)
    assert pool.job("a").progress == 0.0
    pool = run_in(make_pool, "running")
    pool.report(ev.RunProgressed, "a", fraction=0.25)
    assert pool.job("a").progress == 0.25


# ── leases and backoff ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_placement_that_is_not_started_within_its_lease_is_revoked(make_pool):
    pool = make_pool(lease_s=60.0, backoff_s=2.0)
    pool.node("n0")
    pool.arrive("a")
    pool.solve()
    assert pool.placements["a"].lease_until == pool.now + 60
    pool.later(60)
    assert pool.window() == []
    pool.later(1)
    assert stops(pool.window()) == [("revoke", "a:0:1")]
    pool.later(60)
    assert pool.window() == []
    pool.report(ev.RunReleased, "a")
    assert pool.states("a") == ["queued"]
    assert pool.job("a").not_before == pool.now + 2
    assert pool.solve() == []
    assert pool.why("a") == "backoff: not started within its lease"
    pool.later(2)
    assert [i.placement_id for i in pool.solve() if isinstance(i, Place)] == ["a:0:2"]


def test_a_start_ends_the_lease(make_pool):
    pool = make_pool(lease_s=60.0)
    pool.node("n0")
    pool.arrive("a")
    pool.running("a")
    pool.later(1e6)
    assert pool.window() == []


def test_a_start_after_the_revoke_does_not_bring_the_run_back(make_pool):
    pool = make_pool(lease_s=60.0)
    pool.node("n0")
    pool.arrive("a")
    pool.solve()
    pool.later(61)
    pool.window()
    assert codes(pool.start("a")) == ["absorb:late-start"]
    assert pool.states("a") == ["stopping"]
    pool.report(ev.RunReleased, "a")
    assert pool.states("a") == ["queued"]


def test_a_lease_outlives_a_crash(make_pool):
    pool = make_pool(lease_s=60.0)
    pool.node("n0")
    pool.arrive("a")
    pool.solve()
    pool.crash()
    pool.later(61)
    assert stops(pool.window()) == [("revoke", "a:0:1")]


def test_backoff_doubles_up_to_its_bound_and_a_start_ends_it(make_pool):
    pool = make_pool(backoff_s=2.0, backoff_max_s=10.0)
    pool.node("n0")
    pool.arrive("a")
    waits = []
    for _ in range(5):
        assert placed(pool.solve()) == {"a": {"n0": 1}}
        pool.report(ev.RunRejected, "a", node_id="n0", reason="no image")
        waits.append(pool.job("a").not_before - pool.now)
        pool.later(waits[-1])
    assert waits == [2, 4, 8, 10, 10]
    assert pool.job("a").reason == "refused by n0: no image"
    pool.running("a")
    assert (pool.job("a").refusals, pool.job("a").refused_by) == (0, ())


def test_backoff_does_not_overflow(make_pool):
    pool = make_pool(quarantine_after=10**6)
    pool.node("n0")
    pool.arrive("a")
    for _ in range(1100):
        pool.solve()
        pool.report(ev.RunRejected, "a", node_id="n0")
        pool.later(600)
    assert pool.job("a").refusals == 1100


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def ask(pool):
    out = [i for i in pool.window() if isinstance(i, SolveWindow)]
    return {c.job_id: c for c in out[0].problem.candidates}


def test_a_job_avoids_nodes_that_refused_it_while_others_could_take_it(make_pool):
    pool = make_pool(backoff_s=0.0)
    pool.nodes(2)
    pool.arrive("a", 8)
    assert placed(pool.solve()) == {"a": {"n0": 8}}
    pool.report(ev.RunRejected, "a", node_id="n0")
    assert placed(pool.solve()) == {"a": {"n1": 8}}
    pool.report(ev.RunRejected, "a", node_id="n1")
    assert pool.job("a").refused_by == ("n0", "n1")
    assert placed(pool.solve()) == {"a": {"n0": 8}}


def test_a_job_asks_a_node_again_when_the_others_are_lost(make_pool):
    pool = make_pool(backoff_s=0.0)
    pool.nodes(2)
    pool.arrive("a", 8)
    pool.solve()
    pool.report(ev.RunRejected, "a", node_id="n0")
    assert ask(pool)["a"].avoid_nodes == ("n0",)
    pool.lose("n1")
    assert ask(pool)["a"].avoid_nodes == ()


def test_a_gang_asks_a_node_again_when_the_others_are_too_few(make_pool):
    pool = make_pool(backoff_s=0.0)
    pool.nodes(3)
    pool.arrive("a", 8, 2)
    pool.solve()
    pool.report(ev.RunRejected, "a", node_id="n0")
    assert placed(pool.solve()) == {"a": {"n1": 8, "n2": 8}}
    pool.report(ev.RunRejected, "a", node_id="n1")
    assert placed(pool.solve()) == {"a": {"n0": 8, "n1": 8}}


def test_a_refusal_is_forgotten_when_the_job_has_waited_for_long(make_pool):
    pool = make_pool(backoff_s=1.0, backoff_max_s=100.0)
    pool.nodes(2)
    pool.arrive("a", 8)
    pool.solve()
    pool.report(ev.RunRejected, "a", node_id="n0")
    pool.later(99)
    assert ask(pool)["a"].avoid_nodes == ("n0",)
    pool.later(1)
    assert ask(pool)["a"].avoid_nodes == ()


def test_refusals_of_different_jobs_quarantine_a_node_for_a_while(make_pool):
    pool = make_pool(quarantine_after=3, quarantine_s=600.0, backoff_s=0.0)
    pool.node("n0")
    for i in range(3):
        pool.arrive(f"j{i}")
        pool.solve()
        pool.report(ev.RunRejected, f"j{i}", node_id="n0")
        pool.command(ev.CancelRequested, f"j{i}")
    pool.arrive("a")
    assert pool.solve() == []
    assert pool.free() == {}
    pool.later(599)
    assert pool.solve() == []
    pool.crash()
    pool.later(1)
    assert placed(pool.solve()) == {"a": {"n0": 1}}


def test_a_node_whose_executor_is_dead_does_not_take_one_job_after_the_other(make_pool):
    pool = make_pool(lease_s=60.0, quarantine_after=3)
    pool.node("n0")
    for i in range(3):
        assert pool.free() == {"n0": 8 - i}
        pool.arrive(f"j{i}")
        pool.solve()
        pool.later(61)
        pool.window()
    assert pool.free() == {}
    pool.node("n1")
    pool.arrive("a")
    assert placed(pool.solve()) == {"a": {"n1": 1}}
    pool.verify()


def test_an_expired_lease_of_a_gang_blames_no_node(make_pool):
    pool = make_pool(lease_s=60.0, quarantine_after=1)
    pool.nodes(2)
    pool.arrive("a", 8, 2)
    pool.solve()
    pool.later(61)
    pool.window()
    assert set(pool.free()) == {"n0", "n1"}


def test_one_bad_job_does_not_quarantine_a_node(make_pool):
    pool = make_pool(quarantine_after=3, backoff_s=0.0)
    pool.node("n0")
    pool.arrive("a")
    for _ in range(10):
        pool.solve()
        pool.report(ev.RunRejected, "a", node_id="n0")
    assert pool.free() == {"n0": 8}


def test_a_start_on_a_node_ends_its_row_of_refusals(make_pool):
    pool = make_pool(quarantine_after=3, backoff_s=0.0)
    pool.node("n0")
    for i in range(4):
        pool.arrive(f"j{i}")
        pool.solve()
        if i == 1:
            pool.start("j1")
            pool.complete("j1")
        else:
            pool.report(ev.RunRejected, f"j{i}", node_id="n0")
            pool.command(ev.CancelRequested, f"j{i}")
    assert pool.free() == {"n0": 8}


def test_an_uncordoned_node_begins_with_a_clean_slate(make_pool):
    pool = make_pool(quarantine_after=2, backoff_s=0.0)
    pool.node("n0")
    for i in range(3):
        pool.arrive(f"j{i}")
        pool.solve()
        pool.report(ev.RunRejected, f"j{i}", node_id="n0")
        pool.command(ev.CancelRequested, f"j{i}")
        if i == 1:
            assert pool.free() == {}
            pool.send(ev.NodeUncordoned(node_id="n0"))
    assert pool.free() == {"n0": 8}


@pytest.mark.parametrize("named", [None, "n1", "elsewhere"])
def test_a_refusal_counts_only_against_a_node_of_the_run(make_pool, named):
    """n1 is there but not the run's; a report that names it, or nobody, is about the nodes of the run."""
    pool = make_pool(quarantine_after=1, backoff_s=0.0)
    pool.nodes(2)
    pool.arrive("a", 8)
    pool.solve()
    pool.report(ev.RunRejected, "a", node_id=named)
    assert pool.job("a").refused_by == ("n0",)
    assert pool.free() == {"n1": 8}


def test_a_gang_refused_by_nobody_in_particular_blames_no_node(make_pool):
    pool = make_pool(quarantine_after=1)
    pool.nodes(8)
    pool.arrive("a", 8, 8)
    pool.solve()
    pool.report(ev.RunRejected, "a")
    assert len(pool.free()) == 8
    assert len(pool.job("a").refused_by) == 8
    assert pool.job("a").reason == "refused by n0, n1, n2, n3, n4 and 3 more: no reason given"


# ── releases ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_partial_release_gives_back_only_what_it_names(make_pool):
    pool = make_pool()
    pool.nodes(4)
    pool.arrive("a", 8, 4)
    pool.running("a")
    pool.later(10)
    pool.report(ev.RunReleased, "a", node_ids=("n1", "n2"))
    assert pool.free() == {"n0": 0, "n1": 8, "n2": 8, "n3": 0}
    assert pool.states("a") == ["running"]
    assert codes(pool.report(ev.RunReleased, "a", node_ids=("n1", "nowhere"))) == ["absorb:not-held"]
    pool.later(10)
    pool.complete("a")
    assert pool.free() == {f"n{i}": 8 for i in range(4)}
    assert pool.job("a").attained_gpu_s == 2 * 8 * 10 + 2 * 8 * 20


def test_releases_of_all_parts_end_a_stopped_run(make_pool):
    pool = make_pool()
    pool.nodes(2)
    pool.arrive("a", 8, 2, preemptible=True)
    pool.running("a")
    pool.send(ev.NodeDrained(node_id="n0"))
    pool.report(ev.RunReleased, "a", node_ids=("n0",))
    assert pool.states("a") == ["stopping"]
    pool.report(ev.RunReleased, "a", node_ids=("n1",))
    assert pool.states("a") == ["queued"]
    assert pool.job("a").preemptions == 1


# ── shares ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_shares_fill_a_device_before_they_open_the_next(make_pool):
    pool = make_pool()
    pool.node("n0", 2)
    for i in range(4):
        pool.arrive(f"s{i}", gpu_milli=400)
        pool.solve()
    assert [pool.run(f"s{i}").allocations[0].gpus for i in range(4)] == [(0,), (0,), (1,), (1,)]
    pool.arrive("s4", gpu_milli=400)
    pool.arrive("s5", gpu_milli=200)
    pool.solve()
    assert pool.states("s4", "s5") == ["queued", "placed"]
    assert pool.state.inventory.nodes["n0"].shares() == (200,)


def test_a_share_is_not_given_from_a_whole_device_that_is_held(make_pool):
    pool = make_pool()
    pool.node("n0", 1)
    pool.arrive("whole")
    pool.arrive("share", gpu_milli=1)
    pool.solve()
    assert pool.states("whole", "share") == ["placed", "queued"]


def test_a_gang_of_shares_on_one_node(make_pool):
    pool = make_pool()
    pool.node("n0", 2)
    pool.arrive("a", workers=4, gpu_milli=500)
    pool.running("a")
    assert [a.gpus for a in pool.run("a").allocations] == [(0,), (0,), (1,), (1,)]
    pool.later(10)
    pool.complete("a")
    assert pool.free() == {"n0": 2}
    assert pool.job("a").attained_gpu_s == 20.0


# ── solutions that come late ─────────────────────────────────────────────────────────────────────────────────────────


def question(pool):
    return next(i.problem for i in pool.window() if isinstance(i, SolveWindow))


def late(pool, problem):
    return pool.send(ev.WindowSolved(solution=first_fit(problem)))


def test_a_solution_for_a_cancelled_or_held_job_is_left_out(make_pool):
    pool = make_pool()
    pool.node("n0")
    for job_id in ("cancelled", "held", "stays"):
        pool.arrive(job_id)
    problem = question(pool)
    pool.command(ev.CancelRequested, "cancelled")
    pool.command(ev.HoldRequested, "held")
    out = late(pool, problem)
    assert placed(out) == {"stays": {"n0": 1}}
    assert codes(out) == ["absorb:stale-assignment"] * 2


@pytest.mark.parametrize(
    "event",
    [
        ev.NodeLost(node_id="n0"),
        ev.NodeCordoned(node_id="n0"),
        ev.NodeDrained(node_id="n0"),
        ev.NodeCapacityChanged(node_id="n0", gpus=7),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_solution_for_a_node_that_has_changed_is_left_out(make_pool, event):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a", 8)
    problem = question(pool)
    pool.send(event)
    assert codes(late(pool, problem)) == ["absorb:stale-assignment"]
    assert pool.states("a") == ["queued"]


def test_two_solutions_of_one_question_place_once(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a", 2)
    pool.arrive("b", 2)
    problem = question(pool)
    assert placed(late(pool, problem)) == {"a": {"n0": 2}, "b": {"n0": 2}}
    assert codes(late(pool, problem)) == ["absorb:stale-assignment"] * 2


def test_a_solution_for_an_earlier_attempt_is_left_out(make_pool):
    pool = make_pool(backoff_s=0.0)
    pool.node("n0")
    pool.arrive("a")
    problem = question(pool)
    late(pool, problem)
    pool.report(ev.RunRejected, "a", node_id="n0")
    assert pool.states("a") == ["queued"]
    assert codes(late(pool, problem)) == ["absorb:stale-assignment"]


def test_a_solution_of_before_a_crash_is_as_good_as_any(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a")
    problem = question(pool)
    pool.crash()
    assert placed(late(pool, problem)) == {"a": {"n0": 1}}


@pytest.mark.parametrize(
    "workers",
    [(), (("n0", 4),), (("n0", 4), ("n1", 4), ("n1", 4)), (("n0", 8),), (("n0", 4), ("nowhere", 4)), (("n0", 4),) * 3],
)
def test_an_assignment_that_is_not_the_gang_is_left_out(make_pool, workers):
    pool = make_pool()
    pool.nodes(2)
    pool.arrive("a", 4, 2)
    solution = first_fit(question(pool))
    bad = replace(solution, assignments=(replace(solution.assignments[0], workers=workers),))
    assert codes(pool.send(ev.WindowSolved(solution=bad))) == ["absorb:stale-assignment"]
    assert pool.free() == {"n0": 8, "n1": 8}


def test_a_remainder_is_a_worker_of_its_own(make_pool):
    pool = make_pool()
    pool.nodes(2)
    pool.arrive("a", 8, 1, remainder_gpus=4)
    assert placed(pool.solve()) == {"a": {"n0": 8, "n1": 4}}


@pytest.mark.parametrize("wanted", [{"gpu_types": ("A100",)}, {"cpu_milli": 3000}, {"memory_mib": 3000}])
def test_a_commit_looks_at_type_cpu_and_memory(make_pool, wanted):
    """The solver is wrong on purpose: it is asked about a job without these wishes."""
    pool = make_pool()
    pool.node("n0", 8, cpu_milli=2000, memory_mib=2000)
    pool.node("n1", 8, "A100", cpu_milli=4000, memory_mib=4000)
    pool.arrive("a", 1, **wanted)
    solution = first_fit(question(pool))
    assert [n for a in solution.assignments for n, _ in a.workers] == ["n1"]
    bad = replace(solution, assignments=(replace(solution.assignments[0], workers=(("n0", 1),)),))
    assert codes(pool.send(ev.WindowSolved(solution=bad))) == ["absorb:stale-assignment"]


def test_a_run_that_ends_while_it_is_a_gang_on_the_way_out_is_stopping_until_all_is_back(make_pool):
    pool = make_pool()
    pool.nodes(3)
    pool.arrive("a", 8, 3, preemptible=True)
    pool.running("a")
    pool.send(ev.NodeDrained(node_id="n2"))
    pool.report(ev.RunReleased, "a", node_ids=("n0",))
    assert pool.run("a").state is RunState.STOPPING
    assert pool.free() == {"n0": 8, "n1": 0}
