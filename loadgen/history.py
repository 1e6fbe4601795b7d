"""What is on the topics, and the audit of it: no scheduler, fleet or clock is asked, only the messages.

`audit` is a pure function of the messages. A run holds its devices from its `place` to the first report that ends it
(completed, failed, preempted, rejected, released), or to the loss of a node that is known to be fenced. All times are
Kafka's, so that they are comparable: a scheduler that frees a device by reading the end of a run can only write the
next placement after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Generic, NamedTuple, TypeVar

from streamsched.bus import messages as m
from streamsched.core.instructions import Place
from streamsched.core.model import WHOLE_GPU, Allocation

T = TypeVar("T")

DETAILS_KEPT: Final = 100
"""Violations told one by one; all of them are counted."""
_ENDINGS: Final = (m.Completed, m.Failed, m.Preempted, m.Rejected, m.Released)


class Stamped(NamedTuple, Generic[T]):
    at: float
    """Kafka's timestamp, epoch seconds."""
    message: T


@dataclass(slots=True)
class History:
    """Messages in the order of their partitions."""

    arrivals: list[Stamped[m.JobArrival]] = field(default_factory=list)
    placements: list[Stamped[m.Placement]] = field(default_factory=list)
    completions: list[Stamped[m.Completion]] = field(default_factory=list)
    nodes: list[Stamped[m.NodeEvent]] = field(default_factory=list)
    undecodable: Counter[str] = field(default_factory=Counter)
    """By topic."""


@dataclass(slots=True)
class RunRecord:
    """One placement and what was reported of it."""

    place: Place
    pool: str
    placed_at: float
    started_at: float | None = None
    completed_at: float | None = None
    freed_at: dict[str, float] = field(default_factory=dict)
    """Node -> when its devices were free again."""
    ended_at: float | None = None
    ending: str | None = None

    def held(self, until: float) -> Iterable[tuple[Allocation, float, float]]:
        """(allocation, from, to); `until` stands for the end of one that has not ended."""
        for allocation in self.place.allocations:
            yield allocation, self.placed_at, self.freed_at.get(allocation.node_id, until)


@dataclass(slots=True)
class Audit:
    """`counts` by kind of violation; empty means that all held."""

    counts: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def add(self, kind: str, detail: str) -> None:
        self.counts[kind] += 1
        if len(self.details) < DETAILS_KEPT:
            self.details.append(f"{kind}: {detail}")

    @property
    def total(self) -> int:
        return self.counts.total()


def runs_of(history: History) -> dict[str, RunRecord]:
    """Runs by placement id; of a placement that is there twice the first counts."""
    runs: dict[str, RunRecord] = {}
    for at, placement in history.placements:
        if isinstance(placement.decision, Place):
            runs.setdefault(placement.decision.placement_id, RunRecord(placement.decision, placement.pool, at))
    for at, report in history.completions:
        run = runs.get(report.placement_id)
        if run is None:
            continue
        if isinstance(report, m.Started):
            run.started_at = run.started_at if run.started_at is not None else at
        elif isinstance(report, m.Released) and report.node_ids:
            for node_id in report.node_ids:
                run.freed_at.setdefault(node_id, at)
        elif isinstance(report, _ENDINGS):
            _end(run, report, at)
    _free_fenced_nodes(runs.values(), history)
    return runs


def _end(run: RunRecord, report: m.Completion, at: float) -> None:
    if _succeeded(report) and run.completed_at is None:
        run.completed_at = at
    if run.ended_at is None or at < run.ended_at:
        run.ended_at, run.ending = at, type(report).__name__.lower()
    for allocation in run.place.allocations:
        run.freed_at[allocation.node_id] = min(at, run.freed_at.get(allocation.node_id, at))


def _free_fenced_nodes(runs: Iterable[RunRecord], history: History) -> None:
    lost: dict[str, list[float]] = {}
    for at, event in history.nodes:
        if isinstance(event, m.Lost) and event.fenced:
            lost.setdefault(event.node_id, []).append(at)
    if not lost:
        return
    for run in runs:
        for allocation in run.place.allocations:
            after = [at for at in lost.get(allocation.node_id, ()) if at >= run.placed_at]
            if after:
                freed = run.freed_at.get(allocation.node_id, after[0])
                run.freed_at[allocation.node_id] = min(freed, min(after))


def audit(
    history: History,
    *,
    capacities: Mapping[str, int] | None = None,
    gpu_types: Mapping[str, str] | None = None,
    prefix: str = "",
    may_stay_unfinished: frozenset[str] = frozenset(),
    allow_repeats: bool = False,
) -> Audit:
    """Check what must hold, from the messages alone. Kinds of violation:

    `lost` (an arrival with no successful run), `completed-twice`, `completed-unplaced`, `placed-unsubmitted`,
    `placement-id-reused` (with `allow_repeats` an identical repetition, as a restart may cause, is no violation),
    `job-running-twice`, `wrong-size` (other GPUs in total than asked for), `wrong-shape` (as many, in other workers),
    `wrong-share` (another part of a device), `wrong-type` (a node whose type the job does not take), `unknown-node`,
    `over-capacity`, `device-conflict`.

    Jobs whose id does not begin with `prefix` are not judged (others may submit to the same topics, before or after the
    messages at hand), but the devices of their runs are. `capacities`, `gpu_types`: by node, beside those that `joined`
    events tell; a node of which no type is known is not judged by it. `may_stay_unfinished`: jobs that were cancelled
    or that nothing can hold.
    """
    result = Audit()
    runs = runs_of(history)
    arrivals: dict[str, list[m.JobArrival]] = {}
    for _, arrival in history.arrivals:
        arrivals.setdefault(arrival.job_id, []).append(arrival)
    _check_ids(history, result, allow_repeats)
    _check_runs(arrivals, runs, history, prefix, _types(history, gpu_types), result)
    _check_jobs(arrivals, runs, prefix, may_stay_unfinished, result)
    _check_capacity(runs.values(), _capacities(history, capacities), result)
    _check_devices(runs.values(), result)
    _check_job_overlap(runs.values(), result)
    return result


def _check_ids(history: History, result: Audit, allow_repeats: bool) -> None:
    seen: dict[str, Place] = {}
    for _, placement in history.placements:
        place = placement.decision
        if not isinstance(place, Place):
            continue
        first = seen.get(place.placement_id)
        if first is None:
            seen[place.placement_id] = place
        elif not (allow_repeats and first == place):
            result.add("placement-id-reused", f"{place.placement_id} of job {first.job_id}, again for {place.job_id}")


def _check_runs(
    arrivals: Mapping[str, Sequence[m.JobArrival]],
    runs: Mapping[str, RunRecord],
    history: History,
    prefix: str,
    types: Mapping[str, frozenset[str]],
    result: Audit,
) -> None:
    for run in runs.values():
        if asked := arrivals.get(run.place.job_id):
            _check_gang(asked, run, types, result)
        elif run.place.job_id.startswith(prefix):
            result.add("placed-unsubmitted", f"job {run.place.job_id} by {run.place.placement_id}")
    completed = {s.message.placement_id: s.message.job_id for s in history.completions if _succeeded(s.message)}
    for placement_id, job_id in completed.items():
        if placement_id not in runs and job_id.startswith(prefix):
            result.add("completed-unplaced", f"job {job_id} by {placement_id}")


def _check_jobs(
    arrivals: Mapping[str, Sequence[m.JobArrival]],
    runs: Mapping[str, RunRecord],
    prefix: str,
    may_stay_unfinished: frozenset[str],
    result: Audit,
) -> None:
    attempts: dict[str, list[RunRecord]] = {}
    for run in runs.values():
        attempts.setdefault(run.place.job_id, []).append(run)
    for job_id in arrivals:
        if not job_id.startswith(prefix):
            continue
        done = [run.place.placement_id for run in attempts.get(job_id, ()) if run.completed_at is not None]
        if len(done) > 1:
            result.add("completed-twice", f"job {job_id} by {', '.join(done)}")
        elif not done and job_id not in may_stay_unfinished:
            last = attempts[job_id][-1] if job_id in attempts else None
            how = f"last run {last.ending or 'not ended'}" if last else "never placed"
            result.add("lost", f"job {job_id}: {how}")


def _succeeded(report: m.Completion) -> bool:
    return isinstance(report, m.Completed) and report.exit_code == 0


def _check_gang(
    arrivals: Sequence[m.JobArrival], run: RunRecord, types: Mapping[str, frozenset[str]], result: Audit
) -> None:
    """The run is what one of the arrivals with this id has asked for; the topics do not say which of several counts."""
    found = [list(_wrongs(arrival, run, types)) for arrival in arrivals]
    if all(found):
        for kind, detail in found[0]:
            result.add(kind, f"job {run.place.job_id}, {run.place.placement_id}: {detail}")


def _wrongs(arrival: m.JobArrival, run: RunRecord, types: Mapping[str, frozenset[str]]) -> Iterable[tuple[str, str]]:
    """An allocation is a worker: its GPUs, how many such workers, their share of a device, the type of their nodes."""
    allocations = run.place.allocations
    share = WHOLE_GPU if arrival.gpu_fraction is None else round(arrival.gpu_fraction * WHOLE_GPU)
    shares = {allocation.gpu_milli for allocation in allocations}
    if shares - {share}:
        yield "wrong-share", f"asked for {share} thousandths of a device, has {sorted(shares)}"

    least, most = arrival.workers, arrival.workers
    if arrival.elastic is not None:
        least, most = min(least, arrival.elastic.min_workers), max(most, arrival.elastic.max_workers)
    given = Counter(len(allocation.gpus) for allocation in allocations)
    workers = len(allocations) - bool(arrival.remainder_gpus)
    if not least <= workers <= most or given != _gang(arrival, workers):
        low, high = _gpus(_gang(arrival, least)), _gpus(_gang(arrival, most))
        if low <= _gpus(given) <= high:
            yield "wrong-shape", f"asked for {_shape(_gang(arrival, arrival.workers))}, has {_shape(given)}"
        else:
            asked = f"{low}" if low == high else f"{low} to {high}"
            yield "wrong-size", f"asked for {asked} GPUs, has {_gpus(given)}"

    for node_id in dict.fromkeys(allocation.node_id for allocation in allocations):
        has = types.get(node_id)
        if arrival.gpu_types and has and has.isdisjoint(arrival.gpu_types):
            yield "wrong-type", f"takes {', '.join(arrival.gpu_types)}, {node_id} has {', '.join(sorted(has))}"


def _gang(arrival: m.JobArrival, workers: int) -> Counter[int]:
    """GPUs of a worker -> number of such workers."""
    gang = Counter({arrival.gpus_per_worker or 1: max(0, workers)})
    if arrival.remainder_gpus:
        gang[arrival.remainder_gpus] += 1
    return gang


def _gpus(gang: Counter[int]) -> int:
    return sum(gpus * workers for gpus, workers in gang.items())


def _shape(gang: Counter[int]) -> str:
    return " + ".join(f"{workers} x {gpus} GPUs" for gpus, workers in sorted(gang.items(), reverse=True))


def _types(history: History, known: Mapping[str, str] | None) -> dict[str, frozenset[str]]:
    """GPU types that each node has had: a node may join again as another machine."""
    types = {node_id: frozenset({gpu_type}) for node_id, gpu_type in (known or {}).items()}
    for _, event in history.nodes:
        if isinstance(event, m.Joined):
            types[event.node_id] = types.get(event.node_id, frozenset()) | {event.gpu_type}
    return types


def _capacities(history: History, known: Mapping[str, int] | None) -> dict[str, int]:
    """Largest number of GPUs that each node has had."""
    capacities = dict(known or {})
    for _, event in history.nodes:
        if isinstance(event, m.Joined | m.Capacity):
            capacities[event.node_id] = max(event.gpus, capacities.get(event.node_id, 0))
    return capacities


def _check_capacity(runs: Iterable[RunRecord], capacities: Mapping[str, int], result: Audit) -> None:
    for run in runs:
        for allocation in run.place.allocations:
            what = f"{run.place.placement_id} on {allocation.node_id}"
            gpus = capacities.get(allocation.node_id)
            if gpus is None:
                result.add("unknown-node", what)
            elif any(not 0 <= gpu < gpus for gpu in allocation.gpus) or len(set(allocation.gpus)) < len(
                allocation.gpus
            ):
                result.add("over-capacity", f"{what}: GPUs {list(allocation.gpus)} of {gpus}")


def _check_devices(runs: Iterable[RunRecord], result: Audit) -> None:
    """At no time more than a whole of any device; what ends at a moment makes room for what begins in it."""
    changes: dict[tuple[str, int], list[tuple[float, bool, int, str]]] = {}
    for run in runs:
        for allocation, start, end in run.held(until=float("inf")):
            if end <= start:  # refused at once, or stopped before it came: it never held anything
                continue
            for gpu in allocation.gpus:
                device = changes.setdefault((allocation.node_id, gpu), [])
                device.append((start, True, allocation.gpu_milli, run.place.placement_id))
                device.append((end, False, allocation.gpu_milli, run.place.placement_id))
    for (node_id, gpu), device_changes in changes.items():
        holders: dict[str, int] = {}
        for at, begins, milli, placement_id in sorted(device_changes):
            if not begins:
                holders.pop(placement_id, None)
                continue
            holders[placement_id] = holders.get(placement_id, 0) + milli
            if sum(holders.values()) > WHOLE_GPU:
                result.add("device-conflict", f"GPU {gpu} of {node_id} at {at:.3f}: {', '.join(holders)}")


def _check_job_overlap(runs: Iterable[RunRecord], result: Audit) -> None:
    by_job: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_job.setdefault(run.place.job_id, []).append(run)
    for job_id, attempts in by_job.items():
        attempts.sort(key=lambda run: run.placed_at)
        for earlier, later in pairwise(attempts):
            until = max((end for _, _, end in earlier.held(until=float("inf"))), default=earlier.placed_at)
            if until > later.placed_at:
                result.add(
                    "job-running-twice", f"job {job_id}: {earlier.place.placement_id}, {later.place.placement_id}"
                )
