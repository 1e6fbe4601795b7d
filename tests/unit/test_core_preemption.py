"""Preemption in the core: who is told to make room, at which cost, and that the room goes to who it was made for."""

from __future__ import annotations

import pytest
from core_builder import codes, first_fit, placed, stops
from msgspec.structs import replace

from streamsched.core import events as ev
from streamsched.core.instructions import Preempt, SolveWindow
from streamsched.core.problem import Assignment, Solution, SolveStatus
from streamsched.core.tenants import TenantPolicy
from streamsched.placement import solve
from streamsched.policy.rules import FairShare, Smallest


def preempting(make_pool, nodes=1, gpus=8, **config):
    """A pool whose runs may be stopped once they have gone on for 10 s."""
    pool = make_pool(**{"preempt": "class", "preempt_interval_s": 10.0, **config})
    pool.send(ev.EpochStarted(epoch=1, config=pool.config))
    pool.nodes(nodes, gpus)
    return pool


def low(pool, job_id, gpus=8, workers=1, **more):
    """A preemptible job of class low that runs."""
    pool.arrive(job_id, gpus, workers, priority_class="low", preemptible=True, **more)
    pool.running(job_id)


def question(pool):
    """The next window's problem; None when nobody could start."""
    return next((i.problem for i in pool.window() if isinstance(i, SolveWindow)), None)


def answer(pool, *assignments):
    solution = Solution(window=1, status=SolveStatus.OPTIMAL, policy="test", assignments=assignments)
    return pool.send(ev.WindowSolved(solution=solution))


def assignment(pool, job_id, node_ids, after=(), gpus=None):
    job = pool.job(job_id)
    names = tuple(pool.placements[victim].placement_id for victim in after)
    workers = tuple((node_id, gpus or job.spec.gpus_per_worker) for node_id in node_ids)
    return Assignment(job_id=job_id, attempt=job.attempt, workers=workers, after=names)


def victims(pool):
    asked = question(pool)
    return [victim.job_id for victim in asked.victims] if asked is not None else []


def made_room(make_pool, **config):
    """`big` waits for `small` to leave n0."""
    pool = preempting(make_pool, **config)
    low(pool, "small")
    pool.later(20)
    pool.arrive("big", 8)
    pool.solve()
    assert pool.job("big").awaits == (pool.placements["small"].placement_id,)
    return pool


# ── from the question to the start ───────────────────────────────────────────────────────────────────────────────────


def test_a_run_of_a_lower_class_makes_room(make_pool):
    pool = preempting(make_pool)
    low(pool, "small")
    pool.later(20)
    pool.arrive("big", 8)
    out = pool.solve()
    assert [(i.job_id, i.reason) for i in out if isinstance(i, Preempt)] == [("small", "makes room for job big")]
    assert placed(out) == {}
    assert pool.states("small", "big") == ["stopping", "queued"]
    assert pool.job("small").preempted_at == pool.now
    assert pool.job("big").reservation == ("n0",)
    assert pool.job("big").reason == "preempting: 1 runs make room for it"
    assert placed(pool.solve()) == {}
    assert pool.why("big") == "preempting: 1 runs make room for it"
    pool.report(ev.RunPreempted, "small")
    out = pool.solve()
    assert placed(out) == {"big": {"n0": 8}}
    assert pool.placements["big"].why.policy == "preemption"
    assert (pool.job("big").awaits, pool.job("big").reservation) == ((), ())
    assert pool.states("small") == ["queued"]
    assert pool.job("small").preemptions == 1


def test_off_is_the_default_and_asks_nothing(make_pool):
    pool = make_pool()
    pool.nodes(1)
    low(pool, "small")
    pool.later(1000)
    pool.arrive("big", 8)
    assert question(pool) is None


def test_a_full_node_is_in_the_question_with_what_it_would_give(make_pool):
    pool = preempting(make_pool, nodes=0)
    for node_id in ("n0", "n1"):
        pool.node(node_id, 8, rack="r", cpu_milli=8000, memory_mib=100)
    low(pool, "small", 8, 2, cpu_milli=3000, memory_mib=10)
    pool.later(20)
    pool.arrive("big", 8)
    asked = question(pool)
    (full,) = asked.classes
    assert (full.node_ids, full.free_gpus, full.free_cpu_milli, full.free_memory_mib) == (("n0", "n1"), 0, 5000, 90)
    assert (full.rack, full.total_gpus, full.gpu_type) == ("r", 8, "V100")
    (victim,) = asked.victims
    assert victim.held == (("n0", 8, 3000, 10), ("n1", 8, 3000, 10))
    assert asked.candidates[0].level > victim.level


def test_who_would_not_fit_even_then_is_no_candidate(make_pool):
    pool = preempting(make_pool, nodes=2)
    low(pool, "small", 4)
    pool.arrive("firm", 8)
    pool.running("firm")
    pool.later(20)
    pool.arrive("big", 8, 2)
    assert question(pool) is None
    assert pool.why("big").startswith("gpus: 2 x 8 of any type needed")


def test_shares_never_take_the_place_of_others(make_pool):
    pool = preempting(make_pool)
    low(pool, "small")
    pool.later(20)
    pool.arrive("share", 1, gpu_milli=500, priority_class="high")
    assert question(pool) is None


# ── who may be told to make room ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("spec", [{"preemptible": False}, {"gpu_milli": 500}, {"priority_class": "normal"}])
def test_these_runs_are_no_victims(make_pool, spec):
    pool = preempting(make_pool, gpus=1)
    pool.arrive("small", 1, **{"priority_class": "low", "preemptible": True, **spec})
    pool.running("small")
    pool.later(20)
    pool.arrive("big", 1)
    assert victims(pool) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool.send(ev.NodeCordoned(node_id="n0")),
        lambda pool: pool.lose("n0"),
        lambda pool: pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=7)),
        lambda pool: pool.command(ev.CancelRequested, "small"),
        lambda pool: pool.command(ev.ReprioritiseRequested, "small", priority_class="high"),
    ],
    ids=["cordoned", "lost", "shrunk", "stopping", "reprioritised"],
)
def test_what_ends_being_a_victim_also_makes_a_solution_stale(make_pool, spoil):
    pool = preempting(make_pool, nodes=2)
    low(pool, "small", 8, 2)
    pool.later(20)
    pool.arrive("big", 8)
    assert victims(pool) == ["small"]
    plan = assignment(pool, "big", ["n1"], after=["small"])
    spoil(pool)
    assert victims(pool) == []
    out = answer(pool, plan)
    assert codes(out) == ["absorb:stale-assignment"]
    assert stops(out) == []
    assert pool.job("big").reservation == ()


def test_runs_on_nodes_kept_free_for_another_are_spared(make_pool):
    pool = preempting(make_pool, reserve_after_s=100.0)
    low(pool, "small", 4)
    pool.arrive("old", 8, priority_class="low")
    pool.later(200)
    pool.window()
    assert pool.state.reserved == {"n0": "old"}
    pool.arrive("big", 8)
    assert victims(pool) == []
    assert codes(answer(pool, assignment(pool, "big", ["n0"], after=["small"]))) == ["absorb:stale-assignment"]


def test_not_before_it_has_run_for_the_interval_nor_again_too_soon(make_pool):
    pool = preempting(make_pool, nodes=1)
    low(pool, "small")
    pool.arrive("big", 8)
    pool.later(9)
    assert victims(pool) == []
    pool.later(1)
    assert victims(pool) == ["small"]
    pool.solve()
    pool.report(ev.RunPreempted, "small")
    pool.running("big")
    pool.node("n1")
    pool.running("small")
    pool.complete("big")
    pool.arrive("next", 8, 2)
    pool.later(9.5)
    assert victims(pool) == []
    pool.later(1)
    assert victims(pool) == ["small"]


def test_lowest_level_first_then_least_lost_and_not_too_many(make_pool):
    pool = preempting(make_pool, nodes=5, preempt_victims_max=3, priority_classes={"low": -1, "high": 1, "least": -9})
    for i in range(3):
        low(pool, f"low{i}")
        pool.later(5)
    pool.arrive("least", 8, priority_class="least", preemptible=True)
    pool.arrive("normal", 8, preemptible=True)
    pool.running("least", "normal")
    pool.later(1000)
    pool.report(ev.RunProgressed, "low1", checkpointed=True)
    pool.arrive("big", 8, priority_class="high")
    assert victims(pool) == ["least", "low1", "low2"]


def test_runs_on_types_that_nobody_above_them_wants_are_left_out(make_pool):
    pool = preempting(make_pool, preempt_victims_max=1)
    pool.node("a", 8, "A100")
    low(pool, "a-small", gpu_types=("A100",))
    low(pool, "v-small", gpu_types=("V100",))
    pool.later(20)
    pool.arrive("big", 8, gpu_types=("V100",))
    assert victims(pool) == ["v-small"]


def test_by_score_a_better_ranked_job_has_a_higher_level_and_classes_come_first(make_pool):
    pool = preempting(make_pool, nodes=3, preempt="score", ranker=Smallest())
    pool.arrive("wide", 8, preemptible=True)
    pool.arrive("low", 4, priority_class="low", preemptible=True)
    pool.arrive("high", 8, priority_class="high", preemptible=True)
    pool.running("wide", "low", "high")
    pool.later(20)
    pool.arrive("six", 6)
    pool.arrive("seven", 7)
    pool.arrive("equal", 8)
    asked = question(pool)
    level = {c.job_id: c.level for c in asked.candidates} | {v.job_id: v.level for v in asked.victims}
    assert level["six"] > level["seven"] > level["wide"] > level["low"]
    assert [v.job_id for v in asked.victims] == ["low", "wide"]
    assert level["equal"] == level["wide"], "equals do not take each other's place"


def test_by_score_the_order_of_the_queue_is_that_of_the_levels(make_pool):
    pool = preempting(make_pool, nodes=1, preempt="score", ranker=FairShare())
    pool.arrive("a0", 4, tenant="a", preemptible=True)
    pool.arrive("a1", 4, tenant="a", preemptible=True)
    pool.running("a0", "a1")
    pool.later(20)
    for i in range(2):
        pool.arrive(f"more{i}", 4, tenant="a")
        pool.arrive(f"b{i}", 4, tenant="b")
    asked = question(pool)
    assert asked.candidates[0].job_id == "b0"
    levels = [c.level for c in asked.candidates]
    assert levels == sorted(levels, reverse=True)
    assert asked.victims[0].level < levels[0]


@pytest.mark.parametrize(("since_checkpoint_s", "makes_room"), [(20, True), (3000, False)])
def test_by_score_a_run_makes_room_for_better_ones_of_its_class_unless_it_would_lose_too_much(
    make_pool, since_checkpoint_s, makes_room
):
    pool = preempting(make_pool, preempt="score", ranker=Smallest())
    pool.arrive("wide", 8, preemptible=True)
    pool.running("wide")
    pool.later(since_checkpoint_s)
    pool.arrive("a", 4)
    pool.arrive("b", 4)
    out = pool.send(ev.WindowSolved(solution=solve(question(pool))))
    assert bool(stops(out)) is makes_room


@pytest.mark.parametrize(("of_class", "makes_room"), [("normal", True), ("high", False)])
def test_by_score_an_older_job_takes_the_place_of_a_younger_one_but_not_of_a_higher_class(
    make_pool, of_class, makes_room
):
    pool = preempting(make_pool, preempt="score")
    pool.arrive("old", 8)
    pool.command(ev.HoldRequested, "old")
    pool.arrive("young", 8, preemptible=True, priority_class=of_class)
    pool.running("young")
    pool.command(ev.ReleaseRequested, "old")
    pool.later(20)
    assert (victims(pool) == ["young"]) is makes_room
    out = answer(pool, assignment(pool, "old", ["n0"], after=["young"]))
    assert bool(stops(out)) is makes_room
    assert bool(pool.job("old").awaits) is makes_room


# ── by rank ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Told:
    """Scores as the test says."""

    name = "told"

    def __init__(self, **scores):
        self._scores = scores

    def scores(self, jobs, state, now):
        return [float(self._scores[job.spec.job_id]) for job in jobs]


@pytest.mark.parametrize(("mode", "makes_room"), [("score", False), ("rank", True)])
def test_by_rank_a_small_job_takes_the_place_of_a_large_one_whatever_that_loses(make_pool, mode, makes_room):
    pool = preempting(make_pool, preempt=mode, ranker=Told(large=1, small=2))
    pool.arrive("large", 8, preemptible=True)
    pool.running("large")
    pool.later(3000)
    pool.arrive("small", 1)
    out = pool.send(ev.WindowSolved(solution=solve(question(pool))))
    assert bool(stops(out)) is makes_room


def test_by_rank_nobody_is_stopped_so_that_a_lower_one_gets_the_free_room(make_pool):
    pool = preempting(make_pool, nodes=2, preempt="rank", ranker=Told(between=2, first=3, last=1))
    pool.arrive("between", 8, preemptible=True)
    pool.running("between")
    pool.later(20)
    pool.arrive("last", 8)
    pool.arrive("first", 8)
    out = pool.send(ev.WindowSolved(solution=solve(question(pool))))
    assert list(placed(out)) == ["first"]
    assert not stops(out)


@pytest.mark.parametrize(("rank_of_lately", "stopped"), [(2, "long"), (1, "lately"), (0, "lately")])
def test_by_rank_the_last_is_stopped_and_of_equals_the_one_that_loses_less(make_pool, rank_of_lately, stopped):
    pool = preempting(make_pool, nodes=2, preempt="rank", ranker=Told(long=1, lately=rank_of_lately, first=3))
    for job_id in ("long", "lately"):
        pool.arrive(job_id, 8, preemptible=True)
        pool.running(job_id)
        pool.later(600)
    pool.arrive("first", 8)
    pool.send(ev.WindowSolved(solution=solve(question(pool))))
    assert pool.job("first").awaits == (pool.placements[stopped].placement_id,)


def test_by_rank_many_last_ones_are_stopped_before_one_that_ranks_above_them(make_pool):
    last = {f"s{i}": float(i) for i in range(8)}
    pool = preempting(make_pool, nodes=2, preempt="rank", ranker=Told(**last, large=50, first=99))
    for job_id in last:
        pool.arrive(job_id, 1, preemptible=True)
        pool.running(job_id)
    pool.arrive("large", 8, preemptible=True)
    pool.running("large")
    pool.later(600)
    pool.arrive("first", 8)
    out = pool.send(ev.WindowSolved(solution=solve(question(pool))))
    assert sorted(order.job_id for order in out if isinstance(order, Preempt)) == sorted(last)


def test_by_rank_the_sum_does_not_count_where_nobody_is_stopped_either(make_pool):
    pool = preempting(make_pool, preempt="rank", ranker=Told(first=3, b=2, c=1))
    pool.arrive("first", 5)
    pool.arrive("b", 4)
    pool.arrive("c", 4)
    out = pool.send(ev.WindowSolved(solution=solve(question(pool))))
    assert list(placed(out)) == ["first"]


def test_a_run_is_left_alone_longer_each_time_until_it_has_saved_something(make_pool):
    firsts = [f"first{number}" for number in range(5)]
    scores = dict.fromkeys(firsts, 2)
    pool = preempting(make_pool, preempt="rank", ranker=Told(long=1, **scores), preempt_interval_s=300.0)
    pool.arrive("long", 8, preemptible=True)
    waits = []
    for first in firsts[:4]:
        pool.running("long")
        started = pool.now
        pool.arrive(first, 8)
        while not victims(pool):
            pool.later(10)
        waits.append(pool.now - started)
        pool.send(ev.WindowSolved(solution=solve(question(pool))))
        pool.report(ev.RunPreempted, "long")
        pool.command(ev.CancelRequested, first)
        pool.later(300)
    assert waits == [300, 600, 1200, 2400]
    pool.running("long")
    pool.later(300)
    pool.report(ev.RunProgressed, "long", checkpointed=True)
    pool.arrive(firsts[4], 8)
    assert victims(pool) == ["long"]


def test_an_overdue_job_may_take_a_place_before_nodes_are_kept_for_it(make_pool):
    pool = preempting(
        make_pool, preempt="rank", ranker=Told(run=5, big=1), reserve_after_s=3600.0, preempt_interval_s=300.0
    )
    pool.arrive("big", 8)
    pool.later(3500)
    pool.arrive("run", 8, preemptible=True)
    pool.running("run")
    while not victims(pool):
        pool.later(30)
        assert pool.job("big").reservation == ()
    assert pool.now - pool.job("big").queued_at == 3800


@pytest.mark.parametrize("mode", ["score", "rank"])
def test_who_has_waited_too_long_goes_first_and_is_not_stopped_any_more(make_pool, mode):
    pool = preempting(
        make_pool, preempt=mode, ranker=Told(worst=1, good=2, best=3), reserve_after_s=3600.0, reservations_max=0
    )
    pool.arrive("good", 8, preemptible=True)
    pool.running("good")
    pool.arrive("worst", 8, preemptible=True)
    pool.later(3500)
    pool.report(ev.RunProgressed, "good", checkpointed=True)
    assert victims(pool) == []
    pool.later(100)
    assert victims(pool) == ["good"]
    pool.solve()
    pool.report(ev.RunPreempted, "good")
    pool.window()
    pool.report(ev.RunStarted, "worst")
    pool.later(3600)
    pool.arrive("best", 8)
    assert victims(pool) == []
    pool.later(86_400)
    assert victims(pool) == [], "also those that wait as long later on"


def test_by_rank_who_may_not_take_a_place_gets_nodes_of_its_own_in_the_end(make_pool):
    """Runs that may not be stopped are waited for, as ever."""
    pool = preempting(make_pool, preempt="rank", ranker=Told(stays=1, waits=2), reserve_after_s=3600.0, lease_s=60.0)
    pool.arrive("stays", 8)
    pool.running("stays")
    pool.arrive("waits", 8)
    pool.later(3660)
    pool.window()
    assert pool.job("waits").reservation == ()
    pool.later(10)  # a lease, and as long as a run is left alone
    pool.window()
    assert pool.job("waits").reservation == ("n0",)


# ── what it costs ────────────────────────────────────────────────────────────────────────────────────────────────────


def cost(pool, job_id="small"):
    return next(v.cost for v in question(pool).victims if v.job_id == job_id)


def test_cost_grows_with_what_would_be_lost_since_the_last_checkpoint(make_pool):
    pool = preempting(make_pool, restart_s=60.0)
    low(pool, "small", 8)
    pool.later(300)
    pool.arrive("big", 8)
    # The class has no candidate: its first would come after the only one of the window, worth 1 per GPU.
    assert cost(pool) == pytest.approx(8 * (1 + 360 / 3600))
    pool.report(ev.RunProgressed, "small", checkpointed=True)
    assert cost(pool) == pytest.approx(8 * (1 + 60 / 3600))
    pool.later(10_000)
    assert cost(pool) == 16.0, "at most twice"


def test_a_higher_class_is_worth_more_than_all_lower_ones_and_their_victims(make_pool):
    classes = {"c0": 0, "c1": 1, "c2": 2, "c3": 3}
    pool = preempting(make_pool, nodes=6, priority_classes=classes)
    for number in (0, 1, 2):
        for i in range(2):
            pool.arrive(f"r{number}{i}", 8, priority_class=f"c{number}", preemptible=True)
            pool.running(f"r{number}{i}")
    pool.later(3600)
    for number in range(4):
        for i in range(2):
            pool.arrive(f"q{number}{i}", 1 + i, priority_class=f"c{number}")
    asked = question(pool)
    worth = {number: [] for number in range(4)}
    for item in asked.candidates:
        worth[int(item.job_id[1])].append(item.value)
    for victim in asked.victims:
        worth[int(victim.job_id[1])].append(victim.cost)
    assert [len(worth[number]) for number in range(4)] == [2, 4, 4, 2], "c0 waits in vain: it can stop nobody"
    for number in (1, 2, 3):
        assert min(worth[number]) > sum(sum(worth[lower]) for lower in range(number))


# ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_case_25_nobody_is_evicted_for_a_job_that_would_not_fit_then(make_pool):
    """Case 25: with the victim gone the preemptor would still not fit. Whatever the solver says, nobody is stopped."""
    pool = preempting(make_pool, nodes=2)
    low(pool, "small", 4)
    pool.arrive("firm", 4)
    pool.running("firm")
    assert pool.run("firm").allocations[0].node_id == pool.run("small").allocations[0].node_id == "n0"
    pool.arrive("other", 6)
    pool.running("other")
    pool.later(20)
    pool.arrive("big", 8, priority_class="high")
    assert question(pool) is None
    out = answer(pool, assignment(pool, "big", ["n0"], after=["small"]))
    assert codes(out) == ["absorb:stale-assignment"]
    assert stops(out) == []
    assert pool.states("small", "big") == ["running", "queued"]
    assert pool.state.reserved == {}


def test_nobody_is_stopped_for_a_job_that_fits_by_now(make_pool):
    pool = preempting(make_pool, nodes=1)
    low(pool, "small", 4)
    pool.arrive("firm", 4)
    pool.running("firm")
    pool.later(20)
    pool.arrive("big", 4)
    plan = assignment(pool, "big", ["n0"], after=["small"])
    pool.complete("firm")
    out = answer(pool, plan)
    assert placed(out) == {"big": {"n0": 4}}
    assert stops(out) == []


def test_only_as_many_are_stopped_as_it_needs_by_now(make_pool):
    pool = preempting(make_pool, nodes=1)
    for name in ("s0", "s1", "firm"):
        low(pool, name, 2)
    pool.later(20)
    pool.arrive("big", 6)
    plan = assignment(pool, "big", ["n0"], after=["s0", "s1"])
    pool.complete("firm")
    out = answer(pool, plan)
    assert len(stops(out)) == 1
    assert len(pool.job("big").awaits) == 1
    pool.verify()


def test_a_victim_that_ended_on_its_own_is_no_reason_to_stop_the_others(make_pool):
    pool = preempting(make_pool, nodes=1)
    for name in ("s0", "s1"):
        low(pool, name, 4)
    pool.later(20)
    pool.arrive("big", 8)
    plan = assignment(pool, "big", ["n0"], after=["s0", "s1"])
    pool.complete("s0")
    out = answer(pool, plan)
    assert codes(out) == ["absorb:stale-assignment"]
    assert stops(out) == []
    assert [victim for _, victim in stops(pool.solve())] == [pool.placements["s1"].placement_id]


def test_the_same_answer_twice_stops_nobody_twice(make_pool):
    pool = preempting(make_pool, nodes=2)
    low(pool, "s0")
    low(pool, "s1")
    pool.later(20)
    pool.arrive("big", 8)
    plan = assignment(pool, "big", ["n0"], after=["s0"])
    assert len(stops(answer(pool, plan))) == 1
    for again in (plan, assignment(pool, "big", ["n1"], after=["s1"])):
        out = answer(pool, again)
        assert stops(out) == []
        assert codes(out) == ["absorb:stale-assignment"]


def test_a_victim_named_twice_counts_once(make_pool):
    pool = preempting(make_pool)
    low(pool, "small")
    pool.later(20)
    pool.arrive("big", 8)
    out = answer(pool, assignment(pool, "big", ["n0"], after=["small", "small"]))
    assert len(stops(out)) == 1
    assert len(pool.job("big").awaits) == 1


def test_who_starts_at_once_may_use_what_is_free_beside_a_victim(make_pool):
    pool = preempting(make_pool)
    low(pool, "small", 6)
    pool.later(20)
    pool.arrive("big", 6)
    pool.arrive("two", 2)
    out = answer(pool, assignment(pool, "big", ["n0"], after=["small"]), assignment(pool, "two", ["n0"]))
    assert placed(out) == {"two": {"n0": 2}}
    assert len(stops(out)) == 1
    pool.report(ev.RunPreempted, "small")
    assert placed(pool.solve()) == {"big": {"n0": 6}}


def test_quota_holds_for_who_waits_for_room(make_pool):
    pool = preempting(make_pool, nodes=3, tenants={"t": TenantPolicy(quota_gpus=8.0)})
    for i in range(2):
        low(pool, f"s{i}")
    pool.later(20)
    for i in range(3):
        pool.arrive(f"t{i}", 8, tenant="t")
    plans = [assignment(pool, f"t{i}", [f"n{i}"], after=[f"s{i}"]) for i in range(2)]
    out = answer(pool, *plans, assignment(pool, "t2", ["n2"]))
    assert placed(out) == {"t2": {"n2": 8}}
    assert stops(out) == []
    pool.complete("t2")
    out = answer(pool, *plans)
    assert len(stops(out)) == 1
    assert codes(out) == ["absorb:stale-assignment"]


# ── two who want room ────────────────────────────────────────────────────────────────────────────────────────────────


def test_of_two_on_one_node_the_second_comes_later_and_nobody_is_stopped_for_it_in_vain(make_pool):
    pool = preempting(make_pool)
    for name in ("s0", "s1"):
        low(pool, name, 4)
    pool.later(20)
    for name in ("big0", "big1"):
        pool.arrive(name, 4)
    plans = [assignment(pool, f"big{i}", ["n0"], after=[f"s{i}"]) for i in range(2)]
    out = answer(pool, *plans)
    assert codes(out) == ["absorb:stale-assignment"]
    assert [name for _, name in stops(out)] == [pool.placements["s0"].placement_id]
    pool.report(ev.RunPreempted, "s0")
    assert placed(pool.window()) == {"big0": {"n0": 4}}
    assert [name for _, name in stops(pool.solve())] == [pool.placements["s1"].placement_id]
    pool.report(ev.RunPreempted, "s1")
    assert placed(pool.solve()) == {"big1": {"n0": 4}}


def test_two_may_wait_for_one_gang_on_different_nodes(make_pool):
    pool = preempting(make_pool, nodes=2)
    low(pool, "gang", 8, 2)
    pool.later(20)
    for name in ("big0", "big1"):
        pool.arrive(name, 8)
    out = answer(pool, *[assignment(pool, f"big{i}", [f"n{i}"], after=["gang"]) for i in range(2)])
    assert len(stops(out)) == 1
    assert pool.state.reserved == {"n0": "big0", "n1": "big1"}
    pool.report(ev.RunReleased, "gang", node_ids=("n1",))
    assert placed(pool.window()) == {"big1": {"n1": 8}}
    assert placed(pool.window()) == {}, "not before its own node is free"
    pool.report(ev.RunReleased, "gang")
    assert placed(pool.window()) == {"big0": {"n0": 8}}


def test_who_fits_where_runs_are_leaving_has_nobody_else_stopped(make_pool):
    pool = preempting(make_pool, nodes=2)
    low(pool, "s0")
    low(pool, "s1")
    pool.later(20)
    for i in range(8):
        pool.arrive(f"one{i}", 1)
    out = answer(pool, *[assignment(pool, f"one{i}", ["n0"], after=["s0"]) for i in range(8)])
    assert len(stops(out)) == 1
    assert codes(out) == ["absorb:stale-assignment"] * 7, "a node is kept free for one job at a time"
    for _ in range(3):
        assert stops(pool.solve()) == []
    assert pool.why("one7").startswith("room is being made: ")
    pool.report(ev.RunPreempted, "s0")
    assert len(placed(pool.solve())) == 8
    assert pool.states("s1") == ["running"]


def test_who_does_not_fit_beside_those_that_wait_for_the_leaving_may_have_more_stopped(make_pool):
    pool = preempting(make_pool, nodes=2)
    low(pool, "s0")
    low(pool, "s1")
    pool.later(20)
    pool.arrive("five", 5)
    answer(pool, assignment(pool, "five", ["n0"], after=["s0"]))
    pool.arrive("three", 3)
    assert stops(pool.solve()) == []
    pool.arrive("four", 4)
    assert stops(pool.solve()) == [("preempt", pool.placements["s1"].placement_id)]


def test_a_run_that_does_not_leave_is_counted_on_for_a_lease_only(make_pool):
    pool = preempting(make_pool, nodes=2, lease_s=60.0)
    low(pool, "s0")
    low(pool, "s1")
    pool.later(20)
    for i in range(2):
        pool.arrive(f"one{i}", 1)
    assert len(stops(answer(pool, assignment(pool, "one0", ["n0"], after=["s0"])))) == 1
    pool.later(59)
    assert stops(pool.solve()) == []
    pool.later(2)
    assert [kind for kind, _ in stops(pool.solve())] == ["revoke", "preempt"]


# ── between the order to stop and the start ──────────────────────────────────────────────────────────────────────────


def test_case_30_a_preempted_run_whose_process_exits_0_is_queued_again(make_pool):
    """Case 30: the exit code of a process that was told to stop says nothing about its job."""
    pool = made_room(make_pool)
    pool.later(1)
    pool.complete("small")
    assert pool.states("small") == ["queued"]
    assert pool.job("small").reason == "makes room for job big"
    assert placed(pool.solve()) == {"big": {"n0": 8}}
    pool.start("big")
    pool.complete("big")
    assert placed(pool.solve()) == {"small": {"n0": 8}}


def test_a_victim_that_had_completed_before_it_was_told_to_stop_is_done(make_pool):
    pool = made_room(make_pool)
    pool.complete("small", time=pool.now - 1)
    assert pool.states("small") == ["completed"]
    assert placed(pool.solve()) == {"big": {"n0": 8}}


def test_freed_gpus_go_to_nobody_else(make_pool):
    pool = preempting(make_pool)
    for name in ("s0", "s1"):
        low(pool, name, 4)
    pool.later(20)
    pool.arrive("big", 8)
    assert len(stops(pool.solve())) == 2
    pool.arrive("quick", 4, priority_class="high")
    pool.arrive("share", 1, gpu_milli=500, priority_class="high")
    pool.report(ev.RunPreempted, "s0")
    out = pool.solve()
    assert placed(out) == {}
    late = [assignment(pool, name, ["n0"]) for name in ("quick", "s0", "share")]
    assert codes(answer(pool, *late)) == ["absorb:stale-assignment"] * 3
    pool.report(ev.RunPreempted, "s1")
    assert placed(pool.window()) == {"big": {"n0": 8}}


def test_a_victim_whose_node_is_fenced_takes_the_reservation_with_it(make_pool):
    pool = made_room(make_pool)
    pool.lose("n0", fenced=True)
    pool.solve()
    assert (pool.job("big").reservation, pool.job("big").awaits) == ((), ())
    assert pool.states("small", "big") == ["queued", "queued"]
    pool.node("n1")
    assert placed(pool.solve()) == {"big": {"n1": 8}}


@pytest.mark.parametrize("event", [ev.NodeCordoned, ev.NodeDrained])
def test_a_node_that_cannot_be_used_any_more_ends_the_waiting(make_pool, event):
    pool = made_room(make_pool)
    pool.send(event(node_id="n0"))
    pool.window()
    assert (pool.job("big").reservation, pool.job("big").awaits, pool.job("big").reason) == ((), (), "")
    pool.report(ev.RunPreempted, "small")
    assert placed(pool.solve()) == {}


def test_when_all_have_left_and_it_does_not_fit_it_waits_as_before(make_pool):
    """The node shrank, but a node of that size could hold it: only now it is seen that it will not start there."""
    pool = preempting(make_pool, nodes=1)
    low(pool, "small", 4)
    pool.arrive("firm", 2)
    pool.running("firm")
    pool.later(20)
    pool.arrive("big", 6)
    assert len(stops(pool.solve())) == 1
    pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=7))
    pool.window()
    assert pool.job("big").awaits
    pool.report(ev.RunPreempted, "small")
    pool.window()
    assert (pool.job("big").reservation, pool.job("big").awaits) == ((), ())
    assert pool.states("big") == ["queued"]


@pytest.mark.parametrize(
    ("command", "state"), [(ev.CancelRequested, "cancelled"), (ev.HoldRequested, "held")], ids=["cancel", "hold"]
)
def test_who_goes_away_leaves_the_room_to_others(make_pool, command, state):
    pool = made_room(make_pool)
    pool.command(command, "big")
    assert pool.states("big", "small") == [state, "stopping"]
    assert (pool.job("big").awaits, pool.state.reserved) == ((), {})
    pool.report(ev.RunPreempted, "small")
    assert placed(pool.solve()) == {"small": {"n0": 8}}


def test_a_preemptor_that_can_never_fit_any_more_gives_its_room_up(make_pool):
    pool = made_room(make_pool)
    pool.node("n0", 4)
    pool.window()
    assert pool.states("big") == ["unfit"]
    assert (pool.job("big").awaits, pool.state.reserved) == ((), {})


def test_who_waits_for_room_does_not_use_up_the_reservations(make_pool):
    pool = preempting(make_pool, nodes=2, reservations_max=1, reserve_after_s=100.0)
    low(pool, "small", 8)
    pool.arrive("firm", 8)
    pool.running("firm")
    pool.arrive("old", 8, priority_class="low")
    pool.later(50)
    pool.arrive("big", 8)
    assert len(stops(pool.solve())) == 1
    pool.later(60)
    pool.window()
    assert pool.state.reserved == {"n0": "big", "n1": "old"}


def test_an_overdue_job_may_have_room_made_elsewhere(make_pool):
    pool = preempting(make_pool, nodes=2, reserve_after_s=5.0)
    pool.arrive("firm", 7)
    pool.running("firm")
    low(pool, "small", 8)
    pool.arrive("big", 4)
    pool.later(20)
    out = pool.solve()
    assert len(stops(out)) == 1
    assert pool.state.reserved == {"n1": "big"}, "instead of n0, which had more room"


def test_a_crash_changes_nothing(make_pool):
    pool = made_room(make_pool)
    pool.crash()
    assert pool.state.reserved == {"n0": "big"}
    pool.report(ev.RunPreempted, "small")
    assert placed(pool.solve()) == {"big": {"n0": 8}}


def test_room_for_a_quota_that_is_gone_is_given_up(make_pool):
    pool = made_room(make_pool)
    pool.config = replace(pool.config, tenants={"default": TenantPolicy(quota_gpus=4.0)})
    pool.crash()
    pool.window()
    assert (pool.job("big").awaits, pool.state.reserved) == ((), {})


def test_gangs_take_the_place_of_gangs(make_pool):
    pool = preempting(make_pool, nodes=4)
    low(pool, "g0", 8, 2)
    low(pool, "g1", 8, 2)
    pool.later(20)
    pool.arrive("big", 8, 3)
    asked = question(pool)
    (plan,) = first_fit(asked).assignments
    assert len(plan.after) == 2
    assert len(stops(answer(pool, plan))) == 2
    pool.report(ev.RunPreempted, "g0")
    assert placed(pool.window()) == {}
    pool.report(ev.RunPreempted, "g1")
    assert sum(placed(pool.window())["big"].values()) == 24
