"""What commands leave: tables on the terminal, folders and files. One line where they cannot, and no half a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from streamsched.errors import UserError


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: {(error.strerror or str(error)).lower()}") from None


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Under another name until it is whole."""
    begun = path.with_name(path.name + ".part")
    try:
        begun.write_bytes(data)
        os.replace(begun, path)
    except OSError as error:
        begun.unlink(missing_ok=True)
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def print_table(title: str, rows: Sequence[Mapping[str, str]], names: int, width: int) -> None:
    """Rows of cells by heading, the same ones in each, on a line each but for what they break themselves. `names`: so
    many columns at the left are words; `width`: in characters, where the output is no terminal."""
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True)
    for place, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if place < names else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    (console if console.is_terminal else Console(width=width)).print(table)
