"""Snapshots beside the commits: one that fails is a snapshot less, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.service.snapshotter import Snapshotter
from streamsched.store.pool_store import Position


class Kafka:
    """Fails as it is told, then writes."""

    def __init__(self, *failures: BaseException) -> None:
        self._failures = list(failures)

    async def send(self, topic: str, value: bytes, **_: Any) -> asyncio.Future[Any]:
        if self._failures:
            raise self._failures.pop()
        written: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written


@pytest.mark.parametrize("error", [KafkaConnectionError("away"), asyncio.CancelledError(), ValueError("a bug")])
def test_one_that_is_not_written_is_told_and_the_next_one_is(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        kafka: Any = Kafka(error)
        snapshotter = Snapshotter(kafka, "scheduler.snapshots", 0, "p", every=10)
        state = ClusterState("p", SchedulerConfig())
        for seq in (10, 20):
            snapshotter.after_commit(state, Position(seq=seq))
            assert snapshotter._task is not None
            await asyncio.wait([snapshotter._task])
        assert (snapshotter.written, snapshotter.latest_seq) == (1, 20)
        await snapshotter.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    assert [record.getMessage()[:41] for record in caplog.records] == ["pool p: snapshot at record 10 not written"]
