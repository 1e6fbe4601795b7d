"""Dead letters: a refused input is kept with its reason, however long Kafka makes us wait."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from aiokafka.errors import KafkaError

from streamsched.bus import codec
from streamsched.bus.app import Input
from streamsched.bus.codec import Refused
from streamsched.bus.producer import Producer

from .clock import Clock
from .retry import pauses, words
from .settings import Settings

log = logging.getLogger(__name__)

_KEY_MAX = 4096
"""Kept of a key: a letter that no broker takes would stop everything behind it."""


class DeadLetters:
    """`await letters(refused, input)` returns when the letter is safe in the topic."""

    def __init__(self, settings: Settings, producer: Producer, clock: Clock) -> None:
        self._settings = settings
        self._producer = producer
        self._clock = clock
        self.counts: Counter[str] = Counter()

    async def __call__(self, refused: Refused, source: Input) -> None:
        self.counts[refused.code] += 1
        topic = self._settings.names.prefix + source.topic
        origin = codec.origin(topic, source.partition, source.offset)
        key = source.key[:_KEY_MAX] if source.key is not None else None
        letter = codec.dead_letter(refused, origin, self._clock(), key, source.value)
        log.warning("refused %s[%d]@%d: %s: %s", topic, source.partition, source.offset, refused.code, refused.detail)
        value = codec.encode(letter)
        for pause in pauses():
            try:
                await self._producer.send_and_wait(self._settings.names.dead_letters, value, key=key)
                return
            except KafkaError as error:
                log.warning("dead letter not written yet (%s), trying again", words(error))
                await asyncio.sleep(pause)
