"""What must hold, told from the topics and the stored state alone.

At any moment: what Redis holds of a pool is byte for byte the journal folded up to the position that it names; its
epoch only grows while it loses no data; every placement on the topic is the decision of a journal record that counts
(so void records have no effect); a placement id has one content and a job's attempt one placement; a terminal job is
never placed or moved again; no message from outside is folded more often than it was written (exactly once).
At the end: loadgen's audit of the topics; every job has exactly one successful run; every command is in the journal or
a dead letter; no GPU is held, nothing waits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.history import Audit, History, Stamped, audit
from streamsched.bus import codec, journal
from streamsched.bus.messages import JournalRecord
from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.instructions import Place, Preempt, Revoke
from streamsched.core.model import TERMINAL, RunState
from streamsched.service.recovery import Fold
from streamsched.store.pool_store import PoolStore, Position, stored_values

from .redis import Client

if TYPE_CHECKING:
    from .faults import Simulation

_OWN = (ev.WindowElapsed, ev.WindowSolved, ev.EpochStarted, ev.NodeLost)
"""Events that the scheduler makes itself (a lost node may also be told)."""


class PoolChecks:
    """The checks of one pool; `look` at any time, `finish` when all is quiet."""

    def __init__(self, sim: Simulation, pool: str, partition: int) -> None:
        self._sim = sim
        self.pool = pool
        self._partition = partition
        self._store = PoolStore(Client(sim.world.redis), pool, sim.settings.key_prefix)  # type: ignore[arg-type]
        self._fold = self._new_fold()
        self._epoch = (0, 0)

    def _new_fold(self) -> Fold:
        return Fold(ClusterState(self.pool, SchedulerConfig()), Position())

    def _entries(self, start: int = 0) -> Iterable[journal.Entry]:
        for record in self._sim.world.kafka.logs[self._sim.names.journal, self._partition][start:]:
            if record.key == self.pool.encode():
                yield journal.Entry(record.offset, codec.decode_journal(record.value))

    def counted(self) -> list[JournalRecord]:
        """The records that count."""
        validity = journal.Validity()
        return [entry.record for entry in self._entries() if validity.counts(entry.record)]

    # ── at any moment ────────────────────────────────────────────────────────────────────────────────────────────────

    async def look(self) -> list[str]:
        return [*await self._redis_is_the_journal(), *self._epochs_grow(), *self._placements_count()]

    async def _redis_is_the_journal(self) -> list[str]:
        position, raw = await self._store.raw()
        if not raw["meta"][b"state"]:
            return []
        if position.journal < self._fold.position.journal:
            self._fold = self._new_fold()
        for entry in self._entries(self._fold.position.journal):
            if entry.offset >= position.journal:
                break
            self._fold.add(entry)
        if self._fold.position.seq != position.seq:
            return [f"{self.pool}: Redis is at record {position.seq}, the journal at {self._fold.position.seq}"]
        self._fold.state.verify()
        expected = stored_values(self._fold.state.everything())
        return [
            f"{self.pool}: {kind} {name.decode()}: Redis {raw[kind].get(name)!r}, journal {expected[kind].get(name)!r}"
            for kind in sorted(expected)
            for name in sorted(expected[kind].keys() | raw[kind].keys())
            if expected[kind].get(name) != raw[kind].get(name)
        ]

    async def redis_is_up_to_date(self) -> list[str]:
        """For the end, when all is quiet: a Redis that was lost, or came back old, has been noticed and made good."""
        whole = self._new_fold()
        for entry in self._entries():
            whole.add(entry)
        position, raw = await self._store.raw()
        if raw["meta"][b"state"] and position.seq == whole.position.seq:
            return []
        return [f"{self.pool}: Redis is at record {position.seq} for good, the journal at {whole.position.seq}"]

    def _epochs_grow(self) -> list[str]:
        server = self._sim.world.redis
        meta = server.data.hashes.get(f"{self._sim.settings.key_prefix}{{{self.pool}}}:meta".encode(), {})
        before, now = self._epoch, (server.resets, int(meta.get(b"epoch", b"0")))
        self._epoch = now
        if before[0] == now[0] and now[1] < before[1]:
            return [f"{self.pool}: epoch {now[1]} after {before[1]}"]
        return []

    def _placements_count(self) -> list[str]:
        decided = {(r.epoch, r.seq, _name(d)): d for r in self.counted() for d in r.decisions}
        wrong: list[str] = []
        contents: dict[str, Place] = {}
        attempts: dict[tuple[str, int], str] = {}
        for record in self._sim.world.kafka.logs[self._sim.names.placements, self._partition]:
            placement = codec.decode_placement(record.value)
            if placement.pool != self.pool:
                continue
            decision = placement.decision
            if decided.get((placement.epoch, placement.seq, _name(decision))) != decision:
                wrong.append(f"{self.pool}: {_name(decision)} by {record.writer} is of no record that counts")
            if isinstance(decision, Place):
                if contents.setdefault(decision.placement_id, decision) != decision:
                    wrong.append(f"{decision.placement_id} with two contents")
                key = (decision.job_id, decision.attempt)
                if attempts.setdefault(key, decision.placement_id) != decision.placement_id:
                    wrong.append(f"attempt {key} placed twice: {attempts[key]} and {decision.placement_id}")
        return wrong

    # ── the journal as a whole ───────────────────────────────────────────────────────────────────────────────────────

    def history_is_sound(self) -> list[str]:
        """Terminal stays terminal; nothing from outside is folded more often than it was written; decisions are told.

        A decision may stay untold only when it does not matter any more to whoever takes the pool over next.
        """
        fold, wrong = self._new_fold(), []
        untold: dict[tuple[type, str], Place | Preempt | Revoke] = {}
        told = self._told()
        ended: dict[str, Any] = {}
        folded: Counter[bytes] = Counter()
        for entry in self._entries():
            if not fold.add(entry):
                continue
            if journal.mark_of(entry.record) is not None:
                wrong += [f"{name} was never told" for name in _still_matter(untold, fold.state)]
                untold.clear()
            untold |= {k: d for d in entry.record.decisions if (k := (type(d), d.placement_id)) not in told}
            for event in entry.record.events:
                if not isinstance(event, _OWN):
                    folded[msgspec.json.encode(event)] += 1
            for job_id in fold.state.take_changes().jobs:
                job = fold.state.jobs.get(job_id)
                if job_id in ended and (job is None or job.state is not ended[job_id]):
                    wrong.append(f"job {job_id} was {ended[job_id]} and then {job.state if job else 'forgotten'}")
                if job is not None and job.state in TERMINAL:
                    ended[job_id] = job.state
        wrong += [f"{_name(decision)} was never told" for decision in untold.values()]
        written = self._written()
        wrong += [
            f"{self.pool}: folded {count} times, written {written[event]} times: {event.decode()}"
            for event, count in folded.items()
            if count > written[event]
        ]
        return wrong

    def _told(self) -> set[tuple[type, str]]:
        log = self._sim.world.kafka.logs[self._sim.names.placements, self._partition]
        decisions = (codec.decode_placement(record.value).decision for record in log)
        return {(type(decision), decision.placement_id) for decision in decisions}

    def _written(self) -> Counter[bytes]:
        """Inputs of the pool as the events that they mean."""
        written: Counter[bytes] = Counter()
        logs, names = self._sim.world.kafka.logs, self._sim.names
        for topic, decode in (
            (names.pool_jobs, codec.decode_pool_job),
            (names.completions, codec.decode_completion),
            (names.nodes, codec.decode_node),
        ):
            for record in logs[topic, self._partition]:
                message: Any = decode(record.value)
                if message.pool == self.pool:
                    written[msgspec.json.encode(_event(topic, names, message))] += 1
        return written

    def owner_state(self) -> ClusterState | None:
        """In the memory of the worker that has the pool."""
        worker = self._sim.group.owners.get(self._partition)
        runner = worker.scheduler.runners.get(self.pool) if worker is not None else None
        return runner.state if runner is not None else None


def _still_matter(untold: dict[tuple[type, str], Any], state: ClusterState) -> Iterable[str]:
    for decision in untold.values():
        run = state.runs.get(decision.placement_id)
        if run is not None and (run.state is RunState.PLACED or not isinstance(decision, Place)):
            yield _name(decision)


def _event(topic: str, names: Any, message: Any) -> ev.CoreEvent:
    if topic == names.pool_jobs:
        if message.arrival is not None:
            return ev.JobArrived(spec=codec.job_spec(message.arrival, message.traceparent))
        return codec.command_event(message.command, message.origin.offset)
    return codec.node_event(message) if topic == names.nodes else codec.run_event(message)


def _name(decision: Place | Preempt | Revoke) -> str:
    reason = "" if isinstance(decision, Place) else decision.reason
    return f"{type(decision).__name__.lower()} {decision.placement_id} {reason}".strip()


# ── the topics as a whole ────────────────────────────────────────────────────────────────────────────────────────────


def audited(sim: Simulation) -> list[str]:
    """loadgen's audit, but for what cannot be helped.

    A run on a node thought lost is given up after a grace, so its job may have two runs at a time. One that was told to
    stop, or whose node was thought lost, may have completed at the same moment: then its job is run again.
    """
    lost, stopped = _on_lost_nodes(sim), _told_to_stop(sim)
    found: Audit = audit(history_of(sim), may_stay_unfinished=frozenset(sim.may_stay_unfinished()), allow_repeats=True)
    wrong = []
    for detail in found.details:
        kind, rest = detail.split(": ", 1)
        first = re.split(r"[ ,]+", re.sub(r"^job \S+ (by )?", "", rest))[0]
        if kind == "job-running-twice" and first in lost:
            continue
        if kind == "completed-twice" and first in lost | stopped:
            continue
        wrong.append(f"audit: {detail}")
    return wrong


def _on_lost_nodes(sim: Simulation) -> set[str]:
    """Placements on nodes that the scheduler has thought lost at some time."""
    records = [record for checks in sim.checks for record in checks.counted()]
    nodes = {e.node_id for record in records for e in record.events if isinstance(e, ev.NodeLost)}
    return {
        d.placement_id
        for record in records
        for d in record.decisions
        if isinstance(d, Place) and any(a.node_id in nodes for a in d.allocations)
    }


def _told_to_stop(sim: Simulation) -> set[str]:
    decisions = (d for checks in sim.checks for record in checks.counted() for d in record.decisions)
    return {d.placement_id for d in decisions if not isinstance(d, Place)}


def history_of(sim: Simulation) -> History:
    topic, names = sim.world.kafka.topic, sim.names
    return History(
        arrivals=[Stamped(r.at, codec.decode_arrival(r.value)) for r in _first_arrivals(sim)],
        placements=[Stamped(r.at, codec.decode_placement(r.value)) for r in topic(names.placements)],
        completions=[Stamped(r.at, codec.decode_completion(r.value)) for r in topic(names.completions)],
        nodes=[Stamped(r.at, codec.decode_node(r.value)) for r in topic(names.nodes)],
    )


def _first_arrivals(sim: Simulation) -> Iterable[Any]:
    seen: set[bytes | None] = set()
    for record in sim.world.kafka.topic(sim.names.arrivals):
        if record.key not in seen and record.key != b"nonsense":
            seen.add(record.key)
            yield record


def _refused(sim: Simulation) -> Iterable[tuple[str, int, int]]:
    """Where the inputs with a dead letter were first written."""
    for record in sim.world.kafka.topic(sim.names.dead_letters):
        letter = codec.decode_dead_letter(record.value)
        origin = letter.origin
        if origin.topic == sim.names.pool_jobs:
            origin = codec.decode_pool_job(letter.original).origin
        yield origin.topic, origin.partition, origin.offset


def inputs_accounted_for(sim: Simulation) -> list[str]:
    """Every arrival and command is in the journal of a pool or a dead letter."""
    letters = set(_refused(sim))
    arrived: set[str] = set()
    commanded: set[tuple[str, int]] = set()
    for checks in sim.checks:
        for record in checks.counted():
            for event in record.events:
                if isinstance(event, ev.JobArrived):
                    arrived.add(event.spec.job_id)
                elif (offset := getattr(event, "offset", -1)) >= 0:
                    commanded.add((event.job_id, offset))  # type: ignore[union-attr]
    wrong = []
    for (topic, partition), log in sim.world.kafka.logs.items():
        for record in log:
            known = (topic, partition, record.offset) in letters
            job_id = (record.key or b"").decode()
            if topic == sim.names.arrivals and not known and job_id not in arrived:
                wrong.append(f"arrival of {job_id} is neither applied nor a dead letter")
            if topic == sim.names.commands and not known and (job_id, record.offset) not in commanded:
                wrong.append(f"command {record.value.decode()} is neither applied nor a dead letter")
    codes = {codec.decode_dead_letter(r.value).code for r in sim.world.kafka.topic(sim.names.dead_letters)}
    if sim.work.conflicts and "conflict" not in codes:
        wrong.append("a conflicting arrival is no dead letter")
    return wrong
