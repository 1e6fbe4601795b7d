"""Nodes and executors of a pool: loadgen's fleet, with nodes that fall silent, are fenced and come back.

A *silent* node is cut off: its runs go on, orders that concern them wait, and so do their reports, until it is back.
A *fenced* node is off: nothing runs there any more, what is to be started there is rejected until it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from loadgen.fleet import FleetOptions, SimulatedFleet, _Run, _Stage
from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.core.instructions import Place
from streamsched.sim.nodes import NodeGroup

if TYPE_CHECKING:
    from .world import World

HEARTBEAT_S = 1.5


class Fleet(SimulatedFleet):
    """`silent` and `down`: node ids."""

    def __init__(self, pool: str, groups: Iterable[NodeGroup], options: FleetOptions) -> None:
        super().__init__(pool, groups, options)
        self.silent: set[str] = set()
        self.down: set[str] = set()
        self._orders: list[m.Placement] = []
        self._reports: list[m.Completion] = []
        self._nodes_of: dict[str, frozenset[str]] = {}
        self._catching_up = False
        self._void: set[str] = set()
        """Placements that waited for a silent node while another of theirs was fenced."""

    def handle(self, placement: m.Placement, now: float) -> None:
        decision = placement.decision
        if isinstance(decision, Place):
            self._nodes_of[decision.placement_id] = frozenset(a.node_id for a in decision.allocations)
        if self._is_cut_off(decision.placement_id):
            self._orders.append(placement)
        else:
            super().handle(placement, now)

    def advance(self, now: float) -> list[m.Completion]:
        due = super().advance(now)
        self._reports += [report for report in due if self._is_cut_off(report.placement_id)]
        return [report for report in due if not self._is_cut_off(report.placement_id)]

    def _is_cut_off(self, placement_id: str) -> bool:
        return bool(self.silent & self._nodes_of.get(placement_id, frozenset()))

    def back(self, node_id: str, now: float) -> list[m.Completion]:
        """The node can be reached again: orders that waited are carried out, reports that waited are returned."""
        self.silent.discard(node_id)
        self.down.discard(node_id)
        self._catch_up(now)
        reports, self._reports = self._reports, []
        self._reports = [report for report in reports if self._is_cut_off(report.placement_id)]
        return [report for report in reports if not self._is_cut_off(report.placement_id)]

    def fence(self, node_id: str, now: float) -> None:
        """The node goes off with all that runs there; the rest of a gang hangs until it is told to stop."""
        self._reports = [r for r in self._reports if node_id not in self._nodes_of.get(r.placement_id, ())]
        self.down.add(node_id)
        waiting = {order.decision.placement_id for order in self._orders}
        self._void |= {name for name in waiting if node_id in self._nodes_of[name]}
        for run in list(self._runs.values()):
            if run.stage is not _Stage.ENDED and any(a.node_id == node_id for a in run.allocations):
                self._cut(run, node_id)
        self.silent.discard(node_id)
        self._catch_up(now)

    def _catch_up(self, now: float) -> None:
        orders, self._orders = self._orders, []
        self._catching_up = True
        for order in orders:
            self.handle(order, now)
        self._catching_up = False

    def _cut(self, run: _Run, node_id: str) -> None:
        for allocation in run.allocations:
            for gpu in allocation.gpus if allocation.node_id == node_id else ():
                self._held[node_id][gpu].pop(run.placement_id, None)
        left = tuple(a for a in run.allocations if a.node_id != node_id)
        run.stage, run.allocations, run.last_report = _Stage.ENDED, (), None
        if left:
            self._runs[run.placement_id] = _Run(run.job_id, run.placement_id, left, _Stage.STARTING)
        elif self._live_by_job.get(run.job_id) == run.placement_id:
            del self._live_by_job[run.job_id]

    def _objection(self, place: Place) -> tuple[str, str] | None:
        for allocation in place.allocations:
            if allocation.node_id in self.down or place.placement_id in self._void:
                return allocation.node_id, "the node is down"
        other = self._live_by_job.get(place.job_id)
        if other is not None and (self._catching_up or self._is_cut_off(other)):
            del self._live_by_job[place.job_id]  # the one was cut off from the other: nobody there knows of it
        return super()._objection(place)

    def reachable(self) -> Iterator[str]:
        return (n.node_id for n in self.nodes if n.node_id not in self.silent and n.node_id not in self.down)


class Executors:
    """One pool's: reads placements, writes reports and what nodes say."""

    def __init__(self, world: World, names: Any, fleet: Fleet, partition: int) -> None:
        self._world = world
        self._names = names
        self.fleet = fleet
        self._partition = partition
        self._read = 0

    def start(self) -> None:
        self.tell_nodes(self.fleet.joined(self._now()))
        for work in (self._carry_out(), self._beat()):
            self._world.spawn(work)

    def _now(self) -> float:
        return self._world.epoch_s()

    def tell_nodes(self, events: Iterable[m.NodeEvent]) -> None:
        for event in events:
            self._write(self._names.nodes, event)

    def report(self, reports: Iterable[m.Completion]) -> None:
        for report in reports:
            self._write(self._names.completions, report)

    def _write(self, topic: str, message: Any) -> None:
        self._world.kafka.append(topic, self._partition, codec.key_of(message), codec.encode(message), "executor")

    async def _carry_out(self) -> None:
        rng = self._world.rng
        log = self._world.kafka.logs[self._names.placements, self._partition]
        while True:
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            if self._world.faults.on and rng.random() < 0.01:
                self._read = max(0, self._read - rng.randint(1, 20))  # it was restarted and reads some again
            for record in log[self._read :]:
                self.fleet.handle(codec.decode_placement(record.value), self._now())
            self._read = len(log)
            self._judge()
            self.report(self.fleet.advance(self._now()))

    def _judge(self) -> None:
        if self.fleet.counts.violations:
            self._world.fail(f"executors were told nonsense: {'; '.join(self.fleet.counts.details)}")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S * self._world.rng.uniform(0.8, 1.2))
            now = self._now()
            self.tell_nodes(m.Heartbeat(pool=self.fleet.pool, node_id=n, time=now) for n in self.fleet.reachable())

    # ── faults of nodes ──────────────────────────────────────────────────────────────────────────────────────────────

    async def trouble(self, every_s: float) -> None:
        """Until cancelled, on average every so often."""
        rng = self._world.rng
        kinds = (
            self._fall_silent,
            self._go_off,
            self._said_lost,
            self._drain,
            self._cordon,
            self._shrink,
            self._rejoin,
        )
        while True:
            await asyncio.sleep(rng.expovariate(1.0 / every_s))
            node = rng.choice(self.fleet.nodes)
            if node.node_id not in self.fleet.silent and node.node_id not in self.fleet.down:
                rng.choice(kinds)(node)

    def _fall_silent(self, node: Any) -> None:
        self._world.tell(f"{node.node_id} falls silent")
        self._world.counts["silent nodes"] += 1
        self.fleet.silent.add(node.node_id)
        if self._world.rng.random() < 0.3:
            self._world.later(self._world.rng.uniform(1.0, 15.0), lambda: self._fence(node))
        else:
            self._world.later(self._world.rng.uniform(1.0, 20.0), lambda: self.bring_back(node))

    def _go_off(self, node: Any) -> None:
        self._fence(node)

    def _fence(self, node: Any) -> None:
        if node.node_id in self.fleet.down:
            return
        self._world.tell(f"{node.node_id} is fenced")
        self._world.counts["fenced nodes"] += 1
        self.fleet.fence(node.node_id, self._now())
        self._say(m.Lost, node, fenced=True)
        self._world.later(self._world.rng.uniform(0.3, 10.0), lambda: self.bring_back(node))

    def bring_back(self, node: Any) -> None:
        """Announced again when it was off, just heard of when it was silent."""
        if node.node_id in self.fleet.down:
            self._join(node)
        elif node.node_id in self.fleet.silent:
            self._say(m.Heartbeat, node)
        else:
            return
        self._world.tell(f"{node.node_id} is back")
        self.report(self.fleet.back(node.node_id, self._now()))

    def _said_lost(self, node: Any) -> None:
        self._say(m.Lost, node)

    def _drain(self, node: Any) -> None:
        self._say(m.Drain, node)
        self._world.later(self._world.rng.uniform(1.0, 8.0), lambda: self._say(m.Uncordon, node))

    def _cordon(self, node: Any) -> None:
        self._say(m.Cordon, node)
        self._world.later(self._world.rng.uniform(1.0, 8.0), lambda: self._say(m.Uncordon, node))

    def _shrink(self, node: Any) -> None:
        self._say(m.Capacity, node, gpus=self._world.rng.randint(1, node.gpus))
        self._world.later(self._world.rng.uniform(1.0, 8.0), lambda: self._say(m.Capacity, node, gpus=node.gpus))

    def _rejoin(self, node: Any) -> None:
        self._join(node)

    def _join(self, node: Any) -> None:
        self._say(m.Joined, node, gpu_type=node.gpu_type, gpus=node.gpus)

    def _say(self, kind: Any, node: Any, **more: Any) -> None:
        self.tell_nodes([kind(pool=self.fleet.pool, node_id=node.node_id, time=self._now(), **more)])

    def heal(self) -> None:
        """All nodes are well and say so; whatever is said of them later is the same."""
        self.fleet.options = FleetOptions(seed=self.fleet.options.seed)
        for node in self.fleet.nodes:
            self.bring_back(node)
            self._join(node)
            self._say(m.Uncordon, node)
