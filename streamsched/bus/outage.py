"""A broker that is away is told of once, and once when it is back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from .connection import KafkaConnection

STALL_S: Final = 3.0
"""Without an acknowledgement for this long, the broker is said to be away."""


class Outage:
    """`say` gets the two lines of each outage; `begin` and `end` may be called as often as one likes."""

    def __init__(self, kafka: KafkaConnection, say: Callable[[str], None]) -> None:
        self._address = kafka.bootstrap
        self._say = say
        self._since: float | None = None
        self.count = 0

    @property
    def active(self) -> bool:
        return self._since is not None

    @property
    def lasted_s(self) -> float:
        """Seconds of the present outage so far; 0 when there is none."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def begin(self, error: BaseException | None = None) -> None:
        if self._since is None:
            self._since = time.monotonic()
            self.count += 1
            why = f" ({error})" if error else ""
            self._say(f"Kafka at {self._address} does not answer{why}; trying again until it does")

    def end(self) -> None:
        if self._since is not None:
            self._say(f"Kafka at {self._address} is back after {self.lasted_s:.0f} s; going on")
            self._since = None
