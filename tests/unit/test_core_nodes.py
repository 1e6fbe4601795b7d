"""Nodes: joining, growing, shrinking, cordon and drain, loss and return, and the runs on them."""

from __future__ import annotations

import pytest
from core_builder import codes, placed, reloaded, stops

from streamsched.core import events as ev
from streamsched.core.errors import BrokenInvariant
from streamsched.core.model import Allocation, NodeSpec, NodeState, RunState
from streamsched.core.node import Node, NodeRecord
from streamsched.core.tenants import TenantPolicy


def test_a_node_that_joins_again_as_it_was_changes_nothing(make_pool):
    pool = make_pool()
    assert pool.node("n0", 8) == []
    pool.state.take_changes()
    assert codes(pool.node("n0", 8)) == ["absorb:known-node"]
    assert not pool.state.take_changes()


def test_a_node_that_joins_with_another_inventory_replaces_it_and_keeps_its_runs(make_pool):
    pool = make_pool()
    pool.node("n0", 4)
    pool.arrive("a", 4)
    pool.running("a")
    pool.node("n0", 8, "A100")
    assert pool.free() == {"n0": 4}
    pool.arrive("b", 4, gpu_types=("A100",))
    assert placed(pool.solve()) == {"b": {"n0": 4}}
    assert pool.run("b").allocations[0].gpus == (4, 5, 6, 7)


def test_a_node_may_join_with_fewer_devices_than_its_runs_hold(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("a", 4)
    pool.arrive("b", 3)
    pool.running("a", "b")
    pool.complete("a")
    pool.node("n0", 4)
    pool.arrive("c", 2)
    assert pool.free() == {"n0": 1}
    assert pool.solve() == []
    pool.complete("b")
    assert placed(pool.solve()) == {"c": {"n0": 2}}


@pytest.mark.parametrize(
    "event",
    [
        ev.NodeCapacityChanged(node_id="x", gpus=1),
        ev.NodeHeard(node_id="x"),
        ev.NodeCordoned(node_id="x"),
        ev.NodeUncordoned(node_id="x"),
        ev.NodeDrained(node_id="x"),
        ev.NodeLost(node_id="x"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_news_of_a_node_that_never_joined_are_refused(make_pool, event):
    assert codes(make_pool().send(event)) == ["refuse:unknown-node"]


def test_capacity_grows_beyond_what_was_declared(make_pool):
    pool = make_pool()
    pool.node("n0", 4)
    assert pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=6)) == []
    assert codes(pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=6))) == ["absorb:no-change"]
    pool.arrive("a", 6)
    assert placed(pool.solve()) == {"a": {"n0": 6}}


def test_capacity_of_nothing_and_back(make_pool):
    pool = make_pool()
    pool.node("n0", 4)
    pool.arrive("a", 4)
    pool.running("a")
    pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=0))
    assert pool.free() == {"n0": 0}
    pool.arrive("b")
    assert pool.states("b") == ["unfit"]
    pool.complete("a")
    pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=4))
    assert placed(pool.solve()) == {"b": {"n0": 1}}


def test_memory_that_shrank_below_what_is_held_is_nothing_and_not_no_limit(make_pool):
    pool = make_pool()
    pool.node("n0", 8, memory_mib=100, cpu_milli=100)
    pool.arrive("a", memory_mib=80, cpu_milli=80)
    pool.running("a")
    pool.node("n0", 8, memory_mib=79, cpu_milli=79)
    (only,) = pool.state.inventory.classes()
    assert (only.free_memory_mib, only.free_cpu_milli) == (0, 0)
    pool.arrive("b", memory_mib=1)
    assert pool.window() == []
    assert pool.why("b").startswith("gpus: 1 x 1 of any type needed, room now for 0")
    pool.arrive("needs-none")
    assert placed(pool.solve()) == {"needs-none": {"n0": 1}}
    pool.complete("a")
    assert placed(pool.solve()) == {"b": {"n0": 1}}


def test_a_cordoned_node_keeps_its_runs_and_takes_no_new_ones(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a", preemptible=True)
    pool.running("a")
    assert pool.send(ev.NodeCordoned(node_id="n0")) == []
    assert codes(pool.send(ev.NodeCordoned(node_id="n0"))) == ["absorb:no-change"]
    pool.arrive("b")
    assert pool.solve() == []
    assert pool.states("a", "b") == ["running", "queued"]
    pool.send(ev.NodeUncordoned(node_id="n0"))
    assert codes(pool.send(ev.NodeUncordoned(node_id="n0"))) == ["absorb:no-change"]
    assert placed(pool.solve()) == {"b": {"n0": 1}}


def test_a_cordon_outlives_the_loss_and_return_of_the_node(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.send(ev.NodeCordoned(node_id="n0"))
    pool.lose("n0")
    pool.node("n0")
    pool.arrive("a")
    assert pool.solve() == []
    assert pool.state.inventory.nodes["n0"].record.state is NodeState.CORDONED


def test_a_drain_preempts_what_may_be_preempted_once(make_pool):
    pool = make_pool()
    pool.nodes(2)
    pool.arrive("gang", 4, 2, preemptible=True)
    pool.arrive("stays", 4)
    pool.running("gang", "stays")
    assert placed([pool.placements["gang"]]) == {"gang": {"n0": 8}}
    pool.arrive("elsewhere", 8, preemptible=True)
    pool.send(ev.NodeCordoned(node_id="n0"))
    assert stops(pool.send(ev.NodeDrained(node_id="n0"))) == [("preempt", "gang:0:1")]
    assert codes(pool.send(ev.NodeDrained(node_id="n0"))) == ["absorb:no-change"]
    pool.later(10)
    pool.report(ev.RunPreempted, "gang")
    assert pool.job("gang").reason == "node n0 is drained"
    assert pool.job("gang").preemptions == 1
    assert pool.job("gang").not_before <= pool.now
    assert pool.states("stays") == ["running"]


# ── loss ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("started", [False, True])
def test_a_node_heard_of_within_the_grace_goes_on_with_its_runs(make_pool, started):
    pool = make_pool(lost_grace_s=30.0, lease_s=60.0)
    pool.node("n0")
    pool.arrive("a", 8)
    pool.solve()
    if started:
        pool.start("a")
    assert pool.lose("n0") == []
    assert pool.run("a").state is RunState.LOST
    assert codes(pool.lose("n0")) == ["absorb:no-change"]
    pool.later(29)
    assert pool.window() == []
    assert pool.send(ev.NodeHeard(node_id="n0")) == []
    assert pool.states("a") == ["running" if started else "placed"]
    assert pool.run("a").state == pool.states("a")[0]
    pool.later(59)
    assert pool.window() == []
    pool.later(2)
    assert stops(pool.window()) == ([] if started else [("revoke", "a:0:1")])


def test_a_start_told_while_the_node_is_thought_lost_counts_when_it_is_heard(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a", 8)
    pool.solve()
    pool.lose("n0")
    assert codes(pool.start("a")) == ["absorb:late-start"]
    pool.send(ev.NodeHeard(node_id="n0"))
    assert pool.states("a") == ["running"]
    pool.later(1e6)
    assert pool.window() == []


def test_a_sign_of_life_of_a_node_that_is_not_lost_is_nothing(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.state.take_changes()
    assert pool.send(ev.NodeHeard(node_id="n0")) == []
    assert not pool.state.take_changes()


def given_up(make_pool):
    pool = make_pool(lost_grace_s=30.0)
    pool.nodes(2)
    pool.arrive("a", 8)
    pool.running("a")
    first = pool.placements["a"]
    pool.lose("n0")
    pool.later(30)
    assert stops(pool.window()) == [("revoke", "a:0:1")]
    return pool, first


def test_after_the_grace_the_job_is_queued_again_and_the_old_run_keeps_its_gpus(make_pool):
    pool, _ = given_up(make_pool)
    assert placed(pool.solve()) == {"a": {"n1": 8}}
    pool.send(ev.NodeHeard(node_id="n0"))
    assert pool.free() == {"n0": 0, "n1": 0}
    assert pool.states("a") == ["placed"]


def test_what_was_given_up_is_not_charged_so_the_job_runs_again_within_its_quota(make_pool):
    pool = make_pool(lost_grace_s=30.0, tenants={"q": TenantPolicy(quota_gpus=8.0)})
    pool.nodes(2)
    pool.arrive("a", 8, tenant="q")
    pool.running("a")
    first = pool.placements["a"]
    pool.lose("n0")
    pool.later(29)
    pool.solve()
    assert pool.state.usage("q").held_milli == 8000
    pool.later(1)
    assert placed(pool.solve()) == {"a": {"n1": 8}}
    pool.start("a")
    pool.verify()
    assert pool.state.usage("q").held_milli == 8000
    pool.crash()
    pool.report(ev.RunReleased, "a", first)
    assert pool.state.usage("q").held_milli == 8000
    pool.complete("a")
    assert pool.state.usage("q").held_milli == 0
    pool.verify()


def test_a_stop_that_is_given_up_twice_is_credited_once(make_pool):
    pool = make_pool(lost_grace_s=30.0)
    pool.nodes(2)
    pool.arrive("a", 8, preemptible=True)
    pool.running("a")
    pool.send(ev.NodeDrained(node_id="n0"))
    for _ in range(2):
        pool.lose("n0")
        pool.later(30)
        pool.window()
        assert pool.state.usage("default").held_milli == 0
        pool.send(ev.NodeHeard(node_id="n0"))
        pool.verify()
    pool.report(ev.RunReleased, "a")
    assert pool.state.usage("default").held_milli == 0
    pool.verify()


def test_the_first_run_to_complete_wins_and_the_other_is_revoked(make_pool):
    pool, first = given_up(make_pool)
    pool.running("a")
    pool.later(5)
    assert stops(pool.complete("a", first)) == [("revoke", "a:0:2")]
    assert pool.states("a") == ["completed"]
    pool.arrive("b", 8)
    assert pool.solve() == []
    assert pool.report(ev.RunReleased, "a") == []
    assert pool.states("a") == ["completed"]
    assert placed(pool.solve()) == {"b": {"n1": 8}}
    pool.complete("b")
    pool.send(ev.NodeHeard(node_id="n0"))
    assert pool.free() == {"n0": 8, "n1": 8}


def test_the_second_run_may_complete_first(make_pool):
    pool, first = given_up(make_pool)
    pool.running("a")
    pool.complete("a")
    assert pool.states("a") == ["completed"]
    assert codes(pool.complete("a", first)) == ["absorb:already-ended"]
    pool.send(ev.NodeHeard(node_id="n0"))
    assert pool.free() == {"n0": 8, "n1": 8}


def test_a_run_given_up_that_is_killed_does_not_fail_its_job(make_pool):
    pool, first = given_up(make_pool)
    pool.running("a")
    pool.send(ev.NodeHeard(node_id="n0"))
    assert pool.report(ev.RunFailed, "a", first, exit_code=143) == []
    assert pool.states("a") == ["running"]
    assert pool.free() == {"n0": 8, "n1": 0}


def test_a_run_given_up_completes_a_job_that_is_held_meanwhile(make_pool):
    pool, first = given_up(make_pool)
    pool.command(ev.HoldRequested, "a")
    pool.complete("a", first)
    assert pool.states("a") == ["completed"]


def test_three_runs_two_of_them_given_up(make_pool):
    pool, first = given_up(make_pool)
    pool.running("a")
    second = pool.placements["a"]
    pool.lose("n1")
    pool.later(30)
    assert stops(pool.window()) == [("revoke", "a:0:2")]
    pool.node("n2")
    pool.running("a")
    assert stops(pool.complete("a", second)) == [("revoke", "a:0:3")]
    assert codes(pool.complete("a", first)) == ["absorb:already-ended"]
    pool.report(ev.RunReleased, "a")
    assert pool.free() == {"n2": 8}
    assert not pool.state.runs


def test_a_fenced_node_gives_its_runs_up_at_once(make_pool):
    pool = make_pool()
    pool.nodes(2)
    pool.arrive("a", 8)
    pool.running("a")
    assert pool.lose("n0", fenced=True) == []
    assert pool.states("a") == ["queued"]
    assert placed(pool.solve()) == {"a": {"n1": 8}}
    pool.node("n0")
    assert pool.free() == {"n0": 8, "n1": 0}


@pytest.mark.parametrize(("before_s", "over"), [(10.0, False), (0.0, False), (-4.0, False), (-6.0, True)])
def test_old_news_of_a_fence_stops_what_was_placed_since(make_pool, before_s, over):
    """The node was fenced so many seconds before the run started on it: it may well run there, so it is awaited."""
    pool = make_pool()
    pool.nodes(1)
    pool.arrive("a", 8)
    pool.running("a")
    started_at = pool.state.runs["a:0:1"].started_at
    pool.now += 20.0
    out = pool.send(ev.NodeLost(node_id="n0", fenced=True, time=started_at - before_s))
    pool.node("n0")
    if over:
        assert (out, pool.states("a"), pool.free()) == ([], ["queued"], {"n0": 8})
        return
    assert stops(out) == [("revoke", "a:0:1")]
    assert (pool.states("a"), pool.free()) == (["stopping"], {"n0": 0})
    pool.report(ev.RunReleased, "a")
    assert (pool.states("a"), pool.free()) == (["queued"], {"n0": 8})


def test_a_run_that_had_not_started_is_awaited_after_a_fence(make_pool):
    """Its placement may be told only now, by a successor, when the node is back."""
    pool = make_pool()
    pool.nodes(1)
    pool.arrive("a", 8)
    pool.solve()
    pool.now += 20.0
    assert stops(pool.send(ev.NodeLost(node_id="n0", fenced=True, time=pool.now))) == [("revoke", "a:0:1")]
    pool.node("n0")
    assert pool.free() == {"n0": 0}


def test_a_fence_after_a_loss_frees_what_was_given_up(make_pool):
    pool, _ = given_up(make_pool)
    pool.running("a")
    pool.lose("n0", fenced=True)
    assert pool.states("a") == ["running"]
    pool.node("n0")
    assert pool.free() == {"n0": 8, "n1": 0}


def gang(make_pool, **more):
    pool = make_pool(lost_grace_s=30.0)
    pool.nodes(2)
    pool.arrive("a", 8, 2, **more)
    pool.running("a")
    return pool


def test_a_gang_is_lost_with_any_of_its_nodes_and_back_with_all_of_them(make_pool):
    pool = gang(make_pool)
    pool.lose("n0")
    pool.lose("n1")
    pool.send(ev.NodeHeard(node_id="n0"))
    assert pool.run("a").state is RunState.LOST
    pool.send(ev.NodeHeard(node_id="n1"))
    assert pool.run("a").state is RunState.RUNNING


def test_a_gang_that_is_given_up_holds_each_node_until_it_is_told_of(make_pool):
    pool = gang(make_pool)
    pool.lose("n0")
    pool.later(30)
    assert stops(pool.window()) == [("revoke", "a:0:1")]
    first = pool.placements["a"]
    pool.node("n2")
    assert pool.solve() == []
    pool.report(ev.RunReleased, "a", first, node_ids=("n1",))
    assert placed(pool.solve()) == {"a": {"n1": 8, "n2": 8}}
    pool.lose("n0", fenced=True)
    pool.node("n0")
    assert pool.free() == {"n0": 8, "n1": 0, "n2": 0}


def test_a_gang_with_a_fenced_node_is_told_to_stop_on_the_others(make_pool):
    pool = gang(make_pool)
    pool.later(10)
    assert stops(pool.lose("n0", fenced=True)) == [("revoke", "a:0:1")]
    assert pool.states("a") == ["stopping"]
    pool.later(10)
    # What is left exits 0 because it is told to stop: a gang without one of its members has not completed.
    pool.complete("a")
    assert pool.states("a") == ["queued"]
    assert pool.job("a").attained_gpu_s == 8 * 10 + 8 * 20


def test_the_live_half_of_a_gang_is_waited_for_however_long(make_pool):
    """n0 was silent before it was fenced; n1 lives and will say when its GPUs are free."""
    pool = gang(make_pool)
    pool.lose("n0")
    pool.lose("n0", fenced=True)
    assert pool.states("a") == ["stopping"]
    pool.later(1000)
    assert stops(pool.window()) == [("revoke", "a:0:1")]
    assert pool.states("a") == ["stopping"]
    pool.complete("a")
    assert pool.states("a") == ["queued"]


def test_a_gang_whose_other_half_is_silent_is_given_up_after_the_grace(make_pool):
    pool = gang(make_pool)
    pool.lose("n1")
    pool.lose("n0", fenced=True)
    assert pool.states("a") == ["stopping"]
    pool.later(30)
    assert pool.window() == []
    assert pool.states("a") == ["queued"]
    pool.node("n0")
    pool.node("n2")
    assert placed(pool.solve()) == {"a": {"n0": 8, "n2": 8}}
    assert pool.state.inventory.nodes["n1"].free_gpus() == 0


def test_a_lost_member_that_is_released_leaves_a_run_that_goes_on(make_pool):
    pool = gang(make_pool)
    pool.lose("n0")
    pool.report(ev.RunReleased, "a", node_ids=("n0",))
    assert pool.run("a").state is RunState.RUNNING
    pool.later(1000)
    assert pool.window() == []


@pytest.mark.parametrize("command", ["cancel", "drain"])
@pytest.mark.parametrize("first", ["stop", "loss"])
def test_a_stop_on_a_node_that_falls_silent_ends_after_the_grace(make_pool, command, first):
    pool = make_pool(lost_grace_s=30.0)
    pool.nodes(2)
    pool.arrive("a", 8, preemptible=True)
    pool.running("a")

    def stop():
        if command == "cancel":
            return stops(pool.command(ev.CancelRequested, "a"))
        return stops(pool.send(ev.NodeDrained(node_id="n0")))

    if first == "stop":
        assert len(stop()) == 1
        pool.lose("n0")
    else:
        pool.lose("n0")
        assert len(stop()) == 1
    pool.later(29)
    pool.crash()
    assert pool.window() == []
    assert pool.states("a") == ["stopping"]
    pool.later(1)
    assert stops(pool.window()) == []
    old = pool.placements["a"]
    if command == "cancel":
        assert pool.states("a") == ["cancelled"]
    else:
        assert placed(pool.solve()) == {"a": {"n1": 8}}
    before = pool.job("a")
    assert pool.state.inventory.nodes["n0"].free_gpus() == 0
    pool.send(ev.NodeHeard(node_id="n0"))
    pool.complete("a", old)
    assert pool.state.inventory.nodes["n0"].free_gpus() == 8
    assert pool.states("a") == [before.state]


def test_a_stop_goes_on_when_the_node_is_heard_within_the_grace(make_pool):
    pool = make_pool(lost_grace_s=30.0)
    pool.nodes(1)
    pool.arrive("a", 8)
    pool.running("a")
    pool.lose("n0")
    pool.command(ev.CancelRequested, "a")
    pool.send(ev.NodeHeard(node_id="n0"))
    pool.later(1000)
    assert stops(pool.window()) == [("revoke", "a:0:1")]
    assert pool.states("a") == ["stopping"]
    pool.report(ev.RunReleased, "a")
    assert pool.states("a") == ["cancelled"]


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_device_cannot_be_given_or_freed_twice():
    node = Node(NodeRecord(spec=NodeSpec(node_id="n", gpu_type="t", gpus=2), capacity=2))
    one = Allocation(node_id="n", gpus=(0,))
    node.take("p", one)
    with pytest.raises(BrokenInvariant, match="given twice"):
        node.take("q", one)
    node.give_back("p", one)
    with pytest.raises(BrokenInvariant, match="freed twice"):
        node.give_back("p", one)


def test_devices_held_beyond_the_inventory_are_loaded_as_they_were(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("low", 6)
    pool.arrive("high", 2)
    pool.running("low", "high")
    pool.node("n0", 4)
    pool.complete("low")
    again = reloaded(pool.state)
    again.verify()
    assert again.inventory.classes() == pool.state.inventory.classes()
    assert pool.free() == {"n0": 2}
