"""When and where a job without room could start at the latest, if no run lasted longer than was said of it.

The shadow time of EASY backfilling (Lifka, JSSPP 1995; Mu'alem & Feitelson, IEEE TPDS 12(6), 2001): running jobs are
taken to end when `ClusterState.run_times` says so, and the job starts as soon as it fits. It is given nodes right away,
those where it would fit best then: whoever would still run at that time has to keep off these nodes. Runs of which
nothing is known are taken to hold what they have for ever.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from .model import WHOLE_GPU, Allocation, Job, JobSpec, Run
from .node import Node
from .preemption import as_if_gone
from .reservations import lay_out
from .room import allows
from .run_times import gpus_of, ran_s

if TYPE_CHECKING:
    from .cluster import ClusterState

OVERDUE_S: Final = 1e-3
"""No run is taken to end sooner than this after now, however long ago it should have ended."""


class Shadow(NamedTuple):
    time: float
    """UTC epoch seconds."""
    nodes: tuple[str, ...]


def expected_ends(state: ClusterState, runs: Sequence[Run], now: float) -> list[float]:
    """By what is believed of their jobs' run times; infinite where nothing is or the run is in doubt."""
    jobs = [state.jobs[run.job_id] for run in runs]
    totals = state.run_times.total_s(jobs, [ran_s(job, state, now) for job in jobs])
    return [_end(run, job, total, now) for run, job, total in zip(runs, jobs, totals, strict=True)]


def _end(run: Run, job: Job, total_s: float | None, now: float) -> float:
    if total_s is None or run.lost_at is not None:
        return math.inf
    left_to_it_s = total_s - job.attained_gpu_s / gpus_of(job)  # beside what earlier runs did
    return max((run.started_at or run.placed_at) + left_to_it_s, now + OVERDUE_S)


def shadow_of(state: ClusterState, job: Job, kept: Collection[str], now: float) -> Shadow | None:
    """The earliest time at which the job fits on nodes that are kept for nobody and not in `kept`, and these nodes;
    None where it would not even when all runs with a known end have ended."""
    nodes = [node for node in state.inventory if node.usable and not _is_kept(state, node.node_id, kept)]
    told = zip(expected_ends(state, list(state.runs.values()), now), state.runs, strict=True)
    ends = sorted((end, placement_id) for end, placement_id in told if end < math.inf)
    times = sorted({end for end, _ in ends})
    if _is_plain(job.spec) and not any(_is_part(a) for _, name in ends for a in state.runs[name].allocations):
        time = _first_time_plain(state, job.spec, nodes, ends)
        found = None if time is None else _at(state, job.spec, nodes, ends, time)
        if time is None or found is not None:
            return found
    first = bisect_left(times, True, key=lambda time: _at(state, job.spec, nodes, ends, time) is not None)
    return _at(state, job.spec, nodes, ends, times[first]) if first < len(times) else None


def _is_kept(state: ClusterState, node_id: str, kept: Collection[str]) -> bool:
    return node_id in kept or node_id in state.reserved


def _at(
    state: ClusterState, spec: JobSpec, nodes: list[Node], ends: list[tuple[float, str]], time: float
) -> Shadow | None:
    """Where it would start at this time: best fit, then the lowest name."""
    with as_if_gone(state, [placement_id for end, placement_id in ends if end <= time]):
        by_fit = sorted(nodes, key=lambda node: (node.free_gpus(), node.node_id))
        workers = lay_out(spec, by_fit)
    return None if workers is None else Shadow(time, tuple(sorted({node_id for node_id, _ in workers})))


def _is_part(allocation: Allocation) -> bool:
    """Of a device: when it is idle depends on who else has a part of it."""
    return allocation.gpu_milli != WHOLE_GPU or bool(allocation.mig_profile)


def _is_plain(spec: JobSpec) -> bool:
    """One worker with whole devices and no other wish: it fits as soon as one node has as many idle."""
    whole = spec.gpu_milli == WHOLE_GPU and not (spec.mig_profile or spec.gpu_memory_mib)
    alone = spec.workers == 1 and not spec.remainder_gpus and not spec.anti_affinity and spec.topology is None
    return whole and alone and not spec.cpu_milli and not spec.memory_mib


def _first_time_plain(
    state: ClusterState, spec: JobSpec, nodes: list[Node], ends: list[tuple[float, str]]
) -> float | None:
    idle = {node.node_id: node.free_gpus() for node in nodes if allows(spec, node.spec.gpu_type)}
    for end, placement_id in ends:
        for allocation in state.runs[placement_id].allocations:
            node_id = allocation.node_id
            if allocation.gpu_milli == WHOLE_GPU and node_id in idle:
                idle[node_id] += len(allocation.gpus)
                if idle[node_id] >= spec.gpus_per_worker:
                    return end
    return None
