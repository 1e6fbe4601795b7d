"""The file with one row per job: CSV, or Parquet by polars (extra `trace`)."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np

from streamsched.errors import UserError

from .metrics import Schedule

COLUMNS: Final = ("job", "submit_s", "run_s", "gpus", "tenant", "start_s", "finish_s", "preemptions")
"""`job`: place in the trace's slice; `start_s`: of the first run. A job that never ran has no start and finish."""

Encoder = Callable[[Schedule], bytes]


def jobs_encoder(kind: Literal["csv", "parquet"]) -> Encoder:
    """Raises UserError where the package for it is missing: before anything is simulated."""
    if kind == "csv":
        return as_csv
    try:
        polars = importlib.import_module("polars")
    except ModuleNotFoundError:
        raise UserError("--jobs-format parquet needs polars: pip install 'streamsched[trace]'") from None
    return lambda schedule: _as_parquet(polars, schedule)


def as_csv(schedule: Schedule) -> bytes:
    """Rows in order of submission; floats as Python writes them, so that none is rounded."""
    columns = [[_text(value) for value in column] for column in _columns(schedule).values()]
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(zip(*columns, strict=True))
    return file.getvalue().encode()


def _text(value: Any) -> Any:
    if isinstance(value, float):
        return repr(value)
    return "" if value is None else value


def _as_parquet(polars: Any, schedule: Schedule) -> bytes:
    kinds = {float: polars.Float64, int: polars.Int64, str: polars.String}
    types = dict(zip(COLUMNS, (kinds[k] for k in (int, float, float, int, str, float, float, int)), strict=True))
    file = io.BytesIO()
    polars.DataFrame(_columns(schedule), schema=types).write_parquet(file, compression="zstd")
    return file.getvalue()


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
