"""Priorities as formulae: text that people and genetic programming write, and a postfix program that both the live
scheduler and the compiled simulation run, with results equal in bits.

    min(wait_s, 3600) / work_gpu_s + if_less(free_gpus, 8, -gpus, 0)

A program is evaluated in float64 on the float32 features (`features.py`). Every function has a finite result for finite
arguments, so no score is ever NaN or infinite:

- x / 0 is 1 (Koza, "Genetic programming", MIT Press 1992, section 6.1.1); products and quotients are cut to +-1e100,
- sqrt(x) is that of |x|, log1p(x) that of |x|,
- if_less(a, b, c, d) is c where a < b, else d.

The highest score goes first.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from streamsched.core.cluster import ClusterState
from streamsched.core.model import Job
from streamsched.errors import UserError

from .features import FEATURES, INDEX, NAMES, Features, Float32s, Floats, Number, Scope

ADD, SUB, MUL, DIV, MIN, MAX, NEG, SQRT, LOG1P, IF_LESS = range(10)
"""Operation codes."""
ARITY: Final = (2, 2, 2, 2, 2, 2, 1, 1, 1, 4)
"""By operation code."""
FEATURE: Final = 100
"""A code from here on is a feature: FEATURE + its place in `FEATURES`."""
CONSTANT: Final = 1_000
"""A code from here on is a constant: CONSTANT + its place among the program's constants."""

LIMIT: Final = 1e100
"""No product, quotient or constant is beyond."""
MAX_DEPTH: Final = 32
MAX_LENGTH: Final = 512
"""Functions, features and constants of a program."""
_MAX_TEXT: Final = 20_000

_CALLS: Final = {"min": MIN, "max": MAX, "neg": NEG, "sqrt": SQRT, "log1p": LOG1P, "if_less": IF_LESS}
_CALL_NAMES: Final = {code: name for name, code in _CALLS.items()}
_OPERATORS: Final[dict[type[ast.operator], int]] = {ast.Add: ADD, ast.Sub: SUB, ast.Mult: MUL, ast.Div: DIV}
_SIGNS: Final = {ADD: ("+", 1), SUB: ("-", 1), MUL: ("*", 2), DIV: ("/", 2)}
"""Sign and how strongly it binds."""
_ATOM: Final = 3


@dataclass(frozen=True)
class Expression:
    """A program: operands before their function. Raises ValueError for codes that are no program."""

    codes: tuple[int, ...]
    constants: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        shape(self.codes, len(self.constants))
        if not all(abs(value) <= LIMIT for value in self.constants):
            raise ValueError("a constant is not finite or beyond the limit")

    @property
    def depth(self) -> int:
        """Levels of the tree; 1 for a lone feature."""
        return shape(self.codes, len(self.constants))[0]

    @property
    def stack(self) -> int:
        """Values that its evaluation holds at once."""
        return shape(self.codes, len(self.constants))[1]

    @property
    def features(self) -> frozenset[str]:
        """Names of those in it."""
        return frozenset(NAMES[code - FEATURE] for code in self.codes if FEATURE <= code < CONSTANT)

    def __str__(self) -> str:
        """As text, from which `parse` makes the same program."""
        stack: list[tuple[str, int]] = []
        for code in self.codes:
            if code >= CONSTANT:
                stack.append((repr(self.constants[code - CONSTANT]), _ATOM))
            elif code >= FEATURE:
                stack.append((NAMES[code - FEATURE], _ATOM))
            else:
                operands = stack[-ARITY[code] :]
                del stack[-ARITY[code] :]
                stack.append(_application(code, operands))
        return stack[0][0]


def _application(code: int, operands: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Text of a function of operands, each with how strongly it binds."""
    if code not in _SIGNS:
        return f"{_CALL_NAMES[code]}({', '.join(text for text, _ in operands)})", _ATOM
    sign, strength = _SIGNS[code]
    (left, left_strength), (right, right_strength) = operands
    left = f"({left})" if left_strength < strength else left
    right = f"({right})" if right_strength <= strength else right
    return f"{left} {sign} {right}", strength


def shape(codes: Sequence[int], constants: int) -> tuple[int, int]:
    """(depth, most values on the stack); raises ValueError for codes that are no program."""
    depths: list[int] = []
    most = 0
    for code in codes:
        if not (0 <= code < len(ARITY) or 0 <= code - FEATURE < len(FEATURES) or 0 <= code - CONSTANT < constants):
            raise ValueError(f"no operation has the code {code}")
        arity = ARITY[code] if code < FEATURE else 0
        if len(depths) < arity:
            raise ValueError("a function lacks an operand")
        deepest = max(depths[len(depths) - arity :], default=0) if arity else 0
        del depths[len(depths) - arity :]
        depths.append(deepest + 1)
        most = max(most, len(depths))
    if len(depths) != 1:
        raise ValueError(f"one value expected, not {len(depths)}")
    return depths[0], most


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse(text: str) -> Expression:
    """The program of an infix text, linted. Raises UserError that says what is wrong."""
    if len(text) > _MAX_TEXT:
        raise UserError(f"expression: more than {_MAX_TEXT} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        maker = _Maker()
        maker.visit(tree)
    except SyntaxError as error:
        raise UserError(f"expression: {error.msg} at character {error.offset}") from None
    except (RecursionError, MemoryError, ValueError):
        raise UserError(f"expression: nested too deeply or not readable; {MAX_DEPTH} levels at most") from None
    _refuse_too_large(maker.codes, len(maker.constants))
    found = Expression(tuple(maker.codes), tuple(maker.constants))
    lint(found)
    return found


def lint(expression: Expression) -> None:
    """Raises UserError for a program that is too large, orders nothing, or divides by what is always 0."""
    _refuse_too_large(expression.codes, len(expression.constants))
    if all(FEATURES[INDEX[name]].scope is Scope.CLUSTER for name in expression.features):
        raise UserError(f"expression: nothing of a job is in it, so all jobs are equal; there are {', '.join(NAMES)}")
    starts: list[int] = []
    for place, code in enumerate(expression.codes):
        if code >= FEATURE:
            starts.append(place)
            continue
        operands = [*starts[len(starts) - ARITY[code] :], place]
        del starts[len(starts) - ARITY[code] + 1 :]
        if code == DIV and _always_zero(expression, slice(operands[0], operands[1]), slice(operands[1], place)):
            divisor = Expression(expression.codes[operands[1] : place], expression.constants)
            raise UserError(f"expression: division by {divisor}, which is always 0")


def is_sound(expression: Expression) -> bool:
    """Whether `lint` lets it pass."""
    try:
        lint(expression)
    except UserError:
        return False
    return True


def _always_zero(expression: Expression, above: slice, below: slice) -> bool:
    """Whether the operand `below` is the number 0 or x - x."""
    codes = expression.codes[below]
    if len(codes) == 1 and codes[0] >= CONSTANT:
        return expression.constants[codes[0] - CONSTANT] == 0.0
    half = (len(codes) - 1) // 2
    return (
        codes[-1] == SUB
        and len(codes) % 2 == 1
        and codes[:half] == codes[half:-1]
        and _is_program(codes[:half], expression)
    )


def _is_program(codes: Sequence[int], within: Expression) -> bool:
    try:
        shape(codes, len(within.constants))
    except ValueError:
        return False
    return True


def _refuse_too_large(codes: Sequence[int], constants: int) -> None:
    if len(codes) > MAX_LENGTH:
        raise UserError(f"expression: {len(codes)} functions and operands, {MAX_LENGTH} at most")
    depth = shape(codes, constants)[0]
    if depth > MAX_DEPTH:
        raise UserError(f"expression: {depth} levels deep, {MAX_DEPTH} at most")


class _Maker(ast.NodeVisitor):
    """Appends the codes of what it visits."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.constants: list[float] = []

    def generic_visit(self, node: ast.AST) -> None:
        raise UserError(f"expression: {ast.unparse(node)!r} is not numbers, features, + - * / and {', '.join(_CALLS)}")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) not in _OPERATORS:
            self.generic_visit(node)
        self.visit(node.left)
        self.visit(node.right)
        self.codes.append(_OPERATORS[type(node.op)])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.USub):
            self.generic_visit(node)
        if isinstance(node.operand, ast.Constant):
            self._constant(node.operand, -1.0)
        else:
            self.visit(node.operand)
            self.codes.append(NEG)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._constant(node, 1.0)

    def _constant(self, node: ast.Constant, sign: float) -> None:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            self.generic_visit(node)
        if not abs(node.value) <= LIMIT:  # type: ignore[arg-type]
            raise UserError(f"expression: the number {ast.unparse(node)} is beyond {LIMIT:g}")
        self.codes.append(CONSTANT + len(self.constants))
        self.constants.append(sign * float(node.value))  # type: ignore[arg-type]

    def visit_Name(self, node: ast.Name) -> None:
        if node.id not in INDEX:
            raise _unknown("feature", node.id, NAMES)
        self.codes.append(FEATURE + INDEX[node.id])

    def visit_Call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Name) or node.keywords:
            self.generic_visit(node)
        name = node.func.id  # type: ignore[attr-defined]
        if name not in _CALLS:
            raise _unknown("function", name, tuple(_CALLS))
        arity = ARITY[_CALLS[name]]
        if len(node.args) != arity:
            raise UserError(f"expression: {name} takes {arity} operand{'s' * (arity > 1)}, not {len(node.args)}")
        for operand in node.args:
            self.visit(operand)
        self.codes.append(_CALLS[name])


def _unknown(what: str, name: str, known: Sequence[str]) -> UserError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return UserError(f"expression: no {what} {name!r}; {hint}")


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────

LN2: Final = math.log(2.0)
SQRT2: Final = math.sqrt(2.0)
MANTISSA: Final = (1 << 52) - 1
ONE: Final = 1023 << 52
"""The bits of 1.0 in float64: exponent of 0 and no mantissa."""


SERIES: Final = (1 / 21, 1 / 19, 1 / 17, 1 / 15, 1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3)


def log_series(mantissa: Number) -> Number:
    """ln of numbers in [sqrt(1/2), sqrt(2)), by the series of atanh; also compiled by the simulation, for numbers."""
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    rest = z * SERIES[0]
    for coefficient in SERIES[1:]:
        rest = (rest + coefficient) * z
    return 2.0 * s * (1.0 + rest)


def log1p_abs(x: Floats) -> Floats:
    """ln(1 + |x|), by exact operations alone: libraries' logarithms differ in the last bit from machine to machine."""
    x = np.abs(x)
    y = 1.0 + x
    bits = y.view(np.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & MANTISSA) | ONE).view(np.float64)
    high = mantissa >= SQRT2
    mantissa = np.where(high, 0.5 * mantissa, mantissa)
    exponent = np.where(high, exponent + 1, exponent)
    # What the rounding of 1 + |x| lost.
    lost = (x - (y - 1.0)) / y
    return np.asarray(exponent * LN2 + log_series(mantissa) + lost)


def _cut(x: Floats) -> Floats:
    return np.where(x < LIMIT, np.where(x > -LIMIT, x, -LIMIT), LIMIT)


def _quotient(a: Floats, b: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return _cut(np.where(b == 0.0, 1.0, a / b))


def _apply(code: int, operands: list[Floats]) -> Floats:
    a, b = operands[0], operands[-1]
    if code == ADD:
        return a + b
    if code == SUB:
        return a - b
    if code == MUL:
        return _cut(a * b)
    if code == DIV:
        return _quotient(a, b)
    if code == MIN:
        return np.where(b < a, b, a)
    if code == MAX:
        return np.where(b > a, b, a)
    if code == NEG:
        return -a
    if code == SQRT:
        return np.asarray(np.sqrt(np.abs(a)))
    if code == LOG1P:
        return log1p_abs(a)
    return np.where(a < operands[1], operands[2], operands[3])


def evaluate(expression: Expression, features: Float32s) -> Floats:
    """[job] scores of [job, feature]; equal in bits to those of the compiled simulation."""
    stack: list[Floats] = []
    for code in expression.codes:
        if code >= CONSTANT:
            stack.append(np.full(len(features), expression.constants[code - CONSTANT]))
        elif code >= FEATURE:
            stack.append(features[:, code - FEATURE].astype(np.float64))
        else:
            operands = stack[-ARITY[code] :]
            del stack[-ARITY[code] :]
            stack.append(_apply(code, operands))
    return stack[0]


_NEVER_CHANGE: Final = frozenset(f.name for f in FEATURES if f.scope is Scope.FIXED) - {"weight"}


class ByExpression:
    """The rule of an expression. `features` are shared where several rules look at the same queue."""

    def __init__(self, name: str, expression: Expression, features: Features | None = None) -> None:
        lint(expression)
        self.name, self.expression = name, expression
        self.static = expression.features <= _NEVER_CHANGE
        self._features = features or Features()

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        found: list[float] = evaluate(self.expression, self._features(jobs, state, now)).tolist()
        return found
