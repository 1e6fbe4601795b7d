"""The production core in virtual time.

The same `ClusterState` that the service runs, asked and told by a clock that jumps from moment to moment: at each
moment all ends of runs, then all arrivals in the order of the trace, then one window (solved at once, and asked again
while it was cut and something started). Executors start what is placed at once and end it after its run time; a run
that is told to stop stops at once, has lost what it did since its last checkpoint, and needs `restart_s` more when it
starts again. Equal input gives equal output, bit by bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.errors import BrokenInvariant
from streamsched.core.instructions import Instruction, Place, Preempt, Refuse, Revoke, SolveWindow
from streamsched.core.model import WHOLE_GPU, Allocation, Job, JobState, NodeSpec
from streamsched.core.problem import Problem, Solution, SolveStatus
from streamsched.core.window import Ranker
from streamsched.placement import SolveLimits, greedy, solve

from .learning import Estimator
from .workload import SimJob, in_order

POOL = "simulated"


@dataclass(slots=True)
class Lived:
    """What became of one job. Times are seconds as in the trace."""

    job: SimJob
    first_start_s: float | None = None
    finish_s: float | None = None
    preemptions: int = 0
    reason: str = ""
    """Why it never ran."""
    done_s: float = 0.0
    """Work that is safe."""
    started_s: float = 0.0
    """Of the present run."""

    @property
    def wait_s(self) -> float | None:
        """Completion - submission - run time: restarts and lost work count as waiting."""
        if self.finish_s is None:
            return None
        return max(0.0, self.finish_s - self.job.spec.submitted_at - self.job.run_s)


@dataclass(frozen=True, slots=True)
class Moment:
    """How things stood after a window: for the lines over time."""

    time_s: float
    queued: int
    busy_gpus: float


class Stretch(NamedTuple):
    """One worker of one run, from its start to its end or until it was stopped. Seconds."""

    node: int
    """Place in the list of nodes."""
    gpus: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How runs behave and how windows are solved."""

    placement: str = "greedy"
    """greedy, or milp (bounded by gap and nodes, never by time)."""
    checkpoint_s: float = 600.0
    """Work up to a multiple of this is safe when a run is stopped."""
    limits: SolveLimits = field(default_factory=lambda: SolveLimits(time_s=None, nodes_max=2_000))


@dataclass(frozen=True, slots=True)
class SimResult:
    jobs: list[Lived]
    moments: list[Moment]
    windows: int
    gpus: int
    stretches: list[Stretch]
    """By their ends."""
    node_gpus: list[int]


def simulate(
    jobs: Sequence[SimJob],
    nodes: Sequence[NodeSpec],
    config: SchedulerConfig,
    ranker: Ranker,
    options: SimOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
    estimator: Estimator | None = None,
) -> SimResult:
    """Run the jobs (in order of submission) to their ends. `on_progress` is told the number of finished jobs;
    `estimator` says what is believed of run times, in place of the jobs' own estimates."""
    if not in_order(jobs):
        raise ValueError("jobs are not in order of their submission")
    return _Simulation(jobs, nodes, config, ranker, options or SimOptions(), on_progress, estimator).run()


class _Simulation:
    def __init__(
        self,
        jobs: Sequence[SimJob],
        nodes: Sequence[NodeSpec],
        config: SchedulerConfig,
        ranker: Ranker,
        options: SimOptions,
        on_progress: Callable[[int], None] | None,
        estimator: Estimator | None,
    ) -> None:
        self.options, self.config, self.on_progress = options, config, on_progress
        self.estimator = estimator
        self.state = ClusterState(POOL, config, ranker)
        if estimator is not None:
            self.state.run_times = estimator
        self.lived = {job.spec.job_id: Lived(job) for job in jobs}
        self.arrivals = list(jobs)
        self.arrived = 0
        self.ends: list[tuple[float, int, str]] = []
        """(time, counter, placement id); entries of runs that were stopped are passed over."""
        self.checkpoints: list[tuple[float, int, str]] = []
        """(time, counter, placement id) of the next checkpoint of each run, where runs may be stopped."""
        self.counter = count()
        self.running: dict[str, str] = {}
        """Placement id -> job id."""
        self.placed: dict[str, tuple[float, tuple[Allocation, ...]]] = {}
        """Placement id -> since when and where, as long as it runs."""
        self.stretches: list[Stretch] = []
        self.finished = 0
        self.windows = 0
        self.busy_milli = 0
        self.moments: list[Moment] = []
        self.node_gpus = [node.gpus for node in nodes]
        self.number = {node.node_id: number for number, node in enumerate(nodes)}
        self.now = jobs[0].spec.submitted_at if jobs else 0.0
        for node in nodes:
            self._tell(ev.NodeJoined(spec=node))

    def run(self) -> SimResult:
        while (moment := self._next()) is not None:
            self.now = moment
            self._end_runs()
            self._arrive()
            self._window()
            self.moments.append(Moment(self.now, self.state.waiting(), self.busy_milli / WHOLE_GPU))
            if self.on_progress is not None:
                self.on_progress(self.finished)
        for job_id, lived in self.lived.items():
            if lived.finish_s is None and (job := self.state.jobs.get(job_id)) is not None:
                lived.reason = job.reason or str(job.state)
        return SimResult(
            jobs=list(self.lived.values()),
            moments=self.moments,
            windows=self.windows,
            gpus=sum(self.node_gpus),
            stretches=self.stretches,
            node_gpus=self.node_gpus,
        )

    def _next(self) -> float | None:
        while self.ends and self.ends[0][2] not in self.running:
            heapq.heappop(self.ends)
        times = [self.ends[0][0]] if self.ends else []
        if self.arrived < len(self.arrivals):
            times.append(self.arrivals[self.arrived].spec.submitted_at)
        return min(times, default=None)

    # ── a moment ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_runs(self) -> None:
        while self.ends and self.ends[0][0] <= self.now:
            _, _, placement_id = heapq.heappop(self.ends)
            job_id = self.running.pop(placement_id, None)
            if job_id is None:
                continue
            lived = self.lived[job_id]
            lived.finish_s = self.now
            self.finished += 1
            if self.estimator is not None:
                self.estimator.observe(lived.job, self.now)
            self.busy_milli -= lived.job.spec.total_gpu_milli
            self._leave(placement_id)
            self._tell(ev.RunCompleted(placement_id=placement_id, job_id=job_id, time=self.now))

    def _arrive(self) -> None:
        while self.arrived < len(self.arrivals) and self.arrivals[self.arrived].spec.submitted_at <= self.now:
            job = self.arrivals[self.arrived]
            if self.estimator is not None:
                self.estimator.submitted(job, self.now)
            self._tell(ev.JobArrived(spec=job.spec))
            self.arrived += 1

    def _window(self) -> None:
        """Windows until one starts nothing: a window takes `window_jobs` at most, and stopped runs leave room."""
        if self.state.waiting():
            self._tell_checkpoints()
        while self.state.waiting():
            kept = bool(self.state.reserved)
            out = self._tell(ev.WindowElapsed())
            asked = [i for i in out if isinstance(i, SolveWindow)]
            changed = any(isinstance(i, Place | Preempt) for i in out)
            # Nodes that are given back may be for another job, also those kept and used in one window.
            kept = kept or changed or bool(self.state.reserved)
            for ask in asked:
                self.windows += 1
                done = self._tell(ev.WindowSolved(solution=self._solve(ask.problem)))
                changed = changed or any(isinstance(i, Place | Preempt) for i in done)
            if not changed or (self._nobody_else_fits() and not kept):
                return

    def _tell_checkpoints(self) -> None:
        """The last of each run, as its executor would have told by now: what a stop would cost depends on it."""
        every = self.options.checkpoint_s
        while self.checkpoints and self.checkpoints[0][0] <= self.now:
            due, _, placement_id = heapq.heappop(self.checkpoints)
            job_id = self.running.get(placement_id)
            if job_id is not None:
                latest = due + (self.now - due) // every * every
                told = ev.RunProgressed(placement_id=placement_id, job_id=job_id, time=latest, checkpointed=True)
                self._tell(told)
                heapq.heappush(self.checkpoints, (latest + every, next(self.counter), placement_id))

    def _nobody_else_fits(self) -> bool:
        """Greedy placement starts all that fit: a window that had asked for all need not be asked again."""
        window = self.state.window
        alone = self.options.placement == "greedy" and self.config.preempt == "off"
        return alone and window is not None and window.complete

    def _solve(self, problem: Problem) -> Solution:
        if self.options.placement == "milp":
            return solve(problem, self.options.limits)
        assignments = greedy(problem)
        status = SolveStatus.GREEDY if assignments else SolveStatus.EMPTY
        return Solution(window=problem.window, policy=problem.policy, status=status, assignments=assignments)

    # ── executors ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, event: ev.CoreEvent) -> list[Instruction]:
        out = self.state.handle(event, self.now)
        self.state.forget_changes()
        for instruction in out:
            match instruction:
                case Place():
                    self._start(instruction)
                case Preempt() | Revoke():
                    self._stop(instruction)
                case Refuse():
                    raise BrokenInvariant(f"refused in a simulation: {instruction}")
        return out

    def _start(self, place: Place) -> None:
        lived = self.lived[place.job_id]
        restart_s = self.config.restart_s if lived.first_start_s is not None else 0.0
        if lived.first_start_s is None:
            lived.first_start_s = self.now
        lived.started_s = self.now + restart_s
        self.running[place.placement_id] = place.job_id
        self.placed[place.placement_id] = (self.now, place.allocations)
        self.busy_milli += lived.job.spec.total_gpu_milli
        end = lived.started_s + lived.job.run_s - lived.done_s
        heapq.heappush(self.ends, (end, next(self.counter), place.placement_id))
        if self.config.preempt != "off":
            first = lived.started_s + self.options.checkpoint_s
            heapq.heappush(self.checkpoints, (first, next(self.counter), place.placement_id))
        self._tell(ev.RunStarted(placement_id=place.placement_id, job_id=place.job_id, time=self.now))

    def _stop(self, stop: Preempt | Revoke) -> None:
        if self.running.pop(stop.placement_id, None) is None:
            return
        lived = self.lived[stop.job_id]
        lived.preemptions += 1
        every = self.options.checkpoint_s
        done = lived.done_s + max(0.0, self.now - lived.started_s)
        lived.done_s = max(lived.done_s, done // every * every)
        self.busy_milli -= lived.job.spec.total_gpu_milli
        self._leave(stop.placement_id)
        self._tell(ev.RunPreempted(placement_id=stop.placement_id, job_id=stop.job_id, time=self.now))

    def _leave(self, placement_id: str) -> None:
        since, allocations = self.placed.pop(placement_id)
        self.stretches += [Stretch(self.number[a.node_id], len(a.gpus), since, self.now) for a in allocations]


def never_ran(job: Job) -> bool:
    return job.state in (JobState.UNFIT, JobState.QUEUED)
