"""Slurm's own records: `sacct --parsable2` and the lines of `jobcomp/filetxt`.

`sacct -aXP -o JobID,User,Account,State,Submit,Start,End,AllocTRES,Timelimit` (others too, in any order): times are
local without a zone, GPUs are `gres/gpu=N` of AllocTRES, else of ReqTRES. Rows of job steps (`123.batch`, where -X was
left out) are no jobs. jobcomp: one line per job of `Key=Value`, values may be empty (`ReservationName=`); GPUs are in
`Tres`. A time limit is what the user said how long it would run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from loadgen.jobs import Refusals, TraceJob, tenant_name

from .base import Head, HeaderCsv, OddRow, Row, gpu_count, naive_time

_RAN: Final = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE", "BOOT_FAIL"}
)
_OPEN: Final = frozenset({"RUNNING", "PENDING", "SUSPENDED", "REQUEUED", "RESIZING", "COMPLETING", "CONFIGURING"})
_NO_TIME: Final = frozenset({"", "Unknown", "None", "N/A"})
_PAIR: Final = re.compile(r"(\w+)=(\S*)")
_LIMIT: Final = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)(?:\.\d+)?")


def _job(
    submit: str, start: str, end: str, state: str, tres: str, tenant: str, limit_s: float | None, line: int
) -> TraceJob:
    gpus = gpu_count(str(_gpus(tres)))
    state = state.split(" ")[0].rstrip("+")  # "CANCELLED by 1000"; a narrow column is cut with a +
    if state not in _RAN:
        raise OddRow("not-finished" if state in _OPEN else "unknown-state")
    if start in _NO_TIME:
        raise OddRow("never-started")
    if end in _NO_TIME:
        raise OddRow("no-time")
    duration_s = naive_time(end) - naive_time(start)
    if duration_s < 0:
        raise OddRow("negative-duration")
    return TraceJob(
        submit_s=naive_time("" if submit in _NO_TIME else submit),
        duration_s=duration_s,
        gpus=gpus,
        tenant=tenant_name(tenant),
        estimate_s=limit_s,
        line=line,
    )


def _gpus(tres: str) -> int:
    """Of `cpu=8,mem=64G,node=1,gres/gpu=4,gres/gpu:a100=4`: those of all types together."""
    found: dict[str, int] = {}
    for part in tres.split(","):
        name, _, amount = part.partition("=")
        if name.startswith("gres/gpu") and amount.isdigit():
            found[name] = int(amount)
    return found.get("gres/gpu", sum(n for name, n in found.items() if name.startswith("gres/gpu:")))


def _limit_s(text: str) -> float | None:
    """`1-12:00:00`, `12:00:00`; None for UNLIMITED, Partition_Limit and whatever else."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds) or None


def _of_sacct(row: Row, line: int) -> TraceJob:
    if "." in row["JobID"]:
        raise OddRow("job-step")
    return _job(
        *(row["Submit"], row["Start"], row["End"], row["State"], row["AllocTRES"] or row.get("ReqTRES", "")),
        *(row.get("Account") or row.get("User", ""), _limit_s(row.get("Timelimit", "")), line),
    )


SACCT: Final = HeaderCsv(
    "sacct --parsable2",
    ("JobID", "State", "Submit", "Start", "End", "AllocTRES"),
    ("User", "Account", "Timelimit", "ReqTRES"),
    _of_sacct,
    "|",
)


class _Jobcomp:
    name = "Slurm jobcomp"
    expects = "Slurm jobcomp (JobId=... JobState=... SubmitTime=...)"

    def matches(self, head: Head) -> bool:
        return {"JobId", "JobState", "StartTime", "EndTime"} <= dict(_PAIR.findall(head.line)).keys()

    def near_miss(self, head: Head) -> str | None:
        return None

    def read(self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals) -> Iterator[TraceJob]:
        yield from self._line(head.number, head.line, refusals)
        for number, line in lines:
            if line.strip():
                yield from self._line(number, line, refusals)

    def _line(self, number: int, line: str, refusals: Refusals) -> Iterator[TraceJob]:
        try:
            yield self._of(dict(_PAIR.findall(line)), number)
        except OddRow as kind:
            refusals.add(str(kind), number)

    def _of(self, row: Mapping[str, str], line: int) -> TraceJob:
        if not {"JobId", "JobState", "StartTime", "EndTime"} <= row.keys():
            raise OddRow("missing-columns")
        limit = row.get("TimeLimit", "")
        limit_s = float(limit) * 60.0 if limit.isdigit() else _limit_s(limit)  # filetxt writes minutes
        return _job(
            *(row.get("SubmitTime", ""), row["StartTime"], row["EndTime"], row["JobState"], row.get("Tres", "")),
            *(row.get("Account") or row.get("UserId", ""), limit_s or None, line),
        )


JOBCOMP: Final = _Jobcomp()
