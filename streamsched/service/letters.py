"""Dead letters: a refused input is kept with its reason, however long Kafka makes us wait."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from aiokafka.errors import KafkaError

from streamsched.bus import codec
from streamsched.bus.app import Input
from streamsched.bus.codec import Refused
from streamsched.bus.producer import Producer
from streamsched.bus.strays import connection_errors

from .clock import Clock
from .retry import pauses, words
from .settings import Settings

log = logging.getLogger(__name__)

_KEY_MAX = 4096
"""Kept of a key: a letter that no broker takes would stop everything behind it."""
_AT_ONCE = 500
_BYTES_AT_ONCE = 8 * 1024 * 1024
"""Letters that are encoded at one time: a refused input may be 16 MiB, and there may be a thousand of them."""


class DeadLetters:
    """`await letters.write(pairs)` returns when all of them are safe in the topic."""

    def __init__(self, settings: Settings, producer: Producer, clock: Clock) -> None:
        self._settings = settings
        self._producer = producer
        self._clock = clock
        self._turn = asyncio.Lock()
        """Of one writer after the other, so that there is one group of encoded letters in memory."""
        self.counts: Counter[str] = Counter()

    async def write(self, letters: Iterable[tuple[Refused, Input]]) -> None:
        """In order, many at a time: a batch of nonsense must not take a round trip to the broker for each."""
        for group in _groups(letters):
            async with self._turn:
                await self._write([self._encoded(refused, source) for refused, source in group])

    async def _write(self, todo: list[tuple[bytes | None, bytes]]) -> None:
        for pause in pauses():
            todo, reason = await self._send(todo)
            if not todo:
                return
            log.warning("%d dead letters not written yet (%s), trying again", len(todo), reason)
            await asyncio.sleep(pause)

    async def _send(self, letters: list[tuple[bytes | None, bytes]]) -> tuple[list[tuple[bytes | None, bytes]], str]:
        """Those that were not written, and why."""
        sent: list[asyncio.Future[object]] = []
        reason = ""
        try:
            with connection_errors():
                for key, value in letters:
                    sent.append(await self._producer.send(self._settings.names.dead_letters, value, key=key))
        except (KafkaError, ConnectionError) as error:
            reason = words(error)
        failed = letters[len(sent) :]
        answers = await asyncio.gather(*sent, return_exceptions=True)
        for letter, answer in zip(letters, answers, strict=False):
            if isinstance(
                answer, KafkaError | asyncio.CancelledError
            ):  # cancelled by the client, as it lost the broker
                failed.append(letter)
                reason = words(answer)
            elif isinstance(answer, BaseException):
                raise answer
        return failed, reason

    def _encoded(self, refused: Refused, source: Input) -> tuple[bytes | None, bytes]:
        self.counts[refused.code] += 1
        topic = self._settings.names.prefix + source.topic
        origin = codec.origin(topic, source.partition, source.offset)
        key = source.key[:_KEY_MAX] if source.key is not None else None
        letter = codec.dead_letter(refused, origin, self._clock(), key, source.value)
        log.warning("refused %s[%d]@%d: %s: %s", topic, source.partition, source.offset, refused.code, refused.detail)
        return key, codec.encode(letter)


def _groups(letters: Iterable[tuple[Refused, Input]]) -> Iterator[Sequence[tuple[Refused, Input]]]:
    group: list[tuple[Refused, Input]] = []
    size = 0
    for refused, source in letters:
        weight = len(source.value or b"")
        if group and (len(group) >= _AT_ONCE or size + weight > _BYTES_AT_ONCE):
            yield group
            group, size = [], 0
        group.append((refused, source))
        size += weight
    if group:
        yield group
