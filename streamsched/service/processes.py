"""Child processes of a stack: started, watched until they answer, ended for certain.

A child must not outlive us, even when we are killed by -9. Linux offers PR_SET_PDEATHSIG for that, with two traps:
- It fires when the *thread* that started the child ends, not the process. So every child of a `Spawner` is started
  from one thread that lives as long as the stack.
- Setting it in `preexec_fn` runs Python between fork and exec, which can deadlock in a process with threads. So a tiny
  launcher sets it on itself and then becomes the server by exec: same pid, setting kept.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from streamsched.errors import ServiceUnreachable, UserError

STOP_DEADLINE_S = 15.0
"""How long a server may take to end after SIGTERM before it gets SIGKILL."""
_POLL_S = 0.05
_TAIL_LINES = 4
_TAIL_CHARS = 800

# argv: our pid, program, its arguments. Python ignores SIGPIPE and exec would pass that on.
_LAUNCHER = """\
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the starting process has ended")
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Spawner:
    """Starts processes from one thread of its own; what still runs when it is closed is killed by the kernel."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stack-spawner")

    def spawn(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return self._thread.submit(self._spawn, argv, log, env).result()

    def close(self) -> None:
        self._thread.shutdown()

    @staticmethod
    def _spawn(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        with log.open("ab") as output:
            # A session of its own: Ctrl-C in a terminal reaches us, and we end the servers in order.
            return subprocess.Popen(
                [*launcher, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )


class Server:
    """One server process with a fixed address and data folder; it can be killed and started again at will."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        probe: Callable[[], None],
        spawner: Spawner,
        env: Mapping[str, str],
        ready_deadline_s: float,
    ) -> None:
        """`probe` raises `ServiceUnreachable` until the server answers; `log` takes its standard output."""
        self.name = name
        self.log = log
        self._argv = list(argv)
        self._probe = probe
        self._spawner = spawner
        self._env = env
        self._ready_deadline_s = ready_deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"Server({self.name}, pid={self._process.pid if self._process else None})"

    @property
    def pid(self) -> int:
        """Process id of the running server, or of the last one that ran."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start the process; it need not answer yet."""
        if self.running:
            raise RuntimeError(f"{self.name} runs already, pid {self.pid}")
        self._process = self._spawner.spawn(self._argv, self.log, self._env)

    def wait_ready(self) -> None:
        """Block until the server answers; a `UserError` with the end of its log when it does not."""
        deadline = time.monotonic() + self._ready_deadline_s
        while True:
            if not self.running:
                raise UserError(f"{self.name} ended while starting: {self._tail()}")
            try:
                return self._probe()
            except ServiceUnreachable as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.name} not ready after {self._ready_deadline_s:g} s ({error}): {self._tail()}"
                    ) from None
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """SIGKILL, as a crash would: nothing is flushed or said goodbye to."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after `STOP_DEADLINE_S`."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Start again at the same address with the same data (stopping it first if it runs), until it answers."""
        self.stop()
        self.spawn()
        self.wait_ready()

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): its connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._signal(how)
        self._signal(signal.SIGCONT)  # a frozen process would not see SIGTERM
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            # Popen knows whether the pid is still that of our child; a reused pid is never signalled.
            self._process.send_signal(number)

    def _tail(self) -> str:
        """The end of the log as one line."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        said = [line.strip() for line in lines if line.strip()][-_TAIL_LINES:]
        return " | ".join(said)[-_TAIL_CHARS:] or "it said nothing"
