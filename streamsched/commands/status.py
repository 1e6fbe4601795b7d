"""`streamsched status`: how each pool is, as its owner last wrote to Redis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamsched.errors import UserError
from streamsched.routing.least_loaded import ModelSummary, PoolSummary
from streamsched.service.clock import Clock
from streamsched.service.settings import Settings
from streamsched.store.client import connect
from streamsched.store.pool_store import summaries

from .history import ready, run

console = Console(highlight=False, width=None if Console().is_terminal else 200)
_OLD_S = 10.0
"""Owners write every two seconds also where nothing happens."""


def status_command(
    pool: Annotated[str | None, typer.Option(help="Only this pool.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The summaries as one JSON document.")] = False,
) -> None:
    """What each pool has, what waits, what ranks it, and what is wrong: from Redis, as the pools' owners wrote it.

    A pool without an owner shows by its age: owners write every two seconds.
    """
    settings = ready()
    pools = [pool] if pool is not None else list(settings.pools)
    if pool is not None and pool not in settings.pools:
        raise UserError(f"no pool {pool} here, there is {', '.join(settings.pools)}")
    found = dict(zip(pools, run(_read(settings, pools), settings), strict=True))
    told = {name: _decoded(name, value) for name, value in found.items()}
    if as_json:
        typer.echo(json.dumps({name: msgspec.to_builtins(summary) for name, summary in told.items()}, indent=1))
        return
    _print(told, Clock()())


async def _read(settings: Settings, pools: Sequence[str]) -> list[bytes | None]:
    redis: Redis = connect(settings.redis)
    try:
        return await summaries(redis, settings.key_prefix, pools)
    finally:
        await redis.aclose()


def _decoded(pool: str, value: bytes | None) -> PoolSummary | None:
    """None where no owner has written one."""
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=PoolSummary)
    except msgspec.MsgspecError as error:
        raise UserError(
            f"pool {pool}: its summary in Redis cannot be read ({error}); its owner's next commit mends it, or"
            f" `streamsched rebuild --pool {pool}`"
        ) from None


def _print(told: dict[str, PoolSummary | None], now: float) -> None:
    table = Table("pool", "waiting", "running", "nodes", "GPUs free of all", "ranked by", "written", box=None)
    for name, summary in told.items():
        table.add_row(*(Text(cell) for cell in _row(name, summary, now)))
    console.print(table)
    for name, summary in told.items():
        for line in _lines(summary, now) if summary is not None else ["no worker has had it yet"]:
            console.print(f"{name}: {line}", markup=False, soft_wrap=True)


def _row(name: str, summary: PoolSummary | None, now: float) -> list[str]:
    if summary is None:
        return [name, *["-"] * 6]
    gpus = f"{sum(summary.free_gpus.values()):,} of {sum(summary.gpus.values()):,}"
    age = f"{max(0.0, now - summary.time):.0f} s ago"
    return [name, f"{summary.queued:,}", f"{summary.runs:,}", f"{summary.nodes:,}", gpus, _ranked_by(summary), age]


def _ranked_by(summary: PoolSummary) -> str:
    model = summary.model
    if model is None:
        return summary.policy
    return f"model {model.used} ({model.digest})" if model.used else f"{model.base} (no model)"


def _lines(summary: PoolSummary, now: float) -> list[str]:
    lines = []
    if now - summary.time > _OLD_S:
        lines.append(f"nobody has written for {now - summary.time:.0f} s: has it a worker?")
    if summary.model is not None:
        lines += _about_model(summary.model)
    if summary.run_times is not None and summary.run_times.reasons:
        lines.append(f"run times drift: {'; '.join(summary.run_times.reasons)}")
    return lines


def _about_model(model: ModelSummary) -> list[str]:
    instead = f"model {model.used} stays in use" if model.used else f"{model.base} ranks"
    lines = [f"{problem}; {instead}" for problem in model.problems]
    if model.failures:
        lines.append(f"the model failed {model.failures} times; see the worker's log")
    if model.drift:
        told = ", ".join(f"{name} {100.0 * share:.0f}%" for name, share in model.drift.items())
        lines.append(f"drift: jobs outside of the model's range of training, by feature: {told}")
    if (shadow := model.shadow) is not None:
        lines.append(
            f"shadow {shadow.model}: of {shadow.jobs} jobs, correlation of places {shadow.correlation:.3f},"
            f" {100.0 * shadow.first:.0f}% of the first {shadow.among} the same"
        )
    if (canary := model.canary) is not None:
        lines.append(
            f"canary {canary.model}: {canary.placed} jobs placed after {canary.wait_s:.0f} s in the mean; others:"
            f" {canary.others_placed} after {canary.others_wait_s:.0f} s"
        )
    return lines
