"""The Gittins index by the service that jobs have had, from the run times of earlier ones.

A job of service a has the index max over b > a of P(a < X <= b) / E[min(X, b) - a], given X > a: the best rate at which
it can be expected to complete. The highest goes first; with one machine, free preemption and X known in distribution
that is optimal (Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41, 1979; as a scheduler
of GPU jobs: Gu et al., "Tiresias", NSDI 2019, section 3.3). Service and X are GPU-seconds, so that a job that holds
many GPUs has to be worth them. Of jobs that still run, or were cut by whoever made the log, it is known that they are
longer (Kaplan and Meier, JASA 53, 1958).

This is for a log of earlier jobs, by classes of GPUs, exact in the times that were seen, and knows service in
GPU-seconds alone. Where each job has a curve of its own (`predict`), its rank is `predict.curves.gittins_s`, on the
grid of these curves: the rule `gittins` of the core and `sim.foresight` use that. A test holds both to the same ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from streamsched.core.cluster import ClusterState
from streamsched.core.model import WHOLE_GPU, Job
from streamsched.core.run_times import attained_gpu_s

Array = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

LEVELS_GPU_S: Final = tuple(float(f"{level:.4g}") for level in np.geomspace(30.0, 2e6, 40))
"""Service at which the index changes, GPU-seconds."""
CLASSES: Final = (2, 5, 9)
"""Jobs of 1, 2 to 4, 5 to 8 and more GPUs have curves of their own."""
LEAST_JOBS: Final = 50
"""Of a class; those of fewer are looked up in the curve of all."""
HOPELESS: Final = 1e18
"""Rank where no job of so much service was seen to complete."""

STEP_OCTAVES: Final = 2.0


def in_steps(ranks: Array, octaves: float = STEP_OCTAVES) -> Array:
    """Numbers of steps: for less than one nobody is stopped, and of equal ranks the first to come goes first."""
    return np.asarray(np.floor(np.log2(np.maximum(ranks, 1.0)) / octaves))


class Seen(Protocol):
    """A job of a log, as `loadgen.jobs.TraceJob`."""

    @property
    def submit_s(self) -> float: ...
    @property
    def queued_s(self) -> float | None: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def gpu_share(self) -> float: ...
    @property
    def gpus(self) -> int: ...
    @property
    def clamped(self) -> bool: ...


def table_before(jobs: Iterable[Seen], now: float) -> Array | None:
    """`table` of what had been seen by `now` of jobs that had been submitted; None without any.

    Those that were running have had so much and go on (censored). A log that does not tell how long a job was queued is
    read as if it had started at once.
    """
    begun = [(job, job.submit_s + (job.queued_s or 0.0)) for job in jobs]
    begun = [(job, start) for job, start in begun if start < now]
    if not begun:
        return None
    ran = np.array([min(job.duration_s, now - start) for job, start in begun])
    open_ended = np.array([job.clamped or job.duration_s > now - start for job, start in begun])
    shares, gpus = np.array([job.gpu_share for job, _ in begun]), np.array([job.gpus for job, _ in begun])
    return table(ran * shares, gpus, open_ended)


def class_of(gpus: Ints) -> Ints:
    """[job] number of its class."""
    return np.asarray(np.searchsorted(np.array(CLASSES), gpus, side="right"), np.int64)


def table(service_gpu_s: Array, gpus: Ints, censored: Bools, levels: Sequence[float] = LEVELS_GPU_S) -> Array:
    """[class, level + 1] rank, lower first: 1 / index at the beginning of each level. Arrays are [earlier job]."""
    everybody = ranks(service_gpu_s, censored, levels)
    found = []
    for number in range(len(CLASSES) + 1):
        own = class_of(gpus) == number
        few = int(own.sum()) < LEAST_JOBS
        found.append(everybody if few else ranks(service_gpu_s[own], censored[own], levels))
    return np.array(found)


def ranks(service: Array, censored: Bools, levels: Sequence[float]) -> Array:
    """[level + 1] of one curve; raises ValueError without a job."""
    if not len(service):
        raise ValueError("no earlier job to learn from")
    ages = np.concatenate([[0.0], np.asarray(levels, np.float64)])
    times, alive = kaplan_meier(service, censored)
    at_age = alive[np.searchsorted(times, ages, side="right")]
    # The integral of the survival function up to each age and to the end of what was seen.
    bounds = np.concatenate([[0.0], times])
    areas = np.concatenate([[0.0], np.cumsum(np.diff(bounds) * alive[:-1])])
    to_age = np.interp(ages, bounds, areas)
    # Only levels and the end are looked at as b: the maximum over all times that were seen would be that of the noise.
    ends_alive = np.append(at_age, alive[-1])
    ends_area = np.append(to_age, areas[-1])
    found = np.full(len(ages), HOPELESS)
    for level in range(len(ages)):
        gained = at_age[level] - ends_alive[level + 1 :]
        spent = ends_area[level + 1 :] - to_age[level]
        possible = (gained > 0) & (spent > 0)
        if possible.any():
            found[level] = 1.0 / float((gained[possible] / spent[possible]).max())
    return found


def kaplan_meier(service: Array, censored: Bools) -> tuple[Array, Array]:
    """Distinct times, ascending, and [time + 1] the share that is alive before the first and after each of them."""
    times, at = np.unique(service, return_inverse=True)
    deaths = np.bincount(at, weights=~censored, minlength=len(times))
    gone = np.bincount(at, minlength=len(times))
    at_risk = len(service) - np.concatenate([[0], np.cumsum(gone)[:-1]])
    return times, np.concatenate([[1.0], np.cumprod(1.0 - deaths / at_risk)])


class Gittins:
    """The rule, for `preempt` score."""

    name = "gittins"

    def __init__(self, ranks_by_class: Array, levels: Sequence[float] = LEVELS_GPU_S) -> None:
        self._table, self._levels = ranks_by_class, np.asarray(levels, np.float64)

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        gpus = np.array([job.spec.total_gpu_milli / WHOLE_GPU for job in jobs])
        had = np.array([attained_gpu_s(job, state, now) for job in jobs])
        kinds = class_of(np.ceil(gpus).astype(np.int64))
        found: list[float] = (-self._table[kinds, np.searchsorted(self._levels, had, side="right")]).tolist()
        return found
