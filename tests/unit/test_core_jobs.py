"""Arrivals and commands."""

from __future__ import annotations

import msgspec
import pytest
from core_builder import codes, placed, stops

from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.core import events as ev
from streamsched.core.model import TERMINAL

COMMANDS = [ev.CancelRequested, ev.HoldRequested, ev.ReleaseRequested, ev.ReprioritiseRequested]


def test_an_arrival_is_queued_and_asks_for_nothing(make_pool):
    pool = make_pool()
    pool.node("n0")
    assert pool.arrive("a") == []
    assert pool.states("a") == ["queued"]
    assert pool.job("a").queued_at == pool.now


def test_the_placement_of_a_job_with_the_longest_name_can_be_answered(make_pool):
    pool = make_pool()
    pool.node("n0")
    arrival = codec.decode_arrival(
        msgspec.json.encode(m.JobArrival(job_id="j" * 253, submitted_at=1.0, gpu_fraction=0.5))
    )
    pool.send(ev.JobArrived(spec=codec.job_spec(arrival)))
    pool.solve()
    name = pool.placements["j" * 253].placement_id
    for kind, state in ((m.Started, "running"), (m.Completed, "completed")):
        report = kind(pool="p", job_id="j" * 253, placement_id=name, time=pool.now)
        pool.send(codec.run_event(codec.decode_completion(msgspec.json.encode(report))))
        assert pool.states("j" * 253) == [state]


def test_the_same_arrival_again_is_absorbed_and_another_of_its_name_is_refused(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a", 2)
    first = pool.job("a")
    pool.later(5)
    assert codes(pool.arrive("a", 2, traceparent="00-1-2-01")) == ["absorb:duplicate-job"]
    assert codes(pool.arrive("a", 4)) == ["refuse:conflict"]
    assert pool.job("a") == first
    assert pool.state.next_seq == 1


def test_a_finished_job_is_not_run_again_when_its_arrival_is_repeated(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a")
    pool.running("a")
    pool.complete("a")
    assert codes(pool.arrive("a")) == ["absorb:duplicate-job"]
    assert pool.solve() == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_for_an_unknown_job_is_refused(make_pool, command):
    pool = make_pool()
    assert codes(pool.command(command, "nobody")) == ["refuse:unknown-job"]


def test_cancel_of_waiting_jobs(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("queued")
    pool.arrive("held")
    pool.command(ev.HoldRequested, "held")
    pool.arrive("unfit", 99)
    for job_id in ("queued", "held", "unfit"):
        assert pool.command(ev.CancelRequested, job_id) == []
        assert pool.states(job_id) == ["cancelled"]
        assert codes(pool.command(ev.CancelRequested, job_id)) == ["absorb:already-ended"]
    assert pool.solve() == []


@pytest.mark.parametrize("started", [False, True])
def test_cancel_of_a_run_revokes_it_and_holds_its_gpus_until_released(make_pool, started):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a", 8)
    pool.solve()
    if started:
        pool.start("a")
    assert stops(pool.command(ev.CancelRequested, "a")) == [("revoke", "a:0:1")]
    assert pool.states("a") == ["stopping"]
    assert stops(pool.command(ev.CancelRequested, "a")) == []
    pool.arrive("b", 8)
    assert pool.solve() == []
    assert pool.report(ev.RunReleased, "a") == []
    assert pool.states("a") == ["cancelled"]
    assert placed(pool.solve()) == {"b": {"n0": 8}}


def test_hold_keeps_a_job_out_of_windows_until_released(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a")
    assert pool.command(ev.HoldRequested, "a") == []
    assert codes(pool.command(ev.HoldRequested, "a")) == ["absorb:already-held"]
    assert pool.solve() == []
    pool.later(10)
    pool.command(ev.ReleaseRequested, "a")
    assert pool.job("a").queued_at == pool.now
    assert placed(pool.solve()) == {"a": {"n0": 1}}


def test_only_waiting_jobs_can_be_held_and_only_held_ones_released(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a")
    assert codes(pool.command(ev.ReleaseRequested, "a")) == ["refuse:not-applicable"]
    pool.running("a")
    assert codes(pool.command(ev.HoldRequested, "a")) == ["refuse:not-applicable"]
    assert codes(pool.command(ev.ReleaseRequested, "a")) == ["refuse:not-applicable"]
    assert pool.states("a") == ["running"]


def test_hold_and_release_while_a_run_is_being_stopped(make_pool):
    pool = make_pool(lease_s=60.0)
    pool.node("n0")
    pool.arrive("a")
    pool.solve()
    pool.later(61)
    assert stops(pool.window()) == [("revoke", "a:0:1")]
    assert pool.command(ev.HoldRequested, "a") == []
    assert codes(pool.command(ev.HoldRequested, "a")) == ["absorb:already-held"]
    assert pool.command(ev.ReleaseRequested, "a") == []
    assert pool.command(ev.HoldRequested, "a") == []
    pool.report(ev.RunReleased, "a")
    assert pool.states("a") == ["held"]


def test_cancel_wins_over_hold_while_stopping(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a", preemptible=True)
    pool.running("a")
    pool.send(ev.NodeDrained(node_id="n0"))
    pool.command(ev.HoldRequested, "a")
    pool.command(ev.CancelRequested, "a")
    assert codes(pool.command(ev.HoldRequested, "a")) == ["refuse:not-applicable"]
    pool.report(ev.RunPreempted, "a")
    assert pool.states("a") == ["cancelled"]


def test_release_of_a_job_that_no_longer_fits_says_so(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("a", 8)
    pool.command(ev.HoldRequested, "a")
    pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=4))
    pool.command(ev.ReleaseRequested, "a")
    assert pool.states("a") == ["unfit"]


def test_reprioritise_changes_what_was_said_and_only_that(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a")
    pool.command(ev.ReprioritiseRequested, "a", weight=3.0)
    assert (pool.job("a").weight, pool.job("a").priority_class) == (3.0, None)
    pool.command(ev.ReprioritiseRequested, "a", priority_class="high")
    assert (pool.job("a").weight, pool.job("a").priority_class) == (3.0, "high")
    pool.command(ev.CancelRequested, "a")
    assert codes(pool.command(ev.ReprioritiseRequested, "a", weight=1.0)) == ["refuse:not-applicable"]


def test_a_command_that_comes_twice_has_one_effect(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a")
    pool.command(ev.HoldRequested, "a", offset=7)
    pool.command(ev.ReleaseRequested, "a", offset=8)
    assert codes(pool.command(ev.HoldRequested, "a", offset=7)) == ["absorb:duplicate-command"]
    assert codes(pool.command(ev.ReleaseRequested, "a", offset=8)) == ["absorb:duplicate-command"]
    assert pool.states("a") == ["queued"]
    pool.crash()
    assert codes(pool.command(ev.HoldRequested, "a", offset=7)) == ["absorb:duplicate-command"]


def test_a_cancel_remembers_its_place_also_when_there_is_a_run(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a")
    pool.running("a")
    pool.command(ev.CancelRequested, "a", offset=3)
    assert codes(pool.command(ev.CancelRequested, "a", offset=3)) == ["absorb:duplicate-command"]
    assert pool.job("a").command_offset == 3


def test_finished_jobs_are_forgotten_after_a_while_and_their_ids_are_new_then(make_pool):
    pool = make_pool(finished_keep_s=100.0)
    pool.node("n0")
    pool.arrive("a")
    pool.running("a")
    pool.complete("a")
    pool.state.take_changes()
    pool.later(100)
    pool.window()
    assert pool.job("a").state in TERMINAL
    pool.later(1)
    pool.window()
    assert "a" not in pool.state.jobs
    assert pool.state.take_changes().jobs == {"a": None}
    assert pool.arrive("a", 2) == []
    assert placed(pool.solve()) == {"a": {"n0": 2}}
    assert pool.placements["a"].placement_id == "a:1:1"


def test_a_finished_job_is_kept_while_a_run_of_it_holds_gpus(make_pool):
    pool = make_pool(finished_keep_s=100.0, lost_grace_s=10.0)
    pool.nodes(2)
    pool.arrive("a")
    pool.running("a")
    first = pool.placements["a"]
    pool.lose("n0")
    pool.later(10)
    pool.window()
    pool.running("a")
    pool.complete("a")
    pool.later(101)
    pool.window()
    assert "a" in pool.state.jobs
    pool.report(ev.RunReleased, "a", first)
    pool.window()
    assert "a" not in pool.state.jobs


def test_a_job_that_can_never_fit_is_told_so_and_looked_at_again_when_nodes_come(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("a", 8, 2)
    assert pool.states("a") == ["unfit"]
    assert pool.job("a").reason == "can never fit: gpus: 2 workers are needed, all nodes together could hold 1"
    pool.node("n1", 8)
    assert placed(pool.solve()) == {"a": {"n0": 8, "n1": 8}}


def test_a_waiting_job_becomes_unfit_when_the_inventory_shrinks(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("a", 8)
    pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=6))
    pool.window()
    assert pool.states("a") == ["unfit"]
    pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=8))
    assert placed(pool.solve()) == {"a": {"n0": 8}}


def test_a_lost_node_still_counts_for_what_could_fit(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.lose("n0")
    pool.arrive("a", 8)
    assert pool.states("a") == ["queued"]
    assert pool.solve() == []
    assert pool.why("a") == "gpus: 1 x 8 of any type needed, room now for 0 (0 GPUs free)"
