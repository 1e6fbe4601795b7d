"""The scheduler's side of the bus: sorts inputs by pool, keeps one runner per pool that this worker has."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from streamsched.bus import codec, topics
from streamsched.bus.app import Input
from streamsched.bus.codec import Refused
from streamsched.bus.intake import Later
from streamsched.bus.strays import connection_errors, what_ended
from streamsched.bus.topics import partition_of
from streamsched.routing.least_loaded import ModelSummary
from streamsched.store.pool_store import PoolStore
from streamsched.store.predictor_store import PredictorStore
from streamsched.store.telemetry import TelemetryStore

from .letters import DeadLetters
from .retry import words
from .runner import GivenUp, Parts, PoolRunner

log = logging.getLogger(__name__)

_DECODERS: dict[str, Callable[[bytes | None], Any]] = {
    topics.POOL_JOBS.name: codec.decode_pool_job,
    topics.COMPLETIONS.name: codec.decode_completion,
    topics.NODES.name: codec.decode_node,
    topics.TELEMETRY.name: codec.decode_telemetry,
}


class Scheduler:
    """Runners come and go with the assignment of partitions. `on_fault` is called when a runner ends by an error."""

    def __init__(
        self, parts: Parts, redis: Redis, letters: DeadLetters, on_fault: Callable[[BaseException], None]
    ) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._redis = redis
        self._letters = letters
        self._on_fault = on_fault
        self._partition = {pool: partition_of(pool, self._settings.partitions) for pool in self._settings.pools}
        self.runners: dict[str, PoolRunner] = {}
        self._assigned = asyncio.Event()
        self._generation = -1
        self.telemetry = Telemetry(TelemetryStore(redis, self._settings.key_prefix), self._nodes_of)

    # ── partitions ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def assigned(self, partitions: frozenset[int], generation: int) -> None:
        """Start the runners of the pools in these partitions; they recover in the background."""
        self._generation = generation
        mine = {pool for pool, partition in self._partition.items() if partition in partitions}
        await self._stop([pool for pool in self.runners if pool not in mine])
        for pool in sorted(mine - self.runners.keys()):
            store = PoolStore(self._redis, pool, self._settings.key_prefix)
            runner = PoolRunner(pool, self._partition[pool], self._parts, store, self._predictor(pool))
            self.runners[pool] = runner
            runner.start(self._ended)
        log.info("pools here: %s", ", ".join(sorted(mine)) or "none")
        self._assigned.set()

    async def revoked(self) -> None:
        """Finish what is being written; nothing is written after this until the next assignment."""
        self._assigned.clear()
        await self._stop(list(self.runners))

    async def drain(self) -> None:
        """For the end of the process."""
        await self.revoked()

    def models(self) -> dict[str, ModelSummary]:
        """What ranks the pools here, where that is a model. Also asked from the thread that exports metrics."""
        return {pool: model for pool, runner in list(self.runners.items()) if (model := runner.model) is not None}

    def _predictor(self, pool: str) -> PredictorStore | None:
        if self._settings.run_times == "said":
            return None
        return PredictorStore(self._redis, pool, self._settings.key_prefix)

    def _nodes_of(self, pool: str) -> Collection[str]:
        runner = self.runners.get(pool)
        return runner.state.inventory.nodes if runner is not None else ()

    async def _stop(self, pools: list[str]) -> None:
        runners = [self.runners.pop(pool) for pool in pools]
        await asyncio.gather(*(runner.stop() for runner in runners))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if (error := what_ended(task)) is not None:
            self._on_fault(error)

    # ── inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def schedule(self, inputs: list[Input]) -> dict[int, Later | None]:
        """Hand a batch of pool.jobs, jobs.completions and nodes.events to its pools.

        Each pool's share is given back by position with what it waits for: a pool that recovers or commits slowly holds
        up its own partition and no other. It is done when all of the share is safe, and False (not to be acknowledged)
        when the pool moves away before. What is refused waits for its letters.
        """
        by_pool: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        letters: dict[int, tuple[Refused, Input]] = {}
        for place, source in enumerate(inputs):
            try:
                message = self._decode(source)
            except Refused as refused:
                letters[place] = (refused, source)
            else:
                by_pool[message.pool].append((place, message))
        await self._assigned.wait()
        later = self._write_letters(letters)
        for pool, items in by_pool.items():
            # Tasks begin in the order they are made in, so the batches of a pool reach it in theirs.
            share = asyncio.ensure_future(self._submit(pool, [(inputs[place], message) for place, message in items]))
            later |= {place: share for place, _ in items}
        return later

    def _write_letters(self, letters: dict[int, tuple[Refused, Input]]) -> dict[int, Later | None]:
        """Beside the rest: letters are in another topic, and who waits for its broker need not hold up the others."""
        written = asyncio.ensure_future(self._letters.write(list(letters.values()))) if letters else None
        return dict.fromkeys(letters, written)

    def _decode(self, source: Input) -> Any:
        message = _DECODERS[source.topic](source.value)
        partition = self._partition.get(message.pool)
        if partition is None:
            raise Refused("unknown-pool", f"no pool {message.pool} here, there is {', '.join(self._settings.pools)}")
        if partition != source.partition:
            raise Refused(
                "wrong-partition",
                f"pool {message.pool} is in partition {partition}: use the pool as key and Kafka's default partitioner",
            )
        return message

    async def _submit(self, pool: str, work: list[tuple[Input, Any]]) -> bool:
        """False when the pool is not here (any more): its next owner, maybe this worker, gets the inputs again.

        The same where partitions were dealt anew meanwhile: taken now, these would come before others that were given
        back unapplied, and hide them.
        """
        runner = self.runners.get(pool)
        if runner is None or work[0][0].generation != self._generation:
            return False
        try:
            await runner.submit(work)
        except GivenUp:
            return False
        return True

    async def observe(self, inputs: list[Input]) -> dict[int, Later | None]:
        """Keep the latest telemetry of each node; nothing is decided by it here."""
        letters: dict[int, tuple[Refused, Input]] = {}
        for place, source in enumerate(inputs):
            try:
                self.telemetry.note(self._decode(source))
            except Refused as refused:
                letters[place] = (refused, source)
        return self._write_letters(letters)


_STRANGERS_EVERY_S = 60.0


class Telemetry:
    """The latest sample of each node, written to Redis once a second at most. A lost write is replaced by the next.

    Only of nodes that have joined (`nodes_of` a pool): whoever writes to the topic would else fill Redis with names.
    """

    def __init__(self, store: TelemetryStore, nodes_of: Callable[[str], Collection[str]]) -> None:
        self._store = store
        self._nodes_of = nodes_of
        self._latest: dict[str, dict[str, Any]] = defaultdict(dict)
        self._swept: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def note(self, message: Any) -> None:
        if message.node_id not in self._nodes_of(message.pool):
            self.counts["strangers"] += 1
            return
        self.counts["samples"] += 1
        latest = self._latest[message.pool]
        known = latest.get(message.node_id)
        if known is None or codec.epoch_seconds(known.time) <= codec.epoch_seconds(message.time):
            latest[message.node_id] = message

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            await self.write()

    async def write(self) -> None:
        """What was noted since the last time; now and then nodes that have left are taken out."""
        latest, self._latest = self._latest, defaultdict(dict)
        now = asyncio.get_running_loop().time()
        try:
            with connection_errors():
                for pool, samples in latest.items():
                    await self._store.write(pool, {name: msgspec.json.encode(m) for name, m in samples.items()})
                    if now - self._swept.get(pool, -1e9) >= _STRANGERS_EVERY_S and (nodes := self._nodes_of(pool)):
                        await self._store.forget_strangers(pool, nodes)
                        self._swept[pool] = now
        except (RedisError, OSError) as error:
            log.warning("telemetry of %d nodes not stored (%s)", sum(map(len, latest.values())), words(error))
