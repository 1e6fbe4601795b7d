"""The producer of the service: everything it writes is acknowledged by all in-sync replicas, in order."""

from __future__ import annotations

from typing import Final

from aiokafka import AIOKafkaProducer

from .connection import KafkaConnection

_REQUEST_BYTES_MAX: Final = 64 * 1024 * 1024
"""Above every topic's `max.message.bytes`: the broker decides what is too large."""


def make_producer(connection: KafkaConnection) -> AIOKafkaProducer:
    """Not started yet. Idempotent unless the broker cannot (`KafkaConnection.idempotence`).

    Without idempotence a retry may write twice; journal readers void the second by its sequence number, and executors
    know a placement by its id.
    """
    return AIOKafkaProducer(
        **connection.client_options(),
        acks="all",
        enable_idempotence=connection.idempotence,
        max_request_size=_REQUEST_BYTES_MAX,
        max_batch_size=256 * 1024,
        linger_ms=0,
        request_timeout_ms=30_000,
    )
