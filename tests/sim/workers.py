"""Workers, which run the production Router, Scheduler and PoolRunner, and the consumer group that deals partitions.

A worker reads its partitions from the offsets that were committed, hands batches over as `streamsched.bus.app` does
(acknowledged in order, by what the handler answers; what a rebalance overtook keeps its old generation), and commits
now and then, so that a crash means redelivery.

A rebalance asks every member to give its partitions up, waits for those that do, throws out those that do not answer
in time, and deals anew. A worker that was thrown out while frozen goes on as it was when it wakes (a zombie) until it
hears of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from streamsched.bus.app import Input
from streamsched.bus.hearing import Hearing
from streamsched.core.problem import Problem, Solution, SolveStatus
from streamsched.policy import by_name
from streamsched.service.letters import DeadLetters
from streamsched.service.recovery import Fenced
from streamsched.service.router import Router
from streamsched.service.runner import Parts
from streamsched.service.scheduler import Scheduler
from streamsched.service.settings import Settings
from streamsched.store.job_index import JobIndex

from . import evictions
from .kafka import Producer, TopicPartition
from .loop import Process
from .redis import Client

if TYPE_CHECKING:
    from .world import World

_POLL_S = 0.03
_REBALANCE_S = 9.0


class SolverBroke(Exception):
    """As when the solver's process dies."""


class Worker:
    """One process with all that `service.bootstrap` wires."""

    def __init__(self, world: World, name: str, settings: Settings) -> None:
        self._world = world
        self.name = name
        self.settings = settings
        self.process = Process(name, world.loop)
        self.partitions: frozenset[int] = frozenset()
        self.generation = -1
        self.positions: dict[TopicPartition, int] = {}
        self._turns: dict[TopicPartition, deque[list[Any]]] = {}
        self._acked: dict[TopicPartition, int] = {}
        self._lags = world.rng.random() < 0.5
        """Takes the next batch only when this one is applied, as where a partition is held: news gets there late."""
        self._skew_s = world.rng.uniform(-1.0, 1.0) * world.faults.clock_skew_s
        self.scheduler: Scheduler
        self.router: Router

    def start(self) -> None:
        self.process.spawn(self._main())

    def clock(self) -> float:
        return self._world.epoch_s() + self._skew_s

    async def _main(self) -> None:
        settings, names = self.settings, self.settings.names
        producer: Any = Producer(self._world, self.name)
        redis: Any = Client(self._world.redis, self._world, self.name)
        letters = DeadLetters(settings, producer, self.clock)  # type: ignore[arg-type]
        index = JobIndex(redis, settings.pools, settings.key_prefix)
        parts = Parts(
            settings=settings,
            producer=producer,
            clock=self.clock,
            ranker=by_name(settings.scheduler.policy),
            solve=self._solve,
            letters=letters.write,
            index=index,
            hearing=self._hearing,
        )
        self.scheduler = Scheduler(parts, redis, letters, self.fault)
        self.router = Router(settings, redis, index, producer, letters)
        await self._world.hazard("start")
        self._world.group.join(self)
        await asyncio.gather(
            self._agent(self.router.handle, (names.arrivals, names.commands)),
            self._agent(self.scheduler.schedule, (names.pool_jobs, names.completions, names.nodes)),
            self._commit_now_and_then(),
        )

    def fault(self, error: BaseException) -> None:
        """As `bootstrap._end_process`."""
        if not isinstance(error, Fenced):
            self._world.fail(f"{self.name} ended by {type(error).__name__}: {error}")
        self._world.counts["fenced"] += 1
        self._world.kill(self.name, f"{error}")

    async def _solve(self, problem: Problem) -> Solution:
        """Greedy's answer, with evictions where runs may be stopped; late, empty or not at all."""
        world = self._world
        await world.hazard("solve")
        draw = world.rng.random() if world.faults.on else 1.0
        late = draw < world.faults.late_solve
        await asyncio.sleep(world.rng.uniform(1.0, 5.0) if late else world.rng.uniform(0.005, 0.15))
        draw = world.rng.random() if world.faults.on else 1.0
        if draw < world.faults.broken_solve:
            raise SolverBroke("simulated")
        if draw < world.faults.broken_solve + world.faults.no_solve:
            return Solution(window=problem.window, status=SolveStatus.EMPTY)
        return Solution(
            window=problem.window,
            status=SolveStatus.GREEDY,
            policy=problem.policy,
            assignments=evictions.solve(problem),
        )

    # ── consuming ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _agent(self, handler: Callable[[list[Input]], Any], topics: tuple[str, ...]) -> None:
        try:
            while True:
                batch = self._take(topics)
                if batch:
                    await self._world.hazard(f"deliver {topics[0]}")
                    later = await handler(batch)
                    self._settle(batch, later)
                    if handler == self.scheduler.schedule and self._lags:
                        await asyncio.gather(*{id(work): work for work in later.values() if work is not None}.values())
                else:
                    await asyncio.sleep(_POLL_S)
        except Exception as error:
            self.fault(error)
            raise

    def _take(self, topics: tuple[str, ...]) -> list[Input]:
        """What is there now, up to a batch; topics mixed, each partition in order."""
        rng = self._world.rng
        queues = []
        for partition in sorted(self.partitions):
            for topic in topics:
                position = self.positions[topic, partition]
                records = self._world.kafka.logs[topic, partition][position : position + rng.choice((1, 5, 40))]
                if records:
                    self.positions[topic, partition] = records[-1].offset + 1
                    queues.append(
                        deque(Input(topic, partition, r.offset, r.key, r.value, (), self.generation) for r in records)
                    )
        batch: list[Input] = []
        while queues:
            queue = rng.choice(queues)
            batch.append(queue.popleft())
            queues = [queue for queue in queues if queue]
        for source in batch:
            self._turns.setdefault((source.topic, source.partition), deque()).append([source.offset, False])
        return batch

    def _hearing(self, partition: int) -> Hearing:
        """As `bus.hearing.Ears`."""
        tp = (self.settings.names.nodes, partition)
        if partition not in self.partitions:
            return Hearing.NOTHING
        behind = self.positions[tp] < len(self._world.kafka.logs[tp])
        return Hearing.PART if behind or self._turns.get(tp) else Hearing.ALL

    def _settle(self, batch: list[Input], later: Mapping[int, Any]) -> None:
        for place, source in enumerate(batch):
            if place not in later:
                self._ack(source)
            elif (work := later[place]) is not None:
                asyncio.ensure_future(self._ack_after(work, source))  # noqa: RUF006 - kept by the process

    async def _ack_after(self, work: Any, source: Input) -> None:
        if await work is not False:
            self._ack(source)

    def _ack(self, source: Input) -> None:
        if source.generation != self.generation:
            return
        tp = (source.topic, source.partition)
        turns = self._turns[tp]
        for turn in turns:
            if turn[0] == source.offset:
                turn[1] = True
        while turns and turns[0][1]:
            self._acked[tp] = turns.popleft()[0] + 1

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._world.rng.uniform(0.3, 3.0))
            await self._world.hazard("commit offsets")
            self._world.group.commit(self, self._acked)

    # ── the group ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def revoked(self) -> None:
        await self.scheduler.revoked()
        self._world.group.commit(self, self._acked)

    async def assigned(self, partitions: frozenset[int], generation: int) -> None:
        group = self._world.group
        self.partitions, self.generation = partitions, generation
        self._turns, self._acked = {}, {}
        self.positions = {(t, p): group.committed.get((t, p), 0) for t in group.topics for p in partitions}
        await self.scheduler.assigned(partitions, generation)


class Group:
    """Coordinator of the consumer group."""

    def __init__(self, world: World, settings: Settings, size: int) -> None:
        self._world = world
        self._settings = settings
        self._size = size
        self._made = 0
        self.members: list[Worker] = []
        self.generation = 0
        self.committed: dict[TopicPartition, int] = {}
        self.owners: dict[int, Worker] = {}
        names = settings.names
        self.topics = (names.arrivals, names.commands, names.pool_jobs, names.completions, names.nodes)
        self.due = asyncio.Event()

    def start_worker(self) -> None:
        """Unless there are enough that live."""
        if sum(not worker.process.dead for worker in self._world.workers.values()) >= self._size:
            return
        self._made += 1
        worker = Worker(self._world, f"w{self._made}", self._settings)
        self._world.workers[worker.name] = worker
        self._world.tell(f"{worker.name}: starts")
        worker.start()

    def join(self, worker: Worker) -> None:
        if worker not in self.members:
            self.members.append(worker)
        self.due.set()

    def silent(self, worker: Worker) -> None:
        """It sends no heartbeats: after the session it is out."""
        self._world.later(self._world.faults.session_s, lambda: self._expire(worker))

    def _expire(self, worker: Worker) -> None:
        if worker in self.members and (worker.process.dead or worker.process.frozen):
            self._drop(worker, "session is over")

    def _drop(self, worker: Worker, why: str) -> None:
        self._world.tell(f"{worker.name}: out of the group, {why}")
        self.members.remove(worker)
        self.due.set()
        self._world.later(1.0, lambda: self.heard(worker))

    def heard(self, worker: Worker) -> None:
        """A worker that lives learns that it was thrown out, gives up what it has and comes back."""
        if worker.process.dead or worker.process.frozen or worker in self.members:
            return

        async def again() -> None:
            await worker.revoked()
            self.join(worker)

        self._world.tell(f"{worker.name}: learns that it is out")
        worker.process.spawn(again())

    def commit(self, worker: Worker, acked: Mapping[TopicPartition, int]) -> None:
        if worker in self.members and worker.generation == self.generation:
            self.committed.update(acked)

    async def run(self) -> None:
        while True:
            await self.due.wait()
            self.due.clear()
            await self._rebalance()

    async def _rebalance(self) -> None:
        """Revoke, wait, throw out, deal."""
        self._world.counts["rebalances"] += 1
        self._world.tell(f"rebalance of {', '.join(worker.name for worker in self.members)}")
        asked = {worker: worker.process.spawn(worker.revoked()) for worker in self.members}
        if asked:
            await asyncio.wait(asked.values(), timeout=_REBALANCE_S)
        for worker, task in asked.items():
            if worker in self.members and not task.done():
                self._drop(worker, "it did not answer")
        await asyncio.sleep(self._world.rng.uniform(0.0, 0.3))
        self.generation += 1
        self._deal([worker for worker in self.members if worker in asked])

    def _deal(self, members: list[Worker]) -> None:
        """At random over those who were asked (whoever joined meanwhile is dealt to in the next round)."""
        self.owners = {}
        shares: dict[str, set[int]] = {worker.name: set() for worker in members}
        for partition in range(self._world.kafka.partitions if members else 0):
            owner = self._world.rng.choice(members)
            self.owners[partition] = owner
            shares[owner.name].add(partition)
        for worker in members:
            self._world.tell(f"{worker.name}: has {sorted(shares[worker.name])} in generation {self.generation}")
            worker.process.spawn(worker.assigned(frozenset(shares[worker.name]), self.generation))
