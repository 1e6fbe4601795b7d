"""A simulated fleet of GPU nodes: what executors and node agents of one pool would do, without clock and I/O.

The caller tells it the time: `handle` takes a decision from `placements`, `advance` gives the reports that are due.
Everything that is to happen is in one heap, so thousands of runs cost nothing while they run.

A decision has the effect of once however often it comes: runs are known by placement id, also after their end, and a
repeated `place` is answered with how the run stands. `revoke` is always answered by `released`. The fleet also checks
what it is told: a device given to two live runs, a device or node that is not there, a job with two live runs. Such a
placement is rejected and counted in `violations`.

The run time is the label `loadgen.duration_s` of the placement. A run that was stopped resumes at its last checkpoint.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, Final

from streamsched.bus import messages as m
from streamsched.core.instructions import Place, Preempt, Revoke
from streamsched.core.model import WHOLE_GPU, Allocation
from streamsched.sim.nodes import NodeGroup

DURATION_LABEL: Final = "loadgen.duration_s"
_ENDED_KEPT: Final = 200_000
_DETAILS_KEPT: Final = 20
_MEMORY_MIB: Final = 16_384


@dataclass(frozen=True, slots=True)
class FleetNode:
    node_id: str
    gpus: int
    gpu_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """How the fleet behaves, and what it does wrong when asked to. Real seconds; shares are probabilities 0..1."""

    seed: int = 1
    start_delay_s: float = 0.02
    """Mean time from `place` to `started`; drawn between half and one and a half of it."""
    default_duration_s: float = 10.0
    """Of a job without the duration label."""
    checkpoint_s: float | None = None
    """A stopped run keeps its work up to the last multiple of this; None: it loses all."""
    reject_share: float = 0.0
    fail_share: float = 0.0
    """Of runs that fail (retryable) before their end."""
    lose_started_share: float = 0.0
    """Of `started` reports that are never sent."""
    duplicate_share: float = 0.0
    """Of reports that are sent twice."""
    delay_s: float = 0.0
    """Reports are late by up to this long, each on its own, so that they also change places."""


class _Stage(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class _Run:
    job_id: str
    placement_id: str
    allocations: tuple[Allocation, ...] = ()
    stage: _Stage = _Stage.ENDED
    duration_s: float = 0.0
    """Still to do when it started."""
    began_at: float = 0.0
    fails: bool = False
    last_report: m.Completion | None = None


@dataclass(slots=True)
class FleetCounts:
    placed: int = 0
    started: int = 0
    completed: int = 0
    failed: int = 0
    preempted: int = 0
    released: int = 0
    rejected: int = 0
    repeated: int = 0
    """Decisions on a run that had already been carried out."""
    unknown: int = 0
    """Preempt or revoke of a run that this fleet never had."""
    violations: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)


def nodes_of(pool: str, groups: Iterable[NodeGroup]) -> tuple[FleetNode, ...]:
    number = count()
    return tuple(
        FleetNode(f"{pool}-{group.gpu_type.lower()}-{next(number):04d}", group.gpus, group.gpu_type)
        for group in groups
        for _ in range(group.count)
    )


class SimulatedFleet:
    """The nodes of one pool and what runs on them. Times are epoch seconds and never go back."""

    def __init__(self, pool: str, groups: Iterable[NodeGroup], options: FleetOptions | None = None) -> None:
        self.pool = pool
        self.nodes = nodes_of(pool, groups)
        self.options = options or FleetOptions()
        self.counts = FleetCounts()
        self._rng = Random(f"{self.options.seed}/{pool}")
        self._order = count()
        self._agenda: list[tuple[float, int, m.Completion | _Run, _Stage | None]] = []
        self._runs: dict[str, _Run] = {}
        self._ended: list[str] = []
        self._live_by_job: dict[str, str] = {}
        self._done_s: dict[str, float] = {}
        self._held: dict[str, list[dict[str, int]]] = {n.node_id: [{} for _ in range(n.gpus)] for n in self.nodes}

    # ── what the caller does ─────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, placement: m.Placement, now: float) -> None:
        """Carry a decision out; decisions for other pools are not for this fleet."""
        if placement.pool != self.pool:
            return
        match placement.decision:
            case Place() as place:
                self._place(place, now)
            case Preempt() as preempt:
                self._stop(preempt, m.Preempted, now)
            case Revoke() as revoke:
                self._stop(revoke, m.Released, now)

    def advance(self, now: float) -> list[m.Completion]:
        """Let everything happen that is due by `now`; returns the reports to send, in order."""
        due: list[m.Completion] = []
        while self._agenda and self._agenda[0][0] <= now:
            at, _, what, stage = heapq.heappop(self._agenda)
            if not isinstance(what, _Run):
                due.append(what)
            elif stage is what.stage is _Stage.STARTING:
                self._start(what, at)
            elif stage is what.stage is _Stage.RUNNING:
                self._finish(what, at)
        return due

    def next_due(self) -> float | None:
        return self._agenda[0][0] if self._agenda else None

    @property
    def live_runs(self) -> int:
        return len(self._live_by_job)

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    def capacities(self) -> dict[str, int]:
        return {node.node_id: node.gpus for node in self.nodes}

    def joined(self, now: float) -> list[m.NodeEvent]:
        return [
            m.Joined(pool=self.pool, node_id=n.node_id, time=now, gpu_type=n.gpu_type, gpus=n.gpus) for n in self.nodes
        ]

    def heartbeats(self, now: float) -> list[m.NodeEvent]:
        return [m.Heartbeat(pool=self.pool, node_id=node.node_id, time=now) for node in self.nodes]

    def telemetry(self, now: float) -> list[m.GpuTelemetry]:
        return [
            m.GpuTelemetry(
                pool=self.pool,
                node_id=node.node_id,
                time=now,
                gpus=tuple(self._sample(gpu, bool(held)) for gpu, held in enumerate(self._held[node.node_id])),
            )
            for node in self.nodes
        ]

    # ── what happens to runs ─────────────────────────────────────────────────────────────────────────────────────────

    def _place(self, place: Place, now: float) -> None:
        known = self._runs.get(place.placement_id)
        if known is not None:
            self.counts.repeated += 1
            if known.last_report is not None:
                self._report(known.last_report, now)
            return
        self.counts.placed += 1
        run = _Run(place.job_id, place.placement_id, place.allocations)
        self._runs[run.placement_id] = run
        if objection := self._objection(place):
            self._reject(run, objection, now)
        elif self._rng.random() < self.options.reject_share:
            self._reject(run, (place.allocations[0].node_id, "injected fault"), now)
        else:
            run.duration_s = max(0.0, self._duration_s(place) - self._done_s.get(run.job_id, 0.0))
            self._hold(run)
            run.stage = _Stage.STARTING
            self._live_by_job[run.job_id] = run.placement_id
            self._later(run, now + self.options.start_delay_s * (0.5 + self._rng.random()))

    def _start(self, run: _Run, now: float) -> None:
        run.stage, run.began_at = _Stage.RUNNING, now
        self.counts.started += 1
        started = m.Started(pool=self.pool, job_id=run.job_id, placement_id=run.placement_id, time=now)
        run.last_report = started
        if self._rng.random() >= self.options.lose_started_share:
            self._report(started, now)
        run.fails = self._rng.random() < self.options.fail_share
        if run.fails:
            run.duration_s *= self._rng.random()
        self._later(run, now + run.duration_s)

    def _finish(self, run: _Run, now: float) -> None:
        ids: dict[str, Any] = {"pool": self.pool, "job_id": run.job_id, "placement_id": run.placement_id}
        if run.fails:
            self.counts.failed += 1
            self._keep_work(run, now)
            self._end(run, m.Failed(**ids, time=now, exit_code=1, reason="injected fault", retryable=True), now)
        else:
            self.counts.completed += 1
            self._done_s.pop(run.job_id, None)
            self._end(run, m.Completed(**ids, time=now), now)

    def _stop(self, order: Preempt | Revoke, answer: type[m.Preempted] | type[m.Released], now: float) -> None:
        run = self._runs.get(order.placement_id)
        report = answer(pool=self.pool, job_id=order.job_id, placement_id=order.placement_id, time=now)
        if run is None:
            self.counts.unknown += 1
            self._runs[order.placement_id] = _Run(order.job_id, order.placement_id, last_report=report)
            self._ended.append(order.placement_id)
            self._report(report, now)
            return
        if run.stage is _Stage.ENDED:
            self.counts.repeated += 1
            how_it_ended = run.last_report if answer is m.Preempted else None
            self._report(how_it_ended or report, now)
            return
        if answer is m.Preempted:
            self.counts.preempted += 1
        else:
            self.counts.released += 1
        if run.stage is _Stage.RUNNING:
            self._keep_work(run, now)
        self._end(run, report, now)

    def _reject(self, run: _Run, objection: tuple[str, str], now: float) -> None:
        self.counts.rejected += 1
        node_id, reason = objection
        run.allocations = ()
        self._end(
            run,
            m.Rejected(
                pool=self.pool,
                job_id=run.job_id,
                placement_id=run.placement_id,
                time=now,
                node_id=node_id,
                reason=reason,
            ),
            now,
        )

    def _end(self, run: _Run, report: m.Completion, now: float) -> None:
        for allocation in run.allocations:
            for gpu in allocation.gpus:
                self._held[allocation.node_id][gpu].pop(run.placement_id, None)
        if self._live_by_job.get(run.job_id) == run.placement_id:
            del self._live_by_job[run.job_id]
        run.stage, run.allocations, run.last_report = _Stage.ENDED, (), report
        self._report(report, now)
        self._ended.append(run.placement_id)
        if len(self._ended) > 2 * _ENDED_KEPT:
            for old in self._ended[:_ENDED_KEPT]:
                self._runs.pop(old, None)
            del self._ended[:_ENDED_KEPT]

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _objection(self, place: Place) -> tuple[str, str] | None:
        """(node, reason) if the placement cannot be right; it is counted."""
        if other := self._live_by_job.get(place.job_id):
            return self._violation("job-running-twice", place, place.allocations, f"it still has the run {other}")
        claimed: dict[tuple[str, int], int] = {}
        for allocation in place.allocations:
            held = self._held.get(allocation.node_id)
            if held is None:
                return self._violation("unknown-node", place, (allocation,), "no such node")
            for gpu in allocation.gpus:
                if not 0 <= gpu < len(held):
                    return self._violation("over-capacity", place, (allocation,), f"GPU {gpu} of {len(held)}")
                device = (allocation.node_id, gpu)
                claimed[device] = claimed.get(device, sum(held[gpu].values())) + allocation.gpu_milli
                if claimed[device] > WHOLE_GPU:
                    holders = ", ".join(held[gpu]) or "itself"
                    return self._violation("device-conflict", place, (allocation,), f"GPU {gpu} is held by {holders}")
        return None

    def _violation(self, kind: str, place: Place, allocations: tuple[Allocation, ...], why: str) -> tuple[str, str]:
        node_id = allocations[0].node_id if allocations else ""
        self.counts.violations[kind] += 1
        if len(self.counts.details) < _DETAILS_KEPT:
            self.counts.details.append(f"{kind}: {place.placement_id} of job {place.job_id} on {node_id}: {why}")
        return node_id, f"{kind}: {why}"

    def _hold(self, run: _Run) -> None:
        for allocation in run.allocations:
            for gpu in allocation.gpus:
                device = self._held[allocation.node_id][gpu]
                device[run.placement_id] = device.get(run.placement_id, 0) + allocation.gpu_milli

    def _keep_work(self, run: _Run, now: float) -> None:
        interval = self.options.checkpoint_s
        if interval:
            kept = math.floor((now - run.began_at) / interval) * interval
            self._done_s[run.job_id] = self._done_s.get(run.job_id, 0.0) + max(0.0, kept)

    def _duration_s(self, place: Place) -> float:
        try:
            duration_s = float(place.labels[DURATION_LABEL])
        except (KeyError, ValueError):
            return self.options.default_duration_s
        return duration_s if math.isfinite(duration_s) and duration_s >= 0 else self.options.default_duration_s

    def _report(self, report: m.Completion, now: float) -> None:
        copies = 2 if self._rng.random() < self.options.duplicate_share else 1
        for _ in range(copies):
            due = now + self._rng.random() * self.options.delay_s
            heapq.heappush(self._agenda, (due, next(self._order), report, None))

    def _later(self, run: _Run, at: float) -> None:
        heapq.heappush(self._agenda, (at, next(self._order), run, run.stage))

    def _sample(self, gpu: int, busy: bool) -> m.GpuSample:
        draw = self._rng.random()
        used = int(_MEMORY_MIB * (0.5 + 0.4 * draw)) if busy else 0
        values: dict[str, Any] = {
            "utilization": round(82.0 + 18.0 * draw, 1) if busy else 0.0,
            "framebuffer_used": used,
            "framebuffer_free": _MEMORY_MIB - used,
            "power_usage": round((180.0 if busy else 30.0) + 40.0 * draw, 1),
            "temperature": round((58.0 if busy else 30.0) + 12.0 * draw, 1),
            "xid_errors": 0,
            "ecc_dbe": 0,
        }
        return m.GpuSample(gpu=gpu, **values)
