"""What a trace format is, and the reader shared by all formats that are comma-separated text with a header.

A line is one row: no format here has line breaks inside a field, so a stray quote spoils its own row and no other, and
line numbers are exact. A row that cannot be used raises `OddRow`; the reader counts it and goes on.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, Protocol

from loadgen.jobs import MAX_GPUS, Refusals, TraceJob
from streamsched.errors import UserError

DELIMITER: Final = ","
_OTHER_DELIMITERS: Final = {";": "';'", "\t": "tabs", "|": "'|'", " ": "spaces"}


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file: what formats are told apart by. `line` is the first line that is not blank."""

    path: str
    line: str
    number: int


class Format(Protocol):
    """A kind of trace file."""

    @property
    def name(self) -> str: ...

    @property
    def expects(self) -> str:
        """For error messages: what the first line has to have."""

    def matches(self, head: Head) -> bool: ...

    def near_miss(self, head: Head) -> str | None:
        """Why the file is almost of this format, or None."""

    def read(self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals) -> Iterator[TraceJob]:
        """Jobs in the order of the file; `lines` are numbered and begin after the head."""


class OddRow(Exception):
    """This row cannot be used; the text is the kind under which it is counted."""


Row = dict[str, str]
ColumnKind = Literal[
    "naive time", "number", "epoch", "gpus", "tenant", "flag",
    "estimate", "number or none", "attempts", "one type", "text", "empty",
]  # fmt: skip
"""How `loadgen.columns` reads the plain cells of a column."""


@dataclass(frozen=True, slots=True)
class HeaderCsv:
    """A comma-separated format that is known by the columns it must have, in any order, among others."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    to_job: Callable[[Row, int], TraceJob]
    delimiter: str = DELIMITER
    plain: tuple[tuple[str, str, ColumnKind], ...] = ()
    """(field of TraceJob, column, kind): what `to_job` makes of plain cells, all that it reads; empty: not told."""

    @property
    def expects(self) -> str:
        return f"{self.name} ({self.delimiter.join(self.required)})"

    def matches(self, head: Head) -> bool:
        return set(self.required) <= set(split(head.line, self.delimiter))

    def near_miss(self, head: Head) -> str | None:
        for delimiter, words in _OTHER_DELIMITERS.items():
            if delimiter != self.delimiter and set(self.required) <= {
                cell.strip(' "') for cell in head.line.split(delimiter)
            }:
                return f"columns of {self.name} separated by {words}: expected {self.delimiter!r}"
        return None

    def read(self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals) -> Iterator[TraceJob]:
        header = split(head.line, self.delimiter)
        for column in self.required:
            if header.count(column) > 1:
                raise UserError(f"{head.path}:{head.number}: column {column!r} is there {header.count(column)} times")
        wanted = [(name, header.index(name)) for name in self.required + self.optional if name in header]
        for number, line in lines:
            if not line.strip():
                continue
            cells = split(line, self.delimiter)
            try:
                if len(cells) != len(header):
                    raise OddRow("missing-columns" if len(cells) < len(header) else "extra-columns")
                yield self.to_job({name: cells[at] for name, at in wanted}, number)
            except OddRow as kind:
                refusals.add(str(kind), number)


def split(line: str, delimiter: str = DELIMITER) -> list[str]:
    if '"' not in line:
        return [cell.strip() for cell in line.split(delimiter)]
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def naive_time(text: str) -> float:
    """`2017-10-09 07:01:55` as if it were UTC. The zone is not stated in these files, so it is not guessed: no hour is
    skipped or repeated, and jobs of a daylight-saving fold keep the order of their clock readings."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise OddRow("bad-time" if text else "no-time") from None
    if len(text) < len("2017-10-09 07:01"):
        raise OddRow("bad-time")
    if moment.tzinfo is not None:
        raise OddRow("zoned-time")  # the rest of the file is local time: the two cannot be put in one order
    return moment.replace(tzinfo=UTC).timestamp()


def zoned_time(text: str) -> float:
    """`2023-05-17 11:00:58+08:00`: a time with its offset, where the format has it."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise OddRow("bad-time" if text else "no-time") from None
    if moment.tzinfo is None:
        raise OddRow("naive-time")
    return moment.timestamp()


def number(text: str, kind: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise OddRow(kind) from None
    if not math.isfinite(value):
        raise OddRow(kind)
    return value


def duration(text: str) -> float:
    value = number(text, "bad-duration" if text else "no-duration")
    if value < 0:
        raise OddRow("negative-duration")
    return value


def estimate(text: str) -> float | None:
    """None where there is none; such a column spoils no row."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def not_negative(text: str) -> float | None:
    """None where there is none; such a column spoils no row."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def gpu_types(text: str) -> tuple[str, ...]:
    """Of `A|B`; empty: any."""
    return tuple(sorted({name.strip() for name in text.split("|")} - {""}))


def gpu_count(text: str) -> int:
    """At least 1: a job without GPUs is left out as `cpu-job`."""
    value = number(text, "bad-gpus" if text else "no-gpus")
    if value == 0:
        raise OddRow("cpu-job")
    if value < 0 or value > MAX_GPUS:
        raise OddRow("bad-gpus")
    if value != int(value):
        raise OddRow("fractional-gpus")
    return int(value)
