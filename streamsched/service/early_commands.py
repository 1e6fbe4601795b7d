"""Commands that have overtaken their job's arrival, which is in another topic: they wait a while for it, in order.

They are not acknowledged meanwhile, and so there is a bound to what waits: a partition of which much is open is not
fetched from (`bus/intake.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from msgspec import Struct

from streamsched.bus.app import Input
from streamsched.bus.messages import Command
from streamsched.bus.strays import what_ended

_LOOK_EVERY_S = 0.2


class _Waiting(Struct, eq=False):
    source: Input
    command: Command
    until: float
    done: asyncio.Future[bool]
    """False: not dealt with here, it is delivered again."""


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
    ) -> None:
        self._wait_s = wait_s
        self._find = find
        self._whole = whole
        self._send = send
        self._refuse = refuse
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._generation = 0
        self._looking: asyncio.Task[None] | None = None

    def __contains__(self, job_id: str) -> bool:
        """Whether commands of this job wait, so that another one has to wait behind them."""
        return job_id in self._waiting

    def add(self, source: Input, command: Command) -> asyncio.Future[bool]:
        """What it returns is done when the command has been sent or refused."""
        if source.generation != self._generation:
            self._generation = source.generation
            self._forget_earlier()
        loop = asyncio.get_running_loop()
        waiting = _Waiting(source, command, loop.time() + self._wait_s, loop.create_future())
        self._waiting.setdefault(command.job_id, deque()).append(waiting)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look_until_empty())
            self._looking.add_done_callback(self._ended)
        return waiting.done

    def _all(self) -> list[_Waiting]:
        return [waiting for ones in self._waiting.values() for waiting in ones]

    def _forget_earlier(self) -> None:
        """Partitions were dealt anew, so what waits is delivered again. Else it would be here twice, and more often."""
        self._over((waiting for waiting in self._all() if waiting.source.generation != self._generation), here=False)

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
        known = {job_id: pool for job_id, pool in zip(job_ids, pools, strict=True) if pool is not None}
        here = [waiting for job_id in known for waiting in self._of(job_id)]
        if here:
            await self._send([(known[w.command.job_id], w.source, w.command) for w in here])
        self._over(here)
        if not whole:
            return
        now = asyncio.get_running_loop().time()
        late = [w for job_id in job_ids if job_id not in known for w in self._of(job_id) if w.until < now]
        if late:
            await self._refuse([(waiting.source, waiting.command) for waiting in late])
        self._over(late)

    def _of(self, job_id: str) -> Iterable[_Waiting]:
        return self._waiting.get(job_id, ())

    def _over(self, ones: Iterable[_Waiting], here: bool = True) -> None:
        """These are dealt with (`here`, or by whoever gets them again); others may have come behind them meanwhile."""
        jobs = set()
        for waiting in ones:
            jobs.add(waiting.command.job_id)
            if not waiting.done.done():
                waiting.done.set_result(here)
        for job_id in jobs & self._waiting.keys():
            left = deque(waiting for waiting in self._waiting[job_id] if not waiting.done.done())
            if left:
                self._waiting[job_id] = left
            else:
                del self._waiting[job_id]

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An error is that of every command: whoever awaits them ends the process."""
        if (error := what_ended(task)) is None:
            return
        for waiting in self._all():
            if not waiting.done.done():
                waiting.done.set_exception(error)
