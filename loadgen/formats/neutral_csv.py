r"""The neutral CSV of this project: what `loadgen generate` writes and anybody can convert their own log to.

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
| `gpu_milli` | whole number | optional; thousandths of a GPU in all, `gpus` is that rounded up; empty: whole GPUs |
| `gpu_types` | `A` or `A\|B` | optional; types it may run on, empty: any |
| `queued_s` | seconds, >= 0 | optional; how long it waited in its own cluster |
| `attempts` | whole number, > 0 | optional; runs that `duration_s` is the sum of |
| `group` | text | optional; what like jobs have in common |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TextIO

from loadgen.jobs import TraceJob, gpus_of, tenant_name

from .base import HeaderCsv, OddRow, Row, duration, estimate, gpu_count, gpu_types, not_negative, number

COLUMNS: Final = (
    "job_id", "submit_s", "duration_s", "gpus", "tenant", "duration_clamped",
    "estimate_s", "gpu_milli", "gpu_types", "queued_s", "attempts", "group",
)  # fmt: skip
Cell = float | int | str | None
_ALWAYS: Final = 6
_REQUIRED: Final = 4


def _to_job(row: Row, line: int) -> TraceJob:
    submit_s = number(row["submit_s"], "bad-time" if row["submit_s"] else "no-time")
    if abs(submit_s) > 1e11:
        raise OddRow("bad-time")  # milliseconds or nanoseconds: years away from every other row
    gpus = gpu_count(row["gpus"])
    gpu_milli = number(row["gpu_milli"], "bad-gpu-milli") if row.get("gpu_milli") else None
    if gpu_milli is not None and not (gpus - 1) * 1000 < gpu_milli <= gpus * 1000:
        raise OddRow("bad-gpu-milli")
    return TraceJob(
        submit_s=submit_s,
        duration_s=duration(row["duration_s"]),
        gpus=gpus,
        gpu_milli=None if gpu_milli is None else gpus_of(gpu_milli)[1],
        tenant=tenant_name(row.get("tenant", "")),
        clamped=row.get("duration_clamped") == "1",
        estimate_s=estimate(row.get("estimate_s", "")),
        gpu_types=gpu_types(row.get("gpu_types", "")),
        queued_s=not_negative(row.get("queued_s", "")),
        attempts=int(estimate(row.get("attempts", "")) or 1) or 1,
        group=row.get("group", ""),
        line=line,
    )


FORMAT: Final = HeaderCsv(
    "neutral CSV",
    COLUMNS[:_REQUIRED],
    COLUMNS[_REQUIRED:],
    _to_job,
    plain=(
        ("submit_s", "submit_s", "epoch"),
        ("duration_s", "duration_s", "number"),
        ("gpus", "gpus", "gpus"),
        ("tenant", "tenant", "tenant"),
        ("clamped", "duration_clamped", "flag"),
        ("estimate_s", "estimate_s", "estimate"),
        ("gpu_milli", "gpu_milli", "empty"),
        ("gpu_types", "gpu_types", "one type"),
        ("queued_s", "queued_s", "number or none"),
        ("attempts", "attempts", "attempts"),
        ("group", "group", "text"),
    ),
)


def columns_of(jobs: Sequence[TraceJob]) -> tuple[str, ...]:
    """The columns that are always there, and those in which any job has something to say."""
    unset = _told(TraceJob(submit_s=0.0, duration_s=0.0, gpus=1, line=0))
    used = {name for job in jobs for name, value in _told(job).items() if value != unset[name]}
    return tuple(name for i, name in enumerate(COLUMNS) if i < _ALWAYS or name in used)


def _told(job: TraceJob) -> dict[str, Cell]:
    """The columns that are not always there."""
    return {
        "estimate_s": job.estimate_s,
        "gpu_milli": job.gpu_milli,
        "gpu_types": "|".join(job.gpu_types),
        "queued_s": job.queued_s,
        "attempts": job.attempts,
        "group": job.group,
    }


def values(job: TraceJob, prefix: str = "job") -> dict[str, Cell]:
    """One row, by column; None where nothing is told."""
    always: dict[str, Cell] = {
        "job_id": f"{prefix}-{job.index}",
        "submit_s": job.submit_s,
        "duration_s": job.duration_s,
        "gpus": job.gpus,
        "tenant": job.tenant,
        "duration_clamped": int(job.clamped),
    }
    return always | _told(job)


def write(jobs: Iterable[TraceJob], out: TextIO, prefix: str = "job") -> None:
    """Times to the millisecond; equal jobs give equal bytes. A column that no job needs is left out."""
    rows = list(jobs)
    columns = columns_of(rows)
    out.write(",".join(columns) + "\n")
    for job in rows:
        row = values(job, prefix)
        out.write(",".join(_cell(row[name]) for name in columns) + "\n")


def _cell(value: Cell) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = "" if value is None else str(value)
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in '",') else text
