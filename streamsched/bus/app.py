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
  was committed yet. So events are acknowledged strictly in the order of their partition (`intake.Turns`).
- One loop of Faust's delivers to all agents, and where the queue of one is full it waits: all topics stand still. So an
  agent never waits for its handler to end (`intake.Line`), and nothing is fetched for one whose queue could get full.
- An agent is one stream over all its partitions, so a handler that waited for the slowest would hold up the rest. It
  gives back what takes longer, to be acknowledged apart; a partition of which much is open is not fetched from until it
  is less, so that one that stands still fills neither the memory nor the way of the others.
- No table, so no folder: Faust would make one in the working directory, which may be read-only.
- A broker that comes back does not know all its topics at once, and Faust's assignor deals out none that it does not
  know of: for as long as the leader of the group believes that, their partitions are nobody's. aiokafka rebalances
  when what it knows has changed, and would look again after five minutes. So it looks every few seconds.
- A failed commit of offsets is no reason to end: they only say where to start reading, the state knows what is in it.
"""

from __future__ import annotations

import logging
import time
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
from .hearing import Ears
from .intake import BATCH_MAX, Fault, Later, Line, Turns, size_of
from .strays import connection_errors
from .topics import TopicNames

log = logging.getLogger(__name__)

BATCH_WITHIN_S = 0.01
"""How long a batch that is not full is waited for: the price in latency of one topic hop."""
_POLL_MAX = 2 * BATCH_MAX
"""Messages of one fetch at most."""
_QUEUED_MAX = 4 * BATCH_MAX
"""Messages in an agent's queue, above which nothing is fetched for it."""
_BUFFER_MAX = 2 * (_QUEUED_MAX + _POLL_MAX)
"""Of Faust's queues. It is never reached: at the end of one, Faust stops the fetching for all agents."""
_PAUSE_S = 0.05
"""How long at most an agent lets a busy handler be before it takes more: in half as many batches, a worker takes about
a quarter more messages."""
_HELD_S = 0.1
"""At most until the next fetch while partitions are left out: they may be wanted again before others have anything."""


_METADATA_S = 5.0
"""How old what the consumer knows of topics may get; a broker that comes back (above) does not know them all."""


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
    group: str, connection: KafkaConnection, names: TopicNames, handlers: Handlers, times: GroupTimes, ears: Ears
) -> faust.App:
    """An app with its agents attached; start it with `await app.start()` inside a running loop.

    `ears` tell from then on how much of the nodes' topic is heard.
    """
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
        broker_max_poll_records=_POLL_MAX,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=4 * 1024 * 1024,
        consumer_metadata_max_age_ms=int(_METADATA_S * 1e3),
        stream_buffer_maxsize=_BUFFER_MAX,
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
    turns = Turns(
        pause=lambda tp: cast(_Consumer, app.consumer).held.add(tp),
        resume=lambda tp: cast(_Consumer, app.consumer).held.discard(tp),
    )
    agents: tuple[tuple[str, list[str], Handler], ...] = (
        ("router", [names.arrivals, names.commands], handlers.route),
        ("scheduler", [names.pool_jobs, names.completions, names.nodes], handlers.schedule),
        ("telemetry", [names.telemetry], handlers.observe),
    )
    prefix = len(names.prefix)
    lines = [_attach(app, name, topics, handler, turns, handlers.fault, prefix) for name, topics, handler in agents]
    _follow_assignment(app, names.pool_jobs, handlers, turns, lines)
    ears.bind(
        lambda partition: cast(_Consumer, app.consumer).reading(TP(names.nodes, partition)),
        lambda partition: turns.is_open(TP(names.nodes, partition)) or app.is_queued(names.nodes),
    )
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
            with connection_errors():  # a cancellation, also a stray one, is the silent end of Faust's task
                await consumer.commit({driver.ensure_aiokafka_TP(tp): offset for tp, offset in held.items()})
        except (KafkaError, ConnectionError) as error:
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
        wanted = {tp for tp in active_partitions or () if tp not in self.held and not self._is_full(tp.topic)}
        if not wanted:  # to aiokafka none would mean all
            await self.sleep(_HELD_S)
            return {}
        if active_partitions is not None and len(wanted) < len(active_partitions):
            timeout = min(timeout, _HELD_S)
        return await super()._getmany(wanted, timeout)

    def reading(self, tp: TP) -> Any:
        """aiokafka's record of a partition that is being read: its position, high water and last answer; or None."""
        consumer = self._thread._consumer if self._thread is not None else None
        own = driver.ensure_aiokafka_TP(tp)
        if consumer is None or tp in self.held or own not in consumer.assignment():
            return None
        return consumer._subscription.subscription.assignment.state_value(own)

    def _is_full(self, topic: str) -> bool:
        """Whether the agent of this topic has so much in its queue that one more fetch might fill it."""
        queue = cast(_App, self.app).queues.get(topic)
        return queue is not None and queue.qsize() > _QUEUED_MAX

    def ack(self, message: Any) -> bool:
        """Not for messages of an earlier assignment, which Faust acknowledges when it drops them."""
        return message.generation_id == self.app.consumer_generation_id and bool(super().ack(message))


class _Transport(driver.Transport):
    Consumer = _Consumer


class _App(faust.App):
    logger = logging.getLogger("faust.app")
    fetch_wait_ms = 500

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queues: dict[str, Any] = {}
        """Topic -> what Faust has delivered of it (and of the agent's other topics) and the agent has not taken."""

    def is_queued(self, topic: str) -> bool:
        """Whether something of an agent that reads the topic waits to be taken."""
        queue = self.queues.get(topic)
        return queue is None or queue.qsize() > 0

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


def _attach(app: _App, name: str, topics: list[str], handler: Handler, turns: Turns, fault: Fault, prefix: int) -> Line:
    """One agent over several topics: their batches are one stream of work, in the order of each partition."""
    channel = app.topic(*topics, key_type=bytes, value_type=bytes)

    def is_present(event: Any) -> bool:
        return bool(event.message.generation_id == app.consumer_generation_id)

    async def hand_over(events: list[Any]) -> Mapping[int, Later | None]:
        return await handler([_input(event.message, prefix) for event in events])

    line = Line(hand_over, is_present, fault)

    async def agent(stream: Any) -> None:
        app.queues.update(dict.fromkeys(topics, stream.channel.queue))
        try:
            async for events in stream.noack_take(BATCH_MAX, within=BATCH_WITHIN_S):
                present = [(event, event.message) for event in events if is_present(event)]
                line.put([(event, turns.take(message.tp, event, size_of(message))) for event, message in present])
                await line.pause(_PAUSE_S)
        except Exception as error:
            fault(error)
            raise
        finally:
            line.stop()

    app.agent(channel, name=name, concurrency=1)(agent)
    return line


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


def _follow_assignment(
    app: faust.App, pool_topic: str, handlers: Handlers, turns: Turns, lines: Sequence[Line]
) -> None:
    async def on_assigned(_app: Any, /, *args: Any, **_: Any) -> None:
        turns.begin(app.consumer_generation_id)  # nothing of an earlier assignment is open any more
        for line in lines:
            line.forget_earlier()
        partitions = frozenset(tp.partition for tp in args[0] if tp.topic == pool_topic)
        await handlers.assigned(partitions, app.consumer_generation_id)

    async def on_revoked(_app: Any, /, *args: Any, **_: Any) -> None:
        await handlers.revoked()

    app.on_partitions_assigned.connect(on_assigned)
    app.on_partitions_revoked.connect(on_revoked)
