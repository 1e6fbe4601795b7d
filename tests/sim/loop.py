"""An event loop in virtual time, and processes on it that can be killed and frozen at any await.

Theory of operation. The loop's `time()` is a number; its selector never waits but moves that number to the next timer.
So a run costs what it computes, and is a function of its seed alone.

A `Process` is a context variable: whatever is scheduled from code of a process (tasks, timers, wake-ups) carries the
process in its context, and the loop asks the process before each step. A dead process takes no step any more, which
is what kill -9 does: no `finally`, no `except`, nothing. A frozen one (SIGSTOP) keeps its steps for later; its timers
that came due meanwhile go off when it is thawed.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
_STEPS_AT_ONE_TIME_MAX = 200_000
_STEP_S = 1e-6
"""What one round of the loop takes: without it a wait that rounding has made a hair too short would spin for ever."""


class Stuck(Exception):
    """Nothing can ever happen again, or time does not go on."""


class Process:
    """A worker process. All that runs in it was begun by `spawn` or by what was."""

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name = name
        self.dead = False
        self.frozen = False
        self._loop = loop
        self._parked: list[_Step] = []
        self._context = copy_context()
        self._context.run(PROCESS.set, self)
        self.tasks: list[asyncio.Task[Any]] = []
        """Kept, so that nothing of a dead process is run by the garbage collector while the simulation goes on."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self._context.run(copy_context))

    def kill(self) -> None:
        self.dead = True
        self._parked.clear()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        parked, self._parked = self._parked, []
        for step in parked:
            step.again(self._loop)

    def may_run(self, step: _Step) -> bool:
        if self.frozen and not self.dead:
            self._parked.append(step)
        return not (self.dead or self.frozen)

    def keep(self, task: asyncio.Task[Any]) -> None:
        if len(self.tasks) > 50:
            self.tasks = [kept for kept in self.tasks if not kept.done()]
        self.tasks.append(task)


class _Step:
    """One callback of a process."""

    __slots__ = ("_args", "_callback", "_context", "_process", "handle")

    def __init__(self, process: Process, callback: Callable[..., Any], args: tuple[Any, ...], context: Context) -> None:
        self._process, self._callback, self._args, self._context = process, callback, args, context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        assert self.handle is not None
        if not self.handle.cancelled() and self._process.may_run(self):
            self._callback(*self._args)

    def again(self, loop: VirtualLoop) -> None:
        loop.call_soon_plain(self, self._context)


class _NoWait(selectors.SelectSelector):
    """Never waits: tells the loop how far the next timer is."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[Any]:
        self._jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at time 0, seconds."""

    def __init__(self) -> None:
        self._now = 0.0
        self._steps = 0
        super().__init__(_NoWait(self._jump))
        self._clock_resolution = 1e-9
        self.set_task_factory(_make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise Stuck("nothing is scheduled any more")
        self._steps += 1
        self._now += max(timeout, _STEP_S)
        if timeout > 0:
            self._steps = 0
        elif self._steps > _STEPS_AT_ONE_TIME_MAX:
            raise Stuck(f"time stands still at {self._now:.3f}")

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        step = _step(callback, args, context)
        if step is None:
            return super().call_soon(callback, *args, context=context)
        step.handle = super().call_soon(step, context=step._context)
        return step.handle

    def call_soon_plain(self, step: _Step, context: Context) -> None:
        super().call_soon(step, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        step = _step(callback, args, context)
        if step is None:
            return super().call_at(when, callback, *args, context=context)
        handle = super().call_at(when, step, context=step._context)
        step.handle = handle
        return handle


def _step(callback: Any, args: tuple[Any, ...], context: Context | None) -> _Step | None:
    process = PROCESS.get() if context is None else context.get(PROCESS)
    return None if process is None else _Step(process, callback, args, context or copy_context())


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.keep(task)
    return task


def run(make: Callable[[VirtualLoop], Coroutine[Any, Any, Any]], on_error: Callable[[dict[str, Any]], None]) -> Any:
    """Run `make(loop)` to its end on a loop of its own; what is still there then is thrown away unrun."""
    loop = VirtualLoop()
    loop.set_exception_handler(lambda _, what: on_error(what))
    try:
        return loop.run_until_complete(loop.create_task(make(loop)))
    finally:
        _bury(loop)


def _bury(loop: VirtualLoop) -> None:
    """Close what hangs in the middle without letting it write or complain."""
    asyncio.set_event_loop(None)
    loop.set_exception_handler(lambda *_: None)
    left = sorted((task for task in asyncio.all_tasks(loop)), key=lambda task: task.get_name())
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            task.get_coro().close()
    loop._ready.clear()  # type: ignore[attr-defined]
    loop._scheduled.clear()  # type: ignore[attr-defined]
    loop.close()
