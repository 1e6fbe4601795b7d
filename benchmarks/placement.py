"""Build and solve time, gap and status of a placement window on scarce clusters.

Seeded problems: nodes of eight GPUs, nearly all full; the free GPUs, scattered over partly used nodes, are about half
of what the window's jobs ask for; jobs are ranked by value. With "cpu bound" the jobs ask for between half and twice
a GPU's share of its node's cores, so that cpu limits most nodes and patterns are many.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import product
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from streamsched.core.problem import Candidate, NodeClass, Problem
from streamsched.placement import SolveLimits, solve
from streamsched.placement.cells import layout_of
from streamsched.placement.groups import groups_of
from streamsched.placement.options import options_of
from streamsched.placement.spots import Victims, spots_of
from streamsched.placement.stock import Stock

GPUS_PER_NODE = 8
CORES_PER_GPU = 12_000
TYPES = ("A100-80GB", "V100", "H100", "A10")
SIZES = ((1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (1, 8), (4, 4), (2, 3))
LIMITS = SolveLimits(time_s=1.0)


class Case(NamedTuple):
    jobs: int
    gpus: int
    types: int
    cpu_bound: bool


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
    )


def _classes(case: Case, free: int, r: random.Random) -> tuple[NodeClass, ...]:
    """Free GPUs in portions on nodes drawn at random; the rest of the cluster is full and not part of the problem."""
    nodes = list(range(case.gpus // GPUS_PER_NODE))
    r.shuffle(nodes)
    members: dict[tuple[str, int], list[str]] = defaultdict(list)
    while free > 0 and nodes:
        node, portion = nodes.pop(), min(free, r.choice((1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8)))
        members[TYPES[node % case.types], portion].append(f"n{node:06}")
        free -= portion
    return tuple(
        NodeClass(
            gpu_type=gpu_type,
            free_gpus=portion,
            node_ids=tuple(sorted(ids)),
            free_cpu_milli=portion * CORES_PER_GPU,
            total_gpus=GPUS_PER_NODE,
        )
        for (gpu_type, portion), ids in sorted(members.items())
    )


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
        Case(*c)
        for c in product(
            (64,) if quick else (64, 128),
            (1_000, 100_000) if quick else (1_000, 10_000, 100_000),
            (1, 4),
            (False, True),
        )
    ]
    table = Table(
        title=f"placement window, one thread, gap {LIMITS.gap:.0%}, limit {LIMITS.time_s:g} s; p50 / p95 / max"
    )
    for heading in ("jobs", "GPUs", "types", "cpu", "problems"):
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
