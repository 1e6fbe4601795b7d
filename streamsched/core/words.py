"""Words for messages."""

from __future__ import annotations

from collections.abc import Iterable


def some(names: Iterable[str], most: int = 5) -> str:
    """Names for a message; a gang may have thousands."""
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
