"""SenseTime Helios: the official `cluster_log.csv`, and the derived table of one cluster's GPU jobs.

Official: `job_id,user,vc,gpu_num,...,state,submit_time,...,duration,queue`; `duration` is end - start in seconds, a
`gpu_num` of 0 is a CPU job, times are local (China) without a zone. A job that was RUNNING or SUSPENDED when the log
was taken has no final duration and is left out; every other end (CANCELLED, FAILED, TIMEOUT, NODE_FAIL) used its GPUs.
Derived: `job_id,...,submit_time,duration,gpu_num,duration_clamped`; `duration_clamped` 1: the duration was cut at 48 h.
"""

from __future__ import annotations

from typing import Final

from loadgen.jobs import TraceJob, tenant_name

from .base import HeaderCsv, OddRow, Row, duration, gpu_count, naive_time

_FINISHED: Final = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"})
_UNFINISHED: Final = frozenset({"RUNNING", "SUSPENDED", "PENDING"})


def _official(row: Row, line: int) -> TraceJob:
    gpus = gpu_count(row["gpu_num"])
    if row["state"] not in _FINISHED:
        raise OddRow("not-finished" if row["state"] in _UNFINISHED else "unknown-state")
    return TraceJob(
        submit_s=naive_time(row["submit_time"]),
        duration_s=duration(row["duration"]),
        gpus=gpus,
        tenant=tenant_name(row["vc"]),
        line=line,
    )


def _derived(row: Row, line: int) -> TraceJob:
    return TraceJob(
        submit_s=naive_time(row["submit_time"]),
        duration_s=duration(row["duration"]),
        gpus=gpu_count(row["gpu_num"]),
        clamped=row["duration_clamped"] == "1",
        line=line,
    )


OFFICIAL: Final = HeaderCsv(
    "Helios cluster_log.csv", ("vc", "gpu_num", "state", "submit_time", "duration", "queue"), (), _official
)
DERIVED: Final = HeaderCsv(
    "Helios GPU jobs CSV",
    ("submit_time", "duration", "gpu_num", "duration_clamped"),
    (),
    _derived,
    plain=(
        ("submit_s", "submit_time", "naive time"),
        ("duration_s", "duration", "number"),
        ("gpus", "gpu_num", "gpus"),
        ("clamped", "duration_clamped", "flag"),
    ),
)
