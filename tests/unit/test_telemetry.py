"""What is kept of telemetry: the latest of each node of the inventory, whatever names are written to the topic."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from streamsched.bus import messages as m
from streamsched.service.scheduler import Telemetry


class Store:
    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}
        self.swept = 0
        self.away: BaseException | None = None

    async def write(self, pool: str, samples: Mapping[str, bytes]) -> None:
        if self.away:
            raise self.away
        self.written.update(samples)

    async def forget_strangers(self, pool: str, nodes: Container[str]) -> None:
        self.swept += 1
        self.written = {name: value for name, value in self.written.items() if name in nodes}


def sample(node_id: str, time: float = 1.0) -> m.GpuTelemetry:
    return m.GpuTelemetry(pool="p", node_id=node_id, time=time, gpus=())


def test_only_nodes_that_have_joined_are_kept() -> None:
    store: Any = Store()
    nodes = {"n1", "n2"}
    telemetry = Telemetry(store, lambda pool: nodes)

    async def work() -> None:
        for name in ("n1", "n2", *(f"made-up-{number}" for number in range(1000))):
            telemetry.note(sample(name))
        telemetry.note(sample("n1", 0.5))
        await telemetry.write()
        assert set(store.written) == {"n1", "n2"}
        assert b'"time":1.0' in store.written["n1"], "the latest"
        assert telemetry.counts == {"samples": 3, "strangers": 1000}

    asyncio.run(work())


def test_nodes_that_have_left_are_taken_out_now_and_then() -> None:
    store: Any = Store()
    nodes = {"n1", "n2"}
    telemetry = Telemetry(store, lambda pool: nodes)

    async def work() -> None:
        store.written["left-long-ago"] = b""
        for _ in range(5):
            telemetry.note(sample("n1"))
            await telemetry.write()
        assert set(store.written) == {"n1"}
        assert store.swept == 1, "once a minute"
        for error in (RedisConnectionError("away"), asyncio.CancelledError()):
            store.away = error
            telemetry.note(sample("n1"))
            await telemetry.write()

    asyncio.run(work())
