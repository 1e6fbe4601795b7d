"""A job as a trace tells it, how it becomes a gang of workers, and the rows that could not be used."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct

from streamsched.errors import UserError

GPUS_PER_NODE: Final = 8
LINES_KEPT: Final = 20
"""Line numbers kept per kind of refused row; all of them are counted."""
MAX_GPUS: Final = 100_000
"""More GPUs than the contract of `jobs.arrivals` takes; such a request is an error in the trace."""


class TraceJob(Struct, frozen=True, kw_only=True):
    """One job of a trace. `index` is its place in the whole trace by (submit time, order in the file)."""

    submit_s: float
    """Epoch seconds. Zoneless local times are read as if they were UTC: gaps are kept, the absolute hour is local."""
    duration_s: float
    gpus: int
    line: int
    tenant: str = "default"
    clamped: bool = False
    """`duration_s` is a lower bound: whoever made the file, or `--max-duration-s`, cut it."""
    estimate_s: float | None = None
    """What its user said how long it would run (a time limit counts as that); None: nothing."""
    gpu_milli: int | None = None
    """Thousandths of a GPU in all, where that is no whole number of GPUs; `gpus` is then the next whole number."""
    gpu_types: tuple[str, ...] = ()
    """Types it may run on; empty: any, or not told."""
    queued_s: float | None = None
    """How long it waited in its own cluster; None: not told."""
    attempts: int = 1
    """Runs that its cluster made of it; `duration_s` is their sum."""
    group: str = ""
    """What like jobs have in common (the same program of the same user); empty: not told."""
    index: int = -1

    @property
    def gpu_share(self) -> float:
        """GPUs in all, parts of them too."""
        return self.gpus if self.gpu_milli is None else self.gpu_milli / 1000.0

    @property
    def ended_s(self) -> float:
        """Epoch seconds; as if it had started at once, where the trace does not tell how long it waited."""
        return self.submit_s + (self.queued_s or 0.0) + self.duration_s


@dataclass(slots=True)
class Tally:
    """Rows by kind: how many of each, and the first lines they are on."""

    count: dict[str, int] = field(default_factory=dict)
    lines: dict[str, list[int]] = field(default_factory=dict)
    unit: str = "line"
    """What the numbers count: lines of a text, or rows of a table."""

    def add(self, kind: str, line: int) -> None:
        self.count[kind] = self.count.get(kind, 0) + 1
        kept = self.lines.setdefault(kind, [])
        if len(kept) < LINES_KEPT:
            kept.append(line)

    @property
    def total(self) -> int:
        return sum(self.count.values())

    def describe(self) -> str:
        """`3 bad-time (lines 4, 9, 12), 1 cpu-job (line 7)`, or `none`."""
        return ", ".join(self._describe_kind(kind) for kind in sorted(self.count)) or "none"

    def _describe_kind(self, kind: str) -> str:
        lines, count = self.lines[kind], self.count[kind]
        more = ", ..." if count > len(lines) else ""
        return f"{count} {kind} ({self.unit}{'s' if count > 1 else ''} {', '.join(map(str, lines))}{more})"


@dataclass(slots=True)
class Refusals(Tally):
    """Rows that are not used."""

    notes: Tally = field(default_factory=Tally)
    """Odd rows that are used all the same."""


class Gang(Struct, frozen=True):
    """How `gpus` are asked for: `workers` workers of `gpus_per_worker`, and one more of `remainder_gpus` if not 0."""

    workers: int
    gpus_per_worker: int
    remainder_gpus: int = 0


def gang_of(gpus: int, gpus_per_node: int = GPUS_PER_NODE) -> Gang:
    """A job that fits one node is one worker; a larger one takes whole nodes, the rest on one more."""
    if gpus <= gpus_per_node:
        return Gang(1, gpus)
    return Gang(gpus // gpus_per_node, gpus_per_node, gpus % gpus_per_node)


def gpus_of(milli: float) -> tuple[int, int | None]:
    """(`gpus`, `gpu_milli`) of a job that asks for `milli` > 0 thousandths of a GPU."""
    whole = max(1, math.ceil(round(milli) / 1000))
    return whole, None if round(milli) == whole * 1000 else max(1, round(milli))


def tenant_name(text: str) -> str:
    """The contract's alphabet for ids; other characters become `-`."""
    cleaned = re.sub(r"[^A-Za-z0-9._:/@+-]+", "-", text.strip()).lstrip("._:/@+-")[:253]
    return cleaned or "default"


def parse_moment(text: str) -> float:
    """Epoch seconds of an option such as 2017-10-02 or 2017-10-02T12:00:00; without an offset it is read as UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds):
            raise UserError(
                f"{text!r} is not a time: expected 2017-10-02, 2017-10-02T12:00:00 or epoch seconds"
            ) from None
        return seconds
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
