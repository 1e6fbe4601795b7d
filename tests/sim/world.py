"""What all parts of a simulation share: time, chance, the trace, the fakes, and the hand that kills.

Whether a fault happens is asked for at every effect: `hazard` before and after each call of a fake by a worker,
`strike` at the moment the effect takes place on the other side. There the worker may die or freeze. One generator,
seeded once, answers all questions in the order they are asked, so a seed is a run.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from .kafka import Kafka
from .loop import PROCESS, Process, VirtualLoop
from .redis import Server

if TYPE_CHECKING:
    from .workers import Group, Worker

BEGIN_S = 1_700_000_000.0
"""Epoch seconds at loop time 0."""
TRACE_KEPT = 120


class Violation(Exception):
    """A promise was broken."""


@dataclass(slots=True, kw_only=True)
class Faults:
    """Rates of what goes wrong in the first phase; `on` is off in the second."""

    rng: Random
    on: bool = True
    latency_max_s: float = 0.01
    produce: float = 0.0
    """Share of produces that do not simply succeed."""
    command: float = 0.0
    """Share of Redis commands that do not simply succeed."""
    kill: float = 0.0
    """Chance at each effect."""
    freeze: float = 0.0
    favourite: str = ""
    """At effects with this label the chances are `favourite_kill` and half of it for freezes."""
    favourite_kill: float = 0.0
    kills_left: int = 12
    session_s: float = 4.0
    late_solve: float = 0.0
    no_solve: float = 0.0
    broken_solve: float = 0.0
    clock_skew_s: float = 0.0
    freeze_s: float | None = None
    """How long a freeze takes; None: drawn around the length of the session."""
    exact: dict[tuple[str, int], str] = field(default_factory=dict)
    """(label, n) -> `kill` or `freeze` at its n-th effect, or what the n-th produce to the topic `label` comes to."""
    _seen: Counter[str] = field(default_factory=Counter)

    def _exactly(self, label: str) -> str:
        self._seen[label] += 1
        return self.exact.get((label, self._seen[label]), "")

    def latency_s(self) -> float:
        return self.rng.uniform(0.0005, self.latency_max_s)

    def fate_of_produce(self, topic: str) -> str:
        if fate := self._exactly(topic):
            return fate
        if not self.on or self.rng.random() >= self.produce:
            return "ok"
        return self.rng.choice(("answer lost", "not written", "late"))

    def fate_of_command(self) -> str:
        if not self.on or self.rng.random() >= self.command:
            return "ok"
        return self.rng.choice(("answer lost", "not executed", "late"))

    def blow(self, label: str) -> str:
        """What hits a worker here: nothing, or a way to go."""
        if how := self._exactly(label):
            return how
        if not self.on or self.kills_left <= 0:
            return ""
        kill, freeze = self.kill, self.freeze
        if label == self.favourite:
            kill, freeze = kill + self.favourite_kill, freeze + self.favourite_kill / 2
        draw = self.rng.random()
        if draw < kill + freeze:
            self.kills_left -= 1
        return "kill" if draw < kill else "freeze" if draw < kill + freeze else ""


class World:
    """One simulation."""

    def __init__(self, seed: int, loop: VirtualLoop, partitions: int, faults: Faults, say: Any = None) -> None:
        self.seed = seed
        self.loop = loop
        self.rng = faults.rng
        self.faults = faults
        self.kafka = Kafka(self, partitions)
        self.redis = Server()
        self.workers: dict[str, Worker] = {}
        self.group: Group
        self.counts: Counter[str] = Counter()
        self.labels: Counter[str] = Counter()
        self.failure: str | None = None
        self.trace: deque[str] = deque(maxlen=TRACE_KEPT)
        self.digest = hashlib.sha256()
        self.tasks: list[asyncio.Task[Any]] = []
        self._context = copy_context()
        self._say = say

    # ── time and trace ───────────────────────────────────────────────────────────────────────────────────────────────

    def epoch_s(self) -> float:
        return BEGIN_S + self.loop.time()

    def later(self, delay_s: float, do: Callable[[], Any]) -> None:
        """Outside of every process: it happens whoever dies."""
        self.loop.call_later(delay_s, do, context=self._context)

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """A task of the surroundings; its error is a failure of the run."""
        task = self.loop.create_task(work, context=self._context.run(copy_context))
        task.add_done_callback(self._surroundings_ended, context=self._context)
        self.tasks.append(task)
        return task

    def _surroundings_ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(f"{type(error).__name__}: {error}")
            if not isinstance(error, Violation):
                raise error

    def tell(self, text: str, detail: bytes = b"") -> None:
        line = f"{self.loop.time():9.4f} {text}"
        self.digest.update(line.encode())
        self.trace.append(line)
        if self._say is not None:
            self._say(f"{line} {detail.decode(errors='replace')[:600]}" if detail else line)

    def fail(self, reason: str) -> None:
        """The first failure is the one told."""
        if self.failure is None:
            self.failure = reason
            self.tell(f"FAILED: {reason}")

    # ── harm ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def hazard(self, label: str) -> None:
        """Called by a fake in the name of the running worker, which may end or stand still here."""
        process = PROCESS.get()
        if process is not None and self._hit(process, label):
            await asyncio.sleep(0)

    def strike(self, name: str, label: str) -> None:
        """The same, at the moment of the effect."""
        worker = self.workers.get(name)
        if worker is not None:
            self._hit(worker.process, label)

    def _hit(self, process: Process, label: str) -> bool:
        self.labels[label] += 1
        if process.dead or process.frozen:
            return process.dead
        how = self.faults.blow(label)
        if how == "kill":
            self.kill(process.name, label)
        elif how == "freeze":
            self.freeze(process.name, label, self._how_long_s())
        return bool(how)

    def _how_long_s(self) -> float:
        """Shorter than the session, about as long, or much longer."""
        if self.faults.freeze_s is not None:
            return self.faults.freeze_s
        return self.faults.session_s * self.rng.choice((0.2, 0.7, 1.1, 1.5, 3.0)) * self.rng.uniform(0.8, 1.2)

    def kill(self, name: str, why: str) -> None:
        worker = self.workers[name]
        if not worker.process.dead:
            self.tell(f"{name}: killed at {why}")
            self.counts["kills"] += 1
            worker.process.kill()
            self.group.silent(worker)
            self.later(self.rng.uniform(0.1, 3.0), self.group.start_worker)

    def freeze(self, name: str, why: str, seconds: float) -> None:
        worker = self.workers[name]
        if worker.process.dead or worker.process.frozen:
            return
        self.tell(f"{name}: frozen for {seconds:.1f} s at {why}")
        self.counts["freezes"] += 1
        worker.process.freeze()
        self.group.silent(worker)
        self.later(seconds, lambda: self.thaw(name))

    def thaw(self, name: str) -> None:
        worker = self.workers[name]
        if worker.process.frozen and not worker.process.dead:
            self.tell(f"{name}: thawed")
            worker.process.thaw()
            self.later(self.rng.uniform(0.0, 1.5), lambda: self.group.heard(worker))
