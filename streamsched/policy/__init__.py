"""Priority rules that order the queue. `by_name` is the registry; each rule is a `core.window.Ranker`."""

from __future__ import annotations

from streamsched.core.window import Ranker
from streamsched.errors import UserError

from .rules import FirstComeFirstServed, Smallest

RULES: dict[str, type[FirstComeFirstServed] | type[Smallest]] = {
    rule.name: rule for rule in (FirstComeFirstServed, Smallest)
}


def by_name(name: str) -> Ranker:
    """The rule called `name`; raises UserError with the known names."""
    try:
        return RULES[name]()
    except KeyError:
        raise UserError(f"unknown policy {name!r}: choose one of {', '.join(sorted(RULES))}") from None
