"""Alibaba's GPU trace of 2023 (openb): pods with shares of GPUs, and the nodes they ran on.

Pods: `name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,...,creation_time,deletion_time,scheduled_time`. `gpu_milli`
is per GPU and below 1000 only where `num_gpu` is 1; `num_gpu` 0 is a CPU pod; `gpu_spec` names the acceptable models
with `|` between them, empty for any. The `multigpu` variants have the first five columns only. Nodes:
`sn,cpu_milli,memory_mib,gpu,model`.

What a pod asks for and when it ran are read apart: the lists are workloads also where they have no times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct

from loadgen.jobs import Refusals
from streamsched.core.model import WHOLE_GPU
from streamsched.errors import UserError

from .base import DELIMITER, OddRow, Row, gpu_count, number, split

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
        gpu_types=tuple(sorted(set(filter(None, row.get("gpu_spec", "").split("|"))))),
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
