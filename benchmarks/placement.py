"""Build and solve time, gap and status of a placement window on scarce clusters, with and without topology.

Seeded windows through the core: nodes join a pool and jobs arrive, nearly all GPUs are in use, and the free ones,
scattered over partly used nodes, are about half of what the window's jobs ask for. What is solved is what the core
asks. With topology nodes are in racks of eight and NVLink domains of two, and of the jobs with several workers three
of ten must stay within a rack or a domain, three more would like to.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.instructions import SolveWindow
from streamsched.core.model import JobSpec, NodeSpec, TopologyLevel, TopologyWish
from streamsched.core.problem import Problem, Solution
from streamsched.placement import SolveLimits, solve
from streamsched.policy.rules import FirstComeFirstServed
from streamsched.service.solver import leave_alone_what_is_there

from . import _cases

GPUS_PER_NODE = 8
NODES_PER_RACK = 8
NODES_PER_NVLINK = 2
CORES_PER_GPU = 12_000
TYPES = ("A100-80GB", "V100", "H100", "A10")
SIZES = ((1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (1, 8), (4, 4), (2, 3))
"""(GPUs of a worker, workers), equally likely."""
PORTIONS = (1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8)
"""Free GPUs of a node that has any, equally likely."""
_QUEUED = 3
"""Jobs in the queue per job of the window: those that could not start even alone are not asked for."""
LIMITS = SolveLimits(time_s=1.0)
SEEDS = 50


class Case(NamedTuple):
    jobs: int
    gpus: int
    types: int
    topology: bool


# ── problems ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def problem(case: Case, seed: int) -> Problem:
    """One scarce window."""
    r = random.Random(f"{case} {seed}")
    state = ClusterState("bench", SchedulerConfig(window_jobs=case.jobs), FirstComeFirstServed())
    jobs = [_job(case, number, r) for number in range(_QUEUED * case.jobs)]
    wanted = sum(job.total_gpus for job in jobs[: case.jobs])
    for node, free in _nodes(case, wanted // 2, r):
        state.handle(ev.NodeJoined(spec=node), 0.0)
        state.handle(ev.NodeCapacityChanged(node_id=node.node_id, gpus=free), 0.0)
    for job in jobs:
        state.handle(ev.JobArrived(spec=job), 1.0)
    (window,) = (i for i in state.handle(ev.WindowElapsed(), 2.0) if isinstance(i, SolveWindow))
    assert len(window.problem.candidates) == case.jobs
    return window.problem


def _job(case: Case, number: int, r: random.Random) -> JobSpec:
    gpus, workers = r.choice(SIZES)
    acceptable = r.sample(TYPES[: case.types], r.randint(1, case.types)) if r.random() < 0.7 else []
    return JobSpec(
        job_id=f"j{number:03}",
        submitted_at=float(number),
        gpus_per_worker=gpus,
        workers=workers,
        gpu_types=tuple(sorted(acceptable)),
        mixed_types=r.random() < 0.2,
        cpu_milli=int(gpus * CORES_PER_GPU * 0.75),
        topology=_wish(workers, r) if case.topology else None,
    )


def _wish(workers: int, r: random.Random) -> TopologyWish | None:
    draw = r.random()
    if workers == 1 or draw >= 0.6:
        return None
    level = TopologyLevel.RACK if workers > NODES_PER_NVLINK and r.random() < 0.7 else TopologyLevel.NVLINK
    return TopologyWish(level=level, required=draw < 0.3)


def _nodes(case: Case, free: int, r: random.Random) -> list[tuple[NodeSpec, int]]:
    """The nodes that have something free, and how much; the rest of the cluster is full and in no window.

    GPUs in use are expressed as capacity that is not there: what the window sees is the same, and the core need not
    start ten thousand runs first.
    """
    numbers = list(range(case.gpus // GPUS_PER_NODE))
    r.shuffle(numbers)
    found = []
    while free > 0 and numbers:
        number, portion = numbers.pop(), min(free, r.choice(PORTIONS))
        free -= portion
        found.append((_node(case, number, portion * CORES_PER_GPU), portion))
    return found


def _node(case: Case, number: int, cpu_milli: int) -> NodeSpec:
    rack, domain = number // NODES_PER_RACK, number // NODES_PER_NVLINK
    return NodeSpec(
        node_id=f"n{number:06}",
        gpu_type=TYPES[rack % case.types],
        gpus=GPUS_PER_NODE,
        cpu_milli=cpu_milli,
        rack=f"r{rack:05}" if case.topology else "",
        nvlink=f"d{domain:05}" if case.topology else "",
    )


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(quick: bool) -> None:
    cases = [
        Case(*c)
        for c in product(
            (32, 64) if quick else (32, 64, 128),
            (1_000, 100_000) if quick else (1_000, 10_000, 100_000),
            (1, 4),
            (False, True),
        )
    ]
    measure("placement window", cases, problem, 3 if quick else SEEDS)


def measure(title: str, cases: Iterable[Case], make: Callable[[Case, int], Problem], seeds: int) -> None:
    """Solve `seeds` problems of each case and print a row for it."""
    wide = _cases.console(200)
    table = Table(title=f"{title}: {seeds} problems per row, p50 / p95 / max; {machine()}")
    for heading in ("jobs", "GPUs", "types", "topology", "nodes", "classes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("build ms", "solve ms", "build + solve ms", "gap %", "over greedy %", "within limit %", "status"):
        table.add_column(heading, justify="right", no_wrap=True)
    solve(problem(Case(8, 1_000, 1, False), 0), LIMITS)  # imports and first use are not what is measured
    for case in cases:
        table.add_row(*_row(case, [make(case, seed) for seed in range(seeds)]))
    wide.print(table)


def machine() -> str:
    """What the figures depend on: the machine and the limits."""
    return (
        f"{os.cpu_count()} cores (load {os.getloadavg()[0]:.1f}), one thread, gap {LIMITS.gap:.0%},"
        f" limit {LIMITS.time_s:g} s, at most {LIMITS.variables_max:,} variables"
    )


def _row(case: Case, problems: Sequence[Problem]) -> list[str]:
    by_greedy: list[float] = []
    leave_alone_what_is_there()  # as the solver process does
    solutions = [solve(p, LIMITS, lambda s: by_greedy.append(s.objective)) for p in problems]
    gain = [100 * (s.objective / max(g, 1e-9) - 1) for s, g in zip(solutions, by_greedy, strict=True)]
    return [
        str(case.jobs),
        f"{case.gpus:,}",
        str(case.types),
        "yes" if case.topology else "no",
        f"{np.median([sum(len(c.node_ids) for c in p.classes) for p in problems]):.0f}",
        f"{np.median([len(p.classes) for p in problems]):.0f}",
        _spread([1e3 * s.build_s for s in solutions]),
        _spread([1e3 * s.solve_s for s in solutions]),
        _spread([1e3 * (s.build_s + s.solve_s) for s in solutions]),
        _spread([100 * (s.gap or 0.0) for s in solutions], 2),
        _spread(gain, 1),
        f"{100 * np.mean([_in_time(s) for s in solutions]):.0f}",
        _statuses(solutions),
    ]


def _in_time(solution: Solution) -> bool:
    """Within the limit; the deadline of the solver process is half a second later."""
    return LIMITS.time_s is None or solution.build_s + solution.solve_s <= LIMITS.time_s


def _statuses(solutions: Iterable[Solution]) -> str:
    return " ".join(f"{status} {n}" for status, n in sorted(Counter(str(s.status) for s in solutions).items()))


def _spread(values: Sequence[Any], digits: int = 0) -> str:
    p50, p95, most = np.percentile(values, [50, 95, 100])
    return f"{p50:.{digits}f} / {p95:.{digits}f} / {most:.{digits}f}"
