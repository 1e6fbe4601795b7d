"""Classic priority rules as formulas over arrays: one definition for the live rules and for the compiled simulator.

Each takes jobs and the moment (s), and gives a key per job, *lower first*. Rules that divide by run times or take their
logarithm count those below 1 s as 1 s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Jobs:
    """One entry per job in each array. Times in seconds, on one clock."""

    seq: Array
    """Order of arrival."""
    submit_s: Array
    estimate_s: Array
    """The run time as far as it is known."""
    gpus: Array
    origin_s: float
    """What the submission times in F1 to F4 count from: the beginning of the workload."""
    cluster_gpus: float = 1.0
    """Told to rules that change with time alone: the others are asked once, and clusters grow."""

    @property
    def r(self) -> Array:
        return np.maximum(1.0, self.estimate_s)

    @property
    def log_submit(self) -> Array:
        return np.log10(np.maximum(1.0, self.submit_s - self.origin_s))


def fcfs(jobs: Jobs, now: float) -> Array:
    """First come, first served."""
    return jobs.seq


def lcfs(jobs: Jobs, now: float) -> Array:
    """Last come, first served."""
    return -jobs.seq


def sjf(jobs: Jobs, now: float) -> Array:
    """Shortest job first."""
    return jobs.estimate_s


def saf(jobs: Jobs, now: float) -> Array:
    """Smallest area first: run time x GPUs, also called SRF (Carastan-Santos et al., "One can only gain by replacing
    EASY backfilling: a simple scheduling policies case study", CCGrid 2019)."""
    return jobs.estimate_s * jobs.gpus


def qssf(jobs: Jobs, now: float) -> Array:
    """Quasi-shortest-service-first (Hu et al., "Characterization and prediction of deep learning workloads in
    large-scale GPU datacenters", SC'21, algorithm 1): predicted GPU-seconds. Where the estimates are the true run times
    it is SAF; it is QSSF with those that are learned from history."""
    return saf(jobs, now)


def smallest(jobs: Jobs, now: float) -> Array:
    """Fewest GPUs first."""
    return jobs.gpus


def largest(jobs: Jobs, now: float) -> Array:
    """Most GPUs first."""
    return -jobs.gpus


def wfp3(jobs: Jobs, now: float) -> Array:
    """WFP3 of Tang et al., CLUSTER 2009 ("Fault-aware, utility-based job scheduling on Blue Gene/P"): (wait / r)^3 n,
    the largest first."""
    ratio = (now - jobs.submit_s) / jobs.r
    return -(ratio * ratio * ratio) * jobs.gpus


def unicep(jobs: Jobs, now: float) -> Array:
    """UNICEF of Tang et al., as WFP3: wait / (log2(n + 1) r), the largest first; the + 1 admits jobs of one GPU."""
    return -(now - jobs.submit_s) / (np.log2(jobs.gpus + 1.0) * jobs.r)


MAX_AGE_S: Final = 7 * 86_400.0
"""Slurm's default of PriorityMaxAge."""
AGE_WEIGHT: Final = 1_000.0
SIZE_WEIGHT: Final = 1_000.0
"""As in the example of Slurm's page on the plugin; its defaults are 0, which orders nothing."""


def multifactor(jobs: Jobs, now: float) -> Array:
    """Age and size of Slurm's priority/multifactor, the largest sum first. Age counts up to PriorityMaxAge while a job
    waits, size is the share of the cluster's GPUs (PriorityFavorSmall=NO); `rules.Multifactor` has the fair share too.
    """
    age = np.minimum(1.0, (now - jobs.submit_s) / MAX_AGE_S)
    return -(AGE_WEIGHT * age + SIZE_WEIGHT * (jobs.gpus / jobs.cluster_gpus))


def f1(jobs: Jobs, now: float) -> Array:
    """F1 of Carastan-Santos & de Camargo, SC'17 ("Obtaining dynamic scheduling policies with simulation and machine
    learning"), table 3: log10(r) n + 870 log10(s)."""
    return np.log10(jobs.r) * jobs.gpus + 870.0 * jobs.log_submit


def f2(jobs: Jobs, now: float) -> Array:
    """F2, as F1: sqrt(r) n + 25,600 log10(s)."""
    return np.sqrt(jobs.r) * jobs.gpus + 25_600.0 * jobs.log_submit


def f3(jobs: Jobs, now: float) -> Array:
    """F3, as F1: r n + 6,860,000 log10(s)."""
    return jobs.r * jobs.gpus + 6_860_000.0 * jobs.log_submit


def f4(jobs: Jobs, now: float) -> Array:
    """F4, as F1: r sqrt(n) + 530,000 log10(s)."""
    return jobs.r * np.sqrt(jobs.gpus) + 530_000.0 * jobs.log_submit


Formula = Callable[[Jobs, float], Array]

STATIC: dict[str, Formula] = {f.__name__: f for f in (fcfs, lcfs, sjf, saf, qssf, smallest, largest, f1, f2, f3, f4)}
"""The order of two jobs never changes."""
TIMED: dict[str, Formula] = {f.__name__: f for f in (wfp3, unicep, multifactor)}
"""The order changes as jobs wait."""
FORMULAS: dict[str, Formula] = {**STATIC, **TIMED}
SEE_RUN_TIMES = frozenset(FORMULAS) - {"fcfs", "lcfs", "smallest", "largest", "multifactor"} | {"srtf", "asrpt"}
"""Rules that look at run times: oracles where the estimate is the true one."""
