"""`streamsched train`: priorities learned in simulation."""

from __future__ import annotations

import inspect
import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
import typer
from rich.console import Console

from streamsched.commands.output import make_folder, write_bytes, write_text
from streamsched.commands.slices import Before, From, Limit, Nodes, ScenarioFile, Slice, TraceFile, given_slice
from streamsched.errors import UserError
from streamsched.learn.es_config import BASES, CHOOSE_SHARE, TRAIN_SHARE, EsConfig
from streamsched.learn.rl_config import RlConfig, read_config

if TYPE_CHECKING:
    from loadgen.jobs import TraceJob
    from streamsched.learn.es import Course, Found
    from streamsched.learn.ppo import Progress, Trained
    from streamsched.learn.windows import Window
    from streamsched.policy.features import Floats
    from streamsched.policy.network import Network
    from streamsched.sim.scored import Instance

train_app = typer.Typer(help="Learn priorities in simulation.", no_args_is_help=True)

Seen = Literal["none", "user", "predicted-before"]
SeenOption = Annotated[
    Seen,
    typer.Option(
        "--estimates", help="What is seen of run times; predicted-before: learned from the jobs before the slice."
    ),
]


def _from_to(ends: tuple[float, float]) -> str:
    return "{:g}:{:g}".format(*ends)


def train_rl(
    out: Annotated[Path, typer.Option(help="Folder for network.bin, training.json and the checkpoint.")],
    scenario: ScenarioFile = None,
    trace: TraceFile = None,
    nodes: Nodes = None,
    submitted_from: From = None,
    submitted_before: Before = None,
    limit: Limit = None,
    estimates: SeenOption = "none",
    config: Annotated[Path | None, typer.Option(help="TOML file that sets what the options below do.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard.")] = None,
    **settings: Any,
) -> None:
    """Learn an order of the queue by reinforcement learning (PPO), beginning with a rule and never ending below it.

    The same command with the same --out goes on at the last checkpoint.
    """
    told = read_config(config) if config is not None else {}
    wanted = RlConfig(**{**told, **{name: value for name, value in settings.items() if value is not None}})
    from streamsched.learn.ppo import Trainer

    say = Console(stderr=True).print
    instance = _seen(given_slice(scenario, trace, nodes, submitted_from, submitted_before, limit), estimates)
    learned_from, validation, unseen_from_s = _parts(instance, wanted)
    make_folder(out)
    board = _board(tensorboard)
    trainer = Trainer(learned_from, validation, wanted)
    say(f"{len(learned_from.jobs):,} jobs to learn from, {validation.new:,} to choose by; base rule {trainer.base}")

    pace = _Pace(wanted.updates)

    def on_update(progress: Progress) -> None:
        say(f"{_line(progress)}; {pace.left(progress.update)}", markup=False, soft_wrap=True)
        if board is not None:
            for name, value in asdict(progress).items():
                if value is not None:
                    board.add_scalar(name, value, progress.update)

    began = time.monotonic()
    done = trainer.run(out, on_update)
    _write(out, done, wanted, estimates, unseen_from_s, round(time.monotonic() - began, 1))
    typer.echo(_verdict(done, wanted))


def _with_settings(command: Any) -> Any:
    """The command with an option for each field of `RlConfig`; None: as the file or the default says."""
    given = inspect.signature(command, eval_str=True)
    kept = [one for one in given.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    kinds = {"int": int, "float": float, "str": str}
    options = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kinds[str(one.type)] | None,
                typer.Option(help=one.metadata["help"], show_default=str(one.default)),
            ],
        )
        for one in fields(RlConfig)
    ]
    command.__signature__ = given.replace(parameters=[*kept, *options])
    command.__annotations__ = {one.name: one.annotation for one in [*kept, *options]}
    return command


train_app.command("rl")(_with_settings(train_rl))


@train_app.command("es")
def train_es(
    out: Annotated[Path, typer.Option(help="Folder of the model: network.bin, seed-N.bin, model.toml, training.json.")],
    scenario: ScenarioFile = None,
    trace: TraceFile = None,
    nodes: Nodes = None,
    submitted_from: From = None,
    submitted_before: Before = None,
    limit: Limit = None,
    estimates: SeenOption = "predicted-before",
    base: Annotated[str, typer.Option(help=f"Rule to begin with: {', '.join(BASES)}; las: with preemption.")] = (
        EsConfig.base
    ),
    seeds: Annotated[str, typer.Option(help="One training for each; the best one by the choosing part is used.")] = (
        str(EsConfig.seed)
    ),
    generations: Annotated[int, typer.Option(min=1)] = EsConfig.generations,
    pairs: Annotated[int, typer.Option(min=1, help="Of networks to a generation.")] = EsConfig.pairs,
    hidden: Annotated[int, typer.Option(min=1, max=256)] = EsConfig.hidden,
    sigma: Annotated[float, typer.Option(min=1e-6, help="Standard deviation of the noise.")] = EsConfig.sigma,
    window_days: Annotated[
        float, typer.Option(min=0.01, help="Length of what a generation sees.")
    ] = EsConfig.window_days,
    load: Annotated[str, typer.Option(help="FROM:TO, how many times as fast jobs are submitted.")] = _from_to(
        EsConfig.load
    ),
    cluster: Annotated[str, typer.Option(help="FROM:TO, how many times as many nodes there are.")] = _from_to(
        EsConfig.nodes
    ),
    bound_s: Annotated[
        float,
        typer.Option(min=0, help="Who has waited so long goes first, or has nodes kept for it; inf: no."),
    ] = EsConfig.reserve_after_s,
) -> None:
    """Learn priorities by evolution strategies, with preemption (--base las) or without, beginning with a rule.

    Half of the time of the slice is learned from, the next quarter chooses, the last is not looked at. The same command
    with the same --out goes on at the last checkpoint.
    """
    from streamsched.learn import es

    say = Console(stderr=True).print
    source = given_slice(scenario, trace, nodes, submitted_from, submitted_before, limit)
    course = _course(_seen(source, estimates), source)
    make_folder(out)
    numbers = _numbers(seeds)
    pace = _Pace(len(numbers) * generations)
    found: dict[int, es.Found] = {}
    for seed in numbers:
        try:
            config = EsConfig(
                base=base, hidden=hidden, generations=generations, pairs=pairs, seed=seed, sigma=sigma,
                window_days=window_days, load=_range("--load", load), nodes=_range("--cluster", cluster),
                reserve_after_s=bound_s,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(str(error)) from None

        def shown(check: es.Check, seed: int = seed) -> None:
            mean_s, p99_s = check.waits[0]
            done = len(found) * generations + check.generation
            told = f"seed {seed}, generation {check.generation}/{generations}: {check.cost:.3f} of the rule's cost"
            told += f"; on the choosing part mean {mean_s:,.0f} s, p99 {p99_s:,.0f} s; {pace.left(done)}"
            say(told, markup=False, soft_wrap=True)

        found[seed] = es.search(course, config, out / f"seed-{seed}.checkpoint", shown)
    _write_model(out, found, course, source, estimates, base)


class _Pace:
    """How long the rest takes, by what was done since it was first asked (a run may go on at a checkpoint)."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._first: tuple[int, float] | None = None

    def left(self, done: int) -> str:
        """In words, where `done` of the total are done."""
        now = self._clock()
        if self._first is None or done <= self._first[0]:
            self._first = self._first or (done, now)
            return "time left not known yet"
        since, began = self._first
        seconds = (now - began) / (done - since) * (self._total - done)
        return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:,.0f} min left"


def _course(instance: Instance, source: Slice) -> Course:
    """By the times that bound the slice where they are given, and the slice is not cut short."""
    from streamsched.learn.es import Course

    submit, cut_short = instance.jobs.submit_s, source.limit is not None
    first = submit[0] if source.submitted_from is None else source.submitted_from
    last = submit[-1] if cut_short or source.submitted_before is None else source.submitted_before
    course = Course(instance, *_edges(first, last))
    if not 1 < course.trained < course.known - 1:
        raise UserError("too few jobs to learn from and to choose by: take a longer slice")
    return course


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds {text}: expected whole numbers, such as 1,2,3") from None


def _range(option: str, text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        low, high = 0.0, 0.0
    if not 0 < low <= high < 1e3:
        raise UserError(f"{option} {text}: expected FROM:TO, such as 0.9:1.1")
    return low, high


def _write_model(out: Path, found: dict[int, Found], course: Course, source: Slice, estimates: Seen, base: str) -> None:
    from streamsched.learn import cards
    from streamsched.policy.features import FEATURES_VERSION, NAMES

    best = min(found, key=lambda seed: (found[seed].chosen.cost, seed))
    networks = {f"seed-{seed}": one.network for seed, one in found.items()} | {"network": found[best].network}
    for name, network in networks.items():
        write_bytes(out / f"{name}.bin", network.to_bytes())
    regime = "preemptive" if found[best].config.preemptive else "plain"
    write_text(
        out / "model.toml",
        f'kind = "network"\nfile = "network.bin"\nregime = "{regime}"\nbase = "{base}"\n'
        f"features_version = {FEATURES_VERSION}\n" + _kept(found[best].config),
    )
    training = cards.Training(
        name=out.name,
        method="evolution strategies",
        command=_as_typed(),
        slice=source.name,
        trained_on=_days(course.jobs.jobs.submit_s[0], course.choose_from_s),
        chosen_on=_days(course.choose_from_s, course.until_s),
        seeds=list(found),
        commit=_commit(),
        features=[name for name in NAMES if name not in _unseen(found[best].network)],
        features_version=FEATURES_VERSION,
        run_times={
            "none": "nothing is seen of them",
            "user": "as users told them",
            "predicted-before": "predicted, learned from the jobs before the slice",
        }[estimates],
    )
    told = msgspec.to_builtins(training) | {
        "searches": {str(seed): json.loads(one.to_json()) for seed, one in found.items()}
    }
    write_text(out / "training.json", json.dumps(told, indent=2, allow_nan=False) + "\n")
    chosen = found[best].chosen
    typer.echo(
        f"seed {best}, generation {chosen.generation}: {chosen.cost:.3f} of the cost of {base} on the choosing part"
        + ("; nothing better was found, network.bin is that rule" if chosen.generation == 0 else "")
    )


def _kept(config: EsConfig) -> str:
    bound_s = config.reserve_after_s
    return f"reserve_after_s = {bound_s}\n" if bound_s < math.inf and not config.preemptive else ""


def _unseen(network: Network) -> set[str]:
    """Features that the network gives no weight to."""
    from streamsched.policy.features import NAMES

    weights = network.layers[0][0]
    return {name for name, row in zip(NAMES, weights, strict=True) if not row.any()}


def _days(first_s: float, last_s: float) -> str:
    return " to ".join(datetime.fromtimestamp(moment, UTC).date().isoformat() for moment in (first_s, last_s))


def _as_typed() -> str:
    return shlex.join(["streamsched", *sys.argv[1:]])


def _commit() -> str:
    """Of the code, where it is a clone and git is there."""
    told = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@train_app.callback()
def _group() -> None:
    """Learn priorities in simulation."""


# ── what is learned from ─────────────────────────────────────────────────────────────────────────────────────────────


def _seen(source: Slice, estimates: Seen) -> Instance:
    """All jobs of the slice that fit the nodes, with what is seen of their run times."""
    from streamsched.sim.fast import Workload
    from streamsched.sim.scored import Instance

    jobs, nodes = source.fitting(), source.node_gpus
    if left_out := len(source.read().jobs) - len(jobs):
        typer.echo(f"{source.trace}: {left_out:,} jobs left out, too large for these nodes", err=True)
    if refused := source.refused():
        typer.echo(refused, err=True)
    told = Workload.of(jobs)
    if estimates == "none":
        return Instance(told, nodes)
    if estimates == "user":
        if any(job.estimate_s is None for job in jobs):
            raise UserError(f"{source.trace}: not every job has a user's estimate: choose none or predicted-before")
        return Instance(told.with_estimates(np.array([job.estimate_s for job in jobs], np.float64)), nodes)
    run_s, spread = _predicted(source, jobs)
    return Instance(told.with_estimates(run_s), nodes, spread=spread)


def _predicted(source: Slice, jobs: list[TraceJob]) -> tuple[Floats, Floats]:
    """([job] median, s, [job] ln of the 95 % over the 5 % quantile) by what was learned before the slice."""
    from streamsched.sim.foresight import HISTORY_JOBS, as_finished, foreseen_before, median_and_spread

    before = source.before()
    if not before:
        raise UserError(f"{source.trace}: predicted-before learns from jobs before --from, and there are none")

    history = [as_finished(job) for job in before[-HISTORY_JOBS:]]
    told = foreseen_before([as_finished(job) for job in jobs], history, median_and_spread)
    return told.first, np.ascontiguousarray(told.told[told.kind, 1])


def _edges(
    first_s: float, last_s: float, train_share: float = TRAIN_SHARE, choose_share: float = CHOOSE_SHARE
) -> tuple[float, float]:
    """Where the part begins that chooses, and where it ends: what comes from then on is not looked at."""
    span_s = last_s - first_s
    return float(first_s + span_s * train_share), float(first_s + span_s * (train_share + choose_share))


def _parts(instance: Instance, config: RlConfig) -> tuple[Instance, Window, float]:
    """(what is learned from, what is chosen by, submission of the first job that is not looked at), by time."""
    from streamsched.learn.windows import cut
    from streamsched.sim.fast import Rule

    submit = instance.jobs.submit_s
    middle, end = _edges(submit[0], submit[-1], config.train_share, config.validation_share)
    first, last = (int(np.searchsorted(submit, moment)) for moment in (middle, end))
    last = len(submit) if config.train_share + config.validation_share == 1 else last
    if first < 2 or last - first < 2:
        raise UserError("too few jobs to learn from and to choose by: take a longer slice, or other shares")
    rule = Rule.FCFS if config.base == "best" else Rule.named(config.base)
    return instance.take(slice(first)), cut(instance, rule, first, last - first, config.warm_jobs), end


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _board(folder: Path | None) -> Any:
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        raise UserError("--tensorboard needs tensorboard: pip install 'streamsched[train]'") from None
    return SummaryWriter(str(folder))


def _line(progress: Progress) -> str:
    base = progress.base_cost
    shown = "" if progress.cost is None else f", validation {_ratio(progress.cost, base)} of the base rule"
    return (
        f"update {progress.update}/{progress.updates}: {progress.decisions:,} decisions, entropy"
        f" {progress.entropy:.2f}, KL {progress.kl:.4f}{shown}, best {_ratio(progress.best_cost, base)}"
    )


def _ratio(cost: float, base_cost: float) -> str:
    return f"{cost / base_cost:.3f}" if base_cost > 0 else "1.000"


def _verdict(done: Trained, config: RlConfig) -> str:
    costs = f"{config.reward} per job in validation: {done.base} {done.base_cost:,.1f}"
    if done.is_base:
        return f"{costs}; nothing better was found, network.bin is {done.base} itself"
    origin = "after imitation" if done.best_update == 0 else f"of update {done.best_update}"
    return f"{costs}, network {origin} {done.best_cost:,.1f} ({done.best_cost / done.base_cost - 1:+.1%})"


def _write(out: Path, done: Trained, config: RlConfig, estimates: str, unseen_from_s: float, wall_s: float) -> None:
    write_bytes(out / "network.bin", done.network.to_bytes())
    told = {
        "network": done.network.digest,
        "is_base_rule": done.is_base,
        "base": done.base,
        "base_cost": done.base_cost,
        "best_cost": done.best_cost,
        "best_update": done.best_update,
        "estimates": estimates,
        "unseen_from_s": unseen_from_s,
        "config": asdict(config),
        "history": done.history,
        "wall_s": wall_s,
    }
    write_text(out / "training.json", json.dumps(told, indent=2, allow_nan=False) + "\n")
