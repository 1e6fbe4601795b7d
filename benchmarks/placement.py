"""Build and solve time, gap and status of a placement window on scarce clusters.

Seeded problems: nodes of eight GPUs, nearly all full; the free GPUs, scattered over partly used nodes, are about half
of what the window's jobs ask for; jobs are ranked by value. With "cpu bound" the jobs ask for between half and twice
a GPU's share of its node's cores, so that cpu limits most nodes and patterns are many. With topology, half of the gangs
want to be in one NVLink domain or one rack (half of these require it, the others wish it), and the free GPUs lie
together in racks drawn at random, so that there are many domains in which a gang fits.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import product
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from streamsched.core.model import TopologyLevel, TopologyWish
from streamsched.core.problem import Candidate, NodeClass, Problem
from streamsched.placement import SolveLimits, solve
from streamsched.placement.cells import layout_of
from streamsched.placement.groups import groups_of
from streamsched.placement.options import options_of
from streamsched.placement.spots import Victims, spots_of
from streamsched.placement.stock import Stock

GPUS_PER_NODE = 8
CORES_PER_GPU = 12_000
NODES_PER_NVLINK = 4
NODES_PER_RACK = 16
TYPES = ("A100-80GB", "V100", "H100", "A10")
SIZES = ((1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (1, 8), (4, 4), (2, 3))
LIMITS = SolveLimits(time_s=1.0)


class Case(NamedTuple):
    jobs: int
    gpus: int
    types: int
    cpu_bound: bool
    topology: bool = False


def problem(case: Case, seed: int) -> Problem:
    """One scarce window."""
    r = random.Random(f"{case} {seed}")
    drawn = [_candidate(case, j, r) for j in range(case.jobs)]
    candidates = tuple(sorted(drawn, key=lambda c: -c.value))
    wanted = sum(c.total_gpus for c in candidates)
    return Problem(
        pool="bench",
        window=seed,
        now=0.0,
        policy="bench",
        candidates=candidates,
        classes=_classes(case, wanted // 2, r),
    )


def _candidate(case: Case, number: int, r: random.Random) -> Candidate:
    gpus, workers = r.choice(SIZES)
    share = r.choice((0.5, 1.0, 1.5, 2.0)) if case.cpu_bound else 0.75
    acceptable = r.sample(TYPES[: case.types], r.randint(1, case.types)) if r.random() < 0.7 else []
    return Candidate(
        job_id=f"j{number}",
        attempt=0,
        chunks=((gpus, workers),),
        value=r.uniform(1, 10) * (gpus * workers) ** 0.8,
        gpu_types=tuple(sorted(acceptable)),
        cpu_milli=int(gpus * CORES_PER_GPU * share),
        topology=_wish(workers, r) if case.topology else None,
    )


def _wish(workers: int, r: random.Random) -> TopologyWish | None:
    level = r.choice((TopologyLevel.NVLINK, TopologyLevel.RACK))
    required = r.random() < 0.5
    return TopologyWish(level=level, required=required) if workers > 1 and r.random() < 0.5 else None


def _classes(case: Case, free: int, r: random.Random) -> tuple[NodeClass, ...]:
    """Free GPUs in portions on nodes drawn at random; the rest of the cluster is full and not part of the problem."""
    members: dict[tuple[str, int, str, str], list[str]] = defaultdict(list)
    for node in _nodes(case, r):
        portion = min(free, r.choice((1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8)))
        if not portion:
            break
        rack = node // NODES_PER_RACK
        gpu_type = TYPES[(rack if case.topology else node) % case.types]
        nvlink = f"v{node // NODES_PER_NVLINK}"
        members[gpu_type, portion, *((nvlink, f"r{rack}") if case.topology else ("", ""))].append(f"n{node:06}")
        free -= portion
    return tuple(
        NodeClass(
            gpu_type=gpu_type,
            free_gpus=portion,
            node_ids=tuple(sorted(ids)),
            free_cpu_milli=portion * CORES_PER_GPU,
            nvlink=nvlink,
            rack=rack,
            total_gpus=GPUS_PER_NODE,
        )
        for (gpu_type, portion, nvlink, rack), ids in sorted(members.items())
    )


def _nodes(case: Case, r: random.Random) -> list[int]:
    """The nodes that have something free, first those that are drawn first."""
    nodes = list(range(case.gpus // GPUS_PER_NODE))
    r.shuffle(nodes)
    if not case.topology:
        return nodes
    racks = list(dict.fromkeys(node // NODES_PER_RACK for node in nodes))
    in_rack: dict[int, list[int]] = defaultdict(list)
    for node in nodes[len(nodes) // 3 :]:
        in_rack[node // NODES_PER_RACK].append(node)
    return [node for rack in racks for node in in_rack[rack]]


def variables(p: Problem) -> int:
    """Of the model, if all candidates were in it."""
    victims = Victims(p)
    spots = spots_of(Stock(p).lots(), p, victims)
    offer = options_of(p.candidates, p, spots, victims, LIMITS.domains_max, {})
    groups = groups_of(offer.spots, offer.kinds)
    return layout_of(offer.kinds, offer.demands, groups, victims, LIMITS.patterns_max).size


def run(quick: bool) -> None:
    def seeds(case: Case) -> int:
        return 3 if quick else 20 if case.cpu_bound else 50

    cases = [
        Case(jobs, gpus, types, *more)
        for jobs, gpus, types, more in product(
            (64,) if quick else (64, 128),
            (1_000, 100_000) if quick else (1_000, 10_000, 100_000),
            (1, 4),
            ((False, False), (True, False), (False, True)),
        )
    ]
    table = Table(
        title=f"placement window, one thread, gap {LIMITS.gap:.0%}, limit {LIMITS.time_s:g} s; p50 / p95 / max"
    )
    for heading in ("jobs", "GPUs", "types", "cpu", "topology", "problems"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("variables", "build ms", "solve ms", "total ms", "gap %", "over greedy %", "status"):
        table.add_column(heading, justify="right", no_wrap=True)
    solve(problem(Case(8, 1_000, 1, False), 0), LIMITS)  # imports and first use are not what is measured
    for case in cases:
        table.add_row(*_row(case, seeds(case)))
    Console(width=None if Console().is_terminal else 200).print(table)


def _row(case: Case, seeds: int) -> list[str]:
    problems = [problem(case, seed) for seed in range(seeds)]
    by_greedy: list[float] = []
    solutions = []
    for p in problems:
        solutions.append(solve(p, LIMITS, lambda s: by_greedy.append(s.objective)))
    gain = [100 * (s.objective / max(g, 1e-9) - 1) for s, g in zip(solutions, by_greedy, strict=True)]
    return [
        str(case.jobs),
        f"{case.gpus:,}",
        str(case.types),
        "bound" if case.cpu_bound else "free",
        "racks" if case.topology else "none",
        str(seeds),
        _spread([variables(p) for p in problems]),
        _spread([1e3 * s.build_s for s in solutions]),
        _spread([1e3 * s.solve_s for s in solutions]),
        _spread([1e3 * (s.build_s + s.solve_s) for s in solutions]),
        _spread([100 * (s.gap or 0.0) for s in solutions], 2),
        _spread(gain, 1),
        " ".join(f"{status} {n}" for status, n in sorted(Counter(str(s.status) for s in solutions).items())),
    ]


def _spread(values: list[float] | list[int], digits: int = 0) -> str:
    p50, p95, most = np.percentile(values, [50, 95, 100])
    return f"{p50:.{digits}f} / {p95:.{digits}f} / {most:.{digits}f}"
