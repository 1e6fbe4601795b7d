"""The router: from `jobs.arrivals` and `jobs.commands` to the pool that a job belongs to.

Any worker routes; it holds nothing. Which pool a job went to is in the job index (Redis), claimed before the job is
sent on, so that a redelivered or resubmitted arrival goes the same way and is recognised there by its id.
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
from streamsched.bus.messages import Command, JobArrival, PoolJob
from streamsched.bus.producer import Producer
from streamsched.bus.topics import ARRIVALS, partition_of
from streamsched.core.model import JobSpec
from streamsched.routing.least_loaded import PoolSummary, choose
from streamsched.store import pool_store
from streamsched.store.job_index import JobIndex

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
        self._early: dict[str, asyncio.Future[None]] = {}
        """Of each job with commands that wait for its arrival, the last of them: later ones must not overtake."""

    async def handle(self, inputs: list[Input]) -> dict[int, Awaitable[None] | None]:
        """Route a batch. Commands for jobs not known yet are given back by position, to be acknowledged when done."""
        arrivals: list[tuple[Input, JobArrival]] = []
        commands: list[tuple[int, Input, Command]] = []
        for place, source in enumerate(inputs):
            try:
                if source.topic == ARRIVALS.name:
                    arrivals.append((source, codec.decode_arrival(source.value)))
                else:
                    commands.append((place, source, codec.decode_command(source.value)))
            except Refused as refused:
                await self._letters(refused, source)
        # Arrivals first: a command in the same batch finds its job.
        await self._send(await self._route_arrivals(arrivals))
        return await self._route_commands(commands)

    async def _route_arrivals(self, arrivals: list[tuple[Input, JobArrival]]) -> list[PoolJob]:
        wishes = []
        for source, arrival in arrivals:
            if arrival.pool is not None and arrival.pool not in self._settings.pools:
                known = ", ".join(self._settings.pools)
                await self._letters(Refused("unknown-pool", f"no pool {arrival.pool} here, there is {known}"), source)
                continue
            pool = arrival.pool or await self._choose(codec.job_spec(arrival))
            wishes.append((source, arrival, pool))
        if not wishes:
            return []
        pools = await self._claim([(arrival.job_id, pool) for _, arrival, pool in wishes])
        routed = []
        for (source, arrival, _), pool in zip(wishes, pools, strict=True):
            if arrival.pool is not None and arrival.pool != pool:
                detail = f"job {arrival.job_id} is in pool {pool} already; use another id for pool {arrival.pool}"
                await self._letters(Refused("conflict", detail), source)
                continue
            routed.append(_pool_job(pool, source, arrival=arrival))
        return routed

    async def _claim(self, wishes: Sequence[tuple[str, str]]) -> list[str]:
        for pause in pauses():
            pools = await self._from_redis(lambda: self._index.claim(wishes))
            if pools is not None:
                return pools
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
        summary = self._summaries[pool]
        self._summaries[pool] = msgspec.structs.replace(summary, queued=summary.queued + spec.total_gpus)
        return pool

    async def _look_at_pools(self) -> dict[str, PoolSummary]:
        """After a loss arrivals wait until all pools are recovered: the first one back would get all of them."""
        pools, prefix = self._settings.pools, self._settings.key_prefix
        for pause in pauses():
            whole = await self._from_redis(self._index.whole)
            values = await self._from_redis(lambda: pool_store.summaries(self._redis, prefix, pools))
            if whole or None not in values:
                return {p: _summary(v) if v else PoolSummary() for p, v in zip(pools, values, strict=True)}
            log.info("pools are being recovered, arrivals wait")
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _route_commands(self, commands: list[tuple[int, Input, Command]]) -> dict[int, Awaitable[None] | None]:
        job_ids = [command.job_id for _, _, command in commands]
        pools = await self._from_redis(lambda: self._index.find(job_ids))
        routed = []
        early: dict[int, Awaitable[None] | None] = {}
        for (place, source, command), pool in zip(commands, pools, strict=True):
            before = self._early.get(command.job_id)
            if pool is None or before is not None:
                early[place] = self._wait_in_line(source, command, before)
            else:
                routed.append(_pool_job(pool, source, command=command))
        for turn in _one_per_job(routed):
            await self._send(turn)
        return early

    def _wait_in_line(
        self, source: Input, command: Command, before: asyncio.Future[None] | None
    ) -> asyncio.Future[None]:
        waiting = asyncio.ensure_future(self._wait_for_job(source, command, before))
        self._early[command.job_id] = waiting

        def over(_: object) -> None:
            if self._early.get(command.job_id) is waiting:
                del self._early[command.job_id]

        waiting.add_done_callback(over)
        return waiting

    async def _wait_for_job(self, source: Input, command: Command, before: asyncio.Future[None] | None) -> None:
        """A command may overtake its job's arrival, which is in another topic: give that a while."""
        deadline = asyncio.get_running_loop().time() + self._settings.early_command_s
        if before is not None:
            await asyncio.wait([before])
        while True:
            [pool] = await self._from_redis(lambda: self._index.find([command.job_id]))
            if pool is not None:
                await self._send([_pool_job(pool, source, command=command)])
                return
            if asyncio.get_running_loop().time() > deadline and await self._from_redis(self._index.whole):
                await self._letters(Refused("unknown-job", f"no job {command.job_id} here"), source)
                return
            await asyncio.sleep(0.2)

    async def _send(self, messages: list[PoolJob]) -> None:
        """Write in order and wait; on a failure everything once more (duplicates are recognised in the pool)."""
        for pause in pauses():
            if not messages:
                return
            try:
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
            except KafkaError as error:
                log.warning("%d routed jobs not written yet (%s), trying again", len(messages), words(error))
                await asyncio.sleep(pause)

    async def _from_redis(self, ask: Callable[[], Awaitable[T]]) -> T:
        for pause in pauses():
            try:
                return await ask()
            except (RedisError, OSError) as error:
                log.warning("Redis does not answer (%s), trying again", words(error))
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
