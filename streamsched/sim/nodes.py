"""Groups of equal nodes, and the text that commands take for them: `80x8:P100,16x4:T4`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from streamsched.errors import UserError

ANY: Final = "any"
"""The type of GPUs where none is told."""
NODES_MAX: Final = 1_000_000
GPUS_MAX: Final = 1024
"""Of one node."""
_GROUP: Final = re.compile(r"([0-9]{1,9})x([0-9]{1,9})(?::([A-Za-z0-9][A-Za-z0-9._-]*))?")


class NodeGroup(Struct, frozen=True):
    """`count` nodes of `gpus` GPUs each."""

    count: int
    gpus: int
    gpu_type: str = ANY

    def __str__(self) -> str:
        return f"{self.count} x {self.gpus} {self.gpu_type}"


def parse_nodes(text: str) -> tuple[NodeGroup, ...]:
    """COUNTxGPUS[:TYPE][,...]. Raises UserError."""
    groups = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None or not int(match[1]) or not int(match[2]):
            raise UserError(f"--nodes {text}: {part.strip()!r} is not COUNTxGPUS[:TYPE], such as 80x8:P100")
        groups.append(NodeGroup(int(match[1]), int(match[2]), match[3] or ANY))
    check_size(groups, f"--nodes {text}")
    return tuple(groups)


def as_text(groups: Sequence[NodeGroup]) -> str:
    """What `parse_nodes` reads as these."""
    return ",".join(f"{group.count}x{group.gpus}:{group.gpu_type}" for group in groups)


def check_size(groups: Sequence[NodeGroup], where: str) -> None:
    """Raises UserError, which begins with `where`, for more than can be simulated."""
    if sum(group.count for group in groups) > NODES_MAX or any(group.gpus > GPUS_MAX for group in groups):
        raise UserError(f"{where}: at most {NODES_MAX:,} nodes of at most {GPUS_MAX:,} GPUs")
