"""The compiled fast path: one rule over one workload in milliseconds, for policy search and for baselines.

Same semantics as the simulator over the core with greedy placement, for jobs of whole GPUs that are not preempted
(`docs/simulator.md`); tests compare the two. At each moment: all completions, all arrivals, one pass over the queue.

Theory of operation. Jobs of equal size wait in one heap per size. Within a pass free GPUs only shrink, so once a job of
a size did not fit no other of that size does: a pass looks at the best job of each size and no further, and its cost
does not grow with the queue. After a pass that skips what does not fit, nothing that waits fits; so at a moment without
completions only the jobs that arrive are tried. What changes order with time (WFP3, UNICEP) is scored anew in each pass
with completions, and EASY walks the whole queue behind its blocked head: these two cost more as the queue grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamsched.errors import UserError
from streamsched.policy.formulas import FORMULAS, Jobs

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BACKFILLS: Final = ("none", "skip", "easy")
"""none: the first in order that does not fit ends the pass. skip: it is passed over. easy: it is passed over, and no
later job may delay it (Lifka, JSSPP 1995; Mu'alem & Feitelson, IEEE TPDS 2001)."""
WHOLE_NODE_GPUS: Final = 8
"""A job of more GPUs takes whole nodes of so many, and the rest on one more."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs by (submit time, order in the trace). All arrays have one entry per job."""

    submit_s: Floats
    run_s: Floats
    gpus: Ints
    estimate_s: Floats
    """What rules and backfill take the run time for; `run_s` itself makes them oracles."""

    def __post_init__(self) -> None:
        lengths = {len(self.submit_s), len(self.run_s), len(self.gpus), len(self.estimate_s)}
        if len(lengths) != 1:
            raise ValueError(f"arrays of different lengths: {sorted(lengths)}")
        if np.any(np.diff(self.submit_s) < 0):
            raise ValueError("jobs are not in order of their submission")
        if np.any(self.gpus < 1) or np.any(self.run_s < 0):
            raise ValueError("jobs need at least one GPU and a run time of at least 0 s")


@dataclass(frozen=True, slots=True)
class Outcome:
    """NaN for jobs that no empty cluster could hold."""

    start_s: Floats
    finish_s: Floats


RULES: Final = tuple(FORMULAS)
_TIMED: Final = {"wfp3": 1, "unicep": 2}
"""Numbers by which the kernel knows the rules whose order changes with time."""


def as_jobs(workload: Workload) -> Jobs:
    """For `policy.formulas`; submissions count from the first job's."""
    origin_s = float(workload.submit_s[0]) if len(workload.submit_s) else 0.0
    seq = np.arange(len(workload.gpus), dtype=np.float64)
    return Jobs(seq, workload.submit_s, workload.estimate_s, workload.gpus.astype(np.float64), origin_s)


def simulate(workload: Workload, nodes: Sequence[int], rule: str | Floats = "fcfs", backfill: str = "skip") -> Outcome:
    """Run the workload on nodes of so many GPUs each, in order of their names.

    `rule`: a name of `RULES`, or a static key per job, lower first. Raises UserError for unknown names.
    """
    if backfill not in BACKFILLS:
        raise UserError(f"unknown backfill {backfill!r}: choose one of {', '.join(BACKFILLS)}")
    if isinstance(rule, str) and rule not in RULES:
        raise UserError(f"unknown rule {rule!r}: choose one of {', '.join(RULES)}")
    timed = _TIMED.get(rule, 0) if isinstance(rule, str) else 0
    key = FORMULAS[rule](as_jobs(workload), 0.0) if isinstance(rule, str) else np.asarray(rule, dtype=np.float64)
    free = np.asarray(nodes, dtype=np.int64)
    sizes, size_of = np.unique(workload.gpus, return_inverse=True)
    able = np.array([_fits_empty(free, int(g)) for g in sizes], dtype=np.bool_)
    start, finish = _kernel()(
        workload.submit_s.astype(np.float64),
        workload.run_s.astype(np.float64),
        np.maximum(1.0, workload.estimate_s.astype(np.float64)),
        key,
        timed,
        BACKFILLS.index(backfill),
        sizes.astype(np.int64),
        np.log2(sizes + 1.0),
        size_of.astype(np.int64),
        able,
        free,
    )
    return Outcome(start, finish)


def _fits_empty(free: Ints, gpus: int) -> bool:
    if gpus <= WHOLE_NODE_GPUS:
        return bool(np.any(free >= gpus))
    whole, rest = divmod(gpus, WHOLE_NODE_GPUS)
    able = int(np.sum(free >= WHOLE_NODE_GPUS))
    if not rest:
        return able >= whole
    return able >= whole and int(np.sum(free >= rest)) > whole


@cache
def _kernel() -> Callable[..., Any]:
    try:
        from . import fast_kernel
    except ImportError as error:
        raise UserError(f"the fast path needs numba ({error}): pip install 'streamsched[fast]'") from None
    return fast_kernel.run


def bounded_slowdown(workload: Workload, outcome: Outcome, at_least_s: float = 10.0) -> Floats:
    """max(1, completion time / max(run time, bound)) per job (Feitelson et al., JSSPP 1997)."""
    jct = outcome.finish_s - workload.submit_s
    return np.maximum(1.0, jct / np.maximum(workload.run_s, at_least_s))


def nan_free(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def mean(values: Floats) -> float:
    """Of those that are not NaN; NaN when there are none."""
    left = nan_free(values)
    return math.fsum(left) / len(left) if len(left) else math.nan
