"""The window solver as a process of its own: the event loop asks, and has an answer by the deadline whatever happens.

Why a process: Pyomo deadlocks in threads and captures the process's stdout, and HiGHS can overrun its time limit.

Theory of operation. One child, one solve at a time, length-prefixed msgpack over a socket pair. The child answers
twice: first greedy's checked solution, at once; then the final one. At the hard deadline (the solver's limit plus a
grace, counted from when a warm child was sent the window) the parent takes the first answer, kills the child and
starts another in the background. A child that dies during a solve is handled the same way. The child ends by itself
when the parent does: its socket ends, and during a solve the kernel kills it (PDEATHSIG, Linux).

    parent -> child   Problem
    child -> parent   READY once, after warm-up; then per problem GREEDY solution (if there is one) and FINAL solution,
                      or ERROR text
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from streamsched.core.problem import Candidate, NodeClass, Problem, Solution, SolveStatus
from streamsched.placement.solve import SolveLimits

log = logging.getLogger(__name__)

SolveFunction = Callable[[Problem, SolveLimits, Callable[[Solution], None]], Solution]
"""(problem, limits, what to call with a first answer) -> final answer."""

_READY, _GREEDY, _FINAL, _ERROR = b"R", b"G", b"F", b"E"
_HEADER: Final = struct.Struct(">cI")
_DEFAULT: Final = "streamsched.placement.solve:solve"
_PR_SET_PDEATHSIG: Final = 1


class SolverProcess:
    """`async with SolverProcess(limits) as solver: solution = await solver.solve(problem)`.

    `function`: dotted path of the SolveFunction that the child runs. `grace_s`: seconds past `limits.time_s` after
    which the child is killed; they cover greedy, reading the answer and sending it. `start_limit_s`: how long a
    child may take to be warm; that is not part of any solve's deadline.
    """

    def __init__(
        self, limits: SolveLimits, *, grace_s: float = 0.5, function: str = _DEFAULT, start_limit_s: float = 30.0
    ) -> None:
        if limits.time_s is None:
            raise ValueError("a live solver needs a time limit")
        self.limits = limits
        self.deadline_s = limits.time_s + grace_s
        self.start_limit_s = start_limit_s
        self.restarts = 0
        """Children started after the first."""
        self.timeouts = 0
        """Solves that met the hard deadline."""
        self._function = function
        self._busy = asyncio.Lock()
        self._child: _Child | None = None
        self._starting: asyncio.Task[_Child] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> SolverProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pid(self) -> int | None:
        """Of the child that is ready or solving; None while one is starting."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Returns when a child is warm, a second or more later. Raises OSError when it does not start."""
        await self._ready()

    async def solve(self, problem: Problem) -> Solution:
        """The child's answer; at the deadline, or when the child dies, the best it has sent so far (else EMPTY).

        Never raises for what the child does; `Solution.note` says what happened. Solves queue up behind each other,
        and the deadline of each counts from when it is sent to a child that is warm.
        """
        async with self._busy:
            best = Solution(window=problem.window, policy=problem.policy, status=SolveStatus.EMPTY)
            try:
                async with asyncio.timeout(self.start_limit_s):
                    child = await self._ready()
            except TimeoutError:
                self._replace_start()
                return _noted(best, f"solver process was not ready within {self.start_limit_s:g} s")
            except (OSError, EOFError) as error:
                self._replace_child()
                return _noted(best, f"solver process did not start: {type(error).__name__}")
            try:
                async with asyncio.timeout(self.deadline_s):
                    await child.send(msgspec.msgpack.encode(problem))
                    while True:
                        tag, body = await child.receive()
                        if tag == _ERROR:
                            return _noted(best, f"solver: {body.decode(errors='replace')}")
                        best = msgspec.msgpack.decode(body, type=Solution)
                        if tag == _FINAL:
                            return best
            except TimeoutError:
                self.timeouts += 1
                self._replace_child()
                return _noted(best, f"deadline: no final answer within {self.deadline_s:g} s")
            except (OSError, EOFError) as error:
                self._replace_child()
                return _noted(best, f"solver process died: {type(error).__name__}")
            except asyncio.CancelledError:
                self._replace_child()
                raise

    async def close(self) -> None:
        """End the child, also in the middle of a solve or a start."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, EOFError):
                await self._starting
        self._end_child()
        await asyncio.gather(*self._ending)

    async def _ready(self) -> _Child:
        if self._child is not None and self._child.dead:
            self._replace_child()
        if self._child is None:
            if self._starting is None:
                self._begin_start()
            assert self._starting is not None
            # shielded: a solve that meets its deadline while a child is starting must not stop that start
            self._child = await asyncio.shield(self._starting)
            self._starting = None
        return self._child

    def _begin_start(self) -> None:
        self._starting = asyncio.create_task(_Child.start(self._function, self.limits))

    def _replace_child(self) -> None:
        """Kill the child, if there is one, and start another in the background."""
        if self._closed:
            return
        if self._child is None and self._starting is not None and not self._starting.done():
            return  # it is only slow to start, and has not been asked anything
        self._end_child()
        self.restarts += 1
        log.warning("solver process is replaced (restart %d)", self.restarts)
        self._begin_start()

    def _replace_start(self) -> None:
        """Give up a child that does not get warm, and start another."""
        if self._starting is not None and not self._starting.done():
            task = asyncio.create_task(_cancelled(self._starting))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._starting = None
        self._replace_child()

    def _end_child(self) -> None:
        if self._child is not None:
            task = asyncio.create_task(self._child.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            self._child = None


class _Child:
    """The parent's end of one solver process."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.pid = process.pid

    @classmethod
    async def start(cls, function: str, limits: SolveLimits) -> _Child:
        """Start one and wait until it is warm."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "streamsched.service.solver"),
                *(str(theirs.fileno()), str(os.getpid()), function, msgspec.json.encode(limits).decode()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,  # what a solver prints must not end up among ours
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
            on_failure.callback(process.kill)
            child = cls(process, *await asyncio.open_connection(sock=ours))
            on_failure.pop_all()
        try:
            tag, body = await child.receive()
        except EOFError as error:
            await child.end()
            raise OSError("solver process ended before it was ready") from error
        except BaseException:
            await child.end()
            raise
        if tag != _READY:
            await child.end()
            raise OSError(f"solver process did not start: {body.decode(errors='replace')}")
        return child

    @property
    def dead(self) -> bool:
        return self._process.returncode is not None

    async def send(self, body: bytes) -> None:
        self._writer.write(_HEADER.pack(b"P", len(body)) + body)
        await self._writer.drain()

    async def receive(self) -> tuple[bytes, bytes]:
        """(tag, body). Raises EOFError when the child has ended."""
        tag, length = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
        return tag, await self._reader.readexactly(length)

    async def end(self) -> None:
        """Kill it and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._writer.close()
        await self._process.wait()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def _cancelled(starting: asyncio.Task[_Child]) -> None:
    """Cancel a start, which ends its process."""
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError, EOFError):
        await starting


def _noted(solution: Solution, note: str) -> Solution:
    return msgspec.structs.replace(solution, note="; ".join(filter(None, (solution.note, note))))


# ── the child ────────────────────────────────────────────────────────────────────────────────────────────────────────


def main(fd: int, parent: int, function: str, limits: SolveLimits) -> None:
    """Answer problems until the socket ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole foreground group; the parent ends us
    die_with(parent)
    with socket.socket(fileno=fd) as sock:
        try:
            solve = _load(function)
            _warm_up(solve, limits)
        except Exception as error:
            _send(sock, _ERROR, f"{type(error).__name__}: {error}".encode())
            raise
        leave_alone_what_is_there()
        _send(sock, _READY, b"")
        while (body := _receive(sock)) is not None:
            problem = msgspec.msgpack.decode(body, type=Problem)
            try:
                solution = solve(problem, limits, lambda s: _send(sock, _GREEDY, msgspec.msgpack.encode(s)))
            except Exception as error:
                logging.getLogger(__name__).exception("window %d of pool %s", problem.window, problem.pool)
                _send(sock, _ERROR, f"{type(error).__name__}: {error}".encode())
            else:
                _send(sock, _FINAL, msgspec.msgpack.encode(solution))


def leave_alone_what_is_there() -> None:
    """To the garbage collector: what was imported stays, and looking through it took up to 0.1 s of a window."""
    gc.collect()
    gc.freeze()


def die_with(parent: int) -> None:
    """Ask the kernel to kill us when the parent's starting thread ends; elsewhere than on Linux the socket must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


def _load(function: str) -> SolveFunction:
    module, _, name = function.partition(":")
    loaded: SolveFunction = getattr(importlib.import_module(module), name)
    return loaded


def _warm_up(solve: SolveFunction, limits: SolveLimits) -> None:
    """A window that greedy cannot prove good: imports Pyomo and HiGHS and runs them once."""
    solve(warm_up_problem(), limits, lambda _: None)


def warm_up_problem() -> Problem:
    """Two jobs for the room of one; greedy takes the less valuable."""
    jobs = [
        Candidate(job_id=name, attempt=0, chunks=((2, 1),), value=value) for name, value in (("a", 1.0), ("b", 9.0))
    ]
    node = NodeClass(gpu_type="any", free_gpus=2, node_ids=("n",), total_gpus=2)
    return Problem(pool="", window=-1, now=0.0, policy="", candidates=tuple(jobs), classes=(node,))


def _send(sock: socket.socket, tag: bytes, body: bytes) -> None:
    sock.sendall(_HEADER.pack(tag, len(body)) + body)


def _receive(sock: socket.socket) -> bytes | None:
    """The body of the next message; None at the end of the stream."""
    header = _read_exactly(sock, _HEADER.size)
    if header is None:
        return None
    return _read_exactly(sock, _HEADER.unpack(header)[1])


def _read_exactly(sock: socket.socket, length: int) -> bytes | None:
    body = bytearray()
    while len(body) < length:
        part = sock.recv(min(1 << 20, length - len(body)))
        if not part:
            return None
        body += part
    return bytes(body)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], msgspec.json.decode(sys.argv[4], type=SolveLimits))
