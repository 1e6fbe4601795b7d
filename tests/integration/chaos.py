"""A storm over two workers, Redis and the broker while jobs flow, and what the topics say of it afterwards.

`Storm` does the damage: seeded faults one after the other beside a replay, with a supervisor that starts ended workers
again, as Kubernetes would. `Evidence` reads the topics once everything is quiet and judges by them alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from redis.exceptions import RedisError
from rich.table import Table
from service_fixture import Service, WorkerProcess

from loadgen.history import Audit, History, Stamped, audit
from streamsched.bus import codec, topics
from streamsched.bus import messages as m
from streamsched.bus.messages import JournalRecord
from streamsched.bus.topics import partition_of
from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.instructions import Place
from streamsched.core.model import TERMINAL
from streamsched.service.history import Until, replay, story_of
from streamsched.store.pool_store import summaries

KILL, FREEZE, REDIS, BROKER, FLUSH = "worker killed", "worker frozen", "Redis killed", "broker killed", "Redis flushed"
BOUND_BEYOND_SESSION_S = 5.0
_LOAD_MAX = 2.0
"""Processes that want a processor, per processor: beyond it times are not judged."""
_RUN_ENDS = (ev.RunCompleted, ev.RunFailed, ev.RunPreempted, ev.RunRejected, ev.RunReleased)


@dataclass(frozen=True, slots=True)
class Form:
    """How big a storm. Times are real seconds."""

    jobs: int
    arrivals_s: float
    nodes: str
    """Of each pool."""
    faults: Mapping[str, int]
    gap_s: tuple[float, float]
    """Between the end of a fault and the next."""
    after_kill_s: float
    """Further time without another fault after a worker's death, so that the survivor's first placement is its own."""

    def schedule(self, rng: random.Random) -> list[str]:
        kinds = [kind for kind, times in self.faults.items() for _ in range(times)]
        rng.shuffle(kinds)
        return kinds


@dataclass(slots=True)
class Fault:
    kind: str
    began: float
    ended: float = 0.0
    pools: tuple[str, ...] = ()
    """Those of the worker that was hit."""
    worker: WorkerProcess | None = None
    overloaded: bool = False


class Storm:
    """Two workers under a supervisor, and the faults."""

    def __init__(self, service: Service, form: Form, rng: random.Random, say: Callable[[str], None]) -> None:
        self.service = service
        self.form = form
        self.faults: list[Fault] = []
        self.exits: Counter[int] = Counter()
        """Exit codes of workers that ended without our kill."""
        self.mischief: Counter[str] = Counter()
        """Inputs sent beside the replay that are to be refused or to have no effect."""
        self.rebuilds: Counter[int] = Counter()
        self._rng = rng
        self._say = say
        self._slots: list[WorkerProcess] = []
        self._killed: set[WorkerProcess] = set()
        self._started = time.time()

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, workers: int = 2) -> None:
        self._slots = [self.service.spawn() for _ in range(workers)]
        pools = self.service.settings.pools
        self.service.wait_for(
            lambda: all(sum(w.said(rf"pool {p}: epoch \d+") for w in self._slots) for p in pools), "all pools"
        )

    async def supervise(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(0.2)
            for slot, worker in enumerate(self._slots):
                code = worker.process.poll()
                if code is None:
                    continue
                if worker not in self._killed:
                    self.exits[code] += 1
                    self._say(f"{self._now()} {worker.log.stem} ended by itself, exit code {code}")
                await asyncio.sleep(0.5)
                self._slots[slot] = self.service.spawn()

    async def watch(self) -> None:
        """Every few seconds to `watch.log`, until cancelled: what is not acknowledged, by topic, and pool loads."""
        with (self.service.folder / "watch.log").open("w") as log:
            while True:
                await asyncio.sleep(5.0)
                try:
                    async with asyncio.timeout(10.0):
                        lags = await lags_of(self.service)
                    loads = await asyncio.to_thread(self._loads)
                    log.write(f"{self._now()} {lags} {loads}\n")
                except (TimeoutError, KafkaError, RedisError, OSError) as error:
                    log.write(f"{self._now()} {error!r}\n")
                log.flush()

    def _loads(self) -> dict[str, str]:
        settings = self.service.settings
        values = self.service.redis(lambda client: summaries(client, settings.key_prefix, settings.pools))
        told = {pool: msgspec.json.decode(value) for pool, value in zip(settings.pools, values, strict=True) if value}
        return {pool: f"{now['queued']} queued, {now['runs']} runs" for pool, now in told.items()}

    def settled(self) -> bool:
        """Whether every pool in Redis says that all is done: for the end, when nothing flows any more."""
        for pool in self.service.settings.pools:
            state = self.service.state(pool)
            if state is None or any(run is not None for run in state.runs.values()):
                return False
            if any(job is not None and job.state not in TERMINAL for job in state.jobs.values()):
                return False
        return True

    def stop(self) -> list[int]:
        return [worker.stop() for worker in self._slots if worker.process.poll() is None]

    @property
    def recoveries(self) -> int:
        return sum(worker.said(r"pool \S+: epoch \d+,") for worker in self.service.workers)

    def frozen_outcomes(self) -> Counter[str]:
        """What became of the frozen workers, after the end."""
        outcomes: Counter[str] = Counter()
        for fault in self.faults:
            if fault.kind == FREEZE and fault.worker is not None:
                code = fault.worker.process.poll()
                rejoined = fault.worker in self._killed or code in (None, 0)
                outcomes["went on harmlessly" if rejoined else f"ended by itself, exit code {code}"] += 1
        return outcomes

    async def _victim(self) -> WorkerProcess:
        """A running worker that has pools, as soon as there is one."""
        while True:
            if busy := [w for w in self._slots if w.process.poll() is None and owned_pools(w)]:
                return self._rng.choice(busy)
            await asyncio.sleep(0.1)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def rage(self) -> None:
        """All the faults, one after the other, at random distances."""
        deeds: dict[str, Callable[[Fault], Awaitable[None]]] = {
            KILL: self._kill,
            FREEZE: self._freeze,
            REDIS: self._redis,
            BROKER: self._broker,
            FLUSH: self._flush,
        }
        await asyncio.sleep(2.0)
        for number, kind in enumerate(self.form.schedule(self._rng)):
            await asyncio.sleep(self._rng.uniform(*self.form.gap_s))
            if number % 4 == 1:
                await self._misbehave()
            fault = Fault(kind, time.time(), overloaded=os.getloadavg()[0] > _LOAD_MAX * (os.cpu_count() or 1))
            self.faults.append(fault)
            await deeds[kind](fault)
            fault.ended = time.time()
            whose = f" ({', '.join(fault.pools)})" if fault.pools else ""
            self._say(f"{self._now()} {kind}{whose}, {fault.ended - fault.began:.1f} s")
            if kind == KILL:
                await asyncio.sleep(self.form.after_kill_s)

    async def _kill(self, fault: Fault) -> None:
        worker = await self._victim()
        self._killed.add(worker)
        fault.worker, fault.pools, fault.began = worker, owned_pools(worker), time.time()
        worker.kill()

    async def _freeze(self, fault: Fault) -> None:
        worker = await self._victim()
        fault.worker, fault.pools = worker, owned_pools(worker)
        worker.signal(signal.SIGSTOP)
        await asyncio.sleep(self.service.settings.times.session_s + self._rng.uniform(1.0, 4.0))
        worker.signal(signal.SIGCONT)

    async def _redis(self, _: Fault) -> None:
        server = self.service.stack.redis_server
        assert server is not None
        server.kill()
        await asyncio.sleep(self._rng.uniform(0.2, 3.0))
        await asyncio.to_thread(server.restart)

    async def _broker(self, _: Fault) -> None:
        broker = self.service.stack.broker
        assert broker is not None
        broker.kill()
        await asyncio.sleep(self._rng.uniform(0.2, 3.0))
        await asyncio.to_thread(broker.restart)

    async def _flush(self, _: Fault) -> None:
        """One pool is rebuilt by the command (its owner ends), the others by their owners themselves."""
        await asyncio.to_thread(self.service.redis, lambda client: client.flushall())
        pool = self._rng.choice(self.service.settings.pools)
        code, said = await asyncio.to_thread(command, self.service, "rebuild", "--pool", pool)
        self.rebuilds[code] += 1
        if code:
            self._say(f"{self._now()} rebuild of {pool}: exit code {code}: {said.strip()[-1500:]}")

    async def _misbehave(self) -> None:
        """Inputs that must be refused (no JSON, a known id with another spec) or do nothing (a job submitted twice)."""
        topic = self.service.names.arrivals
        known = [r for r in await self._some_arrivals(topic) if r.value.startswith(b"{")]
        again = self._rng.sample(known, min(10, len(known)))
        other = self._rng.sample(known, min(5, len(known)))
        items = [(f"garbage-{self._rng.random()}".encode(), b"no job at all") for _ in range(5)]
        items += [(r.key, r.value) for r in again]
        items += [(r.key, msgspec.json.encode(msgspec.json.decode(r.value) | {"tenant": "another"})) for r in other]
        await asyncio.to_thread(self.service.produce, topic, items)
        self.mischief += Counter({"no JSON": 5, "submitted again": len(again), "other spec": len(other)})

    async def _some_arrivals(self, topic: str) -> list[Any]:
        """A part of those that are there, first one of their job or not."""
        options = self.service.stack.kafka.consumer_options()
        async with AIOKafkaConsumer(**options) as consumer:
            consumer.assign([TopicPartition(topic, p) for p in range(self.service.settings.partitions)])
            await consumer.seek_to_beginning()
            batches: list[list[Any]] = []
            while not batches:
                batches += (await consumer.getmany(timeout_ms=1000)).values()
            return [record for batch in batches for record in batch]

    def _now(self) -> str:
        return f"{time.time() - self._started:6.1f} s"


async def lags_of(service: Service) -> dict[str, list[int]]:
    """Messages of each partition that the consumer group has not acknowledged."""
    names = service.names
    consumer = AIOKafkaConsumer(**service.stack.kafka.consumer_options())
    admin = AIOKafkaAdminClient(**service.stack.kafka.client_options())
    try:
        await consumer.start()
        await admin.start()
        committed = await admin.list_consumer_group_offsets(service.settings.group)
        lags = {}
        for topic in (names.arrivals, names.pool_jobs, names.completions, names.nodes):
            partitions = [TopicPartition(topic, p) for p in range(service.settings.partitions)]
            ends = await consumer.end_offsets(partitions)
            told = [max(0, committed[tp].offset) if tp in committed else 0 for tp in partitions]
            lags[topic.removeprefix(names.prefix)] = [ends[tp] - at for tp, at in zip(partitions, told, strict=True)]
        return lags
    finally:  # also when the start failed
        await consumer.stop()
        await admin.close()


def owned_pools(worker: WorkerProcess) -> tuple[str, ...]:
    """As its log tells."""
    told = [found[1] for line in worker.lines() if (found := re.search(r"pools here: (.*)$", line))]
    return () if not told or told[-1] == "none" else tuple(told[-1].split(", "))


def command(service: Service, *words: str) -> tuple[int, str]:
    """A `streamsched` command with the installation's settings: exit code and output."""
    done = subprocess.run(
        [sys.executable, "-m", "streamsched.cli", *words],
        env=service.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


# ── what the topics say ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Takeover:
    """From a worker's death to the first new placement of a pool that it had."""

    pool: str
    seconds: float | None
    clean: bool
    """No other fault was near."""
    overloaded: bool
    """The machine had far more to do than its processors can, so the time tells of that."""


@dataclass(slots=True)
class PoolPast:
    """What a pool's journal has applied and decided (records that count)."""

    jobs: set[str] = field(default_factory=set)
    reports: set[tuple[type, str]] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    decisions: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    next_offsets: dict[str, int] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)
    records: int = 0
    epochs: int = 0

    def note(self, record: JournalRecord, state: ClusterState) -> None:
        self.records += 1
        for event in record.events:
            if isinstance(event, ev.JobArrived):
                self.jobs.add(event.spec.job_id)
            elif isinstance(event, ev.EpochStarted):
                self.epochs += 1
            elif isinstance(event, ev.RunStarted | ev.RunProgressed | _UNION):
                self.reports.add((type(event), event.placement_id))
                if isinstance(event, _RUN_ENDS):
                    self.ended.add(event.placement_id)
        if record.decisions:
            self.decisions[record.epoch, record.seq] = record.decisions
        self.next_offsets |= record.next_offsets


_UNION = ev.RunCompleted | ev.RunFailed | ev.RunPreempted | ev.RunRejected | ev.RunReleased


class Evidence:
    """Everything on the topics after the storm, and the judgement of it in `violations`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.violations = Audit()
        self.counts: dict[str, int] = {}
        names = service.names
        self._arrivals = service.read(names.arrivals)
        self._routed = service.read(names.pool_jobs)
        self._placements = service.read(names.placements)
        self._completions = service.read(names.completions)
        self._nodes = service.read(names.nodes)
        self.letters = service.letters()
        self._past = {pool: asyncio.run(_past(service, pool)) for pool in service.settings.pools}
        self._refused = {(x.origin.topic, x.origin.partition, x.origin.offset) for x in self.letters}
        self.history = History(
            arrivals=[
                Stamped(r.timestamp / 1000, codec.decode_arrival(r.value))
                for r in self._arrivals
                if not self._is_refused(r)
            ],
            placements=[Stamped(r.timestamp / 1000, codec.decode_placement(r.value)) for r in self._placements],
            completions=[Stamped(r.timestamp / 1000, codec.decode_completion(r.value)) for r in self._completions],
            nodes=[Stamped(r.timestamp / 1000, codec.decode_node(r.value)) for r in self._nodes],
        )
        self._judge_runs()
        self._judge_inputs()
        self._judge_decisions()

    def _is_refused(self, record: Any) -> bool:
        return (record.topic, record.partition, record.offset) in self._refused

    # ── judgement ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _judge_runs(self) -> None:
        """One successful run per job, no device held twice, placement ids used once but for identical repeats."""
        found = audit(self.history, allow_repeats=True)
        self.violations.counts.update(found.counts)
        self.violations.details += found.details
        places = [p.decision.placement_id for _, p in self.history.placements if isinstance(p.decision, Place)]
        self.counts["jobs submitted"] = len({a.job_id for _, a in self.history.arrivals})
        self.counts["placements"] = len(set(places))
        self.counts["placements repeated"] = len(places) - len(set(places))
        self.counts["other decisions"] = len(self.history.placements) - len(places)
        self.counts["completed runs"] = len(
            {r.placement_id for _, r in self.history.completions if isinstance(r, m.Completed)}
        )
        self.counts["reports"] = len(self.history.completions)
        self.counts["dead letters"] = len(self.letters)

    def _judge_inputs(self) -> None:
        """Every input is in a journal or was refused, or tells nothing new of a run that has ended there."""
        routed = {(r.origin.topic, r.origin.partition, r.origin.offset) for r in map(_pool_job, self._routed)}
        for record in self._arrivals:
            at = (topics.ARRIVALS.name, record.partition, record.offset)
            if at not in routed and not self._is_refused(record):
                self.violations.add("arrival-vanished", f"{at}: not routed, no dead letter")
        for record in self._routed:
            past = self._past[(job := _pool_job(record)).pool]
            if self._is_refused(record):
                continue
            assert job.arrival is not None
            passed = past.next_offsets.get(f"{topics.POOL_JOBS.name}:{record.partition}", 0) > record.offset
            if job.arrival.job_id not in past.jobs:
                self.violations.add("arrival-not-applied", f"job {job.arrival.job_id} in pool {job.pool}")
            elif not passed:
                self.counts["routed twice, not stored"] = self.counts.get("routed twice, not stored", 0) + 1
        without_effect = 0
        for record, (_, report) in zip(self._completions, self.history.completions, strict=True):
            past = self._past[report.pool]
            if (type(codec.run_event(report)), report.placement_id) in past.reports or self._is_refused(record):
                continue
            without_effect += 1
            if report.placement_id not in past.ended:
                what = type(report).__name__.lower()
                self.violations.add("report-not-applied", f"{what} of {report.placement_id}, job {report.job_id}")
        self.counts["reports without effect"] = without_effect
        for record, (_, event) in zip(self._nodes, self.history.nodes, strict=True):
            known = not isinstance(event, m.Joined) or event.node_id in self._past[event.pool].nodes
            if not known and not self._is_refused(record):
                self.violations.add("node-not-applied", event.node_id)

    def _judge_decisions(self) -> None:
        """What is on the topic was in the journal first; what is in the journal is on the topic unless it was moot."""
        told: set[tuple[str, str]] = set()
        for _, placement in self.history.placements:
            told.add((placement.pool, placement.decision.placement_id))
            decided = self._past[placement.pool].decisions.get((placement.epoch, placement.seq), ())
            if placement.decision not in decided:
                self.violations.add("placed-not-journalled", f"{placement.decision.placement_id} in {placement.pool}")
        for pool, past in self._past.items():
            for decisions in past.decisions.values():
                for decision in decisions:
                    if isinstance(decision, Place) and (pool, decision.placement_id) not in told:
                        self.violations.add("journalled-not-placed", f"{decision.placement_id} in {pool}")
        self.counts["journal records"] = sum(past.records for past in self._past.values())
        self.counts["epochs"] = sum(past.epochs for past in self._past.values())

    # ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def takeovers(self, faults: list[Fault]) -> list[Takeover]:
        by_pool: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for at, placement in self.history.placements:
            by_pool[placement.pool].append((at, placement.epoch))
        quiet_s = self.service.settings.times.session_s + BOUND_BEYOND_SESSION_S
        found = []
        for fault in faults:
            if fault.kind != KILL:
                continue
            others = (f for f in faults if f is not fault)
            clean = not any(f.began < fault.began + quiet_s and f.ended > fault.began - quiet_s for f in others)
            for pool in fault.pools:
                epoch = max((epoch for at, epoch in by_pool[pool] if at <= fault.began), default=0)
                after = [at for at, later in by_pool[pool] if at > fault.began and later > epoch]
                found.append(Takeover(pool, min(after) - fault.began if after else None, clean, fault.overloaded))
        return found

    def last_completion(self) -> float:
        return max((at for at, r in self.history.completions if isinstance(r, m.Completed)), default=0.0)

    def most_in_flight(self) -> int:
        """Jobs submitted and not completed, at the worst moment."""
        begun = {arrival.job_id: at for at, arrival in reversed(self.history.arrivals)}
        ended = {r.job_id: at for at, r in reversed(self.history.completions) if isinstance(r, m.Completed)}
        most = now = 0
        for _, change in sorted([(at, 1) for at in begun.values()] + [(at, -1) for at in ended.values()]):
            now += change
            most = max(most, now)
        return most

    def stories(self, limit: int = 4) -> Iterable[str]:
        """What the journals say of the jobs that the violations name."""
        named = dict.fromkeys(re.findall(r"\bjob-\d+\b", "\n".join(self.violations.details)))
        for job_id in list(named)[:limit]:
            for pool, past in self._past.items():
                if job_id in past.jobs:
                    lines, note = story_of(job_id)
                    asyncio.run(replay(self.service.settings, pool, Until(), note))
                    yield f"{job_id} in {pool}:\n  " + "\n  ".join(lines)


def _pool_job(record: Any) -> m.PoolJob:
    return codec.decode_pool_job(record.value)


async def _past(service: Service, pool: str) -> PoolPast:
    past = PoolPast()
    fold = await replay(service.settings, pool, Until(), past.note)
    past.nodes = {node.node_id for node in fold.state.inventory}
    return past


def report(
    storm: Storm, evidence: Evidence, takeovers: list[Takeover], wall_s: float, notes: Mapping[str, str]
) -> Table:
    table = Table(title="chaos", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for what, count in evidence.counts.items():
        table.add_row(what, f"{count:,}")
    table.add_row("dead letters by code", _told(Counter(letter.code for letter in evidence.letters)))
    table.add_row("sent beside the replay", _told(storm.mischief))
    table.add_row("faults", _told(Counter(fault.kind for fault in storm.faults)))
    table.add_row("frozen workers", _told(storm.frozen_outcomes()))
    table.add_row("workers that ended by themselves, by exit code", _told(storm.exits))
    table.add_row("rebuild commands by exit code", _told(storm.rebuilds))
    table.add_row("recoveries of a pool", f"{storm.recoveries:,}")
    for name, chosen in (("undisturbed", [t for t in takeovers if t.clean]), ("all", takeovers)):
        times = sorted(t.seconds for t in chosen if t.seconds is not None)
        told = f"{statistics.median(times):.1f} / {times[-1]:.1f} s of {len(times)}" if times else "-"
        table.add_row(f"kill to next placement of a pool, {name}, p50 / max", told)
    bound = storm.service.settings.times.session_s + BOUND_BEYOND_SESSION_S
    table.add_row("  to be within session + 5 s", f"{bound:g} s")
    table.add_row("  measured on an overloaded machine", f"{sum(t.overloaded for t in takeovers)} of {len(takeovers)}")
    for what, value in notes.items():
        table.add_row(what, value)
    table.add_row("violations", _told(evidence.violations.counts))
    table.add_row("wall time", f"{wall_s:.0f} s")
    return table


def _told(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count:,} x {what}" for what, count in sorted(counts.items(), key=str)) or "none"


def seed_of(env: Mapping[str, str] = os.environ) -> int:
    """STREAMSCHED_CHAOS_SEED, or a new one."""
    return int(env.get("STREAMSCHED_CHAOS_SEED") or random.SystemRandom().randrange(1_000_000))


def same_partition_nowhere(service: Service) -> bool:
    pools = service.settings.pools
    return len({partition_of(pool, service.settings.partitions) for pool in pools}) == len(pools)
