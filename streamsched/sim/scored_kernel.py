"""The compiled event loop (numba) for learned priorities. `scored.py` is its front; nothing else imports this module.

Theory of operation
-------------------
One moment: all completions, all arrivals, then one pass. A pass scores the waiting jobs that fit once, and starts them
in the order of their scores as long as they fit: what does not fit is skipped, as in `fast_kernel.run`, whose nodes and
heap of completions are used here.

Most of a search's time goes into scores, so few are made, and many at once:

- Room is monotone in the number of GPUs: a pass knows the largest job that fits, and scores none beyond it. One that
  is the only one to fit is not scored at all.
- The parts of a program that never change for a job are evaluated once for all jobs, before the first event. What
  remains runs operation by operation over all jobs of the pass, in loops that LLVM makes vector code of.
- Counting references to arrays took four fifths of the time: functions of the loop are compiled without it (numba's
  option `_nrt`, which its own code uses and its manual does not name), and so make no arrays.
- What a program does not ask for is not kept up (fragmentation, and what is asked of the queue).

Functions are imported from other files, which numba's cache of compiled code does not watch: the digest of these files
is part of the name under which the code is kept.

Units: seconds and GPUs; jobs and nodes are numbers from 0. Nothing is kept between calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from streamsched.policy import expression, features
from streamsched.policy.expression import (
    ADD,
    ARITY,
    CONSTANT,
    DIV,
    FEATURE,
    LIMIT,
    LN2,
    MANTISSA,
    MIN,
    MUL,
    NEG,
    ONE,
    SQRT,
    SQRT2,
    SUB,
)

from . import fast_kernel
from .fast_kernel import Nodes, Running, _free, _nodes, _placed_at, _pop_end, _push_end, _running, _shift, _take

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int16]
Floats = npt.NDArray[np.float64]

WEIGHT: Final = features.INDEX["weight"]
WAIT: Final = features.INDEX["wait_s"]
CLUSTER: Final = features.INDEX["free_gpus"]
"""Features from here on are the cluster's."""
FRAGMENTATION: Final = features.INDEX["fragmentation"]
FIXED: Final = len(features.FIXED)
COUNT: Final = len(features.FEATURES)
KEPT: Final = 64
"""Parts of a program that never change and are kept; further ones are evaluated at each pass."""
KEPT_CODE: Final = 500
"""A code from here on is a kept part."""
MEASURES: Final = 6
"""`scored.MEASURES`"""
BOUND_S: Final = 10.0
"""Of the bounded slowdown."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

_SOURCES: Final = zlib.crc32(b"".join(Path(str(m.__file__)).read_bytes() for m in (expression, features, fast_kernel)))


def _compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compiled with the entry function. Division by zero gives infinity, or loops would not become vector code."""
    return cast("Callable[_P, _R]", njit(nogil=True, error_model="numpy")(function))


def _inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """As `_compiled`, inlined, and without reference counts: arrays are made and held by the entry functions alone."""
    uncounted: dict[str, Any] = {"_nrt": False}
    return cast("Callable[_P, _R]", njit(nogil=True, error_model="numpy", forceinline=True, **uncounted)(function))


def _entry(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compiled and kept on disk, as in `fast_kernel`, for the imported sources as they are now."""
    function.__qualname__ += f"_{_SOURCES:08x}"
    try:
        return cast("Callable[_P, _R]", njit(nogil=True, cache=True, error_model="numpy")(function))
    except RuntimeError:  # "no locator available": numba found no folder that it may write to
        return _compiled(function)


_load = _inlined(features.load)
_wait_s = _inlined(features.wait_s)
_largest_free = _inlined(features.largest_free)
_fragmentation = _inlined(features.fragmentation)
_log_series = _inlined(expression.log_series)


@_inlined
def _rounded(value: float) -> float:
    """As it is in a vector of float32."""
    return float(np.float32(value))


# ── the world ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Instance(NamedTuple):
    """Jobs by (submit, seq), each of which fits the empty cluster."""

    submit: Floats
    duration: Floats
    gpus: Ints
    fixed: Floats
    """[fixed feature, job], rounded to float32."""
    node_gpus: Ints


class World(NamedTuple):
    """After a schedule everything but what became of the jobs is as before it."""

    submit: Floats
    duration: Floats
    gpus: Ints
    capacity: int
    """GPUs of the cluster."""
    nodes: Nodes
    running: Running
    queue: Ints
    """Waiting jobs in order of arrival."""
    asked: Ints
    """[2] how many wait, and the GPUs that they ask for."""
    demand: Ints
    """[g] waiting jobs whose larger workers ask for g GPUs."""
    fitting: Ints
    """Of the waiting jobs those that fit at the beginning of a pass; negative once they are started."""
    everybody: Ints
    """0, 1, ..."""
    stack: Floats
    """[value, job]: the first is the score."""
    columns: Floats
    """[fixed feature or kept part, job]"""
    cluster: Floats
    """Features of the cluster."""
    start: Floats
    finish: Floats
    placed_at: Ints
    placed: Ints
    """As in `fast_kernel.World`."""
    sums: Floats
    """As `fast_kernel.run` returns them."""


@_compiled
def _world(instance: Instance, stack: int) -> World:
    total, whole, capacity = instance.gpus.shape[0], instance.node_gpus.max(), instance.node_gpus.sum()
    placed_at = _placed_at(instance.gpus, whole)
    columns = np.empty((FIXED + KEPT, total))
    columns[:FIXED] = instance.fixed
    return World(
        instance.submit,
        instance.duration,
        instance.gpus,
        capacity,
        _nodes(instance.node_gpus),
        _running(min(total, capacity) + 1),
        np.empty(total, np.int64),
        np.zeros(2, np.int64),
        np.zeros(whole + 1, np.int64),
        np.empty(total, np.int64),
        np.arange(total),
        np.empty((stack + 1, total)),
        columns,
        np.zeros(COUNT - CLUSTER),
        np.empty(total),
        np.empty(total),
        placed_at,
        np.empty(placed_at[total], np.int64),
        np.zeros(4),
    )


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Program(NamedTuple):
    codes: Codes
    length: int
    constants: Floats
    cluster: bool
    """It asks for features of the cluster."""
    fragmentation: bool
    """And for this one."""


@_inlined
def _cut(value: float) -> float:
    value = value if value < LIMIT else LIMIT
    return value if value > -LIMIT else -LIMIT


@_inlined
def _log1p_abs(value: float) -> float:
    """`expression.log1p_abs` of a number."""
    x = abs(value)
    y = 1.0 + x
    bits = np.float64(y).view(np.int64)
    exponent = (bits >> 52) - 1023
    mantissa = np.int64((bits & MANTISSA) | ONE).view(np.float64)
    high = mantissa >= SQRT2
    mantissa = 0.5 * mantissa if high else mantissa
    exponent = exponent + 1 if high else exponent
    return float(exponent * LN2 + _log_series(mantissa) + (x - (y - 1.0)) / y)


@_inlined
def _load_feature(world: World, place: int, jobs: Ints, count: int, now: float, a: Floats) -> None:
    if place < FIXED:
        column = world.columns[place]
        for i in range(count):
            a[i] = column[jobs[i]]
    elif place == WAIT:
        for i in range(count):
            a[i] = _rounded(_wait_s(0.0, world.submit[jobs[i]], now))
    elif place >= CLUSTER:
        a[:count] = world.cluster[place - CLUSTER]
    else:  # nobody is preempted: who waits does not run and has had no service
        a[:count] = 0.0


@_inlined
def _apply_one(code: int, a: Floats, count: int) -> None:
    if code == NEG:
        for i in range(count):
            a[i] = -a[i]
    elif code == SQRT:
        for i in range(count):
            a[i] = np.sqrt(abs(a[i]))
    else:
        for i in range(count):
            a[i] = _log1p_abs(a[i])


@_inlined
def _apply_two(code: int, a: Floats, b: Floats, count: int) -> None:
    if code == ADD:
        for i in range(count):
            a[i] = a[i] + b[i]
    elif code == SUB:
        for i in range(count):
            a[i] = a[i] - b[i]
    elif code == MUL:
        for i in range(count):
            a[i] = _cut(a[i] * b[i])
    elif code == DIV:
        for i in range(count):
            quotient = a[i] / b[i]
            a[i] = _cut(1.0 if b[i] == 0.0 else quotient)
    elif code == MIN:
        for i in range(count):
            a[i] = b[i] if b[i] < a[i] else a[i]
    else:
        for i in range(count):
            a[i] = b[i] if b[i] > a[i] else a[i]


@_inlined
def _evaluate(world: World, program: Program, begin: int, end: int, jobs: Ints, count: int, now: float) -> None:
    """stack[0, :count] becomes what codes[begin:end] give for the first `count` of `jobs`."""
    stack, top = world.stack, -1
    for place in range(begin, end):
        code = program.codes[place]
        if code >= CONSTANT:
            top += 1
            stack[top, :count] = program.constants[code - CONSTANT]
        elif code >= KEPT_CODE:
            top += 1
            a, column = stack[top], world.columns[FIXED + code - KEPT_CODE]
            for i in range(count):
                a[i] = column[jobs[i]]
        elif code >= FEATURE:
            top += 1
            _load_feature(world, code - FEATURE, jobs, count, now, stack[top])
        elif ARITY[code] == 1:
            _apply_one(code, stack[top], count)
        elif ARITY[code] == 2:
            top -= 1
            _apply_two(code, stack[top], stack[top + 1], count)
        else:
            top -= 3
            a, b, then, otherwise = stack[top], stack[top + 1], stack[top + 2], stack[top + 3]
            for i in range(count):
                a[i] = then[i] if a[i] < b[i] else otherwise[i]


@_compiled
def _parts_to_keep(codes: Codes) -> Ints:
    """[place] end of the largest part beginning there that never changes for a job, 0 where none does."""
    length = codes.shape[0]
    end_of = np.zeros(length, np.int64)
    begin, still = np.empty(length + 1, np.int64), np.empty(length + 1, np.bool_)
    top = -1
    for place in range(length):
        code = codes[place]
        if code >= FEATURE:
            top += 1
            begin[top], still[top] = place, code >= CONSTANT or code - FEATURE < FIXED
            continue
        first = top - ARITY[code] + 1
        begin[top + 1] = place
        if not still[first : top + 1].all():
            for operand in range(first, top + 1):
                if still[operand] and begin[operand + 1] - begin[operand] > 1:
                    end_of[begin[operand]] = begin[operand + 1]
            still[first] = False
        top = first
    if still[0]:
        end_of[0] = length
    return end_of


@_compiled
def _staged(world: World, codes: Codes, constants: Floats) -> Program:
    """The program with its unchanging parts evaluated."""
    cluster = False
    for code in codes:
        cluster = cluster or FEATURE + CLUSTER <= code < FEATURE + COUNT
    fragmentation = (codes == FEATURE + FRAGMENTATION).any()
    given = Program(codes, codes.shape[0], constants, cluster, fragmentation)
    end_of = _parts_to_keep(codes)
    rest = np.empty_like(codes)
    place, length, kept = 0, 0, 0
    while place < codes.shape[0]:
        if end_of[place] > 0 and kept < KEPT:
            _evaluate(world, given, place, end_of[place], world.everybody, world.gpus.shape[0], 0.0)
            world.columns[FIXED + kept] = world.stack[0]
            rest[length] = KEPT_CODE + kept
            kept += 1
            place = end_of[place]
        else:
            rest[length] = codes[place]
            place += 1
        length += 1
    return Program(rest, length, constants, cluster, fragmentation)


# ── passes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@_inlined
def _count(world: World, gpus: int, by: int) -> None:
    world.asked[0] += by
    world.asked[1] += by * gpus
    world.demand[min(gpus, world.demand.shape[0] - 1)] += by


@_inlined
def _largest_fitting(nodes: Nodes) -> int:
    """GPUs of the largest job that fits: all whole nodes, and a remainder on the best of the others."""
    whole = nodes.having.shape[0] - 1
    level = whole - 1
    while level > 0 and nodes.having[level] == 0:
        level -= 1
    return int(nodes.having[whole] * whole + level)


@_inlined
def _look_at_cluster(world: World, fragmentation: bool) -> None:
    """The features of the cluster, in their order."""
    free, queued = float(_free(world.nodes)), float(world.asked[1])
    world.cluster[0] = _rounded(free)
    world.cluster[1] = _rounded(float(_largest_free(world.nodes.having)))
    world.cluster[2] = _rounded(float(world.asked[0]))
    world.cluster[3] = _rounded(queued)
    world.cluster[4] = _rounded(_load(world.capacity - free, queued, float(world.capacity)))
    if fragmentation:
        world.cluster[5] = _rounded(_fragmentation(world.nodes.having, world.demand, world.asked[0]))


@_inlined
def _find_fitting(world: World, limit: int) -> int:
    """How many waiting jobs fit; `world.fitting` becomes these, in order of arrival."""
    count = 0
    for place in range(world.asked[0]):
        job = world.queue[place]
        world.fitting[count] = job
        count += world.gpus[job] <= limit
    return count


@_inlined
def _best(world: World, count: int, limit: int) -> int:
    """Place of the highest score of those that fit still, the first to arrive of equals; -1 if there is none."""
    best, highest = -1, -np.inf
    for i in range(count):
        job = world.fitting[i]
        if job >= 0 and world.gpus[job] <= limit and world.stack[0, i] > highest:
            best, highest = i, world.stack[0, i]
    return best


@_inlined
def _begin(world: World, job: int, now: float) -> None:
    gpus = world.gpus[job]
    _take(world.nodes, gpus, world.placed, world.placed_at[job])
    world.start[job] = now
    _push_end(world.running, now + world.duration[job], job)
    _count(world, gpus, -1)


@_inlined
def _forget_started(world: World, waited: int) -> None:
    """`waited`: the length of the queue before."""
    left = 0
    for place in range(waited):
        job = world.queue[place]
        world.queue[left] = job
        left += np.isnan(world.start[job])


@_inlined
def _pass(world: World, program: Program, now: float) -> None:
    waited, limit = world.asked[0], _largest_fitting(world.nodes)
    count = _find_fitting(world, limit) if limit > 0 else 0
    if count == 0:
        return
    world.stack[0, 0] = 0.0
    if count > 1:
        if program.cluster:
            _look_at_cluster(world, program.fragmentation)
        _evaluate(world, program, 0, program.length, world.fitting, count, now)
    place = _best(world, count, limit)
    while place >= 0:
        _begin(world, world.fitting[place], now)
        world.fitting[place] = -1
        limit = _largest_fitting(world.nodes)
        place = _best(world, count, limit) if limit > 0 else -1
    _forget_started(world, waited)


@_inlined
def _schedule(world: World, program: Program) -> None:
    """Every job from arrival to completion."""
    running, total = world.running, world.submit.shape[0]
    world.start[:] = np.nan
    world.sums[:] = 0.0
    arrived, now = 0, world.submit[0]
    while arrived < total or running.length[0] > 0:
        moment = world.submit[arrived] if arrived < total else np.inf
        if running.length[0] > 0:
            moment = min(moment, running.end[0])
        world.sums[0] += world.asked[0] * (moment - now)
        world.sums[1] += (world.capacity - _free(world.nodes)) * (moment - now)
        now = moment
        while running.length[0] > 0 and running.end[0] <= now:
            job = _pop_end(running)
            _shift(world.nodes, world.gpus[job], world.placed, world.placed_at[job], 1)
            world.finish[job] = now
        while arrived < total and world.submit[arrived] <= now:
            world.queue[world.asked[0]] = arrived
            _count(world, world.gpus[arrived], 1)
            arrived += 1
        if world.asked[0] > 0:
            _pass(world, program, now)
            world.sums[2] += 1
            world.sums[3] = max(world.sums[3], world.asked[0])


@_compiled
def _measure(world: World, weight: Floats, measures: Floats) -> None:
    """`scored.MEASURES` of a schedule."""
    useful, total = 0.0, world.submit.shape[0]
    measures[:] = 0.0
    for job in range(total):
        wait, duration = world.start[job] - world.submit[job], world.duration[job]
        useful += duration * world.gpus[job]
        measures[0] += weight[job] * wait
        measures[1] = max(measures[1], weight[job] * wait)
        measures[3] += wait
        measures[4] = max(measures[4], wait)
        measures[5] += max(1.0, (wait + duration) / max(duration, BOUND_S))
    weights, span = weight.sum(), world.finish.max() - world.submit[0]
    measures[0] = measures[0] / weights if weights > 0 else 0.0
    measures[2] = useful / (world.capacity * span) if span > 0 else 0.0
    measures[3] /= total
    measures[5] /= total


# ── entries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@_entry
def run_program(
    instance: Instance, codes: Codes, constants: Floats, stack: int
) -> tuple[Floats, Floats, Ints, Ints, Floats]:
    """As `fast_kernel.run`. `stack`: values that the program holds at once."""
    world = _world(instance, stack)
    _schedule(world, _staged(world, codes, constants))
    return world.start, world.finish, world.placed_at, world.placed, world.sums


@_entry
def measure_programs(instance: Instance, codes: Codes, lengths: Ints, constants: Floats, stack: int) -> Floats:
    """[program, measure] of `codes` [program, place], of which `lengths` [program] count, and `constants`
    [program, constant]."""
    world = _world(instance, stack)
    measures = np.empty((codes.shape[0], MEASURES))
    for number in range(codes.shape[0]):
        _schedule(world, _staged(world, codes[number, : lengths[number]], constants[number]))
        _measure(world, instance.fixed[WEIGHT], measures[number])
    return measures
