"""Alibaba's GPU trace of 2023 (openb): pods with shares of GPUs, and the nodes they ran on.

Pods: `name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,...,creation_time,deletion_time,scheduled_time`. `gpu_milli`
is per GPU and below 1000 only where `num_gpu` is 1; `num_gpu` 0 is a CPU pod; `gpu_spec` names the acceptable models
with `|` between them, empty for any. The `multigpu` variants have the first five columns only. Nodes:
`sn,cpu_milli,memory_mib,gpu,model`.

What a pod asks for and when it ran are read apart: the lists are workloads also where they have no times. `FORMAT`
reads the lists with times as a trace: submitted at its creation, run from `scheduled_time` to its deletion. A pod that
was never scheduled ran nowhere, although it has a deletion time. `Running` is what a pod was when the trace was taken,
and those deleted at its last moment had not ended: a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from loadgen.jobs import Refusals, TraceJob, tenant_name
from streamsched.core.model import WHOLE_GPU
from streamsched.errors import UserError

from .base import DELIMITER, Head, HeaderCsv, OddRow, Row, gpu_count, gpu_types, number, split

T = TypeVar("T")

_POD_COLUMNS: Final = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
_NODE_COLUMNS: Final = ("sn", "cpu_milli", "memory_mib", "gpu", "model")


class Pod(Struct, frozen=True):
    """What one pod asks for: `gpus` devices, `gpu_milli` thousandths of each. Empty `gpu_types`: any."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int
    gpu_types: tuple[str, ...] = ()


class Machine(Struct, frozen=True):
    node_id: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_type: str


def read_pods(path: Path) -> tuple[list[Pod], Refusals]:
    """Pods with GPUs in the order of the file, and the rows that are none. Raises UserError for an unusable file."""
    return _read(path, _POD_COLUMNS, _pod)


def read_machines(path: Path) -> tuple[list[Machine], Refusals]:
    """Nodes with GPUs in the order of the file, and the rows that are none. Raises UserError for an unusable file."""
    return _read(path, _NODE_COLUMNS, _machine)


def _read(path: Path, required: Iterable[str], to_value: Callable[[Row], T]) -> tuple[list[T], Refusals]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not text in UTF-8") from None
    header = split(lines[0]) if lines else []
    if missing := [name for name in required if name not in header]:
        raise UserError(f"{path}:1: no column {missing[0]!r}; expected {DELIMITER.join(required)}")
    values, refusals = [], Refusals()
    for place, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = split(line)
        try:
            if len(cells) != len(header):
                raise OddRow("missing-columns" if len(cells) < len(header) else "extra-columns")
            values.append(to_value(dict(zip(header, cells, strict=True))))
        except OddRow as kind:
            refusals.add(str(kind), place)
    if not values:
        raise UserError(f"{path}: no usable row; refused: {refusals.describe()}")
    return values, refusals


def _pod(row: Row) -> Pod:
    gpus = gpu_count(row["num_gpu"])
    gpu_milli = _whole_number(row["gpu_milli"], "bad-gpu-milli")
    if not 0 < gpu_milli <= WHOLE_GPU or (gpu_milli < WHOLE_GPU and gpus != 1):
        raise OddRow("bad-gpu-milli")
    return Pod(
        cpu_milli=_whole_number(row["cpu_milli"], "bad-cpu"),
        memory_mib=_whole_number(row["memory_mib"], "bad-memory"),
        gpus=gpus,
        gpu_milli=gpu_milli,
        gpu_types=gpu_types(row.get("gpu_spec", "")),
    )


def _machine(row: Row) -> Machine:
    if not row["sn"]:
        raise OddRow("no-name")
    if row["gpu"] == "0":
        raise OddRow("cpu-node")
    gpus = gpu_count(row["gpu"])
    if not row["model"]:
        raise OddRow("no-model")
    return Machine(
        node_id=row["sn"],
        cpu_milli=_whole_number(row["cpu_milli"], "bad-cpu"),
        memory_mib=_whole_number(row["memory_mib"], "bad-memory"),
        gpus=gpus,
        gpu_type=row["model"],
    )


def _whole_number(text: str, kind: str) -> int:
    value = number(text, kind)
    if value < 0 or value != int(value):
        raise OddRow(kind)
    return int(value)


@dataclass(frozen=True, slots=True)
class _PodList(HeaderCsv):
    def near_miss(self, head: Head) -> str | None:
        if {"name", *_POD_COLUMNS} <= set(split(head.line)):
            return (
                "openb pods without creation_time, deletion_time and scheduled_time (a multigpu list) never ran: "
                f"expected {','.join(self.required)}"
            )
        return HeaderCsv.near_miss(self, head)

    def read(self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals) -> Iterator[TraceJob]:
        jobs = list(HeaderCsv.read(self, head, lines, refusals))
        last = max((job.ended_s for job in jobs), default=0.0)
        for job in jobs:
            yield replace(job, clamped=False) if job.clamped and job.ended_s < last else job


def _to_job(row: Row, line: int) -> TraceJob:
    pod = _pod(row)
    created_s = number(row["creation_time"], "bad-time" if row["creation_time"] else "no-time")
    if not row["scheduled_time"]:
        raise OddRow("never-started")
    if not row["deletion_time"]:
        raise OddRow("not-finished")
    started_s, deleted_s = number(row["scheduled_time"], "bad-time"), number(row["deletion_time"], "bad-time")
    if deleted_s < started_s or started_s < created_s:
        raise OddRow("negative-duration" if deleted_s < started_s else "started-before-submission")
    return TraceJob(
        submit_s=created_s,
        duration_s=deleted_s - started_s,
        gpus=pod.gpus,
        gpu_milli=pod.gpu_milli if pod.gpu_milli < WHOLE_GPU else None,
        gpu_types=pod.gpu_types,
        tenant=tenant_name(row.get("qos", "")),
        queued_s=started_s - created_s,
        clamped=row.get("pod_phase") == "Running",  # as far as one row can tell; `read` sees them all
        line=line,
    )


FORMAT: Final = _PodList(
    "openb pods CSV",
    ("name", *_POD_COLUMNS, "creation_time", "deletion_time", "scheduled_time"),
    ("gpu_spec", "qos", "pod_phase"),
    _to_job,
)
