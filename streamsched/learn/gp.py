"""Priorities evolved by genetic programming (Koza, 1992): trees are varied by DEAP's operators, run in the compiled
simulation, and selected by NSGA-II (Deb et al., IEEE TEVC 6(2), 2002).

Four objectives, all minimised: the mean and the largest weighted wait, each as a ratio to what `base` has on the same
instance, unused GPU time, and the length of the tree. Each generation is judged on other instances, parents together
with their children, so that nobody lives on by luck with one of them. Equal instances and an equal configuration give
an equal result, whatever the number of threads.

Of EVO-GP, where the objectives come from, only the abstract is public: operators and numbers here are our own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec
import numpy as np

from streamsched.errors import UserError
from streamsched.policy.expression import ARITY, CONSTANT, FEATURE, Expression, is_sound, parse
from streamsched.policy.features import FEATURES_VERSION, NAMES, Floats
from streamsched.sim.fast import Ints
from streamsched.sim.scored import MEASURES, Instance, measure

try:
    from deap import gp
except ModuleNotFoundError as error:
    if error.name != "deap":
        raise
    raise UserError("genetic programming needs deap: pip install 'streamsched[train]'") from None

Tree = Any
"""deap.gp.PrimitiveTree"""

SEEDS: Final = (
    "wait_s",
    "-run_s",
    "-work_gpu_s",
    "-gpus",
    "wait_s / run_s",
    "weight / work_gpu_s",
    "-log1p(run_s) * gpus",
    "wait_s * wait_s * wait_s / (run_s * run_s * run_s) * gpus",
)
"""Classic rules to begin with: FCFS, SJF, QSSF, smallest, WFP3 and their like."""
WAIT, WAIT_MAX, UNUSED, LENGTH = range(4)
"""The objectives."""
_MEAN, _MAX, _UTILISATION = (MEASURES.index(m) for m in ("weighted_wait_s", "weighted_wait_max_s", "utilisation"))
_LEAST_WAIT_S: Final = 1.0
"""Waits count from here in ratios, so that instances without waiting do not decide."""


@dataclass(frozen=True)
class GpConfig:
    population: int = 500
    generations: int = 40
    instances: int = 4
    """By which each generation is judged."""
    seed: int = 0
    crossover: float = 0.7
    """Share of the children that have two parents; the others are mutated."""
    depth_max: int = 9
    length_max: int = 48
    base: str = "-run_s"
    seeds: tuple[str, ...] = SEEDS


@dataclass(frozen=True)
class Found:
    """An expression of the last front, by the means over all instances."""

    expression: str
    wait: float
    """Ratio to the base rule's."""
    wait_max: float
    utilisation: float
    length: int


@dataclass(frozen=True)
class Evolved:
    config: GpConfig
    front: tuple[Found, ...]
    """No other of them is better in all: least mean wait first."""
    history: tuple[tuple[float, float, float], ...]
    """Per generation the least mean wait, least largest wait and highest utilisation, on its instances."""
    schedules: int
    """How many were made."""

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode({"features_version": FEATURES_VERSION, **asdict(self)}))


# ── trees ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _constant() -> float:
    """Of either sign, from hundredths to a million."""
    return float(f"{random.choice((-1.0, 1.0)) * 10.0 ** random.uniform(-2.0, 6.0):.3g}")


def _made_of() -> Any:
    """Functions are named by their code, features by their own."""
    primitives = gp.PrimitiveSet("priority", 0)
    for code, arity in enumerate(ARITY):
        primitives.addPrimitive(_constant, arity, name=f"f{code}")
    for name in NAMES:
        primitives.addTerminal(name, name=name)
    primitives.addEphemeralConstant("streamsched_constant", _constant)
    return primitives


_PRIMITIVES: Final = _made_of()
_CODES: Final = {f"f{code}": code for code in range(len(ARITY))} | {n: FEATURE + i for i, n in enumerate(NAMES)}


def expression_of(tree: Tree) -> Expression:
    """The program of a tree."""
    stack: list[list[int | float]] = []
    for node in reversed(tree):
        operands = [stack.pop() for _ in range(node.arity)]
        code: int | float = _CODES[node.name] if node.name in _CODES else float(node.value)
        stack.append([*(part for operand in operands for part in operand), code])
    codes: list[int] = []
    constants: list[float] = []
    for part in stack[0]:
        if isinstance(part, float):
            codes.append(CONSTANT + len(constants))
            constants.append(part)
        else:
            codes.append(part)
    return Expression(tuple(codes), tuple(constants))


def tree_of(expression: Expression) -> Tree:
    """The other way round."""
    functions = {primitive.name: primitive for primitive in _PRIMITIVES.primitives[_PRIMITIVES.ret]}
    features = {terminal.name: terminal for terminal in _PRIMITIVES.terminals[_PRIMITIVES.ret] if _is_feature(terminal)}
    stack: list[list[Any]] = []
    for code in expression.codes:
        if code >= CONSTANT:
            stack.append([gp.Terminal(expression.constants[code - CONSTANT], False, _PRIMITIVES.ret)])
        elif code >= FEATURE:
            stack.append([features[NAMES[code - FEATURE]]])
        else:
            operands = stack[-ARITY[code] :]
            del stack[-ARITY[code] :]
            stack.append([functions[f"f{code}"], *(node for operand in operands for node in operand)])
    return gp.PrimitiveTree(stack[0])


def _is_feature(terminal: Any) -> bool:
    return getattr(terminal, "name", None) in _CODES


def random_expressions(count: int, config: GpConfig = GpConfig()) -> list[Expression]:
    """Distinct ones, grown or full with 2 to 6 levels ("ramped half and half": Koza, section 6.2)."""
    with _seeded(config.seed):
        return [individual.expression for individual in _distinct(_random_trees(config), count)]


def _random_trees(config: GpConfig) -> Iterator[Tree]:
    """Without end."""
    while True:
        tree = gp.PrimitiveTree(gp.genHalfAndHalf(_PRIMITIVES, 1, 5))
        if _is_small(tree, config):
            yield tree


def _is_small(tree: Tree, config: GpConfig) -> bool:
    return len(tree) <= config.length_max and tree.height < config.depth_max


@dataclass(frozen=True, eq=False)
class _Individual:
    tree: Tree
    expression: Expression


def _distinct(trees: Iterator[Tree], count: int) -> list[_Individual]:
    """The first so many that order anything, none twice."""
    found: dict[Expression, _Individual] = {}
    for tree in trees:
        expression = expression_of(tree)
        if expression not in found and is_sound(expression):
            found[expression] = _Individual(tree, expression)
            if len(found) == count:
                break
    return list(found.values())


# ── variation ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _new_branch(pset: Any, type_: Any) -> list[Any]:
    branch: list[Any] = gp.genHalfAndHalf(pset, 0, 2, type_)
    return branch


_MUTATIONS: Final[tuple[Callable[[Tree], tuple[Tree]], ...]] = (
    lambda tree: gp.mutUniform(tree, _new_branch, _PRIMITIVES),
    lambda tree: gp.mutNodeReplacement(tree, _PRIMITIVES),
    lambda tree: gp.mutInsert(tree, _PRIMITIVES),
    lambda tree: gp.mutShrink(tree),
    lambda tree: _move_constants(tree),
)


def _move_constants(tree: Tree) -> tuple[Tree]:
    """Each by a factor around 1."""
    for place, node in enumerate(tree):
        if node.arity == 0 and not _is_feature(node):
            moved = float(f"{float(node.value) * random.lognormvariate(0.0, 0.5):.3g}")
            tree[place] = gp.Terminal(moved, False, _PRIMITIVES.ret)
    return (tree,)


def _child(parents: Sequence[_Individual], pick: Callable[[], int], config: GpConfig) -> Tree:
    """A parent as it is, where the child would be too large."""
    before = parents[pick()].tree
    if random.random() < config.crossover:
        other = parents[pick()].tree
        tree = gp.cxOnePoint(_copied(before), _copied(other))[0] if len(before) > 1 and len(other) > 1 else other
    else:
        tree = random.choice(_MUTATIONS)(_copied(before))[0]
    return tree if _is_small(tree, config) else before


def _copied(tree: Tree) -> Tree:
    """Nodes are never changed in place, so that they may be shared."""
    return gp.PrimitiveTree(list(tree))


# ── selection ────────────────────────────────────────────────────────────────────────────────────────────────────────


def fronts(objectives: Floats) -> Ints:
    """[individual] number of its front, 0 for those that nobody dominates; `objectives` [individual, objective]."""
    no_worse = np.asarray((objectives[:, None, :] <= objectives[None, :, :]).all(axis=2))
    dominates = no_worse & ~no_worse.T
    found = np.full(len(objectives), -1, np.int64)
    left, number = dominates.sum(axis=0), 0
    while (found < 0).any():
        front = (found < 0) & (left == 0)
        found[front] = number
        left = left - dominates[front].sum(axis=0)
        number += 1
    return found


def crowding(objectives: Floats, front: Ints) -> Floats:
    """[individual] distance to the neighbours in its front, infinite at the ends."""
    found = np.zeros(len(objectives))
    for number in range(int(front.max()) + 1):
        members = np.flatnonzero(front == number)
        for column in objectives[members].T:
            order = members[np.argsort(column, kind="stable")]
            values = np.sort(column)
            width = values[-1] - values[0]
            found[order[[0, -1]]] = np.inf
            if width > 0:
                found[order[1:-1]] += (values[2:] - values[:-2]) / width
    return found


def _ranked(objectives: Floats) -> Ints:
    """The best first: by front, then by distance; ties by place."""
    front = fronts(objectives)
    return np.lexsort((-crowding(objectives, front), front)).astype(np.int64)


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def objectives_of(measures: Floats, base: Floats, lengths: Sequence[int]) -> Floats:
    """[expression, objective] of measures [instance, expression, measure] and those of the base [instance, measure]."""
    floor = _LEAST_WAIT_S
    ratios = [(measures[..., m] + floor) / (base[:, m, None] + floor) for m in (_MEAN, _MAX)]
    unused = 1.0 - measures[..., _UTILISATION]
    columns = [ratios[0].mean(axis=0), ratios[1].mean(axis=0), unused.mean(axis=0), np.array(lengths, np.float64)]
    return np.stack(columns, axis=1)


class _Judge:
    """Measures expressions on instances, and counts."""

    def __init__(self, instances: Sequence[Instance], config: GpConfig, threads: int | None) -> None:
        self.instances, self._threads = instances, threads
        self._base = measure(instances, [parse(config.base)], threads)[:, 0]
        self.schedules = len(instances)

    def __call__(self, individuals: Sequence[_Individual], which: Sequence[int]) -> Floats:
        expressions = [individual.expression for individual in individuals]
        self.schedules += len(which) * len(expressions)
        measures = measure([self.instances[place] for place in which], expressions, self._threads)
        return objectives_of(measures, self._base[list(which)], [len(e.codes) for e in expressions])


def evolve(
    instances: Sequence[Instance],
    config: GpConfig = GpConfig(),
    threads: int | None = None,
    on_generation: Callable[[int, Floats], None] | None = None,
) -> Evolved:
    """The front after `generations`; `on_generation` is told each number and the objectives [individual, objective].

    Raises UserError without instances, or for seeds that are no expressions.
    """
    if not instances:
        raise UserError("genetic programming needs at least one instance")
    judge = _Judge(instances, config, threads)
    history = []
    with _seeded(config.seed):
        population = _distinct(_with_seeds(config), config.population)
        for generation in range(config.generations):
            family = population if generation == 0 else _with_children(population, config)
            first = generation * config.instances
            which = [(first + i) % len(instances) for i in range(min(config.instances, len(instances)))]
            objectives = judge(family, which)
            chosen = _ranked(objectives)[: config.population]
            population, objectives = [family[place] for place in chosen.tolist()], objectives[chosen]
            least = objectives.min(axis=0)
            history.append((float(least[WAIT]), float(least[WAIT_MAX]), 1.0 - float(least[UNUSED])))
            if on_generation is not None:
                on_generation(generation, objectives)
    final = judge(population, range(len(instances)))
    return Evolved(config, _front(population, final), tuple(history), judge.schedules)


def _with_seeds(config: GpConfig) -> Iterator[Tree]:
    yield from (tree_of(parse(text)) for text in config.seeds)
    yield from _random_trees(config)


def _with_children(population: Sequence[_Individual], config: GpConfig) -> list[_Individual]:
    """The population, the best first, and as many children; parents by binary tournament."""

    def trees() -> Iterator[Tree]:
        yield from (individual.tree for individual in population)
        for _ in range(4 * len(population)):
            yield _child(population, pick, config)
        yield from _random_trees(config)

    def pick() -> int:
        return min(random.randrange(len(population)), random.randrange(len(population)))

    return _distinct(trees(), 2 * config.population)


def _front(population: Sequence[_Individual], objectives: Floats) -> tuple[Found, ...]:
    found = [
        Found(str(population[i].expression), row[WAIT], row[WAIT_MAX], 1.0 - row[UNUSED], int(row[LENGTH]))
        for i, row in ((i, objectives[i].tolist()) for i in np.flatnonzero(fronts(objectives) == 0).tolist())
    ]
    return tuple(sorted(found, key=lambda one: (one.wait, one.wait_max, one.length, one.expression)))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """DEAP draws from the global generator, which is given back as it was."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
