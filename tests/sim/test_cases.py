"""Cases from the field (faults reported of other schedulers) that need the service; the number is the case's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.core import events as ev
from streamsched.core.instructions import Place
from streamsched.core.model import JobState
from streamsched.core.window import rank
from streamsched.policy import by_name
from streamsched.sim.nodes import NodeGroup

from . import workload
from .faults import Plan, Result, Simulation, run_plan
from .redis import Data
from .world import Faults


def plan(seed: int = 1, faults: dict[str, Any] | None = None, **changes: Any) -> Plan:
    """Nothing goes wrong but what the test says."""
    rng = Random(seed)
    return Plan(rng=rng, faults=Faults(rng=rng, session_s=2.0, **(faults or {})), **changes)


def run(made: Plan) -> tuple[Result, Simulation]:
    result, sim = run_plan(0, made)
    result.raise_if_failed()
    return result, sim


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.01)


def placements(sim: Simulation) -> list[Any]:
    return [codec.decode_placement(record.value) for record in sim.world.kafka.topic(sim.names.placements)]


def places(sim: Simulation) -> Counter[str]:
    return Counter(p.decision.placement_id for p in placements(sim) if isinstance(p.decision, Place))


def epoch_of(sim: Simulation) -> int:
    return max(record.epoch for record in sim.checks[0].counted())


# ── 9: an old scheduler wakes ────────────────────────────────────────────────────────────────────────────────────────

_MOMENTS = (
    "deliver pool.jobs",
    "send scheduler.journal",
    "written scheduler.journal",
    "sent scheduler.journal",
    "redis commit executed",
    "redis commit done",
    "send placements",
    "written placements",
)


@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("forgetful", [False, True], ids=["", "redis_from_a_copy"])
def test_case_09_a_late_commit_of_an_old_scheduler_is_refused(moment: str, forgetful: bool) -> None:
    """It stalls past its session in the middle of a commit, a new one takes over, the old one wakes."""
    result, sim = wake_the_old_one(moment, forgetful)
    assert result.counts["freezes"] == 1
    assert epoch_of(sim) >= 2
    # Whoever was in the middle of the commit told its decisions, or the new one did, with the same content.
    assert set(places(sim)) == {d.placement_id for r in sim.checks[0].counted() for d in r.decisions if _is_place(d)}


def wake_the_old_one(moment: str, forgetful: bool, number: int = 23) -> tuple[Result, Simulation]:
    """`number`: at which of these moments it stalls. `forgetful`: when it wakes, Redis comes back from a copy in which
    the old one still is the owner."""

    async def script(sim: Simulation) -> None:
        await until(lambda: sim.world.counts["freezes"])
        frozen = next(worker for worker in sim.world.workers.values() if worker.process.frozen)
        before = epoch_of(sim)
        sim.world.redis.keep_copy()
        await until(lambda: epoch_of(sim) > before and placements(sim)[-1].epoch > before)
        if forgetful:
            sim.world.redis.replace(sim.world.redis.copies[-1])
        sim.world.thaw(frozen.name)
        await asyncio.sleep(5.0)

    return run(plan(faults={"exact": {(moment, number): "freeze"}, "freeze_s": 1000.0}, jobs=40, script=script))


@pytest.mark.parametrize("moment", ["redis clear executed", "redis fill executed"])
def test_case_09_what_an_old_scheduler_writes_anew_is_refused(moment: str) -> None:
    """It stalls while it gives a lost Redis its state back, and wakes when a new one has done so and gone on."""
    result, sim = wake_the_old_one_as_it_writes_anew(moment)
    assert result.counts["freezes"] == 1
    assert epoch_of(sim) >= 3


def wake_the_old_one_as_it_writes_anew(moment: str) -> tuple[Result, Simulation]:
    async def script(sim: Simulation) -> None:
        world = sim.world
        await until(lambda: len(placements(sim)) >= 10)
        world.faults.exact[moment, world.labels[moment] + 1] = "freeze"
        world.redis.replace(Data())
        await until(lambda: world.counts["freezes"])
        frozen = next(worker for worker in world.workers.values() if worker.process.frozen)
        before = epoch_of(sim)
        await until(lambda: epoch_of(sim) > before and placements(sim)[-1].epoch > before)
        await asyncio.sleep(5.0)
        world.thaw(frozen.name)
        await asyncio.sleep(5.0)

    return run(plan(faults={"freeze_s": 1000.0}, jobs=40, script=script))


def _is_place(decision: Any) -> bool:
    return isinstance(decision, Place)


# ── 14: partitions move ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(5))
def test_case_14_partitions_move_in_the_middle_of_a_batch(seed: int) -> None:
    """Twice while 100 jobs that came at once are worked on: each placement once on the topic, no event lost."""

    async def script(sim: Simulation) -> None:
        for _ in range(2):
            generation = sim.group.generation
            before = len(placements(sim))
            await until(lambda before=before: len(placements(sim)) > before)
            sim.group.due.set()
            await until(lambda generation=generation: sim.group.generation > generation)

    _, sim = run(plan(seed, jobs=100, faults_s=10.0, burst=1.0, workers=3, script=script))
    assert sim.group.generation >= 3
    assert set(places(sim).values()) == {1}
    assert len(sim.work.jobs) == 100


# ── 15: kill -9 while events flow ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(4))
def test_case_15_counts_reconcile_after_kills(seed: int) -> None:
    """Killed at any effect, up to twenty times: each arrival is applied, each job ends once, nothing is left."""
    made = plan(
        seed,
        faults={"kill": 0.004, "kills_left": 20},
        jobs=200,
        faults_s=60.0,
        groups=(NodeGroup(6, 8, "A"), NodeGroup(6, 8, "B")),
    )
    result, sim = run(made)
    assert result.counts["kills"] >= 5
    records = sim.checks[0].counted()
    arrived = {e.spec.job_id for r in records for e in r.events if isinstance(e, ev.JobArrived)}
    completed = Counter(e.job_id for r in records for e in r.events if isinstance(e, ev.RunCompleted))
    state = sim.checks[0].owner_state()
    assert state is not None
    assert arrived == set(sim.work.jobs) == set(state.jobs)
    ended = Counter(job.state for job in state.jobs.values())
    assert ended.total() == 200
    assert {job_id for job_id, job in state.jobs.items() if job.state is JobState.COMPLETED} <= set(completed)


# ── 16: a produce fails ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [1, 2, 5])
def test_case_16_a_placement_that_was_not_written_is_published_later_once(number: int) -> None:
    _, sim = run(plan(faults={"exact": {("placements", number): "not written"}}, jobs=20))
    assert set(places(sim).values()) == {1}
    decided = {d.placement_id for r in sim.checks[0].counted() for d in r.decisions if _is_place(d)}
    assert set(places(sim)) == decided


@pytest.mark.parametrize("moment", ["send placements", "redis commit executed", "redis commit done"])
def test_case_16_a_placement_whose_scheduler_dies_is_published_by_the_next_once(moment: str) -> None:
    result, sim = run(plan(faults={"exact": {(moment, 6): "kill"}}, jobs=20))
    assert result.counts["kills"] == 1
    assert set(places(sim).values()) == {1}
    decided = {d.placement_id for r in sim.checks[0].counted() for d in r.decisions if _is_place(d)}
    assert set(places(sim)) == decided


# ── 24: a thousand at once ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["fcfs", "smallest", "fairshare"])
def test_case_24_a_thousand_arrivals_of_one_second_keep_their_order(policy: str) -> None:
    orders: list[list[str]] = []

    def queue(sim: Simulation) -> list[str]:
        state = sim.checks[0].owner_state()
        return [] if state is None else [job.spec.job_id for _, job in rank(state, by_name(policy), state.now)]

    async def script(sim: Simulation) -> None:
        fleet = sim.executors[0].fleet
        sim.executors[0].tell_nodes(m.Cordon(pool=fleet.pool, node_id=node.node_id, time=1.0) for node in fleet.nodes)
        await until(lambda: len(queue(sim)) == 1000)
        owner = sim.group.owners[0]
        orders.append(queue(sim))
        sim.world.kill(owner.name, "the test")
        await until(lambda: sim.group.owners.get(0) not in (None, owner) and len(queue(sim)) == 1000)
        orders.append(queue(sim))

    groups = (NodeGroup(4, 8, "A"), NodeGroup(4, 8, "B"))
    run(plan(jobs=1000, burst=1.0, commands=False, groups=groups, faults_s=2.0, script=script, heals=False))
    assert orders[0] == orders[1]


# ── Redis comes back from an old copy ────────────────────────────────────────────────────────────────────────────────


def test_a_job_submitted_again_after_redis_came_back_old_stays_in_its_pool() -> None:
    result, _ = resubmit_after_an_old_copy()
    assert result.counts.get("fenced", 0) == 0


def resubmit_after_an_old_copy() -> tuple[Result, Simulation]:
    """The copy is from before the job, which names no pool; the second submission comes with its return."""

    async def script(sim: Simulation) -> None:
        redis, prefix = sim.world.redis, sim.settings.key_prefix
        ready = f"{prefix}{{#router}}:pools".encode()
        await until(lambda: len(redis.data.hashes[ready]) == 2 and all(c.owner_state() for c in sim.checks))
        redis.keep_copy()
        [(job_id, job)] = sim.work.jobs.items()
        await until(lambda: any(job_id in s.jobs for c in sim.checks if (s := c.owner_state()) is not None))
        redis.replace(redis.copies[-1])
        workload.submit(sim.world, sim.names.arrivals, job_id.encode(), codec.encode(job))

    made = plan(jobs=1, burst=1.0, commands=False, pools=("alpha", "beta"), partitions=2, faults_s=6.0, script=script)
    return run(made)


# ── a former owner's clock is ahead ──────────────────────────────────────────────────────────────────────────────────


def test_time_goes_on_where_a_former_owners_clock_was_far_ahead() -> None:
    """Standing still until the next owner's clock has caught up would hold leases and backoffs for an hour."""
    times: list[float] = []

    def latest(sim: Simulation) -> float:
        return max(record.now for record in sim.checks[0].counted())

    async def script(sim: Simulation) -> None:
        await until(lambda: sim.group.owners.get(0) is not None and len(placements(sim)) >= 5)
        ahead = sim.group.owners[0]
        ahead._skew_s = 3600.0
        await until(lambda: latest(sim) > sim.world.epoch_s() + 3000.0)
        before = epoch_of(sim)
        sim.world.kill(ahead.name, "the test")
        await until(lambda: epoch_of(sim) > before)
        times.append(latest(sim))
        started_at = sim.world.epoch_s()
        await until(lambda: sim.world.epoch_s() > started_at + 20.0)
        times.append(latest(sim))

    run(plan(jobs=100, faults_s=40.0, script=script))
    assert 10.0 < times[1] - times[0] < 30.0
