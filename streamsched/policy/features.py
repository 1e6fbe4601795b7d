"""What learned policies see of a job and of its cluster: one vector, for the live scheduler, simulation and training.

The formulae are the functions of this module. They take numbers or arrays, and the compiled simulation compiles them as
they are, so that what was learned there means the same here. Values are reckoned in float64 and rounded to float32.
Run times are those that were predicted or estimated, never the true ones.

A change of a name, of the order or of a meaning is a new `FEATURES_VERSION`: what was trained on another is refused.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from streamsched.core.cluster import ClusterState
from streamsched.core.model import WHOLE_GPU, Job, JobState
from streamsched.core.run_times import RunTimes, attained_gpu_s

from .rules import UNKNOWN_RUN_S

FEATURES_VERSION: Final = 1

Float32s = np.ndarray[Any, np.dtype[np.float32]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Number = TypeVar("Number", float, Floats)


class Scope(enum.Enum):
    """Of what a feature tells, and when it changes."""

    FIXED = "fixed"
    """Of a job, from its submission on; its weight only by a command."""
    MOVING = "moving"
    """Of a job, as time goes on."""
    CLUSTER = "cluster"
    """The same for all jobs of a moment."""


class Feature(NamedTuple):
    """`low` and `high`: where values usually are. A model's file has the range that it was trained on."""

    name: str
    unit: str
    scope: Scope
    low: float
    high: float
    meaning: str


_DAY_S: Final = 86_400.0

FEATURES: Final = (
    Feature("gpus", "GPUs", Scope.FIXED, 0.0, 1_024.0, "all that the job asks for; parts of a device are fractions"),
    Feature("nodes", "nodes", Scope.FIXED, 1.0, 128.0, "its workers, each on one node"),
    Feature("run_s", "s", Scope.FIXED, 0.0, 60 * _DAY_S, "its run time: the median of what is predicted"),
    Feature("spread", "", Scope.FIXED, 0.0, 16.0, "ln of the 95 % over the 5 % quantile of that prediction"),
    Feature("work_gpu_s", "GPU s", Scope.FIXED, 0.0, 6e8, "run_s x gpus"),
    Feature("weight", "", Scope.FIXED, 0.0, 100.0, "what its waiting counts"),
    Feature("wait_s", "s", Scope.MOVING, 0.0, 30 * _DAY_S, "how long it has been in the queue, all times together"),
    Feature("attained_gpu_s", "GPU s", Scope.MOVING, 0.0, 6e8, "service it has had, lost work and restarts too"),
    Feature("running", "", Scope.MOVING, 0.0, 1.0, "1: it runs and may be preempted, 0: it waits"),
    Feature("free_gpus", "GPUs", Scope.CLUSTER, 0.0, 1e5, "devices that nobody has"),
    Feature("largest_free", "GPUs", Scope.CLUSTER, 0.0, 16.0, "the most of them on one node"),
    Feature("queue_length", "jobs", Scope.CLUSTER, 0.0, 1e5, "jobs that wait"),
    Feature("queued_gpus", "GPUs", Scope.CLUSTER, 0.0, 1e6, "what they ask for"),
    Feature("load", "", Scope.CLUSTER, 0.0, 100.0, "GPUs in use or asked for, of all there are"),
    Feature("fragmentation", "", Scope.CLUSTER, 0.0, 1.0, "share of free GPUs that a worker of the queue cannot use"),
)

NAMES: Final = tuple(feature.name for feature in FEATURES)
INDEX: Final = {name: place for place, name in enumerate(NAMES)}
FIXED: Final = tuple(place for place, feature in enumerate(FEATURES) if feature.scope is Scope.FIXED)
"""The first ones, so that they can be kept beside each other."""

UNKNOWN_SPREAD: Final = math.log(2 * _DAY_S / 60.0)
"""Of a job of which nothing is known: from a minute to two days."""

Prediction = tuple[Floats, Floats]
"""([job] median of the run time in s, [job] spread)."""
Predict = Callable[[Sequence[Job], ClusterState], Prediction]


# ── formulae ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def work_gpu_s(run_s: Number, gpus: Number) -> Number:
    return run_s * gpus


def wait_s(before_s: Number, since_s: Number, now: float) -> Number:
    """In the queue since `since_s`, and `before_s` at earlier times."""
    return before_s + (now - since_s)


def load(held_gpus: float, queued_gpus: float, gpus: float) -> float:
    """0 where there are no GPUs."""
    return (held_gpus + queued_gpus) / gpus if gpus > 0 else 0.0


def largest_free(having: Ints) -> int:
    """`having`: [g] nodes with exactly g free GPUs."""
    size = len(having) - 1
    while size > 0 and having[size] == 0:
        size -= 1
    return size


def fragmentation(having: Ints, demand: Ints, waiting: int) -> float:
    """Expected share of the free GPUs that are on nodes with fewer than a worker of a waiting job asks for.

    The idea is that of the fragmentation gradient descent (Weng et al., ATC'23, section 3.1), with whole devices alone.
    `having`: [g] nodes with exactly g free GPUs; `demand`: [g] waiting jobs whose (larger) workers ask for g, as long;
    `waiting`: their number. 0 where nothing is free or nobody waits.
    """
    lost, free, larger = 0, 0, waiting
    for size in range(len(having)):
        larger -= demand[size]
        lost += having[size] * size * larger
        free += having[size] * size
    return lost / (free * waiting) if free * waiting > 0 else 0.0


# ── the live scheduler ───────────────────────────────────────────────────────────────────────────────────────────────


def as_believed(jobs: Sequence[Job], state: ClusterState) -> Prediction:
    """By the pool's source of run times: what was said of them (then there is no spread), or predicted."""
    whole, spread = state.run_times.whole_s(jobs), state.run_times.spread(jobs)
    run_s = [UNKNOWN_RUN_S if told is None else told for told in whole]
    spreads = [UNKNOWN_SPREAD if told is None else told for told in spread]
    return np.array(run_s, np.float64), np.array(spreads, np.float64)


class _Known(NamedTuple):
    """What is kept of each job: [row] in each array."""

    fixed: Float32s
    """[row, fixed feature]"""
    waited_s: Floats
    since_s: Floats
    attained_gpu_s: Floats
    gpu_milli: Ints
    demand: Ints
    """GPUs of a worker."""
    waits: Ints
    """1 or 0."""


def _room_for(rows: int) -> _Known:
    return _Known(
        fixed=np.zeros((rows, len(FIXED)), np.float32),
        waited_s=np.zeros(rows),
        since_s=np.zeros(rows),
        attained_gpu_s=np.zeros(rows),
        gpu_milli=np.zeros(rows, np.int64),
        demand=np.zeros(rows, np.int64),
        waits=np.zeros(rows, np.int64),
    )


class Features:
    """`FEATURES` of jobs of the production core.

    What does not change by itself is kept by job: a job that is another value than before is looked at anew. `predict`
    is asked once for each of these, and again where the pool has another source of run times.
    """

    def __init__(self, predict: Predict = as_believed) -> None:
        self._predict = predict
        self._source: RunTimes | None = None
        self._forget()

    def __call__(self, jobs: Sequence[Job], state: ClusterState, now: float) -> Float32s:
        """[job, feature]. `jobs`: all that wait, and those that run and are ranked with them."""
        rows = self._rows(jobs, state)
        known = self._known
        waits = known.waits[rows]
        found = np.empty((len(jobs), len(FEATURES)), np.float32)
        found[:, : len(FIXED)] = known.fixed[rows]
        waited_s = known.waited_s[rows]
        found[:, INDEX["wait_s"]] = np.where(waits, wait_s(waited_s, known.since_s[rows], now), waited_s)
        attained = known.attained_gpu_s[rows]
        for place in np.flatnonzero(waits == 0).tolist():
            attained[place] = attained_gpu_s(jobs[place], state, now)
        found[:, INDEX["attained_gpu_s"]] = attained
        found[:, INDEX["running"]] = 1 - waits
        found[:, INDEX["free_gpus"] :] = self._cluster(rows[waits == 1], state)
        return found

    def _cluster(self, waiting: Ints, state: ClusterState) -> list[float]:
        """The features of the cluster, in their order."""
        free = [(node_class.free_gpus, len(node_class.node_ids)) for node_class in state.inventory.classes()]
        demand = self._known.demand[waiting]
        longest = max([1, *(size for size, _ in free), int(demand.max(initial=0))]) + 1
        having = np.zeros(longest, np.int64)
        for size, nodes in free:
            having[size] += nodes
        gpus = sum(node.gpus * count for node, count in state.inventory.usable.total.items())
        free_gpus = int(having @ np.arange(longest))
        queued_gpus = int(self._known.gpu_milli[waiting].sum()) / WHOLE_GPU
        return [
            float(free_gpus),
            float(largest_free(having)),
            float(len(waiting)),
            queued_gpus,
            load(float(gpus - free_gpus), queued_gpus, float(gpus)),
            float(fragmentation(having, np.bincount(demand, minlength=longest), len(waiting))),
        ]

    def _rows(self, jobs: Sequence[Job], state: ClusterState) -> Ints:
        if len(self._kept) > 2 * len(jobs) + 1_000 or self._source is not state.run_times:
            self._source = state.run_times
            self._forget()
        rows = list(map(self._row_of.get, map(id, jobs)))
        if None in rows:
            self._file([job for job, row in zip(jobs, rows, strict=True) if row is None], state)
            rows = list(map(self._row_of.get, map(id, jobs)))
        return np.array(rows, np.int64)

    def _forget(self) -> None:
        self._kept: list[Job] = []
        """[row] By being kept, a job's identity stays its own."""
        self._row_of: dict[int, int] = {}
        self._known = _room_for(1_024)

    def _file(self, new: Sequence[Job], state: ClusterState) -> None:
        first, count = len(self._kept), len(self._kept) + len(new)
        if count > len(self._known.waits):
            more = _room_for(2 * count)
            for name in _Known._fields:
                getattr(more, name)[:first] = getattr(self._known, name)[:first]
            self._known = more
        known, rows = self._known, slice(first, count)
        specs = [job.spec for job in new]
        run_s, spread = self._predict(new, state)
        known.gpu_milli[rows] = [spec.total_gpu_milli for spec in specs]
        gpus = known.gpu_milli[rows] / WHOLE_GPU
        known.demand[rows] = [spec.gpus_per_worker for spec in specs]
        nodes = np.array([spec.workers + (spec.remainder_gpus > 0) for spec in specs], np.float64)
        weight = np.array([job.spec.weight if job.weight is None else job.weight for job in new])
        known.fixed[rows] = np.stack([gpus, nodes, run_s, spread, work_gpu_s(run_s, gpus), weight], axis=1)
        known.waited_s[rows] = [job.waited_s for job in new]
        known.since_s[rows] = [job.queued_at for job in new]
        known.attained_gpu_s[rows] = [job.attained_gpu_s for job in new]
        known.waits[rows] = [job.state is JobState.QUEUED for job in new]
        self._kept += new
        self._row_of.update((id(job), first + place) for place, job in enumerate(new))
