"""Memory over a long run: one worker, many short jobs through Kafka; RSS and Redis keys, flat after the first tenth?

A stack of its own (Apache Kafka and redis-server where they are installed, else the embedded one), one `streamsched
worker` with its defaults but that it forgets finished jobs after a few seconds, and simulated executors in here.
A bounded number of jobs is in flight: the next are submitted as others complete. STREAMSCHED_SOAK_JOBS says how many
there are in all (`make soak`: 1,000,000), by default 20,000.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from aiokafka import AIOKafkaConsumer
from rich.table import Table

from loadgen.executor import Executors
from loadgen.fleet import DURATION_LABEL, FleetOptions, SimulatedFleet
from loadgen.kafka import Outgoing, Publisher
from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.bus.admin import apply_topics
from streamsched.bus.topics import TopicNames
from streamsched.errors import UserError
from streamsched.service.stacks import Stack, start_stack
from streamsched.sim.nodes import parse_nodes
from streamsched.store.client import connect

from . import _cases

JOBS = 20_000
IN_FLIGHT = 2_000
KEEP_S = 5.0
INDEX_KEEP_S = 10.0
"""Both well below the time of a tenth of the jobs, so that forgetting has begun by then."""
FLAT_PERCENT = 5.0
"""Drift over the last nine tenths, as a share of the mean, up to which a figure counts as flat."""
_POOL = "default"
_BATCH = 200
_SAMPLES = 100
_READY_S = 60.0
_STALL_S = 120.0
_ROWS = 11


@dataclass(frozen=True, slots=True)
class Sample:
    """How things stood after so many completions."""

    jobs: int
    seconds: float
    worker_mib: float
    solver_mib: float
    redis_keys: int
    redis_fields: int
    redis_mib: float


def run(quick: bool) -> None:
    """The number of jobs is the same whether quick or not: what takes hours is asked for by the variable."""
    jobs = int(os.environ.get("STREAMSCHED_SOAK_JOBS") or JOBS)
    with _stack() as stack, tempfile.TemporaryDirectory(prefix="soak-") as folder:
        env = {name: value for name, value in os.environ.items() if not name.startswith("STREAMSCHED_")}
        env |= stack.kafka.environment() | {
            "STREAMSCHED_REDIS_URL": stack.redis.url,
            "STREAMSCHED_PARTITIONS": "1",
            "STREAMSCHED_FINISHED_KEEP_S": f"{KEEP_S:g}",
            "STREAMSCHED_INDEX_KEEP_S": f"{INDEX_KEEP_S:g}",
        }
        asyncio.run(apply_topics(stack.kafka, TopicNames(), 1))
        log = Path(folder) / "worker.log"
        with log.open("ab") as output:
            worker = subprocess.Popen(
                [sys.executable, "-m", "streamsched.cli", "worker"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            _wait_ready(worker, log)
            samples = asyncio.run(_Soak(stack, worker, jobs).run())
        except RuntimeError as error:
            raise UserError(f"soak: {error}\n{log.read_text(errors='replace')[-3000:]}") from None
        finally:
            worker.terminate()
            worker.wait()
    _print(samples, stack.name)


def _stack() -> Stack:
    try:
        return start_stack("local")
    except UserError:
        return start_stack("embedded")


def _wait_ready(worker: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _READY_S
    while "epoch " not in log.read_text(errors="replace"):
        if worker.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the worker did not start")
        time.sleep(0.1)


class _Soak:
    def __init__(self, stack: Stack, worker: subprocess.Popen[bytes], jobs: int) -> None:
        self._stack = stack
        self._worker = worker
        self._jobs = jobs
        self._names = TopicNames()
        self._submitted = 0
        self._completed = 0
        self._moved = time.monotonic()
        self._room = asyncio.Event()

    async def run(self) -> list[Sample]:
        fleet = SimulatedFleet(_POOL, parse_nodes("64x8:P100"), FleetOptions(start_delay_s=0.0))
        async with Publisher(self._stack.kafka, print) as publisher:
            executors = Executors([fleet], self._stack.kafka, self._names, publisher, print)
            await executors.start()
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(w) for w in (self._count(), executors.run(), self._submit(publisher))]
                samples = await self._sample()
                for task in beside:
                    task.cancel()
        if fleet.counts.violations:
            raise RuntimeError(f"the executors were told what cannot be: {fleet.counts.details}")
        return samples

    async def _submit(self, publisher: Publisher) -> None:
        while self._submitted < self._jobs:
            while self._submitted - self._completed > IN_FLIGHT - _BATCH:
                self._room.clear()
                await self._room.wait()
            numbers = range(self._submitted, min(self._submitted + _BATCH, self._jobs))
            arrivals = [
                m.JobArrival(
                    job_id=f"soak-{number}",
                    submitted_at=time.time(),
                    gpus_per_worker=(1, 1, 2, 4)[number % 4],
                    tenant=f"t{number % 10}",
                    labels={DURATION_LABEL: "0.001"},
                )
                for number in numbers
            ]
            await publisher.send_all(
                [Outgoing(self._names.arrivals, codec.key_of(a), codec.encode(a)) for a in arrivals]
            )
            self._submitted += len(arrivals)

    async def _count(self) -> None:
        """Completions on the topic; a broker that was asked twice for one would show as more jobs than there are."""
        options = self._stack.kafka.consumer_options()
        async with AIOKafkaConsumer(self._names.completions, **options) as consumer:
            async for record in consumer:
                if isinstance(codec.decode_completion(record.value), m.Completed):
                    self._completed += 1
                    self._moved = time.monotonic()
                    self._room.set()

    async def _sample(self) -> list[Sample]:
        """At every hundredth of the jobs, and at the end."""
        began = time.monotonic()
        redis = connect(self._stack.redis)
        samples: list[Sample] = []
        try:
            while self._completed < self._jobs:
                await asyncio.sleep(0.05)
                if self._worker.poll() is not None:
                    raise RuntimeError(f"the worker ended, exit code {self._worker.returncode}")
                if time.monotonic() - self._moved > _STALL_S:
                    raise RuntimeError(f"nothing completed for {_STALL_S:g} s, {self._completed} of {self._jobs} jobs")
                if self._completed * _SAMPLES < len(samples) * self._jobs:
                    continue
                keys = [key async for key in redis.scan_iter(count=1000)]
                hashes = [key for key in keys if await redis.type(key) == b"hash"]
                samples.append(
                    Sample(
                        jobs=self._completed,
                        seconds=time.monotonic() - began,
                        worker_mib=_rss_mib(self._worker.pid),
                        solver_mib=sum(_rss_mib(pid) for pid in _children(self._worker.pid)),
                        redis_keys=len(keys),
                        redis_fields=sum([await redis.hlen(key) for key in hashes]),
                        redis_mib=(await redis.info("memory"))["used_memory"] / 2**20,
                    )
                )
        finally:
            await redis.aclose()
        return samples


def _rss_mib(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS")) / 1024


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text(encoding="ascii").split()):
            found += [child, *_children(child)]
    return found


def _print(samples: Sequence[Sample], stack: str) -> None:
    last = samples[-1]
    rate = last.jobs / last.seconds
    title = f"soak, stack {stack}: {last.jobs:,} jobs in {last.seconds:,.0f} s, {rate:,.0f} jobs/s"
    table = Table(title=f"{title} (1,000,000 would take {1e6 / rate / 60:,.0f} min)")
    names = [field.name for field in fields(Sample)]
    for name in names:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for at in sorted({round(i * (len(samples) - 1) / (_ROWS - 1)) for i in range(_ROWS)}):
        table.add_row(*(_number(getattr(samples[at], name)) for name in names))
    table.add_section()
    later = [sample for sample in samples if sample.jobs >= 0.1 * last.jobs]
    drifts = [_drift_percent(later, name) for name in names[2:]]
    table.add_row("drift after the first tenth", "", *(f"{drift:+.1f} %" for drift in drifts))
    table.add_row(f"flat (within {FLAT_PERCENT:g} %)", "", *("yes" if d <= FLAT_PERCENT else "no" for d in drifts))
    _cases.console(140).print(table)


def _drift_percent(samples: Sequence[Sample], name: str) -> float:
    """What the least-squares line through the samples gains from its first to its last, as a share of the mean."""
    values = np.array([getattr(sample, name) for sample in samples], dtype=float)
    jobs = np.array([sample.jobs for sample in samples], dtype=float)
    if len(samples) < 3 or values.mean() == 0:
        return 0.0
    slope = np.polyfit(jobs, values, 1)[0]
    return float(100 * slope * (jobs[-1] - jobs[0]) / values.mean())


def _number(value: float) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
