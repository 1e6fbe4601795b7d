"""The Faust application: agents that take batches of raw bytes, hand them over, and acknowledge what was applied.

What is fixed here was found by trying (see docs/adr/0002):
- `noack_take`, acks by hand after the handler returned: an exception that left an agent would otherwise acknowledge the
  whole batch. A handler does not raise; what it cannot handle ends the process, so that the group's offsets stay.
- `bytes` values: a decode error inside Faust ends `take` silently.
- Faust's own assignor, which gives one worker the same partitions of all topics with equal counts. It is used only when
  `table_standby_replicas` > 0 (there are no tables); otherwise partitions are dealt round robin and a pool's topics
  would land on different workers.
- No topic is declared by Faust: a metadata request would create it with the broker's default partition count.
- A rebalance may come while a batch is worked on. What was fetched before it (`Input.generation`) is delivered again
  after it, so the old copies are dropped: applied out of turn they would hide the inputs between. Faust drops those in
  its own queues, but acknowledges them, and does not know of those in the buffer of `noack_take`.
- Faust's own account of acknowledgements skips a single open message at its head, and any number of them where nothing
  was committed yet. So events are acknowledged strictly in the order of their partition (`_Turns`).
- An agent is one stream over all its partitions, so a handler that waited for the slowest would hold up the rest. It
  gives back what takes longer, to be acknowledged apart; a partition of which much is open is not fetched from until it
  is less, so that one that stands still fills neither the memory nor the way of the others.
- No table, so no folder: Faust would make one in the working directory, which may be read-only.
- A failed commit of offsets is no reason to end: they only say where to start reading, the state knows what is in it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import faust
from aiokafka.errors import KafkaError
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from msgspec import Struct
from yarl import URL

from .connection import KafkaConnection
from .topics import TopicNames

log = logging.getLogger(__name__)

BATCH_MAX = 1000
"""Messages handed over at once at most."""
BATCH_WITHIN_S = 0.01
"""How long a batch that is not full is waited for: the price in latency of one topic hop."""
OPEN_MAX = 4 * BATCH_MAX
"""Messages of a partition that are handed over and not acknowledged, from which on it is not fetched from."""
_HELD_S = 0.1


class Input(Struct, frozen=True):
    """One message as it came from Kafka; `topic` without the installation's prefix."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()
    generation: int = 0
    """Of the consumer group when it was fetched: what is older than the present assignment is delivered again."""


Later = Awaitable[bool | None]
"""What an input waits for before it is acknowledged. False: it was not taken after all, and is not acknowledged."""
Handler = Callable[[list[Input]], Awaitable[Mapping[int, Later | None]]]
"""Returns when the batch is dealt with, but for the inputs named by position: those that take longer are awaited apart
(several may share one), those with None are never acknowledged."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the service does with the batches of each agent and with changes of the assignment."""

    route: Handler
    schedule: Handler
    observe: Handler
    assigned: Callable[[frozenset[int], int], Awaitable[None]]
    """Called with the pool partitions that this worker has now, and the group's generation."""
    revoked: Callable[[], Awaitable[None]]
    """Called when partitions are about to move; returns when nothing is being written any more."""
    fault: Callable[[BaseException], None]
    """Called when a handler raises: the process must end, or the batch would be lost."""


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Timing of the consumer group, seconds. A dead worker's pools are taken over after about `session_s`."""

    session_s: float = 10.0
    heartbeat_s: float = 2.0
    rebalance_s: float = 30.0


def build_app(
    group: str, connection: KafkaConnection, names: TopicNames, handlers: Handlers, times: GroupTimes
) -> faust.App:
    """An app with its agents attached; start it with `await app.start()` inside a running loop."""
    app = _App(
        group,
        broker=[URL(f"kafka://{address.strip()}") for address in connection.bootstrap.split(",")],
        broker_credentials=_credentials(connection),
        broker_session_timeout=times.session_s,
        broker_heartbeat_interval=times.heartbeat_s,
        broker_rebalance_timeout=times.rebalance_s,
        broker_request_timeout=max(40.0, times.session_s + 5),
        broker_commit_interval=1.0,
        broker_max_poll_interval=300.0,
        broker_max_poll_records=5000,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=4 * 1024 * 1024,
        stream_buffer_maxsize=4 * BATCH_MAX,
        stream_wait_empty=False,
        processing_guarantee="at_least_once",
        key_serializer="raw",
        value_serializer="raw",
        topic_allow_declare=False,
        topic_disable_leader=True,
        table_standby_replicas=1,
        web_enabled=False,
        store="memory://",
        autodiscover=False,
    )
    app.fetch_wait_ms = connection.fetch_wait_ms
    prefix = len(names.prefix)
    fault = handlers.fault
    turns = (
        _attach(app, "router", [names.arrivals, names.commands], handlers.route, fault, prefix),
        _attach(app, "scheduler", [names.pool_jobs, names.completions, names.nodes], handlers.schedule, fault, prefix),
        _attach(app, "telemetry", [names.telemetry], handlers.observe, fault, prefix),
    )
    _follow_assignment(app, names.pool_jobs, handlers, turns)
    return app


class _ConsumerThread(driver.AIOKafkaConsumerThread):
    logger = logging.getLogger("faust.consumer")

    def _create_worker_consumer(self, transport: Any) -> Any:
        """Faust fixes the time that a broker may hold an empty fetch at 1.5 s; ours is the connection's."""
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = cast(_App, self.app).fetch_wait_ms
        return consumer

    async def _commit(self, offsets: Any) -> bool:
        """Faust's own crashes the app on any error, as in every outage of the broker."""
        consumer = self._ensure_consumer()
        held = {tp: offset for tp, offset in offsets.items() if tp in self.assignment()}
        self.tp_last_committed_at.update(dict.fromkeys(held, time.monotonic()))
        try:
            await consumer.commit({driver.ensure_aiokafka_TP(tp): offset for tp, offset in held.items()})
        except KafkaError as error:
            log.info("offsets not committed (%s): the next commit makes up for it", error)
            return False
        return True


class _Consumer(driver.Consumer):
    logger = logging.getLogger("faust.consumer")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: set[TP] = set()
        """Partitions that are not fetched from for now."""

    def _new_consumer_thread(self) -> Any:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> Any:
        """Not with Faust's `pause_partitions`: that throws away what has been fetched of a partition already."""
        if active_partitions is not None and self.held:
            active_partitions = active_partitions - self.held
            if not active_partitions:  # to aiokafka none would mean all
                await self.sleep(_HELD_S)
                return {}
        return await super()._getmany(active_partitions, timeout)

    def ack(self, message: Any) -> bool:
        """Not for messages of an earlier assignment, which Faust acknowledges when it drops them."""
        return message.generation_id == self.app.consumer_generation_id and bool(super().ack(message))


class _Transport(driver.Transport):
    Consumer = _Consumer


class _App(faust.App):
    logger = logging.getLogger("faust.app")
    fetch_wait_ms = 500

    def _new_transport(self) -> Any:
        return _Transport(self.conf.broker_consumer, self)

    def _create_directories(self) -> None:
        """For tables, which there are none of."""


def _credentials(connection: KafkaConnection) -> Any:
    context = connection.ssl_context()
    if connection.uses_sasl:
        return faust.SASLCredentials(
            username=connection.sasl_username,
            password=connection.sasl_password,
            ssl_context=context,
            mechanism=connection.sasl_mechanism,
        )
    return faust.SSLCredentials(context) if context is not None else None


class _Turns:
    """Acknowledges the events of each partition in their order, whatever order they get done in.

    `pause` is told of a partition when `open_max` of its events are open, `resume` when half of them are done.
    """

    def __init__(
        self,
        open_max: int = OPEN_MAX,
        pause: Callable[[Any], None] = lambda tp: None,
        resume: Callable[[Any], None] = lambda tp: None,
    ) -> None:
        self._open: dict[Any, deque[list[Any]]] = {}
        self._generation = -1
        self._open_max = open_max
        self._pause = pause
        self._resume = resume
        self._paused: set[Any] = set()

    def take(self, event: Any) -> Callable[[], None]:
        """The event's turn is noted; call what is returned when the event is done."""
        message = event.message
        self.begin(message.generation_id)
        tp = TP(message.topic, message.partition)
        waiting = self._open.setdefault(tp, deque())
        turn = [event, False]
        waiting.append(turn)
        if len(waiting) >= self._open_max and tp not in self._paused:
            self._paused.add(tp)
            self._pause(tp)

        def done() -> None:
            turn[1] = True
            while waiting and waiting[0][1]:
                waiting.popleft()[0].ack()
            if tp in self._paused and self._open.get(tp) is waiting and 2 * len(waiting) <= self._open_max:
                self._paused.discard(tp)
                self._resume(tp)

        return done

    def begin(self, generation: int) -> None:
        """A new assignment: what was open is delivered again, to whoever has its partition now."""
        if generation == self._generation:
            return
        self._generation = generation
        self._open.clear()
        paused, self._paused = self._paused, set()
        for tp in paused:
            self._resume(tp)


def _attach(
    app: faust.App,
    name: str,
    topics: list[str],
    handler: Handler,
    fault: Callable[[BaseException], None],
    prefix: int,
) -> _Turns:
    """One agent over several topics: their batches are one stream of work, in the order of each partition."""
    channel = app.topic(*topics, key_type=bytes, value_type=bytes)
    pending: set[asyncio.Future[None]] = set()

    turns = _Turns(
        OPEN_MAX,
        lambda tp: cast(_Consumer, app.consumer).held.add(tp),
        lambda tp: cast(_Consumer, app.consumer).held.discard(tp),
    )

    async def hand_over(events: list[Any]) -> None:
        done = [turns.take(event) for event in events]
        later = await handler([_input(event.message, prefix) for event in events])
        apart: dict[int, tuple[Later, list[Callable[[], None]]]] = {}
        for place, finished in enumerate(done):
            if place not in later:
                finished()
            elif (work := later[place]) is not None:
                apart.setdefault(id(work), (work, []))[1].append(finished)
        for work, those in apart.values():
            task = asyncio.ensure_future(_after(work, those, fault))
            pending.add(task)
            task.add_done_callback(pending.discard)

    async def agent(stream: Any) -> None:
        async for events in stream.noack_take(BATCH_MAX, within=BATCH_WITHIN_S):
            present = [event for event in events if event.message.generation_id == app.consumer_generation_id]
            if not present:
                continue
            try:
                await hand_over(present)
            except Exception as error:
                fault(error)
                raise
            except asyncio.CancelledError as error:
                _judge_cancelled(error, fault)
                raise

    app.agent(channel, name=name, concurrency=1)(agent)
    return turns


async def _after(work: Later, finished: list[Callable[[], None]], fault: Callable[[BaseException], None]) -> None:
    try:
        taken = await work
    except Exception as error:
        fault(error)
        raise
    except asyncio.CancelledError as error:
        _judge_cancelled(error, fault)
        raise
    if taken is not False:
        for each in finished:
            each()


def _judge_cancelled(error: asyncio.CancelledError, fault: Callable[[BaseException], None]) -> None:
    """Faust cancels an agent that it stops. One that was cancelled by nobody awaited what a client library cancelled
    of its own: taken for a stop, its partitions would be consumed no more, without a word."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        stray = RuntimeError("a batch was cut short by a connection that closed")
        stray.__cause__ = error
        fault(stray)


def _input(message: Any, prefix: int) -> Input:
    headers = message.headers
    pairs = tuple(headers.items()) if isinstance(headers, dict) else tuple(headers or ())
    return Input(
        message.topic[prefix:],
        message.partition,
        message.offset,
        message.key,
        message.value,
        pairs,
        message.generation_id,
    )


def _follow_assignment(app: faust.App, pool_topic: str, handlers: Handlers, turns: Sequence[_Turns]) -> None:
    async def on_assigned(_app: Any, /, *args: Any, **_: Any) -> None:
        for each in turns:  # nothing of an earlier assignment is open any more
            each.begin(app.consumer_generation_id)
        partitions = frozenset(tp.partition for tp in args[0] if tp.topic == pool_topic)
        await handlers.assigned(partitions, app.consumer_generation_id)

    async def on_revoked(_app: Any, /, *args: Any, **_: Any) -> None:
        await handlers.revoked()

    app.on_partitions_assigned.connect(on_assigned)
    app.on_partitions_revoked.connect(on_revoked)
