"""The settings of the live service: one value, from the environment and options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from streamsched.bus.app import GroupTimes
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.topics import DEFAULT_PARTITIONS, TopicNames
from streamsched.core.config import SchedulerConfig
from streamsched.errors import UserError
from streamsched.placement.solve import SolveLimits
from streamsched.store.connection import RedisConnection


@dataclass(frozen=True, slots=True)
class Settings:
    """How one worker runs. Environment variables are STREAMSCHED_<NAME>; see docs/settings.md."""

    kafka: KafkaConnection = field(default_factory=KafkaConnection)
    redis: RedisConnection = field(default_factory=RedisConnection)
    names: TopicNames = field(default_factory=TopicNames)
    group: str = "streamsched"
    """Consumer group; also the prefix of the Redis keys."""
    pools: tuple[str, ...] = ("default",)
    """The scheduling domains there are. A message for another one is refused."""
    partitions: int = DEFAULT_PARTITIONS
    replication: int = 1
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    times: GroupTimes = field(default_factory=GroupTimes)
    window_s: float = 0.02
    """Least time between two windows of a pool."""
    timer_s: float = 0.5
    """Leases, backoffs and silent nodes are looked at this often."""
    solve_limit_s: float = 1.0
    """Time limit of a window's MILP; after it the incumbent, else greedy's answer is used."""
    mip_gap: float = 0.01
    placement: str = "milp"
    """`milp` or `greedy`."""
    node_silent_s: float = 60.0
    """A node without a heartbeat for so long is thought lost."""
    early_command_s: float = 5.0
    """A command for a job that is not known yet waits so long for its arrival before it is refused."""
    ranking_every_s: float = 1.0
    ranking_jobs: int = 1000
    """Jobs listed in a message of queue.rankings at most."""

    @property
    def key_prefix(self) -> str:
        return f"{self.group}:"

    def solve_limits(self) -> SolveLimits:
        """For the solver process; `greedy` builds no models."""
        return SolveLimits(
            time_s=self.solve_limit_s, gap=self.mip_gap, variables_max=0 if self.placement == "greedy" else 20_000
        )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Settings from STREAMSCHED_*; STREAMSCHED_CONFIG names a TOML file for pools and the scheduler's own."""
        values: dict[str, Any] = {}
        if path := env.get("STREAMSCHED_CONFIG"):
            values = _read_file(Path(path))
        settings = cls(
            kafka=KafkaConnection.from_env(env),
            redis=RedisConnection.from_env(env),
            names=TopicNames.from_env(env),
            **values,
        )
        if pools := env.get("STREAMSCHED_POOLS"):
            settings = replace(settings, pools=tuple(p.strip() for p in pools.split(",") if p.strip()))
        if group := env.get("STREAMSCHED_GROUP"):
            settings = replace(settings, group=group)
        if partitions := env.get("STREAMSCHED_PARTITIONS"):
            settings = replace(settings, partitions=_positive("STREAMSCHED_PARTITIONS", partitions))
        if policy := env.get("STREAMSCHED_POLICY"):
            settings = replace(settings, scheduler=msgspec.structs.replace(settings.scheduler, policy=policy))
        return settings


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """What a settings file may hold."""

    pools: tuple[str, ...] = ("default",)
    group: str = "streamsched"
    partitions: int = DEFAULT_PARTITIONS
    replication: int = 1
    placement: str = "milp"
    solve_limit_s: float = 1.0
    mip_gap: float = 0.01
    window_s: float = 0.02
    node_silent_s: float = 60.0
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        file = msgspec.toml.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise UserError(f"settings file {path}: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"settings file {path}: {error}") from None
    if not file.pools:
        raise UserError(f"settings file {path}: pools is empty, name at least one")
    return msgspec.structs.asdict(file)


def _positive(name: str, text: str) -> int:
    if not text.isdigit() or not int(text):
        raise UserError(f"{name}={text!r}: expected a whole number above 0")
    return int(text)
