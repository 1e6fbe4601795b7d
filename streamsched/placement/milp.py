"""The window as a mixed-integer linear program (Pyomo, HiGHS).

Indices: j candidates, o options of a candidate (`options.py`), k kinds of workers, c cells of nodes, p patterns of a
cell (`cells.py`), q pools of equal slots (`pools.py`), v victims, r resources, a anti-affinity names.

    choose[j,o]  1 when candidate j is placed by option o                            binary
    pooled[k,q]  workers of kind k that are counted in pool q                        integer
    single[k,c]  workers of kind k on the single node c                              integer
    nodes[c,p]   nodes of cell c that are filled by pattern p; of a single node      integer
                 whether anything is placed there (p = 0)
    evict[v]     1 when victim v makes room                                          binary
    freed[v,c]   1 when victim v makes room on single node c and something is        in [0, 1]
                 placed there

    max  sum_jo worth_jo choose[j,o]  -  sum_v cost_v evict[v]
         - w * (sum_c free_c sum_p nodes[c,p]  +  sum_vc held_vc freed[v,c]  -  sum_jo gpus_j choose[j,o])

    one_option    sum_o choose[j,o] <= 1                                             for each j with several options
    gang          sum_q pooled[k,q] + sum_c single[k,c] = sum_jo count_jok choose[j,o]    for each k
    supply        sum_{q' within q, k} pooled[k,q'] <= sum_{c in q, p} n_qp nodes[c,p]    for each q
    node_count    sum_p nodes[c,p] <= number of nodes of c                           for each c
    capacity      sum_{k: tier_k <= t} need_kr single[k,c]
                    <= limit_cr nodes[c,0] + sum_{v: tier_v < t} held_vcr evict[v]   for each single c, r, and tier t
    opened        sum_k gpus_k single[k,c] <= all_c nodes[c,0]                       for each single c with victims
    apart         sum_{k of name a} single[k,c] <= nodes[c,0]                        for each single c, name a
    freed_name    sum_{k of name a} single[k,c] <= evict[v]                          where v keeps the name a on c
    touched       freed[v,c] >= evict[v] + nodes[c,0] - 1                            for each v on c
    equals        choose[j,0] >= choose[j',0]                       j, j' with the same single option, j worth more
    in_order      nodes[c,0] >= nodes[c+1,0]                            neighbours, single nodes of one group

Exactness. *Options*: see `options.py`; each way to place a candidate makes use of one of its options, and is worth
what the best of these says. *Patterns* are the maximal fillings of a node, slots may stay empty (supply is an
inequality). Any feasible filling of the nodes is below some choice of maximal patterns, node by node; and any workers
below the supply of a choice can be seated in its slots, because a worker of kind k takes exactly one slot size in a
cell and workers of one slot size are interchangeable there. *Pools*: supply in each pool, those within it included,
is Hall's condition for seating the workers, because pools of one slot size are nested or disjoint. Kinds summed over
jobs lose nothing for the same reason. *Victims*: a candidate may use what victims of a lower tier free. These sets
are nested, so Hall's condition needs one row per tier: what kinds up to tier t take is at most what is free and what
evicted victims below t held. So integer points of the model and feasible placements are the same thing. The
objective's last term is the number of stranded GPUs (`objective.py`): idle devices of the nodes in use, and what
evictions add to them, less what is taken.

The solver is told nothing about the wall clock but a backstop; one thread and a fixed seed make answers reproducible.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyomo.environ as pyo
from pyomo.contrib.appsi.base import TerminationCondition
from pyomo.contrib.appsi.solvers import Highs
from pyomo.core.expr.numeric_expr import LinearExpression

from .cells import Cell, Layout, Plan
from .options import Demand
from .request import NO_LIMIT

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

Terms = list[tuple[float, Any]]


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

    def __init__(self, layout: Layout, weight: float) -> None:
        self.layout = layout
        self.scale = _SCALE / max((d.value for d in layout.demands if d.value > 0), default=1.0)
        self.weight = weight * self.scale
        self.pyomo = pyo.ConcreteModel()
        _variables(self)
        _one_option(self)
        _gang(self)
        _supply(self)
        _node_count(self)
        _capacity(self)
        _opened(self)
        _apart(self)
        _freed_name(self)
        _touched(self)
        _equals(self)
        _in_order(self)
        _objective(self)

    def start_from(self, plan: Plan) -> None:
        """Use a feasible plan as MIP start."""
        m = self.pyomo
        chosen = _best_of_equals(plan.chosen, self.layout.demands)
        values: list[tuple[Any, Any]] = [
            *((var, int(key in chosen)) for key, var in m.choose.items()),
            *((var, plan.pooled[key]) for key, var in m.pooled.items()),
            *((var, plan.single[key]) for key, var in m.single.items()),
            *((var, plan.nodes[key]) for key, var in m.nodes.items()),
            *((var, int(v in plan.evicted)) for v, var in m.evict.items()),
            *((var, int(v in plan.evicted and plan.nodes[c, 0] > 0)) for (v, c), var in m.freed.items()),
        ]
        for var, value in values:
            var.set_value(value, skip_validation=True)

    def read(self) -> Plan:
        m = self.pyomo
        return Plan(
            chosen={key for key, var in m.choose.items() if _integer(var)},
            pooled=_counts(m.pooled),
            single=_counts(m.single),
            nodes=_counts(m.nodes),
            evicted={v for v, var in m.evict.items() if _integer(var)},
        )


# ── variables ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _variables(model: Model) -> None:
    m, layout = model.pyomo, model.layout
    most: Counter[int] = Counter()
    for demand in layout.demands:
        of_one: Counter[int] = Counter()
        for option in demand.options:
            of_one |= Counter(dict(option.needs))
        most += of_one
    singles = [(c, layout.cells[c]) for c in layout.singles]
    m.choose = pyo.Var(
        [(j, o) for j, demand in enumerate(layout.demands) for o in range(len(demand.options))], domain=pyo.Binary
    )
    m.pooled = pyo.Var(
        [(k, q) for q, pool in enumerate(layout.pools) for k in pool.kinds],
        domain=pyo.NonNegativeIntegers,
        bounds=lambda _, k, q: (0, most[k]),
    )
    m.single = pyo.Var(
        [(k, c) for c, cell in singles for k in sorted(cell.group.slot_of)],
        domain=pyo.NonNegativeIntegers,
        bounds=lambda _, k, c: (0, most[k]),
    )
    m.nodes = pyo.Var(
        [(c, p) for c, cell in enumerate(layout.cells) for p in range(cell.columns)],
        domain=pyo.NonNegativeIntegers,
        bounds=lambda _, c, p: (0, len(layout.cells[c].node_ids)),
    )
    m.evict = pyo.Var(sorted({held.victim for _, cell in singles for held in cell.group.held}), domain=pyo.Binary)
    m.freed = pyo.Var([(v, c) for c, cell in singles for v in _gpus_held(cell)], bounds=(0, 1))


# ── constraints ────────────────────────────────────────────────────────────────────────────────────────────────────


def _one_option(model: Model) -> None:
    """A candidate is placed once."""
    m, demands = model.pyomo, model.layout.demands
    several = [j for j, demand in enumerate(demands) if len(demand.options) > 1]
    m.one_option = pyo.Constraint(
        several, rule=lambda _, j: (None, _linear((1, m.choose[j, o]) for o in range(len(demands[j].options))), 1)
    )


def _gang(model: Model) -> None:
    """All workers of a placed candidate, none of any other."""
    m = model.pyomo
    terms: dict[int, Terms] = {k: [] for k in range(len(model.layout.kinds))}
    for (k, _), var in (*m.pooled.items(), *m.single.items()):
        terms[k].append((1, var))
    for j, demand in enumerate(model.layout.demands):
        for o, option in enumerate(demand.options):
            for k, count in option.needs:
                terms[k].append((-count, m.choose[j, o]))
    m.gang = pyo.Constraint(range(len(model.layout.kinds)), rule=lambda _, k: (0, _linear(terms[k]), 0))


def _supply(model: Model) -> None:
    """Workers take slots that the chosen patterns have."""
    m, layout = model.pyomo, model.layout

    def rule(_: Any, q: int) -> Any:
        pool = layout.pools[q]
        workers = [(1, m.pooled[k, within]) for within in (*pool.inner, q) for k in layout.pools[within].kinds]
        slots = [
            (-way[pool.slot], m.nodes[c, p])
            for c in pool.cells
            for p, way in enumerate(layout.cells[c].patterns or ())
            if pool.slot in way
        ]
        return (None, _linear([*workers, *slots]), 0)

    m.supply = pyo.Constraint(range(len(layout.pools)), rule=rule)


def _node_count(model: Model) -> None:
    """Each node has one pattern at most."""
    m = model.pyomo

    def rule(_: Any, c: int) -> Any:
        cell = model.layout.cells[c]
        return (None, _linear((1, m.nodes[c, p]) for p in range(cell.columns)), len(cell.node_ids))

    m.node_count = pyo.Constraint(range(len(model.layout.cells)), rule=rule)


def _capacity(model: Model) -> None:
    """GPUs, cpu and memory of single nodes: one row per set of victims that make room for somebody there."""
    m, layout = model.pyomo, model.layout
    terms: dict[tuple[int, int, int], Terms] = {}
    for c in layout.singles:
        group = layout.cells[c].group
        for tier in _tiers(layout, c):
            freeing = [held for held in group.held if held.tier < tier]
            kinds = [(k, slot) for k, slot in sorted(group.slot_of.items()) if layout.kinds[k].tiers <= tier]
            for r, limit in enumerate((group.free, group.cpu_milli, group.memory_mib)):
                needs = [(slot[:3][r], m.single[k, c]) for k, slot in kinds if slot[:3][r]]
                if limit != NO_LIMIT and needs:
                    freed = [(-held.amounts[r], m.evict[held.victim]) for held in freeing if held.amounts[r]]
                    terms[c, tier, r] = [*needs, (-limit, m.nodes[c, 0]), *freed]
    m.capacity = pyo.Constraint(list(terms), rule=lambda _, *key: (None, _linear(terms[key]), 0))


def _tiers(layout: Layout, c: int) -> list[int]:
    """Tiers with a capacity row: of kinds for which the same victims make room the highest."""
    group = layout.cells[c].group
    highest: dict[int, int] = {}
    for tier in sorted({layout.kinds[k].tiers for k in group.slot_of}):
        highest[sum(1 for held in group.held if held.tier < tier)] = tier
    return sorted(highest.values())


def _opened(model: Model) -> None:
    """A single node is in use also where only what victims free is taken."""
    m, layout = model.pyomo, model.layout

    def rule(_: Any, c: int) -> Any:
        group = layout.cells[c].group
        used = [(slot[0], m.single[k, c]) for k, slot in sorted(group.slot_of.items())]
        return (None, _linear([*used, (-group.free - sum(h.gpus for h in group.held), m.nodes[c, 0])]), 0)

    m.opened = pyo.Constraint([c for c in layout.singles if layout.cells[c].group.held], rule=rule)


def _apart(model: Model) -> None:
    """Of an anti-affinity name one worker on a single node at most (patterns see to it themselves)."""
    m = model.pyomo
    named = {(c, name): workers for c, name, workers in _named_workers(model)}
    m.apart = pyo.Constraint(
        list(named), rule=lambda _, c, name: (None, _linear([*named[c, name], (-1, m.nodes[c, 0])]), 0)
    )


def _freed_name(model: Model) -> None:
    """Where a victim keeps a name on a node, it has to go before a worker of that name comes."""
    m, layout = model.pyomo, model.layout
    rows = {
        (c, name, held.victim): [*workers, (-1, m.evict[held.victim])]
        for c, name, workers in _named_workers(model)
        for held in layout.cells[c].group.held
        if held.anti_affinity == name and name in layout.cells[c].group.taken
    }
    m.freed_name = pyo.Constraint(list(rows), rule=lambda _, *key: (None, _linear(rows[key]), 0))


def _named_workers(model: Model) -> Iterator[tuple[int, str, Terms]]:
    """(single node, anti-affinity name, its workers there)."""
    m, layout = model.pyomo, model.layout
    for c in layout.singles:
        by_name: dict[str, Terms] = defaultdict(list)
        for k in sorted(layout.cells[c].group.slot_of):
            by_name[layout.kinds[k].anti_affinity].append((1, m.single[k, c]))
        yield from ((c, name, workers) for name, workers in sorted(by_name.items()) if name)


def _touched(model: Model) -> None:
    """What a victim frees on a node in use counts as idle devices of it."""
    m = model.pyomo
    m.touched = pyo.Constraint(
        list(m.freed),
        rule=lambda _, v, c: (None, _linear([(1, m.evict[v]), (1, m.nodes[c, 0]), (-1, m.freed[v, c])]), 1),
    )


def _equals(model: Model) -> None:
    """Of candidates with the same single option the more valuable ones come first: some optimum has it so, and it
    breaks ties."""
    m = model.pyomo
    pairs = [pair for members in _equal_needs(model.layout.demands) for pair in pairwise(members)]
    m.equals = pyo.Constraint(
        pairs, rule=lambda _, a, b: (None, _linear(((1, m.choose[b, 0]), (-1, m.choose[a, 0]))), 0)
    )


def _in_order(model: Model) -> None:
    """Single nodes of one group are used in their order."""
    m = model.pyomo
    cells = model.layout.cells
    pairs = [(c, c + 1) for c, (a, b) in enumerate(pairwise(cells)) if a.patterns is None and a.group is b.group]
    m.in_order = pyo.Constraint(
        pairs, rule=lambda _, a, b: (None, _linear(((1, m.nodes[b, 0]), (-1, m.nodes[a, 0]))), 0)
    )


# ── objective ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _objective(model: Model) -> None:
    """Worth of what is placed, less what is evicted, less the weight of what is stranded."""
    m, layout, weight = model.pyomo, model.layout, model.weight
    gpus = [[sum(layout.kinds[k].gpus * n for k, n in o.needs) for o in d.options] for d in layout.demands]
    worth = [
        (layout.demands[j].options[o].worth * model.scale + weight * gpus[j][o], var)
        for (j, o), var in m.choose.items()
    ]
    cost = [(-layout.victims.all[v].cost * model.scale, var) for v, var in m.evict.items()]
    touched = [(-weight * layout.cells[c].group.free, var) for (c, _), var in m.nodes.items()]
    freed = [(-weight * _gpus_held(layout.cells[c])[v], var) for (v, c), var in m.freed.items()]
    m.objective = pyo.Objective(expr=_linear([*worth, *cost, *touched, *freed]), sense=pyo.maximize)


def _gpus_held(cell: Cell) -> dict[int, int]:
    """GPUs of each victim on a single node."""
    total: dict[int, int] = defaultdict(int)
    for held in cell.group.held:
        total[held.victim] += held.gpus
    return dict(total)


def _linear(terms: Iterable[tuple[float, Any]]) -> Any:
    pairs = list(terms)
    return LinearExpression(constant=0, linear_coefs=[a for a, _ in pairs], linear_vars=[var for _, var in pairs])


def _equal_needs(demands: list[Demand]) -> list[list[int]]:
    """Indexes of candidates with the same single option, most valuable first."""
    same: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for j in sorted(range(len(demands)), key=lambda j: (-demands[j].value, demands[j].rank)):
        if len(demands[j].options) == 1:
            same[demands[j].options[0].needs].append(j)
    return [members for _, members in sorted(same.items())]


def _best_of_equals(chosen: set[tuple[int, int]], demands: list[Demand]) -> set[tuple[int, int]]:
    """As many of each set of equals, but its most valuable ones."""
    found = {(j, o) for j, o in chosen if len(demands[j].options) > 1}
    for members in _equal_needs(demands):
        found.update((j, 0) for j in members[: sum(1 for member in members if (member, 0) in chosen)])
    return found


def _counts(variables: Any) -> Counter[Any]:
    return Counter({key: n for key, var in variables.items() if (n := _integer(var))})


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
    options: dict[str, Any] = {
        "threads": 1,
        "random_seed": seed,
        "mip_abs_gap": 0.0,
        "presolve": "on" if presolve else "off",
        # Cheap, and with them the start is good enough sooner (measured).
        "mip_heuristic_run_zi_round": True,
        "mip_heuristic_run_shifting": True,
        # These models are small and nearly tight: many cuts and long probing cost more than they save (measured).
        "mip_heuristic_run_root_reduced_cost": False,
        "mip_pool_soft_limit": 100,
        "mip_pool_age_limit": 5,
        "mip_pscost_minreliable": 2,
    }
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
