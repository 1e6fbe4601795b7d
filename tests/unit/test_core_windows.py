"""Windows: which jobs are asked about, in which order, and what the others are told."""

from __future__ import annotations

import pytest
from core_builder import Pool, placed, reloaded, stops
from msgspec.structs import replace

from streamsched.core import cluster
from streamsched.core import events as ev
from streamsched.core.instructions import SolveWindow
from streamsched.core.model import TopologyLevel, TopologyWish
from streamsched.core.problem import Ask, Assignment, Solution, SolveStatus
from streamsched.core.tenants import TenantPolicy
from streamsched.placement import solve
from streamsched.policy.rules import Smallest


def problem(pool):
    (ask,) = [i for i in pool.window() if isinstance(i, SolveWindow)]
    return ask.problem


def order(pool):
    return [c.job_id for c in problem(pool).candidates]


def ranked(pool):
    pool.window()
    return [ranked.job_id for ranked in pool.state.window.ranking]


class Flat:
    """Everybody is equal."""

    name = "flat"

    def scores(self, jobs, state, now):
        return [0.0] * len(jobs)


def test_no_window_without_waiting_jobs(make_pool):
    pool = make_pool()
    pool.node("n0")
    assert pool.window() == []


def test_no_question_when_nobody_could_start_but_everybody_has_a_reason(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("a", 8)
    pool.running("a")
    pool.arrive("b", 1)
    assert pool.window() == []
    assert pool.why("b") == "gpus: 1 x 1 of any type needed, room now for 0 (0 GPUs free)"


def test_a_window_asks_with_the_state_of_jobs_and_nodes(make_pool):
    pool = make_pool()
    pool.node("n1", 8, "V100", rack="r1", cpu_milli=4000)
    pool.node("n0", 8, "V100", rack="r1", cpu_milli=4000)
    pool.node("n2", 4, "A100", nvlink="d", zone="z", memory_mib=100)
    pool.arrive("a", 2, 3, gpu_types=("V100",), cpu_milli=10, memory_mib=20)
    pool.arrive("r", 4, 1, remainder_gpus=2)
    asked = problem(pool)
    assert (asked.pool, asked.window, asked.now, asked.policy) == ("p", 1, pool.now, "fcfs")
    a, r = asked.candidates
    assert (a.job_id, a.attempt, a.chunks, a.gpu_types) == ("a", 0, ((2, 3),), ("V100",))
    assert (a.cpu_milli, a.memory_mib, a.avoid_nodes) == (10, 20, ())
    assert r.chunks == ((4, 1), (2, 1))
    assert a.value > 0 < r.value
    assert [(c.gpu_type, c.node_ids, c.free_gpus) for c in asked.classes] == [
        ("A100", ("n2",), 4),
        ("V100", ("n0", "n1"), 8),
    ]
    assert [(c.free_cpu_milli, c.free_memory_mib) for c in asked.classes] == [(-1, 100), (4000, -1)]
    assert [(c.rack, c.nvlink, c.zone, c.total_gpus) for c in asked.classes] == [("", "d", "z", 4), ("r1", "", "", 8)]


def test_windows_are_numbered(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a")
    assert [problem(pool).window for _ in range(3)] == [1, 2, 3]


def test_nodes_that_become_alike_become_one_class(make_pool):
    pool = make_pool()
    pool.nodes(3)
    pool.arrive("a", 4)
    pool.running("a")
    pool.arrive("b", 1)
    assert [c.node_ids for c in problem(pool).classes] == [("n0",), ("n1", "n2")]
    pool.complete("a")
    assert [c.node_ids for c in problem(pool).classes] == [("n0", "n1", "n2")]


def test_order_is_class_then_score_then_arrival(make_pool):
    pool = make_pool(ranker=Smallest(), priority_classes={"batch": -5, "normal": 0, "urgent": 5})
    pool.node("n0")
    pool.arrive("big", 4)
    pool.arrive("batch", 1, priority_class="batch")
    pool.arrive("small", 2)
    pool.arrive("small-later", 2)
    pool.arrive("urgent", 8, priority_class="urgent")
    pool.arrive("of-no-known-class", 3, priority_class="?")
    assert ranked(pool) == ["urgent", "small", "small-later", "of-no-known-class", "big", "batch"]
    pool.command(ev.ReprioritiseRequested, "big", priority_class="urgent")
    assert ranked(pool)[:2] == ["big", "urgent"]
    assert order(pool) == ["big", "urgent", "small", "small-later", "of-no-known-class", "batch"]


def test_ties_go_by_arrival_also_after_a_hold_a_requeue_and_a_crash(make_pool):
    pool = make_pool(ranker=Flat(), backoff_s=0.0)
    pool.node("n0", 2)
    for job_id in "zyxw":
        pool.arrive(job_id)
    assert ranked(pool) == list("zyxw")
    pool.command(ev.HoldRequested, "z")
    pool.command(ev.ReleaseRequested, "z")
    assert ranked(pool) == list("zyxw")
    assert set(placed(pool.solve())) == {"z", "y"}
    pool.report(ev.RunRejected, "y")
    pool.report(ev.RunRejected, "z")
    assert ranked(pool) == list("zyxw")
    assert [job.spec.job_id for job in pool.state.queued_jobs()] == list("zyxw")
    pool.crash()
    assert ranked(pool) == list("zyxw")


def test_a_rule_is_given_the_jobs_in_order_of_arrival(make_pool):
    class Recording(Flat):
        def scores(self, jobs, state, now):
            seen.append([job.spec.job_id for job in jobs])
            return super().scores(jobs, state, now)

    seen: list[list[str]] = []
    pool = make_pool(ranker=Recording())
    pool.node("n0")
    for job_id in "cba":
        pool.arrive(job_id)
    pool.command(ev.HoldRequested, "c")
    pool.command(ev.ReleaseRequested, "c")
    pool.window()
    assert seen == [["c", "b", "a"]]


def test_what_cannot_start_now_does_not_take_a_place_in_the_window(make_pool):
    pool = make_pool(window_jobs=2, backoff_s=100.0)
    pool.node("n0", 8)
    pool.node("n1", 4, "A100")
    pool.arrive("refused")
    pool.solve()
    pool.report(ev.RunRejected, "refused")
    pool.arrive("holder", 8, gpu_types=("V100",))
    pool.running("holder")
    pool.arrive("too-big", 8)
    pool.arrive("other-type", 1, gpu_types=("V100",))
    for job_id in ("first", "second", "third"):
        pool.arrive(job_id)
    assert order(pool) == ["first", "second"]
    assert pool.why("first") == pool.why("second") == ""
    assert pool.why("refused") == "backoff: refused by n0: no reason given"
    assert pool.why("too-big") == "gpus: 1 x 8 of any type needed, room now for 0 (4 GPUs free)"
    assert pool.why("other-type") == "gpus: 1 x 1 of V100 needed, room now for 0 (0 GPUs free)"
    assert pool.why("third") == "outranked: 2 jobs are ahead in this window"


def test_of_jobs_that_ask_for_the_same_no_more_are_candidates_than_there_is_room_for(make_pool):
    pool = make_pool(window_jobs=5)
    pool.node("n0", 8)
    pool.node("n1", 7)
    for i in range(5):
        pool.arrive(f"four{i}", 4)
    pool.arrive("one")
    assert order(pool) == ["four0", "four1", "four2", "one"]
    assert pool.why("four3") == "outranked: those before it that ask for the same take all the room there is"
    assert pool.why("one") == ""


def test_jobs_of_a_line_that_differ_in_what_a_solver_sees_are_told_apart(make_pool):
    pool = make_pool()
    pool.node("n0", 2, rack="r0")
    pool.arrive("plain", 2)
    pool.arrive("wishing", 2, topology=TopologyWish(level=TopologyLevel.RACK))
    pool.arrive("fast", 2, speeds={"V100": 2.0})
    pool.arrive("family", 2, labels={"family": "bert"})
    pool.arrive("other-plain", 2, labels={"team": "x"}, tenant="other")
    assert order(pool) == ["plain", "wishing", "fast", "family"]


def test_a_static_rule_is_asked_once_for_each_job(make_pool):
    class Recording(Flat):
        static = True

        def scores(self, jobs, state, now):
            seen.append([job.spec.job_id for job in jobs])
            return super().scores(jobs, state, now)

    seen: list[list[str]] = []
    pool = make_pool(ranker=Recording())
    pool.node("n0", 1)
    pool.arrive("a")
    pool.arrive("b")
    pool.running("a")
    pool.window()
    pool.arrive("c")
    assert ranked(pool) == ["b", "c"]
    assert seen == [["a", "b"], ["c"]]
    pool.command(ev.ReprioritiseRequested, "c", priority_class="high")
    assert ranked(pool) == ["c", "b"]


def test_earlier_places_are_worth_more_per_gpu_but_at_most_twice(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.node("n1")
    for i in range(10):
        pool.arrive(f"j{i}", 1 + i % 2)
    worth = [c.value / c.total_gpus for c in problem(pool).candidates]
    assert worth == sorted(worth, reverse=True)
    assert len(set(worth)) == 10
    assert worth[0] <= 2 * worth[-1]


@pytest.mark.parametrize("short", ["cpu_milli", "memory_mib"])
def test_a_job_that_is_short_of_cpu_or_memory_now_is_not_asked_about(make_pool, short):
    pool = make_pool()
    pool.node("n0", 8, cpu_milli=1000, memory_mib=1000)
    pool.arrive("a", **{short: 800})
    pool.running("a")
    pool.arrive("b", **{short: 201})
    assert pool.window() == []
    pool.arrive("c", **{short: 200})
    assert order(pool) == ["c"]


def test_shares_are_asked_about_when_a_partly_used_device_has_room(make_pool):
    pool = make_pool()
    pool.node("n0", 1)
    pool.arrive("a", gpu_milli=600)
    pool.running("a")
    pool.arrive("b", gpu_milli=500)
    pool.arrive("c", gpu_milli=400)
    assert order(pool) == ["c"]


def test_a_replay_builds_no_problems(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a")
    pool.state.ranker = None
    assert pool.window() == []


# ── many timers at once ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["lease", "reminder", "loss"])
def test_one_window_gives_a_bounded_number_of_orders_and_says_that_there_are_more(monkeypatch, make_pool, what):
    monkeypatch.setattr(cluster, "_ORDERS_PER_WINDOW", 3)
    pool = make_pool(lease_s=60.0, lost_grace_s=30.0, quarantine_after=100)
    pool.node("n0")
    for i in range(8):
        pool.arrive(f"j{i}")
    pool.solve()
    if what == "loss":
        pool.lose("n0")
    elif what == "reminder":
        for i in range(8):
            pool.command(ev.CancelRequested, f"j{i}")
    pool.later(61)
    told = []
    for more in (True, True, False, False):
        told.append(stops(pool.window()))
        assert pool.state.unfinished_timers == more
        pool.verify()
        pool.state = reloaded(pool.state)  # what is left is found by any process
    assert [len(orders) for orders in told] == [3, 3, 2, 0]
    assert [order for orders in told for order in orders] == [("revoke", f"j{i}:{i}:1") for i in range(8)]


def test_one_window_starts_one_job_on_its_reserved_nodes(make_pool):
    pool = make_pool(reserve_after_s=100.0)
    pool.nodes(2)
    for i in range(2):
        pool.arrive(f"r{i}", 8)
    pool.running("r0", "r1")
    pool.arrive("a", 8)
    pool.arrive("b", 8)
    pool.later(100)
    pool.window()
    pool.complete("r0")
    pool.complete("r1")
    assert set(placed(pool.window())) == {"a"}
    assert pool.state.unfinished_timers
    assert set(placed(pool.window())) == {"b"}
    assert not pool.state.unfinished_timers
    pool.verify()


def test_a_problem_tells_what_is_asked_for_where_devices_are_shared(make_pool):
    pool = make_pool(finished_keep_s=50.0)
    pool.nodes(2, 8)
    pool.arrive("whole", 2)
    assert problem(pool).mix == ()
    pool.arrive("half", gpu_milli=500, cpu_milli=4000, gpu_types=("B", "A"))
    pool.arrive("also", gpu_milli=500, cpu_milli=4000, gpu_types=("A", "B"))
    pool.arrive("slice", gpu_milli=142, mig_profile="1g.5gb")
    half = Ask(1, 500, 0, 4000, 0, ("A", "B"))
    pool.node("a", 8, "A")
    pool.running("half", "also", "whole")
    for job_id in ("also", "whole"):
        pool.complete(job_id)
    pool.arrive("one", 1)
    assert problem(pool).mix == ((half, 2), (Ask(2, 1000, 0, 0, 0, ()), 1), (Ask(1, 1000, 0, 0, 0, ()), 1))
    pool.later(60.0)
    pool.window()
    pool.arrive("two", 1)
    assert problem(pool).mix == ((Ask(1, 1000, 0, 0, 0, ()), 2), (half, 1)), "the finished ones are forgotten"


def test_without_backfill_nobody_is_asked_for_behind_a_job_without_room():
    pool = Pool(backfill="none", tenants={"full": TenantPolicy(quota_gpus=0)})
    pool.node("n0", 8)
    pool.arrive("running", 6)
    pool.running("running")
    pool.arrive("over-quota", 1, tenant="full")
    pool.arrive("large", 4)
    pool.arrive("small", 1)
    assert placed(pool.solve()) == {}
    assert pool.why("over-quota").startswith("quota")
    assert pool.why("large").startswith("gpus")
    assert pool.why("small") == "behind: job large is before it and has no room now"
    pool.complete("running")
    assert sorted(placed(pool.solve())) == ["large", "small"]


def test_parts_by_memory_share_a_device_that_is_in_use(make_pool):
    pool = make_pool()
    pool.node("n0", 1, gpu_memory_mib=16384)
    pool.arrive("a", 1, gpu_memory_mib=4096)
    pool.running("a")
    pool.arrive("b", 1, gpu_memory_mib=4096)
    assert order(pool) == ["b"]


def test_runs_make_room_where_a_device_is_free_for_some_of_those_that_wait(make_pool):
    """One of three nodes is free, and two wait: the second need not wait for a run to end by itself."""
    pool = make_pool(preempt="class", preempt_interval_s=0.0)
    pool.nodes(3, 1)
    for name in ("a", "b"):
        pool.arrive(name, 1, preemptible=True, priority_class="low")
    pool.running("a", "b")
    for name in ("x", "y"):
        pool.arrive(name, 1, priority_class="high")
    out = pool.solve()
    assert placed(out) == {"x": {"n2": 1}}
    assert [kind for kind, _ in stops(out)] == ["preempt"]


class Once:
    """Raises the first time that it is asked."""

    name, static = "once", True

    def __init__(self):
        self.asked = 0

    def scores(self, jobs, state, now):
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("no")
        return [0.0] * len(jobs)


def test_a_rule_that_raises_once_loses_no_job(make_pool):
    pool = make_pool(ranker=Once())
    pool.node("n0", 8)
    pool.arrive("a", 1)
    with pytest.raises(RuntimeError):
        pool.window()
    pool.history.pop()
    assert order(pool) == ["a"]


def test_a_job_that_backs_off_by_a_clock_gone_back_holds_up_nobody(make_pool):
    """A window later in time than the next one has seen its backoff over."""
    pool = make_pool(backoff_s=10.0)
    pool.nodes(2, 8)
    pool.arrive("a", 1)
    pool.solve()
    pool.report(ev.RunRejected, "a", reason="no")
    pool.state.queue.refresh(pool.state, pool.state.ranker, pool.now + 20.0)
    pool.arrive("b", 1)
    assert order(pool) == ["b"]
    assert pool.why("a").startswith("backoff")


def test_the_queue_is_ranked_anew_by_the_configuration_of_a_new_epoch(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("a", 1, priority_class="low")
    pool.arrive("b", 1)
    assert order(pool) == ["b", "a"]
    classes = {"low": 5, "normal": 0}
    pool.send(ev.EpochStarted(epoch=pool.state.epoch + 1, config=replace(pool.config, priority_classes=classes)))
    assert order(pool) == ["a", "b"]


# ── waiting for a close placement ────────────────────────────────────────────────────────────────────────────────────


class Patient(Flat):
    """Everybody waits for a close placement for 100 s."""

    def wants_consolidation(self, job, state, now):
        return now - job.queued_at < 100


def scattered(make_pool):
    """Two nodes with four idle GPUs each; both could be idle as a whole."""
    pool = make_pool(ranker=Patient())
    pool.nodes(2, 8)
    pool.arrive("a", 4)
    pool.arrive("b", 4)
    pool.send(
        ev.WindowSolved(solution=_on_nodes(pool, a="n0", b="n1")),
    )
    return pool


def _on_nodes(pool, **nodes):
    placed_on = tuple(
        Assignment(job_id=job_id, attempt=0, workers=((node_id, 4),)) for job_id, node_id in nodes.items()
    )
    return Solution(window=1, status=SolveStatus.OPTIMAL, assignments=placed_on)


def test_a_gang_that_is_to_be_close_waits_for_one_node_and_then_starts_on_two(make_pool):
    pool = scattered(make_pool)
    pool.arrive("gang", 4, 2)
    solution = solve(problem(pool))
    assert not solution.assignments
    assert "node" in solution.unplaced["gang"]
    pool.later(100)
    (assignment,) = solve(problem(pool)).assignments
    assert {node_id for node_id, _ in assignment.workers} == {"n0", "n1"}


def test_what_could_never_be_close_does_not_wait_for_it(make_pool):
    pool = make_pool(ranker=Patient())
    pool.nodes(2, 8)
    pool.arrive("gang", 8, 2)
    (assignment,) = solve(problem(pool)).assignments
    assert len(assignment.workers) == 2


def test_a_wish_is_kept_strictly_while_the_job_is_to_wait_for_it(make_pool):
    pool = make_pool(ranker=Patient())
    for i, rack in enumerate(("r0", "r0", "r1")):
        pool.node(f"n{i}", 8, rack=rack)
    pool.arrive("other", 8)
    pool.send(
        ev.WindowSolved(
            solution=replace(
                _on_nodes(pool), assignments=(Assignment(job_id="other", attempt=0, workers=(("n0", 8),)),)
            )
        )
    )
    pool.arrive("gang", 8, 2, topology=TopologyWish(level=TopologyLevel.RACK))
    assert not solve(problem(pool)).assignments
    pool.later(100)
    assert len(solve(problem(pool)).assignments) == 1


def test_nobody_is_stopped_for_a_gang_that_waits_for_a_close_placement(make_pool):
    pool = make_pool(ranker=Patient(), preempt="score", preempt_interval_s=0.0)
    pool.nodes(2, 8)
    for job_id in ("a", "b"):
        pool.arrive(job_id, 4, preemptible=True)
    pool.send(ev.WindowSolved(solution=_on_nodes(pool, a="n0", b="n1")))
    for job_id in ("a", "b"):
        pool.report(ev.RunStarted, job_id)
    pool.command(ev.ReprioritiseRequested, "a", priority_class="low")
    pool.later(50)
    pool.arrive("gang", 4, 2)
    pool.arrive("other", 8, 2)
    solution = solve(problem(pool))
    assert not solution.assignments


def test_a_gang_that_waits_for_a_close_placement_leaves_its_seat_to_the_next(make_pool):
    class FirstIsPatient(Flat):
        def wants_consolidation(self, job, state, now):
            return job.spec.job_id == "patient"

    pool = make_pool(ranker=FirstIsPatient())
    pool.nodes(2, 8)
    for job_id in ("a", "b"):
        pool.arrive(job_id, 4)
    pool.send(ev.WindowSolved(solution=_on_nodes(pool, a="n0", b="n1")))
    pool.arrive("patient", 4, 2)
    pool.arrive("next", 4, 2)
    assert [assignment.job_id for assignment in solve(problem(pool)).assignments] == ["next"]
