"""Priority rules that order the queue. `by_name` is the registry; each rule is a `core.window.Ranker`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from streamsched.core.window import Ranker
from streamsched.errors import UserError

from .asrpt import AdaptiveSrpt
from .formulas import FORMULAS
from .rules import (
    ByFormula,
    FairShare,
    FirstComeFirstServed,
    Gittins,
    LeastAttainedService,
    MaxMin,
    Multifactor,
    ShortestRemaining,
    Smallest,
)

RULES: dict[str, Callable[[], Ranker]] = {
    **{name: partial(ByFormula, name, formula) for name, formula in FORMULAS.items()},
    FirstComeFirstServed.name: FirstComeFirstServed,
    Smallest.name: Smallest,
    FairShare.name: FairShare,
    MaxMin.name: MaxMin,
    Multifactor.name: Multifactor,
    LeastAttainedService.name: LeastAttainedService,
    ShortestRemaining.name: ShortestRemaining,
    Gittins.name: Gittins,
    AdaptiveSrpt.name: AdaptiveSrpt,
}


def by_name(name: str, origin_s: float = 0.0) -> Ranker:
    """The rule called `name`; raises UserError with the known names. `origin_s`: see `ByFormula`."""
    if name not in RULES:
        raise UserError(f"unknown policy {name!r}: choose one of {', '.join(sorted(RULES))}")
    rule = RULES[name]()
    return ByFormula(name, FORMULAS[name], origin_s) if isinstance(rule, ByFormula) else rule
