"""Priorities written as formulae: how they are read, what is refused, and the order that they give."""

from __future__ import annotations

import math

import numpy as np
import pytest
from core_builder import Pool, placed

from streamsched.errors import UserError
from streamsched.policy.expression import ByExpression, Expression, evaluate, lint, log1p_abs, parse
from streamsched.policy.features import INDEX, NAMES


def value(text: str, **given: float) -> float:
    row = np.zeros((1, len(NAMES)), np.float32)
    for name, number in given.items():
        row[0, INDEX[name]] = number
    return float(evaluate(parse(text), row)[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpus + 2 * wait_s", 13.0),
        ("gpus - 2 - wait_s", -4.0),
        ("gpus - (2 - wait_s)", 6.0),
        ("gpus / wait_s / 2", 0.3),
        ("-gpus * -2", 6.0),
        ("min(gpus, wait_s) - max(gpus, wait_s)", -2.0),
        ("sqrt(neg(gpus) - 6)", 3.0),
        ("log1p(1 - gpus - 1)", math.log(4.0)),
        ("if_less(gpus, wait_s, 10, 20) + if_less(wait_s, gpus, 1, 2)", 12.0),
        ("gpus / (wait_s - 5)", 1.0),
        ("gpus * 1e99 * 1e99", 1e100),
        ("-gpus / (1e-99 * 1e-99)", -1e100),
    ],
)
def test_values(text: str, expected: float) -> None:
    assert value(text, gpus=3.0, wait_s=5.0) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wait / 2", "no feature 'wait'; did you mean 'wait_s'"),
        ("zzz", "there are gpus, nodes, run_s"),
        ("mn(gpus, 2)", "no function 'mn'; did you mean 'min'"),
        ("min(gpus)", "min takes 2 operands, not 1"),
        ("sqrt(gpus, 2)", "sqrt takes 1 operand, not 2"),
        ("gpus +", "invalid syntax at character"),
        ("", "invalid syntax at character"),
        ("gpus ** 2", r"'gpus \*\* 2' is not numbers"),
        ("+gpus", r"'\+gpus' is not numbers"),
        ("min(gpus, b=2)", "is not numbers"),
        ("__import__('os').system('x')", "is not numbers"),
        ("'gpus'", "is not numbers"),
        ("True * gpus", "'True' is not numbers"),
        ("1e400 * gpus", "is beyond 1e"),
        ("gpus / 0", "division by 0.0, which is always 0"),
        ("gpus / (free_gpus - free_gpus)", "division by free_gpus - free_gpus, which is always 0"),
        ("1 + 2", "nothing of a job is in it"),
        ("free_gpus / load", "nothing of a job is in it"),
        ("gpus" + " + 1" * 40, "41 levels deep, 32 at most"),
        ("-" * 5_000 + "gpus", "nested too deeply"),
        ("(" * 300 + "gpus" + ")" * 300, "too many nested parentheses"),
        ("gpus + " * 4_000 + "gpus", "more than 20000 characters"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text)


def test_wide_programs_are_refused() -> None:
    text = "gpus"
    for _ in range(9):
        text = f"({text}) * ({text})"
    with pytest.raises(UserError, match="1023 functions and operands, 512 at most"):
        parse(text)


@pytest.mark.parametrize("codes", [(), (0,), (100, 100), (100, 0), (99,), (100, 115, 0), (1000,), (-1,), (100, 10)])
def test_codes_that_are_no_program(codes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"code|operand|value"):
        Expression(codes)


@pytest.mark.parametrize("constant", [math.nan, math.inf, 1e101])
def test_constants_are_finite(constant: float) -> None:
    with pytest.raises(ValueError, match="constant"):
        Expression((100, 1000, 0), (constant,))


def test_the_logarithm_is_one() -> None:
    x = np.concatenate([np.geomspace(1e-300, 1e100, 10_001), [0.0, 0.5, math.sqrt(2.0) - 1.0, 2.0**53]])
    assert np.abs(log1p_abs(-x) - np.log1p(x)).max() < 1e-13
    assert log1p_abs(x) == pytest.approx(np.log1p(x), rel=1e-15, abs=0)


@pytest.mark.parametrize(
    ("text", "static"),
    [
        ("-run_s * gpus", True),
        ("spread + nodes + work_gpu_s", True),
        ("weight / gpus", False),
        ("wait_s", False),
        ("gpus * load", False),
    ],
)
def test_what_never_changes_is_ranked_once(text: str, static: bool) -> None:
    assert ByExpression("mine", parse(text)).static is static


def test_the_core_starts_jobs_in_the_order_of_an_expression() -> None:
    """The longest wait first is the order of arrival; once the queue is long, the smallest go first."""
    pool = Pool(ranker=ByExpression("mine", parse("if_less(queue_length, 4, wait_s, -gpus)")))
    pool.node("a", 8)
    pool.arrive("first", 6)
    pool.later(1.0)
    pool.arrive("second", 5)
    pool.arrive("third", 3)
    assert list(placed(pool.solve())) == ["first"]
    for number in range(2):
        pool.arrive(f"more{number}", 8)
    pool.start("first")
    pool.complete("first")
    assert list(placed(pool.solve())) == ["third", "second"]


def test_a_rule_that_orders_nothing_is_refused() -> None:
    lint(parse("gpus"))
    with pytest.raises(UserError, match="nothing of a job"):
        ByExpression("mine", Expression((109,)))
