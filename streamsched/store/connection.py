"""How to reach Redis."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from streamsched.errors import UserError

DEFAULT_URL = "redis://127.0.0.1:6379/0"


@dataclass(frozen=True, slots=True)
class RedisConnection:
    """A redis://, rediss:// (TLS) or unix:// address with credentials in it; `address` is safe to print."""

    url: str = DEFAULT_URL

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError:
            raise UserError(f"Redis address {self.url!r}: expected redis://HOST:PORT/DB") from None
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise UserError(f"Redis address {self.address!r}: expected redis://, rediss:// or unix://")

    def __repr__(self) -> str:
        return f"RedisConnection({self.address})"

    @property
    def address(self) -> str:
        """The address without its user and password."""
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            return f"unix://{parts.path}"
        return f"{parts.hostname or '?'}:{parts.port or 6379}"

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """STREAMSCHED_REDIS_URL, or the content of the file that STREAMSCHED_REDIS_URL_FILE names."""
        if path := env.get("STREAMSCHED_REDIS_URL_FILE"):
            try:
                with open(path, encoding="utf-8") as file:
                    return cls(file.read().strip())
            except OSError as error:
                raise UserError(f"STREAMSCHED_REDIS_URL_FILE={path}: {error.strerror}") from None
        return cls(env.get("STREAMSCHED_REDIS_URL") or DEFAULT_URL)
