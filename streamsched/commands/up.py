"""`streamsched up`: a broker, a Redis, the topics and a worker, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console

from streamsched.bus.admin import apply_topics
from streamsched.errors import CheckFailed, UserError
from streamsched.service.models import check_policy
from streamsched.service.settings import Settings
from streamsched.service.stacks import Stack, StackName, start_stack

console = Console(stderr=True, highlight=False, soft_wrap=True)

_CONNECTIONS = ("STREAMSCHED_KAFKA_", "STREAMSCHED_REDIS_")
_RESTARTS_MAX = 5
_RESTARTS_WITHIN_S = 60.0

StackOption = Annotated[
    str, typer.Option("--stack", help="embedded (wheels), local (Apache Kafka and redis-server) or external (yours).")
]
DataDir = Annotated[Path | None, typer.Option(help="Keep data and logs here; a temporary folder when not given.")]


def up(stack: StackOption = "embedded", data_dir: DataDir = None) -> None:
    """Start a stack, make the topics, run one worker. Ctrl-C or SIGTERM stops what was started."""
    ended = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: ended.set())
    with running_stack(stack, data_dir) as (services, env):
        console.print("In another terminal:")
        for name, value in (services.kafka.environment() | {"STREAMSCHED_REDIS_URL": services.redis.url}).items():
            console.print(f"  export {name}={value}")
        _supervise(env, ended)
        console.print(f"stopping {services.name} stack")


def _supervise(env: dict[str, str], ended: threading.Event) -> None:
    """Keep one worker running, as a service manager would: it ends by itself when it must not go on."""
    started: deque[float] = deque(maxlen=_RESTARTS_MAX)
    while not ended.is_set():
        if len(started) == _RESTARTS_MAX and time.monotonic() - started[0] < _RESTARTS_WITHIN_S:
            raise CheckFailed(f"the worker ended {_RESTARTS_MAX} times within {_RESTARTS_WITHIN_S:.0f} s")
        started.append(time.monotonic())
        with running_worker(env, None) as worker:
            console.print(f"worker: pid {worker.pid}")
            while worker.poll() is None and not ended.wait(0.5):
                pass
            if worker.poll() is not None and not ended.is_set():
                console.print(f"the worker ended with exit code {worker.returncode}; starting another")


@contextmanager
def running_stack(name: str, data_dir: Path | None) -> Iterator[tuple[Stack, dict[str, str]]]:
    """The stack with its topics made, and the environment for clients and workers of it.

    Settings that a worker would refuse are a UserError before anything is started.
    """
    chosen, env = stack_name(name), dict(os.environ)
    if chosen != "external":
        # Addresses and credentials of another cluster must not mix with those of our own.
        env = {name: value for name, value in env.items() if not name.startswith(_CONNECTIONS)}
    check_policy(Settings.from_env(env))
    with start_stack(chosen, data_dir) as stack:
        for line in stack.describe():
            console.print(line)
        if chosen != "external":
            env |= stack.kafka.environment() | {"STREAMSCHED_REDIS_URL": stack.redis.url}
        settings = Settings.from_env(env)
        asyncio.run(apply_topics(settings.kafka, settings.names, settings.partitions, settings.replication))
        yield stack, env


@contextmanager
def running_worker(env: dict[str, str], log: Path | None) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process with this environment; SIGTERM on exit, SIGKILL when that does not end it in time."""
    command = [sys.executable, "-m", "streamsched.cli", "worker"]
    with open(log, "ab") if log is not None else os.fdopen(os.dup(2), "wb") as output:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stack_name(name: str) -> StackName:
    """Raises UserError for a stack that there is not."""
    for known in get_args(StackName):
        if name == known:
            return cast(StackName, known)
    raise UserError(f"--stack {name}: choose one of {', '.join(get_args(StackName))}")
