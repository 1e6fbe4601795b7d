"""The Faust application, as far as it can be tried without a broker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError
from faust.types import TP

from streamsched.bus.app import GroupTimes, Handlers, _ConsumerThread, build_app
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.hearing import Ears
from streamsched.bus.topics import TopicNames


def test_no_folder_is_made_where_the_worker_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory may be read-only, as in a container."""
    monkeypatch.chdir(tmp_path)
    unused: Any = None
    handlers = Handlers(unused, unused, unused, unused, unused, unused)
    app = build_app("group", KafkaConnection(), TopicNames(), handlers, GroupTimes(), Ears())
    app._create_directories()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KafkaConnectionError("away"), asyncio.CancelledError()])
def test_offsets_that_are_not_committed_do_not_end_the_committing(error: BaseException) -> None:
    """Faust's task for it ends at a cancellation without a word, also at one of aiokafka's own."""
    tp = TP("t", 0)

    class Consumer:
        async def commit(self, offsets: Any) -> None:
            raise error

    thread: Any = SimpleNamespace(_ensure_consumer=Consumer, assignment=lambda: {tp}, tp_last_committed_at={})
    assert asyncio.run(_ConsumerThread._commit(thread, {tp: 3})) is False
