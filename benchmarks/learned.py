"""Learned priorities held to time on the standard slices: against every rule, without and with preemption.

A table for each slice and regime, by the part for the report (the fourth week; `streamsched.learn.judge` says what a
part sees), in Markdown; and RLTune's protocol on the same week. Every model of a folder is judged on both slices: the
slice that it was not trained on is the cross-trace row. With several seeds the row is their mean, and the best one by
the part for choosing is named.

A model is a folder with `training.json` (`learn.cards`), `model.toml` and, where it was trained several times, `seed-N`
files with the ending of the file that `model.toml` names: kind ("network" or "expression"), file, regime ("plain" or
"preemptive"), perhaps reserve_after_s. A preemptive network's rank is its negative score on the features at the service
that a job has had.
"""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from streamsched.learn import cards, judge
from streamsched.learn.judge import Candidate, Judge, Judged, Measure, Part, Regime, Split
from streamsched.policy import expression, network
from streamsched.policy.features import Float32s
from streamsched.policy.gittins import LEVELS_GPU_S
from streamsched.sim import paper
from streamsched.sim.fast import SPARING, Floats, fits_cluster
from streamsched.sim.foresight import workload_of

from .policies import Slice, gittins_index, slices

PROTOCOL_NODES: Final = {"venus-4w": 17, "philly-4w": 24}
"""Of eight GPUs: as many GPUs as RLTune's published code gives to these traces."""


@dataclass(frozen=True, eq=False)
class Model:
    """Policies of one folder, by seed; without seeds there is one."""

    folder: Path
    training: cards.Training
    kind: str
    regime: Regime
    files: dict[int | None, Path]

    used: int | None
    """The seed whose policy is in the file that `model.toml` names."""
    limits: dict[str, Any]
    """Of `scored.Instance`: when nodes are kept, and for how many jobs."""

    def name_on(self, slice_name: str) -> str:
        trained = self.training.slice
        return self.training.name if trained == slice_name else f"{self.training.name}, trained on {trained}"

    def candidates(self, slice_name: str, nodes: Sequence[int]) -> list[Candidate]:
        name = self.name_on(slice_name)
        return [self._candidate(name, nodes, seed, path) for seed, path in self.files.items()]

    def _candidate(self, name: str, nodes: Sequence[int], seed: int | None, path: Path) -> Candidate:
        if self.kind == "expression":
            return judge.by_expression(name, expression.parse(path.read_text()), nodes, seed, **self.limits)
        loaded = network.load(path)
        if self.regime is Regime.PLAIN:
            return judge.by_network(name, loaded, nodes, seed, **self.limits)

        def ranks(features: Float32s) -> Floats:
            return -loaded.scores(features)

        return judge.by_rank(name, ranks, nodes, SPARING, loaded.levels_gpu_s or LEVELS_GPU_S, seed)


def run(quick: bool) -> None:
    """Print, for each slice, part and regime, a table of every policy and a line for each learned one with what it has
    less than the best rule; which seed of a model is best by the part for choosing; and a table of RLTune's protocol.

    STREAMSCHED_BENCH_CASES: philly-4w,venus-4w (all). STREAMSCHED_BENCH_PARTS: train,choose,report (report).
    STREAMSCHED_BENCH_BY_DAY=0: without predictions that are renewed every day (half a minute a row).
    STREAMSCHED_MODELS: folder of models (models). STREAMSCHED_BENCH_CARDS=1: also write their cards.
    """
    console = Console(width=400, highlight=False)
    parts = [Part(part) for part in (os.environ.get("STREAMSCHED_BENCH_PARTS") or "report").split(",")]
    models = _models(Path(os.environ.get("STREAMSCHED_MODELS", "models")))
    tables: list[cards.Table] = []
    chosen: dict[str, int] = {}
    for name, given in slices("learned", console, quick):
        bench = _Bench(name, given, models, quick, console)
        for part in parts:
            for regime in Regime:
                table = cards.Table(name, part, regime, bench.rows(part, regime))
                tables.append(table)
                console.print(f"\n### {table.title}\n", markup=False)
                lines = [*cards.markdown(table.rows), "", *cards.compared(table.rows)]
                console.print("\n".join(lines), markup=False)
        chosen |= bench.chosen()
        bench.protocol(PROTOCOL_NODES[name])
    if os.environ.get("STREAMSCHED_BENCH_CARDS"):
        _write_cards(models, tables, chosen)


def _models(folder: Path) -> list[Model]:
    return [_model(path.parent) for path in sorted(folder.glob("*/model.toml"))]


def _model(folder: Path) -> Model:
    told = tomllib.loads((folder / "model.toml").read_text())
    only = folder / str(told["file"])
    seeds: dict[int | None, Path] = {
        int(path.stem.removeprefix("seed-")): path for path in sorted(folder.glob(f"seed-*{only.suffix}"))
    }
    used = next((seed for seed, path in seeds.items() if path.read_bytes() == only.read_bytes()), None)
    regime = Regime.PREEMPTIVE if told.get("regime") == "preemptive" else Regime.PLAIN
    limits: dict[str, Any] = {}
    if "reserve_after_s" in told:
        limits = {"reserve_after_s": float(told["reserve_after_s"]), "reservations_max": 1}
    return Model(folder, cards.read_training(folder), str(told["kind"]), regime, seeds or {None: only}, used, limits)


class _Bench:
    """One slice."""

    def __init__(self, name: str, given: Slice, models: list[Model], quick: bool, console: Console) -> None:
        submit = np.array([job.features.submitted_at for job in given.jobs])
        split = Split.of_four_weeks(given.start_s)
        if quick:
            half, later = np.quantile(submit, [0.5, 0.75]).tolist()
            split = Split((given.start_s, half, later, float(submit[-1]) + 1.0))
        self._where = judge.Slice(name, given.jobs, given.history, given.nodes, split)
        self._console, self._models = console, models
        self._judge = Judge(self._where)
        by_class = gittins_index(workload_of(given.jobs), given)
        nodes = self._where.node_gpus
        self._baselines = [
            *judge.plain_baselines(self._where),
            *judge.preemptive_baselines(self._where, by_class),
            *judge.oracles(nodes),
            *(judge.baselines_by_day(self._where) if os.environ.get("STREAMSCHED_BENCH_BY_DAY") != "0" else ()),
        ]
        self._learned = {model.training.name: model.candidates(name, nodes) for model in models}

    def rows(self, part: Part, regime: Regime) -> list[Judged]:
        found = [self._judged(candidate, part) for candidate in self._baselines if candidate.regime is regime]
        for candidates in self._learned.values():
            runs = [self._judged(candidate, part) for candidate in candidates if candidate.regime is regime]
            found += [judge.over_seeds(runs)] if runs else []
        return found

    def chosen(self) -> dict[str, int]:
        """[model] the seed that is used, else the best by the part for choosing, of what was trained on this slice."""
        found = {}
        for model in self._models:
            seeded = [c for c in self._learned[model.training.name] if c.seed is not None]
            if model.training.slice == self._where.name and seeded:
                best = judge.lowest(self._judged(candidate, Part.CHOOSE) for candidate in seeded)
                found[model.training.name] = best.seeds[0] if model.used is None else model.used
                self._console.print(
                    f"\n{best.name}: seed {best.seeds[0]} has the least mean wait on the part for choosing, seed"
                    f" {found[model.training.name]} is used"
                )
        return found

    def protocol(self, nodes: int) -> None:
        """RLTune's, on the jobs of the report that fit, and the same jobs in one stream."""
        cluster, seen = [8] * nodes, self._where.seen
        own = self._where.split.of(Part.REPORT, seen.submit_s) & fits_cluster(seen.gpus, cluster)
        jobs = seen.take(own)
        if len(jobs) < 2 * paper.BATCH_JOBS:
            self._console.print(f"\n{self._where.name}: too few jobs for RLTune's batches", markup=False)
            return
        plain = [model for model in self._models if model.regime is Regime.PLAIN]
        candidates = [
            *_protocol_rules(cluster),
            *(c for model in plain for c in model.candidates(self._where.name, cluster)),
        ]
        rows = judge.in_protocol(jobs, self._where.spread[own], candidates)
        title = (
            f"{self._where.name}, RLTune's protocol: {len(jobs) // 256} batches of 256 jobs of the report, {nodes} x 8"
        )
        self._console.print(f"\n### {title}\n", markup=False)
        self._console.print("\n".join(_protocol_lines(rows)), markup=False)

    def _judged(self, candidate: Candidate, part: Part) -> Judged:
        began = time.perf_counter()
        found = self._judge.judge(candidate, part)
        if (took := time.perf_counter() - began) > 1.0:
            told = f"{self._where.name}, {part}: {found.name}, {found.sees} ({took:.0f} s)"
            Console(stderr=True).print(told, markup=False, style="dim")
        return found


def _protocol_rules(nodes: Sequence[int]) -> list[Candidate]:
    """FCFS without and with skipping first: what the others are set against."""
    named = {candidate.name: candidate for candidate in judge.rules(nodes)}
    shown = ("fcfs, none", "fcfs, skip", "smallest, skip", "sjf, none", "sjf, skip", "wfp3, skip", "f4, skip")
    true = [candidate for candidate in judge.oracles(nodes) if candidate.name in ("sjf, skip", "unicep, easy")]
    return [*(named[name] for name in shown), *true]


def _protocol_lines(rows: Sequence[judge.InProtocol]) -> list[str]:
    headings = (
        "policy", "sees", "wait, s", "to FCFS", "JCT, s", "to FCFS", "wait to FCFS with skipping",
        "one stream: wait, s", "to FCFS", "to FCFS with skipping",
    )  # fmt: skip
    base, skipping = rows[0], rows[1]
    wait, jct = Measure.MEAN_WAIT, Measure.MEAN_JCT
    cells = [
        [
            row.name,
            row.sees,
            f"{row.batches[wait].mean():,.0f}",
            _share(judge.change(row, base, wait)),
            f"{row.batches[jct].mean():,.0f}",
            _share(judge.change(row, base, jct)),
            _share(judge.change(row, skipping, wait)),
            f"{row.stream[wait]:,.0f}",
            f"{judge.change_in_stream(row, base, wait):+.0%}",
            f"{judge.change_in_stream(row, skipping, wait):+.0%}",
        ]
        for row in rows
    ]
    return cards.markdown_table(headings, cells)


def _share(found: judge.Difference) -> str:
    between = "" if found.interval is None else f" ({found.interval[0]:+.0%} to {found.interval[1]:+.0%})"
    return f"{found.value:+.0%}{between}"


def _write_cards(models: Iterable[Model], tables: Sequence[cards.Table], chosen: dict[str, int]) -> None:
    """Of each model the tables of its regime, without the rows of other models."""
    for model in models:
        of_model = [
            replace(
                table, rows=[row for row in table.rows if not row.learned or row.name == model.name_on(table.slice)]
            )
            for table in tables
            if table.regime is model.regime
        ]
        cards.write(model.folder, model.training, of_model, chosen.get(model.training.name))
