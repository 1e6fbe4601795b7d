"""Priority rules that order the queue. `by_name` is the registry; each rule is a `core.window.Ranker`."""

from __future__ import annotations

from collections.abc import Callable

from streamsched.core.window import Ranker
from streamsched.errors import UserError

from .rules import FairShare, FirstComeFirstServed, Smallest

RULES: dict[str, Callable[[], Ranker]] = {
    FirstComeFirstServed.name: FirstComeFirstServed,
    Smallest.name: Smallest,
    FairShare.name: FairShare,
}


def by_name(name: str) -> Ranker:
    """The rule called `name`; raises UserError with the known names."""
    try:
        return RULES[name]()
    except KeyError:
        raise UserError(f"unknown policy {name!r}: choose one of {', '.join(sorted(RULES))}") from None
