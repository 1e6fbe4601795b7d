"""The producer: what is too large is never sent, and a broken sequence of writes is told to whoever can start anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import pytest
from aiokafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
)

from streamsched.bus import producer as module
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.producer import Producer

SPARE = "queue.rankings"


class FakeKafka:
    """Takes writes; `answers` are the errors of the next ones, None for success."""

    def __init__(self, connection: KafkaConnection) -> None:
        self.idempotent = connection.idempotence
        self.sent: list[tuple[str, bytes]] = []
        self.answers: list[KafkaError | None] = []

    async def send(self, topic: str, value: bytes, **_: Any) -> asyncio.Future[Any]:
        self.sent.append((topic, value))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        error = self.answers.pop(0) if self.answers else None
        if error is None:
            answer.set_result("written")
        else:
            answer.set_exception(error)
        return answer


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeKafka]:
    fakes: list[FakeKafka] = []

    def make(connection: KafkaConnection) -> FakeKafka:
        fakes.append(FakeKafka(connection))
        return fakes[-1]

    monkeypatch.setattr(module, "make_producer", make)
    return fakes


@pytest.fixture
def producer(made: list[FakeKafka]) -> Producer:
    return Producer(KafkaConnection(), pytest.fail, {"journal": 1000}, replaceable=[SPARE])


async def yes() -> bool:
    return True


def told(producer: Producer, writes: Coroutine[Any, Any, None], within_s: float = 0.2) -> list[str]:
    """What `watch` has said to `on_stuck` soon after these writes."""
    reasons: list[str] = []

    async def both() -> None:
        watch = asyncio.create_task(producer.watch(yes, reasons.append))
        await writes
        await asyncio.wait([watch], timeout=within_s)
        watch.cancel()

    asyncio.run(both())
    return reasons


async def write(producer: Producer, fake: FakeKafka, *errors: KafkaError | None, topic: str = "journal") -> None:
    for error in errors:
        fake.answers = [error]
        with contextlib.suppress(KafkaError):
            await producer.send_and_wait(topic, b"x")


def test_what_is_too_large_is_refused_before_it_uses_up_a_sequence_number(
    producer: Producer, made: list[FakeKafka]
) -> None:
    async def work() -> None:
        with pytest.raises(MessageSizeTooLargeError, match="for journal, which takes 1000"):
            await producer.send("journal", b"x" * 1000, key=b"pool")
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send("journal", b"x" * 500, headers=[("traceparent", b"t" * 500)])
        assert made[0].sent == []
        assert await producer.send_and_wait("journal", b"x" * 900, key=b"pool") == "written"
        assert await producer.send_and_wait("other", b"x" * 5000) == "written", "no limit is known for it"

    asyncio.run(work())
    assert told(producer, asyncio.sleep(0)) == []


def test_a_broken_sequence_is_told_at_once_with_what_broke_it(producer: Producer, made: list[FakeKafka]) -> None:
    refused = write(producer, made[0], None, MessageSizeTooLargeError(), OutOfOrderSequenceNumber())
    [reason] = told(producer, refused)
    assert "takes no more writes of this process to journal since it refused one" in reason
    assert "MessageSizeTooLargeError" in reason
    assert "\n" not in reason


def test_refusals_without_end_are_a_broken_sequence_as_well(producer: Producer, made: list[FakeKafka]) -> None:
    """A broker looks at the size of a write before its sequence number."""
    refusals = [MessageSizeTooLargeError() for _ in range(5)]
    assert told(producer, write(producer, made[0], *refusals[:4], None, *refusals[:4])) == []
    [reason] = told(producer, write(producer, made[0], refusals[4]))
    assert "takes no more writes of this process to journal since it refused one" in reason


def test_a_client_whose_sender_has_ended_is_told(producer: Producer, made: list[FakeKafka]) -> None:
    [reason] = told(producer, write(producer, made[0], KafkaError("Unexpected error during batch delivery")))
    assert "the client cannot write to Kafka any more" in reason


@pytest.mark.parametrize(
    "error", [RequestTimedOutError(), KafkaTimeoutError(), TopicAuthorizationFailedError(), MessageSizeTooLargeError()]
)
def test_a_write_that_fails_is_its_callers_business(
    producer: Producer, made: list[FakeKafka], error: KafkaError
) -> None:
    assert told(producer, write(producer, made[0], error)) == []


def test_what_a_later_write_replaces_has_no_sequence_to_break(producer: Producer, made: list[FakeKafka]) -> None:
    ours, spare = made
    assert ours.idempotent
    assert not spare.idempotent
    refused = write(producer, spare, TopicAuthorizationFailedError(), OutOfOrderSequenceNumber(), topic=SPARE)
    assert told(producer, refused) == []
    assert [topic for topic, _ in spare.sent] == [SPARE, SPARE]
    assert ours.sent == []


def test_a_broker_without_idempotence_needs_one_client_only(made: list[FakeKafka]) -> None:
    Producer(KafkaConnection(idempotence=False), pytest.fail, replaceable=[SPARE])
    assert len(made) == 1
