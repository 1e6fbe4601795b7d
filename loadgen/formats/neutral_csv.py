"""The neutral CSV of this project: what `loadgen generate` writes and anybody can convert their own log to.

One header line, one job per line, comma-separated, UTF-8. Columns in any order; others are ignored.

| column | unit | |
|---|---|---|
| `job_id` | text | required; any name, for finding the job again |
| `submit_s` | seconds | required; epoch seconds, or seconds from any origin |
| `duration_s` | seconds, >= 0 | required; run time on its GPUs |
| `gpus` | whole number | required; 0 = CPU job, left out |
| `tenant` | text | optional; `default` if empty |
| `duration_clamped` | 0 or 1 | optional; 1: the true duration was longer |
| `estimate_s` | seconds, > 0 | optional; what the user said it would run, empty: nothing |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TextIO

from loadgen.jobs import TraceJob, tenant_name

from .base import HeaderCsv, OddRow, Row, duration, estimate, gpu_count, number

COLUMNS: Final = ("job_id", "submit_s", "duration_s", "gpus", "tenant", "duration_clamped", "estimate_s")


def _to_job(row: Row, line: int) -> TraceJob:
    submit_s = number(row["submit_s"], "bad-time" if row["submit_s"] else "no-time")
    if abs(submit_s) > 1e11:
        raise OddRow("bad-time")  # milliseconds or nanoseconds: years away from every other row
    return TraceJob(
        submit_s=submit_s,
        duration_s=duration(row["duration_s"]),
        gpus=gpu_count(row["gpus"]),
        tenant=tenant_name(row.get("tenant", "")),
        clamped=row.get("duration_clamped") == "1",
        estimate_s=estimate(row.get("estimate_s", "")),
        line=line,
    )


FORMAT: Final = HeaderCsv("neutral CSV", COLUMNS[:4], COLUMNS[4:], _to_job)


def write(jobs: Iterable[TraceJob], out: TextIO, prefix: str = "job") -> None:
    """Times to the millisecond; equal jobs give equal bytes. The column of estimates is there if any job has one."""
    rows = list(jobs)
    columns = COLUMNS if any(job.estimate_s is not None for job in rows) else COLUMNS[:-1]
    out.write(",".join(columns) + "\n")
    for job in rows:
        told = "" if job.estimate_s is None else f"{job.estimate_s:.3f}"
        cells = (f"{prefix}-{job.index}", f"{job.submit_s:.3f}", f"{job.duration_s:.3f}", str(job.gpus), job.tenant)
        out.write(",".join((*cells, str(int(job.clamped)), told)[: len(columns)]) + "\n")
