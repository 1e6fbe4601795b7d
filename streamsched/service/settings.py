"""The settings of the live service: one value, from the environment and options."""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args, get_origin, get_type_hints

import msgspec

from streamsched.bus.app import GroupTimes
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.messages import Id
from streamsched.bus.topics import DEFAULT_PARTITIONS, TopicNames
from streamsched.core.config import SchedulerConfig
from streamsched.core.tenants import TenantPolicy
from streamsched.errors import UserError
from streamsched.placement.solve import SolveLimits
from streamsched.store.connection import RedisConnection
from streamsched.store.job_index import GONE_S

log = logging.getLogger(__name__)


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
    solve_processes: int = 1
    """Above 1, windows of more than `solve_part_jobs` jobs are divided and their parts solved in as many processes."""
    solve_part_jobs: int = 128
    mip_gap: float = 0.01
    placement: str = "milp"
    """`milp` or `greedy`."""
    node_silent_s: float = 60.0
    """A node without a heartbeat for so long is thought lost."""
    early_command_s: float = 5.0
    """A command for a job that is not known yet waits so long for its arrival before it is refused."""
    snapshot_every: int = 5000
    """Journal records between two snapshots of a pool."""
    index_keep_s: float = GONE_S
    """A job that its pool has forgotten stays marked in the job index for so long."""
    ranking_every_s: float = 1.0
    ranking_jobs: int = 1000
    """Jobs listed in a message of queue.rankings at most."""
    stop_s: float = 8.0
    """A pool that is stopped may take so long to finish its commit; then its next owner completes it."""
    run_times: Literal["said", "predicted"] = "said"
    """What rules and shadow times believe of run times: what was said of a job, or what those that ended taught."""
    predict_dir: str = ""
    """Folder in which trees for predictions are trained and kept, a folder for each pool; empty: none are."""
    train_every_jobs: int = 2000
    train_every_s: float = 3600.0
    """Trees are trained when so many more jobs have ended and so much time has passed."""
    models_dir: str = "models"
    """Folder of the models that a `policy` of `model` or `model:NAME` ranks by, with its `registry.toml`."""
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
            time_s=self.solve_limit_s,
            gap=self.mip_gap,
            variables_max=0 if self.placement == "greedy" else 20_000,
            parts_max=1 if self.placement == "greedy" else self.solve_processes,
            part_jobs=self.solve_part_jobs,
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
        for line in unknown_variables(env):
            log.warning("%s", line)
        own = values.get("", {})
        settings = cls(
            kafka=KafkaConnection.from_env(env),
            redis=RedisConnection.from_env(env),
            names=TopicNames.from_env(env),
            scheduler=SchedulerConfig(**values.get("scheduler", {})),
            times=GroupTimes(**values.get("times", {})),
            **own,
        )
        times = settings.times
        if times.heartbeat_s >= times.session_s:
            raise UserError(
                f"STREAMSCHED_HEARTBEAT_S={times.heartbeat_s:g}: has to be below STREAMSCHED_SESSION_S="
                f"{times.session_s:g}, best a third of it; else the group throws the worker out"
            )
        if not _PREFIX.fullmatch(settings.names.prefix):
            raise UserError(
                f"STREAMSCHED_TOPIC_PREFIX={settings.names.prefix[:100]!r}: expected up to 100 letters, digits and ._-"
            )
        return settings


_DAY_S: Final = 86400.0
BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "partitions": (1, 10_000),
    "replication": (1, 100),
    "window_s": (0, 60),
    "timer_s": (0.01, 60),
    "solve_limit_s": (0.01, 600),
    "solve_processes": (1, 64),
    "solve_part_jobs": (1, 10_000),
    "mip_gap": (0, 1),
    "node_silent_s": (0.1, _DAY_S),
    "early_command_s": (0, 600),
    "snapshot_every": (1, 10_000_000),
    "index_keep_s": (1, _DAY_S),
    "ranking_every_s": (0, 3600),
    "ranking_jobs": (1, 2000),
    "stop_s": (0.1, 300),
    "train_every_jobs": (1, 10_000_000),
    "train_every_s": (1, 366 * _DAY_S),
    "dump_files": (1, 10_000),
    "dump_mib": (1, 100_000),
    "session_s": (0.1, 1800),
    "heartbeat_s": (0.01, 600),
    "rebalance_s": (0.1, 1800),
    "window_jobs": (1, 10_000),
    "lease_s": (0.1, 30 * _DAY_S),
    "backoff_s": (0, _DAY_S),
    "backoff_max_s": (0, 30 * _DAY_S),
    "quarantine_after": (1, 10_000),
    "quarantine_s": (0, 30 * _DAY_S),
    "finished_keep_s": (0, 366 * _DAY_S),
    "reserve_after_s": (0, 366 * _DAY_S),
    "reservations_max": (1, 1000),
    "usage_half_life_s": (1, 3660 * _DAY_S),
    "preempt_interval_s": (0, 30 * _DAY_S),
    "preempt_victims_max": (1, 1000),
    "restart_s": (0, _DAY_S),
    "lost_grace_s": (0, 30 * _DAY_S),
}
"""Least and largest value of each number. Beyond them lie a Kafka that refuses the group, sums that overflow, and waits
that look like a hang; not one is a use that we know of."""
CLASS_BOUNDS: Final = (-1000, 1000)
"""Of the ranks in `priority_classes`."""
TENANT_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {"weight": (0.001, 1_000_000), "quota_gpus": (0, 10_000_000)}
"""Of what is set for a tenant."""
ENTRIES_MAX: Final = 10_000
"""Pools, priority classes or tenants in one setting."""
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {"placement": ("milp", "greedy")}
_IDS: Final = {"group", "policy"}
_PATHS: Final = {"dump_dir", "models_dir", "predict_dir"}
_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{0,100}")

_SECTIONS: Final = {"": Settings, "times": GroupTimes, "scheduler": SchedulerConfig}
_OWN_VARIABLES: Final = {"kafka", "redis", "names", "times", "scheduler"}
_CONNECTIONS: Final = (
    *(f"STREAMSCHED_KAFKA_{field.name.upper()}" for field in fields(KafkaConnection)),
    "STREAMSCHED_KAFKA_SASL_PASSWORD_FILE",
    "STREAMSCHED_REDIS_URL",
    "STREAMSCHED_REDIS_URL_FILE",
    "STREAMSCHED_TOPIC_PREFIX",
)
_ELSEWHERE: Final = {"STREAMSCHED_CONFIG", "STREAMSCHED_TRACES"}
_NOT_OURS: Final = re.compile(
    r"STREAMSCHED_((TEST|CHAOS|SOAK)(_.*)?|(.*_)?SERVICE_(HOST|PORT)(_.*)?|(.*_)?PORT(_\d+_.*)?)"
)
"""For the tests; and what Kubernetes sets in every pod for a service named streamsched-..."""


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


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """A line for each STREAMSCHED_ variable that nothing reads: misspelt, it would have no effect and say nothing."""
    known = {*_VARIABLES, *_CONNECTIONS, *_ELSEWHERE}
    ours = sorted(name for name in env if name.startswith("STREAMSCHED_"))
    return [
        f"{name} is no setting and has no effect{_nearest(name, known)}"
        for name in ours
        if name not in known and not _NOT_OURS.fullmatch(name)
    ]


def _nearest(name: str, known: Iterable[str]) -> str:
    ours = len("STREAMSCHED_") if name.startswith("STREAMSCHED_") else 0  # what all have in common is no likeness
    near = difflib.get_close_matches(name[ours:], sorted(each[ours:] for each in known), 1, 0.6)
    return f": is {name[:ours]}{near[0]} meant?" if near else ""


def _parsed(where: str, name: str, text: str, kind: Any) -> Any:
    """Text of the environment: a number, words with commas between them, a JSON object, or just text."""
    value: Any = text
    if kind == tuple[str, ...]:
        value = [word.strip() for word in text.split(",") if word.strip()]
    elif kind not in (str, int, float) and get_origin(kind) is not Literal:
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UserError(f"{where}={_short(text)}: {error}") from None
    return _checked(f"{where}={_short(text)}", name, value, kind, strict=False)


def _short(value: object) -> str:
    """A value as it is quoted in an error: one line of it."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _checked(what: str, name: str, value: Any, kind: Any, strict: bool) -> Any:
    if name == "tenants":
        _check_tenant_keys(what, value)
    try:
        converted = msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        choices = f"choose one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else error
        raise UserError(f"{what}: {choices}") from None
    if get_origin(kind) is Literal or name in _PATHS:
        return converted
    if name in BOUNDS:
        _check_bounds(what, "", converted, BOUNDS[name])
    elif name in _CHOICES:
        if converted not in _CHOICES[name]:
            raise UserError(f"{what}: {' or '.join(_CHOICES[name])}")
    elif name in _IDS:
        _check_id(what, "", converted)
    elif len(converted) > ENTRIES_MAX:
        raise UserError(f"{what}: {len(converted)} entries, {ENTRIES_MAX} at most")
    elif name == "pools":
        _check_pools(what, converted)
    elif name == "priority_classes":
        for priority_class, rank in converted.items():
            _check_id(what, "", priority_class)
            _check_bounds(what, f"{priority_class}: ", rank, CLASS_BOUNDS)
    else:
        _check_tenants(what, converted)
    return converted


def _check_bounds(what: str, where: str, value: float, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not low <= value <= high:  # NaN is in no bounds
        raise UserError(f"{what}: {where}expected a number from {_number(low)} to {_number(high)}")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def _check_id(what: str, where: str, text: str) -> None:
    try:
        msgspec.convert(text, Id)
    except msgspec.ValidationError:
        raise UserError(f"{what}: {where}{text[:100]!r} is no name (letters, digits and ._:/@+-)") from None


def _check_tenant_keys(what: str, tenants: Any) -> None:
    """A misspelt key would leave the tenant without its quota, and say nothing."""
    if not isinstance(tenants, dict):
        return
    known = tuple(TENANT_BOUNDS)
    for tenant, policy in tenants.items():
        for key in policy if isinstance(policy, dict) else ():
            if key not in known:
                near = _nearest(str(key), known) or f": there is {' and '.join(known)}"
                raise UserError(f"{what}: tenant {tenant}: {str(key)[:100]!r} is no setting of a tenant{near}")


def _check_tenants(what: str, tenants: Mapping[str, TenantPolicy]) -> None:
    for tenant, policy in tenants.items():
        _check_id(what, "tenant ", tenant)
        for key, bounds in TENANT_BOUNDS.items():
            if (value := getattr(policy, key)) is not None:
                _check_bounds(what, f"tenant {tenant}: {key}: ", value, bounds)


def _check_pools(what: str, pools: tuple[str, ...]) -> None:
    """A pool's name is a key in Kafka and part of every message of it."""
    if not pools:
        raise UserError(f"{what}: name at least one pool")
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
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
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
                near = _nearest(name, [known for of, known in kinds if of == section])
                raise UserError(f"settings file {path}: there is no setting {label}{near}")
            what = f"settings file {path}: {label} = {_short(value)}"
            values.setdefault(section, {})[name] = _checked(what, name, value, kinds[section, name], strict=True)
    return values
