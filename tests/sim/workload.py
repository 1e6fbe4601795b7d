"""Jobs and commands of a simulation: drawn whole at its beginning, written to the topics as time goes by."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.fleet import DURATION_LABEL, FleetNode
from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.bus.topics import TopicNames, partition_of

from .world import BEGIN_S

if TYPE_CHECKING:
    from .world import World


@dataclass(slots=True)
class Workload:
    """`messages`: (seconds, topic, key, value) in order of time."""

    messages: list[tuple[float, str, bytes, bytes]] = field(default_factory=list)
    jobs: dict[str, m.JobArrival] = field(default_factory=dict)
    """As first submitted."""
    cancelled: set[str] = field(default_factory=set)
    held: list[str] = field(default_factory=list)
    conflicts: set[str] = field(default_factory=set)
    """Jobs that are submitted again with another specification."""

    def add(self, at: float, topic: str, message: Any) -> None:
        self.messages.append((at, topic, codec.key_of(message), codec.encode(message)))

    async def play(self, world: World) -> None:
        for at, topic, key, value in sorted(self.messages, key=lambda item: item[0]):
            await asyncio.sleep(max(0.0, at - world.loop.time()))
            submit(world, topic, key, value)


def submit(world: World, topic: str, key: bytes, value: bytes) -> None:
    world.kafka.append(topic, partition_of(key.decode(), world.kafka.partitions), key, value, "users")


def draw(
    rng: Random,
    jobs: int,
    for_s: float,
    pools: tuple[str, ...],
    names: TopicNames,
    burst: float,
    own_pool: bool,
    commands: bool,
) -> Workload:
    """`burst`: share of jobs that arrive at one moment. `own_pool`: each names its pool; else half of them do."""
    work = Workload()
    for number in range(jobs):
        at = 1.0 if rng.random() < burst else rng.uniform(0.5, for_s)
        job = _job(rng, f"j{number}", at, rng.choice(pools) if own_pool or rng.random() < 0.5 else None)
        work.jobs[job.job_id] = job
        work.add(at, names.arrivals, job)
        if not commands:
            continue
        if rng.random() < 0.1:
            work.add(at + rng.uniform(0.0, 5.0), names.arrivals, msgspec.structs.replace(job, submitted_at=BEGIN_S + 9))
        if rng.random() < 0.05:
            work.conflicts.add(job.job_id)
            other = msgspec.structs.replace(job, tenant="somebody-else")
            work.add(at + rng.uniform(0.1, 5.0), names.arrivals, other)
        _commands(rng, work, job.job_id, at, names)
    work.messages.append((for_s / 2, names.arrivals, b"nonsense", b'{"job_id": 7}'))
    return work


def _job(rng: Random, job_id: str, at: float, pool: str | None) -> m.JobArrival:
    share = rng.random() < 0.15
    gpus = rng.choice((1, 1, 1, 2, 2, 4, 8))
    small = rng.random() < 0.2
    return m.JobArrival(
        job_id=job_id,
        submitted_at=BEGIN_S + at,
        gpu_fraction=rng.choice((0.25, 0.5, 0.3)) if share else None,
        gpus_per_worker=None if share else min(gpus, 2) if small else gpus,
        workers=1 if share or small else rng.choice((1, 1, 1, 2, 3)),
        gpu_types=rng.choice(((), (), ("A",), ("B",), ("A", "B"))),
        mixed_types=rng.random() < 0.3,
        tenant="small" if small else rng.choice(("red", "blue")),
        pool=pool,
        preemptible=rng.random() < 0.4,
        priority_class=rng.choice(("low", "normal", "normal", "high")),
        labels={DURATION_LABEL: f"{rng.expovariate(1 / 4.0):.3f}"},
    )


def _commands(rng: Random, work: Workload, job_id: str, at: float, names: TopicNames) -> None:
    when = at + rng.uniform(0.1, 12.0)
    about: dict[str, Any] = {"job_id": job_id, "time": BEGIN_S + when}
    draw = rng.random()
    if draw < 0.12:
        work.cancelled.add(job_id)
        work.add(when, names.commands, m.Cancel(**about))
    elif draw < 0.25:
        work.held.append(job_id)
        work.add(when, names.commands, m.Hold(**about))
        if rng.random() < 0.7:
            work.add(when + rng.uniform(0.1, 6.0), names.commands, m.Release(**about))
    elif draw < 0.3:
        work.add(when, names.commands, m.Reprioritise(**about, priority_class="high"))


def fits(job: m.JobArrival, nodes: tuple[FleetNode, ...]) -> bool:
    """Whether empty nodes could hold it: all workers are equal, so counting places is exact."""
    places: Counter[str] = Counter()
    for node in nodes:
        if not job.gpu_types or node.gpu_type in job.gpu_types:
            places[node.gpu_type] += node.gpus // (job.gpus_per_worker or 1)
    if job.gpu_fraction is not None:
        return bool(places)
    return (places.total() if job.mixed_types else max(places.values(), default=0)) >= job.workers


def by_pool(pools: tuple[str, ...], partitions: int) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for pool in pools:
        found[partition_of(pool, partitions)].append(pool)
    return found
