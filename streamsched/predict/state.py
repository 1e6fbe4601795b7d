"""What a predictor knows, as bytes, across restarts.

    magic (8 bytes)   format (1 byte)   CRC-32 of the rest (4 bytes)   msgpack of `CombinationState`

What was learned is worth keeping but nothing depends on it: bytes that cannot be read make a cold start, whose
intervals are wide, and a line that says so.
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec

from streamsched.errors import UserError

from .combination import Combination, CombinationState

_MAGIC: Final = b"ssprdct\0"
FORMAT: Final = 2
_HEAD: Final = len(_MAGIC) + 5


class DamagedState(UserError):
    """Bytes that are no state of a predictor; the message says why."""


def to_bytes(predictor: Combination) -> bytes:
    body = msgspec.msgpack.encode(predictor.state())
    return _MAGIC + bytes([FORMAT]) + zlib.crc32(body).to_bytes(4, "big") + body


def from_bytes(data: bytes) -> Combination:
    """Raises DamagedState. Jobs that run have to be told again (`set_running`)."""
    if data[: len(_MAGIC)] != _MAGIC or len(data) <= _HEAD:
        raise DamagedState("run-time predictor: these bytes are no state of one")
    if data[len(_MAGIC)] != FORMAT:
        raise DamagedState(
            f"run-time predictor: its state has format {data[len(_MAGIC)]}, this version reads {FORMAT}; it learns anew"
        )
    body = data[_HEAD:]
    if zlib.crc32(body) != int.from_bytes(data[_HEAD - 4 : _HEAD], "big"):
        raise DamagedState("run-time predictor: its state is cut or damaged (checksum); it learns anew")
    try:
        return Combination.restored(msgspec.msgpack.decode(body, type=CombinationState))
    except Exception as error:  # a state of another version may be anything, and a cold start is no harm
        raise DamagedState(f"run-time predictor: its state does not hold together: {error}; it learns anew") from None


def restored(data: bytes | None) -> tuple[Combination, str]:
    """The predictor of these bytes, or a new one and the reason (empty where there were no bytes)."""
    if not data:
        return Combination(), ""
    try:
        return from_bytes(data), ""
    except DamagedState as error:
        return Combination(), str(error)
