"""Cases from the field (faults reported of other schedulers) that the core alone can show; the number is the case's."""

from __future__ import annotations

import random

import msgspec
import pytest
from core_builder import codes, first_fit, placed, stops, stored

from streamsched.bus import codec
from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.instructions import Place, Preempt, Revoke, SolveWindow
from streamsched.core.model import TERMINAL, WHOLE_GPU, Allocation, JobSpec, NodeSpec
from streamsched.core.node import Node, NodeRecord
from streamsched.placement import greedy
from streamsched.policy.rules import FirstComeFirstServed


def test_case_02_a_job_that_is_always_refused_does_not_hold_up_others(make_pool):
    pool = make_pool(quarantine_after=5)
    pool.node("n0", 8)
    pool.arrive("j1", 8)
    pool.solve()
    pool.report(ev.RunRejected, "j1", node_id="n0", reason="no such image")
    pool.arrive("j2", 8)
    assert placed(pool.solve()) == {"j2": {"n0": 8}}
    assert pool.why("j1") == "backoff: refused by n0: no such image"
    waits = []
    pool.complete("j2")
    for _ in range(6):
        pool.later(pool.job("j1").not_before - pool.now)
        assert placed(pool.solve()) == {"j1": {"n0": 8}}
        pool.report(ev.RunRejected, "j1", node_id="n0")
        waits.append(pool.job("j1").not_before - pool.now)
    assert waits == sorted(waits)
    assert waits[-1] > waits[0]
    pool.arrive("j3", 8)
    assert placed(pool.solve()) == {"j3": {"n0": 8}}


def test_case_03_jobs_of_a_type_that_is_lost_do_not_fill_the_window(make_pool):
    pool = make_pool(window_jobs=64)
    pool.nodes(4, 8, "V100")
    pool.node("p", 4, "P100")
    for i in range(4):
        pool.lose(f"n{i}")
    for i in range(1000):
        pool.arrive(f"v{i}", 1, gpu_types=("V100",))
    pool.arrive("j", 4, gpu_types=("P100",))
    assert placed(pool.solve()) == {"j": {"p": 4}}
    assert pool.why("v0") == "gpus: 1 x 1 of V100 needed, room now for 0 (0 GPUs free)"


def test_case_04_what_does_not_fit_does_not_hold_up_what_does(make_pool):
    pool = make_pool()
    pool.nodes(2, 8)
    pool.arrive("first", 4)
    pool.arrive("second", 8, 2)
    pool.arrive("third", 8)
    assert set(placed(pool.solve())) == {"first", "third"}
    assert pool.states("second") == ["queued"]


def test_case_05_two_gangs_one_window(make_pool):
    pool = make_pool()
    pool.nodes(100, 1)
    pool.arrive("a", 1, 100)
    pool.arrive("b", 1, 100)
    (ask,) = [i for i in pool.window() if isinstance(i, SolveWindow)]
    assignments = greedy(ask.problem)
    out = pool.send(ev.WindowSolved(solution=msgspec.structs.replace(first_fit(ask.problem), assignments=assignments)))
    assert [(i.job_id, len(i.allocations)) for i in out if isinstance(i, Place)] == [("a", 100)]
    assert pool.states("a", "b") == ["placed", "queued"]
    assert sum(pool.free().values()) == 0


def test_case_07_a_gang_on_its_way_out_does_not_hold_up_others(make_pool):
    pool = make_pool()
    pool.nodes(4, 8)
    pool.arrive("gang", 8, 3, preemptible=True)
    pool.running("gang")
    assert stops(pool.send(ev.NodeDrained(node_id="n2"))) == [("preempt", "gang:0:1")]
    pool.report(ev.RunReleased, "gang", node_ids=("n0",))
    pool.arrive("a", 8)
    pool.arrive("b", 8)
    assert placed(pool.solve()) == {"a": {"n0": 8}, "b": {"n3": 8}}
    pool.report(ev.RunPreempted, "gang")
    assert pool.states("gang") == ["queued"]


def test_case_08_every_gpu_has_one_owner_through_100_000_random_events():
    rng = random.Random(8)
    state = ClusterState("p", SchedulerConfig(lost_grace_s=50.0, finished_keep_s=100.0), FirstComeFirstServed())
    owner: dict[tuple[str, int], str] = {}
    held: dict[str, tuple[str, list[tuple[str, int]]]] = {}
    nodes = [f"n{i}" for i in range(8)]
    specs = {node_id: NodeSpec(node_id=node_id, gpu_type="V100", gpus=8) for node_id in nodes}
    joined_again = 0
    for node_id in nodes:
        state.handle(ev.NodeJoined(spec=specs[node_id]), 0.0)

    def take(place: Place) -> None:
        gpus = [(a.node_id, gpu) for a in place.allocations for gpu in a.gpus]
        for gpu in gpus:
            assert gpu not in owner, f"{gpu} of {owner.get(gpu)} was given to {place.placement_id}"
            owner[gpu] = place.placement_id
        held[place.placement_id] = (place.job_id, gpus)

    def give(placement_id: str) -> str:
        job_id, gpus = held.pop(placement_id)
        for gpu in gpus:
            del owner[gpu]
        return job_id

    for step in range(100_000):
        now = step * 0.1
        kind = rng.choices(("A", "C", "X", "N-", "N+", "W"), (30, 30, 5, 2, 4, 20))[0]
        if kind == "A":
            spec = JobSpec(
                job_id=f"j{step}",
                submitted_at=now,
                gpus_per_worker=rng.choice((1, 2, 4, 8)),
                workers=rng.choice((1, 1, 2)),
            )
            out = state.handle(ev.JobArrived(spec=spec), now)
        elif kind == "C" and held:
            placement_id = rng.choice(list(held))
            out = state.handle(ev.RunCompleted(placement_id=placement_id, job_id=give(placement_id), time=now), now)
        elif kind == "X" and state.jobs:
            out = state.handle(ev.CancelRequested(job_id=f"j{rng.randrange(step + 1)}"), now)
        elif kind == "N-":
            out = state.handle(ev.NodeLost(node_id=rng.choice(nodes)), now)
        elif kind == "N+":
            # One that was lost for long has been forgotten: it has to join again.
            node_id = rng.choice(nodes)
            out = state.handle(ev.NodeHeard(node_id=node_id), now)
            if node_id not in state.inventory.nodes:
                out = state.handle(ev.NodeJoined(spec=specs[node_id]), now)
                joined_again += 1
        else:
            out = state.handle(ev.WindowElapsed(), now)
            for ask in [i for i in out if isinstance(i, SolveWindow)]:
                out = out + state.handle(ev.WindowSolved(solution=first_fit(ask.problem)), now)
        for instruction in out:
            if isinstance(instruction, Place):
                take(instruction)
            elif isinstance(instruction, Revoke | Preempt) and rng.random() < 0.7:
                job_id = give(instruction.placement_id)
                state.handle(ev.RunReleased(placement_id=instruction.placement_id, job_id=job_id, time=now), now)
        free = sum(sum(f == WHOLE_GPU for f in node.free_milli) for node in state.inventory)
        assert free == 8 * len(state.inventory.nodes) - len(owner)
        if step % 1000 == 0:
            state.verify()
    state.verify()
    assert state.next_seq > 20_000
    assert joined_again


def test_case_10_a_finished_job_is_not_started_again_after_a_restart(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("j", 8)
    pool.running("j")
    pool.complete("j")
    pool.crash()
    assert pool.free() == {"n0": 8}
    assert pool.solve() == []
    assert codes(pool.arrive("j", 8)) == ["absorb:duplicate-job"]
    assert pool.solve() == []


def test_case_11_a_gang_waits_for_the_last_node_of_a_job_that_ends_piecemeal(make_pool):
    pool = make_pool()
    pool.nodes(4, 8)
    pool.arrive("first", 8, 4)
    pool.running("first")
    pool.report(ev.RunReleased, "first", node_ids=("n0", "n1", "n3"))
    pool.crash()
    pool.arrive("second", 8, 4)
    assert pool.solve() == []
    assert pool.why("second") == "gpus: 4 x 8 of any type needed, room now for 3 (24 GPUs free)"
    pool.complete("first")
    assert placed(pool.solve()) == {"second": {f"n{i}": 8 for i in range(4)}}


def test_case_12_each_job_starts_or_has_a_reason_within_one_window(make_pool):
    pool = make_pool()
    pool.nodes(2, 8)
    for i in range(5):
        pool.arrive(f"j{i}", 4)
    (ask,) = [i for i in pool.window() if isinstance(i, SolveWindow)]
    solution = first_fit(ask.problem)
    started = set(placed(pool.send(ev.WindowSolved(solution=solution))))
    assert started == {"j0", "j1", "j2", "j3"}
    for job_id in {f"j{i}" for i in range(5)} - started:
        assert pool.why(job_id) or solution.unplaced[job_id]


def test_case_13_jobs_that_can_never_fit_are_told_which_resource_and_the_others_run(make_pool):
    pool = make_pool()
    pool.nodes(2, 8)
    for i in range(10):
        pool.arrive(f"big{i}", 8, 5)
    pool.arrive("small", 1)
    assert set(placed(pool.solve())) == {"small"}
    for i in range(10):
        assert pool.states(f"big{i}") == ["unfit"]
        assert (
            pool.job(f"big{i}").reason == "can never fit: gpus: 5 workers are needed, all nodes together could hold 2"
        )


@pytest.mark.parametrize("first", ["completed", "started"])
def test_case_17_a_finished_job_stays_finished_whatever_the_order(make_pool, first):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("j", 8)
    pool.solve()
    if first == "completed":
        pool.complete("j")
        assert codes(pool.start("j")) == ["absorb:stale-run"]
    else:
        pool.start("j")
        pool.complete("j")
    assert pool.states("j") == ["completed"]
    assert pool.free() == {"n0": 8}
    assert pool.solve() == []


@pytest.mark.parametrize("back", ["heard", "joined"])
@pytest.mark.parametrize("fenced", [False, True])
def test_case_18_a_node_that_is_back_is_used_again(make_pool, back, fenced):
    pool = make_pool()
    pool.node("n0", 8)
    pool.lose("n0", fenced=fenced)
    assert pool.free() == {}
    if back == "heard":
        pool.send(ev.NodeHeard(node_id="n0"))
    else:
        pool.node("n0", 8)
    pool.arrive("a", 8)
    assert placed(pool.solve()) == {"a": {"n0": 8}}


def test_case_19_capacity_that_shrinks_below_what_is_used(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("one", 4)
    pool.arrive("two", 4)
    pool.running("one", "two")
    pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=6))
    pool.arrive("a", 6)
    assert pool.states("a") == ["queued"]
    assert pool.solve() == []
    assert pool.free() == {"n0": 0}
    pool.complete("one")
    assert pool.solve() == []
    assert pool.free() == {"n0": 2}
    pool.complete("two")
    assert placed(pool.solve()) == {"a": {"n0": 6}}


@pytest.mark.parametrize("planned", ["within the grace", "after it"])
def test_case_20_exactly_one_run_goes_on_when_a_lost_node_is_back(make_pool, planned):
    pool = make_pool(lost_grace_s=30.0)
    pool.nodes(2, 8)
    pool.arrive("j", 8)
    pool.running("j")
    pool.lose("n0")
    pool.later(10 if planned == "within the grace" else 30)
    out = pool.solve()
    if planned == "within the grace":
        assert out == []
        pool.send(ev.NodeHeard(node_id="n0"))
        assert pool.states("j") == ["running"]
        assert pool.run("j").placement_id == "j:0:1"
    else:
        assert stops(out) == [("revoke", "j:0:1")]
        assert placed(out) == {"j": {"n1": 8}}
        pool.send(ev.NodeHeard(node_id="n0"))
        pool.start("j")
        assert pool.run("j").placement_id == "j:0:2"
        assert [r.placement_id for r in pool.state.runs.values() if r.stop_at is None] == ["j:0:2"]


def test_case_23_shares_add_up_exactly_after_a_million_changes():
    node = Node(NodeRecord(spec=NodeSpec(node_id="n", gpu_type="t", gpus=1), capacity=1))
    tenth, three = (Allocation(node_id="n", gpus=(0,), gpu_milli=milli) for milli in (100, 300))
    for _ in range(250_000):
        node.take("a", tenth)
        node.take("b", three)
        node.give_back("a", tenth)
        node.give_back("b", three)
    assert node.free_milli == [WHOLE_GPU]
    assert node.free_gpus() == 1


@pytest.mark.parametrize("fraction", ["NaN", "0", "-1", "1.5", "0.0001", "1e999"])
def test_case_23_a_share_that_is_none_is_refused(fraction):
    good = b'{"pool":"p","job_id":"j","submitted_at":0,"gpu_fraction":0.3}'
    assert codec.job_spec(codec.decode_arrival(good)).gpu_milli == 300
    with pytest.raises(codec.Refused):
        codec.decode_arrival(good.replace(b"0.3", fraction.encode()))


def test_case_24_a_thousand_arrivals_in_one_second_keep_their_order_through_a_restart(make_pool):
    pool = make_pool(window_jobs=2000)
    pool.nodes(125, 8)
    names = [f"j{i}" for i in range(1000)]
    random.Random(24).shuffle(names)
    for name in names:
        pool.arrive(name)

    def order():
        (ask,) = [i for i in pool.window() if isinstance(i, SolveWindow)]
        return [c.job_id for c in ask.problem.candidates]

    assert order() == names
    pool.crash()
    assert order() == names


def test_case_26_types_match_by_their_declared_names_only(make_pool):
    pool = make_pool()
    for gpu_type in ("A100", "A100-80GB", "A10"):
        pool.node(f"node-{gpu_type}", 8, gpu_type)
    for gpu_type in ("A10", "A100", "A100-80GB"):
        pool.arrive(f"job-{gpu_type}", 8, gpu_types=(gpu_type,))
    pool.arrive("job-A1", 1, gpu_types=("A1",))
    pool.arrive("job-a100", 1, gpu_types=("a100",))
    assert placed(pool.solve()) == {f"job-{t}": {f"node-{t}": 8} for t in ("A10", "A100", "A100-80GB")}
    assert pool.states("job-A1", "job-a100") == ["unfit", "unfit"]


def test_case_28_the_same_job_twice_is_one_and_another_of_its_name_is_refused(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("j", 2)
    assert codes(pool.arrive("j", 2)) == ["absorb:duplicate-job"]
    before = stored(pool.state)
    assert codes(pool.arrive("j", 4)) == ["refuse:conflict"]
    assert stored(pool.state) == before
    assert placed(pool.solve()) == {"j": {"n0": 2}}


@pytest.mark.parametrize("when", ["before the commit", "after it"])
def test_case_29_a_cancel_between_solve_and_publish(make_pool, when):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("j", 8)
    (ask,) = [i for i in pool.window() if isinstance(i, SolveWindow)]
    solution = first_fit(ask.problem)
    if when == "before the commit":
        pool.command(ev.CancelRequested, "j")
        assert codes(pool.send(ev.WindowSolved(solution=solution))) == ["absorb:stale-assignment"]
    else:
        assert set(placed(pool.send(ev.WindowSolved(solution=solution)))) == {"j"}
        assert stops(pool.command(ev.CancelRequested, "j")) == [("revoke", "j:0:1")]
        pool.report(ev.RunReleased, "j")
    assert pool.states("j") == ["cancelled"]
    assert pool.free() == {"n0": 8}


def test_case_30_a_preempted_run_that_exits_0_has_not_completed_its_job(make_pool):
    pool = make_pool()
    pool.nodes(2, 8)
    pool.arrive("j", 8, preemptible=True)
    pool.running("j")
    pool.send(ev.NodeDrained(node_id="n0"))
    pool.later(1)
    pool.complete("j")
    assert pool.states("j") == ["queued"]
    assert placed(pool.solve()) == {"j": {"n1": 8}}


def test_case_31_a_job_of_no_duration(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("j", 8, estimate_s=0.0)
    pool.running("j")
    pool.complete("j")
    assert pool.states("j") == ["completed"]
    assert pool.job("j").attained_gpu_s == 0.0
    pool.arrive("share", gpu_milli=1, estimate_s=0.0)
    pool.solve()
    pool.complete("share")
    assert pool.states("share") == ["completed"]


def test_case_32_the_state_stays_as_small_as_what_is_alive():
    """10^5 jobs come and go; what is kept is bounded by what is remembered, which is 100 s of them."""
    state = ClusterState("p", SchedulerConfig(finished_keep_s=100.0), FirstComeFirstServed())
    for i in range(4):
        state.handle(ev.NodeJoined(spec=NodeSpec(node_id=f"n{i}", gpu_type="V100", gpus=8)), 0.0)
    sizes = []
    keys: set[str] = set()
    for step in range(100_000):
        now = float(step)
        job_id = f"j{step}"
        state.handle(ev.JobArrived(spec=JobSpec(job_id=job_id, submitted_at=now, gpus_per_worker=1 + step % 8)), now)
        if step % 10:
            continue
        (ask,) = [i for i in state.handle(ev.WindowElapsed(), now) if isinstance(i, SolveWindow)]
        for place in state.handle(ev.WindowSolved(solution=first_fit(ask.problem)), now):
            names = {"placement_id": place.placement_id, "job_id": place.job_id, "time": now}
            state.handle(ev.RunStarted(**names), now)
            state.handle(ev.RunCompleted(**names), now)
        for job in state.queued_jobs():
            state.handle(ev.CancelRequested(job_id=job.spec.job_id), now)
        changes = state.take_changes()
        for job_id, job in changes.jobs.items():
            (keys.discard if job is None else keys.add)(job_id)
        assert keys == state.jobs.keys()
        if step % 1000 == 0:
            sizes.append((len(state.jobs), len(state.runs), _containers(state)))
    assert len(set(sizes[1:])) == 1, sizes
    assert sizes[-1][0] <= 120


def _containers(state: ClusterState) -> int:
    """Entries in all containers of the state but the story, whose length is bounded."""
    parts = [*vars(state).items(), *vars(state.inventory).items()]
    return sum(len(v) for name, v in parts if isinstance(v, dict | set | list) and name not in ("_story", "_out"))


def test_case_33_an_arrival_that_is_sent_again_because_its_answer_was_lost_is_accepted_once(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    assert pool.arrive("j", 8) == []
    pool.crash()
    pool.later(5)
    assert codes(pool.arrive("j", 8)) == ["absorb:duplicate-job"]
    pool.running("j")
    assert codes(pool.arrive("j", 8)) == ["absorb:duplicate-job"]
    assert len(pool.placements) == pool.state.next_seq == 1
    assert sum(job.state not in TERMINAL for job in pool.state.jobs.values()) == 1
