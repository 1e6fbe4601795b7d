"""GPUs allocated when pods begin to fail: real pods on real nodes, inflated until the cluster is full.

The experiment of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
Descent" (USENIX ATC'23): pods of the openb trace are drawn with replacement and placed one after the other; a pod that
finds no room has failed and does not come again. Reported is the share of all GPUs that is allocated when 1 % and 5 %
of the pods so far have failed, and when 1.3 times the cluster's GPUs have been asked for. CPU pods are left out for
everybody.

Rivals, as in the paper and its simulator (kubernetes-scheduler-simulator, `best_fit_score.go`, `dot_product_score.go`):
first fit (lowest node), best fit (least left of cpu and GPU, each by the largest node, half and half), dot product
(smallest product of free and asked, normalised by the largest node), and the paper's own fragmentation gradient, here
with the distribution of the pods seen so far. All share one rule for the device within the node: the fullest with
room. The engine places windows of eight pods, by greedy alone or by `solve`.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import numpy as np
from rich.table import Table

from loadgen.formats.openb_csv import Machine, Pod, read_machines, read_pods
from streamsched.core.model import WHOLE_GPU
from streamsched.core.problem import Ask, Assignment, Candidate, NodeClass, Problem
from streamsched.core.window import MIX_MAX
from streamsched.placement import SolveLimits, greedy, solve

from . import _cases

FOLDER = "alibaba-gpu-v2023"
SEEDS = range(10, 15)
"""Not 0 and 1, on which the trial scorer was chosen among four."""
SLOW = "engine, solve"
"""Takes forty times as long as the next one: two seeds."""
WINDOW = 8
ASKED_MOST = 1.3
"""Times the cluster's GPUs, at which an experiment ends."""
MARKS = (0.01, 0.05)
"""Shares of failed pods at which the allocation is read."""
LIMITS = SolveLimits(time_s=1.0)
_MARKS_FROM = 100
"""Pods before which the share of failed ones says nothing."""

Array = np.ndarray[Any, Any]


class Cluster:
    """Free resources of all nodes: `free` [node, device] thousandths, 0 where there is no device."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = machines
        widest = max(m.gpus for m in machines)
        self.free = np.array([[WHOLE_GPU] * m.gpus + [0] * (widest - m.gpus) for m in machines])
        self.cpu = np.array([m.cpu_milli for m in machines])
        self.memory = np.array([m.memory_mib for m in machines])
        self.types = np.array([m.gpu_type for m in machines])
        self.gpus_milli = int(self.free.sum())

    @property
    def allocated(self) -> float:
        """Share of all GPUs."""
        return 1 - float(self.free.sum()) / self.gpus_milli

    def fits(self, pod: Pod) -> Array:
        """Node indexes with room, ascending."""
        room = (self.free >= pod.gpu_milli).sum(axis=1) >= pod.gpus
        room &= (self.cpu >= pod.cpu_milli) & (self.memory >= pod.memory_mib)
        if pod.gpu_types:
            room &= np.isin(self.types, pod.gpu_types)
        return np.flatnonzero(room)

    def take(self, node: int, pod: Pod) -> None:
        """On the fullest devices with room, the lowest of equals."""
        devices = np.argsort(np.where(self.free[node] >= pod.gpu_milli, self.free[node], WHOLE_GPU + 1), kind="stable")
        self.free[node, devices[: pod.gpus]] -= pod.gpu_milli
        self.cpu[node] -= pod.cpu_milli
        self.memory[node] -= pod.memory_mib
        if self.free[node].min() < 0 or self.cpu[node] < 0 or self.memory[node] < 0:
            raise AssertionError(f"{pod} does not fit on {self.machines[node]}")


class Placer(Protocol):
    """Places pods in their order; `window` of them at a time."""

    window: int

    def place(self, cluster: Cluster, pods: Sequence[Pod]) -> list[bool]:
        """Which of them were placed; the cluster has changed accordingly."""


# ── rivals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class OneByOne:
    """A pod goes to the node with the lowest score, the lowest index of equals."""

    score: Callable[[Cluster, Pod, Array], Array]
    window: int = 1

    def place(self, cluster: Cluster, pods: Sequence[Pod]) -> list[bool]:
        return [self._place_one(cluster, pod) for pod in pods]

    def _place_one(self, cluster: Cluster, pod: Pod) -> bool:
        nodes = cluster.fits(pod)
        if not len(nodes):
            self.score(cluster, pod, nodes)
            return False
        cluster.take(int(nodes[np.argmin(self.score(cluster, pod, nodes))]), pod)
        return True


def first_fit(_: Cluster, __: Pod, nodes: Array) -> Array:
    return nodes


def best_fit(cluster: Cluster, pod: Pod, nodes: Array) -> Array:
    """Of what is left: half the cpu and half the GPUs, each by the most that a node has."""
    cpu_most, gpu_most = _largest(cluster)
    cpu = (cluster.cpu[nodes] - pod.cpu_milli) / cpu_most
    gpu = (cluster.free[nodes].sum(axis=1) - pod.gpus * pod.gpu_milli) / gpu_most
    score: Array = 0.5 * cpu + 0.5 * gpu
    return score


def dot_product(cluster: Cluster, pod: Pod, nodes: Array) -> Array:
    cpu_most, gpu_most = _largest(cluster)
    cpu = cluster.cpu[nodes] / cpu_most * (pod.cpu_milli / cpu_most)
    gpu = cluster.free[nodes].sum(axis=1) / gpu_most * (pod.gpus * pod.gpu_milli / gpu_most)
    score: Array = cpu + gpu
    return score


def _largest(cluster: Cluster) -> tuple[int, int]:
    return max(m.cpu_milli for m in cluster.machines), max(m.gpus for m in cluster.machines) * WHOLE_GPU


class FragmentationGradient:
    """FGD's score: how much the node's expected fragmentation grows by the pod (section 4 of the paper).

    The fragmentation of a node for a pod is the free GPU that this pod could not use: all of it where the pod does not
    fit, else the devices that are too full for it. Expected over the pods seen so far. What is known of a (pod, node)
    stays until the node changes; the distribution is taken anew every `refresh` pods.
    """

    def __init__(self, refresh: int = 200) -> None:
        self._refresh = refresh
        self._seen: Counter[Pod] = Counter()
        self._until_refresh = 0
        self._pods: list[Pod] = []
        self._shares = np.zeros(0)
        self._scores: dict[Pod, Array] = {}
        self._known: dict[Pod, Array] = {}
        """[free GPU, cpu, memory] of each node when its score for this pod was found."""

    def __call__(self, cluster: Cluster, pod: Pod, nodes: Array) -> Array:
        self._note(pod)
        stale = nodes[self._stale(cluster, pod, nodes)]
        if len(stale):
            free, cpu, memory = cluster.free[stale], cluster.cpu[stale], cluster.memory[stale]
            before = self.fragmentation(free, cpu, memory, cluster.types[stale])
            after = self.fragmentation(
                _taken(free, pod), cpu - pod.cpu_milli, memory - pod.memory_mib, cluster.types[stale]
            )
            self._scores[pod][stale] = after - before
        return self._scores[pod][nodes]

    def fragmentation(self, free: Array, cpu: Array, memory: Array, types: Array) -> Array:
        """Expected fragmentation of nodes, in thousandths of a GPU."""
        total = free.sum(axis=1)
        expected = np.zeros(len(free))
        useless: dict[tuple[int, int], tuple[Array, Array]] = {}
        for pod, share in zip(self._pods, self._shares, strict=True):
            kind = (pod.gpus, pod.gpu_milli)
            if kind not in useless:
                usable = free >= pod.gpu_milli
                useless[kind] = (usable.sum(axis=1) >= pod.gpus, total - (free * usable).sum(axis=1))
            enough, left = useless[kind]
            fits = enough & (cpu >= pod.cpu_milli) & (memory >= pod.memory_mib)
            if pod.gpu_types:
                fits &= np.isin(types, pod.gpu_types)
            expected += share * np.where(fits, left, total)
        return expected

    def _note(self, pod: Pod) -> None:
        self._seen[pod] += 1
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self._until_refresh = self._refresh
            self._pods = list(self._seen)
            self._shares = np.array([self._seen[p] for p in self._pods]) / self._seen.total()
            self._scores.clear()
            self._known.clear()

    def _stale(self, cluster: Cluster, pod: Pod, nodes: Array) -> Array:
        """Which of the nodes have changed since their score for this pod was found."""
        if pod not in self._known:
            self._scores[pod] = np.zeros(len(cluster.cpu))
            self._known[pod] = np.full((3, len(cluster.cpu)), -1)
        known = self._known[pod]
        now = np.stack([cluster.free[nodes].sum(axis=1), cluster.cpu[nodes], cluster.memory[nodes]])
        changed: Array = (known[:, nodes] != now).any(axis=0)
        known[:, nodes] = now
        return changed


class GradientWithFit(FragmentationGradient):
    """A trial of what the engine could score by: the gradient, and best fit where it hardly differs.

    The gradient alone is zero on every node that this pod leaves as useful as it was, and then the lowest node is
    taken. `WEIGHT`: thousandths of a GPU of fragmentation that one unit of best fit counts as.
    """

    WEIGHT = 300.0

    def __call__(self, cluster: Cluster, pod: Pod, nodes: Array) -> Array:
        return super().__call__(cluster, pod, nodes) + self.WEIGHT * best_fit(cluster, pod, nodes)


def _taken(free: Array, pod: Pod) -> Array:
    """`free` after the pod was put on each of the nodes, on the fullest devices with room."""
    after = free.copy()
    order = np.argsort(np.where(free >= pod.gpu_milli, free, WHOLE_GPU + 1), axis=1, kind="stable")
    np.put_along_axis(
        after,
        order[:, : pod.gpus],
        np.take_along_axis(free, order[:, : pod.gpus], axis=1) - pod.gpu_milli,
        axis=1,
    )
    return after


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Engine:
    """Windows of pods through the placement engine, valued as the core values jobs of one priority class."""

    answer: Callable[[Problem], tuple[Assignment, ...]]
    window: int = WINDOW
    _number: int = field(default=0, init=False)
    _seen: Counter[Ask] = field(default_factory=Counter, init=False)

    def place(self, cluster: Cluster, pods: Sequence[Pod]) -> list[bool]:
        self._number += 1
        self._seen.update(map(_ask, pods))
        problem = Problem(
            pool="openb",
            window=self._number,
            now=0.0,
            policy="fcfs",
            candidates=tuple(_candidate(pod, place, len(pods)) for place, pod in enumerate(pods)),
            classes=tuple(_classes(cluster)),
            mix=tuple(self._seen.most_common(MIX_MAX)),
        )
        index = {machine.node_id: i for i, machine in enumerate(cluster.machines)}
        placed = [False] * len(pods)
        for assignment in self.answer(problem):
            place = int(assignment.job_id)
            ((node_id, _),) = assignment.workers
            cluster.take(index[node_id], pods[place])
            placed[place] = True
        return placed


def _ask(pod: Pod) -> Ask:
    return Ask(
        gpus=pod.gpus,
        gpu_milli=pod.gpu_milli,
        gpu_memory_mib=0,
        cpu_milli=pod.cpu_milli,
        memory_mib=pod.memory_mib,
        gpu_types=pod.gpu_types,
    )


def _candidate(pod: Pod, place: int, count: int) -> Candidate:
    return Candidate(
        job_id=f"{place:04d}",
        attempt=0,
        chunks=((pod.gpus, 1),),
        value=pod.gpus * pod.gpu_milli / WHOLE_GPU * (2.0 - place / count),
        gpu_milli=pod.gpu_milli,
        gpu_types=pod.gpu_types,
        cpu_milli=pod.cpu_milli,
        memory_mib=pod.memory_mib,
    )


def _classes(cluster: Cluster) -> Iterator[NodeClass]:
    members: dict[tuple[str, int, tuple[int, ...], int, int, int], list[str]] = defaultdict(list)
    rows = zip(cluster.machines, cluster.free.tolist(), cluster.cpu.tolist(), cluster.memory.tolist(), strict=True)
    for machine, free, cpu, memory in rows:
        idle = free.count(WHOLE_GPU)
        shares = tuple(sorted(f for f in free if 0 < f < WHOLE_GPU))
        if idle or shares:
            members[machine.gpu_type, idle, shares, cpu, memory, machine.gpus].append(machine.node_id)
    for (gpu_type, idle, shares, cpu, memory, gpus), node_ids in sorted(members.items()):
        yield NodeClass(
            gpu_type=gpu_type,
            free_gpus=idle,
            node_ids=tuple(sorted(node_ids)),
            shares=shares,
            free_cpu_milli=cpu,
            free_memory_mib=memory,
            total_gpus=gpus,
        )


PLACERS: dict[str, Callable[[], Placer]] = {
    "first fit": lambda: OneByOne(first_fit),
    "best fit": lambda: OneByOne(best_fit),
    "dot product": lambda: OneByOne(dot_product),
    "fragmentation gradient": lambda: OneByOne(FragmentationGradient()),
    "gradient with fit (trial)": lambda: OneByOne(GradientWithFit()),
    "engine, greedy": lambda: Engine(greedy),
    SLOW: lambda: Engine(lambda problem: solve(problem, LIMITS).assignments),
}


# ── the experiment ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Outcome:
    at: dict[float, float]
    """Share of failed pods -> share of GPUs allocated when it was reached."""
    end: float
    pods: int
    seconds: float


def inflate(machines: Sequence[Machine], pods: Sequence[Pod], placer: Placer, seed: int) -> Outcome:
    """Draw pods with replacement until `ASKED_MOST` times the cluster's GPUs have been asked for."""
    cluster, draw, began = Cluster(machines), Random(seed), time.perf_counter()
    asked = arrived = failed = 0
    at: dict[float, float] = {}
    while asked < ASKED_MOST * cluster.gpus_milli:
        drawn = draw.choices(pods, k=placer.window)
        before = cluster.allocated
        placed = placer.place(cluster, drawn)
        asked += sum(pod.gpus * pod.gpu_milli for pod in drawn)
        arrived += len(drawn)
        failed += placed.count(False)
        for mark in MARKS:
            if mark not in at and arrived >= _MARKS_FROM and failed >= mark * arrived:
                at[mark] = before
    return Outcome(at, cluster.allocated, arrived, time.perf_counter() - began)


def run(quick: bool) -> None:
    console = _cases.console(160)
    if (folder := _cases.trace("fragmentation", FOLDER, console)) is None:
        return
    machines, _ = read_machines(folder / "openb_node_list_gpu_node.csv")
    pods, refused = read_pods(folder / "openb_pod_list_default.csv")
    if quick:
        machines = machines[::10]
    seeds = SEEDS[:2] if quick else SEEDS
    gpus = sum(m.gpus for m in machines)
    table = Table(
        title=f"share of {gpus:,} GPUs of {len(machines):,} nodes allocated, %; {len(pods):,} pods drawn with"
        f" replacement, mean (least) of the seeds; left out: {refused.total} CPU pods; {os.cpu_count()} cores,"
        f" gap {LIMITS.gap:.0%}, limit {LIMITS.time_s:g} s per window of {WINDOW}"
    )
    table.add_column("placed by")
    for heading in (*(f"{mark:.0%} failed" for mark in MARKS), f"{ASKED_MOST:.0%} asked", "pods", "ms per pod"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, make in PLACERS.items():
        outcomes = [inflate(machines, pods, make(), seed) for seed in (seeds[:2] if name == SLOW else seeds)]
        table.add_row(
            f"{name} ({len(outcomes)} seeds)",
            *(_spread([o.at[mark] for o in outcomes]) for mark in MARKS),
            _spread([o.end for o in outcomes]),
            f"{np.mean([o.pods for o in outcomes]):,.0f}",
            f"{1e3 * np.mean([o.seconds / o.pods for o in outcomes]):.2f}",
        )
    console.print(table)


def _spread(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.2f} ({100 * min(values):.2f})"
