"""Stacks keep the data they say they keep, end what they started, and say in one line what does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis as redis_client
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import UnknownError

from streamsched.bus.connection import KafkaConnection
from streamsched.errors import ServiceUnreachable, UserError
from streamsched.service.local_kafka import java_command
from streamsched.service.stacks import Stack, check_reachable, start_stack
from streamsched.store.connection import RedisConnection

pytestmark = pytest.mark.integration

SECRET = "hunter2-not-to-be-seen"


# --- data across a crash ---------------------------------------------------------------------------------------------


def test_killed_broker_keeps_its_messages_where_the_stack_says_so(private_stack: Stack) -> None:
    stack, broker = private_stack, private_stack.broker
    assert broker is not None
    asyncio.run(create_topic(stack.kafka, "kept"))
    asyncio.run(produce(stack, "kept", count=500))

    first_pid = broker.pid
    broker.kill()
    assert not alive(first_pid)
    broker.restart()

    assert broker.pid != first_pid
    if stack.traits.broker_keeps_data:
        assert asyncio.run(read_all(stack.kafka, "kept", count=500)) == list(range(500))
    else:
        assert "kept" not in asyncio.run(topics(stack.kafka))


def test_killed_redis_keeps_every_acknowledged_write(private_stack: Stack) -> None:
    server = private_stack.redis_server
    assert server is not None
    with closing(redis_client.Redis.from_url(private_stack.redis.url)) as client:
        for number in range(1000):
            client.set(f"key{number}", number)
        server.kill()
        server.restart()
        assert client.dbsize() == 1000


def test_stopped_stack_finds_its_data_again(stack_name: str, tmp_path: Path, require_own: None) -> None:
    with start_own(stack_name, tmp_path) as stack, closing(redis_client.Redis.from_url(stack.redis.url)) as client:
        keeps = stack.traits.broker_keeps_data
        client.set("answer", 42)
        asyncio.run(create_topic(stack.kafka, "kept"))
        asyncio.run(produce(stack, "kept", count=50))
        with pytest.raises(UserError, match="in use by another stack"):
            start_own(stack_name, tmp_path)
    with start_own(stack_name, tmp_path) as stack, closing(redis_client.Redis.from_url(stack.redis.url)) as client:
        assert client.get("answer") == b"42"
        if keeps:
            assert asyncio.run(read_all(stack.kafka, "kept", count=50)) == list(range(50))


def test_dead_letter_of_13_mb_fits(stack: Stack, namespace: str) -> None:
    """A dead letter holds a refused input of up to 10 MB, base64 coded."""
    topic = f"{namespace}.letters"
    body = os.urandom(13_000_000)

    async def round_trip() -> bytes:
        await create_topic(stack.kafka, topic, {"max.message.bytes": "20000000"})
        async with AIOKafkaProducer(**stack.kafka.client_options(), max_request_size=20_000_000) as producer:
            await producer.send_and_wait(topic, body)
        async with AIOKafkaConsumer(topic, **stack.kafka.client_options(), auto_offset_reset="earliest") as consumer:
            return (await asyncio.wait_for(consumer.getone(), 30)).value

    assert asyncio.run(round_trip()) == body


# --- traits: a newer wheel that does better than noted here should be noticed ----------------------------------------


def test_idempotent_producer_works_where_the_stack_says_so(stack: Stack, namespace: str) -> None:
    async def send() -> None:
        await create_topic(stack.kafka, namespace)
        producer = AIOKafkaProducer(**stack.kafka.client_options(), enable_idempotence=True)
        try:
            await producer.start()
            await producer.send_and_wait(namespace, b"once")
        finally:
            await producer.stop()

    if stack.traits.idempotent_producer:
        asyncio.run(send())
    else:
        with pytest.raises(UnknownError):
            asyncio.run(send())


def test_end_offsets_are_exact_where_the_stack_says_so(stack: Stack, namespace: str) -> None:
    async def end_after_a_batch_of_ten() -> tuple[int, int]:
        """(end_offsets, the high watermark that came with fetched records)"""
        await create_topic(stack.kafka, namespace)
        await produce(stack, namespace, count=10)
        partition = TopicPartition(namespace, 0)
        async with AIOKafkaConsumer(**stack.kafka.client_options()) as consumer:
            consumer.assign([partition])
            end = (await consumer.end_offsets([partition]))[partition]
            consumer.seek(partition, 0)
            await consumer.getmany(partition, timeout_ms=10_000)
            return end, consumer.highwater(partition)

    end, high_watermark = asyncio.run(end_after_a_batch_of_ten())
    assert high_watermark == 10
    assert (end == 10) is stack.traits.exact_end_offsets


# --- nothing is left behind -------------------------------------------------------------------------------------------


def test_stop_leaves_nothing_behind(stack_name: str, require_own: None) -> None:
    with start_own(stack_name) as stack:
        pids, folder, addresses = pids_of(stack), stack.data_dir, (stack.kafka.bootstrap, stack.redis.address)
        assert folder is not None
        assert all(alive(pid) for pid in pids)
        assert all(str(pid) in "\n".join(stack.describe()) for pid in pids)
    assert not any(alive(pid) for pid in pids)
    assert not folder.exists()
    for address in addresses:
        host, _, port = address.partition(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0
    stack.stop()


def test_frozen_server_is_ended_too(stack_name: str, require_own: None) -> None:
    with start_own(stack_name) as stack:
        pids = pids_of(stack)
        assert stack.redis_server is not None
        stack.redis_server.pause()
        with pytest.raises(ServiceUnreachable, match="nothing within"):
            check_reachable(None, stack.redis, timeout_s=0.3)
        stack.redis_server.resume()
        check_reachable(None, stack.redis)
        stack.redis_server.pause()
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("thread", ["main", "short-lived"])
def test_servers_die_with_a_killed_parent_but_not_with_a_thread(
    stack_name: str, thread: str, require_own: None, tmp_path: Path
) -> None:
    """PR_SET_PDEATHSIG follows the thread that forked: one that ends must not take the servers along."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, stack_name, thread, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with parent, ending(parent):
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.3)
        assert all(alive(pid) for pid in pids)
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(alive(pid) for pid in pids))


PARENT = textwrap.dedent("""
    import sys, threading, time
    from pathlib import Path
    from streamsched.service.stacks import start_stack

    started = []
    def start():
        started.append(start_stack(sys.argv[1], Path(sys.argv[3])))

    if sys.argv[2] == "main":
        start()
    else:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    print(started[0].broker.pid, started[0].redis_server.pid, flush=True)
    time.sleep(600)
""")


def test_server_that_cannot_start_is_told_with_the_end_of_its_log(
    stack_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require_own: None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = [free_port(), free_port()]
        monkeypatch.setattr("streamsched.service.stacks._free_ports", lambda _count: [*free, port])
        with pytest.raises(UserError, match=r"(?s)ended while starting: .*[Aa]ddress already in use") as told:
            start_own(stack_name, tmp_path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("missing", ["java", "redis-server"])
def test_missing_program_is_one_line_that_says_what_to_install(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if missing == "java":
        with pytest.raises(UserError, match=r"needs Java 17 or later.*apt-get install openjdk-17-jre-headless maven"):
            java_command()
    else:
        with pytest.raises(UserError, match=r"needs redis-server.*apt-get install redis-server"):
            start_stack("local")


def test_java_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(UserError, match="is Java 8"):
        java_command()


# --- what does not answer ---------------------------------------------------------------------------------------------


def test_both_answer(stack: Stack) -> None:
    check_reachable(stack.kafka, stack.redis)
    with start_stack("external", kafka=stack.kafka, redis=stack.redis) as external:
        assert len(external.describe()) == 2


def test_check_works_inside_an_event_loop(stack: Stack) -> None:
    async def check() -> None:
        check_reachable(stack.kafka, stack.redis)

    asyncio.run(check())


def closed(_stack_port: int) -> KafkaConnection:
    return KafkaConnection(f"127.0.0.1:{free_port()}")


def unknown_host(_stack_port: int) -> KafkaConnection:
    return KafkaConnection("no-such-host.invalid:9092")


def tls_to_plaintext(port: int) -> KafkaConnection:
    return KafkaConnection(f"127.0.0.1:{port}", security_protocol="SSL")


def login_to_plaintext(port: int) -> KafkaConnection:
    return KafkaConnection(
        f"127.0.0.1:{port}", security_protocol="SASL_PLAINTEXT", sasl_username="ann", sasl_password=SECRET
    )


@pytest.mark.parametrize(
    ("connection", "said"),
    [
        (closed, "connection refused"),
        (unknown_host, "no such host name|nothing within"),
        (tls_to_plaintext, "SECURITY_PROTOCOL is SSL|nothing within"),
        (login_to_plaintext, "SASL|SECURITY_PROTOCOL is SASL_PLAINTEXT"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unreachable_kafka_is_one_line(
    stack: Stack, connection, said: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    kafka = connection(int(stack.kafka.bootstrap.rpartition(":")[2]))
    with pytest.raises(ServiceUnreachable, match=said) as told:
        check_reachable(kafka, stack.redis, timeout_s=3)
    assert_one_clean_line(told.value, repr(kafka), caplog, capfd)
    assert kafka.bootstrap in str(told.value)


@pytest.mark.parametrize(
    ("answer", "said"), [(None, "nothing within"), (b"", "closed the connection at once")], ids=["silent", "closing"]
)
def test_something_else_on_the_port(
    answer: bytes | None, said: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with listener(answer) as port:
        kafka = KafkaConnection(f"127.0.0.1:{port}")
        with pytest.raises(ServiceUnreachable, match=said) as told:
            check_reachable(kafka, None, timeout_s=0.5)
    assert_one_clean_line(told.value, repr(kafka), caplog, capfd)


def test_second_bootstrap_address_is_enough(stack: Stack) -> None:
    check_reachable(KafkaConnection(f"127.0.0.1:{free_port()},{stack.kafka.bootstrap}"), None)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:{secret}@127.0.0.1:{closed}/0", "does not answer"),
        ("redis://ann:{secret}@{redis}/0", "refuses the login"),
        ("rediss://:{secret}@{redis}/0", "does not answer"),
        ("redis://:{secret}@no-such-host.invalid:6379/0", "does not answer"),
        ("redis://:{secret}@{redis}/0?socket_timeout=soon", "does not parse"),
    ],
    ids=["closed", "login", "tls", "host", "address"],
)
def test_unreachable_redis_is_one_line(
    stack: Stack, url: str, said: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    redis = RedisConnection(url.format(secret=SECRET, closed=free_port(), redis=stack.redis.address))
    with pytest.raises(ServiceUnreachable, match=said) as told:
        check_reachable(stack.kafka, redis, timeout_s=3)
    assert_one_clean_line(told.value, repr(redis), caplog, capfd)
    assert redis.address in str(told.value)


def assert_one_clean_line(
    error: ServiceUnreachable, representation: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    written = capfd.readouterr()
    assert "\n" not in str(error)
    assert error.__suppress_context__
    assert caplog.records == []
    assert written.out + written.err == ""
    assert SECRET not in str(error) + representation


# --- helpers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def require_own(stack_name: str) -> None:
    if stack_name not in ("embedded", "local"):
        pytest.skip(f"stack {stack_name} is not started by us")


def start_own(name: str, data_dir: Path | None = None) -> Stack:
    return start_stack("local" if name == "local" else "embedded", data_dir)


def pids_of(stack: Stack) -> list[int]:
    assert stack.broker is not None
    assert stack.redis_server is not None
    return [stack.broker.pid, stack.redis_server.pid]


async def create_topic(kafka: KafkaConnection, name: str, config: dict[str, str] | None = None) -> None:
    admin = AIOKafkaAdminClient(**kafka.client_options())
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, 1, 1, topic_configs=config or {})])
    finally:
        await admin.close()


async def topics(kafka: KafkaConnection) -> list[str]:
    admin = AIOKafkaAdminClient(**kafka.client_options())
    await admin.start()
    try:
        return await admin.list_topics()
    finally:
        await admin.close()


async def produce(stack: Stack, topic: str, count: int) -> None:
    """Acknowledged numbers 0..count-1, in one batch or few."""
    options = {"acks": "all", "linger_ms": 20, "enable_idempotence": stack.traits.idempotent_producer}
    async with AIOKafkaProducer(**stack.kafka.client_options(), **options) as producer:
        await asyncio.gather(*[await producer.send(topic, str(number).encode()) for number in range(count)])


async def read_all(kafka: KafkaConnection, topic: str, count: int) -> list[int]:
    partition = TopicPartition(topic, 0)
    found: list[int] = []
    async with AIOKafkaConsumer(**kafka.client_options(), enable_auto_commit=False) as consumer:
        consumer.assign([partition])
        consumer.seek(partition, 0)
        async with asyncio.timeout(30):
            while len(found) < count:
                batches = await consumer.getmany(partition, timeout_ms=500)
                found += [int(record.value) for records in batches.values() for record in records]
    return found


def alive(pid: int) -> bool:
    """A process that nobody has reaped yet (a zombie) is dead, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """A port where connections are accepted and then left silent (None) or closed at once (b"")."""
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            if answer is None:
                held.append(connection)
            else:
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in held:
        connection.close()
