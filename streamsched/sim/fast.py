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


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A static rule is a key per job, lower first; ties go by order of arrival.


def _fcfs(w: Workload) -> Floats:
    """First come, first served."""
    return np.arange(len(w.submit_s), dtype=np.float64)


def _lcfs(w: Workload) -> Floats:
    """Last come, first served."""
    return -np.arange(len(w.submit_s), dtype=np.float64)


def _sjf(w: Workload) -> Floats:
    """Shortest job first."""
    return w.estimate_s.astype(np.float64)


def _saf(w: Workload) -> Floats:
    """Smallest area (run time x GPUs) first."""
    return w.estimate_s * w.gpus


def _smallest(w: Workload) -> Floats:
    """Fewest GPUs first."""
    return w.gpus.astype(np.float64)


def _largest(w: Workload) -> Floats:
    """Most GPUs first."""
    return -w.gpus.astype(np.float64)


def _log_submit(w: Workload) -> Floats:
    """log10 of the submission in seconds since the first job's, at least 1."""
    return np.log10(np.maximum(1.0, w.submit_s - (w.submit_s[0] if len(w.submit_s) else 0.0)))


def _f1(w: Workload) -> Floats:
    """F1 of Carastan-Santos & de Camargo, SC'17, table 3: log10(r) n + 870 log10(s)."""
    return np.log10(np.maximum(1.0, w.estimate_s)) * w.gpus + 870.0 * _log_submit(w)


def _f2(w: Workload) -> Floats:
    """F2 (as F1): sqrt(r) n + 25,600 log10(s)."""
    return np.sqrt(w.estimate_s) * w.gpus + 25_600.0 * _log_submit(w)


def _f3(w: Workload) -> Floats:
    """F3 (as F1): r n + 6,860,000 log10(s)."""
    return w.estimate_s * w.gpus + 6_860_000.0 * _log_submit(w)


def _f4(w: Workload) -> Floats:
    """F4 (as F1): r sqrt(n) + 530,000 log10(s)."""
    return w.estimate_s * np.sqrt(w.gpus) + 530_000.0 * _log_submit(w)


STATIC: Final[dict[str, Callable[[Workload], Floats]]] = {
    "fcfs": _fcfs,
    "lcfs": _lcfs,
    "sjf": _sjf,
    "saf": _saf,
    "smallest": _smallest,
    "largest": _largest,
    "f1": _f1,
    "f2": _f2,
    "f3": _f3,
    "f4": _f4,
}
TIMED: Final = {"wfp3": 1, "unicep": 2}
"""Rules whose order changes as jobs wait; Tang et al., CLUSTER 2009: (wait / r)^3 n, and wait / (log2(n + 1) r), the
largest first. Run times below 1 s count as 1 s."""
RULES: Final = (*STATIC, *TIMED)
SEES_RUN_TIME: Final = frozenset(RULES) - {"fcfs", "lcfs", "smallest", "largest"}
"""Rules that are oracles where estimates are the true run times."""


def simulate(workload: Workload, nodes: Sequence[int], rule: str | Floats = "fcfs", backfill: str = "skip") -> Outcome:
    """Run the workload on nodes of so many GPUs each, in order of their names.

    `rule`: a name of `RULES`, or a static key per job, lower first. Raises UserError for unknown names.
    """
    if backfill not in BACKFILLS:
        raise UserError(f"unknown backfill {backfill!r}: choose one of {', '.join(BACKFILLS)}")
    if isinstance(rule, str) and rule not in RULES:
        raise UserError(f"unknown rule {rule!r}: choose one of {', '.join(RULES)}")
    timed = TIMED.get(rule, 0) if isinstance(rule, str) else 0
    if isinstance(rule, str):
        key = _fcfs(workload) if timed else STATIC[rule](workload)
    else:
        key = np.asarray(rule, dtype=np.float64)
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
