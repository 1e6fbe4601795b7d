"""A pool's time flows whatever is wrong with which clock, never jumps and never stands still."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from streamsched.service.clock import SLEW, BrokerTime, Clock, PoolClock


class Machine:
    """A wall clock that can be set, and a steady one."""

    def __init__(self) -> None:
        self.wall = 1000.0
        self.steady = 5.0

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.steady)


@pytest.mark.parametrize("jump_s", [-86_400.0, -3.0, 0.0, 3.0, 86_400.0])
def test_a_step_of_the_wall_clock_neither_freezes_nor_jumps_time(jump_s: float) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.passes(10.0)
    before = clock()
    assert before == pytest.approx(1010.0)
    machine.wall += jump_s
    assert clock() == before
    for _ in range(100):
        machine.passes(1.0)
        now = clock()
        assert abs(now - before - 1.0) <= SLEW + 1e-6
        before = now


@pytest.mark.parametrize("jump_s", [-30.0, 30.0])
def test_the_machines_clock_is_followed_in_the_end(jump_s: float) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += jump_s
    machine.passes(2 * abs(jump_s) / SLEW)
    clock()
    machine.passes(1.0)
    assert clock() == pytest.approx(machine.wall)


def test_a_pool_goes_on_from_a_former_owners_time(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    clock = PoolClock(lambda: now[0])
    clock.go_on_from(4600.0, "east")
    assert clock() == 4600.0
    now[0] += 60.0
    assert clock() == pytest.approx(4660.0 - 60.0 * SLEW), "time flows: a lease of a minute ends after about a minute"
    now[0] += 3600.0 / SLEW
    assert clock() == now[0], "in the end it is this machine's"
    clock.go_on_from(now[0] - 50.0, "east")
    assert clock() == now[0]
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "pool east" in warning.getMessage()
    assert "3600.0 s ahead" in warning.getMessage()


def test_a_little_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    clock = PoolClock(lambda: 1000.0)
    clock.go_on_from(1002.0, "east")
    assert clock() == 1002.0
    assert caplog.records == []


# --- the broker's ----------------------------------------------------------------------------------------------------


def written(appended_at: float, timestamp_type: int | None = 1) -> Any:
    record = SimpleNamespace(timestamp=int(appended_at * 1000), timestamp_type=timestamp_type)
    return SimpleNamespace(cancelled=lambda: False, exception=lambda: None, result=lambda: record)


@pytest.mark.parametrize(
    ("appended_at", "said"),
    [
        (1000.0 + 7.0, None),
        (1000.0 - 4.0, None),
        (1010.0 + 4.0, None),
        (1000.0 - 60.0, "60.0 s ahead of that of Kafka at k:9092"),
        (1010.0 + 60.0, "60.0 s behind that of Kafka at k:9092"),
    ],
)
def test_clocks_apart_are_told_once(appended_at: float, said: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """Sent at 1000, acknowledged at 1010: the write may have waited ten seconds, which is no difference of clocks."""
    seen = BrokerTime("k:9092", lambda: 1010.0)
    for _ in range(3):
        seen.note(1000.0, written(appended_at))
    assert len(caplog.records) == (1 if said else 0)
    assert (said or "") in caplog.text


def test_clocks_that_agree_again_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seen = BrokerTime("k:9092", lambda: 1010.0)
    for appended_at in (1.0, 1005.0, 1005.0, 1.0):
        seen.note(1000.0, written(appended_at))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


@pytest.mark.parametrize("timestamp_type", [0, None])
def test_times_of_the_producer_say_nothing(timestamp_type: int | None, caplog: pytest.LogCaptureFixture) -> None:
    BrokerTime("k:9092", lambda: 1010.0).note(1000.0, written(1.0, timestamp_type))
    assert caplog.records == []


def test_a_write_that_failed_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        failed.set_exception(OSError("gone"))
        BrokerTime("k:9092", lambda: 1010.0).note(0.0, failed)

    asyncio.run(work())
    assert caplog.records == []
