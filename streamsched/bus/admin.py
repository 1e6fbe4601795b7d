"""Topics as declared against topics as they are: compare, create what is missing, alter configs that differ.

A partition count is never changed. Kafka places a key by hash modulo the count, so a pool would move to another
partition while its past, and its worker, stay with the old one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    IncompatibleBrokerVersion,
    KafkaConnectionError,
    KafkaError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)

from streamsched.errors import ServiceUnreachable, UserError

from .connection import KafkaConnection
from .topics import DECLARATIONS, TopicDeclaration, TopicNames

Kind = Literal["missing", "config", "partitions", "unreported"]

_BROKER_DEFAULT: Final = -1
_REQUEST_TIMEOUT_S: Final = 15.0
_SETTLE_TIMEOUT_S: Final = 30.0
_DYNAMIC_TOPIC_CONFIG: Final = 1  # source of a config in DescribeConfigs: set on the topic, not a default


class ConfigEntry(NamedTuple):
    value: str | None
    set_on_topic: bool


@dataclass(frozen=True, slots=True)
class Change:
    """One way in which the cluster is not as declared. `done`: it is now.

    `unreported` is no difference: the broker does not tell this config, so nobody can say.
    """

    topic: str
    kind: Kind
    setting: str
    wanted: str
    found: str | None = None
    done: bool = False
    note: str = ""

    @property
    def is_difference(self) -> bool:
        return self.kind != "unreported" and not self.done

    def __str__(self) -> str:
        if self.kind == "missing":
            line = f"{self.topic}: {'created' if self.done else 'missing'} ({self.wanted})"
        elif self.kind == "unreported":
            line = f"{self.topic}: {self.setting}={self.wanted} is not reported by this broker"
        elif self.done:
            line = f"{self.topic}: {self.setting} set to {self.wanted} (was {self.found})"
        else:
            line = f"{self.topic}: {self.setting} is {self.found}, declared {self.wanted}"
        return f"{line}; {self.note}" if self.note else line


async def diff_topics(connection: KafkaConnection, names: TopicNames, partitions: int) -> list[Change]:
    """What differs between the declarations and the cluster, in the order of the declarations.

    Raises ServiceUnreachable when no broker answers, UserError when it refuses.
    """
    async with _admin(connection) as admin:
        return await _diff(admin, names, partitions)


async def apply_topics(
    connection: KafkaConnection, names: TopicNames, partitions: int, replication: int | None = None
) -> list[Change]:
    """Make the cluster as declared; changes come back with `done` where that worked. A second time nothing changes.

    `replication` None leaves it to the broker. Topics are not created while others of their partition group have
    another count. Returns when the broker tells of every change and all partitions have a leader.
    """
    async with _admin(connection) as admin:
        changes = await _diff(admin, names, partitions)
        changes, overtaken = await _create_missing(admin, names, changes, partitions, replication)
        if overtaken:  # somebody else made them, perhaps otherwise
            await _until_empty(connection, lambda: _without_leader(admin, overtaken))
            theirs = [change for change in await _diff(admin, names, partitions) if change.topic in overtaken]
            changes = [change for change in changes if change.topic not in overtaken] + theirs
        changes = await _alter_configs(admin, changes)
        await _until_empty(connection, lambda: _unfinished(admin, names, partitions, changes))
        return changes


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _diff(admin: AIOKafkaAdminClient, names: TopicNames, partitions: int) -> list[Change]:
    counts = await _partition_counts(admin)
    existing = [names.of(declaration) for declaration in DECLARATIONS if names.of(declaration) in counts]
    configs = await _configs(admin, existing)
    changes: list[Change] = []
    for declaration in DECLARATIONS:
        topic = names.of(declaration)
        if topic in counts:
            changes += _partition_changes(declaration, topic, counts[topic], partitions)
            changes += _config_changes(declaration, topic, configs[topic])
        else:
            changes.append(Change(topic, "missing", "topic", f"{partitions} partitions"))
    return changes


def _partition_changes(declaration: TopicDeclaration, topic: str, found: int, wanted: int) -> list[Change]:
    if found == wanted or declaration.partition_group == "own":
        return []
    note = (
        "not changed: another count moves pools to other partitions, away from their past and their worker "
        f"(ask for {found} partitions, or start afresh under another prefix)"
    )
    return [Change(topic, "partitions", "partitions", str(wanted), str(found), note=note)]


def _config_changes(declaration: TopicDeclaration, topic: str, found: dict[str, ConfigEntry]) -> list[Change]:
    changes = []
    for setting, wanted in declaration.configs.items():
        if setting not in found:
            changes.append(Change(topic, "unreported", setting, wanted))
        elif found[setting].value != wanted:
            changes.append(Change(topic, "config", setting, wanted, found[setting].value))
    return changes


async def _partition_counts(admin: AIOKafkaAdminClient) -> dict[str, int]:
    """Of all topics. Asked by name, a broker that creates topics on its own would make them with its own count."""
    return {
        described["topic"]: len(described["partitions"])
        for described in await admin.describe_topics()
        if described["error_code"] == 0
    }


async def _configs(admin: AIOKafkaAdminClient, topics: Iterable[str]) -> dict[str, dict[str, ConfigEntry]]:
    """What the broker tells of the configs of `topics`. A topic made just now may not be known to every broker yet."""
    wanted = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
    configs: dict[str, dict[str, ConfigEntry]] = {}
    for last_try in (*[False] * 20, True):
        responses = await admin.describe_configs(wanted) if wanted else []
        for resource in (resource for response in responses for resource in response.to_object()["resources"]):
            topic, code = resource["resource_name"], resource["error_code"]
            if code != UnknownTopicOrPartitionError.errno or last_try:
                _raise_for(code, topic, resource["error_message"])
                configs[topic] = {entry["config_names"]: _config_entry(entry) for entry in resource["config_entries"]}
        wanted = [resource for resource in wanted if resource.name not in configs]
        if not wanted:
            break
        await asyncio.sleep(0.25)
    return configs


def _config_entry(entry: dict[str, Any]) -> ConfigEntry:
    return ConfigEntry(entry["config_value"], set_on_topic=entry.get("config_source") == _DYNAMIC_TOPIC_CONFIG)


# ── changing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _create_missing(
    admin: AIOKafkaAdminClient,
    names: TopicNames,
    changes: list[Change],
    partitions: int,
    replication: int | None,
) -> tuple[list[Change], set[str]]:
    """The changes after creating what may be created, and the topics that had come into being in the meantime."""
    uneven = any(change.kind == "partitions" for change in changes)
    declared = {names.of(declaration): declaration for declaration in DECLARATIONS}
    wanted = [
        change.topic
        for change in changes
        if change.kind == "missing" and not (uneven and declared[change.topic].partition_group == "shared")
    ]
    overtaken = await _create(admin, [_new_topic(declared[topic], topic, partitions, replication) for topic in wanted])
    return [_created(change, wanted) if change.kind == "missing" else change for change in changes], overtaken


def _created(change: Change, wanted: list[str]) -> Change:
    if change.topic in wanted:
        return replace(change, done=True)
    return replace(
        change, note="not created: existing topics have another number of partitions, and all must have the same"
    )


def _new_topic(declaration: TopicDeclaration, topic: str, partitions: int, replication: int | None) -> NewTopic:
    new = NewTopic(topic, partitions, replication or 1, topic_configs=dict(declaration.configs))
    if replication is None:
        new.replication_factor = _BROKER_DEFAULT  # the constructor takes it for "not given"
    return new


async def _create(admin: AIOKafkaAdminClient, topics: list[NewTopic]) -> set[str]:
    """Create them; the answer is those that were there already."""
    if not topics:
        return set()
    response = await admin.create_topics(topics, timeout_ms=int(_REQUEST_TIMEOUT_S * 1000))
    present = {topic for topic, code, _ in response.topic_errors if code == TopicAlreadyExistsError.errno}
    for topic, code, message in response.topic_errors:
        if topic not in present:
            _raise_for(code, topic, message)
    return present


async def _alter_configs(admin: AIOKafkaAdminClient, changes: list[Change]) -> list[Change]:
    wanted: dict[str, dict[str, str]] = {}
    for change in changes:
        if change.kind == "config":
            wanted.setdefault(change.topic, {})[change.setting] = change.wanted
    if not wanted:
        return changes
    try:
        await _alter(admin, wanted)
    except IncompatibleBrokerVersion:
        note = "this broker cannot alter configs"
        return [replace(change, note=note) if change.kind == "config" else change for change in changes]
    return [replace(change, done=True) if change.kind == "config" else change for change in changes]


async def _alter(admin: AIOKafkaAdminClient, wanted: dict[str, dict[str, str]]) -> None:
    """aiokafka has only the request that replaces all configs of a topic, so what others set there is sent along."""
    present = await _configs(admin, wanted)
    resources = []
    for topic, configs in wanted.items():
        kept = {name: entry.value for name, entry in present[topic].items() if entry.set_on_topic}
        resources.append(ConfigResource(ConfigResourceType.TOPIC, topic, kept | configs))
    for response in await admin.alter_configs(resources):
        for resource in response.to_object()["resources"]:
            _raise_for(resource["error_code"], resource["resource_name"], resource["error_message"])


async def _until_empty(connection: KafkaConnection, pending: Callable[[], Awaitable[set[str]]]) -> None:
    """Wait for the topics that `pending` names: brokers learn of a change some time after it was accepted."""
    left: set[str] = set()
    try:
        async with asyncio.timeout(_SETTLE_TIMEOUT_S):
            while True:
                if not (left := await pending()):
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise ServiceUnreachable(
            f"Kafka at {connection.bootstrap}: no leader or old configs for {', '.join(sorted(left)) or 'any topic'} "
            f"after {_SETTLE_TIMEOUT_S:.0f} s; check that all brokers are up"
        ) from None


async def _unfinished(
    admin: AIOKafkaAdminClient, names: TopicNames, partitions: int, changes: list[Change]
) -> set[str]:
    """Topics that the broker still describes as they were before `changes`, or that cannot be used yet."""
    done = {(change.topic, change.setting) for change in changes if change.done}
    now = await _diff(admin, names, partitions)
    present = {names.of(declaration) for declaration in DECLARATIONS} - {
        change.topic for change in now if change.kind == "missing"
    }
    old = {change.topic for change in now if (change.topic, change.setting) in done and change.is_difference}
    return old | await _without_leader(admin, present)


async def _without_leader(admin: AIOKafkaAdminClient, topics: set[str]) -> set[str]:
    return topics - {
        described["topic"]
        for described in await admin.describe_topics()
        if described["error_code"] == 0
        and described["partitions"]
        and all(partition["leader"] >= 0 for partition in described["partitions"])
    }


# ── connecting ───────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def _admin(connection: KafkaConnection) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client; Kafka's errors leave it as one line for the user."""
    admin = AIOKafkaAdminClient(**connection.client_options(), request_timeout_ms=int(_REQUEST_TIMEOUT_S * 1000))
    try:
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            await admin.start()
    except (KafkaError, OSError, TimeoutError):
        await admin.close()
        raise _unreachable(connection) from None
    try:
        yield admin
    except (KafkaConnectionError, OSError, TimeoutError):
        raise _unreachable(connection) from None
    except KafkaError as error:
        raise UserError(f"Kafka at {connection.bootstrap} refuses: {error}") from None
    finally:
        await admin.close()


def _unreachable(connection: KafkaConnection) -> ServiceUnreachable:
    """Wrong credentials look the same: aiokafka only says that no broker could be used."""
    return ServiceUnreachable(
        f"Kafka at {connection.bootstrap} ({connection.security_protocol}) does not answer; is it running, and are "
        "STREAMSCHED_KAFKA_BOOTSTRAP and the security settings right?"
    )


def _raise_for(code: int, topic: str, message: str | None) -> None:
    if code:
        raise UserError(f"Kafka refuses topic {topic}: {message or for_code(code).__name__}")
