"""What the run-time predictor of one pool has learned, kept in Redis: bytes in pieces, and how far they have come.

One key beside the pool's others, `<prefix>{pool}:predictor`, which is no part of the pool's state: no fold depends on
it, it is not rebuilt from the journal, and where it is gone or damaged the predictor learns anew. Only the pool's owner
writes it (`predictor_state.lua` compares epochs), piece by piece, so that no call keeps Redis for long.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

import msgspec
from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from .pool_store import is_wrong_type, key_of

_SCRIPT = resources.files(__package__).joinpath("predictor_state.lua").read_text(encoding="utf-8")
PIECE_BYTES: Final = 512 * 1024
BYTES_MAX: Final = 64 * 1024 * 1024
"""Of all pieces together; a larger state is not kept."""


class Head(Struct, frozen=True, kw_only=True):
    slot: int
    pieces: int
    bytes: int
    seq: int
    until: float


class Kept(Struct, frozen=True, kw_only=True):
    """`data` as the predictor wrote it."""

    data: bytes
    seq: int
    """Of the last journal record that it has learned from."""
    until: float
    """The pool's time of that record, UTC epoch seconds: what ended later is not in."""


class DamagedPieces(Exception):
    """What is there is not what was written; the text says what is wrong with it."""


class TooLarge(Exception):
    """More than `BYTES_MAX`."""


class PredictorStore:
    """Raises redis.exceptions.RedisError when Redis cannot be reached."""

    def __init__(self, redis: Redis, pool: str, prefix: str = "streamsched:") -> None:
        self._redis = redis
        self._keys = [key_of(prefix, pool, name) for name in ("meta", "predictor")]
        self._script = redis.register_script(_SCRIPT)
        self._slot: int | None = None
        """That the next state goes to; None: where the head that counts is not known, as after an error."""

    async def load(self) -> Kept | None:
        """None where nothing is kept. Raises DamagedPieces."""
        try:
            stored = await self._get("head")
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            raise DamagedPieces(f"{self._keys[1]} is of another type") from None
        if stored is None:
            return None
        try:
            head = msgspec.json.decode(stored, type=Head)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DamagedPieces(f"its head cannot be read: {error}") from None
        if head.slot not in (0, 1) or not 0 <= head.bytes <= BYTES_MAX or head.pieces != _count(head.bytes):
            raise DamagedPieces("its head is out of bounds")
        self._slot = 1 - head.slot
        pieces = [await self._get(f"{head.slot}:{number}") or b"" for number in range(head.pieces)]
        data = b"".join(pieces)
        if len(data) != head.bytes:
            raise DamagedPieces(f"{len(data)} bytes are there of {head.bytes}")
        return Kept(data=data, seq=head.seq, until=head.until)

    async def write(self, epoch: int, kept: Kept) -> bool:
        """False when another epoch owns the pool, and then nothing has changed that counts. Raises TooLarge."""
        size = len(kept.data)
        if size > BYTES_MAX:
            raise TooLarge(f"{size} bytes, {BYTES_MAX} at most")
        slot, self._slot = await self._free_slot(), None
        for number in range(_count(size)):
            piece = kept.data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
            if not await self._do("put", epoch, f"{slot}:{number}", piece):
                return False
        head = Head(slot=slot, pieces=_count(size), bytes=size, seq=kept.seq, until=kept.until)
        if not await self._do("end", epoch, msgspec.json.encode(head), slot, head.pieces):
            return False
        self._slot = 1 - slot
        return True

    async def _free_slot(self) -> int:
        """The one that the head does not name: an answer that was lost may have been a yes."""
        if self._slot is not None:
            return self._slot
        try:
            stored = await self._get("head")
            return 1 if stored is not None and msgspec.json.decode(stored, type=Head).slot == 0 else 0
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass
        return 0

    async def _get(self, name: str) -> Any:
        return await self._redis.hget(self._keys[1], name)

    async def _do(self, step: str, epoch: int, *args: str | int | bytes) -> Any:
        return await self._script(keys=self._keys, args=[step, epoch, *args])


def _count(size: int) -> int:
    return -(-size // PIECE_BYTES)
