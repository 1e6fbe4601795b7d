"""`streamsched solve`: one window's problem through the placement engine, offline, with everything it can tell."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamsched.core.problem import Assignment, Problem, Solution, SolveStatus
from streamsched.errors import CheckFailed, UserError
from streamsched.placement import SolveLimits, check, solve_in_parts
from streamsched.placement.inspect import ModelSize, models_of, size_of, write_lp
from streamsched.placement.solve import WORKERS_MAX
from streamsched.service.dumps import Dump, parse

console = Console(highlight=False, width=None if Console().is_terminal else 200)


def solve_command(
    problem: Annotated[
        str | None, typer.Argument(metavar="[PROBLEM.json]", help="A dump or a problem; - reads stdin.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="Instead of a file: the window that this pool's journal leads to.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="With --pool: a record's number, or a time (RFC 3339 with offset).")
    ] = None,
    gap: Annotated[
        float | None, typer.Option(min=0, help="Relative gap that is good enough; default as dumped, else 0.01.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds for the model; default as dumped, else 1.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the solver.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Compare with greedy's answer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
    lp: Annotated[Path | None, typer.Option("--write-lp", metavar="FILE", help="Write the model in LP format.")] = None,
    dump: Annotated[
        Path | None, typer.Option("--write-problem", metavar="FILE", help="Write the problem, to be solved elsewhere.")
    ] = None,
) -> None:
    """Solve one window and say how large its model is, what was placed where, and why each other job was not.

    Exit code 1 when the answer does not pass the check of its feasibility, 2 when there is no usable problem.
    """
    asked = _asked(problem, pool, until)
    if dump is not None:
        _write(dump, msgspec.json.format(msgspec.json.encode(asked), indent=1))
    limits = _limits(asked.limits, gap, time_limit, seed)
    models = models_of(asked.problem, limits)
    size = size_of(models)
    if lp is not None:
        _write_lp(models, lp)
    first: list[Solution] = []
    solution = solve_in_parts(asked.problem, limits, first.append)
    by_greedy = first[0] if greedy and first else None
    violations = check(asked.problem, solution)
    if as_json:
        _print_json(asked, limits, size, solution, by_greedy, violations)
    else:
        _print_facts(asked, limits, size, solution, by_greedy)
        _print_jobs(asked.problem, solution)
    if violations:
        raise CheckFailed(f"the answer was refused by the check: {violations[0]}")


# ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────────────


def _asked(problem: str | None, pool: str | None, until: str | None) -> Dump:
    if (problem is None) == (pool is None):
        raise UserError("give a file with a problem (- for stdin), or --pool, and not both")
    if pool is not None:
        return _from_journal(pool, until)
    if until is not None:
        raise UserError("--until goes with --pool")
    if problem == "-":
        return parse(sys.stdin.buffer.read(), "stdin")
    path = Path(problem or "")
    try:
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _from_journal(pool: str, until: str | None) -> Dump:
    from streamsched import __version__
    from streamsched.service.history import next_window, replay
    from streamsched.service.pool_model import ranker_now

    from .history import ready, run, until_of

    settings = ready()
    fold = run(replay(settings, pool, until_of(until)), settings)
    ranker, problems = ranker_now(settings)
    for line in problems:
        typer.echo(f"streamsched: {line}; {ranker.name} ranks", err=True)
    found = next_window(fold, ranker)
    if found is None:
        raise UserError(f"pool {pool}: no queued job could start after record {fold.position.seq}, so nothing is asked")
    return Dump(
        problem=found,
        limits=settings.solve_limits(),
        reason=f"asked for after record {fold.position.seq}",
        version=__version__,
        written_at=fold.state.now,
    )


def _limits(given: SolveLimits, gap: float | None, time_s: float | None, seed: int | None) -> SolveLimits:
    changes = {"gap": gap, "time_s": time_s, "seed": seed}
    return msgspec.structs.replace(given, **{name: value for name, value in changes.items() if value is not None})


def _write(path: Path, body: bytes) -> None:
    try:
        path.write_bytes(body)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _write_lp(models: list[Any], path: Path) -> None:
    if not models:
        raise UserError(f"{path}: there is no model to write: nothing fits, or it would be too large")
    try:
        paths = write_lp(models, path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    print(f"streamsched: wrote {', '.join(map(str, paths))}", file=sys.stderr)  # noqa: T201 - stdout may be JSON


# ── what comes out ───────────────────────────────────────────────────────────────────────────────────────────────────


def _print_json(
    asked: Dump,
    limits: SolveLimits,
    size: ModelSize,
    solution: Solution,
    by_greedy: Solution | None,
    violations: list[str],
) -> None:
    document = {
        "pool": asked.problem.pool,
        "window": asked.problem.window,
        "limits": limits,
        "size": size,
        "solution": solution,
        "greedy": by_greedy,
        "answered_then": asked.solution,
        "violations": violations,
    }
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def _print_facts(
    asked: Dump, limits: SolveLimits, size: ModelSize, solution: Solution, by_greedy: Solution | None
) -> None:
    problem = asked.problem
    victims = f", {len(problem.victims)} victims" if problem.victims else ""
    nodes = sum(len(c.node_ids) for c in problem.classes)
    free = sum(len(c.node_ids) * c.free_gpus for c in problem.classes)
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = [
        ("window", f"{problem.window} of pool {problem.pool}, policy {problem.policy}"),
        ("kept because", asked.reason),
        ("asked", f"{len(problem.candidates)} jobs{victims}; {nodes:,} nodes in {len(problem.classes):,} classes, "
                  f"{free:,} idle GPUs"),
        ("model", _size(size)),
        ("variables", _families(size.variables)),
        ("constraints", _families(size.constraints)),
        ("limits", f"{_seconds(limits.time_s)}, gap {limits.gap:.2%}, seed {limits.seed}"),
        ("status", solution.status.value + _in_words(solution.status)),
        ("objective", _worth(solution)),
        ("times", f"build {1e3 * solution.build_s:.0f} ms, solve {1e3 * solution.solve_s:.0f} ms"),
        ("note", solution.note),
        ("greedy", _against(by_greedy, solution)),
        ("answered then", _against(asked.solution, solution)),
    ]  # fmt: skip
    for name, text in rows:
        if text:
            table.add_row(name, Text(text))
    console.print(table)


def _print_jobs(problem: Problem, solution: Solution) -> None:
    types = {node_id: c.gpu_type for c in problem.classes for node_id in c.node_ids}
    victims = {v.placement_id: v for v in problem.victims}
    by_id = {a.job_id: a for a in solution.assignments}
    if by_id:
        console.print(f"\n{len(by_id)} placed")
        table = Table("job", "value", "nodes: GPUs of each worker", "evicts", box=None, pad_edge=False)
        for candidate in problem.candidates:
            if assignment := by_id.get(candidate.job_id):
                evicts = [f"{p} (job {victims[p].job_id})" if p in victims else p for p in assignment.after]
                row = (candidate.job_id, f"{candidate.value:g}", _seats(assignment, types), ", ".join(evicts) or "-")
                table.add_row(*map(Text, row))
        console.print(table)
    if solution.unplaced:
        console.print(f"\n{len(solution.unplaced)} not placed")
        table = Table("job", "value", "why", box=None, pad_edge=False)
        for candidate in problem.candidates:
            if candidate.job_id in solution.unplaced:
                why = solution.unplaced[candidate.job_id]
                table.add_row(*map(Text, (candidate.job_id, f"{candidate.value:g}", why)))
        console.print(table)


def _size(size: ModelSize) -> str:
    if not size.models:
        return f"none: nothing fits, or it would be too large (jobs of {WORKERS_MAX:,} workers at most)"
    parts = f"{size.models} parts, " if size.models > 1 else ""
    variables, constraints = sum(size.variables.values()), sum(size.constraints.values())
    return f"{parts}{variables:,} variables, {constraints:,} constraints, {size.cells:,} cells"


def _families(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in found.items())


def _seconds(limit: float | None) -> str:
    return "no time limit" if limit is None else f"{limit:g} s"


def _in_words(status: SolveStatus) -> str:
    return {
        SolveStatus.OPTIMAL: " (proved within the gap)",
        SolveStatus.INCUMBENT: " (the best found within the limit)",
        SolveStatus.GREEDY: " (the model was too large, failed or found nothing better)",
        SolveStatus.EMPTY: " (nothing placed)",
    }[status]


def _worth(solution: Solution) -> str:
    bound = "unknown" if solution.bound is None else f"{solution.bound:.6g}"
    gap = "" if solution.gap is None else f", gap {100 * solution.gap:.3f} %"
    return f"{solution.objective:.6g}, bound {bound}{gap}"


def _against(other: Solution | None, solution: Solution) -> str:
    """Another answer to the same window, beside the one just found."""
    if other is None:
        return ""
    more = solution.objective - other.objective
    compared = f"{more:+.6g} now" if abs(more) > 1e-9 else "the same now"
    return (
        f"{other.status.value}, {len(other.assignments)} placed, objective {other.objective:.6g} ({compared})"
        + (f"; {other.note}" if other.note else "")
    )  # fmt: skip


def _seats(assignment: Assignment, types: dict[str, str]) -> str:
    """`n1 (V100): 2 x 4; n2 (V100): 8`."""
    texts = []
    for node_id, workers in groupby(sorted(assignment.workers), key=lambda worker: worker[0]):
        sizes = Counter(gpus for _, gpus in workers)
        told = " + ".join(f"{n} x {gpus}" if n > 1 else f"{gpus}" for gpus, n in sorted(sizes.items(), reverse=True))
        texts.append(f"{node_id} ({types.get(node_id, 'unknown')}): {told}")
    return "; ".join(texts)
