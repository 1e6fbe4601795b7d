"""The file with one row per job: CSV, or Parquet by polars (extra `trace`)."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from streamsched.errors import UserError

from .metrics import Schedule

COLUMNS: Final = ("job", "submit_s", "run_s", "gpus", "tenant", "start_s", "finish_s", "preemptions")
"""`job`: place in the trace's slice; `start_s`: of the first run. A job that never ran has no start and finish."""

Writer = Callable[[Path, Schedule], None]


def jobs_writer(kind: Literal["csv", "parquet"]) -> Writer:
    """Raises UserError where the package for it is missing: before anything is simulated."""
    if kind == "csv":
        return write_csv
    try:
        polars = importlib.import_module("polars")
    except ModuleNotFoundError:
        raise UserError("--jobs-format parquet needs polars: pip install 'streamsched[trace]'") from None
    return lambda path, schedule: _write_parquet(polars, path, schedule)


def write_csv(path: Path, schedule: Schedule) -> None:
    """Rows in order of submission; floats as Python writes them, so that none is rounded."""
    columns = [[_text(value) for value in column] for column in _columns(schedule).values()]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(zip(*columns, strict=True))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _text(value: Any) -> Any:
    if isinstance(value, float):
        return repr(value)
    return "" if value is None else value


def _write_parquet(polars: Any, path: Path, schedule: Schedule) -> None:
    kinds = {float: polars.Float64, int: polars.Int64, str: polars.String}
    types = dict(zip(COLUMNS, (kinds[k] for k in (int, float, float, int, str, float, float, int)), strict=True))
    try:
        polars.DataFrame(_columns(schedule), schema=types).write_parquet(path, compression="zstd")
    except (OSError, polars.exceptions.PolarsError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"{path}: {reason}") from None


def _columns(schedule: Schedule) -> dict[str, list[Any]]:
    def known(times: np.ndarray[Any, np.dtype[np.float64]]) -> list[float | None]:
        return [None if time != time else time for time in times.tolist()]

    found = (
        list(range(len(schedule.gpus))),
        schedule.submit_s.tolist(),
        schedule.run_s.tolist(),
        schedule.gpus.tolist(),
        list(schedule.tenants),
        known(schedule.start_s),
        known(schedule.finish_s),
        schedule.preemptions.tolist(),
    )
    return dict(zip(COLUMNS, found, strict=True))
