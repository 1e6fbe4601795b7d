"""Preemption: which runs may be told to make room for whom, what stopping them costs, and what they would leave behind.

A run is a possible victim while nothing about it is in doubt: it runs, it is preemptible, it has run for a while, all
of its nodes can be used and are kept free for nobody, and what it gives back can be given away at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from .model import BY_ARRIVAL, WHOLE_GPU, Job, JobSpec, JobState, Run, RunState
from .node import Node
from .problem import NodeClass, Victim
from .reservations import lay_out

if TYPE_CHECKING:
    from .cluster import ClusterState

_DOUBLINGS_MAX = 8
"""Of the time that a run is left alone: from 5 minutes to a day."""
_LOST_MAX_S = 3600.0
"""Work of this length that is lost makes a run cost twice what it is worth; more of it makes no difference."""


def priority(state: ClusterState, job: Job) -> int:
    """Number of the job's priority class; a name that is not configured counts as 0."""
    return state.config.priority_classes.get(class_name(job), 0)


def class_name(job: Job) -> str:
    return job.priority_class or job.spec.priority_class


def may_outrank(state: ClusterState, job: Job, victim: Job) -> bool:
    """Whether the job may take the place of the victim, as far as the stored state tells.

    The policy's scores are not stored: in the modes `score` and `rank` it was the window that compared them.
    """
    more = priority(state, job) - priority(state, victim)
    return more >= 0 if state.config.preempts_within_class else more > 0


def waited_too_long(state: ClusterState, job: Job) -> bool:
    """Whether all of its times in the queue reach `reserve_after_s`: where the ranking alone decides who runs, such a
    job goes before the others of its class, and once it runs it is not told to make room any more."""
    return which_waited_too_long(state, [job])[0]


def which_waited_too_long(state: ClusterState, jobs: Sequence[Job]) -> list[bool]:
    """`waited_too_long` of each: of ten thousand jobs in a millisecond."""
    now, limit, queued = state.now, state.config.reserve_after_s, JobState.QUEUED
    return [job.waited_s + (now - job.queued_at if job.state is queued else 0.0) >= limit for job in jobs]


def takes_whole_devices(spec: JobSpec) -> bool:
    return spec.gpu_milli == WHOLE_GPU and not spec.mig_profile and not spec.gpu_memory_mib


def may_take_room(job: Job, now: float) -> bool:
    """Whether runs may be stopped for this waiting job at all."""
    return takes_whole_devices(job.spec) and not job.awaits and job.not_before <= now


def why_spared(state: ClusterState, run: Run, now: float) -> str | None:
    """None when the run is a possible victim; else why it goes on."""
    job = state.jobs[run.job_id]
    interval = _left_alone_s(state, job, run)
    if state.config.preempt == "off" or not job.spec.preemptible:
        return f"run {run.placement_id} may not be preempted"
    if run.state is not RunState.RUNNING or run.started_at is None or job.state is not JobState.RUNNING:
        return f"run {run.placement_id} is {run.state}"
    if now - run.started_at < interval or (job.preempted_at and now - job.preempted_at < interval):
        return f"run {run.placement_id} has not gone on for {interval:g} s yet"
    if not takes_whole_devices(job.spec):
        return f"run {run.placement_id} has shares of devices"
    if state.config.preempts_within_class and waited_too_long(state, job):
        return f"run {run.placement_id} has waited too long before"
    for node_id in dict.fromkeys(a.node_id for a in run.allocations):
        node = state.inventory.nodes[node_id]
        if node_id in state.reserved or not node.usable or not _gives_back_all(node):
            return f"node {node_id} of run {run.placement_id} cannot be given to others now"
    return None


def _left_alone_s(state: ClusterState, job: Job, run: Run) -> float:
    """How long a run goes on before it may be stopped, s. Each time its job was stopped it is twice as long, until the
    run has saved what it did: else a job that is always stopped before its next checkpoint would never end."""
    interval = state.config.preempt_interval_s
    saved = run.last_checkpoint_at is not None and run.last_checkpoint_at > (run.started_at or run.placed_at)
    if not state.config.preempts_within_class or saved:
        return interval
    return float(interval * 2 ** min(job.preemptions, _DOUBLINGS_MAX))


def _gives_back_all(node: Node) -> bool:
    """Else it holds more than it has: the first that becomes free there is nobody's."""
    in_use = sum(free < WHOLE_GPU for free in node.free_milli)
    cpu_fits = not node.spec.cpu_milli or node.free_cpu_milli >= 0
    return in_use <= node.record.capacity and cpu_fits and (not node.spec.memory_mib or node.free_memory_mib >= 0)


def possible_victims(state: ClusterState, now: float) -> list[Run]:
    """Preemptible runs of a class that a waiting job may outrank, by arrival of their jobs; costs nothing where there
    are none. `choose_victims` leaves out those that are spared for now (`why_spared`)."""
    if state.config.preempt == "off" or not state.index.stoppable:
        return []
    classes = state.config.priority_classes
    queued = map(state.jobs.__getitem__, state.index.queued)
    best = max((priority(state, job) for job in queued if may_take_room(job, now)), default=None)
    if best is None:
        return []
    end = best + 1 if state.config.preempts_within_class else best
    found = []
    for name, job_ids in state.index.stoppable.items():
        if classes.get(name, 0) < end:
            found += [state.jobs[job_id] for job_id in job_ids]
    return [state.runs[job.placement_id] for job in sorted(found, key=BY_ARRIVAL) if job.placement_id is not None]


def choose_victims(
    state: ClusterState, runs: Iterable[Run], queued: Iterable[Job], levels: Mapping[str, int], now: float
) -> tuple[Victim, ...]:
    """Those that a window considers: lowest level first, then least lost per GPU; `levels` by job id.

    Left out are those on GPUs that no waiting job of a higher level wants. `cost` is in units of the value of one GPU
    of the best job of the victim's class.
    """
    reach = _reach(queued, levels, now)
    any_type = reach.get("", -math.inf)
    most = max(reach.values(), default=-math.inf)
    found = [(levels[run.job_id], _lost(state, run, now), run) for run in runs if levels[run.job_id] < most]
    chosen: list[Victim] = []
    for level, _, run in sorted(found, key=_dearness):
        if len(chosen) == state.config.preempt_victims_max:
            break
        if level >= max(any_type, *(reach.get(gpu_type, any_type) for gpu_type in _types(state, run))):
            continue
        if why_spared(state, run, now) is None:
            chosen.append(_victim(state, run, level, now))
    return tuple(chosen)


def _reach(queued: Iterable[Job], levels: Mapping[str, int], now: float) -> dict[str, float]:
    """GPU type ("" for any) -> highest level of the waiting jobs that want it."""
    reach: dict[str, float] = {}
    for job in queued:
        if may_take_room(job, now):
            level = levels[job.spec.job_id]
            for gpu_type in job.spec.gpu_types or ("",):
                reach[gpu_type] = max(level, reach.get(gpu_type, level))
    return reach


def _types(state: ClusterState, run: Run) -> set[str]:
    return {state.inventory.nodes[a.node_id].spec.gpu_type for a in run.allocations}


def _dearness(item: tuple[int, float, Run]) -> tuple[int, float, str]:
    level, lost, run = item
    return level, lost, run.placement_id


def _lost(state: ClusterState, run: Run, now: float) -> float:
    """What stopping it costs beside its GPUs, as a share of their worth."""
    kept_at = max(run.last_checkpoint_at or 0.0, run.started_at or 0.0)
    return min(1.0, (now - kept_at + state.config.restart_s) / _LOST_MAX_S)


def _victim(state: ClusterState, run: Run, level: int, now: float) -> Victim:
    held: dict[str, tuple[int, int, int]] = {}
    for a in run.allocations:
        gpus, cpu, memory = held.get(a.node_id, (0, 0, 0))
        held[a.node_id] = (gpus + len(a.gpus), cpu + a.cpu_milli, memory + a.memory_mib)
    return Victim(
        placement_id=run.placement_id,
        job_id=run.job_id,
        level=level,
        cost=sum(gpus for gpus, _, _ in held.values()) * (1.0 + _lost(state, run, now)),
        held=tuple((node_id, *held[node_id]) for node_id in sorted(held)),
        anti_affinity=state.jobs[run.job_id].spec.anti_affinity,
    )


# ── what they would leave behind ─────────────────────────────────────────────────────────────────────────────────────


def classes_after(state: ClusterState, victims: Sequence[Victim], avoid: Collection[str]) -> tuple[NodeClass, ...]:
    """What can be given away, but for the reserved nodes and `avoid`, as if these victims had gone."""
    freed = dict.fromkeys(node_id for victim in victims for node_id, *_ in victim.held)
    rest = state.inventory.classes_without({*state.reserved, *avoid, *freed})
    return rest + tuple(_as_class(state, node_id, victims) for node_id in freed if node_id not in avoid)


def classes_soon(state: ClusterState, now: float) -> tuple[NodeClass, ...]:
    """What can be given away once the runs that were told to stop lately have gone, and those who wait for that have
    started; () where no such runs are. Whoever fits then must not have more runs stopped for it."""
    runs = (state.runs[placement_id] for placement_id in sorted(state.index.stopping))
    leaving = [_victim(state, run, 0, now) for run in runs if _leaves_soon(state, run, now)]
    freed = {node_id for victim in leaving for node_id, *_ in victim.held if state.inventory.nodes[node_id].usable}
    if not freed:
        return ()
    waiting = [job for job in map(state.jobs.__getitem__, state.index.reserving) if job.awaits]
    promised = _promised(state, waiting)
    drained = {node_id for job in waiting for node_id in job.reservation}
    rest = state.inventory.classes_without({*state.reserved, *freed})
    open_nodes = sorted(node_id for node_id in freed if node_id not in state.reserved or node_id in drained)
    return rest + tuple(
        _less(_as_class(state, node_id, leaving), *promised.get(node_id, (0, 0, 0))) for node_id in open_nodes
    )


def _leaves_soon(state: ClusterState, run: Run, now: float) -> bool:
    lately = run.stop_at is not None and now - run.stop_at <= state.config.lease_s
    return lately and run.lost_at is None and takes_whole_devices(state.jobs[run.job_id].spec)


def _promised(state: ClusterState, waiting: Iterable[Job]) -> dict[str, tuple[int, int, int]]:
    """Node -> (GPUs, cpu_milli, memory_mib) that those who wait for room there will take."""
    promised: dict[str, tuple[int, int, int]] = {}
    for job in waiting:
        with as_if_gone(state, [placement_id for placement_id in job.awaits if placement_id in state.runs]):
            nodes = [state.inventory.nodes[node_id] for node_id in job.reservation if node_id in state.inventory.nodes]
            workers = lay_out(job.spec, nodes)
        for node_id, gpus in workers or ():
            before = promised.get(node_id, (0, 0, 0))
            promised[node_id] = (before[0] + gpus, before[1] + job.spec.cpu_milli, before[2] + job.spec.memory_mib)
    return promised


def _less(node_class: NodeClass, gpus: int, cpu_milli: int, memory_mib: int) -> NodeClass:
    cpu, memory = node_class.free_cpu_milli, node_class.free_memory_mib
    return replace(
        node_class,
        free_gpus=max(0, node_class.free_gpus - gpus),
        free_cpu_milli=max(0, cpu - cpu_milli) if cpu >= 0 else cpu,
        free_memory_mib=max(0, memory - memory_mib) if memory >= 0 else memory,
    )


def full_classes(state: ClusterState, victims: Sequence[Victim]) -> tuple[NodeClass, ...]:
    """The victims' nodes that have nothing free and so are in no class of the inventory, alike ones together."""
    full = sorted({n for victim in victims for n, *_ in victim.held if state.inventory.nodes[n].key is None})
    alike: dict[tuple[object, ...], NodeClass] = {}
    for one in (_as_class(state, node_id, ()) for node_id in full):
        key = tuple(getattr(one, name) for name in NodeClass.__struct_fields__ if name != "node_ids")
        known = alike.get(key)
        alike[key] = one if known is None else _joined(known, one)
    return tuple(alike[key] for key in sorted(alike, key=repr))


def _joined(one: NodeClass, other: NodeClass) -> NodeClass:
    return replace(one, node_ids=(*one.node_ids, *other.node_ids))


def _as_class(state: ClusterState, node_id: str, gone: Sequence[Victim]) -> NodeClass:
    """A class of this node alone, as if these victims had gone."""
    node = state.inventory.nodes[node_id]
    spec = node.spec
    back = [held for victim in gone for held in victim.held if held[0] == node_id]
    without = {victim.placement_id for victim in gone}
    return NodeClass(
        gpu_type=spec.gpu_type,
        free_gpus=node.free_gpus() + sum(gpus for _, gpus, _, _ in back),
        node_ids=(node_id,),
        shares=node.shares(),
        free_cpu_milli=max(0, node.free_cpu_milli) + sum(cpu for _, _, cpu, _ in back) if spec.cpu_milli else -1,
        free_memory_mib=max(0, node.free_memory_mib) + sum(mib for *_, mib in back) if spec.memory_mib else -1,
        nvlink=spec.nvlink,
        rack=spec.rack,
        zone=spec.zone,
        total_gpus=node.record.capacity,
        gpu_memory_mib=spec.gpu_memory_mib,
        affinity_taken=_names_on(state, node, without),
        mig=spec.mig,
        instances=node.instances(),
    )


def _names_on(state: ClusterState, node: Node, without: Collection[str]) -> tuple[str, ...]:
    """`anti_affinity` names that have a worker there, but for those of some runs."""
    runs = [state.runs[placement_id] for placement_id in node.run_ids if placement_id not in without]
    names = {a.anti_affinity for run in runs for a in run.allocations if a.node_id == node.node_id}
    return tuple(sorted(names - {""}))


@contextmanager
def as_if_gone(state: ClusterState, placement_ids: Iterable[str]) -> Iterator[None]:
    """Inside, the nodes are as if these runs had ended. Only for looking; the class index does not follow."""
    runs = [state.runs[placement_id] for placement_id in dict.fromkeys(placement_ids)]
    held = [(run.placement_id, state.inventory.nodes[a.node_id], a) for run in runs for a in run.allocations]
    for placement_id, node, allocation in held:
        node.give_back(placement_id, allocation)
    try:
        yield
    finally:
        for placement_id, node, allocation in held:
            node.take(placement_id, allocation)
