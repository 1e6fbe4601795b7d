"""The window as a mixed-integer linear program (Pyomo, HiGHS).

Indices: j candidates, k kinds of workers, c cells of nodes, p patterns of a cell, s slot sizes of a cell.

    place[j]     1 when candidate j is placed                                        binary
    workers[k,c] workers of kind k on the nodes of cell c                            integer
    nodes[c,p]   nodes of cell c that are filled by pattern p                        integer

    max  sum_j value_j place_j  -  w * (sum_c free_c sum_p nodes[c,p]  -  sum_kc gpus_k workers[k,c])

    gang          sum_c workers[k,c] = sum_j count_jk place_j                    for each k
    supply        sum_{k in slot s} workers[k,c] <= sum_p n_ps nodes[c,p]        for each c, s
    node_count    sum_p nodes[c,p] <= number of nodes of c                       for each c
    capacity      sum_k need_kr workers[k,c] <= limit_r nodes[c,0]               for each single-node c, resource r
    equals        place_j >= place_j'                                            j, j' with equal needs, j worth more
    in_order      nodes[c,0] >= nodes[c+1,0]                                     neighbouring single nodes of a group

Exactness. Patterns are the *maximal* fillings of a node, slots may stay empty (supply is an inequality). Any
feasible filling of the nodes is below some choice of maximal patterns, node by node; and any workers below the
supply of a choice can be seated in its slots, because a worker of kind k takes exactly one slot size in a cell and
workers of one slot size are interchangeable there. Kinds summed over jobs lose nothing for the same reason. So
integer points of the model and feasible placements are the same thing. The objective's second term is the number of
stranded GPUs (`objective.py`).

The solver is told nothing about the wall clock but a backstop; one thread and a fixed seed make answers reproducible.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyomo.environ as pyo
from pyomo.contrib.appsi.base import TerminationCondition
from pyomo.contrib.appsi.solvers import Highs
from pyomo.core.expr.numeric_expr import LinearExpression

from .cells import Cell, Plan
from .groups import Demand
from .request import NO_LIMIT, Request

_SCALE = 1000.0
"""The largest value of a window becomes this, so that the solver's absolute tolerances do not matter."""
_INTEGRAL = 1e-4
_CHECKS = (
    "check_for_new_or_removed_constraints",
    "check_for_new_or_removed_vars",
    "check_for_new_or_removed_params",
    "check_for_new_objective",
    "update_constraints",
    "update_vars",
    "update_params",
    "update_named_expressions",
    "update_objective",
)
"""What appsi looks for between two solves of one model; each model is solved once."""


class SolverFailed(Exception):
    """HiGHS ended without an answer for a reason other than a limit."""


@dataclass(frozen=True)
class Answer:
    plan: Plan | None
    """None: no feasible point was found within the limits."""
    bound: float | None
    """Upper bound of the objective, in units of value."""


class Model:
    """The Pyomo model of one window, and what is needed to read its answer."""

    def __init__(self, kinds: list[Request], demands: list[Demand], cells: list[Cell], weight: float) -> None:
        self.kinds, self.demands, self.cells = kinds, demands, cells
        self.scale = _SCALE / max((d.value for d in demands if d.value > 0), default=1.0)
        self._weight = weight * self.scale
        self.pyomo = pyo.ConcreteModel()
        _variables(self)
        _gang(self)
        _supply(self)
        _node_count(self)
        _capacity(self)
        _equals(self)
        _in_order(self)
        _objective(self, self._weight)

    def start_from(self, plan: Plan) -> None:
        """Use a feasible plan as MIP start."""
        m = self.pyomo
        placed = _best_of_equals(plan.placed, self.demands)
        for j, var in m.place.items():
            var.set_value(int(j in placed), skip_validation=True)
        for key, var in m.workers.items():
            var.set_value(plan.workers[key], skip_validation=True)
        for key, var in m.nodes.items():
            var.set_value(plan.nodes[key], skip_validation=True)

    def read(self) -> Plan:
        m = self.pyomo
        return Plan(
            placed={j for j, var in m.place.items() if _integer(var)},
            workers=Counter({key: n for key, var in m.workers.items() if (n := _integer(var))}),
            nodes=Counter({key: n for key, var in m.nodes.items() if (n := _integer(var))}),
        )


def size_of(demands: list[Demand], cells: list[Cell]) -> int:
    """Variables that a model would have, without building it."""
    return len(demands) + sum(len(cell.group.slot_of) + cell.columns for cell in cells)


def _variables(model: Model) -> None:
    m = model.pyomo
    most: Counter[int] = Counter()
    for demand in model.demands:
        most.update(dict(demand.needs))
    kind_cells = [(k, c) for c, cell in enumerate(model.cells) for k in sorted(cell.group.slot_of)]
    cell_columns = [(c, p) for c, cell in enumerate(model.cells) for p in range(cell.columns)]
    m.place = pyo.Var(range(len(model.demands)), domain=pyo.Binary)
    m.workers = pyo.Var(kind_cells, domain=pyo.NonNegativeIntegers, bounds=lambda _, k, c: (0, most[k]))
    m.nodes = pyo.Var(cell_columns, domain=pyo.NonNegativeIntegers)


def _gang(model: Model) -> None:
    """All workers of a placed candidate, none of any other."""
    m = model.pyomo
    terms: dict[int, list[tuple[float, Any]]] = {k: [] for k in range(len(model.kinds))}
    for (k, _), var in m.workers.items():
        terms[k].append((1, var))
    for j, demand in enumerate(model.demands):
        for k, count in demand.needs:
            terms[k].append((-count, m.place[j]))
    m.gang = pyo.Constraint(range(len(model.kinds)), rule=lambda _, k: (0, _linear(terms[k]), 0))


def _supply(model: Model) -> None:
    """Workers take slots that the chosen patterns have."""
    m = model.pyomo
    terms: dict[tuple[int, int], list[tuple[float, Any]]] = defaultdict(list)
    for c, cell in enumerate(model.cells):
        if cell.patterns is None:
            continue
        number = {slot: s for s, slot in enumerate(sorted(cell.slots))}
        for k, slot in sorted(cell.group.slot_of.items()):
            terms[c, number[slot]].append((1, m.workers[k, c]))
        for p, way in enumerate(cell.patterns):
            for slot, n in way.items():
                terms[c, number[slot]].append((-n, m.nodes[c, p]))
    m.supply = pyo.Constraint(list(terms), rule=lambda _, c, s: (None, _linear(terms[c, s]), 0))


def _node_count(model: Model) -> None:
    """Each node has one pattern at most."""
    m = model.pyomo

    def rule(_: Any, c: int) -> Any:
        cell = model.cells[c]
        return (None, _linear((1, m.nodes[c, p]) for p in range(cell.columns)), len(cell.node_ids))

    m.node_count = pyo.Constraint(range(len(model.cells)), rule=rule)


def _capacity(model: Model) -> None:
    """GPUs, cpu and memory of the single nodes that have no patterns."""
    m = model.pyomo
    terms: dict[tuple[int, int], list[tuple[float, Any]]] = {}
    for c, cell in enumerate(model.cells):
        if cell.patterns is not None:
            continue
        group = cell.group
        for r, limit in enumerate((group.free, group.cpu_milli, group.memory_mib)):
            if limit != NO_LIMIT:
                needs = [(slot[r], m.workers[k, c]) for k, slot in sorted(group.slot_of.items()) if slot[r]]
                terms[c, r] = [*needs, (-limit, m.nodes[c, 0])]
    m.capacity = pyo.Constraint(list(terms), rule=lambda _, c, r: (None, _linear(terms[c, r]), 0))


def _equals(model: Model) -> None:
    """Of candidates with equal needs the more valuable ones come first: some optimum has it so, and it breaks ties."""
    m = model.pyomo
    pairs = [pair for members in _equal_needs(model.demands) for pair in pairwise(members)]
    m.equals = pyo.Constraint(pairs, rule=lambda _, a, b: (None, _linear(((1, m.place[b]), (-1, m.place[a]))), 0))


def _in_order(model: Model) -> None:
    """Single nodes of one group are used in their order."""
    m = model.pyomo
    pairs = [(c, c + 1) for c, (a, b) in enumerate(pairwise(model.cells)) if a.patterns is None and a.group is b.group]
    m.in_order = pyo.Constraint(
        pairs, rule=lambda _, a, b: (None, _linear(((1, m.nodes[b, 0]), (-1, m.nodes[a, 0]))), 0)
    )


def _objective(model: Model, weight: float) -> None:
    """Value of what is placed, less the weight of what is stranded."""
    m = model.pyomo
    value = [(d.value * model.scale, m.place[j]) for j, d in enumerate(model.demands)]
    taken = [(weight * model.kinds[k].gpus, var) for (k, _), var in m.workers.items()]
    touched = [(-weight * model.cells[c].group.free, var) for (c, _), var in m.nodes.items()]
    m.objective = pyo.Objective(expr=_linear([*value, *taken, *touched]), sense=pyo.maximize)


def _linear(terms: Iterable[tuple[float, Any]]) -> Any:
    pairs = list(terms)
    return LinearExpression(constant=0, linear_coefs=[a for a, _ in pairs], linear_vars=[var for _, var in pairs])


def _equal_needs(demands: list[Demand]) -> list[list[int]]:
    """Indexes of candidates with the same needs, most valuable first."""
    same: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for j in sorted(range(len(demands)), key=lambda j: (-demands[j].value, demands[j].rank)):
        same[demands[j].needs].append(j)
    return [members for _, members in sorted(same.items())]


def _best_of_equals(placed: set[int], demands: list[Demand]) -> set[int]:
    """As many of each set of equals, but its most valuable ones."""
    return {j for members in _equal_needs(demands) for j in members[: sum(1 for member in members if member in placed)]}


def _integer(var: Any) -> int:
    value = var.value or 0.0
    if abs(value - round(value)) > _INTEGRAL:
        raise SolverFailed(f"{var.name} = {value} is not integral")
    return round(value)


def run(
    model: Model,
    *,
    time_s: float | None,
    gap: float,
    nodes_max: int | None,
    seed: int,
    presolve: bool,
    warm: bool = True,
) -> Answer:
    """Solve with one thread. `time_s` seconds are a backstop that presolve may overrun; `gap` is relative.

    Raises SolverFailed when HiGHS ends with an error or says that the model (which has the solution "nothing") is
    infeasible.
    """
    solver = Highs()
    solver.config.load_solution = False
    solver.config.warmstart = warm
    solver.config.time_limit = time_s
    solver.config.mip_gap = gap
    options = {"threads": 1, "random_seed": seed, "mip_abs_gap": 0.0, "presolve": "on" if presolve else "off"}
    if nodes_max is not None:
        options["mip_max_nodes"] = nodes_max
    solver.highs_options = options
    for name in _CHECKS:
        setattr(solver.update_config, name, False)
    solver.set_instance(model.pyomo)
    results = solver.solve(model.pyomo)
    ended = results.termination_condition
    if ended not in (
        TerminationCondition.optimal,
        TerminationCondition.maxTimeLimit,
        TerminationCondition.maxIterations,
        TerminationCondition.objectiveLimit,
    ):
        raise SolverFailed(f"HiGHS ended with {ended.name}")
    raw = results.best_objective_bound
    bound = raw / model.scale if raw is not None and math.isfinite(raw) else None
    if results.best_feasible_objective is None:
        return Answer(None, bound)
    solver.load_vars()
    return Answer(model.read(), bound)
