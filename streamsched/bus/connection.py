"""How to reach Kafka: one value, made from options or the environment, understood by every client."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from streamsched.errors import UserError

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
FETCH_WAIT_MS = (1, 10_000)
"""Least and largest: an answer that is held longer is taken for none."""


@dataclass(frozen=True, slots=True)
class KafkaConnection:
    """Addresses and credentials of a Kafka cluster.

    `bootstrap` is a comma-separated list of host:port. The password is never part of `repr`.
    """

    bootstrap: str = DEFAULT_BOOTSTRAP
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = None
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    idempotence: bool = True
    """Whether producers ask for a producer id. Every Apache Kafka gives one; Tansu 0.6 does not."""
    fetch_wait_ms: int = 500
    """How long a broker may hold a fetch that finds nothing. Kafka answers as soon as something comes, whatever this
    is; Tansu looks again only after about a third of it."""

    def __post_init__(self) -> None:
        if self.security_protocol not in _PROTOCOLS:
            raise UserError(
                f"STREAMSCHED_KAFKA_SECURITY_PROTOCOL={self.security_protocol!r}: use one of {', '.join(_PROTOCOLS)}"
            )
        if self.uses_sasl and self.sasl_mechanism not in _MECHANISMS:
            raise UserError(
                f"STREAMSCHED_KAFKA_SASL_MECHANISM={self.sasl_mechanism!r}: use one of {', '.join(_MECHANISMS)}"
            )
        if self.uses_sasl and not (self.sasl_username and self.sasl_password):
            raise UserError(
                f"{self.security_protocol} needs STREAMSCHED_KAFKA_SASL_USERNAME and STREAMSCHED_KAFKA_SASL_PASSWORD "
                "(or ..._SASL_PASSWORD_FILE)"
            )
        for address in self.bootstrap.split(","):
            host, colon, port = address.strip().rpartition(":")
            if not (host and colon and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
                raise UserError(f"Kafka bootstrap server {address.strip()!r}: expected HOST:PORT[,HOST:PORT...]")

    def __repr__(self) -> str:
        return f"KafkaConnection({self.bootstrap}, {self.security_protocol})"

    @property
    def uses_sasl(self) -> bool:
        return self.security_protocol.startswith("SASL_")

    @property
    def uses_tls(self) -> bool:
        return self.security_protocol.endswith("SSL")

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read STREAMSCHED_KAFKA_*; a password may come from a file (..._PASSWORD_FILE), as Kubernetes mounts it."""

        def get(name: str) -> str | None:
            return env.get(f"STREAMSCHED_KAFKA_{name}") or None

        password = get("SASL_PASSWORD")
        if password_file := get("SASL_PASSWORD_FILE"):
            try:
                with open(password_file, encoding="utf-8") as file:
                    password = file.read().strip()
            except OSError as error:
                raise UserError(f"STREAMSCHED_KAFKA_SASL_PASSWORD_FILE={password_file}: {error.strerror}") from None
        return cls(
            bootstrap=get("BOOTSTRAP") or DEFAULT_BOOTSTRAP,
            security_protocol=get("SECURITY_PROTOCOL") or "PLAINTEXT",
            sasl_mechanism=get("SASL_MECHANISM") or "PLAIN",
            sasl_username=get("SASL_USERNAME"),
            sasl_password=password,
            ssl_cafile=get("SSL_CAFILE"),
            ssl_certfile=get("SSL_CERTFILE"),
            ssl_keyfile=get("SSL_KEYFILE"),
            idempotence=_on_or_off("IDEMPOTENCE", get("IDEMPOTENCE") or "on"),
            fetch_wait_ms=_whole_number("FETCH_WAIT_MS", get("FETCH_WAIT_MS") or "500"),
        )

    def with_bootstrap(self, bootstrap: str | None) -> KafkaConnection:
        return replace(self, bootstrap=bootstrap) if bootstrap else self

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS context (system CAs unless `ssl_cafile` is given), or None for plaintext."""
        if not self.uses_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ssl_cafile)
            if self.ssl_certfile:
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise UserError(f"TLS files for Kafka ({self.ssl_cafile}, {self.ssl_certfile}): {error}") from None
        return context

    def consumer_options(self) -> dict[str, Any]:
        """Keyword arguments of an aiokafka consumer that is told apart what to read."""
        return self.client_options() | {
            "enable_auto_commit": False,
            "auto_offset_reset": "earliest",
            "fetch_max_wait_ms": self.fetch_wait_ms,
        }

    def environment(self) -> dict[str, str]:
        """What `from_env` needs to make this connection, without credentials: for child processes of a stack."""
        return {
            "STREAMSCHED_KAFKA_BOOTSTRAP": self.bootstrap,
            "STREAMSCHED_KAFKA_IDEMPOTENCE": "on" if self.idempotence else "off",
            "STREAMSCHED_KAFKA_FETCH_WAIT_MS": str(self.fetch_wait_ms),
        }

    def client_options(self) -> dict[str, Any]:
        """Keyword arguments shared by aiokafka's consumer, producer and admin client."""
        options: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "security_protocol": self.security_protocol,
            "ssl_context": self.ssl_context(),
        }
        if self.uses_sasl:
            options |= {
                "sasl_mechanism": self.sasl_mechanism,
                "sasl_plain_username": self.sasl_username,
                "sasl_plain_password": self.sasl_password,
            }
        return options


def _whole_number(name: str, text: str) -> int:
    low, high = FETCH_WAIT_MS
    if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
        raise UserError(f"STREAMSCHED_KAFKA_{name}={text[:100]!r}: expected a whole number from {low} to {high}")
    return int(text)


def _on_or_off(name: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise UserError(f"STREAMSCHED_KAFKA_{name}={text[:100]!r}: on or off")
    return text == "on"
