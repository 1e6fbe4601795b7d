"""What is taken from Kafka on its way to a handler: in which order, how much of it, and when it is acknowledged.

Faust delivers to all agents by one loop, which waits where the queue of one is full. So an agent may not wait for its
handler: it puts what comes into a `Line`, which works beside it. What would pile up there is bounded by partition
(`Turns`): one of which much is open is not fetched from until it is less.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .strays import is_stray, what_ended

BATCH_MAX = 1000
"""Messages handed over at once at most."""
OPEN_MAX = 4 * BATCH_MAX
OPEN_BYTES_MAX = 32 * 1024 * 1024
OPEN_BYTES_ALL_MAX = 256 * 1024 * 1024
_BESIDES = 1500
"""About the bytes that a message takes in memory beside its key, value and headers."""

Later = Awaitable[bool | None]
"""What an input waits for before it is acknowledged. False: it was not taken after all, and is not acknowledged."""
Fault = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of what is handed over and not acknowledged. At any of them the partition is not fetched from until half of that
    is done; what had been fetched by then, a poll or two, still comes."""

    messages: int = OPEN_MAX
    """Of a partition."""
    size: int = OPEN_BYTES_MAX
    """Bytes, of a partition."""
    size_all: int = OPEN_BYTES_ALL_MAX
    """Bytes, of all partitions. Beyond it each may have its equal share only, so that those that stand still are held
    and those that go on are not."""


def size_of(message: Any) -> int:
    """About the bytes of a message in memory."""
    headers = message.headers
    pairs = headers.items() if isinstance(headers, dict) else headers or ()
    size = (
        len(message.key or b"")
        + len(message.value or b"")
        + sum(len(name) + len(value or b"") for name, value in pairs)
    )
    return _BESIDES + size


@dataclass(slots=True)
class _Turn:
    event: Any
    size: int
    done: bool = False


@dataclass(slots=True, eq=False)
class _Open:
    """A partition's events that are not acknowledged, in their order."""

    turns: deque[_Turn] = field(default_factory=deque)
    size: int = 0


class Turns:
    """Acknowledges the events of each partition in their order, whatever order they get done in.

    `pause` is told of a partition when it has reached one of the bounds, `resume` when half of that is done.
    """

    def __init__(
        self,
        bounds: Bounds | None = None,
        pause: Callable[[Any], None] = lambda tp: None,
        resume: Callable[[Any], None] = lambda tp: None,
    ) -> None:
        self._bounds = bounds or Bounds()
        self._open: dict[Any, _Open] = {}
        """Only of partitions that have something open."""
        self._size = 0
        self._generation = -1
        self._pause = pause
        self._resume = resume
        self._paused: set[Any] = set()

    def take(self, tp: Any, event: Any, size: int = 0) -> Callable[[], None]:
        """The event's turn is noted; call what is returned when the event is done."""
        self.begin(event.message.generation_id)
        opened = self._open.setdefault(tp, _Open())
        turn = _Turn(event, size)
        opened.turns.append(turn)
        opened.size += size
        self._size += size
        full = len(opened.turns) >= self._bounds.messages or opened.size >= self._size_max()
        if full and tp not in self._paused:
            self._paused.add(tp)
            self._pause(tp)

        def done() -> None:
            turn.done = True
            self._acknowledge(tp, opened)

        return done

    def is_open(self, tp: Any) -> bool:
        """Whether something of the partition is not acknowledged."""
        return tp in self._open

    def _size_max(self) -> float:
        if self._size < self._bounds.size_all:
            return self._bounds.size
        return min(self._bounds.size, self._bounds.size_all / len(self._open))

    def _acknowledge(self, tp: Any, opened: _Open) -> None:
        present = self._open.get(tp) is opened
        turns = opened.turns
        while turns and turns[0].done:
            turn = turns.popleft()
            opened.size -= turn.size
            if present:
                self._size -= turn.size
            turn.event.ack()
        if not present:
            return
        if tp in self._paused and 2 * len(turns) <= self._bounds.messages and 2 * opened.size <= self._size_max():
            self._paused.discard(tp)
            self._resume(tp)
        if not turns:
            del self._open[tp]

    def begin(self, generation: int) -> None:
        """A new assignment: what was open is delivered again, to whoever has its partition now."""
        if generation == self._generation:
            return
        self._generation = generation
        self._open.clear()
        self._size = 0
        paused, self._paused = self._paused, set()
        for tp in paused:
            self._resume(tp)


class Line:
    """What one agent has taken, on its way to the handler: one batch after the other, in order.

    `handler` gets a list of events. It returns when they are dealt with, but for those it names by position: these are
    acknowledged when what they are given with is done (several may share one). An error of either is a `fault`.
    `is_present` tells of an event whether it is of the present assignment; one of an earlier is delivered again.
    """

    def __init__(
        self,
        handler: Callable[[list[Any]], Awaitable[Mapping[int, Later | None]]],
        is_present: Callable[[Any], bool],
        fault: Fault,
    ) -> None:
        self._handler = handler
        self._is_present = is_present
        self._fault = fault
        self._waiting: deque[tuple[Any, Callable[[], None]]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._apart: set[asyncio.Task[None]] = set()

    def put(self, events: Sequence[tuple[Any, Callable[[], None]]]) -> None:
        """Events, each with what to call when it is done."""
        self._waiting.extend(events)
        if self._waiting and (self._working is None or self._working.done()):
            self._working = asyncio.ensure_future(self._work())
            self._working.add_done_callback(self._ended)

    async def pause(self, limit_s: float) -> None:
        """Until the handler has dealt with everything, or the limit: more comes meanwhile, for one larger batch."""
        if self._working is not None and not self._working.done():
            await asyncio.wait([self._working], timeout=limit_s)

    def forget_earlier(self) -> None:
        """What is not of the present assignment, however long the handler will be busy."""
        self._waiting = deque(item for item in self._waiting if self._is_present(item[0]))

    def stop(self) -> None:
        """What waits, or is with the handler, is delivered again to whoever has its partition next."""
        self._waiting.clear()
        if self._working is not None:
            self._working.cancel()

    async def _work(self) -> None:
        while batch := self._next():
            await self._hand_over(batch)

    def _next(self) -> list[tuple[Any, Callable[[], None]]]:
        batch: list[tuple[Any, Callable[[], None]]] = []
        while self._waiting and len(batch) < BATCH_MAX:
            item = self._waiting.popleft()
            if self._is_present(item[0]):
                batch.append(item)
        return batch

    async def _hand_over(self, batch: list[tuple[Any, Callable[[], None]]]) -> None:
        later = await self._handler([event for event, _ in batch])
        apart: dict[int, tuple[Later, list[Callable[[], None]]]] = {}
        for place, (_, finished) in enumerate(batch):
            if place not in later:
                finished()
            elif (work := later[place]) is not None:
                apart.setdefault(id(work), (work, []))[1].append(finished)
        for work, those in apart.values():
            task = asyncio.ensure_future(after(work, those, self._fault))
            self._apart.add(task)
            task.add_done_callback(self._apart.discard)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if (error := what_ended(task)) is not None:
            self._fault(error)


async def after(work: Later, finished: list[Callable[[], None]], fault: Fault) -> None:
    """Finish those when the work they wait for is done."""
    try:
        taken = await work
    except Exception as error:
        fault(error)
        raise
    except asyncio.CancelledError as error:
        if is_stray():  # else its partitions would be consumed no more, without a word
            stray = RuntimeError("a batch was cut short by a connection that closed")
            stray.__cause__ = error
            fault(stray)
        raise
    if taken is not False:
        for each in finished:
            each()
