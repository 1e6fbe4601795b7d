"""Windows on file: what support needs to see again what the solver was asked and what it answered.

A worker keeps the windows that went wrong (`DumpFolder`); `streamsched solve` reads them, and bare problems as well.
Keeping one never delays its window, and a folder that cannot be written to costs a line in the log and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from streamsched import __version__
from streamsched.core.model import WHOLE_GPU
from streamsched.core.problem import Candidate, NodeClass, Problem, Solution, SolveStatus
from streamsched.errors import UserError
from streamsched.placement.solve import SolveLimits

log = logging.getLogger(__name__)

Solve = Callable[[Problem], Awaitable[Solution]]

_PREFIX: Final = "streamsched-window-"
_EVERY_S: Final = 10.0
"""At most one dump of a pool in so long: of a cluster that is always slow the early ones stay a while."""
_COMPLAIN_EVERY_S: Final = 600.0
_GPUS_MAX: Final = 4096
_AMOUNT_MAX: Final = 2**53
_VALUE_MAX: Final = 1e100


class Dump(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A window as it was asked, and how it was answered. `solution` None: it raised, or was never solved."""

    problem: Problem
    limits: SolveLimits = SolveLimits()
    reason: str = ""
    """Why it was kept."""
    solution: Solution | None = None
    version: str = ""
    written_at: float = 0.0


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def why_keep(solution: Solution, limits: SolveLimits) -> str:
    """Why support may want to see this window: slow, fallen back, or something went wrong; empty: nothing of it."""
    by_choice = limits.variables_max == 0  # placement = greedy: then there is no model to fall back from
    if solution.note and not (by_choice and solution.note.startswith("too large")):
        return solution.note
    if solution.status is SolveStatus.INCUMBENT:
        return "slow: the limit was reached before the gap"
    if limits.time_s is not None and solution.build_s + solution.solve_s > limits.time_s:
        return f"slow: {solution.build_s + solution.solve_s:.3f} s of {limits.time_s:g} s"
    if solution.status is SolveStatus.GREEDY and not by_choice:
        return "fell back: greedy's answer was used"
    return ""


class DumpFolder:
    """Keeps the newest dumps, `files_max` and `bytes_max` of them at most. Other files there are left alone."""

    def __init__(self, folder: Path, files_max: int, bytes_max: int) -> None:
        self._folder, self._files_max, self._bytes_max = folder, files_max, bytes_max

    def write(self, dump: Dump) -> Path | None:
        """The file, or None when it alone would be too large. Raises OSError; no part of a file stays behind."""
        body = msgspec.json.encode(dump)
        self._folder.mkdir(parents=True, exist_ok=True)
        if len(body) > self._bytes_max:
            return None
        self._make_room(len(body))
        path = self._folder / f"{_PREFIX}{_stamp(dump.written_at)}-{_file_name(dump.problem)}.json"
        part = path.with_suffix(".part")
        try:
            part.write_bytes(body)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        return path

    def _make_room(self, more: int) -> None:
        """Drop the oldest, so that one more of so many bytes is within the bounds. Names begin with the time."""
        found = [(path, path.stat().st_size) for path in sorted(self._folder.glob(f"{_PREFIX}*"))]
        total = sum(size for _, size in found)
        while found and (len(found) >= self._files_max or total + more > self._bytes_max):
            path, size = found.pop(0)
            path.unlink(missing_ok=True)
            total -= size


def _stamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3] + "Z"


def _file_name(problem: Problem) -> str:
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', problem.pool)[:100]}-{problem.window}"


class DumpingSolver:
    """Solves as `solve` does, and writes the windows worth keeping beside the event loop."""

    def __init__(self, solve: Solve, limits: SolveLimits, folder: DumpFolder, clock: Callable[[], float]) -> None:
        self._solve, self._limits, self._folder, self._clock = solve, limits, folder, clock
        self._last: dict[str, float] = {}
        self._complained_at = -math.inf
        self._writing: set[asyncio.Task[None]] = set()

    async def solve(self, problem: Problem) -> Solution:
        try:
            solution = await self._solve(problem)
        except Exception as error:
            self._keep(problem, None, f"failed: {type(error).__name__}: {error}")
            raise
        if reason := why_keep(solution, self._limits):
            self._keep(problem, solution, reason)
        return solution

    async def close(self) -> None:
        """Wait for what is being written."""
        await asyncio.gather(*self._writing)

    def _keep(self, problem: Problem, solution: Solution | None, reason: str) -> None:
        now = self._clock()
        if now - self._last.get(problem.pool, -math.inf) < _EVERY_S or self._writing:
            return
        self._last[problem.pool] = now
        dump = Dump(
            problem=problem,
            limits=self._limits,
            reason=reason,
            solution=solution,
            version=__version__,
            written_at=now,
        )
        task = asyncio.create_task(self._write(dump))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, dump: Dump) -> None:
        where = f"pool {dump.problem.pool}: window {dump.problem.window}"
        try:
            path = await asyncio.to_thread(self._folder.write, dump)
        except Exception as error:
            self._complain(f"{where} not dumped ({error})")
            return
        if path is None:
            self._complain(f"{where} not dumped (larger than dump_mib)")
        else:
            log.info("%s dumped to %s (%s)", where, path, dump.reason)

    def _complain(self, what: str) -> None:
        now = self._clock()
        if now - self._complained_at >= _COMPLAIN_EVERY_S:
            self._complained_at = now
            log.warning("%s", what)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse(body: bytes, name: str) -> Dump:
    """A dump, or a bare problem as one. Raises UserError that names the file, the place in it and what is wrong."""
    if not body.strip():
        raise UserError(f"{name}: is empty; expected a window's problem as JSON")
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{name}{_place(body, str(error))}: {_broken(str(error))}") from None
    kind: type[Dump] | type[Problem] = Dump if isinstance(raw, dict) and "problem" in raw else Problem
    try:
        value: Dump | Problem = msgspec.convert(raw, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UserError(f"{name}: {error}") from None
    for path in _unknown(raw, value, "$"):
        raise UserError(f"{name}: unknown field {path} (a typing error, or written by another version)")
    dump = value if isinstance(value, Dump) else Dump(problem=value)
    for complaint in _implausible(dump.problem):
        raise UserError(f"{name}: {complaint}")
    return dump


def _place(body: bytes, message: str) -> str:
    """`:LINE:COLUMN` of the byte that msgspec names."""
    found = re.search(r"\(byte (\d+)\)", message)
    if found is None:
        return ""
    before = body[: int(found[1])]
    line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
    return f":{line}:{column}"


def _broken(message: str) -> str:
    if "truncated" in message:
        return "the JSON ends too early: the file is cut"
    return f"not JSON: {message}"


def _unknown(raw: Any, value: Any, path: str) -> Iterator[str]:
    """Paths in `raw` that no field of `value`, converted from it, has taken up: what they say would be lost."""
    if isinstance(value, Struct) and isinstance(raw, dict):
        for name in raw:
            if name not in value.__struct_fields__:
                yield f"{path}.{name}"
            else:
                yield from _unknown(raw[name], getattr(value, name), f"{path}.{name}")
    elif isinstance(value, tuple) and isinstance(raw, list):
        for place, (item, converted) in enumerate(zip(raw, value, strict=True)):
            yield from _unknown(item, converted, f"{path}[{place}]")


def _implausible(problem: Problem) -> Iterator[str]:
    """What no state gives and the engine need not survive: amounts beyond all hardware, nodes that are there twice."""
    nodes: set[str] = set()
    for place, node_class in enumerate(problem.classes):
        where = f"classes[{place}]"
        for what, amount, least, most in _amounts(node_class):
            if not least <= amount <= most:
                yield f"{where}: {what} {amount:g} is not within {least:g} and {most:g}"
        for node_id in node_class.node_ids:
            if node_id in nodes:
                yield f"{where}: node {node_id} is there twice"
            nodes.add(node_id)
        if not node_class.node_ids:
            yield f"{where}: no node_ids"
    for place, candidate in enumerate(problem.candidates):
        for what, amount, least, most in _wishes(candidate):
            if not least <= amount <= most:
                where = f"candidates[{place}] ({candidate.job_id})"
                yield f"{where}: {what} {amount:g} is not within {least:g} and {most:g}"
    for place, victim in enumerate(problem.victims):
        if not 0 < victim.cost <= _VALUE_MAX:
            yield f"victims[{place}] ({victim.placement_id}): cost {victim.cost:g} is not within 0 and {_VALUE_MAX:g}"
        if unknown := [held[0] for held in victim.held if held[0] not in nodes]:
            yield f"victims[{place}] ({victim.placement_id}): node {unknown[0]} is in no class"


def _amounts(node_class: NodeClass) -> Iterator[tuple[str, float, float, float]]:
    yield "free_gpus", node_class.free_gpus, 0, _GPUS_MAX
    yield from (("shares", share, 1, WHOLE_GPU - 1) for share in node_class.shares)
    yield "free_cpu_milli", node_class.free_cpu_milli, -1, _AMOUNT_MAX
    yield "free_memory_mib", node_class.free_memory_mib, -1, _AMOUNT_MAX


def _wishes(candidate: Candidate) -> Iterator[tuple[str, float, float, float]]:
    yield "value", candidate.value, -_VALUE_MAX, _VALUE_MAX
    yield "cpu_milli", candidate.cpu_milli, 0, _AMOUNT_MAX
    yield "memory_mib", candidate.memory_mib, 0, _AMOUNT_MAX
    for gpus, workers in candidate.chunks:
        yield "GPUs of a worker", gpus, 0, _AMOUNT_MAX
        yield "workers", workers, 0, _AMOUNT_MAX
    yield from (("speed", speed, 1e-9, 1e9) for _, speed in candidate.speeds)
