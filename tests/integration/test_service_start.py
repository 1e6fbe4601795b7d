"""A worker that cannot start says why in one line and ends with exit code 2."""

from __future__ import annotations

import socket
import uuid
from pathlib import Path

import pytest
from service_fixture import Service, installed

from streamsched.service.stacks import Stack

pytestmark = pytest.mark.integration


@pytest.fixture
def service(stack: Stack, tmp_path: Path) -> Service:
    """Without topics."""
    return Service(stack, f"t{uuid.uuid4().hex[:8]}", tmp_path)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def refusal(service: Service, **env: str) -> str:
    worker = service.spawn(**env)
    assert worker.ended() == 2
    [line] = worker.lines()
    return line


def test_no_broker(service: Service, closed_port: int) -> None:
    line = refusal(service, STREAMSCHED_KAFKA_BOOTSTRAP=f"127.0.0.1:{closed_port}")
    assert f"Kafka at 127.0.0.1:{closed_port} does not answer (connection refused)" in line


def test_no_redis(service: Service, closed_port: int) -> None:
    line = refusal(service, STREAMSCHED_REDIS_URL=f"redis://127.0.0.1:{closed_port}/0")
    assert f"Redis at 127.0.0.1:{closed_port} does not answer" in line
    assert "STREAMSCHED_REDIS_URL" in line


def test_no_topics(service: Service) -> None:
    line = refusal(service)
    assert f"{service.names.arrivals}: missing" in line
    assert "streamsched topics apply" in line


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("STREAMSCHED_SESSION_S", "soon", "float"),
        ("STREAMSCHED_POLICY", "no-such-rule", "no-such-rule"),
        ("STREAMSCHED_CONFIG", "/no/such/file.toml", "No such file"),
        ("STREAMSCHED_KAFKA_BOOTSTRAP", "nowhere", "HOST:PORT"),
    ],
)
def test_a_bad_setting(service: Service, variable: str, value: str, said: str) -> None:
    line = refusal(service, **{variable: value})
    assert said in line
    assert variable in line or variable in ("STREAMSCHED_POLICY", "STREAMSCHED_CONFIG", "STREAMSCHED_KAFKA_BOOTSTRAP")


def test_another_number_of_partitions_than_the_topics_have(stack: Stack, tmp_path: Path) -> None:
    with installed(stack, f"t{uuid.uuid4().hex[:8]}", tmp_path) as service:
        assert "partitions" in refusal(service, STREAMSCHED_PARTITIONS="5")
