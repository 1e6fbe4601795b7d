"""The router: from `jobs.arrivals` and `jobs.commands` to the pool that a job belongs to.

Any worker routes; it holds nothing. Which pool a job went to is in the job index (Redis), claimed before the job is
sent on, so that a redelivered or resubmitted arrival goes the same way and is recognised there by its id.

A pool recognises a redelivered command by its offset, so the commands of one job have to come by one partition, that of
their key: one that came by another would be taken for a command seen before, and is refused here instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from aiokafka.errors import KafkaError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from streamsched.bus import codec
from streamsched.bus.app import Input
from streamsched.bus.codec import Refused
from streamsched.bus.intake import Later
from streamsched.bus.messages import Command, JobArrival, PoolJob
from streamsched.bus.producer import Producer
from streamsched.bus.strays import connection_errors
from streamsched.bus.topics import ARRIVALS, partition_of
from streamsched.core.model import JobSpec
from streamsched.routing.least_loaded import PoolSummary, choose
from streamsched.store import pool_store
from streamsched.store.client import trouble
from streamsched.store.job_index import Claim, JobIndex

from .early_commands import EarlyCommands
from .letters import DeadLetters
from .retry import pauses, words
from .settings import Settings

log = logging.getLogger(__name__)
T = TypeVar("T")

_SUMMARIES_FOR_S = 1.0
_summary = msgspec.json.Decoder(PoolSummary).decode


class Router:
    """`handle` returns when everything but early commands is safe in `pool.jobs` or `dead.letters`."""

    def __init__(
        self,
        settings: Settings,
        redis: Redis,
        index: JobIndex,
        producer: Producer,
        letters: DeadLetters,
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._index = index
        self._producer = producer
        self._letters = letters
        self._summaries: dict[str, PoolSummary] = {}
        self._summaries_at = -1e9
        self._unreadable: set[str] = set()
        """Pools whose summary was not readable at the last look: said once."""
        self._early = EarlyCommands(
            settings.early_command_s,
            lambda job_ids: self._from_redis(lambda: index.find(job_ids)),
            lambda: self._from_redis(index.whole),
            self._send_commands,
            self._refuse_unknown,
        )

    async def handle(self, inputs: list[Input]) -> dict[int, Later | None]:
        """Route a batch. Commands for jobs not known yet are given back by position, to be acknowledged when done."""
        arrivals: list[tuple[Input, JobArrival]] = []
        commands: list[tuple[int, Input, Command]] = []
        letters: list[tuple[Refused, Input]] = []
        for place, source in enumerate(inputs):
            try:
                if source.topic == ARRIVALS.name:
                    arrivals.append((source, codec.decode_arrival(source.value)))
                else:
                    commands.append((place, source, self._command(source)))
            except Refused as refused:
                letters.append((refused, source))
        # Arrivals first: a command in the same batch finds its job.
        await self._route_arrivals(arrivals, letters)
        early = await self._route_commands(commands, letters)
        await self._letters.write(letters)
        return early

    def _command(self, source: Input) -> Command:
        command = codec.decode_command(source.value)
        expected = partition_of(command.job_id, self._settings.partitions)
        if source.partition != expected:
            raise Refused(
                "wrong-partition",
                f"commands for job {command.job_id} belong into partition {expected}, this came by {source.partition}: "
                "use the job's id as key and Kafka's default partitioner",
            )
        return command

    async def _route_arrivals(
        self, arrivals: list[tuple[Input, JobArrival]], letters: list[tuple[Refused, Input]]
    ) -> None:
        wishes = []
        for source, arrival in arrivals:
            if arrival.pool is not None and arrival.pool not in self._settings.pools:
                letters.append((self._no_pool(f"no pool {arrival.pool} here"), source))
                continue
            pool = arrival.pool or await self._choose(codec.job_spec(arrival))
            wishes.append((source, arrival, pool))
        if not wishes:
            return
        claim = await self._claim([(arrival.job_id, pool) for _, arrival, pool in wishes])
        routed = []
        for (source, arrival, _), pool in zip(wishes, claim.pools, strict=True):
            if arrival.pool is not None and arrival.pool != pool:
                detail = f"job {arrival.job_id} is in pool {pool} already; use another id for pool {arrival.pool}"
                letters.append((Refused("conflict", detail), source))
            elif pool not in self._settings.pools:
                letters.append((self._not_here(arrival.job_id, pool), source))
            else:
                routed.append(_pool_job(pool, source, arrival=arrival))
        await self._send(routed)
        await self._confirm(routed, claim.generation)

    async def _confirm(self, routed: list[PoolJob], generation: str) -> None:
        """If Redis was started again meanwhile, the pools wrote their jobs anew, perhaps before these reached them."""
        if not routed or await self._from_redis(self._index.generation) == generation:
            return
        wishes = [(message.arrival.job_id, message.pool) for message in routed if message.arrival is not None]
        claim = await self._claim(wishes)
        for (job_id, pool), found in zip(wishes, claim.pools, strict=True):
            if found != pool:
                log.warning("job %s was sent to pool %s, and the job index says %s by now", job_id, pool, found)

    def _no_pool(self, what: str) -> Refused:
        return Refused("unknown-pool", f"{what}, there is {', '.join(self._settings.pools)}")

    def _not_here(self, job_id: str, pool: str) -> Refused:
        return self._no_pool(f"the job index has job {job_id} in pool {pool}, which is not here")

    async def _claim(self, wishes: Sequence[tuple[str, str]]) -> Claim:
        for pause in pauses():
            claim = await self._from_redis(lambda: self._index.claim(wishes))
            if claim is not None:
                return claim
            log.info("the job index is being rebuilt, arrivals wait")
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _choose(self, spec: JobSpec) -> str:
        pools = self._settings.pools
        if len(pools) == 1:
            return pools[0]
        now = asyncio.get_running_loop().time()
        if now - self._summaries_at > _SUMMARIES_FOR_S:
            self._summaries = await self._look_at_pools()
            self._summaries_at = now
        pool = choose(spec, self._summaries)
        # Until the next look the choice itself is load, or a burst would go to one pool.
        self._summaries[pool] = self._summaries[pool].with_queued(spec)
        return pool

    async def _look_at_pools(self) -> dict[str, PoolSummary]:
        """After a loss arrivals wait until all pools are recovered: the first one back would get all of them."""
        pools, prefix = self._settings.pools, self._settings.key_prefix
        for pause in pauses():
            whole = await self._from_redis(self._index.whole)
            values = await self._from_redis(lambda: pool_store.summaries(self._redis, prefix, pools))
            if whole or None not in values:
                return {pool: self._summary_of(pool, value) for pool, value in zip(pools, values, strict=True)}
            log.info("pools are being recovered, arrivals wait")
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _summary_of(self, pool: str, value: bytes | None) -> PoolSummary:
        """One that cannot be read counts as that of a pool that can hold nothing; its owner's next commit mends it."""
        try:
            summary = _summary(value) if value is not None else PoolSummary()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if pool not in self._unreadable:
                log.warning(
                    "pool %s: its summary in Redis cannot be read (%s), jobs go to others meanwhile", pool, words(error)
                )
            self._unreadable.add(pool)
            return PoolSummary()
        self._unreadable.discard(pool)
        return summary

    async def _route_commands(
        self, commands: list[tuple[int, Input, Command]], letters: list[tuple[Refused, Input]]
    ) -> dict[int, Later | None]:
        job_ids = [command.job_id for _, _, command in commands]
        pools = await self._from_redis(lambda: self._index.find(job_ids))
        routed = []
        waiting = []
        for (place, source, command), pool in zip(commands, pools, strict=True):
            if pool is None or command.job_id in self._early:
                waiting.append((place, source, command))
            elif pool not in self._settings.pools:
                letters.append((self._not_here(command.job_id, pool), source))
            else:
                routed.append((pool, source, command))
        await self._send_commands(routed)
        return {place: self._early.add(source, command) for place, source, command in waiting}

    async def _send_commands(self, commands: Sequence[tuple[str, Input, Command]]) -> None:
        for turn in _one_per_job([_pool_job(pool, source, command=command) for pool, source, command in commands]):
            await self._send(turn)

    async def _refuse_unknown(self, commands: Sequence[tuple[Input, Command]]) -> None:
        await self._letters.write(
            (Refused("unknown-job", f"no job {command.job_id} here"), source) for source, command in commands
        )

    async def _send(self, messages: list[PoolJob]) -> None:
        """Write in order and wait; on a failure everything once more (duplicates are recognised in the pool)."""
        for pause in pauses():
            if not messages:
                return
            try:
                with connection_errors():
                    sent = [
                        await self._producer.send(
                            self._settings.names.pool_jobs,
                            codec.encode(message),
                            key=message.pool.encode(),
                            partition=partition_of(message.pool, self._settings.partitions),
                        )
                        for message in messages
                    ]
                    await asyncio.gather(*sent)
                return
            except (KafkaError, ConnectionError) as error:
                log.warning("%d routed jobs not written yet (%s), trying again", len(messages), words(error))
                await asyncio.sleep(pause)

    async def _from_redis(self, ask: Callable[[], Awaitable[T]]) -> T:
        for pause in pauses():
            try:
                with connection_errors():
                    return await ask()
            except (RedisError, OSError) as error:
                log.warning("%s; trying again", trouble(error, self._settings.redis))
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")


def _one_per_job(commands: list[PoolJob]) -> list[list[PoolJob]]:
    """In turns: a command is written for certain before the next one on the same job is.

    Else the later could be there alone for a moment, and the earlier, repeated after it, would count as seen already.
    """
    turns: list[list[PoolJob]] = []
    seen: Counter[str] = Counter()
    for message in commands:
        assert message.command is not None
        job_id = message.command.job_id
        if seen[job_id] == len(turns):
            turns.append([])
        turns[seen[job_id]].append(message)
        seen[job_id] += 1
    return turns


def _pool_job(pool: str, source: Input, arrival: JobArrival | None = None, command: Command | None = None) -> PoolJob:
    return PoolJob(
        pool=pool,
        origin=codec.origin(source.topic, source.partition, source.offset),
        arrival=arrival,
        command=command,
        traceparent=codec.traceparent(source.headers),
    )
