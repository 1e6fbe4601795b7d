"""Seeded fault simulation of the service: `python -m tests.sim.faults --seed N [--verbose] | --seeds A-B | --forever`.

Theory of operation. The production Router, Scheduler, PoolRunner, recovery and store run on an event loop in virtual
time (`loop.py`). Fake are only the edges: Kafka's and Redis's servers (`kafka.py`, `redis.py`), the consumer group and
the process around a worker (`workers.py`), nodes and executors (`executors.py`), users (`workload.py`), and the
solver (greedy after a delay). One seed draws cluster, workload, rates of faults and their moments.

First phase: workers are killed and frozen at effects and at any other time, Kafka and Redis lose answers, writes and
data, nodes vanish and return; only safety is checked (`checks.py`). Then the faults stop: within a bounded time every
feasible job must end, nothing may be held, and the topics as a whole are checked.

A failure names its seed; the same seed on the same commit is the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal
from unittest import mock

from loadgen.fleet import FleetOptions
from streamsched.bus import codec, journal
from streamsched.bus import messages as m
from streamsched.bus.topics import TopicNames, partition_of
from streamsched.core.config import SchedulerConfig
from streamsched.core.errors import BrokenInvariant
from streamsched.core.model import TERMINAL, JobState
from streamsched.core.tenants import TenantPolicy
from streamsched.policy import RULES
from streamsched.service.settings import Settings
from streamsched.sim.nodes import NodeGroup

from . import workload
from .checks import PoolChecks, audited, inputs_accounted_for
from .executors import Executors, Fleet
from .loop import Stuck, VirtualLoop
from .loop import run as run_loop
from .redis import Data
from .workers import Group
from .world import TRACE_KEPT, Faults, Violation, World

HEAL_S_MAX = 400.0
_LOOK_EVERY_S = 4.0
_PREEMPT_SHARE = 0.4
"""Of the seeds; drawn apart, so that the others are what they would be without."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """What a seed means. Tests of single cases change parts of it."""

    rng: Random
    pools: tuple[str, ...] = ("alpha",)
    partitions: int = 1
    workers: int = 2
    jobs: int = 20
    faults_s: float = 30.0
    groups: tuple[NodeGroup, ...] = (NodeGroup(3, 8, "A"),)
    fleet: FleetOptions = field(default_factory=FleetOptions)
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    faults: Faults
    snapshot_every: int = 1000
    burst: float = 0.0
    node_trouble_s: float = 0.0
    """Mean time between troubles with nodes; 0: none. The same below."""
    redis_trouble_s: float = 0.0
    kafka_trouble_s: float = 0.0
    moves_s: float = 0.0
    blows_s: float = 0.0
    commands: bool = True
    """Else there are only arrivals, each once."""
    own_pool: bool = False
    """Every job names its pool."""
    script: Callable[[Simulation], Coroutine[Any, Any, None]] | None = None
    """Runs beside the first phase, which ends no sooner than it does."""
    heals: bool = True
    """Else the run ends with the first phase."""
    predicts: bool = False
    """Run times are predicted."""


_LABELS = (
    "written scheduler.journal",
    "sent scheduler.journal",
    "redis commit",
    "redis commit executed",
    "redis commit done",
    "send placements",
    "written placements",
    "redis acquire executed",
    "redis acquire done",
    "redis clear done",
    "redis fill done",
    "send scheduler.snapshots",
    "read placements",
    "index end executed",
    "written pool.jobs",
    "deliver pool.jobs",
    "commit offsets",
)


def draw(seed: int) -> Plan:
    """From quiet to wild: each kind of fault is there in some runs and absent in others."""
    rng = Random(seed)
    pools = rng.choice((("alpha",), ("alpha",), ("alpha", "beta", "gamma")))

    def often(share: float, low: float, high: float) -> float:
        return rng.uniform(low, high) if rng.random() < share else 0.0

    faults = Faults(
        rng=rng,
        latency_max_s=rng.choice((0.003, 0.01, 0.05)),
        produce=often(0.6, 0.005, 0.08),
        command=often(0.6, 0.005, 0.05),
        kill=often(0.5, 0.0002, 0.003),
        freeze=often(0.5, 0.0002, 0.002),
        favourite=rng.choice(_LABELS),
        favourite_kill=often(0.7, 0.02, 0.2),
        session_s=rng.uniform(1.5, 6.0),
        late_solve=often(0.5, 0.05, 0.3),
        no_solve=often(0.4, 0.05, 0.3),
        broken_solve=often(0.4, 0.02, 0.2),
        clock_skew_s=often(0.4, 0.1, 3.0),
    )
    return Plan(
        rng=rng,
        pools=pools,
        partitions=1 if len(pools) == 1 else rng.choice((1, 2)),
        workers=rng.randint(1, 3),
        jobs=rng.randint(10, 40),
        faults_s=rng.uniform(15.0, 40.0),
        groups=_groups(rng),
        fleet=_fleet(rng, often),
        config=_config(rng, preempt="class" if Random(f"preempt {seed}").random() < _PREEMPT_SHARE else "off"),
        faults=faults,
        snapshot_every=rng.choice((5, 20, 80)),
        burst=rng.choice((0.0, 0.0, 0.5, 1.0)),
        own_pool=rng.random() < 0.5,
        node_trouble_s=often(0.6, 1.5, 10.0),
        redis_trouble_s=often(0.5, 3.0, 15.0),
        kafka_trouble_s=often(0.3, 5.0, 15.0),
        moves_s=often(0.5, 2.0, 10.0),
        blows_s=often(0.5, 2.0, 15.0),
    )


def _groups(rng: Random) -> tuple[NodeGroup, ...]:
    first = NodeGroup(rng.randint(1, 4), rng.choice((4, 8)), "A")
    return (first, NodeGroup(rng.randint(1, 3), rng.choice((2, 8)), "B")) if rng.random() < 0.6 else (first,)


def _fleet(rng: Random, often: Any) -> FleetOptions:
    return FleetOptions(
        seed=rng.randrange(2**32),
        start_delay_s=rng.choice((0.02, 0.5)),
        checkpoint_s=rng.choice((None, 1.0)),
        reject_share=often(0.3, 0.02, 0.2),
        fail_share=often(0.3, 0.02, 0.2),
        lose_started_share=often(0.3, 0.02, 0.2),
        duplicate_share=often(0.4, 0.05, 0.4),
        delay_s=often(0.4, 0.05, 3.0),
    )


def _config(rng: Random, preempt: Literal["off", "class"]) -> SchedulerConfig:
    return SchedulerConfig(
        preempt=preempt,
        preempt_interval_s=1.0,
        restart_s=1.0,
        policy=rng.choice(sorted(RULES)),
        lease_s=rng.choice((3.0, 6.0)),
        backoff_s=0.5,
        backoff_max_s=4.0,
        quarantine_after=3,
        quarantine_s=5.0,
        reserve_after_s=rng.choice((5.0, 20.0, 1000.0)),
        lost_grace_s=rng.choice((1.0, 4.0)),
        tenants={"small": TenantPolicy(quota_gpus=4), "red": TenantPolicy(weight=3.0)},
    )


@dataclass(slots=True)
class Result:
    """How a run went."""

    seed: int
    digest: str
    failure: str | None
    trace: list[str]
    counts: dict[str, int]
    virtual_s: float

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            last = "\n  ".join(self.trace[-TRACE_KEPT:])
            raise Violation(
                f"seed {self.seed}: {self.failure}\nlast events:\n  {last}\n"
                f"reproduce: python -m tests.sim.faults --seed {self.seed} --verbose"
            )


class Simulation:
    """One run of one plan."""

    def __init__(self, seed: int, plan: Plan, loop: VirtualLoop, say: Any = None) -> None:
        self.plan = plan
        self.healed_at = 0.0
        self.names = TopicNames()
        self.world = World(seed, loop, plan.partitions, plan.faults, say)
        self.settings = Settings(
            names=self.names,
            pools=plan.pools,
            partitions=plan.partitions,
            scheduler=plan.config,
            window_s=0.05,
            timer_s=0.5,
            node_silent_s=5.0,
            early_command_s=3.0,
            snapshot_every=plan.snapshot_every,
            ranking_every_s=2.0,
            stop_s=4.0,
            run_times="predicted" if plan.predicts else "said",
        )
        self.group = self.world.group = Group(self.world, self.settings, plan.workers)
        self.work = workload.draw(
            plan.rng, plan.jobs, plan.faults_s * 0.8, plan.pools, self.names, plan.burst, plan.own_pool, plan.commands
        )
        self.executors = [
            Executors(self.world, self.names, Fleet(pool, plan.groups, plan.fleet), partition_of(pool, plan.partitions))
            for pool in plan.pools
        ]
        self.checks = [PoolChecks(self, pool, partition_of(pool, plan.partitions)) for pool in plan.pools]

    # ── the two phases ───────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Returns when all is quiet and checked, or at the first failure (`world.failure`)."""
        self._begin()
        script = self.world.spawn(self.plan.script(self)) if self.plan.script is not None else None
        troubles = self._troubles()
        await self._watch_for(self.plan.faults_s)
        while script is not None and not script.done() and self.world.failure is None:
            await self._watch_for(0.5)
        for task in troubles:
            task.cancel()
        if not self.plan.heals:
            return
        self._heal()
        if not await self._watch_until_quiet():
            self.world.fail(f"not finished {HEAL_S_MAX:.0f} s after the faults had stopped: {self._unfinished()}")
        if self.world.failure is None:
            await self._finish()

    def _begin(self) -> None:
        for executors in self.executors:
            executors.start()
        for _ in range(self.plan.workers):
            self.group.start_worker()
        self.world.spawn(self.group.run())
        self.world.spawn(self.work.play(self.world))

    def _troubles(self) -> list[asyncio.Task[Any]]:
        plan, spawn = self.plan, self.world.spawn
        tasks = [
            spawn(self._now_and_then(every_s, do))
            for every_s, do in (
                (plan.redis_trouble_s, self._redis_trouble),
                (plan.kafka_trouble_s, self._kafka_away),
                (plan.moves_s, self.group.due.set),
                (plan.blows_s, self._blow),
            )
            if every_s
        ]
        if plan.node_trouble_s:
            tasks += [spawn(executors.trouble(plan.node_trouble_s)) for executors in self.executors]
        return tasks

    async def _now_and_then(self, every_s: float, do: Any) -> None:
        while True:
            await asyncio.sleep(self.plan.rng.expovariate(1.0 / every_s))
            do()

    async def _watch_for(self, seconds: float) -> None:
        end = self.world.loop.time() + seconds
        while self.world.loop.time() < end and self.world.failure is None:
            await asyncio.sleep(min(_LOOK_EVERY_S, end - self.world.loop.time() + 1e-6))
            await self._look()

    async def _watch_until_quiet(self) -> bool:
        end = self.world.loop.time() + HEAL_S_MAX
        quiet_since: float | None = None
        while self.world.loop.time() < end and self.world.failure is None:
            await asyncio.sleep(1.0)
            if self._unfinished():
                quiet_since = None
                continue
            quiet_since = quiet_since or self.world.loop.time()
            if self.world.loop.time() - quiet_since >= 3.0:
                return True
        return self.world.failure is not None

    async def _look(self) -> None:
        for checks in self.checks:
            self._fail_with(await checks.look())

    async def _finish(self) -> None:
        await self._look()
        for checks in self.checks:
            self._fail_with(checks.history_is_sound())
            self._fail_with(await checks.redis_is_up_to_date())
            state = checks.owner_state()
            assert state is not None
            state.verify()
        self._fail_with(audited(self))
        self._fail_with(inputs_accounted_for(self))
        self._fail_with(self._outcomes())

    def _fail_with(self, wrong: list[str]) -> None:
        if wrong:
            self.world.fail("; ".join(wrong[:5]))

    # ── faults of the surroundings ───────────────────────────────────────────────────────────────────────────────────

    def _redis_trouble(self) -> None:
        world, rng = self.world, self.plan.rng
        kind = rng.choice(("away", "copy", "copy", "flush", "restore"))
        if kind == "away":
            world.redis.away_until = world.loop.time() + rng.choice((0.1, 1.0, 6.0)) * rng.uniform(0.5, 1.5)
        elif kind == "copy":
            world.redis.keep_copy()
        elif kind == "flush":
            world.redis.replace(Data())
        elif world.redis.copies:
            world.redis.replace(rng.choice(world.redis.copies))
        else:
            return
        world.counts[f"redis {kind}"] += 1
        world.tell(f"redis: {kind}")

    def _kafka_away(self) -> None:
        world = self.world
        world.kafka.away_until = world.loop.time() + self.plan.rng.choice((0.2, 1.0, 5.0))
        world.counts["kafka away"] += 1
        world.tell(f"kafka: away until {world.kafka.away_until:.1f}")

    def _blow(self) -> None:
        """A worker dies or freezes at no special moment."""
        world, rng = self.world, self.plan.rng
        alive = [worker for worker in world.workers.values() if not worker.process.dead]
        if not alive:
            return
        worker = rng.choice(alive)
        if rng.random() < 0.5:
            world.kill(worker.name, "no special moment")
        else:
            world.freeze(worker.name, "no special moment", rng.uniform(0.2, 3.0) * world.faults.session_s)

    def _heal(self) -> None:
        """No more faults; what is cut off, frozen or held comes back."""
        world = self.world
        world.tell("healed: no more faults")
        self.healed_at = world.loop.time()
        world.faults.on = False
        world.redis.away_until = world.kafka.away_until = 0.0
        for worker in list(world.workers.values()):
            if worker.process.frozen:
                world.thaw(worker.name)
        self.group.start_worker()
        for executors in self.executors:
            executors.heal()
        world.later(12.0, self._release_held)
        world.later(12.0, lambda: [executors.heal() for executors in self.executors] and None)

    def _release_held(self) -> None:
        """Commands may still be under way; released twice does no harm."""
        for job_id in self.work.held:
            message = m.Release(job_id=job_id, time=self.world.epoch_s())
            workload.submit(self.world, self.names.commands, job_id.encode(), codec.encode(message))

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _unfinished(self) -> str:
        """Empty when every pool has an owner, all input is in, and nothing waits or runs that could not for ever."""
        if self.world.loop.time() < self.healed_at + 14.0:
            return "held jobs are not released yet"
        known: set[str] = set()
        for checks in self.checks:
            state = checks.owner_state()
            if state is None:
                return f"pool {checks.pool} has no owner"
            open_jobs = [
                f"{job_id} {job.state.value} ({job.reason})"
                for job_id, job in state.jobs.items()
                if job.state not in (*TERMINAL, JobState.UNFIT)
            ]
            if open_jobs or state.runs:
                return f"pool {checks.pool}: {', '.join(open_jobs[:8])}; runs {list(state.runs)[:8]}"
            known |= state.jobs.keys()
        missing = self.work.jobs.keys() - known
        return f"not arrived: {sorted(missing)}" if missing else self._unread()

    def _unread(self) -> str:
        for topic in self.group.topics:
            for partition in range(self.plan.partitions):
                end = len(self.world.kafka.logs[topic, partition])
                # Heartbeats go on; the last of them may be under way.
                if end - self.group.committed.get((topic, partition), 0) > 20 * len(self.plan.pools):
                    return f"{topic}[{partition}] is read to {self.group.committed.get((topic, partition))} of {end}"
        return ""

    def may_stay_unfinished(self) -> set[str]:
        unfit = {j for c in self.checks for j, job in self._jobs_of(c).items() if job.state is JobState.UNFIT}
        return self.work.cancelled | unfit

    def _jobs_of(self, checks: PoolChecks) -> dict[str, Any]:
        state = checks.owner_state()
        return state.jobs if state is not None else {}

    def _outcomes(self) -> list[str]:
        """Each job is in one pool and came to the end that it had to come to."""
        wrong = []
        pools_of: dict[str, list[str]] = {}
        for checks in self.checks:
            for job_id, job in self._jobs_of(checks).items():
                pools_of.setdefault(job_id, []).append(checks.pool)
                possible = workload.fits(self.work.jobs[job_id], self.executors[0].fleet.nodes)
                allowed = {JobState.COMPLETED} if possible else {JobState.UNFIT}
                if job_id in self.work.cancelled:
                    allowed.add(JobState.CANCELLED)
                if job.state not in allowed:
                    wrong.append(f"job {job_id} is {job.state.value} ({job.reason}), expected {sorted(allowed)}")
        wrong += [f"job {job_id} is in {pools}" for job_id, pools in pools_of.items() if len(pools) > 1]
        for executors in self.executors:
            if executors.fleet.live_runs:
                wrong.append(f"pool {executors.fleet.pool}: runs go on that nobody knows of")
        return wrong


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def quiet(loud: bool = False) -> Iterator[None]:
    """The service's own log would be most of the work."""
    before = logging.root.manager.disable
    logging.disable(logging.NOTSET if loud else logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run_plan(seed: int, plan: Plan, say: Any = None) -> tuple[Result, Simulation]:
    made: list[Simulation] = []

    async def main(loop: VirtualLoop) -> None:
        made.append(Simulation(seed, plan, loop, say))
        await made[0].run()

    def unhandled(what: dict[str, Any]) -> None:
        error = what.get("exception")
        if made and isinstance(error, AssertionError | TypeError | AttributeError | KeyError):
            made[0].world.fail(f"unhandled: {type(error).__name__}: {error}")

    with (
        quiet(loud=say is not None),
        mock.patch.object(journal, "read_partition", lambda *a, **k: made[0].world.kafka.read_partition(*a, **k)),
        mock.patch.object(journal, "first_offset", lambda *a, **k: made[0].world.kafka.first_offset(*a, **k)),
    ):
        try:
            run_loop(main, unhandled)
        except (Stuck, Violation, AssertionError, BrokenInvariant) as error:
            made[0].world.fail(f"{type(error).__name__}: {error}")
    world = made[0].world
    counts = dict(sorted(world.counts.items()))
    return Result(seed, world.digest.hexdigest(), world.failure, list(world.trace), counts, world.loop.time()), made[0]


def run_seed(seed: int, verbose: bool = False) -> Result:
    return run_plan(seed, draw(seed), print if verbose else None)[0]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.faults", description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run this one")
    which.add_argument("--seeds", help="run A-B")
    which.add_argument("--forever", action="store_true", help="run fresh seeds until one fails")
    parser.add_argument("--verbose", action="store_true", help="print every event and the service's log")
    return parser.parse_args()


def _seeds(options: argparse.Namespace) -> Iterator[int]:
    if options.seed is not None:
        yield options.seed
    elif options.seeds:
        first, last = (int(part) for part in options.seeds.split("-"))
        yield from range(first, last + 1)
    else:
        yield from (secrets.randbits(40) for _ in itertools.count())


def main() -> int:
    options = _parse()
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="          %(message)s", stream=sys.stdout)
    began, runs, failed = time.monotonic(), 0, 0
    for seed in _seeds(options):
        result = run_seed(seed, options.verbose)
        runs += 1
        if result.failure is not None:
            failed += 1
            try:
                result.raise_if_failed()
            except Violation as violation:
                print(str(violation) if not options.seeds else str(violation).splitlines()[0], flush=True)
            if options.forever:
                break
        elif options.seed is not None:
            print(f"seed {seed}: fine, {result.virtual_s:.0f} virtual s, {result.digest[:16]}, {result.counts}")
        if runs % 100 == 0:
            print(f"{runs} runs, {failed} failed, {(time.monotonic() - began) / runs:.2f} s each", flush=True)
    print(f"{runs} runs, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
