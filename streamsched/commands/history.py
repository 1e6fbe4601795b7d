"""`streamsched replay` and `streamsched rebuild`: a pool's past, folded from its journal."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from aiokafka.errors import KafkaError
from redis.exceptions import RedisError
from rich.console import Console

from streamsched.core.cluster import ClusterState
from streamsched.errors import CheckFailed, ServiceUnreachable, UserError
from streamsched.service.history import Until, compare_with_redis, rebuild, replay, story_of
from streamsched.service.reachable import check_reachable
from streamsched.service.settings import Settings
from streamsched.store.client import trouble
from streamsched.store.pool_store import Unreadable

T = TypeVar("T")
console = Console(highlight=False, soft_wrap=True)

PoolOption = Annotated[str, typer.Option("--pool", help="The pool.")]


def replay_command(
    pool: PoolOption,
    until: Annotated[str | None, typer.Option(help="A record's number, or a time (RFC 3339 with offset).")] = None,
    job: Annotated[str | None, typer.Option(help="Print the story of this job instead of the state.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with Redis value by value; exit 1 if it differs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole state as one JSON document.")] = False,
) -> None:
    """Fold a pool's journal through the core, without any solver, and print the state or one job's story."""
    settings = ready()
    if check:
        differences = run(compare_with_redis(settings, pool), settings)
        for line in differences[:20]:
            console.print(line, markup=False)
        if differences:
            raise CheckFailed(f"pool {pool}: {len(differences)} values in Redis are not what the journal gives")
        console.print(f"pool {pool}: Redis holds what the journal gives, value for value")
        return
    lines, note = story_of(job or "")
    fold = run(replay(settings, pool, until_of(until), note if job else None), settings)
    if job:
        if not lines:
            raise UserError(f"pool {pool}: no job {job} up to record {fold.position.seq}")
        for line in lines:
            console.print(line, markup=False)
    elif as_json:
        typer.echo(msgspec.json.encode(fold.state.everything(), order="deterministic").decode())
    else:
        _print_state(fold.state, fold.position.seq)


def rebuild_command(pool: PoolOption) -> None:
    """Write a pool's keys in Redis anew from snapshots and journal. A live owner of the pool ends and restarts."""
    settings = ready()
    fold = run(rebuild(settings, pool), settings)
    _print_state(fold.state, fold.position.seq)


def _print_state(state: ClusterState, seq: int) -> None:
    jobs = Counter(job.state.value for job in state.jobs.values())
    held = sum(len(a.gpus) for run in state.runs.values() for a in run.allocations)
    total = sum(node.record.capacity for node in state.inventory)
    moment = datetime.fromtimestamp(state.now, UTC).isoformat(timespec="milliseconds")
    console.print(f"pool {state.pool} after record {seq}, epoch {state.epoch}, {moment}")
    console.print("jobs: " + (", ".join(f"{count} {name}" for name, count in sorted(jobs.items())) or "none"))
    console.print(f"runs: {len(state.runs)} on {held} of {total} GPUs, {len(state.inventory.nodes)} nodes")


def until_of(text: str | None) -> Until:
    if text is None:
        return Until()
    if text.isdigit():
        return Until(seq=int(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"--until {text}: expected a record's number or a time like 2026-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        raise UserError(f"--until {text}: give the offset, as in {text}Z or {text}+01:00")
    return Until(time=moment.timestamp())


def ready() -> Settings:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    settings = Settings.from_env()
    check_reachable(settings.kafka, settings.redis)
    return settings


def run(work: Coroutine[Any, Any, T], settings: Settings) -> T:
    try:
        return asyncio.run(work)
    except Unreadable as error:
        raise CheckFailed(f"Redis holds what streamsched did not write ({error}): `streamsched rebuild`") from None
    except RedisError as error:
        raise ServiceUnreachable(trouble(error, settings.redis)) from None
    except KafkaError as error:
        raise ServiceUnreachable(f"Kafka at {settings.kafka.bootstrap} stopped answering: {error}") from None
