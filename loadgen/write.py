"""Jobs as a trace file of the neutral columns; what kind of file is told by the end of its name."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from streamsched.errors import UserError

from .formats import neutral_csv, neutral_parquet
from .jobs import TraceJob
from .text import INSTALL

KINDS = "neutral CSV, compressed if the name ends in .gz or .zst; Parquet if in .parquet; - for standard output"


def write_trace(jobs: Sequence[TraceJob], path: Path) -> None:
    """Equal jobs give equal bytes. Raises UserError where it cannot be written."""
    if str(path) == "-":
        neutral_csv.write(jobs, sys.stdout)
        return
    if path.suffix == ".parquet":
        neutral_parquet.write(jobs, path)
        return
    text = io.StringIO(newline="")
    neutral_csv.write(jobs, text)
    content = _packed(text.getvalue().encode(), path)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _packed(content: bytes, path: Path) -> bytes:
    if path.suffix == ".gz":
        return gzip.compress(content, mtime=0)  # no time in it
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path}: writing zstd needs the extra `trace`: {INSTALL}") from None
        return zstandard.ZstdCompressor().compress(content)
    return content
