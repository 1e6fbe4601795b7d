"""Pictures of a few colours as PNG (W3C Recommendation, second edition, 2003), by the standard library alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(pixels: npt.NDArray[np.uint8], palette: Sequence[tuple[int, int, int]]) -> bytes:
    """`pixels` [row, column]: places in the palette of at most 256 colours (red, green, blue)."""
    rows, columns = pixels.shape
    # Bit depth 8, colour type 3 (palette), and the only methods that there are; each row begins with filter 0 (none).
    head = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    lines = np.hstack([np.zeros((rows, 1), dtype=np.uint8), pixels]).tobytes()
    colours = b"".join(bytes(colour) for colour in palette)
    chunks = ((b"IHDR", head), (b"PLTE", colours), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
