"""What is stored: changes tell all of it, JSON keeps it to the byte, loading does not depend on the order."""

from __future__ import annotations

import random

import msgspec
import pytest
from core_builder import Pool, first_fit, placed, reloaded, stored

from streamsched.core import events as ev
from streamsched.core.cluster import Changes, ClusterState
from streamsched.core.errors import BrokenInvariant
from streamsched.core.instructions import SolveWindow
from streamsched.core.model import TopologyLevel, TopologyWish


def busy_pool(make_pool) -> Pool:
    """Jobs in every state, runs in every state, nodes in every state."""
    pool = make_pool(lost_grace_s=30.0, quarantine_after=1, finished_keep_s=1e6)
    pool.nodes(6, 8, cpu_milli=10_000, memory_mib=10_000, rack="r", labels={"z": "1", "a": "2"})
    for i in range(4):
        pool.arrive(f"j{i}", 8, preemptible=True, labels={"y": "1", "b": "2"}, cpu_milli=7)
    pool.arrive("share", gpu_milli=300, topology=TopologyWish(level=TopologyLevel.RACK))
    pool.running("j0", "j1", "j2", "j3", "share")
    pool.arrive("placed", 2)
    pool.solve()
    pool.later(0.1 + 0.2)
    pool.complete("j0")
    pool.report(ev.RunFailed, "j1", exit_code=3)
    pool.lose("n2")
    pool.later(30)
    pool.window()
    pool.send(ev.NodeDrained(node_id="n3"))
    pool.command(ev.ReprioritiseRequested, "share", priority_class="high", weight=1 / 3)
    pool.arrive("refused", 8)
    pool.solve()
    pool.report(ev.RunRejected, "refused", node_id="n0")
    pool.arrive("held")
    pool.command(ev.HoldRequested, "held", offset=11)
    pool.arrive("unfit", 100)
    pool.arrive("cancelled")
    pool.command(ev.CancelRequested, "cancelled")
    pool.send(ev.NodeCordoned(node_id="n5"))
    return pool


def test_the_busy_pool_has_seen_everything(make_pool):
    pool = busy_pool(make_pool)
    jobs = {str(job.state) for job in pool.state.jobs.values()}
    assert jobs >= {"queued", "held", "unfit", "placed", "running", "stopping", "completed", "failed", "cancelled"}
    assert {str(run.state) for run in pool.state.runs.values()} == {"placed", "running", "stopping", "lost"}
    assert {str(n.record.state) for n in pool.state.inventory} == {"up", "cordoned", "draining", "quarantined"}


def test_every_stored_value_comes_back_from_json_equal_and_to_the_byte(make_pool):
    everything = busy_pool(make_pool).state.everything()
    kinds = (everything.jobs, everything.runs, everything.nodes, everything.tenants, {"meta": everything.meta})
    for values in kinds:
        assert values
        for value in values.values():
            raw = msgspec.json.encode(value)
            again = msgspec.json.decode(raw, type=type(value))
            assert again == value
            assert msgspec.json.encode(again) == raw


def test_loading_does_not_depend_on_the_order_of_what_is_stored(make_pool):
    pool = busy_pool(make_pool)
    stories = set()
    for seed in range(10):
        shuffled = shuffle(pool.state.everything(), random.Random(seed))
        state = ClusterState("p", ranker=pool.state.ranker)
        state.load(shuffled)
        state.verify()
        assert stored(state) == stored(pool.state)
        stories.add(future(state, pool.now))
    assert stories == {future(reloaded(pool.state), pool.now)}
    never_stored = ClusterState("p", pool.config, pool.state.ranker)
    for event, now in pool.history:
        never_stored.handle(event, now)
    assert stories == {future(never_stored, pool.now)}


def shuffle(everything: Changes, rng: random.Random) -> Changes:
    def mixed(values):
        return dict(rng.sample(list(values.items()), len(values)))

    return Changes(
        jobs=mixed(everything.jobs),
        runs=mixed(everything.runs),
        nodes=mixed(everything.nodes),
        tenants=mixed(everything.tenants),
        meta=everything.meta,
    )


def future(state: ClusterState, now: float) -> bytes:
    """What a state goes on to do."""
    told = []
    state.windows = 0
    for event, after in [
        (ev.NodeUncordoned(node_id="n5"), 1),
        (ev.ReleaseRequested(job_id="held"), 2),
        (ev.WindowElapsed(), 700),
        (ev.NodeHeard(node_id="n2"), 701),
        (ev.WindowElapsed(), 1500),
        (ev.NodeLost(node_id="n4", fenced=True), 1501),
        (ev.WindowElapsed(), 2e6),
    ]:
        out = state.handle(event, now + after)
        told.append(msgspec.json.encode(out))
        for ask in [i for i in out if isinstance(i, SolveWindow)]:
            told.append(
                msgspec.json.encode(state.handle(ev.WindowSolved(solution=first_fit(ask.problem)), now + after))
            )
    state.verify()
    return b"".join([*told, stored(state)])


def test_changes_add_up_to_everything(make_pool):
    """A store that only ever sees `take_changes` holds what `everything` says."""
    pool = busy_pool(make_pool)
    state = ClusterState("p", pool.config)
    jobs, runs, nodes, tenants = {}, {}, {}, {}
    meta = state.meta()
    for event, now in pool.history:
        state.handle(event, now)
        changes = state.take_changes()
        for kept, changed in (
            (jobs, changes.jobs),
            (runs, changes.runs),
            (nodes, changes.nodes),
            (tenants, changes.tenants),
        ):
            for name, value in changed.items():
                if value is None:
                    kept.pop(name, None)
                else:
                    kept[name] = value
        meta = changes.meta
    assert not state.take_changes()
    kept = Changes(
        jobs=dict(sorted(jobs.items())),
        runs=dict(sorted(runs.items())),
        nodes=dict(sorted(nodes.items())),
        tenants=dict(sorted(tenants.items())),
        meta=meta,
    )
    assert msgspec.json.encode(kept) == stored(pool.state)


def test_taking_a_pool_over_raises_the_epoch_and_takes_the_config(make_pool):
    pool = make_pool()
    pool.crash()
    pool.crash()
    assert pool.state.epoch == 2
    before = stored(pool.state)
    with pytest.raises(BrokenInvariant, match="epoch 2 after 2"):
        pool.state.handle(ev.EpochStarted(epoch=2, config=pool.config), pool.now)
    assert stored(pool.state) == before


def test_time_never_goes_back(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.later(-500)
    pool.arrive("a")
    assert pool.job("a").queued_at == 1000.0
    assert placed(pool.solve()) == {"a": {"n0": 1}}
    assert pool.run("a").placed_at == 1000.0


def test_verify_sees_a_state_that_is_wrong(make_pool):
    """The checks themselves: each corruption is found."""
    pool = busy_pool(make_pool)
    everything = pool.state.everything()
    run = next(r for r in everything.runs.values() if r is not None and r.job_id == "share")

    def broken(**parts):
        state = ClusterState("p")
        state.load(msgspec.structs.replace(everything, **parts))
        return state

    without_run = {k: v for k, v in everything.runs.items() if k != run.placement_id}
    with pytest.raises(BrokenInvariant, match="without a run"):
        broken(runs=without_run).verify()
    twice = msgspec.structs.replace(run, placement_id="share:9:9")
    with pytest.raises(BrokenInvariant, match="nobody's"):
        broken(runs={**everything.runs, "share:9:9": twice}).verify()
    state = reloaded(pool.state)
    state.inventory.nodes["n1"].free_milli[0] -= 1
    with pytest.raises(BrokenInvariant, match="by the runs"):
        state.verify()
    state = reloaded(pool.state)
    state.inventory.nodes["n0"].free_cpu_milli += 1
    with pytest.raises(BrokenInvariant, match="cpu or memory"):
        state.verify()
