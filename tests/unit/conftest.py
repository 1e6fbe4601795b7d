from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from core_builder import Pool


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Pool]]:
    """Builds pools and, when the test is over, checks that each is sound, loads to its equal and replays to it."""
    pools: list[Pool] = []

    def make(**config: object) -> Pool:
        pools.append(Pool(**config))
        return pools[-1]

    yield make
    for pool in pools:
        pool.verify()
