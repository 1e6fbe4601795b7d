"""Microsoft Philly as JSON: the official `cluster_job_log`, and the derived list of multi-GPU jobs with their attempts.

Official: `jobid,status,vc,user,submitted_time,attempts[]`; an attempt has `start_time`, `end_time` and `detail[]` with
the GPUs of each host. Derived: `id,num_gpus,attempts[],submitted_time`; its `runtime` (minutes, with the gaps between
attempts) is not read. Times are local without a zone; a missing one is null, "" or the text "None".

The run time is the sum of the attempts that have a start and an end. Of the official jobs the GPUs are those of the
first attempt. A job whose last attempt has no end was still running: its run time is a lower bound (`clamped`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from loadgen.jobs import Refusals, TraceJob, tenant_name
from streamsched.errors import UserError

from .base import Head, OddRow, gpu_count, naive_time

_NO_TIME: Final = (None, "", "None")


class _PhillyJson:
    name = "Philly JSON"
    expects = "Philly JSON (a list of jobs with submitted_time and attempts)"

    def matches(self, head: Head) -> bool:
        return head.line.lstrip().startswith("[")

    def near_miss(self, head: Head) -> str | None:
        return None

    def read(self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals) -> Iterator[TraceJob]:
        text = "\n".join((head.line, *(line for _, line in lines)))
        for found, line in _items(text, head):
            try:
                yield _to_job(found, line)
            except OddRow as kind:
                refusals.add(str(kind), line)


def _items(text: str, head: Head) -> Iterator[tuple[Any, int]]:
    """The members of the list, with the lines that they begin on."""
    decoder = json.JSONDecoder()
    at, line, counted = text.index("[") + 1, head.number, 0
    while True:
        while at < len(text) and text[at] in " \t\n,":
            at += 1
        line, counted = line + text.count("\n", counted, at), at
        if at < len(text) and text[at] == "]":
            return
        try:
            found, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            where = f"{head.path}:{line + text.count(chr(10), counted, error.pos)}"
            raise UserError(f"{where}: the JSON ends or breaks here ({error.msg}); expected a list of jobs") from None
        yield found, line


def _to_job(found: Any, line: int) -> TraceJob:
    if not isinstance(found, dict) or not isinstance(found.get("attempts"), list):
        raise OddRow("no-attempts")
    attempts = [a for a in found["attempts"] if isinstance(a, dict)]
    if not attempts:
        raise OddRow("never-started")
    gpus = gpu_count(str(found["num_gpus"] if "num_gpus" in found else _gpus(attempts[0])))
    spans = [_span(attempt) for attempt in attempts]
    duration_s = sum(span for span in spans if span is not None)
    if all(span is None for span in spans):
        raise OddRow("no-duration")
    submitted = found.get("submitted_time")
    return TraceJob(
        submit_s=naive_time("" if submitted in _NO_TIME else str(submitted)),
        duration_s=duration_s,
        gpus=gpus,
        tenant=tenant_name(str(found.get("vc") or "")),
        clamped=attempts[-1].get("end_time") in _NO_TIME,
        attempts=len(attempts),
        line=line,
    )


def _gpus(attempt: dict[str, Any]) -> int:
    hosts = attempt.get("detail")
    if not isinstance(hosts, list):
        raise OddRow("no-gpus")
    return sum(len(host["gpus"]) for host in hosts if isinstance(host, dict) and isinstance(host.get("gpus"), list))


def _span(attempt: dict[str, Any]) -> float | None:
    start, end = attempt.get("start_time"), attempt.get("end_time")
    if start in _NO_TIME or end in _NO_TIME:
        return None
    span = naive_time(str(end)) - naive_time(str(start))
    if span < 0:
        raise OddRow("negative-duration")
    return span


FORMAT: Final = _PhillyJson()
