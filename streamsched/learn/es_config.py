"""Settings of evolution strategies. Apart from `es`, so that the command line has its defaults from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from streamsched.policy.features import FEATURES, INDEX
from streamsched.sim.fast import SPARING, Preemption

from .bases import FEATURE_OF

TRAIN_SHARE: Final = 0.5
"""Of a slice's time, its first part, which is learned from."""
CHOOSE_SHARE: Final = 0.25
"""The next part, by which the best is chosen; what is left stays unseen."""

_STEP_OCTAVES: Final = 2.0
_OCTAVES_IN_1: Final = float(np.log2(1.0 + FEATURES[INDEX["attained_gpu_s"]].high))

BASES: Final[Mapping[str, tuple[str, float]]] = {
    name: (feature, sign * _OCTAVES_IN_1 / _STEP_OCTAVES if name == "las" else sign)
    for name, (feature, sign) in FEATURE_OF.items()
}
"""[rule] (feature, weight of it once it is scaled); `las`: in steps of two octaves of service."""


@dataclass(frozen=True)
class EsConfig:
    base: str = "las"
    """One of `BASES`; `las` trains for preemption."""
    hidden: int = 12
    generations: int = 80
    pairs: int = 12
    seed: int = 1
    sigma: float = 0.2
    """Standard deviation of the noise, of weights that are scaled to be about 1."""
    rate: float = 0.2
    """Step, in parts of sigma."""
    window_days: float = 8.0
    load: tuple[float, float] = (0.9, 1.25)
    """Times between submissions are divided by a number from here."""
    nodes: tuple[float, float] = (0.9, 1.05)
    """Their number is multiplied with one from here."""
    tail: float = 0.5
    """What a p99 of the wait above the base rule's counts (as a share of it), beside the mean (as a share too)."""
    least_wait_s: float = 30.0
    """Windows in which the base rule's mean wait is less teach nothing and are drawn anew."""
    check_every: int = 10
    """Generations between looks at the choosing part."""
    choose_loads: tuple[float, ...] = (1.0, 0.95, 1.05)
    """Loads at which the choosing part is looked at: the choice goes by the mean of the costs, since one schedule of a
    week turns on a few large jobs."""
    reserve_after_s: float = SPARING.bound_s
    """Without preemption nodes are kept for jobs that have waited so long, one at a time; with it they go first."""
    move_after_s: float = SPARING.move_after_s

    def __post_init__(self) -> None:
        if self.base not in BASES:
            raise ValueError(f"no base {self.base!r}; there are {', '.join(BASES)}")
        if min(self.hidden, self.generations, self.pairs, self.check_every) < 1:
            raise ValueError("hidden, generations, pairs and check_every are at least 1")

    @property
    def preemptive(self) -> bool:
        return self.base == "las"

    @property
    def preemption(self) -> Preemption:
        return replace(SPARING, bound_s=self.reserve_after_s, move_after_s=self.move_after_s)
