"""`streamsched simulate` and `streamsched compare`: policies on a trace, by the production core in virtual time."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from streamsched.commands.apart import map_apart
from streamsched.commands.output import make_folder, print_table, write_bytes, write_text
from streamsched.commands.slices import Before, From, Limit, Nodes, ScenarioFile, Slice, TraceFile, given_slice
from streamsched.core.model import WHOLE_GPU
from streamsched.errors import UserError
from streamsched.policy import RULES, by_name
from streamsched.policy.formulas import FORMULAS, SEE_RUN_TIMES
from streamsched.policy.rules import UNKNOWN_RUN_S
from streamsched.sim.fast import COSTS, Preemption
from streamsched.sim.nodes import ANY
from streamsched.sim.workload import Estimates

if TYPE_CHECKING:
    from loadgen.jobs import TraceJob
    from streamsched.core.window import Ranker
    from streamsched.policy.models import Model
    from streamsched.sim.fast import Outcome, Workload
    from streamsched.sim.learning import Estimator
    from streamsched.sim.metrics import Schedule

Backfill = Literal["none", "skip", "easy", "conservative"]
_SHOWN = {
    "mean_wait_s": "mean wait s",
    "p50_wait_s": "p50",
    "p99_wait_s": "p99",
    "max_wait_s": "max",
    "mean_jct_s": "mean JCT s",
    "mean_bounded_slowdown": "slowdown",
    "gpu_utilisation": "utilisation",
    "mean_fragmentation": "fragmented",
    "fairness_jain": "Jain",
}
_SHARES = ("gpu_utilisation", "mean_fragmentation", "fairness_jain")

BackfillOption = Annotated[
    Backfill,
    typer.Option(
        help="Who may start behind a job without room: nobody, whoever fits, or whoever does not delay it (easy) or"
        " any such job (conservative), by estimates."
    ),
]
Placement = Annotated[Literal["greedy", "milp"], typer.Option(help="How windows are placed.")]
PreemptOption = Annotated[Literal["off", "on"], typer.Option(help="Running jobs make room for better ranked ones.")]
RestartS = Annotated[float, typer.Option(min=0, help="What starting again costs a stopped job, s.")]
CheckpointS = Annotated[float, typer.Option(min=1e-3, help="Work up to a multiple of this survives a stop, s.")]
BoundS = Annotated[
    float | None,
    typer.Option(min=1e-3, help="With --preempt on: who has waited so long goes first and is not stopped any more, s."),
]
MoveAfterS = Annotated[
    float | None,
    typer.Option(min=1e-3, help="With --fast: who has run so long on one node may be moved to make room, s."),
]
EstimatesOption = Annotated[
    str, typer.Option(help="What is known of run times: none, user, true, predicted or noisy:SIGMA.")
]
Fast = Annotated[bool, typer.Option(help="The compiled path: classic rules and index policies, greedy.")]
JobsFormat = Annotated[Literal["csv", "parquet"], typer.Option(help="Of the file of jobs; Parquet: extra `trace`.")]
Out = Annotated[Path, typer.Option(help="Folder for summary.json, jobs.csv and report.html.")]


LONGEST_S = 1e10
"""Of run times and options: three hundred years."""
GITTINS = "gittins"
POLICIES = sorted(RULES)
_FAST_PREEMPTIVE = ("las", GITTINS, "srtf")


@dataclass(frozen=True)
class Plan:
    """One simulation: what crosses to a process of its own."""

    source: Slice
    policy: str
    backfill: Backfill
    placement: str
    preempt: bool
    costs: Preemption
    estimates: Estimates
    seed: int
    fast: bool
    model: Model | None = None
    """Where the policy is one."""

    @property
    def sees_run_times(self) -> bool:
        if self.model is not None:
            return self.model.sees_run_times
        predicts = self.policy == GITTINS and self.estimates.kind == "predicted"
        return predicts or self.policy in SEE_RUN_TIMES or self.backfill in ("easy", "conservative")

    @property
    def label(self) -> str:
        """The policy, and what it sees."""
        if not self.sees_run_times:
            return self.policy
        return f"{self.policy} (oracle)" if self.estimates.are_true else f"{self.policy} ({self.estimates})"


def simulate(
    out: Out,
    scenario: ScenarioFile = None,
    trace: TraceFile = None,
    nodes: Nodes = None,
    submitted_from: From = None,
    submitted_before: Before = None,
    limit: Limit = None,
    policy: Annotated[str, typer.Option(help="Order of the queue: a rule, or model:NAME.")] = "fcfs",
    backfill: BackfillOption = "skip",
    placement: Placement = "greedy",
    preempt: PreemptOption = "off",
    restart_s: RestartS = COSTS.restart_s,
    checkpoint_s: CheckpointS = COSTS.checkpoint_s,
    bound_s: BoundS = None,
    move_after_s: MoveAfterS = None,
    estimates: EstimatesOption = "none",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs with seeds 1 to N; figures are their means.")] = 1,
    fast: Fast = False,
    jobs_format: JobsFormat = "csv",
) -> None:
    """Simulate a trace on a cluster under one policy: the same core that runs live, in virtual time.

    Equal input and seed give equal files, but for `wall_s`. A rule that sees true run times is called an oracle.
    """
    from streamsched.sim.jobs_file import jobs_encoder

    encoded = jobs_encoder(jobs_format)
    given = given_slice(scenario, trace, nodes, submitted_from, submitted_before, limit)
    plan = _plan(
        *(given, policy, backfill, placement, preempt),
        *(_costs(restart_s, checkpoint_s, bound_s, move_after_s), Estimates.parse(estimates), fast),
    )
    make_folder(out)
    found = [_run_one(replace(plan, seed=seed), progress=True) for seed in range(1, seeds + 1)]
    summaries = [run.summary for run in found]
    told: dict[str, object] = {
        "policy": plan.label,
        "backfill": plan.backfill,
        "estimates": str(plan.estimates),
        **{
            key: value if all(s[key] == value for s in summaries) else float(np.mean([s[key] for s in summaries]))
            for key, value in summaries[0].items()
        },
    }
    if seeds > 1:
        told["by_seed"] = summaries
    write_bytes(out / f"jobs.{jobs_format}", encoded(found[0].schedule))
    _write_report(out / "report.html", plan, {plan.label: found[0]})
    write_text(out / "summary.json", json.dumps(told, indent=2, allow_nan=False) + "\n")
    _table(
        plan, {plan.label: found[0]} if seeds == 1 else {f"{plan.label}, seed {n}": r for n, r in enumerate(found, 1)}
    )
    _say_refused(found[0])


def compare(
    out: Out,
    policies: Annotated[str, typer.Option(help="Names, comma-separated.")],
    scenario: ScenarioFile = None,
    trace: TraceFile = None,
    nodes: Nodes = None,
    submitted_from: From = None,
    submitted_before: Before = None,
    limit: Limit = None,
    backfill: BackfillOption = "skip",
    placement: Placement = "greedy",
    preempt: PreemptOption = "off",
    restart_s: RestartS = COSTS.restart_s,
    checkpoint_s: CheckpointS = COSTS.checkpoint_s,
    bound_s: BoundS = None,
    move_after_s: MoveAfterS = None,
    estimates: EstimatesOption = "none",
    seed: Annotated[int, typer.Option(help="Of noisy estimates.")] = 1,
    processes: Annotated[int | None, typer.Option(min=1, help="At a time; as many as there are cores.")] = None,
    fast: Fast = False,
) -> None:
    """Simulate a trace under several policies, in parallel: one table with confidence intervals, one report.

    Intervals (95 %) are by a seeded block bootstrap over the jobs, of utilisation and fragmentation over time.
    """
    given = given_slice(scenario, trace, nodes, submitted_from, submitted_before, limit)
    names = list(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    if not names:
        raise UserError("--policies: give at least one name")
    told, costs = Estimates.parse(estimates), _costs(restart_s, checkpoint_s, bound_s, move_after_s)
    plans = [replace(_plan(given, name, backfill, placement, preempt, costs, told, fast), seed=seed) for name in names]
    make_folder(out)
    runs = map_apart(_run_one, plans, processes or os.cpu_count() or 1)
    found = dict(zip((plan.label for plan in plans), runs, strict=True))
    body = {label: {**run.summary, **{f"{key}_95": between for key, between in run.intervals.items()}}
            for label, run in found.items()}  # fmt: skip
    _write_report(out / "report.html", plans[0], found)
    write_text(out / "summary.json", json.dumps(body, indent=2, allow_nan=False) + "\n")
    _table(plans[0], found)
    _say_refused(next(iter(found.values())))


# ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────────────


def _costs(restart_s: float, checkpoint_s: float, bound_s: float | None, move_after_s: float | None) -> Preemption:
    told = {
        "--restart-s": restart_s, "--checkpoint-s": checkpoint_s,
        "--bound-s": bound_s, "--move-after-s": move_after_s,
    }  # fmt: skip
    for name, value in told.items():
        if value is not None and not value <= LONGEST_S:
            raise UserError(f"{name} {value:g}: expected no more than {LONGEST_S:,.0f} s")
    return Preemption(
        restart_s=restart_s,
        checkpoint_s=checkpoint_s,
        bound_s=math.inf if bound_s is None else bound_s,
        move_after_s=math.inf if move_after_s is None else move_after_s,
    )


def _plan(
    source: Slice,
    policy: str,
    backfill: Backfill,
    placement: str,
    preempt: str,
    costs: Preemption,
    estimates: Estimates,
    fast: bool,
) -> Plan:
    """Raises UserError for what does not go together."""
    model = _model(policy, preempt == "on")
    if model is not None and fast:
        raise UserError(f"--fast knows rules alone: leave it out for {policy}")
    if model is not None and model.sees_run_times and estimates.kind == "none":
        raise UserError(f"policy {policy} looks at run times: give --estimates predicted, user, true or noisy:SIGMA")
    if model is None and policy not in POLICIES:
        raise UserError(f"unknown policy {policy!r}: choose one of {', '.join(POLICIES)}")
    if policy in SEE_RUN_TIMES and estimates.kind == "none":
        raise UserError(f"policy {policy} orders by run times: give --estimates user, true, predicted or noisy:SIGMA")
    if backfill in ("easy", "conservative") and estimates.kind == "none":
        raise UserError(f"--backfill {backfill} needs run times: give --estimates user, true, predicted or noisy:SIGMA")
    if backfill in ("easy", "conservative") and preempt == "on":
        raise UserError(f"--backfill {backfill} is for runs that go on to their ends: leave out --preempt on")
    if costs.bound_s < math.inf and preempt == "off":
        raise UserError("--bound-s is for --preempt on: leave it out")
    if costs.move_after_s < math.inf and not (fast and preempt == "on"):
        raise UserError("--move-after-s is for --fast with --preempt on: leave it out")
    if fast and estimates.kind == "predicted":
        raise UserError("--estimates predicted learns while the simulation goes on, --fast cannot: leave it out")
    if fast and placement != "greedy":
        raise UserError("--fast places greedily: leave it out")
    known = _FAST_PREEMPTIVE if preempt == "on" else tuple(FORMULAS)
    if fast and policy not in known:
        raise UserError(f"--fast with --preempt {preempt} knows {', '.join(known)}; leave it out for {policy}")
    return Plan(
        source=source,
        policy=policy,
        backfill=backfill,
        placement=placement,
        preempt=preempt == "on",
        costs=costs,
        estimates=estimates,
        seed=1,
        fast=fast,
        model=model,
    )


def _model(policy: str, preempts: bool) -> Model | None:
    """Of the folder that the setting models_dir names; None for a rule. Raises UserError."""
    from streamsched.policy.models import load, model_of, read_registry
    from streamsched.service.settings import Settings

    name = model_of(policy)
    if name is None:
        return None
    folder = Path(Settings.from_env().models_dir)
    name = name or read_registry(folder).default
    if not name:
        raise UserError(f"policy {policy}: the registry of {folder} names no default: give model:NAME")
    return load(folder, name, preempts)


# ── running it ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Run:
    schedule: Schedule
    summary: dict[str, float | int]
    refused: str
    """Rows of the trace that were not used, in words; empty: none."""
    intervals: dict[str, tuple[float, float]]
    """95 %, by keys of the summary."""


def _run_one(plan: Plan, progress: bool = False) -> Run:
    from streamsched.sim.metrics import intervals, summary

    started = time.perf_counter()
    trace, found = plan.source.trace, plan.source.read()
    random = Random(plan.seed)
    rows = [(job, plan.estimates.of(job.duration_s, job.estimate_s, random)) for job in found.jobs]
    endless = next((job for job in found.jobs if job.duration_s > LONGEST_S), None)
    if endless is not None:
        raise UserError(
            f"{trace}:{endless.line}: a job of {endless.duration_s:g} s; expected no more than {LONGEST_S:,.0f}"
        )
    if plan.estimates.kind == "user" and all(told is None for _, told in rows):
        raise UserError(f"{trace}: has no users' estimates: choose none, true, predicted or noisy:SIGMA")
    columns = _Columns(
        submit_s=np.array([job.submit_s for job, _ in rows], dtype=np.float64),
        run_s=np.array([job.duration_s for job, _ in rows], dtype=np.float64),
        gpus=np.array([job.gpus for job, _ in rows], dtype=np.int64),
        estimate_s=np.array([np.nan if e is None else e for _, e in rows], dtype=np.float64),
        tenants=tuple(job.tenant for job, _ in rows),
        gpu_milli=tuple(_part_of_one(job) for job, _ in rows),
        gpu_types=tuple(job.gpu_types for job, _ in rows),
        clamped=tuple(job.clamped for job, _ in rows),
    )
    schedule = _by_fast(plan, columns) if plan.fast else _by_core(plan, columns, progress)
    if not schedule.ran.any():
        raise UserError(f"{trace}: no job fits these nodes")
    return Run(
        schedule=schedule,
        summary=summary(schedule, found.refusals.total, round(time.perf_counter() - started, 3)),
        refused=plan.source.refused(),
        intervals=intervals(schedule),
    )


@dataclass(frozen=True)
class _Columns:
    submit_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    run_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    gpus: np.ndarray[tuple[int], np.dtype[np.int64]]
    estimate_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    """NaN: none."""
    tenants: tuple[str, ...]
    gpu_milli: tuple[int, ...]
    """Thousandths of a GPU that a job takes of its one GPU. Those of several GPUs have whole ones."""
    gpu_types: tuple[tuple[str, ...], ...]
    """Empty: any."""
    clamped: tuple[bool, ...]


def _part_of_one(job: TraceJob) -> int:
    return job.gpu_milli if job.gpu_milli is not None and job.gpus == 1 else WHOLE_GPU


def _by_fast(plan: Plan, columns: _Columns) -> Schedule:
    from streamsched.sim import fast
    from streamsched.sim.metrics import from_fast

    trace = plan.source.trace
    parts = sum(milli != WHOLE_GPU for milli in columns.gpu_milli)
    if parts:
        raise UserError(f"{trace}: --fast has whole GPUs alone, and {parts} jobs ask for a part of one: leave it out")
    if _types_matter(plan) and any(columns.gpu_types):
        raise UserError(f"{trace}: --fast has one type of GPU alone, and jobs ask for certain ones: leave it out")
    nodes = plan.source.node_gpus
    able = fast.fits_cluster(columns.gpus, nodes)
    unknown = int(np.isnan(columns.estimate_s).sum())
    if unknown and plan.backfill in ("easy", "conservative"):
        raise UserError(
            f"{trace}: --fast with --backfill {plan.backfill} needs an estimate for each job, and {unknown} have"
            " none: leave out --fast"
        )
    known = np.where(np.isnan(columns.estimate_s), UNKNOWN_RUN_S, columns.estimate_s)
    everything = fast.Workload(columns.submit_s, columns.run_s, columns.gpus, known)
    if not able.any():
        raise UserError(f"{trace}: no job fits these nodes")
    workload = everything.take(able)
    if plan.preempt:
        outcome = _by_index(plan, workload, nodes)
    else:
        outcome = fast.simulate(workload, nodes, fast.Rule.named(plan.policy), fast.Backfill[plan.backfill.upper()])
    return from_fast(everything, outcome, able, columns.tenants, nodes)


def _types_matter(plan: Plan) -> bool:
    """Where no type of the nodes is told, jobs may run anywhere."""
    return any(group.gpu_type != ANY for group in plan.source.nodes)


def _by_index(plan: Plan, workload: Workload, nodes: list[int]) -> Outcome:
    from streamsched.policy import gittins
    from streamsched.sim import fast

    if plan.policy == "srtf":
        return fast.simulate_srtf(workload, nodes, plan.costs)
    if plan.policy == GITTINS:
        levels = np.array(gittins.LEVELS_GPU_S)
        index = fast.Index(levels, _gittins_table(plan), gittins.class_of(workload.gpus))
        return fast.simulate_index(workload, nodes, index, plan.costs)
    return fast.simulate_index(workload, nodes, fast.las_index(), plan.costs)


def _gittins_table(plan: Plan) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    from streamsched.policy import gittins

    start = plan.source.submitted_from
    found = None if start is None else gittins.table_before(plan.source.before(), start)
    if found is None:
        raise UserError(
            f"{plan.source.trace}: policy gittins learns from jobs that began before --from, and there are none; "
            "--estimates predicted needs none"
        )
    return np.asarray(found)


def _learned(plan: Plan, whole: int) -> Estimator:
    """Knows what had ended before the first job."""
    from streamsched.sim.learning import Learned
    from streamsched.sim.workload import job as sim_job

    estimator = Learned()
    start = plan.source.submitted_from
    over = [job for job in plan.source.before() if start is not None and job.ended_s <= start]
    for number, job in enumerate(sorted(over, key=lambda job: job.ended_s)):
        known = sim_job(-1 - number, job.submit_s, job.duration_s, job.gpus, job.tenant, None, False, whole,
                        clamped=job.clamped)  # fmt: skip
        estimator.observe(known, job.ended_s)
    return estimator


def _ranker(plan: Plan, origin_s: float) -> Ranker:
    from streamsched.policy.features import Features
    from streamsched.policy.gittins import Gittins

    if plan.model is not None:
        return plan.model.ranker(Features())
    by_table = plan.policy == GITTINS and plan.estimates.kind != "predicted"
    return Gittins(_gittins_table(plan)) if by_table else by_name(plan.policy, origin_s)


def _by_core(plan: Plan, columns: _Columns, progress: bool) -> Schedule:
    from streamsched.core.config import SchedulerConfig
    from streamsched.sim.metrics import from_core
    from streamsched.sim.simulator import SimOptions
    from streamsched.sim.simulator import simulate as run_core
    from streamsched.sim.workload import job, nodes_of

    whole, typed = max(group.gpus for group in plan.source.nodes), _types_matter(plan)
    estimates = [None if np.isnan(e) else float(e) for e in columns.estimate_s]
    rows = zip(columns.submit_s.tolist(), columns.run_s.tolist(), columns.gpus.tolist(), strict=True)
    jobs = [
        job(
            *(number, submit_s, run_s, gpus, columns.tenants[number], estimates[number], plan.preempt, whole),
            gpu_milli=columns.gpu_milli[number],
            gpu_types=columns.gpu_types[number] if typed else (),
            clamped=columns.clamped[number],
        )
        for number, (submit_s, run_s, gpus) in enumerate(rows)
    ]
    config = SchedulerConfig(
        policy=plan.policy,
        backfill=plan.backfill,
        window_jobs=10_000 if plan.placement == "greedy" else SchedulerConfig().window_jobs,
        reservations_max=0,
        preempt="rank" if plan.preempt else "off",
        reserve_after_s=plan.costs.bound_s,
        restart_s=plan.costs.restart_s,
        finished_keep_s=3600.0,
    )
    bar = Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn()),
        console=Console(stderr=True),
        disable=not (progress and Console(stderr=True).is_terminal),
    )
    with bar:
        task = bar.add_task(plan.label, total=len(jobs))
        result = run_core(
            jobs,
            nodes_of((group.count, group.gpus, group.gpu_type) for group in plan.source.nodes),
            config,
            _ranker(plan, float(columns.submit_s[0])),
            SimOptions(placement=plan.placement, checkpoint_s=plan.costs.checkpoint_s),
            lambda finished: bar.update(task, completed=finished),
            _learned(plan, whole) if plan.estimates.kind == "predicted" and plan.sees_run_times else None,
        )
    return from_core(result)


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _table(plan: Plan, found: Mapping[str, Run]) -> None:
    settings = f"backfill {plan.backfill}; estimates {plan.estimates}; below: 95 % intervals"
    print_table(f"{plan.source.name} on {plan.source.cluster}; {settings}", _rows(found), names=1, width=170)


def _headings() -> Sequence[str]:
    return ("policy", "jobs", *_SHOWN.values(), "preemptions", "wall s")


def _rows(found: Mapping[str, Run]) -> list[dict[str, str]]:
    """Figures with their intervals below them."""
    rows = []
    for label, run in found.items():
        cells = [label, f"{run.summary['jobs']:,}", *(_cell(run, key) for key in _SHOWN)]
        cells += [f"{run.summary['preemptions']:,}", f"{run.summary['wall_s']:.1f}"]
        rows.append(dict(zip(_headings(), cells, strict=True)))
    return rows


def _cell(run: Run, key: str) -> str:
    if key not in run.summary:
        return "not known"
    one, two = "{:,.1f}", "{:,.0f} - {:,.0f}"
    if key in _SHARES:
        one, two = "{:.3f}", "{:.2f} - {:.2f}"
    elif key == "mean_bounded_slowdown":
        two = "{:,.1f} - {:,.1f}"
    between = run.intervals.get(key)
    return one.format(run.summary[key]) + ("" if between is None else "\n" + two.format(*between))


def _say_refused(run: Run) -> None:
    console = Console(stderr=True)
    if run.refused:
        console.print(run.refused, markup=False, soft_wrap=True)
    if never := int(run.summary["never_ran"]):
        console.print(f"{never} jobs never ran: the cluster could not hold them", markup=False)


def _write_report(path: Path, plan: Plan, found: Mapping[str, Run]) -> None:
    from streamsched.sim.report import page

    facts = [
        ("trace", plan.source.trace.name),
        ("cluster", plan.source.cluster),
        ("backfill", plan.backfill),
        ("placement", plan.placement),
        (
            "preemption",
            f"on, {plan.costs}" if plan.preempt else "off",
        ),
        ("estimates", str(plan.estimates)),
        ("way", "compiled path" if plan.fast else "production core in virtual time"),
    ]
    rows = [{k: v for k, v in row.items() if k != "wall s"} for row in _rows(found)]
    schedules = {label: run.schedule for label, run in found.items()}
    write_text(path, page(f"streamsched: {plan.source.name}", facts, rows, schedules))
