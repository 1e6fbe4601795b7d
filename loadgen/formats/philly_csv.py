"""Microsoft Philly as CSV (from msr-fiddle/philly-traces by petuum/adaptdl): `timestamp,duration,num_gpus,...,cluster`.

`timestamp` is the submission in local time without a zone; `duration` the sum of the attempts in seconds, a float in
text, up to 53 days; `cluster` the virtual cluster. Rows are not sorted, and equal rows are different jobs.
"""

from __future__ import annotations

from typing import Final

from loadgen.jobs import TraceJob, tenant_name

from .base import HeaderCsv, Row, duration, gpu_count, naive_time


def _to_job(row: Row, line: int) -> TraceJob:
    return TraceJob(
        submit_s=naive_time(row["timestamp"]),
        duration_s=duration(row["duration"]),
        gpus=gpu_count(row["num_gpus"]),
        tenant=tenant_name(row["cluster"]),
        line=line,
    )


FORMAT: Final = HeaderCsv(
    "Philly CSV",
    ("timestamp", "duration", "num_gpus", "cluster"),
    (),
    _to_job,
    plain=(
        ("submit_s", "timestamp", "naive time"),
        ("duration_s", "duration", "number"),
        ("gpus", "num_gpus", "gpus"),
        ("tenant", "cluster", "tenant"),
    ),
)
