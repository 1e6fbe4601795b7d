"""Random programs: text and program are one, no score is ever NaN, and the compiled interpreter gives the same bits."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from streamsched.policy.expression import ARITY, CONSTANT, FEATURE, LIMIT, Expression, evaluate, is_sound, parse
from streamsched.policy.features import FEATURES, FIXED, INDEX, Float32s, Floats, fragmentation, largest_free, load
from streamsched.sim import scored_kernel as kernel

CONSTANTS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0]), st.floats(-LIMIT, LIMIT))
VALUES = st.one_of(
    st.sampled_from([0.0, 1.0, 8.0, 86_400.0]),
    st.floats(0, 1e9, width=32),
    st.floats(-(2.0**120), 2.0**120, width=32),
)


@st.composite
def programs(draw: st.DrawFn) -> Expression:
    """Any program of up to about 40 codes, sensible or not."""
    codes: list[int] = []
    constants: list[float] = []
    height = 0
    for _ in range(draw(st.integers(1, 30))):
        usable = [code for code, arity in enumerate(ARITY) if arity <= height]
        if usable and draw(st.booleans()):
            code = draw(st.sampled_from(usable))
            height -= ARITY[code] - 1
        elif draw(st.integers(0, 3)):
            code = FEATURE + draw(st.integers(0, len(FEATURES) - 1))
            height += 1
        else:
            code = CONSTANT + len(constants)
            constants.append(draw(CONSTANTS))
            height += 1
        codes.append(code)
    codes += [draw(st.integers(0, 5)) for _ in range(height - 1)]
    return Expression(tuple(codes), tuple(constants))


@st.composite
def vectors(draw: st.DrawFn) -> tuple[Floats, float, Float32s]:
    """(submission times, now, features [job, feature]) of waiting jobs, any numbers in their features."""
    count = draw(st.integers(1, 9))
    now = draw(st.floats(0, 1e7))
    submit = np.array(draw(st.lists(st.floats(0, now), min_size=count, max_size=count)))
    found = np.zeros((count, len(FEATURES)), np.float32)
    for place in FIXED:
        found[:, place] = draw(st.lists(VALUES, min_size=count, max_size=count))
    found[:, INDEX["wait_s"]] = now - submit
    for place in range(INDEX["free_gpus"], len(FEATURES)):
        found[:, place] = draw(VALUES)
    return submit, now, found


@njit(error_model="numpy")
def compiled(instance, codes, constants, stack, cluster, now):  # type: ignore[no-untyped-def]
    """Scores by the loop's own interpreter."""
    world = kernel._world(instance, stack)
    world.cluster[:] = cluster
    program = kernel._staged(world, codes, constants)
    kernel._evaluate(world, program, 0, program.length, world.everybody, world.gpus.shape[0], now)
    return world.stack[0].copy()


@given(expression=programs(), vector=vectors())
def test_the_compiled_interpreter_gives_the_same_bits(
    expression: Expression, vector: tuple[Floats, float, Float32s]
) -> None:
    submit, now, rows = vector
    expected = evaluate(expression, rows)
    assert np.isfinite(expected).all()
    fixed = np.ascontiguousarray(rows[:, : len(FIXED)].T.astype(np.float64))
    gpus = np.ones(len(submit), np.int64)
    instance = kernel.Instance(submit, np.ones(len(submit)), gpus, fixed, np.array([8]), np.inf, 0)
    codes, constants = np.array(expression.codes, np.int16), np.array(expression.constants, np.float64)
    cluster = rows[0, INDEX["free_gpus"] :].astype(np.float64)
    found = compiled(instance, codes, constants, expression.stack, cluster, now)
    assert found.view(np.int64).tolist() == expected.view(np.int64).tolist()


@given(expression=programs().filter(is_sound))
def test_text_and_program_are_one(expression: Expression) -> None:
    again = parse(str(expression))
    assert again.codes == expression.codes
    assert [repr(value) for value in again.constants] == [repr(value) for value in expression.constants]


COMPILED = {function: njit(function) for function in (fragmentation, largest_free, load)}
SIZES = st.lists(st.integers(0, 9), min_size=2, max_size=17)


@given(having=SIZES, demand=SIZES, held=st.integers(0, 500), queued=st.integers(0, 500), gpus=st.integers(0, 999))
def test_compiled_formulae_of_the_cluster(
    having: list[int], demand: list[int], held: int, queued: int, gpus: int
) -> None:
    sizes = min(len(having), len(demand))
    have, ask = np.array(having[:sizes]), np.array(demand[:sizes])
    waiting = int(ask.sum())
    assert COMPILED[fragmentation](have, ask, waiting) == fragmentation(have, ask, waiting)
    assert 0.0 <= fragmentation(have, ask, waiting) <= 1.0
    assert COMPILED[largest_free](have) == largest_free(have) == max(np.flatnonzero(have), default=0)
    assert COMPILED[load](float(held), float(queued), float(gpus)) == load(float(held), float(queued), float(gpus))
