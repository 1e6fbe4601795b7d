"""Lists of machines that come with traces, as the text that `streamsched simulate --nodes` takes.

| list | known by |
|---|---|
| Philly `cluster_machine_list`, `revised_machine_list.csv` | `machineId`, `number of GPUs`; maybe `single GPU mem` |
| Alibaba openb v2023 nodes | `sn`, `gpu`, `model` |
| Alibaba PAI v2020 `pai_machine_spec.csv` | five cells, the last three numbers, with or without a header |

Philly tells no types; what memory its GPUs have is one only to who says so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec.structs import asdict

from streamsched.errors import UserError
from streamsched.sim.nodes import ANY, GPUS_MAX, NodeGroup, as_text, check_size

from .formats.base import OddRow, number, split
from .jobs import Tally
from .text import numbered, text_of


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where in a row things are. None: not there."""

    name: str
    cells: int
    machine: int
    gpus: int
    gpu_type: int | None = None
    memory: int | None = None


@dataclass(slots=True)
class Machines:
    path: str
    format: str
    groups: tuple[NodeGroup, ...] = ()
    """By type and GPUs."""
    without_gpus: int = 0
    refusals: Tally = field(default_factory=Tally)
    renamed: dict[str, str] = field(default_factory=dict)
    """Types with characters that `--nodes` does not take, and what they became."""

    @property
    def nodes(self) -> str:
        return as_text(self.groups)

    def left_out(self) -> list[str]:
        """Sentences for people on what `nodes` does not tell."""
        told = []
        if self.without_gpus:
            told.append(f"left out without GPUs: {self.without_gpus:,}")
        if self.refusals.total:
            told.append(f"refused rows: {self.refusals.describe()}")
        told += [f"type {name!r} is written as {fit}" for name, fit in sorted(self.renamed.items())]
        return told

    def to_json(self) -> str:
        told = {
            "path": self.path,
            "format": self.format,
            "nodes": self.nodes,
            "machines": sum(group.count for group in self.groups),
            "gpus": sum(group.count * group.gpus for group in self.groups),
            "groups": [asdict(group) for group in self.groups],
            "without_gpus": self.without_gpus,
            "renamed": dict(sorted(self.renamed.items())),
            "refused": [
                {"kind": kind, "count": count, "lines": self.refusals.lines[kind]}
                for kind, count in sorted(self.refusals.count.items())
            ],
        }
        return json.dumps(told, indent=2) + "\n"


def read(path: Path, memory_as_type: bool = False) -> Machines:
    """`memory_as_type`: take the memory of a list that tells it for the type of its GPUs."""
    with text_of(path) as file:
        lines = numbered(file, str(path))
        layout, first = _begin(lines, path)
        if memory_as_type and layout.memory is None:
            raise UserError(f"{path}: {layout.name} tell no memory of GPUs to take for their type")
        found = Machines(str(path), layout.name)
        counts: Counter[tuple[str, int]] = Counter()
        seen: set[str] = set()
        for place, line in (*first, *lines):
            if not line.strip():
                continue
            try:
                machine, gpus, told = _row(split(line), layout, layout.memory if memory_as_type else layout.gpu_type)
                if machine in seen:
                    raise OddRow("repeated-machine")
            except OddRow as kind:
                found.refusals.add(str(kind), place)
                continue
            seen.add(machine)
            if not gpus:
                found.without_gpus += 1
                continue
            fit = _fit(told)
            if fit != told:
                found.renamed[told] = fit
            counts[fit, gpus] += 1
    found.groups = tuple(NodeGroup(count, gpus, kind) for (kind, gpus), count in sorted(counts.items()))
    _check(found)
    return found


def _begin(lines: Iterator[tuple[int, str]], path: Path) -> tuple[_Layout, list[tuple[int, str]]]:
    """How rows are laid out, and the first line if it is one of them."""
    for place, line in lines:
        if "\0" in line:
            raise UserError(f"{path}:{place}: not a text file; expected a list of machines in CSV")
        if not line.strip():
            continue
        cells = split(line)
        if layout := _by_header(cells):
            return layout, []
        if len(cells) == 5 and all(_is_number(cell) for cell in cells[2:]):
            return _PAI, [(place, line)]
        found = line if len(line) <= 80 else line[:77] + "..."
        raise UserError(
            f"{path}:{place}: no known list of machines begins with {found!r}; expected the columns of Philly "
            "(machineId,number of GPUs), of openb nodes (sn,gpu,model) or of PAI machines "
            "(machine,gpu_type,cap_cpu,cap_mem,cap_gpu)"
        )
    raise UserError(f"{path}: is empty; expected a list of machines in CSV")


_PAI: Final = _Layout("PAI machines", cells=5, machine=0, gpu_type=1, gpus=4)


def _by_header(cells: list[str]) -> _Layout | None:
    at = {cell: place for place, cell in enumerate(cells)}
    if {"machineId", "number of GPUs"} <= at.keys():
        return _Layout(
            "Philly machines",
            cells=len(cells),
            machine=at["machineId"],
            gpus=at["number of GPUs"],
            memory=at.get("single GPU mem"),
        )
    if {"sn", "gpu", "model"} <= at.keys():
        return _Layout("openb nodes", cells=len(cells), machine=at["sn"], gpus=at["gpu"], gpu_type=at["model"])
    if {"machine", "gpu_type", "cap_gpu"} <= at.keys():
        return _Layout(_PAI.name, cells=len(cells), machine=at["machine"], gpus=at["cap_gpu"], gpu_type=at["gpu_type"])
    return None


def _row(cells: list[str], layout: _Layout, type_at: int | None) -> tuple[str, int, str]:
    """(machine, GPUs, their type)."""
    if len(cells) != layout.cells:
        raise OddRow("missing-columns" if len(cells) < layout.cells else "extra-columns")
    machine, text = cells[layout.machine], cells[layout.gpus]
    if not machine:
        raise OddRow("no-name")
    gpus = number(text, "bad-gpus" if text else "no-gpus")
    if not 0 <= gpus <= GPUS_MAX or gpus != int(gpus):
        raise OddRow("bad-gpus")
    told = ANY if type_at is None else cells[type_at]
    if gpus and not told:
        raise OddRow("no-type")
    return machine, int(gpus), told


def _fit(gpu_type: str) -> str:
    """With the characters that `--nodes` takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", gpu_type).strip("._-") or ANY


def _is_number(text: str) -> bool:
    try:
        number(text, "")
    except OddRow:
        return False
    return True


def _check(found: Machines) -> None:
    if not found.groups:
        raise UserError(
            f"{found.path}: no machine with GPUs; without: {found.without_gpus:,}; "
            f"refused rows: {found.refusals.describe()}"
        )
    check_size(found.groups, found.path)
