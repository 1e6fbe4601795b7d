"""Wall time that cannot jump: read once, then carried on by the monotonic clock."""

from __future__ import annotations

import time


class Clock:
    """UTC epoch seconds. A step of the system's clock while the process lives has no effect on leases or waits."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()
