"""Build and solve time of a placement window in which 32 runs may be told to make room.

The windows of `benchmarks placement`, with victims: runs of one or two workers on nodes of the window, in the GPUs that
are not free there, at three levels. Stopping one costs between a tenth and all of what placing its GPUs anew is worth.
Three of four candidates may take the place of at least some of them.
"""

from __future__ import annotations

import random
from itertools import product

from msgspec.structs import replace

from streamsched.core.problem import Problem, Victim

from .placement import CORES_PER_GPU, GPUS_PER_NODE, Case, measure
from .placement import problem as without_victims

VICTIMS = 32
LEVELS = 3
SEEDS = 20


def problem(case: Case, seed: int) -> Problem:
    r = random.Random(f"victims {case} {seed}")
    base = without_victims(case, seed)
    in_use = {n: GPUS_PER_NODE - c.free_gpus for c in base.classes for n in c.node_ids if c.free_gpus < GPUS_PER_NODE}
    victims = []
    for number in range(VICTIMS):
        nodes = r.sample(sorted(in_use), min(r.choice((1, 1, 2)), len(in_use)))
        if not nodes:
            break
        held = [(node_id, r.randint(1, in_use[node_id])) for node_id in sorted(nodes)]
        for node_id, gpus in held:
            in_use[node_id] -= gpus
            if not in_use[node_id]:
                del in_use[node_id]
        victims.append(_victim(number, held, r))
    candidates = tuple(replace(c, level=r.randint(0, LEVELS)) for c in base.candidates)
    return replace(base, candidates=candidates, victims=tuple(victims))


def _victim(number: int, held: list[tuple[str, int]], r: random.Random) -> Victim:
    return Victim(
        placement_id=f"v{number:02}:0:1",
        job_id=f"v{number:02}",
        level=r.randrange(LEVELS),
        cost=sum(gpus for _, gpus in held) * r.uniform(0.1, 1.0),
        held=tuple((node_id, gpus, gpus * CORES_PER_GPU, 0) for node_id, gpus in held),
    )


def run(quick: bool) -> None:
    cases = [
        Case(*c)
        for c in product(
            (32,) if quick else (32, 64, 128), (1_000,) if quick else (1_000, 100_000), (4,), (False, True)
        )
    ]
    measure(f"window with {VICTIMS} victims", cases, problem, 3 if quick else SEEDS)
