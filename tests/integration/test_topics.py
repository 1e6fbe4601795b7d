"""`streamsched topics` against a real broker: apply, compare, and say what cannot be changed."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from typer.testing import CliRunner, Result

from streamsched.bus.admin import Change, apply_topics, diff_topics
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.topics import DECLARATIONS, JOURNAL, TopicNames
from streamsched.commands.topics import topics_app
from streamsched.errors import EXIT_UNUSABLE, ServiceUnreachable

pytestmark = pytest.mark.integration

PARTITIONS = 3


def run(*arguments: str) -> Result:
    return CliRunner().invoke(topics_app, list(arguments))


def apply(kafka: KafkaConnection, names: TopicNames, partitions: int = PARTITIONS) -> list[Change]:
    return asyncio.run(apply_topics(kafka, names, partitions))


def diff(kafka: KafkaConnection, names: TopicNames, partitions: int = PARTITIONS) -> list[Change]:
    return asyncio.run(diff_topics(kafka, names, partitions))


def with_admin(kafka: KafkaConnection, work: Callable[[AIOKafkaAdminClient], Awaitable[object]]) -> None:
    async def connected() -> None:
        admin = AIOKafkaAdminClient(**kafka.client_options())
        await admin.start()
        try:
            await work(admin)
        finally:
            await admin.close()

    asyncio.run(connected())


def create(kafka: KafkaConnection, topic: str, partitions: int, **configs: str) -> None:
    """As somebody else would; returns when the broker tells of it."""

    async def work(admin: AIOKafkaAdminClient) -> None:
        settings = {name.replace("_", "."): value for name, value in configs.items()}
        await admin.create_topics([NewTopic(topic, partitions, 1, topic_configs=settings)])
        async with asyncio.timeout(30):
            while topic not in await admin.list_topics():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    with_admin(kafka, work)


@pytest.fixture
def names(namespace: str) -> TopicNames:
    return TopicNames(f"{namespace}-")


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_apply_makes_all_topics_and_a_second_time_nothing(kafka: KafkaConnection, names: TopicNames) -> None:
    assert [change.kind for change in diff(kafka, names)] == ["missing"] * len(DECLARATIONS)
    made = apply(kafka, names)
    assert all(change.done for change in made)
    assert len(made) == len(DECLARATIONS)
    assert not any(change.is_difference for change in diff(kafka, names))
    assert not any(change.done for change in apply(kafka, names))


def test_a_config_that_differs_is_shown_and_set_where_the_broker_can(kafka: KafkaConnection, names: TopicNames) -> None:
    create(kafka, names.journal, PARTITIONS, retention_ms="5000", cleanup_policy="delete")
    apply_changes = {change.setting: change for change in apply(kafka, names) if change.topic == names.journal}
    retention = apply_changes["retention.ms"]
    assert (retention.wanted, retention.found) == (JOURNAL.configs["retention.ms"], "5000")
    left = {change.setting for change in diff(kafka, names) if change.is_difference}
    if retention.done:
        assert left == set()
    else:
        assert "cannot alter" in retention.note
        assert left == {"retention.ms"}


def test_configs_that_others_set_are_kept(kafka: KafkaConnection, names: TopicNames) -> None:
    create(kafka, names.journal, PARTITIONS, retention_ms="5000", segment_bytes="16777216")
    apply(kafka, names)
    found: dict[str, str] = {}

    async def look(admin: AIOKafkaAdminClient) -> None:
        (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, names.journal)])
        for entry in response.to_object()["resources"][0]["config_entries"]:
            found[entry["config_names"]] = entry["config_value"]

    with_admin(kafka, look)
    assert found["segment.bytes"] == "16777216"


def test_another_partition_count_is_reported_never_changed(kafka: KafkaConnection, names: TopicNames) -> None:
    create(kafka, names.pool_jobs, PARTITIONS + 2)
    changes = apply(kafka, names)
    (uneven,) = [change for change in changes if change.kind == "partitions"]
    assert uneven.topic == names.pool_jobs
    assert "pools" in str(uneven)
    missing = [change for change in changes if change.kind == "missing"]
    assert {change.topic for change in missing if change.done} == {names.dead_letters}
    assert all("same" in change.note for change in missing if not change.done)
    again = [change for change in diff(kafka, names) if change.kind == "partitions"]
    assert again == [uneven]


def test_two_applies_at_once_do_not_disturb_each_other(kafka: KafkaConnection, names: TopicNames) -> None:
    async def both() -> list[list[Change]]:
        return await asyncio.gather(*(apply_topics(kafka, names, PARTITIONS) for _ in range(2)))

    for changes in asyncio.run(both()):
        assert not any(change.is_difference for change in changes)
    assert not any(change.is_difference for change in diff(kafka, names))


def test_the_command_line(kafka: KafkaConnection, names: TopicNames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSCHED_KAFKA_BOOTSTRAP", kafka.bootstrap)
    monkeypatch.setenv("STREAMSCHED_TOPIC_PREFIX", names.prefix)
    options = ["--partitions", str(PARTITIONS)]
    assert run("diff", *options).exit_code == 1
    assert run("apply", *options).exit_code == 0
    assert run("diff", *options).exit_code == 0
    differing = run("diff", "--partitions", str(PARTITIONS + 1), "--json")
    assert differing.exit_code == 1
    assert {change["kind"] for change in json.loads(differing.stdout) if change["difference"]} == {"partitions"}


def test_show_names_the_schema_and_gives_a_sample() -> None:
    shown = run("show", "jobs.commands")
    assert shown.exit_code == 0
    assert "topics/jobs.commands/schema.json" in shown.stdout
    assert '"type": "cancel"' in shown.stdout


def test_an_unreachable_broker_is_one_line(unused_port: int) -> None:
    result = run("diff", "--bootstrap", f"127.0.0.1:{unused_port}")
    assert isinstance(result.exception, ServiceUnreachable)
    assert result.exception.exit_code == EXIT_UNUSABLE
    assert str(unused_port) in str(result.exception)
    assert "\n" not in str(result.exception)
