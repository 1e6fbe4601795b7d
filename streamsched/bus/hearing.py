"""How much of a topic this worker hears: what its silence is worth.

That nothing is said on a partition means something only to who listens to it. A partition may be held back because too
much of it is open, its fetches may go unanswered, and what was fetched may still be on its way to the handler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Any

FETCH_STALE_S = 5.0
"""Beyond the time that a broker may hold an empty fetch: then the partition is not being read."""


class Hearing(Enum):
    """What is known of the messages of one partition."""

    NOTHING = "nothing"
    """They are not being read: whatever is said there, we do not hear it now."""
    PART = "part"
    """They are being read, and there may be more than has been dealt with."""
    ALL = "all"
    """All that there was a moment ago has been dealt with."""


class Ears:
    """Tells of one topic how much of it is heard; nothing until it is bound to a consumer.

    `bind` takes two questions about a partition: for aiokafka's record of it (None: not assigned, or held back) and
    whether something of it is on its way to its handler.
    """

    def __init__(self, fetch_wait_s: float = 0.0, clock: Callable[[], float] = time.time) -> None:
        self._stale_s = FETCH_STALE_S + fetch_wait_s
        self._clock = clock
        self._reading: Callable[[int], Any] = lambda partition: None
        self._under_way: Callable[[int], bool] = lambda partition: True

    def bind(self, reading: Callable[[int], Any], under_way: Callable[[int], bool]) -> None:
        self._reading, self._under_way = reading, under_way

    def __call__(self, partition: int) -> Hearing:
        state = self._reading(partition)
        # aiokafka notes the wall clock, in ms, at every answer to a fetch, also at an empty one.
        if state is None or state.timestamp is None or abs(self._clock() - state.timestamp / 1e3) > self._stale_s:
            return Hearing.NOTHING
        behind = not state.has_valid_position or state.highwater is None or state.position < state.highwater
        return Hearing.PART if behind or self._under_way(partition) else Hearing.ALL
