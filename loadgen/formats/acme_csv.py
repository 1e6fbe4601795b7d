"""Shanghai AI Lab's Acme: `trace_seren.csv` (+08:00) and `trace_kalos.csv` (+00:00, more columns).

Times carry their offset. `duration` is not read: in Kalos it is end - submit, queue included, so the run time is taken
from the timestamps. `gpu_num` 0 is a CPU job. A job that was RUNNING when the log was taken has no end.
"""

from __future__ import annotations

from typing import Final

from loadgen.jobs import TraceJob, tenant_name

from .base import HeaderCsv, OddRow, Row, gpu_count, zoned_time

_FINISHED: Final = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"})
_UNFINISHED: Final = frozenset({"RUNNING", "SUSPENDED", "PENDING"})


def _to_job(row: Row, line: int) -> TraceJob:
    gpus = gpu_count(row["gpu_num"])
    if row["state"] not in _FINISHED:
        raise OddRow("not-finished" if row["state"] in _UNFINISHED else "unknown-state")
    if not row["start_time"]:
        raise OddRow("never-started")
    duration_s = zoned_time(row["end_time"]) - zoned_time(row["start_time"])
    if duration_s < 0:
        raise OddRow("negative-duration")
    return TraceJob(
        submit_s=zoned_time(row["submit_time"]),
        duration_s=duration_s,
        gpus=gpus,
        tenant=tenant_name(row["user"]),
        line=line,
    )


FORMAT: Final = HeaderCsv(
    "Acme trace CSV",
    ("user", "node_num", "gpu_num", "type", "state", "submit_time", "start_time", "end_time", "gpu_time"),
    (),
    _to_job,
)
