"""Folders and files that commands write: one line where they cannot, and no half a file."""

from __future__ import annotations

import os
from pathlib import Path

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
