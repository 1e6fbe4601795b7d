"""Why nothing learned is better than the best rule without preemption: rules and searched orders, looked at by week.

Five tables for each standard slice, by the parts of `streamsched.learn.judge` (weeks 1 and 2, 3, 4):

1. what an order could gain at most: the best rules beside the same orders by true run times (oracles);
2. what not starting who fits is worth: each rule strict, with skipping, EASY and conservative;
3. whether the past tells which rule to take: rank correlation between parts of the mean waits of all rules;
4. whose waiting the mean is: jobs by GPUs, under the best rule;
5. what the form could reach: a linear order of the features searched on weeks 1 and 2, and, in hindsight, on week 4
   itself. The second is no result, since it has seen the answers: it says what the form allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from rich.console import Console

from streamsched.learn import judge
from streamsched.learn.judge import Candidate, Judge, Judged, Measure, Part, Split
from streamsched.policy.features import FEATURES, INDEX, Floats
from streamsched.policy.network import Network
from streamsched.sim.scored import Instance, simulate_network

from .policies import slices

SEARCHED: Final = ("gpus", "nodes", "run_s", "spread", "work_gpu_s", "wait_s", "free_gpus", "queued_gpus")
STEPS: Final = 25
PAIRS: Final = 6
"""Of directions that a step of the search looks at (evolution strategies with mirrored sampling)."""
SIGMA: Final = 0.3
RATE: Final = 0.3
BANDS: Final = ((1, 1), (2, 7), (8, 8), (9, 31), (32, 4096))


def run(quick: bool) -> None:
    """Tables in Markdown. STREAMSCHED_BENCH_CASES: philly-4w,venus-4w (all)."""
    console = Console(width=200, highlight=False)
    for name, given in slices("learned_why", console, quick):
        split = Split.of_four_weeks(given.start_s)
        if quick:
            submit = np.array([job.features.submitted_at for job in given.jobs])
            half, later = np.quantile(submit, [0.5, 0.75]).tolist()
            split = Split((given.start_s, half, later, float(submit[-1]) + 1.0))
        bench = Judge(judge.Slice(name, given.jobs, given.history, given.nodes, split), draws=200)
        for title, lines in (
            ("what an order could gain", _gain(bench)),
            ("what not starting is worth", _backfilling(bench)),
            ("whether the past tells which rule to take", _past(bench)),
            ("whose waiting it is", _whose(bench)),
            ("what a linear order reaches", _linear(bench, 2 if quick else STEPS)),
        ):
            console.print(f"\n### {name}: {title}\n\n" + "\n".join(lines), markup=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _s(seconds: float) -> str:
    return f"{seconds:,.0f}"


def _all_rules(bench: Judge, part: Part) -> list[Judged]:
    return [bench.judge(candidate, part) for candidate in _rules(bench)]


def _rules(bench: Judge) -> list[Candidate]:
    """The same objects each time: what has been simulated is kept by them."""
    kept = _KEPT.get(id(bench))
    if kept is None:
        kept = _KEPT[id(bench)] = judge.rules(bench.where.node_gpus)
    return kept


_KEPT: Final[dict[int, list[Candidate]]] = {}


def _waits(found: Iterable[Judged]) -> Floats:
    return np.array([one.values[Measure.MEAN_WAIT] for one in found])


def _gain(bench: Judge) -> list[str]:
    rules = sorted(_all_rules(bench, Part.REPORT), key=lambda one: one.values[Measure.MEAN_WAIT])[:3]
    plain = [one for one in judge.oracles(bench.where.node_gpus) if one.regime is judge.Regime.PLAIN]
    oracles = sorted((bench.judge(one, Part.REPORT) for one in plain), key=lambda one: one.values[Measure.MEAN_WAIT])[
        :3
    ]
    rows = []
    for one in [*rules, *oracles]:
        low, high = one.interval(Measure.MEAN_WAIT) or (np.nan, np.nan)
        rows.append([one.name, str(one.sees.value), _s(one.values[Measure.MEAN_WAIT]), f"{_s(low)} - {_s(high)}"])
    return _table(["order, week 4", "sees", "mean wait, s", "95 %"], rows)


def _backfilling(bench: Judge) -> list[str]:
    kinds = [backfill.name.lower() for backfill in judge.BACKFILLS]
    found = {one.name: one.values[Measure.MEAN_WAIT] for one in _all_rules(bench, Part.REPORT)}
    names = dict.fromkeys(name.split(", ")[0] for name in found)
    best = sorted(names, key=lambda name: min(found[f"{name}, {kind}"] for kind in kinds))[:6]
    rows = [[name, *(_s(found[f"{name}, {kind}"]) for kind in kinds)] for name in best]
    return _table(["mean wait in week 4, s", *kinds], rows)


def _past(bench: Judge) -> list[str]:
    waits = {part: _waits(_all_rules(bench, part)) for part in Part}
    names = [candidate.name for candidate in _rules(bench)]
    top = np.argsort(waits[Part.REPORT], kind="stable")[: len(names) // 4]
    rows = []
    for part in (Part.TRAIN, Part.CHOOSE):
        chosen = int(np.argmin(waits[part]))
        place = int((waits[Part.REPORT] < waits[Part.REPORT][chosen]).sum()) + 1
        rows.append(
            [
                str(part.value),
                f"{_spearman(waits[part], waits[Part.REPORT]):.2f}",
                f"{_spearman(waits[part][top], waits[Part.REPORT][top]):.2f}",
                f"{names[chosen]}: place {place} of {len(names)} in week 4, {_s(waits[Part.REPORT][chosen])} s",
            ]
        )
    head = ["part", "correlation with week 4, all rules", "among the best quarter of week 4", "the best rule there"]
    return _table(head, rows)


def _spearman(one: Floats, other: Floats) -> float:
    ranks, others = (np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (one, other))
    return float(np.corrcoef(ranks, others)[0, 1])


def _whose(bench: Judge) -> list[str]:
    found = _all_rules(bench, Part.REPORT)
    candidate = _rules(bench)[int(np.argmin(_waits(found)))]
    where = bench.where
    jobs = where.seen.take(slice(where.until(Part.REPORT)))
    wait = np.maximum(candidate.run(jobs, where.spread[: len(jobs)]).wait_s, 0.0)
    own = where.split.of(Part.REPORT, jobs.submit_s)
    wait, gpus = wait[own], jobs.gpus[own]
    rows = []
    for low, high in BANDS:
        of = (gpus >= low) & (gpus <= high)
        if of.any():
            share = wait[of].sum() / max(1e-9, wait.sum())
            rows.append([f"{low} to {high}", f"{of.mean():.1%}", f"{share:.1%}", _s(wait[of].mean())])
    largest = np.sort(wait)[::-1][: max(1, len(wait) // 100)].sum() / max(1e-9, wait.sum())
    lines = _table([f"GPUs ({candidate.name})", "of the jobs", "of all waiting", "mean wait, s"], rows)
    return [*lines, "", f"The hundredth of the jobs that wait longest has {largest:.0%} of all waiting."]


# ── a linear order ───────────────────────────────────────────────────────────────────────────────────────────────────


def _linear(bench: Judge, steps: int) -> list[str]:
    """From SJF (by predictions), the same search on two parts; what each finds, on both."""
    rows = [["SJF, where it begins", *(_s(_cost(bench, part)(_sjf())) for part in (Part.TRAIN, Part.REPORT))]]
    for label, part in (("searched on weeks 1 and 2", Part.TRAIN), ("in hindsight, on week 4", Part.REPORT)):
        for seed in (1, 2):
            found = _searched(_cost(bench, part), steps, seed)
            waits = (_s(_cost(bench, other)(found)) for other in (Part.TRAIN, Part.REPORT))
            rows.append([f"{label}, seed {seed}", *waits])
    return _table(["linear in the logarithms of the features", "weeks 1 and 2, s", "week 4, s"], rows)


def _sjf() -> Floats:
    weights = np.zeros(len(SEARCHED))
    weights[SEARCHED.index("run_s")] = -1.0
    return weights


def _cost(bench: Judge, part: Part) -> Callable[[Floats], float]:
    """Mean wait of the part's jobs, s, by these weights of `SEARCHED`."""
    where = bench.where
    jobs = where.seen.take(slice(where.until(part)))
    instance = Instance(jobs, where.node_gpus, spread=where.spread[: len(jobs)])
    own = where.split.of(part, jobs.submit_s)
    low, high = np.array([(feature.low, feature.high) for feature in FEATURES]).T.copy()

    def cost(weights: Floats) -> float:
        flat = np.zeros(len(FEATURES) + 1, np.float32)
        for name, weight in zip(SEARCHED, weights, strict=True):
            flat[INDEX[name]] = weight
        network = Network((len(FEATURES), 1), flat, low, high)
        return float(np.maximum(simulate_network(instance, network).wait_s, 0.0)[own].mean())

    return cost


def _searched(cost: Callable[[Floats], float], steps: int, seed: int) -> Floats:
    """The best weights met: evolution strategies by ranks (Salimans et al., arXiv:1703.03864)."""
    draw = np.random.default_rng(seed)
    at = best = _sjf()
    least = cost(at)
    for _ in range(steps):
        directions = draw.standard_normal((PAIRS, len(SEARCHED)))
        tried = np.concatenate([at + SIGMA * directions, at - SIGMA * directions])
        costs = np.array([cost(weights) for weights in tried])
        if costs.min() < least:
            least, best = float(costs.min()), tried[int(np.argmin(costs))]
        ranks = np.argsort(np.argsort(-costs, kind="stable"), kind="stable") / (2 * PAIRS - 1) - 0.5
        at = at + RATE / PAIRS * (ranks[:PAIRS] - ranks[PAIRS:]) @ directions
    return best
