"""Trace formats. Each module says by the content of a file whether it is its own, and reads it.

To add one: a module with a `FORMAT` that has the shape of `base.Format`, and its entry in `FORMATS`. More specific
formats come first.
"""

from __future__ import annotations

from typing import Final

from . import acme_csv, helios_csv, neutral_csv, openb_csv, pai_csv, philly_csv, philly_json, slurm, swf
from .base import Format, Head

FORMATS: Final[tuple[Format, ...]] = (
    philly_csv.FORMAT,
    philly_json.FORMAT,
    helios_csv.OFFICIAL,
    helios_csv.DERIVED,
    acme_csv.FORMAT,
    slurm.SACCT,
    slurm.JOBCOMP,
    swf.FORMAT,
    openb_csv.FORMAT,
    pai_csv.DERIVED,
    pai_csv.JOBS,
    pai_csv.TASKS,
    pai_csv.INSTANCES,
    pai_csv.TAGS,
    neutral_csv.FORMAT,
)

__all__ = ["FORMATS", "Format", "Head"]
