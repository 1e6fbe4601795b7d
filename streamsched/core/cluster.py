"""The state of one pool and the only place that changes it.

Theory of operation. `handle(event, now)` folds one event into the state and returns instructions. It is a function of
the state, the event and `now` alone: folding the same journal gives the same state in any process. Time never goes
back: `now` is raised to the latest time seen.

What is stored (Redis, snapshots) is: `jobs`, `runs`, node records, the tenants' usage and `meta`. Everything else (the
order of the queue, free devices, class index, leases, reserved nodes) follows from those and is rebuilt by `load`.

An event that changes nothing leaves no trace, not even in `now`: it need not be journalled. `_waits_end` and
`_inventory_changed` only save looking where nothing can be found; they are never a reason to find something else.

A job is tried as a *run*, named by its placement id. Runs hold devices from `Place` until the executor has said that
they ended, or the node is known to be fenced. Reports name the run; a report of a run that is not there any more is
absorbed. This is what makes late, duplicate and reordered reports harmless.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from . import events as ev
from . import invariants
from .chances import Chances
from .changes import Changes, Meta, Notes
from .commit import layout_on_reserved, needed_of, nodes_of, why_no_room, why_not_placeable
from .config import SchedulerConfig
from .errors import BrokenInvariant
from .index import Index
from .instructions import Absorb, Instruction, Place, Preempt, Refuse, Revoke, SolveWindow, Why
from .inventory import Inventory, Request, request_kind
from .lifecycle import END_OF_STOP, Trigger, next_state
from .model import (
    BY_ARRIVAL,
    TERMINAL,
    WHOLE_GPU,
    Allocation,
    Job,
    JobSpec,
    JobState,
    Mark,
    NodeState,
    Run,
    RunState,
)
from .node import Node, NodeRecord
from .preemption import takes_whole_devices
from .problem import Assignment, SolveStatus
from .queue import Queue
from .reservations import choose_nodes
from .run_times import RunTimes, Said
from .speeds import measured
from .tenants import Accounts, TenantUsage
from .window import Ranker, Window, build
from .words import some

__all__ = ["Changes", "ClusterState", "Meta"]

_CLOCKS_APART_S = 5.0
"""How far the clocks of node agents and of schedulers may be apart."""
_ORDERS_PER_WINDOW = 500
"""Runs that one `WindowElapsed` stops, reminds or gives up at most: a journal record has to fit its topic."""
_STORY_LENGTH = 10_000
"""Transitions kept in memory to tell the story of a job in an error."""


class ClusterState:
    """One pool. See the module's docstring; `ranker` None folds events without building problems (replay)."""

    def __init__(self, pool: str, config: SchedulerConfig | None = None, ranker: Ranker | None = None) -> None:
        self.pool = pool
        self.config = config or SchedulerConfig()
        self.ranker = ranker
        self.run_times: RunTimes = Said()
        """What windows believe of run times; not stored, and nothing that is folded depends on it."""
        self.epoch = 0
        self.now = 0.0
        self.next_seq = 0
        self.jobs: dict[str, Job] = {}
        self.runs: dict[str, Run] = {}
        self.inventory = Inventory()
        self.accounts = Accounts()
        self.index = Index()
        self.queue = Queue()
        """The waiting jobs in rank order, for the windows; not stored."""
        self.windows = 0
        """Windows opened by this process; only names them."""
        self.window: Window | None = None
        """The last window opened; not stored, since a solution is checked at commit whatever window it is of."""
        self._chances: tuple[int, Chances] | None = None
        """With the version of the inventory that it is about."""
        self._waits_end = math.inf
        """No job has waited too long before this time."""
        self._orders_left = 0
        """Of `_ORDERS_PER_WINDOW`, in the window being opened."""
        self._unfinished_timers = False
        self._inventory_changed = False
        """Whether a waiting job may fit now that did not, or the other way round."""
        self._notes = Notes()
        self._story: deque[tuple[float, str, str]] = deque(maxlen=_STORY_LENGTH)
        self._out: list[Instruction] = []

    # ── the entry ────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: ev.CoreEvent, now: float) -> list[Instruction]:
        """Fold one event; returns what is to be done, in order."""
        before = self.now
        self.now = max(before, now)
        self._out = []
        self._notes.any = False
        _HANDLERS[type(event)](self, event)
        if not self._notes.any:
            self.now = before
        return self._out

    # ── jobs and commands ────────────────────────────────────────────────────────────────────────────────────────────

    def _job_arrived(self, event: ev.JobArrived) -> None:
        spec = event.spec
        known = self.jobs.get(spec.job_id)
        if known is not None:
            if _same_request(known.spec, spec):
                self._absorb("duplicate-job", spec.job_id)
            else:
                self._refuse("conflict", f"job {spec.job_id} exists with another specification; use another id")
            return
        why = self.inventory.never_fits(spec)
        job = Job(
            spec=spec,
            seq=self.next_seq,
            state=JobState.UNFIT if why else JobState.QUEUED,
            queued_at=self.now,
            reason=f"can never fit: {why}" if why else "",
        )
        self.next_seq += 1
        self._put_job(job)

    def _cancel(self, event: ev.CancelRequested) -> None:
        job = self._commanded(event)
        if job is None:
            return
        if job.state in TERMINAL:
            self._absorb("already-ended", f"job {event.job_id} is {job.state}")
        elif job.state is JobState.STOPPING:
            self._put_job(replace(job, then=JobState.CANCELLED, reason="cancelled"))
        elif job.placement_id is not None:
            self._stop(job, Revoke, "cancelled", then=JobState.CANCELLED)
        else:
            self._move(job, Trigger.CANCEL, reason="cancelled")

    def _hold(self, event: ev.HoldRequested) -> None:
        job = self._commanded(event)
        if job is None:
            return
        if job.state in (JobState.QUEUED, JobState.UNFIT):
            self._move(job, Trigger.HOLD, reason="held")
        elif job.state is JobState.STOPPING and job.then is JobState.QUEUED:
            self._put_job(replace(job, then=JobState.HELD))
        elif job.state is JobState.HELD or job.then is JobState.HELD:
            self._absorb("already-held", event.job_id)
        else:
            self._refuse("not-applicable", f"job {event.job_id} is {job.state}: only a waiting job can be held")

    def _release(self, event: ev.ReleaseRequested) -> None:
        job = self._commanded(event)
        if job is None:
            return
        if job.state is JobState.HELD:
            self._move(job, Trigger.RELEASE, reason="", queued_at=self.now)
            self._judge_fit(event.job_id)
        elif job.state is JobState.STOPPING and job.then is JobState.HELD:
            self._put_job(replace(job, then=JobState.QUEUED))
        else:
            self._refuse("not-applicable", f"job {event.job_id} is {job.state}, not held")

    def _reprioritise(self, event: ev.ReprioritiseRequested) -> None:
        job = self._commanded(event)
        if job is None:
            return
        if job.state in TERMINAL:
            self._refuse("not-applicable", f"job {event.job_id} is {job.state}")
            return
        self._put_job(
            replace(
                job,
                priority_class=event.priority_class or job.priority_class,
                weight=event.weight if event.weight is not None else job.weight,
            )
        )

    def _commanded(
        self, event: ev.CancelRequested | ev.HoldRequested | ev.ReleaseRequested | ev.ReprioritiseRequested
    ) -> Job | None:
        """The job a command is for, or None when the command was refused or has been applied before."""
        job = self.jobs.get(event.job_id)
        if job is None:
            self._refuse("unknown-job", f"no job {event.job_id} in pool {self.pool}")
            return None
        if 0 <= event.offset <= job.command_offset:
            self._absorb("duplicate-command", event.job_id)
            return None
        # Also a command that is refused has been seen: redelivered later it must not take effect after all.
        if event.offset > job.command_offset:
            job = self._put_job(replace(job, command_offset=event.offset))
        return job

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run_of(self, event: Any) -> Run | None:
        """The run that a report names; absorbs the report when the run has ended or the names do not match."""
        run = self.runs.get(event.placement_id)
        if run is None:
            self._absorb("stale-run", f"{type(event).__name__} of {event.placement_id}, which is not there (any more)")
        elif run.job_id != event.job_id:
            self._refuse("invalid", f"placement {event.placement_id} is of job {run.job_id}, not {event.job_id}")
            return None
        return run

    def _run_started(self, event: ev.RunStarted) -> None:
        run = self._run_of(event)
        if run is None:
            return
        if run.started_at is not None:
            self._absorb("duplicate-start", run.placement_id)
            return
        # An executor's clock may be anything; what is charged for is the time between the placement and now.
        run = self._put_run(replace(run, started_at=max(run.placed_at, min(event.time, self.now))))
        if run.state is not RunState.PLACED:
            self._absorb("late-start", f"{run.placement_id} is {run.state}")
            return
        self._put_run(replace(run, state=RunState.RUNNING))
        self._move(self.jobs[run.job_id], Trigger.START, reason="", refusals=0, refused_by=())
        for allocation in run.allocations:
            self._forget_refusals(allocation.node_id)

    def _run_progressed(self, event: ev.RunProgressed) -> None:
        run = self._run_of(event)
        if run is None:
            return
        if event.checkpointed:
            latest = max(run.last_checkpoint_at or run.placed_at, min(event.time, self.now))
            run = self._put_run(replace(run, last_checkpoint_at=latest))
        job = self.jobs.get(run.job_id)
        if job is None or job.placement_id != run.placement_id:
            return
        if event.fraction is not None:
            job = self._put_job(replace(job, progress=event.fraction))
        self._measure(run, job, event)

    def _measure(self, run: Run, job: Job, event: ev.RunProgressed) -> None:
        """Learn how fast the job is, where all of its workers are on one GPU type."""
        amount, unit = (event.fraction, "fraction") if event.step is None else (float(event.step), "step")
        types = {self.inventory.nodes[a.node_id].record.spec.gpu_type for a in run.allocations}
        if amount is None or len(types) != 1:
            return
        now, since = Mark(unit, amount, event.time), run.measured_from
        if since is None or since.unit != unit or amount < since.amount or event.time < since.time:
            self._put_run(replace(run, measured_from=now))  # the first report, or it went back to a checkpoint
            return
        rate = measured(since, now, min(types))
        if rate is not None and rate != job.rate:
            self._put_job(replace(job, rate=rate))

    def _run_completed(self, event: ev.RunCompleted) -> None:
        run = self._run_of(event)
        if run is None:
            return
        if event.exit_code:
            self._run_broke(run, f"exit code {event.exit_code}", event.exit_code)
            return
        self._end_run(run)
        stop_at = run.stop_at if run.state is RunState.STOPPING else None
        if stop_at is not None and event.time > stop_at:
            # It was told to stop and then its process ended: that is the stop, not the job's end. In doubt (clocks
            # differ) the job runs again: work done twice is better than work counted as done that was not.
            self._after_stop(run)
        else:
            self._finish(run, Trigger.COMPLETE, "", 0)

    def _run_failed(self, event: ev.RunFailed) -> None:
        run = self._run_of(event)
        if run is None:
            return
        if event.retryable and run.stop_at is None:
            self._end_run(run)
            self._requeue(run, event.reason or "failed, not by its own fault", backoff=True)
        else:
            self._run_broke(run, event.reason or f"exit code {event.exit_code}", event.exit_code)

    def _run_broke(self, run: Run, reason: str, exit_code: int | None) -> None:
        """The run has ended badly: held against the job, unless the run was told to stop (many end so then)."""
        self._end_run(run)
        if run.stop_at is None:
            self._finish(run, Trigger.FAIL, reason, exit_code)
        else:
            self._after_stop(run)

    def _run_preempted(self, event: ev.RunPreempted) -> None:
        run = self._run_of(event)
        if run is not None:
            self._end_run(run)
            self._after_stop(run)

    def _run_rejected(self, event: ev.RunRejected) -> None:
        run = self._run_of(event)
        if run is None:
            return
        self._end_run(run)
        if run.stop_at is not None:
            self._after_stop(run)
            return
        nodes = {a.node_id for a in run.allocations}
        if event.node_id in nodes:
            nodes = {event.node_id}
        if len(nodes) == 1:
            self._count_refusal(min(nodes), run.job_id)
        job = self.jobs[run.job_id]
        self._put_job(replace(job, refused_by=tuple(sorted(nodes.union(job.refused_by)))))
        self._requeue(run, f"refused by {some(nodes)}: {event.reason or 'no reason given'}", backoff=True)

    def _run_released(self, event: ev.RunReleased) -> None:
        run = self._run_of(event)
        if run is None:
            return
        gone = frozenset(event.node_ids)
        left = tuple(a for a in run.allocations if gone and a.node_id not in gone)
        if len(left) == len(run.allocations):
            self._absorb("not-held", f"{run.placement_id} holds nothing on {some(gone)}")
        elif left:
            self._shrink_run(run, left)
        else:
            self._end_run(run)
            self._after_stop(run)

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _node_joined(self, event: ev.NodeJoined) -> None:
        spec = event.spec
        node = self.inventory.nodes.get(spec.node_id)
        if node is None:
            self.inventory.add(Node(NodeRecord(spec=spec, capacity=spec.gpus)))
            self._inventory_changed = True
            self._notes.node(spec.node_id)
            return
        record = replace(node.record, spec=spec, capacity=spec.gpus, lost=False)
        if record == node.record:
            self._absorb("known-node", spec.node_id)
            return
        self._inventory_changed = True
        self._set_node(node, record)
        self._revive_runs(node)

    def _node_capacity(self, event: ev.NodeCapacityChanged) -> None:
        node = self._node_of(event.node_id)
        if node is None:
            return
        if node.record.capacity == event.gpus:
            self._absorb("no-change", f"node {event.node_id} has {event.gpus} GPUs already")
            return
        spec = replace(node.spec, gpus=max(node.spec.gpus, event.gpus))
        self._inventory_changed = True
        self._set_node(node, replace(node.record, spec=spec, capacity=event.gpus))

    def _node_heard(self, event: ev.NodeHeard) -> None:
        node = self._node_of(event.node_id)
        if node is not None and node.record.lost:
            self._set_node(node, replace(node.record, lost=False))
            self._revive_runs(node)

    def _node_cordoned(self, event: ev.NodeCordoned) -> None:
        self._mark_node(event.node_id, NodeState.CORDONED)

    def _node_uncordoned(self, event: ev.NodeUncordoned) -> None:
        self._mark_node(event.node_id, NodeState.UP)

    def _node_drained(self, event: ev.NodeDrained) -> None:
        node = self._mark_node(event.node_id, NodeState.DRAINING)
        for placement_id in sorted(node.run_ids) if node else ():
            run = self.runs[placement_id]
            job = self.jobs[run.job_id]
            if job.spec.preemptible and job.placement_id == placement_id and run.stop_at is None:
                self._stop(job, Preempt, f"node {event.node_id} is drained", then=JobState.QUEUED)

    def _mark_node(self, node_id: str, state: NodeState) -> Node | None:
        node = self._node_of(node_id)
        if node is None:
            return None
        if node.record.state is state:
            self._absorb("no-change", f"node {node_id} is {node.record.state}")
            return None
        refused = () if state is NodeState.UP else node.record.refused
        self._set_node(node, replace(node.record, state=state, until=0.0, refused=refused))
        return node

    def _node_lost(self, event: ev.NodeLost) -> None:
        node = self._node_of(event.node_id)
        if node is None:
            return
        if not node.record.lost:
            self._set_node(node, replace(node.record, lost=True, lost_at=self.now))
        elif not event.fenced:
            self._absorb("no-change", f"node {event.node_id} is lost already")
        for placement_id in sorted(node.run_ids):
            run = self.runs[placement_id]
            if event.fenced and _was_there(run, event.time):
                self._lose_members(run, event.node_id)
            elif event.fenced:
                self._doubt(run, event.node_id)
            elif run.lost_at is None:
                state = RunState.LOST if run.stop_at is None else run.state
                self._put_run(replace(run, state=state, lost_at=self.now))

    def _lose_members(self, run: Run, node_id: str) -> None:
        """The members of a gang on a fenced node are certainly gone; the rest of the gang is told to stop."""
        left = tuple(a for a in run.allocations if a.node_id != node_id)
        reason = f"node {node_id} is lost"
        if not left:
            self._end_run(run)
            if run.stop_at is not None:
                self._after_stop(run)
            else:
                self._requeue(run, reason, backoff=False)
            return
        if run.stop_at is None:
            self._stop(self.jobs[run.job_id], Revoke, reason, then=JobState.QUEUED)
        self._shrink_run(self.runs[run.placement_id], left)

    def _doubt(self, run: Run, node_id: str) -> None:
        """Not known to have been there when its node was fenced: an executor may have started it since.

        So it is told to stop and holds its GPUs until it is known to have ended; its job waits for that no longer than
        for a silent node.
        """
        if run.stop_at is None:
            self._stop(self.jobs[run.job_id], Revoke, f"node {node_id} was lost", then=JobState.QUEUED)
            run = self.runs[run.placement_id]
        if run.lost_at is None and run.state is RunState.STOPPING:
            self._put_run(replace(run, lost_at=self.now))

    def _shrink_run(self, run: Run, left: tuple[Allocation, ...]) -> None:
        """Only `left`, on nodes of its own, is held from now on; it is lost no more if the nodes thought lost went."""
        kept = {a.node_id for a in left}
        self._give_back(run, [a for a in run.allocations if a.node_id not in kept])
        self._revive_run(self._put_run(replace(run, allocations=left)))

    def _revive_runs(self, node: Node) -> None:
        for placement_id in sorted(node.run_ids):
            self._revive_run(self.runs[placement_id])

    def _revive_run(self, run: Run) -> None:
        """If all nodes of the run are there, it goes on: to run, or to stop. A run given up stays given up."""
        if run.lost_at is None or any(self.inventory.nodes[a.node_id].record.lost for a in run.allocations):
            return
        if run.stop_at is not None:
            if run.state is RunState.STOPPING:
                self._put_run(replace(run, lost_at=None))
            return
        state = RunState.PLACED if run.started_at is None else RunState.RUNNING
        lease = self.now + self.config.lease_s if state is RunState.PLACED else run.lease_until
        self._put_run(replace(run, state=state, lost_at=None, lease_until=lease))
        job = self.jobs[run.job_id]
        if state is RunState.RUNNING and job.state is JobState.PLACED:
            self._move(job, Trigger.START, reason="", refusals=0, refused_by=())

    def _node_of(self, node_id: str) -> Node | None:
        node = self.inventory.nodes.get(node_id)
        if node is None:
            self._refuse("unknown-node", f"no node {node_id} in pool {self.pool}: it has to join first")
        return node

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _epoch_started(self, event: ev.EpochStarted) -> None:
        if event.epoch <= self.epoch:
            raise BrokenInvariant(f"pool {self.pool}: epoch {event.epoch} after {self.epoch}")
        self.epoch = event.epoch
        self.config = event.config
        self._notes.any = True
        self._inventory_changed = True
        self._waits_end = -math.inf

    def _window_elapsed(self, event: ev.WindowElapsed) -> None:
        self._orders_left = _ORDERS_PER_WINDOW
        self._unfinished_timers = False
        self._expire_leases()
        self._give_up_lost_runs()
        self._say_stop_again()
        self._end_quarantines()
        self._forget_finished()
        self._forget_nodes()
        self._judge_fits()
        self._keep_reservations()
        self._make_reservations()
        self._start_reserved()
        self._ask()

    def _as_many_as_fit(self, placement_ids: Iterable[str]) -> list[str]:
        """In order; the rest is due at the next window still, since it is found in the stored state."""
        due = sorted(placement_ids)
        if not due:
            return due
        taken = due[: self._orders_left]
        self._orders_left -= len(taken)
        self._unfinished_timers |= len(taken) < len(due)
        return taken

    def _ask(self) -> None:
        if self.ranker is not None and self.index.queued:
            self.windows += 1
            self.window = build(self, self.ranker, self.windows, self.now)
            if self.window.problem.candidates:
                self._out.append(SolveWindow(problem=self.window.problem))

    def _expire_leases(self) -> None:
        """Nothing was heard of it: a node whose executor is dead would take one job after the other."""
        for placement_id in self._as_many_as_fit(p for p, until in self.index.leases.items() if until < self.now):
            run = self.runs[placement_id]
            job = self.jobs[run.job_id]
            self._stop(job, Revoke, "not started within its lease", then=JobState.QUEUED)
            nodes = {a.node_id for a in run.allocations}
            if len(nodes) == 1:
                self._count_refusal(min(nodes), run.job_id)

    def _say_stop_again(self) -> None:
        """Who does not answer a preempt or revoke within a lease is told (again) to stop at once; not silent nodes."""
        for placement_id in self._as_many_as_fit(filter(self._stop_is_unanswered, self.index.stopping)):
            run = self._put_run(replace(self.runs[placement_id], stop_said_at=self.now))
            self._decide(Revoke, run, "no answer to the last order to stop")

    def _stop_is_unanswered(self, placement_id: str) -> bool:
        run = self.runs[placement_id]
        said_at = run.stop_said_at if run.stop_said_at is not None else run.stop_at
        if said_at is None or said_at + self.config.lease_s >= self.now:
            return False
        return not all(self.inventory.nodes[a.node_id].record.lost for a in run.allocations)

    def _give_up_lost_runs(self) -> None:
        for placement_id in self._as_many_as_fit(filter(self._grace_is_over, self.index.lost_runs)):
            self._give_up(self.runs[placement_id])

    def _grace_is_over(self, placement_id: str) -> bool:
        lost_at = self.runs[placement_id].lost_at
        return lost_at is not None and self.now - lost_at >= self.config.lost_grace_s

    def _give_up(self, run: Run) -> None:
        """The job goes on without the run. What the run holds on a silent node stays held: it may be alive there.

        Its tenant does not pay for that: the job could not run again within a quota that the lost run uses up.
        """
        if not run.given_up:
            self._charge(self.jobs[run.job_id].spec.tenant, -_gpu_milli(run.allocations))
            run = self._put_run(replace(run, given_up=True))
        if run.stop_at is None:
            self._put_run(replace(run, stop_at=self.now, stop_said_at=self.now))
            self._decide(Revoke, run, "a node of it is lost")
            self._requeue(run, "a node of it was lost", backoff=False)
        else:
            self._put_run(replace(run, lost_at=None))
            if self.jobs[run.job_id].state not in TERMINAL:
                self._after_stop(run)

    def _end_quarantines(self) -> None:
        for node_id in sorted(node_id for node_id, until in self.index.quarantined.items() if until <= self.now):
            node = self.inventory.nodes[node_id]
            self._set_node(node, replace(node.record, state=NodeState.UP, until=0.0, refused=()))

    def _forget_finished(self) -> None:
        """Finished jobs are remembered for a while (their ids tell duplicates), then forgotten: O(forgotten)."""
        keep_from = self.now - self.config.finished_keep_s
        finished = self.index.finished
        for job_id in list(takewhile(lambda job_id: finished[job_id] < keep_from, finished)):
            if job_id not in self.index.runs_of:
                del self.jobs[job_id]
                self.index.forget_job(job_id)
                self._notes.job(job_id)

    def _forget_nodes(self) -> None:
        """A node that has been lost for long and holds nothing is forgotten: pools that scale do not grow for ever."""
        keep_from = self.now - self.config.finished_keep_s
        for node_id in sorted(node_id for node_id, since in self.index.lost_nodes.items() if since < keep_from):
            if not self.inventory.nodes[node_id].run_ids:
                self.inventory.remove(node_id)
                self.index.forget_node(node_id)
                self._notes.node(node_id)
                self._inventory_changed = True

    # ── reservations and tenants ─────────────────────────────────────────────────────────────────────────────────────

    def _keep_reservations(self) -> None:
        """Give up what the tenant's quota forbids; choose anew for all others, the first to arrive first.

        Nodes that came free since have more room than those that still drain. What a job can be sure of only grows: the
        nodes that it has stay as free as they are. A job for which runs were to make room does not choose anew: it is
        an ordinary waiting job again where that room has gone.
        """
        for job in reversed(self._reserving_jobs()):
            if not self._may_reserve(job) or (job.awaits and self._waits_in_vain(job)):
                self._drop_reservation(job)
        draining = [job for job in self._reserving_jobs() if not job.awaits]
        theirs = {job.spec.job_id for job in draining}
        taken = {node_id: owner for node_id, owner in self.index.reserved.items() if owner not in theirs}
        moved: list[tuple[Job, tuple[str, ...]]] = []
        for job in draining:
            nodes = choose_nodes(job, self.inventory, taken)
            taken |= dict.fromkeys(nodes, job.spec.job_id)
            if nodes != job.reservation:
                moved.append((job, nodes))
        # All give up first: one may get what another had.
        for job, nodes in [(self._drop_reservation(job), nodes) for job, nodes in moved]:
            if nodes:
                self._put_reservation(job, nodes)

    def _drop_reservation(self, job: Job) -> Job:
        return self._put_job(replace(job, reservation=(), awaits=(), reason=""))

    def _can_drain(self, job: Job) -> bool:
        """Whether its nodes could hold it once they are empty."""
        usable = (n for n in job.reservation if n in self.inventory.nodes and self.inventory.nodes[n].usable)
        return tuple(usable) == job.reservation and self.inventory.would_hold(job.spec, job.reservation)

    def _waits_in_vain(self, job: Job) -> bool:
        """Whether the room that was made for it has gone, or all have left and it does not fit nevertheless."""
        if not self._can_drain(job):
            return True
        all_left = not any(placement_id in self.runs for placement_id in job.awaits)
        return all_left and layout_on_reserved(self, job, job.reservation) is None

    def _make_reservations(self) -> None:
        """Keep nodes free for the jobs that have waited too long, oldest first."""
        left = self.config.reservations_max - sum(not job.awaits for job in self._reserving_jobs())
        if left <= 0 or self.now < self._waits_end:
            return
        waiting = [self.jobs[job_id] for job_id in self.index.queued if job_id not in self.index.reserving]
        overdue = sorted((job for job in waiting if self._waits_until(job) <= self.now), key=BY_ARRIVAL)
        if not overdue:
            self._waits_end = min(map(self._waits_until, waiting), default=math.inf)
        hopeless: set[Request] = set()
        for job in overdue:
            kind = request_kind(job.spec)
            if left and kind not in hopeless and self._may_reserve(job):
                if self._reserve_for(job):
                    left -= 1
                else:
                    hopeless.add(kind)

    def _waits_until(self, job: Job) -> float:
        """From then on nodes are kept free for it: all its times in the queue count, since the last refusal. Where the
        ranking decides who runs it is first before that (`waited_too_long`), and runs have time to become victims and
        to go.
        """
        first = self.config.preempts_within_class and takes_whole_devices(job.spec)
        for_others_s = self.config.preempt_interval_s + self.config.lease_s if first else 0.0
        return job.queued_at + (self.config.reserve_after_s - job.waited_s) + for_others_s

    def _may_reserve(self, job: Job) -> bool:
        """Whether its tenant may ever hold it beside the others that nodes are kept free for.

        What the tenant holds now does not matter: it cannot take more, so the quota drains as the nodes do. Pledges
        beyond the quota would wait for each other.
        """
        spec = job.spec
        pledged = self._pledged(spec.tenant, job)
        return job.not_before <= self.now and self._quota(spec.tenant) - pledged >= self.inventory.most_milli(spec)

    def _reserve_for(self, job: Job) -> bool:
        if not self.inventory.holds_without(job.spec, self.index.reserved):
            return False
        nodes = choose_nodes(job, self.inventory, self.index.reserved)
        self._put_reservation(job, nodes)
        return bool(nodes)

    def _put_reservation(self, job: Job, nodes: tuple[str, ...]) -> None:
        self._put_job(replace(job, reservation=nodes, reason="waited too long: nodes are kept free for it"))

    def _reserving_jobs(self) -> list[Job]:
        return sorted((self.jobs[job_id] for job_id in self.index.reserving), key=BY_ARRIVAL)

    def _start_reserved(self) -> None:
        """A job whose nodes have drained starts there, without a solver; one per window, since gangs may be large."""
        started = False
        for job in self._reserving_jobs():
            assignment = layout_on_reserved(self, job, job.reservation)
            if assignment is None:
                continue
            if started:
                self._unfinished_timers = True
                return
            policy = "preemption" if job.awaits else "reservation"
            self._place(assignment, Why(policy=policy, solver=SolveStatus.GREEDY))
            started = True

    @property
    def reserved(self) -> dict[str, str]:
        """Node -> job that it is kept free for."""
        return self.index.reserved

    @property
    def tenants(self) -> dict[str, TenantUsage]:
        """What the tenants hold and have used."""
        return self.accounts.by_tenant

    def quota_left(self, tenant: str, job: Job | None = None) -> float:
        """Thousandths of GPUs that the tenant may still take for `job`; infinite without a quota.

        What its jobs with reservations will take is not left for its others: they would never start.
        """
        return self._quota(tenant) - self.usage(tenant).held_milli - self._pledged(tenant, job)

    def _quota(self, tenant: str) -> float:
        """Thousandths of GPUs; infinite without one."""
        policy = self.config.tenants.get(tenant)
        return math.inf if policy is None or policy.quota_gpus is None else round(policy.quota_gpus * WHOLE_GPU)

    def _pledged(self, tenant: str, but: Job | None) -> int:
        """What the tenant's jobs with reservations will take, all but one."""
        pledged = (other.spec for other in map(self.jobs.__getitem__, self.index.reserving) if other is not but)
        return sum(self.inventory.most_milli(spec) for spec in pledged if spec.tenant == tenant)

    def usage(self, tenant: str) -> TenantUsage:
        return self.accounts.usage(tenant)

    def _charge(self, tenant: str, milli: int) -> None:
        new = tenant not in self.tenants
        half_life_s = self.config.usage_half_life_s
        self.accounts.charge(tenant, self.now, half_life_s, milli)
        self._notes.tenant(tenant)
        if new:
            for gone in self.accounts.forget_idle(self.now, half_life_s, self.config.tenants):
                self._notes.tenant(gone)

    # ── what can fit ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _judge_fits(self) -> None:
        """Look again at every waiting job after the inventory changed; once per kind of request."""
        if not self._inventory_changed:
            return
        self._inventory_changed = False
        known: dict[Request, str | None] = {}
        for job_id in [*self.index.unfit, *self.index.queued]:
            spec = self.jobs[job_id].spec
            kind = request_kind(spec)
            if kind not in known:
                known[kind] = self.inventory.never_fits(spec)
            self._set_fit(job_id, known[kind])

    def _judge_fit(self, job_id: str) -> None:
        self._set_fit(job_id, self.inventory.never_fits(self.jobs[job_id].spec))

    def _set_fit(self, job_id: str, why: str | None) -> None:
        job = self.jobs[job_id]
        if job.state is JobState.UNFIT and not why:
            self._move(job, Trigger.FIT, reason="", queued_at=self.now)
        elif job.state is JobState.QUEUED and why:
            self._move(job, Trigger.UNFIT, reason=f"can never fit: {why}")

    # ── solutions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _window_solved(self, event: ev.WindowSolved) -> None:
        """Commit a solution, job by job, against the state as it is now; what does not hold any more is left out."""
        solution = event.solution
        # Who starts at once goes first: it may use what is free on a node that is then kept for who waits for room.
        for assignment in sorted(solution.assignments, key=_waits_for_room):
            why = Why(
                policy=solution.policy,
                score=assignment.score,
                solver=solution.status,
                gap=solution.gap,
                window=solution.window,
            )
            stale = self._commit(assignment, why)
            if stale:
                self._absorb("stale-assignment", stale)

    def _commit(self, assignment: Assignment, why: Why) -> str | None:
        """None when it was carried out, else why not. Nobody is stopped for a job that fits without."""
        job = self.jobs.get(assignment.job_id)
        if job is not None and job.awaits:
            return f"job {assignment.job_id} waits for room already"
        stale = why_not_placeable(self, assignment)
        if stale is None:
            self._place(assignment, why)
        elif assignment.after:
            stale = why_no_room(self, assignment)
            if stale is None:
                self._make_room(assignment)
        return stale

    def _make_room(self, assignment: Assignment) -> None:
        """Tell its victims to stop and keep its nodes free until it starts there."""
        job_id, awaits = assignment.job_id, needed_of(self, assignment)
        leaving = self.making_room()
        for placement_id in (p for p in awaits if p not in leaving):
            victim = self._put_job(replace(self.jobs[self.runs[placement_id].job_id], preempted_at=self.now))
            self._stop(victim, Preempt, f"makes room for job {job_id}", then=JobState.QUEUED)
        reason = f"preempting: {len(awaits)} runs make room for it"
        job = self.jobs[job_id]
        self._put_job(replace(job, reservation=nodes_of(assignment), awaits=awaits, reason=reason))

    def making_room(self) -> set[str]:
        """Runs that were told to stop for jobs that wait for it still."""
        return {
            placement_id for job in self._reserving_jobs() for placement_id in job.awaits if placement_id in self.runs
        }

    def _place(self, assignment: Assignment, why: Why) -> None:
        job = self.jobs[assignment.job_id]
        spec, attempt = job.spec, job.attempt + 1
        placement_id = f"{spec.job_id}:{job.seq}:{attempt}"
        allocations = []
        for node_id, gpus in assignment.workers:
            node = self.inventory.nodes[node_id]
            allocation = node.allocate(spec, gpus)
            node.take(placement_id, allocation)
            allocations.append(allocation)
        for node_id in dict.fromkeys(node_id for node_id, _ in assignment.workers):
            self.inventory.refile(self.inventory.nodes[node_id])
        run = Run(
            placement_id=placement_id,
            job_id=spec.job_id,
            attempt=attempt,
            allocations=tuple(allocations),
            state=RunState.PLACED,
            placed_at=self.now,
            lease_until=self.now + self.config.lease_s,
        )
        self._put_run(run)
        self._charge(spec.tenant, _gpu_milli(run.allocations))
        self._move(job, Trigger.PLACE, attempt=attempt, placement_id=placement_id, reason="", then=None)
        self._out.append(
            Place(
                placement_id=placement_id,
                job_id=spec.job_id,
                attempt=attempt,
                allocations=run.allocations,
                lease_until=run.lease_until,
                why=why,
                labels=spec.labels,
                tenant=spec.tenant,
                traceparent=spec.traceparent,
            )
        )

    # ── ends and stops ───────────────────────────────────────────────────────────────────────────────────────────────

    def _stop(self, job: Job, how: type[Preempt] | type[Revoke], reason: str, then: JobState) -> None:
        """Tell the job's run to stop; its GPUs stay held until the executor says that they are free."""
        if job.placement_id is None:
            raise BrokenInvariant(f"job {job.spec.job_id} has no run to stop\n{self.story(job.spec.job_id)}")
        run = self._put_run(
            replace(self.runs[job.placement_id], state=RunState.STOPPING, stop_at=self.now, stop_said_at=self.now)
        )
        self._decide(how, run, reason)
        self._move(job, Trigger.STOP, then=then, reason=reason)

    def _decide(self, how: type[Preempt] | type[Revoke], run: Run, reason: str) -> None:
        self._out.append(how(placement_id=run.placement_id, job_id=run.job_id, attempt=run.attempt, reason=reason))

    def _end_run(self, run: Run) -> None:
        """Nothing of the run is left: its GPUs are free. Its job is the caller's to move."""
        self._give_back(run, run.allocations)
        del self.runs[run.placement_id]
        self.index.forget_run(run)
        self._notes.run(run.placement_id)
        job = self.jobs[run.job_id]
        if job.state in TERMINAL and job.placement_id == run.placement_id:
            self._put_job(replace(job, placement_id=None))

    def _give_back(self, run: Run, allocations: Sequence[Allocation]) -> None:
        """The devices are free and what they did is credited to the job."""
        job = self.jobs[run.job_id]
        gpu_milli = _gpu_milli(allocations)
        if not run.given_up:
            self._charge(job.spec.tenant, -gpu_milli)
        if run.started_at is not None:
            used = max(0.0, self.now - run.started_at) * gpu_milli / WHOLE_GPU
            self._put_job(replace(job, attained_gpu_s=job.attained_gpu_s + used))
        touched: dict[str, Node] = {}
        for allocation in allocations:
            node = touched.setdefault(allocation.node_id, self.inventory.nodes[allocation.node_id])
            node.give_back(run.placement_id, allocation)
        for node in touched.values():
            self.inventory.refile(node)

    def _after_stop(self, run: Run) -> None:
        """The run has ended without an end of the job: the job goes where it was meant to."""
        job = self.jobs[run.job_id]
        if job.placement_id != run.placement_id:
            return
        if job.state is not JobState.STOPPING:
            self._requeue(run, "its run was stopped by the executor", backoff=True)
            return
        then = job.then or JobState.QUEUED
        if then is not JobState.QUEUED:
            self._move(job, END_OF_STOP[then], placement_id=None, then=None)
        else:
            never_started = run.started_at is None
            self._requeue(run, job.reason, backoff=never_started)

    def _requeue(self, run: Run, reason: str, backoff: bool) -> None:
        """Back into the queue with its place of arrival; after refusals not before a while has passed."""
        job = self.jobs[run.job_id]
        if job.placement_id != run.placement_id:
            return
        refusals = job.refusals + 1 if backoff else job.refusals
        wait_s = (
            min(self.config.backoff_max_s, self.config.backoff_s * 2.0 ** min(refusals - 1, 30)) if backoff else 0.0
        )
        self._move(
            job,
            Trigger.REQUEUE,
            placement_id=None,
            then=None,
            reason=reason,
            refusals=refusals,
            not_before=self.now + wait_s,
            queued_at=self.now,
            waited_s=0.0 if backoff else job.waited_s,
            preemptions=job.preemptions + (run.started_at is not None and run.stop_at is not None),
        )
        self._judge_fit(run.job_id)

    def _finish(self, run: Run, trigger: Trigger, reason: str, exit_code: int | None) -> None:
        """The job has ended by itself. Another run of it (the first was thought lost) is told to stop."""
        job = self.jobs[run.job_id]
        if job.state in TERMINAL:
            self._absorb("already-ended", f"job {run.job_id} is {job.state}")
            return
        # Its own run is over; a second one exists when the first was thought lost.
        other = job.placement_id if job.placement_id != run.placement_id else None
        if other is not None:
            other_run = self.runs[other]
            if other_run.stop_at is None:
                other_run = self._put_run(
                    replace(other_run, state=RunState.STOPPING, stop_at=self.now, stop_said_at=self.now)
                )
                self._decide(Revoke, other_run, "another run of the job has ended")
        self._move(job, trigger, reason=reason, exit_code=exit_code, placement_id=other, then=None)

    # ── refusals by nodes ────────────────────────────────────────────────────────────────────────────────────────────

    def _count_refusal(self, node_id: str, job_id: str) -> None:
        """Only refusals of *different* jobs count against a node: one bad job must not take the nodes down."""
        node = self.inventory.nodes.get(node_id)
        if node is None or job_id in node.record.refused:
            return
        record = replace(node.record, refused=(*node.record.refused, job_id))
        if len(record.refused) >= self.config.quarantine_after and record.state is NodeState.UP:
            record = replace(record, state=NodeState.QUARANTINED, until=self.now + self.config.quarantine_s)
        self._set_node(node, record)

    def _forget_refusals(self, node_id: str) -> None:
        node = self.inventory.nodes[node_id]
        if node.record.refused:
            self._set_node(node, replace(node.record, refused=()))

    # ── writing the state ────────────────────────────────────────────────────────────────────────────────────────────

    def _move(self, job: Job, trigger: Trigger, **changes: Any) -> None:
        state = next_state(job, trigger)
        if job.state is JobState.QUEUED:
            changes = {"waited_s": job.waited_s + (self.now - job.queued_at), **changes}
        if state in TERMINAL:
            changes = {"ended_at": self.now, **changes}
        self._story.append((self.now, job.spec.job_id, f"{job.state} -{trigger}-> {state}"))
        self._put_job(replace(job, state=state, **changes))

    def _put_job(self, job: Job) -> Job:
        if (job.reservation or job.awaits) and job.state is not JobState.QUEUED:
            job = replace(job, reservation=(), awaits=())
        self.jobs[job.spec.job_id] = job
        self._notes.job(job.spec.job_id)
        self._file_job(job)
        return job

    def _file_job(self, job: Job) -> None:
        self.index.job(job)
        self.queue.file(job)
        if job.state is JobState.QUEUED and not job.reservation:
            self._waits_end = min(self._waits_end, self._waits_until(job))

    def _put_run(self, run: Run) -> Run:
        self.runs[run.placement_id] = run
        self._notes.run(run.placement_id)
        self.index.run(run)
        return run

    def _set_node(self, node: Node, record: NodeRecord) -> None:
        node.adopt(record)
        self.inventory.refile(node)
        self.index.node(record)
        self._notes.node(record.spec.node_id)

    def _refuse(self, code: str, detail: str) -> None:
        self._out.append(Refuse(code=code, detail=detail))

    def _absorb(self, code: str, detail: str) -> None:
        self._out.append(Absorb(code=code, detail=detail))

    # ── reading it ───────────────────────────────────────────────────────────────────────────────────────────────────

    def queued_jobs(self) -> list[Job]:
        """In order of arrival, however they came into the queue: no rule can depend on what is not stored."""
        return sorted(map(self.jobs.__getitem__, self.index.queued), key=BY_ARRIVAL)

    def set_aside(self) -> list[Job]:
        """Jobs that wait but that no window asks for, since they are held or can never fit; in order of arrival."""
        return sorted((self.jobs[job_id] for job_id in [*self.index.held, *self.index.unfit]), key=BY_ARRIVAL)

    @property
    def unfinished_timers(self) -> bool:
        """Whether the last window left something that was due already: the next should come at once.

        Not stored; a process that has just loaded learns it with its first window.
        """
        return self._unfinished_timers

    def waiting(self) -> int:
        """Jobs that a window could place."""
        return len(self.index.queued)

    def meta(self) -> Meta:
        return Meta(epoch=self.epoch, now=self.now, next_seq=self.next_seq, config=self.config)

    def chances(self) -> Chances:
        """About what can be given away now, but for what is kept free for somebody; made once per change of that."""
        if self.reserved:
            return Chances(self.inventory.classes_without(self.reserved))
        if self._chances is None or self._chances[0] != self.inventory.version:
            self._chances = self.inventory.version, Chances(self.inventory.classes())
        return self._chances[1]

    def story(self, job_id: str) -> str:
        """The transitions of a job that are still in memory, oldest first."""
        return "\n".join(f"{time:.3f} {text}" for time, name, text in self._story if name == job_id)

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        changes = Changes(
            jobs={job_id: self.jobs.get(job_id) for job_id in sorted(self._notes.jobs)},
            runs={run_id: self.runs.get(run_id) for run_id in sorted(self._notes.runs)},
            nodes={node_id: self._record_of(node_id) for node_id in sorted(self._notes.nodes)},
            tenants={tenant: self.tenants.get(tenant) for tenant in sorted(self._notes.tenants)},
            meta=self.meta(),
        )
        self._notes.clear()
        return changes

    def forget_changes(self) -> None:
        """As `take_changes`, for whoever stores nothing."""
        self._notes.clear()

    def _record_of(self, node_id: str) -> NodeRecord | None:
        node = self.inventory.nodes.get(node_id)
        return node.record if node is not None else None

    def everything(self) -> Changes:
        """The whole stored state, in the form of changes against an empty one."""
        return Changes(
            jobs=dict(sorted(self.jobs.items())),
            runs=dict(sorted(self.runs.items())),
            nodes={node.node_id: node.record for node in sorted(self.inventory, key=lambda n: n.node_id)},
            tenants=dict(sorted(self.tenants.items())),
            meta=self.meta(),
        )

    def load(self, stored: Changes) -> None:
        """Take over a stored state; only for a new object."""
        meta = stored.meta
        self.epoch, self.now, self.next_seq, self.config = meta.epoch, meta.now, meta.next_seq, meta.config
        for record in stored.nodes.values():
            if record is not None:
                self.inventory.add(Node(record))
                self.index.node(record)
        self.accounts.by_tenant = {name: usage for name, usage in sorted(stored.tenants.items()) if usage is not None}
        jobs = [job for job in stored.jobs.values() if job is not None]
        for job in sorted(jobs, key=lambda job: job.seq):
            self.jobs[job.spec.job_id] = job
            self._file_job(job)
        self.index.sort_finished()
        runs = [run for run in stored.runs.values() if run is not None]
        for run in sorted(runs, key=lambda run: (run.placed_at, run.placement_id)):
            self.runs[run.placement_id] = run
            self.index.run(run)
            for allocation in run.allocations:
                self.inventory.nodes[allocation.node_id].take(run.placement_id, allocation)
        for node in self.inventory:
            self.inventory.refile(node)
        self._inventory_changed = True

    def verify(self) -> None:
        """Check every invariant of the whole state; raises BrokenInvariant with the story of the job concerned."""
        invariants.verify(self)


def _was_there(run: Run, fenced_at: float | None) -> bool:
    """Whether the run had been started when its node was fenced, so that it is over for certain.

    The news may be old: the run was placed since. And a placement may be old: told only after a takeover.
    """
    return fenced_at is None or (run.started_at is not None and run.started_at <= fenced_at - _CLOCKS_APART_S)


def _waits_for_room(assignment: Assignment) -> bool:
    return bool(assignment.after)


def _gpu_milli(allocations: Iterable[Allocation]) -> int:
    return sum(len(a.gpus) * a.gpu_milli for a in allocations)


def _same_request(a: JobSpec, b: JobSpec) -> bool:
    """Equal but for when and in which trace it was sent: a client that repeats itself has a new time."""
    return replace(a, submitted_at=0.0, traceparent=None) == replace(b, submitted_at=0.0, traceparent=None)


_HANDLERS: dict[type, Callable[[ClusterState, Any], None]] = {
    ev.JobArrived: ClusterState._job_arrived,
    ev.CancelRequested: ClusterState._cancel,
    ev.HoldRequested: ClusterState._hold,
    ev.ReleaseRequested: ClusterState._release,
    ev.ReprioritiseRequested: ClusterState._reprioritise,
    ev.RunStarted: ClusterState._run_started,
    ev.RunProgressed: ClusterState._run_progressed,
    ev.RunCompleted: ClusterState._run_completed,
    ev.RunFailed: ClusterState._run_failed,
    ev.RunPreempted: ClusterState._run_preempted,
    ev.RunRejected: ClusterState._run_rejected,
    ev.RunReleased: ClusterState._run_released,
    ev.NodeJoined: ClusterState._node_joined,
    ev.NodeCapacityChanged: ClusterState._node_capacity,
    ev.NodeHeard: ClusterState._node_heard,
    ev.NodeCordoned: ClusterState._node_cordoned,
    ev.NodeUncordoned: ClusterState._node_uncordoned,
    ev.NodeDrained: ClusterState._node_drained,
    ev.NodeLost: ClusterState._node_lost,
    ev.EpochStarted: ClusterState._epoch_started,
    ev.WindowElapsed: ClusterState._window_elapsed,
    ev.WindowSolved: ClusterState._window_solved,
}
