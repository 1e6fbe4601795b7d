"""A trace file as numbered lines of text: plain, gzip or zstd, with or without BOM, any line ends."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from streamsched.errors import UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_MAGIC: Final = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2-compressed",
    b"\xfd7zXZ": "xz-compressed",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_BLOCK: Final = 1 << 18
LINE_MAX: Final = 1 << 20
"""Characters; a longer line is not a row of any trace."""
INSTALL: Final = 'pip install "streamsched[trace]"'


@contextmanager
def text_of(path: Path) -> Iterator[IO[str]]:
    """The file as text: compression known by its first bytes; bad bytes spoil only their row."""
    try:
        with (
            path.open("rb") as raw,
            io.TextIOWrapper(_plain(raw, path), encoding="utf-8-sig", errors="replace") as text,
        ):
            yield text
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise UserError(f"{path}: damaged gzip file ({error}); expected a whole one") from None
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def bytes_of(path: Path) -> bytes | None:
    """All of the file, decompressed; None where that fails: reading it as text tells why."""
    try:
        with path.open("rb") as raw, _plain(raw, path) as plain:
            content: bytes = plain.read()
            return content
    except (OSError, EOFError, zlib.error, UserError):
        return None


def _plain(raw: IO[bytes], path: Path) -> Any:
    first = raw.read(8)
    raw.seek(0)
    for magic, words in _MAGIC.items():
        if first.startswith(magic):
            raise UserError(f"{path}: is {words}; expected CSV text, plain or compressed with gzip or zstd, or Parquet")
    if first.startswith(_GZIP):
        return gzip.GzipFile(fileobj=raw)
    if first.startswith(_ZSTD):
        return io.BufferedReader(_Zstd(raw, path), _BLOCK)
    return raw


class _Zstd(io.RawIOBase):
    """Decompressed bytes of one or more frames. `zstandard`'s own reader takes a cut file for a whole one."""

    def __init__(self, raw: IO[bytes], path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path}: is zstd-compressed; reading it needs the extra `trace`: {INSTALL}") from None
        self._raw = raw
        self._damage = zstandard.ZstdError
        self._begin: Callable[[], Any] = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        while not self._ready:
            block = (self._frame.unused_data if self._frame is not None and self._frame.eof else b"") or (
                self._raw.read(_BLOCK)
            )
            if not block:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("zstd: the last frame is cut")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._begin()
            try:
                self._ready = self._frame.decompress(block)
            except self._damage as error:
                raise EOFError(f"{error}") from None
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def numbered(file: IO[str], path: str) -> Iterator[tuple[int, str]]:
    number, json = 0, False
    try:
        while line := file.readline(-1 if json else LINE_MAX):
            number += 1
            if number == 1 and line.lstrip().startswith("["):
                json = True  # may be all in one line
                line += "" if line.endswith("\n") else file.readline()
            if len(line) == LINE_MAX and not json:
                raise UserError(f"{path}:{number}: a line of over {LINE_MAX:,} characters: this is not a trace in CSV")
            yield number, line.rstrip("\r\n")
    except (EOFError, zlib.error) as error:
        kind = "zstd" if "zstd" in str(error) else "gzip"
        raise UserError(
            f"{path}: the {kind} data end or break after line {number} ({error}); expected a whole file"
        ) from None
