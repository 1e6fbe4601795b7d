"""Standard Workload Format 2.2 (Feitelson et al., Parallel Workloads Archive): 18 numbers per job, -1 for unknown.

Comments begin with `;`; `; UnixStartTime: N` is what submit times count from. Used are: 2 submit (s), 4 run time (s),
5 allocated and 8 requested processors (the request where it is given), 9 requested time (s), 11 status, 12 user. One
processor counts as one GPU: convert with another factor beforehand where that is wrong. A job of which no run time or
size is known, as of those cancelled in the queue, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from loadgen.jobs import Refusals, TraceJob, tenant_name

from .base import Head, OddRow, duration, estimate, gpu_count, number

_FIELDS: Final = 18
_START: Final = re.compile(r";\s*UnixStartTime:\s*(-?\d+)")


class _Swf:
    name = "Standard Workload Format"
    expects = "Standard Workload Format (comments with ';', then 18 numbers per line)"

    def matches(self, head: Head) -> bool:
        return head.line.startswith(";") or _is_row(head.line)

    def near_miss(self, head: Head) -> str | None:
        return None

    def read(self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals) -> Iterator[TraceJob]:
        origin = 0.0
        for line_number, line in _all(head, lines):
            if line.startswith(";"):
                if match := _START.match(line):
                    origin = max(0.0, float(match[1]))
            elif line.strip():
                try:
                    yield _to_job(line.split(), origin, line_number)
                except OddRow as kind:
                    refusals.add(str(kind), line_number)


def _all(head: Head, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield head.number, head.line
    yield from lines


def _is_row(line: str) -> bool:
    cells = line.split()
    try:
        return len(cells) == _FIELDS and [float(cell) for cell in cells] != []
    except ValueError:
        return False


def _to_job(cells: list[str], origin: float, line: int) -> TraceJob:
    if len(cells) != _FIELDS:
        raise OddRow("missing-columns" if len(cells) < _FIELDS else "extra-columns")
    submit_s = number(cells[1], "bad-time")
    if submit_s < 0:
        raise OddRow("no-time")
    if cells[3] == "-1":
        raise OddRow("no-duration")
    size = cells[7] if cells[7] != "-1" else cells[4]
    if size == "-1":
        raise OddRow("no-gpus")
    return TraceJob(
        submit_s=origin + submit_s,
        duration_s=duration(cells[3]),
        gpus=gpu_count(size),
        tenant=tenant_name("" if cells[11] == "-1" else f"user{cells[11]}"),
        estimate_s=estimate(cells[8]),
        line=line,
    )


FORMAT: Final = _Swf()
