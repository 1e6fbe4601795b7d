"""Look into a window's models without solving them: their size, and the models themselves for an LP file.

Models are caught where `solve` hands them to HiGHS, so they are those that it would have solved. The solver's function
is swapped for the moment, so this is for tools with one thread, not for the service.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from streamsched.core.problem import Problem

from .solve import SolveLimits, solve


class ModelSize(Struct, frozen=True, kw_only=True):
    """Variables and constraints by family, with the names of `milp.py`; of several models (parts) the sums."""

    models: int
    """0: no candidate could fit, or the model would be larger than `SolveLimits.variables_max`."""
    cells: int
    variables: dict[str, int]
    constraints: dict[str, int]


def models_of(problem: Problem, limits: SolveLimits) -> list[Any]:
    """The `milp.Model`s of a window, also where greedy's answer is good enough to need none."""
    from . import milp  # Pyomo takes a second to import

    caught: list[Any] = []

    def catch(model: milp.Model, **_: object) -> NoReturn:
        caught.append(model)
        raise milp.SolverFailed("only looked at")

    solver = milp.run
    milp.run = catch
    try:
        solve(problem, msgspec.structs.replace(limits, gap=-1.0))  # nothing is within this gap
    finally:
        milp.run = solver
    return caught


def size_of(models: list[Any]) -> ModelSize:
    import pyomo.environ as pyo

    variables: Counter[str] = Counter()
    constraints: Counter[str] = Counter()
    for model in models:
        for family, kind in ((variables, pyo.Var), (constraints, pyo.Constraint)):
            family.update({part.name: len(part) for part in model.pyomo.component_objects(kind) if len(part)})
    return ModelSize(
        models=len(models),
        cells=sum(_cells(model) for model in models),
        variables=dict(variables),
        constraints=dict(constraints),
    )


def _cells(model: Any) -> int:
    """Node groups or single nodes that the model tells apart: those of its node variables."""
    return len({index[0] for index in model.pyomo.nodes})


def write_lp(models: list[Any], path: Path) -> list[Path]:
    """Write each model in LP format under its variables' and constraints' own names; several get `-1`, `-2`, ... .

    Raises OSError. Values are scaled as `milp.py` says.
    """
    paths = [path] if len(models) == 1 else [path.with_stem(f"{path.stem}-{n}") for n in range(1, len(models) + 1)]
    for model, target in zip(models, paths, strict=True):
        with target.open("w", encoding="utf-8"):  # Pyomo's own complaint about an unwritable file is a traceback
            pass
        model.pyomo.write(str(target), format="cpxlp", io_options={"symbolic_solver_labels": True})
    return paths
