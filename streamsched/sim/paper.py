"""The protocol by which RLTune compares rules, and the same rules on one warm cluster beside it.

RLTune (Dongare et al., "Hybrid Learning and Optimization-Based Dynamic Scheduling for DL Workloads on Heterogeneous GPU
Clusters", SoCC 2025, arXiv 2512.10271; code: github.com/dshruti20/RLTune) judges by batches of 256 consecutive jobs,
each on an empty cluster, against rules without backfilling. Here the batches are disjoint, so that they can be drawn
for intervals; the published code takes ten at random places. Everything runs on the compiled path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from streamsched.errors import UserError

from . import fast
from .bootstrap import Bootstrap, Interval
from .metrics import BOUND_S

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RLTUNE_RULES: Final = ("fcfs", "sjf", "wfp3", "unicep", "f1", "multifactor")
"""FCFS, SJF, WFP3, UNICEP, F1, and Slurm's multifactor priority."""
BACKFILLS: Final = ("none", "skip", "easy")
BATCH_JOBS: Final = 256
METRICS: Final = ("mean_wait_s", "mean_jct_s", "mean_bounded_slowdown", "utilisation_to_end")
"""The last: GPU-seconds of work / (GPUs x time from first submission to last completion), as the published code has."""


@dataclass(frozen=True, slots=True)
class Case:
    """One rule with one way of backfilling."""

    rule: str
    backfill: str
    batches: Floats
    """[batch, metric]"""
    continuous: Floats
    """[metric] of all jobs, one after the other, on one cluster."""

    @property
    def oracle(self) -> bool:
        """True run times are seen: by the rule, or by EASY."""
        return fast.Rule.named(self.rule).by_estimate or self.backfill == "easy"

    @property
    def label(self) -> str:
        return f"{self.rule} (oracle)" if fast.Rule.named(self.rule).by_estimate else self.rule


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of one case over the batches (or of the continuous run: no intervals)."""

    mean: float
    interval: Interval | None
    change: float | None
    """To FCFS without backfilling, as a share of that; None where that is 0."""
    change_interval: Interval | None
    backfill_share: float | None
    """What FCFS with the same backfilling gains, as a share of what this case gains; None where it gains nothing. The
    two need not add up to 1 with the next: backfilling and order mend much of the same."""
    rule_share: float | None
    """So for the same rule without backfilling."""


def known_rules() -> tuple[str, ...]:
    """Those of the paper's rules that the compiled path has."""
    return tuple(name for name in RLTUNE_RULES if name.upper() in fast.Rule.__members__)


def choose(jobs: int, size: int, wanted: int | None, seed: int) -> Ints:
    """Where batches begin: all disjoint ones of `size` jobs in order, or `wanted` of them drawn by the seed.

    Jobs behind the last whole batch are left out. Raises UserError when there are too few.
    """
    there = jobs // size
    if there < 2:
        raise UserError(f"{jobs:,} jobs fit these nodes: two batches of {size} jobs at least are needed")
    if wanted is not None and wanted > there:
        raise UserError(f"--batches {wanted}: there are {there} disjoint batches of {size} jobs")
    chosen = np.arange(there) if wanted is None else np.random.default_rng(seed).permutation(there)[:wanted]
    return np.sort(chosen) * size


def run(
    jobs: fast.Workload,
    node_gpus: Sequence[int],
    starts: Ints,
    size: int,
    rules: Sequence[str],
    on_progress: Callable[[], None] = lambda: None,
) -> list[Case]:
    """All rules with all ways of backfilling. Each of the jobs has to fit the cluster; estimates are the run times."""
    told = jobs.with_true_estimates()
    batches = [told.take(slice(start, start + size)) for start in starts.tolist()]
    found = []
    for rule in rules:
        for backfill in BACKFILLS:
            by_batch = np.array([_figures(batch, node_gpus, rule, backfill) for batch in batches])
            found.append(Case(rule, backfill, by_batch, _figures(told, node_gpus, rule, backfill)))
            on_progress()
    return found


def _figures(jobs: fast.Workload, node_gpus: Sequence[int], rule: str, backfill: str) -> Floats:
    """[metric]"""
    outcome = fast.simulate(jobs, node_gpus, fast.Rule.named(rule), fast.Backfill[backfill.upper()])
    jct_s = outcome.finish_s - jobs.submit_s
    slowdown = np.maximum(1.0, jct_s / np.maximum(jobs.duration_s, BOUND_S))
    return np.array([outcome.mean_wait_s, jct_s.mean(), slowdown.mean(), outcome.utilisation])


# ── what follows ─────────────────────────────────────────────────────────────────────────────────────────────────────


def over_batches(cases: Sequence[Case], seed: int) -> list[list[Figure]]:
    """[case][metric] means over the batches; intervals draw batches, the same for all cases."""
    drawn = Bootstrap(len(cases[0].batches), seed, block=1)
    return _compared(cases, [case.batches for case in cases], drawn)


def continuous(cases: Sequence[Case]) -> list[list[Figure]]:
    """[case][metric]"""
    return _compared(cases, [case.continuous[None, :] for case in cases], None)


def _compared(cases: Sequence[Case], values: list[Floats], drawn: Bootstrap | None) -> list[list[Figure]]:
    place = {(case.rule, case.backfill): values[number] for number, case in enumerate(cases)}
    base = place["fcfs", "none"]
    found = []
    for case in cases:
        of, backfilled, ruled = (
            place[key] for key in ((case.rule, case.backfill), ("fcfs", case.backfill), (case.rule, "none"))
        )
        found.append(
            [
                _figure(metric, of[:, m], base[:, m], backfilled[:, m], ruled[:, m], drawn)
                for m, metric in enumerate(METRICS)
            ]
        )
    return found


def _figure(
    metric: str, of: Floats, base: Floats, backfilled: Floats, ruled: Floats, drawn: Bootstrap | None
) -> Figure:
    """`base`: FCFS without backfilling; `backfilled`: with; `ruled`: the rule without."""
    mean, reference = float(of.mean()), float(base.mean())
    better = mean - reference if metric == "utilisation_to_end" else reference - mean
    interval = change_interval = None
    if drawn is not None:
        draws, of_base = drawn.means(of), drawn.means(base)
        interval = drawn.between(draws)
        if of_base.all():
            change_interval = drawn.between(draws / of_base - 1.0)
    return Figure(
        mean=mean,
        interval=interval,
        change=mean / reference - 1.0 if reference else None,
        change_interval=change_interval,
        backfill_share=(reference - float(backfilled.mean())) / (reference - mean) if better > 0 else None,
        rule_share=(reference - float(ruled.mean())) / (reference - mean) if better > 0 else None,
    )
