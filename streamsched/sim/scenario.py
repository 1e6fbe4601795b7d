"""Scenario files: a slice of a trace and a cluster, in TOML (../shared/scenarios has the standard ones)."""

from __future__ import annotations

import math
import os
import tomllib
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct

from streamsched.errors import UserError

from .nodes import ANY, NodeGroup, check_size


class Scenario(Struct, frozen=True, kw_only=True):
    name: str
    trace: Path
    nodes: tuple[NodeGroup, ...]
    node_list: Path | None = None
    """Nodes one by one, in the format of Alibaba's openb lists, where they are not in `nodes`."""
    submitted_from: float | None = None
    submitted_before: float | None = None
    """Epoch seconds, as the trace's own clock read."""


def read_toml(path: Path) -> dict[str, Any]:
    """Raises UserError that names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        raise UserError(f"{path}: is no TOML file: {error}") from None


def read_scenario(path: Path) -> Scenario:
    """Raises UserError that names the file and what is wrong with it."""
    told = read_toml(path)
    known = ("trace", "nodes", "node_list", "submitted_from", "submitted_before", "clusters", "throughputs", "seed")
    if unknown := sorted(set(told) - set(known)):
        raise UserError(f"{path}: unknown key `{unknown[0]}`; there are {', '.join(known[:5])}")
    for key in ("clusters", "throughputs"):
        if key in told:
            raise UserError(f"{path}: `{key}` is not supported by `simulate` yet; one cluster of like jobs is")
    if "trace" not in told or ("nodes" in told) == ("node_list" in told):
        raise UserError(f"{path}: expected `trace`, and `nodes` or `node_list`")
    return Scenario(
        name=path.stem,
        trace=_file(path, "trace", told["trace"]),
        nodes=_groups(path, told["nodes"]) if "nodes" in told else (),
        node_list=_file(path, "node_list", told["node_list"]) if "node_list" in told else None,
        submitted_from=_moment(path, told, "submitted_from"),
        submitted_before=_moment(path, told, "submitted_before"),
    )


def _file(path: Path, key: str, name: Any) -> Path:
    """Relative names are in $STREAMSCHED_TRACES, else in `traces` beside the scenario's folder, else beside it."""
    if not isinstance(name, str) or not name:
        raise UserError(f"{path}: `{key}` has to be the name of a file")
    folders = [path.parent / ".." / "traces", path.parent]
    if given := os.environ.get("STREAMSCHED_TRACES"):
        folders.insert(0, Path(given))
    for folder in folders:
        if _is_file(folder / name):
            return folder / name
    raise UserError(f"{path}: no {key} {name} in {', '.join(map(str, folders))}; STREAMSCHED_TRACES names the folder")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name of a file at all
        return False


def _groups(path: Path, told: Any) -> tuple[NodeGroup, ...]:
    groups = []
    for group in told if isinstance(told, list) else [None]:
        match group:
            case {"count": bool()} | {"gpus": bool()}:
                raise UserError(f"{path}: `nodes`: `count` and `gpus` have to be numbers")
            case {"count": int(count), "gpus": int(gpus), **more} if count > 0 and gpus > 0:
                groups.append(NodeGroup(count=count, gpus=gpus, gpu_type=str(more.get("gpu_type", ANY))))
            case _:
                raise UserError(f"{path}: `nodes` has to be a list of {{ count = N, gpus = N, gpu_type = NAME }}")
    if not groups:
        raise UserError(f"{path}: `nodes` is empty")
    check_size(groups, str(path))
    return tuple(groups)


def _moment(path: Path, told: dict[str, Any], key: str) -> float | None:
    match told.get(key):
        case None:
            return None
        case datetime() as moment:
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        case date() as day:
            return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
        case int() | float() as seconds if not isinstance(seconds, bool) and math.isfinite(seconds):
            return float(seconds)
    raise UserError(f"{path}: `{key}` has to be a date, a time or epoch seconds")
