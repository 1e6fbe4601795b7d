"""Fixtures shared by all tests: the stack under test, unique names on it, the shared traces.

STREAMSCHED_TEST_STACK names the stack: embedded (default), local, docker or external. A stack that cannot be started
skips the tests that need it, and fails them where CI is set: a green run there has run everything.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from streamsched.bus.connection import KafkaConnection
from streamsched.errors import UserError
from streamsched.service.stacks import Stack, StackName, start_stack
from streamsched.store.connection import RedisConnection

REPOSITORY = Path(__file__).resolve().parent.parent
_STACK_FIXTURES = {"stack", "kafka", "redis_url", "private_stack"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses a stack is an integration test, also where the marker was forgotten."""
    for item in items:
        if _STACK_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def stack_name() -> str:
    return os.environ.get("STREAMSCHED_TEST_STACK") or "embedded"


@pytest.fixture(scope="session")
def stack(stack_name: str) -> Iterator[Stack]:
    """Broker and Redis shared by the whole run: use `namespace` for names, and `private_stack` to break things."""
    with _running(stack_name) as started:
        yield started


@pytest.fixture
def private_stack(stack_name: str) -> Iterator[Stack]:
    """A stack for one test, whose servers the test may kill (local: about 5 s to start)."""
    if stack_name not in ("embedded", "local"):
        pytest.skip(f"the servers of stack {stack_name} are not ours to kill")
    with _running(stack_name) as started:
        yield started


@pytest.fixture
def kafka(stack: Stack) -> KafkaConnection:
    return stack.kafka


@pytest.fixture
def redis_url(stack: Stack) -> str:
    return stack.redis.url


@pytest.fixture
def namespace() -> str:
    """A short name that nothing else on the shared stack uses: a prefix for topics, groups, pools and keys."""
    return f"t{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Folder of the shared traces ($STREAMSCHED_TRACES, or beside the repository)."""
    folder = Path(os.environ.get("STREAMSCHED_TRACES") or REPOSITORY.parent / "shared" / "traces")
    if not folder.is_dir():
        pytest.skip(f"no traces at {folder}: set STREAMSCHED_TRACES")
    return folder


@contextmanager
def _running(name: str) -> Iterator[Stack]:
    with _docker_stack() if name == "docker" else _own_stack(name) as started:
        yield started


@contextmanager
def _own_stack(name: str) -> Iterator[Stack]:
    try:
        started = start_stack(cast(StackName, name))
    except UserError as error:
        _unavailable(f"stack {name}: {error}")
    with started:
        yield started


@contextmanager
def _docker_stack() -> Iterator[Stack]:
    """Kafka and Redis in containers, where a Docker engine answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # testcontainers' own
        from testcontainers.kafka import KafkaContainer
        from testcontainers.redis import RedisContainer

        try:
            broker = KafkaContainer().with_kraft().start()
        except Exception as error:
            _unavailable(f"stack docker: {error}")
        with broker, RedisContainer("redis:7") as store:
            redis = RedisConnection(f"redis://{store.get_container_host_ip()}:{store.get_exposed_port(6379)}/0")
            yield Stack("external", KafkaConnection(broker.get_bootstrap_server()), redis)


def _unavailable(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
