"""Watch a replay on the topics, live: a reader that decodes everything into a `History` and keeps count."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.topics import TopicNames
from streamsched.core.instructions import Place

from .history import History, Stamped
from .kafka import Publisher, Reader, Record, Say

_ENDINGS: Final = (m.Completed, m.Failed, m.Preempted, m.Rejected, m.Released)


class Observer:
    """Reads arrivals, placements, completions and node events from offsets noted in `start`.

    `jobs` are those submitted, `finished` those with an end that stays (completed, or failed without retry).
    """

    def __init__(self, kafka: KafkaConnection, names: TopicNames, say: Say) -> None:
        self.history = History()
        self.jobs: set[str] = set()
        self.placed: set[str] = set()
        self.running: set[str] = set()
        """Placement ids that started and have not ended."""
        self.finished: set[str] = set()
        self.changed_at = time.monotonic()
        """Last time anything was heard of a job."""
        self._ended: set[str] = set()
        self._stopping = False
        self._reader = Reader(kafka, (names.arrivals, names.placements, names.completions, names.nodes), say)
        self._nodes_topic = names.nodes
        self._sinks: dict[str, tuple[Callable[[bytes | None], Any], list[Any]]] = {
            names.arrivals: (codec.decode_arrival, self.history.arrivals),
            names.placements: (codec.decode_placement, self.history.placements),
            names.completions: (codec.decode_completion, self.history.completions),
            names.nodes: (codec.decode_node, self.history.nodes),
        }

    async def start(self, publisher: Publisher, nodes_from_beginning: bool) -> None:
        """Note where the topics end now. Nodes of other executors have joined before: those are read from the start."""
        await self._reader.open(publisher)
        await self._reader.seek_to_end()
        if nodes_from_beginning:
            await self._reader.seek_to_beginning(self._nodes_topic)

    async def follow(self) -> None:
        """Until `stop`."""
        while not self._stopping:
            await self.step()

    def stop(self) -> None:
        self._stopping = True

    async def step(self) -> int:
        """Messages read."""
        records = await self._reader.read()
        for record in records:
            self._take(record)
        return len(records)

    async def catch_up(self) -> None:
        """Read to where the topics end now."""
        ends = await self._reader.ends()
        while await self.step() or not await self._reader.has_reached(ends):
            pass

    async def close(self) -> None:
        await self._reader.close()

    def _take(self, record: Record) -> None:
        decode, sink = self._sinks[record.topic]
        try:
            message = decode(record.value)
        except codec.Refused:
            self.history.undecodable[record.topic] += 1
            return
        if isinstance(message, m.Heartbeat):
            return
        sink.append(Stamped(record.timestamp_s, message))
        self._count(message)

    def _count(self, message: Any) -> None:
        if isinstance(message, m.JobArrival):
            self.jobs.add(message.job_id)
        elif isinstance(message, m.Placement):
            if isinstance(message.decision, Place):
                self.placed.add(message.decision.job_id)
        elif isinstance(message, m.Started):
            if message.placement_id not in self._ended:
                self.running.add(message.placement_id)
        elif isinstance(message, _ENDINGS):
            if isinstance(message, m.Released) and message.node_ids:
                return
            self._ended.add(message.placement_id)
            self.running.discard(message.placement_id)
            if isinstance(message, m.Completed) or (isinstance(message, m.Failed) and not message.retryable):
                self.finished.add(message.job_id)
        else:
            return
        self.changed_at = time.monotonic()
