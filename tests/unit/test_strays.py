"""A client library that cancels what it was asked for is not somebody who stops us."""

from __future__ import annotations

import asyncio

import pytest

from streamsched.bus.intake import after
from streamsched.bus.strays import connection_errors, what_ended


async def _cancelled_future() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


def test_a_future_that_somebody_else_cancelled_is_a_lost_connection() -> None:
    async def read() -> None:
        with connection_errors():
            await _cancelled_future()

    with pytest.raises(ConnectionError):
        asyncio.run(read())


def test_a_task_that_is_cancelled_ends_as_cancelled() -> None:
    async def run() -> bool:
        async def read() -> None:
            with connection_errors():
                await asyncio.sleep(60.0)

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(run())


@pytest.mark.parametrize("stopped", [False, True])
def test_work_cut_off_by_nobody_is_a_fault_and_work_that_is_stopped_is_none(stopped: bool) -> None:
    """Else the partitions of the batch would never be consumed again, without a word."""
    faults: list[BaseException] = []
    finished: list[bool] = []

    async def run() -> None:
        work = asyncio.sleep(60.0) if stopped else _cancelled_future()
        task = asyncio.create_task(after(work, [lambda: finished.append(True)], faults.append))
        await asyncio.sleep(0)
        if stopped:
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(run())
    assert [type(fault) for fault in faults] == ([] if stopped else [RuntimeError])
    assert not finished


@pytest.mark.parametrize(("work", "ended_by"), [("stray", RuntimeError), ("stopped", None), ("error", ValueError)])
def test_a_task_that_nobody_cancelled_has_ended_by_an_error(work: str, ended_by: type[Exception] | None) -> None:
    async def broken() -> None:
        raise ValueError

    async def run() -> BaseException | None:
        kinds = {"stray": _cancelled_future, "stopped": lambda: asyncio.sleep(60.0), "error": broken}
        task = asyncio.create_task(kinds[work]())
        await asyncio.sleep(0)
        if work == "stopped":
            task.cancel()
        await asyncio.wait([task])
        return what_ended(task)

    error = asyncio.run(run())
    assert error is None if ended_by is None else isinstance(error, ended_by)
