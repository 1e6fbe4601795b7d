"""The settings of the live service: one value, from the environment and options."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, get_type_hints

import msgspec

from streamsched.bus.app import GroupTimes
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.messages import Id
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
    snapshot_every: int = 5000
    """Journal records between two snapshots of a pool."""
    ranking_every_s: float = 1.0
    ranking_jobs: int = 1000
    """Jobs listed in a message of queue.rankings at most."""
    stop_s: float = 8.0
    """A pool that is stopped may take so long to finish its commit; then its next owner completes it."""
    dump_dir: str = ""
    """Folder in which windows are kept whose solve was slow, failed or fell back; empty: none are."""
    dump_files: int = 20
    dump_mib: int = 64
    """Of all dumps together at most; the oldest are dropped."""

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
        """Settings from STREAMSCHED_*, which win over the TOML file that STREAMSCHED_CONFIG names.

        Addresses, credentials and the topics' prefix have variables of their own; all other settings are read by one
        rule: `window_s` is STREAMSCHED_WINDOW_S, those of `times` and `scheduler` likewise without a prefix (lease_s is
        STREAMSCHED_LEASE_S). Raises UserError naming the variable or the file.
        """
        values: dict[str, Any] = {}
        if path := env.get("STREAMSCHED_CONFIG"):
            values = _read_file(Path(path))
        for variable, (section, name, kind) in _VARIABLES.items():
            if text := env.get(variable):
                values.setdefault(section, {})[name] = _parsed(variable, name, text, kind)
        own = values.get("", {})
        settings = cls(
            kafka=KafkaConnection.from_env(env),
            redis=RedisConnection.from_env(env),
            names=TopicNames.from_env(env),
            scheduler=SchedulerConfig(**values.get("scheduler", {})),
            times=GroupTimes(**values.get("times", {})),
            **own,
        )
        if not settings.pools:
            raise UserError("STREAMSCHED_POOLS: name at least one pool")
        if settings.placement not in ("milp", "greedy"):
            raise UserError(f"STREAMSCHED_PLACEMENT={settings.placement!r}: milp or greedy")
        return settings


_SECTIONS: Final = {"": Settings, "times": GroupTimes, "scheduler": SchedulerConfig}
_OWN_VARIABLES: Final = {"kafka", "redis", "names", "times", "scheduler"}
_ABOVE_ZERO: Final = {"session_s", "heartbeat_s", "rebalance_s", "solve_limit_s", "timer_s", "stop_s"}


def _variables() -> dict[str, tuple[str, str, Any]]:
    """Environment variable -> (section, field, type). A name that two sections use would be a mistake here."""
    found: dict[str, tuple[str, str, Any]] = {}
    for section, owner in _SECTIONS.items():
        for name, kind in get_type_hints(owner).items():
            if section == "" and name in _OWN_VARIABLES:
                continue
            variable = f"STREAMSCHED_{name.upper()}"
            assert variable not in found, variable
            found[variable] = (section, name, kind)
    return found


_VARIABLES: Final = _variables()


def _parsed(where: str, name: str, text: str, kind: Any) -> Any:
    """Text of the environment: a number, words with commas between them, a JSON object, or just text."""
    value: Any = text
    if kind == tuple[str, ...]:
        value = [word.strip() for word in text.split(",") if word.strip()]
    elif kind not in (str, int, float):
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise UserError(f"{where}={text!r}: {error}") from None
    return _checked(f"{where}={text!r}", name, value, kind, strict=False)


def _checked(what: str, name: str, value: Any, kind: Any, strict: bool) -> Any:
    try:
        converted = msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise UserError(f"{what}: {error}") from None
    if name == "pools":
        _check_pools(what, converted)
    if isinstance(converted, int | float):
        may_be_zero = isinstance(converted, float) and name not in _ABOVE_ZERO
        if not math.isfinite(converted) or converted < 0 or (converted == 0 and not may_be_zero):
            raise UserError(f"{what}: expected a number {'from' if may_be_zero else 'above'} 0")
    return converted


def _check_pools(what: str, pools: tuple[str, ...]) -> None:
    """A pool's name is a key in Kafka and part of every message of it."""
    for pool in pools:
        try:
            msgspec.convert(pool, Id)
        except msgspec.ValidationError:
            raise UserError(f"{what}: {pool!r} is no name for a pool (letters, digits and ._:/@+-)") from None
    if len(set(pools)) < len(pools):
        raise UserError(f"{what}: a pool is named twice")


def _read_file(path: Path) -> dict[str, Any]:
    """The settings of a TOML file by section, each checked; `times` and `scheduler` are its tables."""
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"settings file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"settings file {path}: {error}") from None
    kinds = {(section, name): kind for section, name, kind in _VARIABLES.values()}
    values: dict[str, Any] = {}
    for section in _SECTIONS:
        table = read if section == "" else read.pop(section, {})
        if not isinstance(table, dict):
            raise UserError(f"settings file {path}: {section} is a table")
        for name, value in list(table.items()):
            if section == "" and name in _SECTIONS:
                continue
            label = f"{section}.{name}" if section else name
            if (section, name) not in kinds:
                raise UserError(f"settings file {path}: there is no setting {label}")
            what = f"settings file {path}: {label} = {value!r}"
            values.setdefault(section, {})[name] = _checked(what, name, value, kinds[section, name], strict=True)
    return values
