"""Does a broker, does a Redis answer? If not: one line that says why and what to set.

A Kafka client that cannot connect logs every attempt and ends with "Unable to bootstrap", without the cause. So the
connection is tried here step by step (connect, TLS, login, metadata, advertised addresses), where each step's own
error is still at hand, and aiokafka's log lines about it are dropped.

Each probe runs in a short-lived thread with its own event loop: it may be called with or without a running loop, and
it blocks the caller for at most about `timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import redis as redis_client
from aiokafka import errors as kafka_errors
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import create_conn
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamsched.bus.connection import KafkaConnection
from streamsched.errors import ServiceUnreachable
from streamsched.store.client import trouble
from streamsched.store.connection import RedisConnection

_KAFKA_ADVICE = "start it, or set STREAMSCHED_KAFKA_BOOTSTRAP / --bootstrap"
_REDIS_ADVICE = "start it, or set STREAMSCHED_REDIS_URL"
_LOGGERS = ("aiokafka", "aiokafka.client", "aiokafka.conn", "aiokafka.cluster", "asyncio")
_REFUSED_LOGIN = (
    kafka_errors.AuthenticationFailedError,
    kafka_errors.SaslAuthenticationFailed,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.IllegalSaslStateError,
    kafka_errors.AuthenticationMethodNotSupported,
)

_probing: contextvars.ContextVar[bool] = contextvars.ContextVar("streamsched_probing", default=False)


def check_reachable(kafka: KafkaConnection | None, redis: RedisConnection | None, timeout_s: float = 5.0) -> None:
    """Raise `ServiceUnreachable` unless both answer within `timeout_s` seconds; None leaves one out."""
    with ThreadPoolExecutor(2) as pool:
        probes = []
        if kafka is not None:
            probes.append(pool.submit(probe_kafka, kafka, timeout_s))
        if redis is not None:
            probes.append(pool.submit(probe_redis, redis, timeout_s))
    for probe in probes:
        probe.result()


def probe_kafka(kafka: KafkaConnection, timeout_s: float = 5.0) -> None:
    """Connect, log in, and reach a live broker at the address that the cluster advertises."""
    _in_thread(lambda: asyncio.run(_probe_kafka(kafka, timeout_s)))


def probe_redis(redis: RedisConnection, timeout_s: float = 5.0) -> None:
    """Connect, log in, PING."""
    where = f"Redis at {redis.address}"
    retry = Retry(NoBackoff(), 0)
    try:
        client = redis_client.Redis.from_url(
            redis.url, socket_connect_timeout=timeout_s, socket_timeout=timeout_s, retry=retry
        )
    except (ValueError, redis_client.RedisError):
        # The error's own text may quote the URL, and with it the password.
        raise ServiceUnreachable(f"{where}: the address does not parse, check STREAMSCHED_REDIS_URL") from None
    try:
        client.ping()
    except (
        redis_client.AuthenticationError,
        redis_client.BusyLoadingError,
        redis_client.ResponseError,
    ) as error:
        raise ServiceUnreachable(trouble(error, redis)) from None
    except redis_client.TimeoutError:
        over = " over TLS" if redis.url.startswith("rediss:") else ""
        cause = f"nothing within {timeout_s:g} s{over}"
        raise ServiceUnreachable(f"{where} does not answer ({cause}): {_REDIS_ADVICE}") from None
    except (redis_client.RedisError, OSError) as error:
        raise ServiceUnreachable(f"{where} does not answer ({_redis_cause(error)}): {_REDIS_ADVICE}") from None
    finally:
        client.close()


async def _probe_kafka(kafka: KafkaConnection, timeout_s: float) -> None:
    # Inside TLS and sockets asyncio reports late failures to this handler; the probe has its answer already.
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    with _quiet_logs():
        try:
            async with asyncio.timeout(timeout_s):
                await _connect_to_any(kafka, timeout_s)
                await _reach_advertised(kafka, timeout_s)
        except TimeoutError:
            raise ServiceUnreachable(_kafka_line(kafka, _silence(kafka, timeout_s))) from None


async def _connect_to_any(kafka: KafkaConnection, timeout_s: float) -> None:
    """One bootstrap address that lets us in is enough; else the last one's error is the answer."""
    options = kafka.client_options()
    addresses = [address.strip() for address in options.pop("bootstrap_servers").split(",")]
    share_ms = int(timeout_s * 1000 / len(addresses))
    refusal: ServiceUnreachable | None = None
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            connection = await create_conn(host.strip("[]"), int(port), request_timeout_ms=share_ms, **options)
        except (OSError, TimeoutError, kafka_errors.KafkaError) as error:
            refusal = _explain(kafka, address, error, share_ms / 1000)
        else:
            connection.close()
            return
    assert refusal is not None
    raise refusal from None


async def _reach_advertised(kafka: KafkaConnection, timeout_s: float) -> None:
    """Clients talk to the advertised addresses, not to the bootstrap one; a wrong listener shows only here."""
    client = AIOKafkaClient(**kafka.client_options(), request_timeout_ms=int(timeout_s * 1000))
    try:
        await client.bootstrap()
        brokers = sorted(client.cluster.brokers())
        if not brokers:
            raise ServiceUnreachable(_kafka_line(kafka, "no live broker yet"))
        for broker in brokers:
            if await client.ready(broker.nodeId):
                return
        advertised = ", ".join(f"{broker.host}:{broker.port}" for broker in brokers)
        raise ServiceUnreachable(
            f"Kafka at {kafka.bootstrap} advertises {advertised}, which does not answer from here: "
            "set the broker's advertised.listeners to an address this machine reaches"
        )
    except kafka_errors.KafkaError as error:
        raise ServiceUnreachable(
            f"Kafka at {kafka.bootstrap} accepts connections but answers no request ({type(error).__name__}): "
            f"{_protocol(kafka)}, does it want a login?"
        ) from None
    finally:
        await client.close()


def _explain(kafka: KafkaConnection, address: str, error: BaseException, limit_s: float) -> ServiceUnreachable:
    where = f"Kafka at {address}"
    protocol = _protocol(kafka)
    if isinstance(error, _REFUSED_LOGIN):
        return ServiceUnreachable(
            f"{where} refuses the login ({_brief(error)}): check "
            "STREAMSCHED_KAFKA_SECURITY_PROTOCOL, ..._SASL_MECHANISM, ..._SASL_USERNAME and ..._SASL_PASSWORD"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return ServiceUnreachable(
            f"{where} shows a certificate that is not trusted ({error.verify_message}): "
            "set STREAMSCHED_KAFKA_SSL_CAFILE, or use the host name in the certificate"
        )
    if isinstance(error, ssl.SSLError):
        return ServiceUnreachable(f"{where} does not speak TLS as asked ({_brief(error)}): {protocol}")
    if isinstance(error, TimeoutError | kafka_errors.RequestTimedOutError):
        return ServiceUnreachable(f"{where} does not answer ({_silence(kafka, limit_s)}): {_KAFKA_ADVICE}")
    if isinstance(error, kafka_errors.KafkaConnectionError | ConnectionResetError | EOFError):
        return ServiceUnreachable(f"{where} closed the connection at once: {protocol}, is that what it expects?")
    return ServiceUnreachable(f"{where} does not answer ({_network_cause(error)}): {_KAFKA_ADVICE}")


def _protocol(kafka: KafkaConnection) -> str:
    return f"STREAMSCHED_KAFKA_SECURITY_PROTOCOL is {kafka.security_protocol}"


def _silence(kafka: KafkaConnection, limit_s: float) -> str:
    """A wrong protocol often shows as silence: each side waits for the other's first word."""
    over = "" if kafka.security_protocol == "PLAINTEXT" else f" over {kafka.security_protocol}"
    return f"nothing within {limit_s:g} s{over}"


def _network_cause(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "no such host name"
    if isinstance(error, OSError) and "Connect call failed" in str(error):
        return "connection refused"
    return _brief(error)


def _redis_cause(error: BaseException) -> str:
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {_brief(cause)}"
    if isinstance(cause, OSError):
        return _network_cause(cause)
    return _brief(error)


def _kafka_line(kafka: KafkaConnection, cause: str) -> str:
    return f"Kafka at {kafka.bootstrap} does not answer ({cause}): {_KAFKA_ADVICE}"


def _brief(error: BaseException) -> str:
    """An error's text as one short line, without the number and the object that aiokafka puts into some."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[Error \d+\] |:? ?<AIOKafkaConnection[^>]*>", "", text) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Drop log records made in the present context only: other clients of this process still log theirs."""

    def other_contexts(_record: logging.LogRecord) -> bool:
        return not _probing.get()

    token = _probing.set(True)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(other_contexts)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(other_contexts)
        _probing.reset(token)


def _in_thread(function: Callable[[], Any]) -> None:
    """Run `function` where surely no event loop runs."""
    with ThreadPoolExecutor(1, thread_name_prefix="probe") as pool:
        pool.submit(function).result()
