"""Simulated executors and node agents on Kafka: the I/O around `fleet.SimulatedFleet`.

Nodes are announced only after the position in `placements` is known: whatever is placed because of the announcement is
read. A fleet that starts anew is empty and does not look at older placements; with `fence` it says first that its nodes
were lost and that nothing runs there any more, which is true, so that their runs are queued again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.topics import TopicNames

from .fleet import SimulatedFleet
from .kafka import Outgoing, Publisher, Reader, Say

_IDLE_S = 0.5


@dataclass(frozen=True, slots=True)
class AgentIntervals:
    """How often node agents speak, in seconds; 0 turns telemetry off."""

    heartbeat_s: float = 3.0
    telemetry_s: float = 5.0


class Clock:
    """Epoch seconds that never go back, whatever is done to the machine's clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()


class Executors:
    """Fleets of one or more pools with one reader of `placements`."""

    def __init__(
        self,
        fleets: Sequence[SimulatedFleet],
        kafka: KafkaConnection,
        names: TopicNames,
        publisher: Publisher,
        say: Say,
        intervals: AgentIntervals | None = None,
    ) -> None:
        self.fleets = tuple(fleets)
        self.undecodable = 0
        self._names = names
        self._publisher = publisher
        self._reader = Reader(kafka, (names.placements,), say)
        self._intervals = intervals or AgentIntervals()
        self._clock = Clock()
        self._wake = asyncio.Event()

    async def start(self, fence: bool = False) -> None:
        """Fix the position in `placements`, then announce the nodes."""
        await self._reader.open(self._publisher)
        await self._reader.seek_to_end()
        now = self._clock.now()
        if fence:
            await self._tell_nodes(
                m.Lost(pool=fleet.pool, node_id=node.node_id, time=now, fenced=True)
                for fleet in self.fleets
                for node in fleet.nodes
            )
        await self._tell_nodes(event for fleet in self.fleets for event in fleet.joined(now))

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_placements())
                tasks.create_task(self._work_agendas())
                tasks.create_task(self._beat())
                if self._intervals.telemetry_s > 0:
                    tasks.create_task(self._sample())
        finally:
            await self._reader.close()

    async def _follow_placements(self) -> None:
        while True:
            for record in await self._reader.read():
                try:
                    placement = codec.decode_placement(record.value)
                except codec.Refused:
                    self.undecodable += 1
                    continue
                now = self._clock.now()
                for fleet in self.fleets:
                    fleet.handle(placement, now)
            self._wake.set()

    async def _work_agendas(self) -> None:
        """Send what is due; while an acknowledgement is awaited more becomes due and goes in the next batch."""
        while True:
            now = self._clock.now()
            reports = [report for fleet in self.fleets for report in fleet.advance(now)]
            if reports:
                await self._publisher.send_all(
                    [
                        Outgoing(self._names.completions, codec.key_of(report), codec.encode(report))
                        for report in reports
                    ]
                )
                continue
            self._wake.clear()
            due = min((at for fleet in self.fleets if (at := fleet.next_due()) is not None), default=now + _IDLE_S)
            try:
                async with asyncio.timeout(min(max(due - self._clock.now(), 0.001), _IDLE_S)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._intervals.heartbeat_s)
            now = self._clock.now()
            await self._tell_nodes(event for fleet in self.fleets for event in fleet.heartbeats(now))

    async def _sample(self) -> None:
        while True:
            now = self._clock.now()
            await self._publisher.send_all(
                [
                    Outgoing(self._names.telemetry, codec.key_of(sample), codec.encode(sample))
                    for fleet in self.fleets
                    for sample in fleet.telemetry(now)
                ]
            )
            await asyncio.sleep(self._intervals.telemetry_s)

    async def _tell_nodes(self, events: Iterable[m.NodeEvent]) -> None:
        await self._publisher.send_all(
            [Outgoing(self._names.nodes, codec.key_of(event), codec.encode(event)) for event in events]
        )
