"""The core against everything that can come at it, in any order.

The machine plays submitters, users, node agents and executors. Executors are modelled by what is true of them: a
placement they were sent is pending, running or over, wherever the core thinks it is. Reports are mostly the truth, told
late, twice or out of order; some are arbitrary. Who holds a GPU is counted here from `Place` instructions and from what
was *sent* to the core, never from its state.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import hypothesis.strategies as st
from core_builder import first_fit, reloaded, stored
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.instructions import Instruction, Place, Preempt, Revoke, SolveWindow
from streamsched.core.model import TERMINAL, WHOLE_GPU, Allocation, Job, JobSpec, JobState, NodeSpec, Run, RunState
from streamsched.core.problem import Assignment, Problem, Solution, SolveStatus
from streamsched.core.tenants import TenantPolicy
from streamsched.policy.rules import FairShare, FirstComeFirstServed, Smallest

NODES = [f"n{i}" for i in range(4)]
TYPES = ["A100", "V100"]
JOBS = [f"j{i}" for i in range(12)]
CONFIG = SchedulerConfig(
    lease_s=20.0,
    backoff_s=1.0,
    backoff_max_s=8.0,
    quarantine_after=2,
    quarantine_s=30.0,
    finished_keep_s=200.0,
    lost_grace_s=10.0,
    window_jobs=4,
    reserve_after_s=30.0,
    reservations_max=2,
    usage_half_life_s=100.0,
    preempt_interval_s=2.0,
    preempt_victims_max=4,
    tenants={"small": TenantPolicy(quota_gpus=2.5), "big": TenantPolicy(weight=3.0, quota_gpus=5.0)},
)
CLASSES = CONFIG.priority_classes
MAKES_ROOM = "makes room for job "
TENANTS = ["default", "default", "small", "big"]


def quota_of(tenant: str) -> float:
    policy = CONFIG.tenants.get(tenant)
    return math.inf if policy is None or policy.quota_gpus is None else policy.quota_gpus * WHOLE_GPU


def _class_of(job: Job) -> int:
    return CLASSES.get(job.priority_class or job.spec.priority_class, 0)


class Books:
    """Who holds which thousandths of which GPU, by the instructions and reports alone."""

    def __init__(self) -> None:
        self.held: dict[str, list[Allocation]] = {}

    def placed(self, place: Place) -> None:
        self.held[place.placement_id] = list(place.allocations)
        for gpu, milli in self.usage().items():
            assert milli <= WHOLE_GPU, f"{gpu} has two owners after {place}"

    def over(self, placement_id: str, node_ids: tuple[str, ...] = ()) -> None:
        """All of it is back, or what it holds on these nodes."""
        left = [a for a in self.held.get(placement_id, ()) if node_ids and a.node_id not in node_ids]
        if left:
            self.held[placement_id] = left
        else:
            self.held.pop(placement_id, None)

    def fenced(self, node_id: str) -> None:
        for placement_id in list(self.held):
            self.over(placement_id, (node_id,))

    def usage(self) -> Counter[tuple[str, int]]:
        used: Counter[tuple[str, int]] = Counter()
        for allocations in self.held.values():
            for a in allocations:
                for gpu in a.gpus:
                    used[a.node_id, gpu] += a.gpu_milli
        return used


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.history: list[tuple[ev.CoreEvent, float]] = []
        self.journal: list[tuple[ev.CoreEvent, float]] = []
        """Those that changed or decided something: no others are journalled."""
        self.twin: ClusterState | None = None
        """Loaded from what was stored at some point; must go on exactly as the state does."""
        self.commands: list[ev.CoreEvent] = []
        self.tenant_of: dict[str, str] = {}
        """placement id -> tenant"""
        self.said_at: dict[str, float] = {}
        """When each run was last told to stop."""
        self.books = Books()
        self.places: list[Place] = []
        self.told_to_stop: set[str] = set()
        self.stopped_at: dict[str, float] = {}
        self.truth: dict[str, str] = {}
        """placement id -> pending, running, completed, failed or stopped, as its executor knows it."""
        self.untold: list[ev.CoreEvent] = []
        """True reports that are on their way."""
        self.told: list[ev.CoreEvent] = []
        self.questions: list[Problem] = []
        self.silent_since: dict[str, float] = {}
        self.ended: dict[tuple[str, int], JobState] = {}
        """(job id, seq) -> how it ended."""

    @initialize(
        ranker=st.sampled_from([FirstComeFirstServed(), Smallest(), FairShare()]),
        gangs=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2), st.booleans()), min_size=1, max_size=5),
        preempt=st.sampled_from(["off", "class", "class", "score", "rank"]),
    )
    def begin(self, ranker: Any, gangs: list[tuple[int, int, bool]], preempt: Any) -> None:
        """A pool at work: what goes wrong is most often met with runs under way."""
        self.config = replace(CONFIG, preempt=preempt)
        self.state = ClusterState("p", self.config, ranker)
        self.send(ev.EpochStarted(epoch=1, config=self.config))
        for node_id, gpus in zip(NODES, (4, 4, 2), strict=False):
            self.send(ev.NodeJoined(spec=NodeSpec(node_id=node_id, gpu_type="V100", gpus=gpus)))
        for job_id, (gpus, workers, preemptible) in zip(JOBS, gangs, strict=False):
            self.arrive(job_id, gpus, workers, 0, WHOLE_GPU, (), 0, preemptible, "low", "default")
        self.calm_moment()

    def send(self, event: ev.CoreEvent) -> list[Instruction]:
        self.history.append((event, self.now))
        before = set(self.state.runs)
        failed = self._in(JobState.FAILED)
        completed = self._in(JobState.COMPLETED)
        owned = {job.placement_id for job in self.state.jobs.values()}
        reserved = dict(self.state.reserved)
        jobs, runs = dict(self.state.jobs), dict(self.state.runs)
        if self.twin is not None:
            self.twin.windows = self.state.windows  # each process numbers its own
        out = self.state.handle(event, self.now)
        self._journal(event, out)
        self._ask_twin(event, out)
        self._keep_off_reserved(event, out, reserved)
        for job_id in self._in(JobState.COMPLETED) - completed:
            stopped_at = self.stopped_at.get(event.placement_id, event.time)
            assert event.placement_id not in owned or event.time <= stopped_at, job_id
        for job_id in self._in(JobState.FAILED) - failed:
            assert event.placement_id not in self.told_to_stop, f"{job_id} failed because it was stopped"
        self._close_books(event, before)
        for instruction in out:
            self._carry_out(instruction)
        self._stop_for_others_as_agreed(event, out, jobs, runs)
        self._watch_nodes(event, out)
        return out

    def _close_books(self, event: ev.CoreEvent, runs_before: set[str]) -> None:
        """What the event itself says of GPUs. A report of another job's run or of a run that is over says nothing."""
        match event:
            case ev.NodeLost(node_id=node_id, fenced=True) if node_id in self.state.inventory.nodes:
                self.books.fenced(node_id)
            case ev.RunReleased(placement_id=placement_id, node_ids=node_ids):
                if self._names_match(event):
                    self.books.over(placement_id, node_ids)
            case ev.RunCompleted() | ev.RunFailed() | ev.RunPreempted() | ev.RunRejected():
                if self._names_match(event):
                    self.books.over(event.placement_id)
        # And no other event may end a run.
        assert set(self.state.runs) == set(self.books.held) | (set(self.state.runs) - runs_before)

    def _journal(self, event: ev.CoreEvent, out: list[Instruction]) -> None:
        decided = [i for i in out if isinstance(i, Place | Preempt | Revoke)]
        if self.state.take_changes() or isinstance(event, ev.EpochStarted):
            self.journal.append((event, self.now))
        else:
            assert not decided, "decided, but nothing changed"

    def _ask_twin(self, event: ev.CoreEvent, out: list[Instruction]) -> None:
        if self.twin is not None:
            assert self.twin.handle(event, self.now) == out
            assert stored(self.twin) == stored(self.state)

    def _keep_off_reserved(self, event: ev.CoreEvent, out: list[Instruction], before: dict[str, str]) -> None:
        """Nobody is given a node that is kept free for another, and timers place only those who have such nodes."""
        for place in [i for i in out if isinstance(i, Place)]:
            nodes = {a.node_id for a in place.allocations}
            # Who starts at once goes first: what it leaves of a node may then be kept for a job that waits for room.
            waiting = {self.state.reserved[n] for n in nodes & self.state.reserved.keys()}
            made_room = {i.reason.removeprefix(MAKES_ROOM) for i in out if isinstance(i, Preempt)}
            assert waiting <= made_room, place
            if isinstance(event, ev.WindowSolved):
                assert all(before.get(node_id, place.job_id) == place.job_id for node_id in nodes), place
            else:
                assert place.why.policy in ("reservation", "preemption")

    def _stop_for_others_as_agreed(
        self, event: ev.CoreEvent, out: list[Instruction], jobs: dict[str, Job], runs: dict[str, Run]
    ) -> None:
        """Who makes room may be asked to, ranks lower, and the room is enough and is kept. `jobs`, `runs`: before."""
        for order in [i for i in out if isinstance(i, Preempt) and i.reason.startswith(MAKES_ROOM)]:
            assert isinstance(event, ev.WindowSolved)
            assert self.config.preempt != "off"
            run, victim = runs[order.placement_id], jobs[order.job_id]
            job = self.state.jobs[order.reason.removeprefix(MAKES_ROOM)]
            assert victim.spec.preemptible
            assert run.state is RunState.RUNNING
            assert run.started_at is not None
            assert self.state.now - run.started_at >= CONFIG.preempt_interval_s
            assert not victim.preempted_at or self.state.now - victim.preempted_at >= CONFIG.preempt_interval_s
            assert _class_of(victim) < _class_of(job) or (
                self.config.preempts_within_class and _class_of(victim) == _class_of(job)
            )
            assert order.placement_id in job.awaits
            self._has_room_then(job, job.awaits)
            if not job.spec.remainder_gpus:
                without = tuple(p for p in job.awaits if p != order.placement_id)
                assert not self._would_fit(job, without), "stopped in vain"

    def _has_room_then(self, job: Job, gone: tuple[str, ...]) -> None:
        assert self._would_fit(job, gone), f"{job} would not fit once {gone} have gone"
        assert all(self.state.inventory.nodes[node_id].usable for node_id in job.reservation)

    def _would_fit(self, job: Job, gone: tuple[str, ...]) -> bool:
        """Whether it fits on its nodes without these runs, by the books; for jobs without a smaller worker."""
        left = [a for placement_id, held in self.books.held.items() if placement_id not in gone for a in held]
        devices = Counter(node_id for node_id, _ in {(a.node_id, gpu) for a in left for gpu in a.gpus})
        slots = 0
        for node_id in job.reservation:
            node = self.state.inventory.nodes[node_id]
            room = (node.record.capacity - devices[node_id]) // job.spec.gpus_per_worker
            if node.spec.cpu_milli and job.spec.cpu_milli:
                cpu = node.spec.cpu_milli - sum(a.cpu_milli for a in left if a.node_id == node_id)
                room = min(room, cpu // job.spec.cpu_milli)
            slots += max(0, room)
        return slots >= job.spec.workers

    def _in(self, state: JobState) -> set[str]:
        return {job_id for job_id, job in self.state.jobs.items() if job.state is state}

    def _watch_nodes(self, event: ev.CoreEvent, out: list[Instruction]) -> None:
        match event:
            case ev.NodeLost(node_id=node_id):
                self.silent_since.setdefault(node_id, self.state.now)
            case ev.NodeHeard(node_id=node_id) | ev.NodeJoined(spec=NodeSpec(node_id=node_id)):
                self.silent_since.pop(node_id, None)
            case ev.WindowElapsed():
                self._nobody_waits_for_the_silent()
                self._timers_have_run(out)

    def _timers_have_run(self, out: list[Instruction]) -> None:
        """No stop is left unsaid for longer than a lease while a node could hear it; nobody overdue is passed over."""
        now = max(self.now, self.state.now)
        for placement_id, run in self.state.runs.items():
            if placement_id in self.said_at and any(a.node_id not in self.silent_since for a in run.allocations):
                assert self.said_at[placement_id] + CONFIG.lease_s >= now
        reserving = set(self.state.reserved.values())
        overdue_ones = [job_id for job_id in reserving if not self.state.jobs[job_id].awaits]
        assert len(overdue_ones) <= CONFIG.reservations_max
        if any(isinstance(i, Place) for i in out):
            return  # those made room for the next ones, who are looked at in the next window
        for job in self.state.queued_jobs():
            assert not job.awaits or set(job.awaits) & self.state.runs.keys(), f"{job} waits for nobody"
            asks_first = self.config.preempts_within_class and job.spec.gpu_milli == WHOLE_GPU
            # Runs have that long to become victims and to go.
            since = now - (CONFIG.preempt_interval_s + CONFIG.lease_s if asks_first else 0.0)
            overdue = job.queued_at + (CONFIG.reserve_after_s - job.waited_s) <= since and job.not_before <= now
            may = self._pledged(job.spec.tenant, reserving) + job.spec.total_gpu_milli <= quota_of(job.spec.tenant)
            if overdue and may and job.spec.job_id not in reserving and len(overdue_ones) < CONFIG.reservations_max:
                assert not self.state.inventory.holds_without(job.spec, self.state.reserved), job

    def _pledged(self, tenant: str, reserving: set[str]) -> int:
        specs = [self.state.jobs[job_id].spec for job_id in reserving]
        return sum(spec.total_gpu_milli for spec in specs if spec.tenant == tenant)

    def _nobody_waits_for_the_silent(self) -> None:
        """After the grace a job does not depend on a node that nothing is heard of."""
        now = max(self.now, self.state.now)
        gone = {n for n, since in self.silent_since.items() if now - since >= CONFIG.lost_grace_s}
        for job in self.state.jobs.values():
            if job.placement_id is not None and job.state not in TERMINAL:
                assert not gone & {a.node_id for a in self.books.held[job.placement_id]}, job

    def _names_match(self, report: Any) -> bool:
        return any(p.placement_id == report.placement_id and p.job_id == report.job_id for p in self.places)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Place():
                self._live_before(instruction)
                self.books.placed(instruction)
                self.tenant_of[instruction.placement_id] = instruction.tenant
                self._within_quota(instruction)
                self.places.append(instruction)
                assert instruction.placement_id not in self.truth, "a placement id was used twice"
                self.truth[instruction.placement_id] = "pending"
            case Preempt() | Revoke():
                placement_id = instruction.placement_id
                if placement_id in self.told_to_stop:
                    assert isinstance(instruction, Revoke)
                    assert self.said_at[placement_id] + CONFIG.lease_s < self.state.now, "told to stop twice"
                self.told_to_stop.add(placement_id)
                self.stopped_at.setdefault(placement_id, self.state.now)
                self.said_at[placement_id] = self.state.now
            case SolveWindow(problem=problem):
                self.questions.append(problem)

    def _within_quota(self, place: Place) -> None:
        assert self._held_by(place.tenant) <= quota_of(place.tenant), place

    def _held_by(self, tenant: str) -> int:
        """But for what was given up."""
        charged = [p for p in self.books.held if self.tenant_of[p] == tenant and not self._given_up(p)]
        mine = [a for p in charged for a in self.books.held[p]]
        return sum(len(a.gpus) * a.gpu_milli for a in mine)

    def _given_up(self, placement_id: str) -> bool:
        run = self.state.runs.get(placement_id)
        return run is not None and run.given_up

    def _live_before(self, place: Place) -> None:
        """A job is placed again only when its earlier runs are over, or were told to stop after a node was lost."""
        for earlier in self.places:
            if earlier.job_id == place.job_id and earlier.placement_id in self.books.held:
                assert earlier.placement_id in self.told_to_stop, f"{place} while {earlier.placement_id} goes on"

    # ── submitters and users ─────────────────────────────────────────────────────────────────────────────────────────

    @rule(
        job_id=st.sampled_from(JOBS),
        gpus=st.sampled_from([1, 1, 2, 2, 3, 4]),
        workers=st.sampled_from([1, 1, 2, 2, 3]),
        remainder=st.sampled_from([0, 0, 1, 3]),
        share=st.sampled_from([1000, 1000, 500, 300]),
        types=st.sampled_from([(), (), (), ("V100",), ("A100", "V100"), ("A100",)]),
        cpu=st.sampled_from([0, 0, 3]),
        preemptible=st.booleans(),
        priority_class=st.sampled_from(["low", "normal", "high", "?"]),
        tenant=st.sampled_from(TENANTS),
    )
    def arrive(
        self,
        job_id: str,
        gpus: int,
        workers: int,
        remainder: int,
        share: int,
        types: tuple[str, ...],
        cpu: int,
        preemptible: bool,
        priority_class: str,
        tenant: str,
    ) -> None:
        whole = share == WHOLE_GPU
        spec = JobSpec(
            job_id=job_id,
            submitted_at=self.now,
            gpus_per_worker=gpus if whole else 1,
            workers=workers,
            remainder_gpus=min(remainder, gpus - 1) if whole else 0,
            gpu_milli=share,
            gpu_types=types,
            cpu_milli=cpu,
            memory_mib=cpu,
            preemptible=preemptible,
            priority_class=priority_class,
            tenant=tenant,
        )
        known = self.state.jobs.get(job_id)
        out = self.send(ev.JobArrived(spec=spec))
        assert bool(out) == (known is not None)
        if known is not None:
            assert self.state.jobs[job_id] is known

    @precondition(lambda self: self.config.preempt != "off" and len(self.state.jobs) < len(JOBS))
    @rule(gpus=st.sampled_from([1, 2, 3, 4]), workers=st.sampled_from([1, 1, 2]), answer=st.booleans())
    def an_urgent_job_arrives(self, gpus: int, workers: int, answer: bool) -> None:
        """While others have run for a while; perhaps those who are to make room do so at once."""
        self.calm_moment()
        job_id = next(job_id for job_id in JOBS if job_id not in self.state.jobs)
        self.arrive(job_id, gpus, workers, 0, WHOLE_GPU, (), 0, False, "high", "default")
        self.window(CONFIG.preempt_interval_s, True)
        for placement_id in self.state.jobs[job_id].awaits if answer else ():
            if self.truth[placement_id] == "running":
                self.truth[placement_id] = "over"
                self.send(ev.RunPreempted(**self._names(placement_id)))

    @rule(
        job_id=st.sampled_from(JOBS),
        what=st.sampled_from(["cancel", "hold", "release", "high", "weight"]),
        numbered=st.booleans(),
    )
    def command(self, job_id: str, what: str, numbered: bool) -> None:
        """`numbered`: with its offset, as from Kafka; then it may be delivered again."""
        kinds: dict[str, tuple[Any, dict[str, Any]]] = {
            "cancel": (ev.CancelRequested, {}),
            "hold": (ev.HoldRequested, {}),
            "release": (ev.ReleaseRequested, {}),
            "high": (ev.ReprioritiseRequested, {"priority_class": "high"}),
            "weight": (ev.ReprioritiseRequested, {"weight": 2.0}),
        }
        kind, fields = kinds[what]
        known = job_id in self.state.jobs
        self.send(kind(job_id=job_id, offset=len(self.commands) if numbered else -1, **fields))
        if numbered and known:
            self.commands.append(self.history[-1][0])
        job = self.state.jobs.get(job_id)
        if what == "cancel" and job is not None:
            assert job.state in TERMINAL or job.then is JobState.CANCELLED

    @precondition(lambda self: self.commands)
    @rule(data=st.data())
    def old_command_again(self, data: st.DataObject) -> None:
        """Also one that was refused has no effect when it comes again (its job not having been forgotten meanwhile)."""
        command: Any = data.draw(st.sampled_from(self.commands), label="command")
        job = self.state.jobs.get(command.job_id)
        if job is not None and job.command_offset >= command.offset:
            before = stored(self.state)
            self.send(command)
            assert stored(self.state) == before

    @precondition(lambda self: self.books.held)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "drain", "expire"]))
    def run_is_told_to_stop(self, data: st.DataObject, how: str) -> None:
        """A stop that finds a run, which a command for any job at any time seldom does."""
        placement_id = data.draw(st.sampled_from(sorted(self.books.held)), label="run")
        match how:
            case "cancel":
                self.send(ev.CancelRequested(job_id=self._names(placement_id)["job_id"]))
            case "drain":
                self.send(ev.NodeDrained(node_id=self.books.held[placement_id][0].node_id))
            case "expire":
                self.window(CONFIG.lease_s + 1.0, False)

    # ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0]), solve=st.booleans())
    def window(self, seconds: float, solve: bool) -> None:
        """A window; `solve`: answered before anything else happens, and then all of it must hold."""
        self.now += seconds
        waiting = {job.spec.job_id for job in self.state.queued_jobs()}
        out = self.send(ev.WindowElapsed())
        if self.state.window is not None and self.state.waiting():
            told = {ranked.job_id for ranked in self.state.window.ranking}
            assert told == {job.spec.job_id for job in self.state.queued_jobs()}, waiting
        for ask in [i for i in out if isinstance(i, SolveWindow)] if solve else ():
            solution = first_fit(ask.problem)
            told = self.send(ev.WindowSolved(solution=solution))
            at_once = [a.job_id for a in solution.assignments if not a.after]
            assert [i.job_id for i in told if isinstance(i, Place)] == at_once
            for assignment in solution.assignments:
                assert self.state.jobs[assignment.job_id].awaits == assignment.after

    @rule()
    def calm_moment(self) -> None:
        """A window is solved and all that executors have to say is told in order."""
        self.now = max(self.now, self.state.now) + 1.0
        self.window(0.0, True)
        for placement_id in [p for p, truth in self.truth.items() if truth == "pending"]:
            if placement_id not in self.told_to_stop:
                self.truth[placement_id] = "running"
                self.untold.append(ev.RunStarted(**self._names(placement_id)))
        while self.untold:
            self.told.append(self.untold.pop(0))
            self.send(self.told[-1])

    @precondition(lambda self: self.questions)
    @rule(data=st.data(), keep=st.booleans())
    def late_solution(self, data: st.DataObject, keep: bool) -> None:
        """The answer to an old question, perhaps only a part of it, perhaps not for the last time."""
        problem = data.draw(st.sampled_from(self.questions[-6:]), label="question")
        solution = first_fit(problem)
        part = data.draw(st.integers(0, len(solution.assignments)), label="part")
        self.send(ev.WindowSolved(solution=replace(solution, assignments=solution.assignments[:part])))
        if not keep:
            self.questions.remove(problem)

    @precondition(lambda self: self.config.preempt != "off" and self.books.held and self.state.waiting())
    @rule(data=st.data(), jobs=st.integers(1, 3))
    def bold_solution(self, data: st.DataObject, jobs: int) -> None:
        """Whatever a solver may say about who is to make room for whom, where."""
        waiting = st.sampled_from(self.state.queued_jobs())
        runs = st.lists(st.sampled_from(sorted(self.books.held)), min_size=1, max_size=3)
        node = st.sampled_from(NODES[:3])
        assignments = []
        for job in data.draw(st.lists(waiting, min_size=jobs, max_size=jobs), label="jobs"):
            workers = [(data.draw(node), gpus) for gpus, count in job.spec.chunks() for _ in range(count)]
            after = data.draw(runs, label="after")
            held = [a.node_id for placement_id in after for a in self.books.held[placement_id]]
            if data.draw(st.booleans(), label="where they are"):
                workers = [(held[place % len(held)], gpus) for place, (_, gpus) in enumerate(workers)]
            assignments.append(
                Assignment(job_id=job.spec.job_id, attempt=job.attempt, workers=tuple(workers), after=tuple(after))
            )
        solution = Solution(window=1, status=SolveStatus.OPTIMAL, assignments=tuple(assignments))
        self.send(ev.WindowSolved(solution=solution))

    @rule(seconds=st.sampled_from([-5.0, 5.0, 11.0, 11.0, 21.0, 300.0]))
    def time_jumps(self, seconds: float) -> None:
        self.now += seconds

    # ── executors ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _names(self, placement_id: str) -> dict[str, Any]:
        job_id = next(p.job_id for p in self.places if p.placement_id == placement_id)
        return {"placement_id": placement_id, "job_id": job_id, "time": self.now}

    @precondition(lambda self: "pending" in self.truth.values())
    @rule(data=st.data(), refuse=st.booleans())
    def executor_acts(self, data: st.DataObject, refuse: bool) -> None:
        placement_id = data.draw(st.sampled_from([p for p, t in self.truth.items() if t == "pending"]), label="run")
        names = self._names(placement_id)
        if placement_id in self.told_to_stop:
            self.truth[placement_id] = "stopped"
            self.untold.append(ev.RunReleased(**names))
        elif refuse:
            self.truth[placement_id] = "stopped"
            allocations = next(p.allocations for p in self.places if p.placement_id == placement_id)
            node_id = data.draw(st.sampled_from([None, allocations[0].node_id, "n0"]), label="node")
            self.untold.append(ev.RunRejected(**names, node_id=node_id))
        else:
            self.truth[placement_id] = "running"
            self.untold.append(ev.RunStarted(**names))

    @precondition(lambda self: "running" in self.truth.values())
    @rule(data=st.data(), end=st.sampled_from(["complete", "complete", "exit 1", "fail", "retry", "obey", "part"]))
    def run_ends(self, data: st.DataObject, end: str) -> None:
        placement_id = data.draw(st.sampled_from([p for p, t in self.truth.items() if t == "running"]), label="run")
        names = self._names(placement_id)
        if end == "part":
            allocations = next(p.allocations for p in self.places if p.placement_id == placement_id)
            self.untold.append(ev.RunReleased(**names, node_ids=(allocations[0].node_id,)))
            return
        self.truth[placement_id] = "over"
        match end:
            case "complete":
                self.untold.append(ev.RunCompleted(**names))
            case "exit 1":
                self.untold.append(ev.RunCompleted(**names, exit_code=1))
            case "fail" | "retry":
                self.untold.append(ev.RunFailed(**names, retryable=end == "retry"))
            case "obey" if placement_id in self.told_to_stop:
                self.untold.append(ev.RunPreempted(**names))
            case _:
                self.untold.append(ev.RunReleased(**names))

    @precondition(lambda self: self.told_to_stop & self.books.held.keys())
    @rule(data=st.data(), kind=st.sampled_from([ev.RunCompleted, ev.RunCompleted, ev.RunFailed]), calm=st.booleans())
    def run_ends_by_itself_after_it_was_told_to_stop(self, data: st.DataObject, kind: Any, calm: bool) -> None:
        """Its process may have been given up and a second one be under way (`calm`), or it may just be stopping."""
        if calm:
            self.calm_moment()
        going = sorted(self.told_to_stop & self.books.held.keys())
        if not going:
            return
        placement_id = data.draw(st.sampled_from(going), label="run")
        self.now = max(self.now, self.state.now) + 1.0
        self.truth[placement_id] = "over"
        self.send(kind(**self._names(placement_id)))

    @precondition(lambda self: self.untold)
    @rule(data=st.data(), first=st.booleans(), twice=st.booleans())
    def report_arrives(self, data: st.DataObject, first: bool, twice: bool) -> None:
        """Mostly in order; each once or, `twice`, left on its way to come again."""
        event = self.untold[0] if first else data.draw(st.sampled_from(self.untold), label="report")
        if not twice:
            self.untold.remove(event)
        self.told.append(event)
        self.send(event)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def old_report_again(self, data: st.DataObject) -> None:
        self.send(data.draw(st.sampled_from(self.told), label="report"))

    @precondition(lambda self: self.places)
    @rule(
        data=st.data(),
        kind=st.sampled_from(
            [
                ev.RunStarted,
                ev.RunProgressed,
                ev.RunCompleted,
                ev.RunFailed,
                ev.RunPreempted,
                ev.RunRejected,
                ev.RunReleased,
            ]
        ),
        time=st.sampled_from([0.0, 900.0, 1010.0, 1e10]),
        right_job=st.sampled_from([True, True, True, False]),
    )
    def arbitrary_report(self, data: st.DataObject, kind: Any, time: float, right_job: bool) -> None:
        place = data.draw(st.sampled_from(self.places[-8:]), label="place")
        fields: dict[str, Any] = {}
        if kind is ev.RunProgressed:
            step = data.draw(st.sampled_from([None, 10, 500, 80_000]), label="step")
            fields = {"fraction": 0.5, "step": step, "checkpointed": True}
        elif kind is ev.RunReleased:
            fields = {"node_ids": tuple(data.draw(st.lists(st.sampled_from(NODES), max_size=2), label="nodes"))}
        job_id = place.job_id if right_job else "somebody"
        self.send(kind(placement_id=place.placement_id, job_id=job_id, time=time, **fields))

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(
        node_id=st.sampled_from(NODES),
        gpu_type=st.sampled_from(TYPES),
        gpus=st.sampled_from([0, 2, 4, 4, 6]),
        cpu=st.sampled_from([0, 4, 8]),
    )
    def join(self, node_id: str, gpu_type: str, gpus: int, cpu: int) -> None:
        spec = NodeSpec(node_id=node_id, gpu_type=gpu_type, gpus=gpus, cpu_milli=cpu, memory_mib=cpu)
        self.send(ev.NodeJoined(spec=spec))

    @precondition(lambda self: self.books.held)
    @rule(
        data=st.data(),
        fenced=st.sampled_from([False, False, True]),
        heard=st.booleans(),
        seconds=st.sampled_from([0.0, 5.0, 11.0]),
    )
    def node_with_a_run_falls_silent(self, data: st.DataObject, fenced: bool, heard: bool, seconds: float) -> None:
        """For less than the grace or for longer; perhaps it comes back."""
        held = sorted({a.node_id for allocations in self.books.held.values() for a in allocations})
        node_id = data.draw(st.sampled_from(held), label="node")
        self.send(ev.NodeLost(node_id=node_id, fenced=fenced))
        self.window(seconds, False)
        if heard:
            self.send(ev.NodeHeard(node_id=node_id))

    @rule(
        node_id=st.sampled_from(NODES),
        what=st.sampled_from(["lost", "fenced", "heard", "heard", "cordon", "uncordon", "uncordon", "drain"]),
    )
    def node_news(self, node_id: str, what: str) -> None:
        match what:
            case "lost" | "fenced":
                self.send(ev.NodeLost(node_id=node_id, fenced=what == "fenced"))
            case "heard":
                self.send(ev.NodeHeard(node_id=node_id))
            case "cordon":
                self.send(ev.NodeCordoned(node_id=node_id))
            case "uncordon":
                self.send(ev.NodeUncordoned(node_id=node_id))
            case "drain":
                self.send(ev.NodeDrained(node_id=node_id))

    @rule(node_id=st.sampled_from(NODES), gpus=st.sampled_from([0, 1, 3, 4, 6]))
    def capacity(self, node_id: str, gpus: int) -> None:
        self.send(ev.NodeCapacityChanged(node_id=node_id, gpus=gpus))

    # ── crashes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @rule()
    def crash(self) -> None:
        """Another process loads what was stored; it must be the same to the byte, and go on the same."""
        again = reloaded(self.state)
        assert stored(again) == stored(self.state)
        assert again.queued_jobs() == self.state.queued_jobs()
        self.state = again
        self.send(ev.EpochStarted(epoch=self.state.epoch + 1, config=self.config))

    @rule()
    def another_process_looks_on(self) -> None:
        """What is stored now, loaded elsewhere, goes on as this process does: the same answers to the same events."""
        self.twin = reloaded(self.state)

    # ── what must hold after every step ──────────────────────────────────────────────────────────────────────────────

    @invariant()
    def the_state_is_sound(self) -> None:
        self.state.verify()

    @invariant()
    def the_books_agree(self) -> None:
        used = self.books.usage()
        for node in self.state.inventory:
            by_books = [WHOLE_GPU - used[node.node_id, i] for i in range(len(node.free_milli))]
            assert node.free_milli == by_books, node.node_id
            idle = sum(free == WHOLE_GPU for free in by_books[: node.record.capacity])
            in_use = sum(free < WHOLE_GPU for free in by_books)
            assert node.free_gpus() == max(0, min(idle, node.record.capacity - in_use))
        assert {p for p, _ in self.books.held.items()} == set(self.state.runs)
        for tenant in TENANTS:
            assert self.state.usage(tenant).held_milli == self._held_by(tenant)

    @invariant()
    def terminal_stays_terminal(self) -> None:
        for (job_id, seq), how in self.ended.items():
            job = self.state.jobs.get(job_id)
            assert job is None or job.seq != seq or job.state is how, f"{job_id} was {how} and is {job.state}"
        for job in self.state.jobs.values():
            if job.state in TERMINAL:
                self.ended[job.spec.job_id, job.seq] = job.state

    @invariant()
    def at_most_one_run_of_a_job_goes_on(self) -> None:
        going_on = Counter(
            p.job_id for p in self.places if p.placement_id in self.books.held.keys() - self.told_to_stop
        )
        assert all(count == 1 for count in going_on.values()), going_on
        for placement_id, run in self.state.runs.items():
            assert (run.stop_at is not None) == (placement_id in self.told_to_stop)
            mine = self.state.jobs[run.job_id].placement_id == placement_id
            assert mine or run.stop_at is not None
            assert not run.given_up or not mine or self.state.jobs[run.job_id].state in TERMINAL

    def teardown(self) -> None:
        if not self.history:
            return
        for events in (self.history, self.journal):
            fresh = ClusterState("p", CONFIG)  # no ranker: a replay asks nothing
            for event, now in events:
                fresh.handle(event, now)
            fresh.verify()
            assert stored(fresh) == stored(self.state)
        self._heal()

    def _heal(self) -> None:
        """Faults stop: nodes are there, executors answer. Then every job ends, waits with a reason, or is held."""
        for i, node_id in enumerate(NODES):
            self.send(ev.NodeJoined(spec=NodeSpec(node_id=node_id, gpu_type=TYPES[i % 2], gpus=9)))
            self.send(ev.NodeUncordoned(node_id=node_id))
        for _ in range(3 * len(JOBS)):
            self.now = max(self.now, self.state.now) + 50.0
            for ask in [i for i in self.send(ev.WindowElapsed()) if isinstance(i, SolveWindow)]:
                self.send(ev.WindowSolved(solution=first_fit(ask.problem)))
            for placement_id in list(self.books.held):
                names = self._names(placement_id)
                if placement_id in self.told_to_stop:
                    self.send(ev.RunReleased(**names))
                else:
                    self.send(ev.RunStarted(**names))
                    self.send(ev.RunCompleted(**names))
        waiting = [job for job in self.state.jobs.values() if job.state not in TERMINAL]
        left = Counter(str(job.state) for job in waiting if not self._beyond_quota(job.spec))
        assert set(left) <= {"held", "unfit"}, left
        assert not self.state.runs
        self.state.verify()

    @staticmethod
    def _beyond_quota(spec: JobSpec) -> bool:
        policy = CONFIG.tenants.get(spec.tenant, TenantPolicy())
        return policy.quota_gpus is not None and spec.total_gpu_milli > policy.quota_gpus * WHOLE_GPU


CoreMachine.TestCase.settings = settings(stateful_step_count=80)
TestCore = CoreMachine.TestCase
