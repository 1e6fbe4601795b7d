"""What benchmarks run on: which of their cases, the traces, and where they print."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

SLICES = {
    "philly-4w": ("philly/philly_jobs_until_2017-11-15.csv", "2017-10-02", "2017-10-30", 80),
    "venus-4w": ("helios-venus/venus_gpu_jobs_until_2020-07-31.csv", "2020-06-29", "2020-07-27", 84),
}
"""scenarios/*.toml: trace, submitted from, submitted before, nodes of eight GPUs."""


def console(width: int) -> Console:
    """`width`: in characters, where the output is no terminal."""
    return Console(width=None if Console().is_terminal else width)


def chosen(benchmark: str, known: Iterable[str], on: Console) -> list[str]:
    """Cases by STREAMSCHED_BENCH_CASES (a list with commas; all), in their order. A name that is none is told."""
    cases = list(known)
    wanted = [name.strip() for name in (os.environ.get("STREAMSCHED_BENCH_CASES") or ",".join(cases)).split(",")]
    if unknown := [name for name in wanted if name not in cases]:
        on.print(f"{benchmark}: no case {', '.join(unknown)}; there are {', '.join(cases)}", markup=False)
    return [name for name in cases if name in wanted]


def traces() -> Path:
    """STREAMSCHED_TRACES, else beside the repository."""
    return Path(os.environ.get("STREAMSCHED_TRACES") or Path(__file__).resolve().parents[2] / "shared" / "traces")


def trace(name: str, path: str, on: Console) -> Path | None:
    """A file or folder of the traces; None, which is told, where it is not there: `name` is left out."""
    found = traces() / path
    if found.exists():
        return found
    on.print(f"{name}: left out, no {found} (STREAMSCHED_TRACES)", markup=False)
    return None
