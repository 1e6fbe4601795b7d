"""The columns of the neutral CSV as Parquet, by polars (extra `trace`).

Same columns, same rules: a cell is read as what it would be in CSV, so that null is an empty cell. Numbers have to be
numbers in the file's schema; `duration_clamped` may be a boolean. A job's line is its row, from 1: there is no header.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from loadgen.jobs import Refusals, TraceJob
from loadgen.text import INSTALL
from streamsched.errors import UserError

from .base import OddRow
from .neutral_csv import COLUMNS, FORMAT, columns_of, values

NAME: Final = "neutral Parquet"
MAGIC: Final = b"PAR1"
_TEXT: Final = frozenset({"tenant", "gpu_types", "group"})
_WHOLE: Final = frozenset({"gpus", "duration_clamped", "gpu_milli", "attempts"})
_UNREAD: Final = "job_id"
"""Has to be there, and may be of any type."""


def is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # whoever reads it as text tells why


def polars_for(path: Path, doing: str) -> ModuleType:
    try:
        import polars
    except ImportError:
        raise UserError(f"{path}: {doing} Parquet needs the extra `trace`: {INSTALL}") from None
    return polars


def read(path: Path, refusals: Refusals) -> Iterator[TraceJob]:
    """Jobs in the order of the file; raises UserError where the file or its columns cannot be used."""
    polars = polars_for(path, "reading")
    refusals.unit = refusals.notes.unit = "row"
    rows, columns = _cells(path, polars)
    for number, cells in enumerate(rows, start=1):
        try:
            yield FORMAT.to_job(dict(zip(columns, cells, strict=True)), number)
        except OddRow as kind:
            refusals.add(str(kind), number)


def write(jobs: Iterable[TraceJob], path: Path, prefix: str = "job") -> None:
    """What `neutral_csv.write` writes: times to the millisecond, no column that no job needs."""
    polars = polars_for(path, "writing")
    rows = list(jobs)
    columns = columns_of(rows)
    cells = [values(job, prefix) for job in rows]
    frame = polars.DataFrame(
        {name: [_rounded(row[name]) for row in cells] for name in columns},
        schema={name: _type(polars, name) for name in columns},
    )
    packed = io.BytesIO()
    frame.write_parquet(packed, compression="zstd")
    try:
        path.write_bytes(packed.getbuffer())
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _rounded(value: float | int | str | None) -> float | int | str | None:
    return round(value, 3) if isinstance(value, float) else value


def _type(polars: ModuleType, name: str) -> Any:
    if name in _TEXT or name == _UNREAD:
        return polars.String
    return polars.Int64 if name in _WHOLE else polars.Float64


def _cells(path: Path, polars: ModuleType) -> tuple[Iterator[tuple[str, ...]], list[str]]:
    """(rows of cells as text, their columns)."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if not data.endswith(MAGIC) or len(data) < 3 * len(MAGIC):
        raise UserError(
            f"{path}: the Parquet data are cut: expected {MAGIC.decode()} at the end of {len(data):,} bytes"
        )
    # Bytes, not the path: polars takes `*` in a path for a pattern.
    broken = (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError, ValueError)
    try:
        schema = polars.read_parquet_schema(io.BytesIO(data))
        _check(path, schema, polars)
        columns = [name for name in COLUMNS if name in schema and name != _UNREAD]
        frame = polars.read_parquet(io.BytesIO(data), columns=columns)
        texts = [[_text(value) for value in frame[name].to_list()] for name in columns]
    except broken as error:
        words = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: damaged Parquet file ({words}); expected a whole one") from None
    return zip(*texts, strict=True), columns


def _check(path: Path, schema: Any, polars: ModuleType) -> None:
    if missing := [name for name in FORMAT.required if name not in schema]:
        found = ", ".join(schema) or "none"
        found = found if len(found) <= 80 else found[:77] + "..."
        raise UserError(
            f"{path}: Parquet without {', '.join(missing)} (found: {found}); "
            f"expected the columns {', '.join(FORMAT.required)} and optionally {', '.join(FORMAT.optional)}"
        )
    for name in COLUMNS:
        kind = schema.get(name)
        if kind is None or kind == polars.Null or name == _UNREAD:
            continue
        if name in _TEXT:
            fits = kind.is_integer() or kind in (polars.String, polars.Categorical, polars.Enum)
        else:
            fits = kind.is_numeric() or (name == "duration_clamped" and kind == polars.Boolean)
        if not fits:
            raise UserError(f"{path}: column {name!r} is {kind}; expected {'text' if name in _TEXT else 'numbers'}")


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return " ".join(value.splitlines()).strip()  # in CSV it could not have line breaks
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))  # `duration_clamped` 1.0
    return str(value)
