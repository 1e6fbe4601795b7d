"""Commands that have overtaken their job's arrival, which is in another topic: they wait a while for it, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from streamsched.bus.app import Input
from streamsched.bus.messages import Command

_LOOK_EVERY_S = 0.2
WAITING_MAX = 5000
"""Commands that wait at one time; more of them are not taken from Kafka until there is room."""


class _Waiting(Struct):
    source: Input
    command: Command
    until: float
    done: asyncio.Future[None]


class EarlyCommands:
    """One look at the job index serves all that wait, and there is one while something does.

    `find` gives the pools of jobs, `whole` tells whether a job that is not found is not known at all. A command ends by
    `send(pool, source, command)` or, in time, by `refuse` of all that are late. The order of each job's commands is
    kept: a later one is not passed on before the earlier is.
    """

    def __init__(
        self,
        wait_s: float,
        find: Callable[[Sequence[str]], Awaitable[list[str | None]]],
        whole: Callable[[], Awaitable[bool]],
        send: Callable[[Sequence[tuple[str, Input, Command]]], Awaitable[None]],
        refuse: Callable[[Sequence[tuple[Input, Command]]], Awaitable[None]],
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self._wait_s = wait_s
        self._find = find
        self._whole = whole
        self._send = send
        self._refuse = refuse
        self._waiting_max = waiting_max
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._count = 0
        self._room = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def __contains__(self, job_id: str) -> bool:
        """Whether commands of this job wait, so that another one has to wait behind them."""
        return job_id in self._waiting

    async def add(self, source: Input, command: Command) -> asyncio.Future[None]:
        """Returns as soon as there is room; what it returns is done when the command has been sent or refused."""
        while self._count >= self._waiting_max:
            self._room.clear()
            await self._room.wait()
        loop = asyncio.get_running_loop()
        waiting = _Waiting(source, command, loop.time() + self._wait_s, loop.create_future())
        self._waiting.setdefault(command.job_id, deque()).append(waiting)
        self._count += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look_until_empty())
            self._looking.add_done_callback(self._ended)
        return waiting.done

    async def _look_until_empty(self) -> None:
        while True:
            await self._look()
            if not self._waiting:
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self) -> None:
        """Send the commands of jobs that have come, refuse those that have waited long enough."""
        whole = await self._whole()  # before the look: a job missing from an index that gets whole later may be known
        job_ids = list(self._waiting)
        pools = await self._find(job_ids)
        found = {job_id: pool for job_id, pool in zip(job_ids, pools, strict=True) if pool is not None}
        sent = [
            (pool, waiting.source, waiting.command)
            for job_id, pool in found.items()
            for waiting in self._waiting[job_id]
        ]
        lengths = {job_id: len(self._waiting[job_id]) for job_id in found}
        if sent:
            await self._send(sent)
        for job_id, length in lengths.items():
            self._over(job_id, length)
        if not whole:
            return
        now = asyncio.get_running_loop().time()
        late = {
            job_id: [w for w in self._waiting[job_id] if w.until < now]
            for job_id in job_ids
            if job_id not in found and self._waiting[job_id][0].until < now
        }
        if late:
            await self._refuse([(waiting.source, waiting.command) for ones in late.values() for waiting in ones])
        for job_id, ones in late.items():
            self._over(job_id, len(ones))

    def _over(self, job_id: str, count: int) -> None:
        """The first `count` commands of the job are dealt with; others may have come behind them meanwhile."""
        waiting = self._waiting[job_id]
        for _ in range(count):
            first = waiting.popleft()
            if not first.done.done():
                first.done.set_result(None)
        if not waiting:
            del self._waiting[job_id]
        self._count -= count
        self._room.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An error is that of every command: whoever awaits them ends the process."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        for waiting in [waiting for ones in self._waiting.values() for waiting in ones]:
            if not waiting.done.done():
                waiting.done.set_exception(error)
