"""Clean comma-separated traces by column, with polars; everything else is left to the reader of lines.

The results are those of the reader of lines: a cell is converted here only if it matches a pattern that both take to be
the same value. A row with any other cell goes to its format's own `to_job` with its line number, and a file in which
rows are not plainly what lies between line ends (quotes, NUL, lone CR, blank lines, ragged rows) is not read here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .formats.base import ColumnKind, Format, Head, HeaderCsv, OddRow, split
from .jobs import Refusals, TraceJob
from .text import LINE_MAX, bytes_of

if TYPE_CHECKING:
    import polars

WORTH_BYTES = 1 << 21
"""Of a smaller file, importing polars takes longer than reading it by lines."""
_TIME: Final = r"^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-5][0-9]$"
_NUMBER: Final = r"^[0-9]{1,9}(\.[0-9]{1,6})?$"
"""At most 15 digits, and far below the bounds of all formats."""
_WHOLE: Final = r"^[1-9][0-9]{0,4}$"
_TENANT: Final = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,252}$"
_TYPE: Final = r"^[A-Za-z0-9._-]*$"
_TEXT: Final = r"^([!-~]([ -~]*[!-~])?)?$"
Column = tuple["polars.Expr", "polars.Expr"]
"""(whether the cell is plain, its value if it is)."""


def read(path: Path, head: Head, format: Format, refusals: Refusals) -> list[TraceJob] | None:
    """Jobs in the order of the file; None, and no refusal, where it has to be read by lines."""
    if not isinstance(format, HeaderCsv) or not format.plain:
        return None
    header = split(head.line, format.delimiter)
    if any(header.count(name) > 1 for name in format.required):
        return None
    try:
        import polars
    except ImportError:
        return None
    body = _clean(path, len(header))
    if body is None:
        return None
    places = {name: header.index(name) for name in format.required + format.optional if name in header}
    try:
        cells = polars.read_csv(
            body,
            has_header=False,
            columns=sorted(places.values()),
            separator=format.delimiter,
            quote_char=None,
            infer_schema=False,
        ).fill_null("")
        cells.columns = sorted(places, key=places.__getitem__)
        if cells.height != body.count(b"\n") + 1:
            return None
        told = [(field, name, kind) for field, name, kind in format.plain if name in places]
        columns = {field: _KINDS[kind](polars, polars.col(name)) for field, name, kind in told}
        table = cells.select(
            polars.all_horizontal(plain for plain, _ in columns.values()).fill_null(False).alias("plain"),
            polars.int_range(2, polars.len() + 2).alias("line"),
            *(value.alias(field) for field, (_, value) in columns.items()),
        )
        jobs = _jobs(table.filter(polars.col("plain")))
        odd = cells.with_columns(table["line"].alias("/line")).filter(~table["plain"]).rows()
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException):
        return None
    if not odd:
        return jobs
    names = cells.columns
    for *texts, line in odd:
        try:
            jobs.append(format.to_job(dict(zip(names, map(str.strip, texts), strict=True)), line))
        except OddRow as kind:
            refusals.add(str(kind), line)
    jobs.sort(key=operator.attrgetter("line"))
    return jobs


def _clean(path: Path, columns: int) -> bytes | None:
    """The rows below the header with \\n between them, if each has this many columns; None if they need more care."""
    data = bytes_of(path)
    if data is None or b'"' in data or b"\0" in data:
        return None
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
        if b"\r" in data:
            return None
    data = data.rstrip(b"\n")
    try:
        data.decode()
    except UnicodeDecodeError:
        return None
    marks = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(marks == ord("\n"))
    if not len(ends):
        return None  # no row
    starts = np.concatenate([[0], ends + 1])
    if np.diff(starts, append=len(data) + 1).max() >= LINE_MAX:
        return None
    commas = np.add.reduceat((marks == ord(",")).view(np.uint8), starts, dtype=np.intp)
    if (commas != columns - 1).any():
        return None  # blank lines before the header too
    return data[starts[1] :]


def _jobs(table: polars.DataFrame) -> list[TraceJob]:
    """As many as rows; what the file does not tell is a `repeat`, which has no end."""

    def column(field: str, default: object) -> Iterable[Any]:
        return table[field].to_list() if field in table.columns else repeat(default)

    always = (
        table["submit_s"].to_list(),
        table["duration_s"].to_list(),
        table["gpus"].to_list(),
        table["line"].to_list(),
        column("tenant", "default"),
        column("clamped", False),
    )
    if not {"estimate_s", "gpu_types", "queued_s", "attempts", "group"} & set(table.columns):
        return [
            TraceJob(submit_s=submit_s, duration_s=duration_s, gpus=gpus, line=line, tenant=tenant, clamped=clamped)
            for submit_s, duration_s, gpus, line, tenant, clamped in zip(*always, strict=False)
        ]
    more = (
        column("estimate_s", None),
        column("gpu_types", ""),
        column("queued_s", None),
        column("attempts", 1),
        column("group", ""),
    )
    return [
        TraceJob(
            submit_s=submit_s,
            duration_s=duration_s,
            gpus=gpus,
            line=line,
            tenant=tenant,
            clamped=clamped,
            estimate_s=estimate_s,
            gpu_types=(kind,) if kind else (),
            queued_s=queued_s,
            attempts=attempts,
            group=group,
        )
        for submit_s, duration_s, gpus, line, tenant, clamped, estimate_s, kind, queued_s, attempts, group in zip(
            *always, *more, strict=False
        )
    ]


def _naive_time(polars: Any, cell: Any) -> Column:
    moment = (
        polars.when(cell.str.contains(_TIME))
        .then(cell)
        .str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False, time_unit="us")
    )
    return moment.is_not_null(), moment.dt.epoch("s").cast(polars.Float64)


def _matching(pattern: str, type: str) -> Callable[[Any, Any], Column]:
    def column(polars: Any, cell: Any) -> Column:
        plain = cell.str.contains(pattern)
        return plain, polars.when(plain).then(cell).cast(getattr(polars, type), strict=False)

    return column


def _or_empty(pattern: str, type: str, empty: object) -> Callable[[Any, Any], Column]:
    def column(polars: Any, cell: Any) -> Column:
        plain = cell.str.contains(pattern)
        value = polars.when(plain).then(cell).cast(getattr(polars, type), strict=False)
        return plain | (cell == ""), polars.when(cell == "").then(polars.lit(empty)).otherwise(value)

    return column


def _flag(polars: Any, cell: Any) -> Column:
    return cell.str.contains("^[01]?$"), cell == "1"


def _estimate(polars: Any, cell: Any) -> Column:
    plain, value = _or_empty(_NUMBER, "Float64", None)(polars, cell)
    return plain, polars.when(value > 0).then(value)


def _empty(polars: Any, cell: Any) -> Column:
    return cell == "", polars.lit(None)


_KINDS: Final[dict[ColumnKind, Callable[[Any, Any], Column]]] = {
    "naive time": _naive_time,
    "number": _matching(_NUMBER, "Float64"),
    "epoch": _matching(r"^[0-9]{1,10}(\.[0-9]{1,5})?$", "Float64"),
    "gpus": _matching(_WHOLE, "Int64"),
    "tenant": _or_empty(_TENANT, "String", "default"),
    "flag": _flag,
    "estimate": _estimate,
    "number or none": _or_empty(_NUMBER, "Float64", None),
    "attempts": _or_empty(_WHOLE, "Int64", 1),
    "one type": _matching(_TYPE, "String"),
    "text": _matching(_TEXT, "String"),
    "empty": _empty,
}
