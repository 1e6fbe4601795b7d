"""A pool in a few lines: `Pool` declares nodes and jobs, sends events and keeps what came back.

Windows are solved by a first-fit of its own, so that tests of the core do not depend on `streamsched.placement`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from streamsched.core import events as ev
from streamsched.core.cluster import Changes, ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.instructions import Absorb, Instruction, Place, Preempt, Refuse, Revoke, SolveWindow
from streamsched.core.model import WHOLE_GPU, Job, JobSpec, JobState, NodeSpec, Run
from streamsched.core.problem import Assignment, Candidate, Problem, Solution, SolveStatus, Victim
from streamsched.policy.rules import FirstComeFirstServed


def stored(state: ClusterState) -> bytes:
    """Everything that is kept of a state, as bytes."""
    return msgspec.json.encode(state.everything())


def reloaded(state: ClusterState) -> ClusterState:
    """What another process would make of the stored state."""
    fresh = ClusterState(state.pool, ranker=state.ranker)
    fresh.load(msgspec.json.decode(stored(state), type=Changes))
    return fresh


def first_fit(problem: Problem) -> Solution:
    """Candidates in order, workers on the first node with room; a gang whole or not at all.

    Who does not fit takes the place of victims of lower levels, as few as it can, on nodes that it then has to itself.
    """
    room = {
        node_id: [c.gpu_type, c.free_gpus, sorted(c.shares), c.free_cpu_milli, c.free_memory_mib]
        for c in problem.classes
        for node_id in c.node_ids
    }
    assignments, unplaced = [], {}
    victims = list(problem.victims)
    for candidate in problem.candidates:
        trial = _copy(room)
        workers = _fit(candidate, trial)
        after = _evict(candidate, room, victims) if workers is None else None
        if after is not None:
            trial = _copy(room)
            workers = _fit(candidate, _with(room, after))
            for node_id in {node_id for node_id, _ in workers or ()}:
                del trial[node_id]
            gone = {node_id for victim in after for node_id, *_ in victim.held}
            victims = [
                v for v in victims if not gone & {n for n, *_ in v.held} and {n for n, *_ in v.held} <= trial.keys()
            ]
        if workers is None:
            unplaced[candidate.job_id] = "gpus: no room beside those before it"
            continue
        room = trial
        assignments.append(
            Assignment(
                job_id=candidate.job_id,
                attempt=candidate.attempt,
                workers=tuple(workers),
                score=candidate.score,
                after=tuple(victim.placement_id for victim in after or ()),
            )
        )
    return Solution(
        window=problem.window,
        status=SolveStatus.GREEDY if assignments else SolveStatus.EMPTY,
        policy=problem.policy,
        assignments=tuple(assignments),
        unplaced=unplaced,
    )


Room = dict[str, list[Any]]


def _copy(room: Room) -> Room:
    return {node_id: [t, g, list(s), c, m] for node_id, (t, g, s, c, m) in room.items()}


def _with(room: Room, victims: Sequence[Victim]) -> Room:
    """What there is once these have gone."""
    more = _copy(room)
    for node_id, gpus, cpu, memory in [held for victim in victims for held in victim.held if held[0] in more]:
        node = more[node_id]
        node[1] += gpus
        node[3] += cpu if node[3] >= 0 else 0
        node[4] += memory if node[4] >= 0 else 0
    return more


def _evict(candidate: Candidate, room: Room, victims: Sequence[Victim]) -> list[Victim] | None:
    """Victims of a lower level, none of them in vain; None where all of them would not be enough."""
    if candidate.gpu_milli != WHOLE_GPU:
        return None
    needed = [victim for victim in victims if victim.level < candidate.level]
    if _fit(candidate, _with(room, needed)) is None:
        return None
    for victim in reversed(needed):
        rest = [other for other in needed if other is not victim]
        if _fit(candidate, _with(room, rest)) is not None:
            needed = rest
    return needed


def _fit(candidate: Candidate, room: dict[str, list[Any]]) -> list[tuple[str, int]] | None:
    """On one type, the first that will do, where the candidate wants that; takes it from `room`."""
    if not candidate.one_type:
        return _fit_on(candidate, room)
    for gpu_type in sorted({node[0] for node in room.values()}):
        trial = {
            node_id: [*node[:2], list(node[2]), *node[3:]] for node_id, node in room.items() if node[0] == gpu_type
        }
        workers = _fit_on(candidate, trial)
        if workers is not None:
            room.update(trial)
            return workers
    return None


def _fit_on(candidate: Candidate, room: dict[str, list[Any]]) -> list[tuple[str, int]] | None:
    workers = []
    for gpus, count in candidate.chunks:
        for _ in range(count):
            node_id = next((n for n in sorted(room) if _take(candidate, gpus, n, room[n])), None)
            if node_id is None:
                return None
            workers.append((node_id, gpus))
    return workers


def _take(candidate: Candidate, gpus: int, node_id: str, node: list[Any]) -> bool:
    gpu_type, free, shares, cpu, memory = node
    if node_id in candidate.avoid_nodes or (candidate.gpu_types and gpu_type not in candidate.gpu_types):
        return False
    if 0 <= cpu < candidate.cpu_milli or 0 <= memory < candidate.memory_mib:
        return False
    if candidate.gpu_milli == WHOLE_GPU:
        if free < gpus:
            return False
        node[1] = free - gpus
    else:
        share = next((s for s in shares if s >= candidate.gpu_milli), None)
        if share is None and not free:
            return False
        if share is None:
            node[1], share = free - 1, WHOLE_GPU
        else:
            shares.remove(share)
        node[2] = sorted([*shares, share - candidate.gpu_milli] if share > candidate.gpu_milli else shares)
    node[3] = cpu - candidate.cpu_milli if cpu >= 0 else cpu
    node[4] = memory - candidate.memory_mib if memory >= 0 else memory
    return True


class Pool:
    """A pool under test. Methods named for events send them at `now` and return the instructions."""

    def __init__(self, *, ranker: Any = None, **config: Any) -> None:
        self.now = 1000.0
        self.config = SchedulerConfig(**config)
        self.state = ClusterState("p", self.config, ranker or FirstComeFirstServed())
        self.history: list[tuple[ev.CoreEvent, float]] = []
        self.placements: dict[str, Place] = {}
        """job id -> its latest placement."""

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, event: ev.CoreEvent) -> list[Instruction]:
        self.history.append((event, self.now))
        out = self.state.handle(event, self.now)
        self.placements.update({i.job_id: i for i in out if isinstance(i, Place)})
        return out

    def later(self, seconds: float) -> None:
        self.now += seconds

    def node(self, node_id: str, gpus: int = 8, gpu_type: str = "V100", **more: Any) -> list[Instruction]:
        return self.send(ev.NodeJoined(spec=NodeSpec(node_id=node_id, gpu_type=gpu_type, gpus=gpus, **more)))

    def nodes(self, count: int, gpus: int = 8, gpu_type: str = "V100", **more: Any) -> None:
        for i in range(count):
            self.node(f"n{i}", gpus, gpu_type, **more)

    def arrive(self, job_id: str, gpus: int = 1, workers: int = 1, **more: Any) -> list[Instruction]:
        spec = JobSpec(job_id=job_id, submitted_at=self.now, gpus_per_worker=gpus, workers=workers, **more)
        return self.send(ev.JobArrived(spec=spec))

    def window(self) -> list[Instruction]:
        """`WindowElapsed` and what came back, unsolved."""
        return self.send(ev.WindowElapsed())

    def solve(self) -> list[Instruction]:
        """A window, solved and committed at once; all instructions but the question itself."""
        out = self.window()
        for ask in [i for i in out if isinstance(i, SolveWindow)]:
            out.remove(ask)
            out += self.send(ev.WindowSolved(solution=first_fit(ask.problem)))
        return out

    def running(self, *job_ids: str) -> None:
        """Place and start these waiting jobs."""
        self.solve()
        for job_id in job_ids:
            assert self.job(job_id).state is JobState.PLACED, self.job(job_id)
            self.start(job_id)

    def start(self, job_id: str, placement: Place | None = None) -> list[Instruction]:
        return self.report(ev.RunStarted, job_id, placement)

    def complete(self, job_id: str, placement: Place | None = None, **more: Any) -> list[Instruction]:
        return self.report(ev.RunCompleted, job_id, placement, **more)

    def report(
        self, kind: Any, job_id: str, placement: Place | None = None, time: float | None = None, **more: Any
    ) -> list[Instruction]:
        """An executor's report of the job's latest placement, or of the one given."""
        name = (placement or self.placements[job_id]).placement_id
        at = self.now if time is None else time
        return self.send(kind(placement_id=name, job_id=job_id, time=at, **more))

    def command(self, kind: Any, job_id: str, **more: Any) -> list[Instruction]:
        return self.send(kind(job_id=job_id, **more))

    def lose(self, node_id: str, fenced: bool = False) -> list[Instruction]:
        return self.send(ev.NodeLost(node_id=node_id, fenced=fenced))

    def crash(self) -> None:
        """The process dies; another one loads what was stored and takes over."""
        self.state = reloaded(self.state)
        self.send(ev.EpochStarted(epoch=self.state.epoch + 1, config=self.config))

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def job(self, job_id: str) -> Job:
        return self.state.jobs[job_id]

    def run(self, job_id: str) -> Run:
        placement_id = self.job(job_id).placement_id
        assert placement_id is not None, self.job(job_id)
        return self.state.runs[placement_id]

    def states(self, *job_ids: str) -> list[str]:
        return [str(self.state.jobs[job_id].state) for job_id in job_ids]

    def free(self) -> dict[str, int]:
        """Whole GPUs that each usable node can give."""
        return {node.node_id: node.free_gpus() for node in self.state.inventory if node.usable}

    def why(self, job_id: str) -> str:
        """What the last window said of a waiting job."""
        assert self.state.window is not None
        return next(r.reason for r in self.state.window.ranking if r.job_id == job_id)

    def verify(self) -> None:
        """The state is sound, another process would load the same, and a replay of all events gives the same."""
        self.state.verify()
        again = reloaded(self.state)
        again.verify()
        assert stored(again) == stored(self.state)
        assert self.replayed() == stored(self.state)

    def replayed(self) -> bytes:
        fresh = ClusterState(self.state.pool, self.config)
        for event, now in self.history:
            fresh.handle(event, now)
        return stored(fresh)


def placed(out: Sequence[Instruction]) -> dict[str, Counter[str]]:
    """job id -> GPUs per node of each `Place`."""
    return {
        i.job_id: Counter({n: sum(len(a.gpus) for a in i.allocations if a.node_id == n) for n in _nodes(i)})
        for i in out
        if isinstance(i, Place)
    }


def _nodes(place: Place) -> list[str]:
    return sorted({a.node_id for a in place.allocations})


def stops(out: Sequence[Instruction]) -> list[tuple[str, str]]:
    """("preempt" | "revoke", placement id) in order."""
    return [(type(i).__name__.lower(), i.placement_id) for i in out if isinstance(i, Preempt | Revoke)]


def codes(out: Sequence[Instruction]) -> list[str]:
    """Codes of refusals ("refuse:...") and absorbed input ("absorb:...")."""
    return [f"{type(i).__name__.lower()}:{i.code}" for i in out if isinstance(i, Refuse | Absorb)]
