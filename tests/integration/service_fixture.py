"""Worker processes of one installation on a stack, and what a test needs to speak to them through the topics.

Everything goes through Kafka, Redis, signals, exit codes and the log, as it would for an operator: no part of the
worker is imported into the test.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.bus.admin import apply_topics
from streamsched.bus.topics import TopicNames, partition_of
from streamsched.core.cluster import Changes
from streamsched.core.instructions import Place
from streamsched.core.model import Job
from streamsched.service.settings import Settings
from streamsched.service.stacks import Stack
from streamsched.store.client import connect
from streamsched.store.pool_store import PoolStore

PARTITIONS = 4
DEADLINE_S = 60.0
T = TypeVar("T")

_FAST = {
    "STREAMSCHED_SESSION_S": "6",  # the least that a Kafka broker takes by default
    "STREAMSCHED_HEARTBEAT_S": "1",
    "STREAMSCHED_REBALANCE_S": "3",
    "STREAMSCHED_EARLY_COMMAND_S": "1.5",
    "STREAMSCHED_RANKING_EVERY_S": "0.2",
    "STREAMSCHED_STOP_S": "3",
}


class WorkerProcess:
    """One `streamsched worker`."""

    def __init__(self, env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streamsched.cli", "worker"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def said(self, pattern: str) -> int:
        """How many lines of its log match."""
        return sum(re.search(pattern, line) is not None for line in self.lines())

    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ended(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(deadline_s)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.ended()


class Service:
    """Topics of their own, a consumer group of their own, and any number of workers."""

    def __init__(self, stack: Stack, prefix: str, folder: Path, pools: tuple[str, ...] = ("default",)) -> None:
        self.stack = stack
        self.folder = folder
        self.names = TopicNames(f"{prefix}.")
        self.workers: list[WorkerProcess] = []
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STREAMSCHED_")}
        self.env = inherited | stack.kafka.environment() | _FAST
        self.env |= {
            "STREAMSCHED_REDIS_URL": stack.redis.url,
            "STREAMSCHED_TOPIC_PREFIX": self.names.prefix,
            "STREAMSCHED_GROUP": prefix,
            "STREAMSCHED_POOLS": ",".join(pools),
            "STREAMSCHED_PARTITIONS": str(PARTITIONS),
        }
        self.settings = Settings.from_env(self.env)

    def make_topics(self) -> None:
        asyncio.run(apply_topics(self.stack.kafka, self.names, PARTITIONS))

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def spawn(self, **env: str) -> WorkerProcess:
        """Start a worker; it need not be ready."""
        worker = WorkerProcess(self.env | env, self.folder / f"worker-{len(self.workers)}.log")
        self.workers.append(worker)
        return worker

    def start(self, pools: int | None = None) -> WorkerProcess:
        """Start a worker and wait until it has recovered this many pools, by default all."""
        worker = self.spawn()
        wanted = len(self.settings.pools) if pools is None else pools
        self.wait_for(lambda: worker.said(r"pool \S+: epoch \d+") >= wanted, "the worker to have its pools")
        return worker

    def close(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.signal(signal.SIGCONT)
                worker.kill()

    def wait_for(self, condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
        """The first true answer of `condition`; fails with the logs' ends when there is none in time."""
        end = time.monotonic() + deadline_s
        while not (answer := condition()):
            if time.monotonic() > end:
                tails = "\n".join(f"{w.log.name}:\n" + "\n".join(w.lines()[-25:]) for w in self.workers)
                raise AssertionError(f"waited {deadline_s:g} s for {what}\n{tails}")
            time.sleep(0.1)
        return answer

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, topic: str, *messages: Any) -> None:
        """Messages of the contract, each with its key, in order."""
        self.produce(topic, [(codec.key_of(message), codec.encode(message)) for message in messages])

    def produce(
        self, topic: str, items: list[tuple[bytes | None, bytes | None]], partition: int | None = None
    ) -> list[tuple[int, int]]:
        """Raw keys and values, in order; (partition, offset) of each."""

        async def work() -> list[tuple[int, int]]:
            options = self.stack.kafka.client_options() | {"max_request_size": 2**25, "acks": "all"}
            async with AIOKafkaProducer(**options) as producer:
                sent = [await producer.send(topic, value, key=key, partition=partition) for key, value in items]
                return [(done.partition, done.offset) for done in await asyncio.gather(*sent)]

        return asyncio.run(work())

    def read(self, topic: str) -> list[Any]:
        """The whole topic as it is now, each partition in order."""

        async def work() -> list[Any]:
            records: list[Any] = []
            async with AIOKafkaConsumer(
                **self.stack.kafka.consumer_options(), max_partition_fetch_bytes=2**25
            ) as consumer:
                partitions = [TopicPartition(topic, p) for p in range(PARTITIONS)]
                consumer.assign(partitions)
                await consumer.seek_to_beginning(*partitions)
                ends = await consumer.end_offsets(partitions)
                while True:
                    # Tansu tells an end that may be a batch too low, so what comes within a moment is taken, too.
                    reached = all([await consumer.position(tp) >= ends[tp] for tp in partitions])
                    batches = await consumer.getmany(*partitions, timeout_ms=300 if reached else 1000)
                    records += [record for batch in batches.values() for record in batch]
                    if reached and not batches:
                        return records

        return asyncio.run(work())

    def placements(self) -> list[m.Placement]:
        return [codec.decode_placement(record.value) for record in self.read(self.names.placements)]

    def placed(self, job_id: str) -> list[Place]:
        """Every `place` of a job, in order."""
        decisions = [placement.decision for placement in self.placements()]
        return [d for d in decisions if isinstance(d, Place) and d.job_id == job_id]

    def wait_placed(self, job_id: str) -> Place:
        return self.wait_for(lambda: self.placed(job_id), f"a placement of {job_id}")[-1]

    def letters(self) -> list[m.DeadLetter]:
        return [codec.decode_dead_letter(record.value) for record in self.read(self.names.dead_letters)]

    def ranking(self, pool: str = "default") -> m.QueueRanking | None:
        """The latest one."""
        key = pool.encode()
        values = [record.value for record in self.read(self.names.rankings) if record.key == key]
        return codec.decode_ranking(values[-1]) if values else None

    # ── Redis ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def redis(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        async def connected() -> T:
            client = connect(self.stack.redis)
            try:
                return await work(client)
            finally:
                await client.aclose()

        return asyncio.run(connected())

    def state(self, pool: str = "default") -> Changes | None:
        """The pool as Redis has it."""
        prefix = self.settings.key_prefix
        return self.redis(lambda client: PoolStore(client, pool, prefix).load()).state

    def job(self, job_id: str, pool: str = "default") -> Job | None:
        state = self.state(pool)
        return state.jobs.get(job_id) if state is not None else None

    def wait_job(self, job_id: str, condition: Callable[[Job], bool], pool: str = "default") -> Job:
        def look() -> Job | None:
            job = self.job(job_id, pool)
            return job if job is not None and condition(job) else None

        found = self.wait_for(look, f"job {job_id}")
        assert found is not None
        return found


def pools_apart(count: int) -> tuple[str, ...]:
    """Names of pools that are all in different partitions."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < count:
        found.setdefault(partition_of(f"pool-{number}", PARTITIONS), f"pool-{number}")
        number += 1
    return tuple(found.values())


@contextmanager
def installed(stack: Stack, prefix: str, folder: Path, pools: tuple[str, ...] = ("default",)) -> Iterator[Service]:
    """An installation with its topics made; its workers are ended with it."""
    service = Service(stack, prefix, folder, pools)
    service.make_topics()
    try:
        yield service
    finally:
        service.close()
