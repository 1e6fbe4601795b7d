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

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from streamsched.policy import expression, features, network
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
from streamsched.policy.network import ROUNDED

from . import fast_kernel
from .fast_kernel import Nodes, Running, _change, _free, _nodes, _placed_at, _pop_end, _push_end, _running, _take

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int16]
Floats = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]

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

TINY: Final = 1e-300
"""No probability is taken to be less."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

_IMPORTED: Final = (expression, features, network, fast_kernel)
_SOURCES: Final = zlib.crc32(b"".join(Path(str(m.__file__)).read_bytes() for m in _IMPORTED))


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
    reserve_after_s: float
    """A job that has waited so long has nodes kept for it; infinite: none ever."""
    reservations_max: int


class Kept(NamedTuple):
    """Nodes that are kept for jobs that have waited too long. As far as `Nodes` goes they have nothing free."""

    after_s: float
    most: int
    job: Ints
    """[node] for whom, -1: for nobody"""
    free: Ints
    """[node] GPUs that are free on a node that is kept"""
    size: Ints
    """[node] its GPUs"""
    jobs: Ints
    """The jobs that nodes are kept for, in order of arrival, the first `length`."""
    length: Ints
    """[1]"""


class World(NamedTuple):
    """After a schedule everything but what became of the jobs is as before it."""

    submit: Floats
    duration: Floats
    gpus: Ints
    capacity: int
    """GPUs of the cluster."""
    nodes: Nodes
    kept: Kept
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
        Kept(
            instance.reserve_after_s,
            instance.reservations_max,
            np.full(instance.node_gpus.shape[0], -1),
            np.zeros(instance.node_gpus.shape[0], np.int64),
            instance.node_gpus,
            np.zeros(instance.reservations_max + 1, np.int64),
            np.zeros(1, np.int64),
        ),
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


# ── networks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Layers(NamedTuple):
    """`policy.network.Network`. Its evaluation needs 1 + CLUSTER + 2 x the widest hidden layer values on the stack."""

    sizes: Ints
    """Units of each layer, from the features to the score; empty where there is no network."""
    weights: Floats
    """Per layer the matrix [input, output] and the bias."""
    shift: Floats
    factor: Floats
    """[feature] of the logarithms."""
    cluster: Floats
    """Scratch: inputs for the features of the cluster."""


@_inlined
def _input(value: float, shift: float, factor: float) -> float:
    scaled = (math.log1p(max(value, 0.0)) - shift) * factor
    return min(max(scaled, 0.0), 1.0)


@_inlined
def _first_inputs(world: World, layers: Layers, jobs: Ints, count: int, now: float) -> None:
    """Of the features of jobs to stack[1 + feature], of those of the cluster to `layers.cluster`."""
    for place in range(CLUSTER):
        a = world.stack[1 + place]
        _load_feature(world, place, jobs, count, now, a)
        for i in range(count):
            a[i] = _input(a[i], layers.shift[place], layers.factor[place])
    for place in range(CLUSTER, COUNT):
        value = world.cluster[place - CLUSTER]
        layers.cluster[place - CLUSTER] = _input(value, layers.shift[place], layers.factor[place])


@_inlined
def _infer(world: World, layers: Layers, jobs: Ints, count: int, now: float) -> None:
    """stack[0, :count] becomes the scores, in the rounding of `policy.network`."""
    _first_inputs(world, layers, jobs, count, now)
    stack, weights, last = world.stack, layers.weights, layers.sizes.shape[0] - 2
    width, source, at = layers.sizes[1:].max(), 1, 0
    for layer in range(last + 1):
        inputs, outputs = layers.sizes[layer], layers.sizes[layer + 1]
        goal = 0 if layer == last else 1 + CLUSTER + width * (layer & 1)
        for output in range(outputs):
            a = stack[goal + output]
            base = weights[at + inputs * outputs + output]
            if layer == 0:
                for k in range(COUNT - CLUSTER):
                    base += layers.cluster[k] * weights[at + (CLUSTER + k) * outputs + output]
            a[:count] = base
            for k in range(CLUSTER if layer == 0 else inputs):
                weight, x = weights[at + k * outputs + output], stack[source + k]
                for i in range(count):
                    a[i] += weight * x[i]
            if layer < last:
                for i in range(count):
                    a[i] = max(a[i], 0.0)
        at += (inputs + 1) * outputs
        source = goal
    for i in range(count):
        stack[0, i] = np.rint(stack[0, i] * ROUNDED)


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
def _show_kept(world: World, sign: int) -> None:
    """What is free on nodes that are kept counts as free in the features of the cluster (1), and not as room (-1)."""
    if world.kept.length[0] > 0:
        for node in range(world.kept.job.shape[0]):
            if world.kept.job[node] >= 0:
                _change(world.nodes, node, sign * world.kept.free[node])


@_inlined
def _look_at_cluster(world: World, fragmentation: bool) -> None:
    """The features of the cluster, in their order."""
    _show_kept(world, 1)
    free, queued = float(_free(world.nodes)), float(world.asked[1])
    world.cluster[0] = _rounded(free)
    world.cluster[1] = _rounded(float(_largest_free(world.nodes.having)))
    world.cluster[2] = _rounded(float(world.asked[0]))
    world.cluster[3] = _rounded(queued)
    world.cluster[4] = _rounded(_load(world.capacity - free, queued, float(world.capacity)))
    if fragmentation:
        world.cluster[5] = _rounded(_fragmentation(world.nodes.having, world.demand, world.asked[0]))
    _show_kept(world, -1)


@_inlined
def _find_fitting(world: World, limit: int, most: int) -> int:
    """How many waiting jobs fit, at most so many; `world.fitting` becomes these, in order of arrival."""
    count = 0
    for place in range(world.asked[0]):
        if count == most:
            break
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
    _run_on(world, job, now)


@_inlined
def _run_on(world: World, job: int, now: float) -> None:
    """The job has its nodes."""
    world.start[job] = now
    _push_end(world.running, now + world.duration[job], job)
    _count(world, world.gpus[job], -1)


@_inlined
def _forget_started(world: World, waited: int) -> None:
    """`waited`: the length of the queue before."""
    left = 0
    for place in range(waited):
        job = world.queue[place]
        world.queue[left] = job
        left += np.isnan(world.start[job])


# ── nodes that are kept ──────────────────────────────────────────────────────────────────────────────────────────────


@_inlined
def _keeps_for(world: World, job: int) -> bool:
    found = False
    for place in range(world.kept.length[0]):
        found = found or world.kept.jobs[place] == job
    return found


@_inlined
def _keep(world: World, job: int) -> bool:
    """Keep nodes for a job, worker by worker the one with the most room now; whether there are as many."""
    kept, nodes, whole = world.kept, world.nodes, int(world.nodes.having.shape[0]) - 1
    left = world.gpus[job]
    while left > 0:
        worker, best = min(left, whole), -1
        for node in range(kept.job.shape[0]):
            able = kept.job[node] < 0 and kept.size[node] >= worker
            if able and (best < 0 or nodes.free[node] > nodes.free[best]):
                best = node
        if best < 0:
            _give_back(world, job)
            return False
        kept.job[best], kept.free[best] = job, nodes.free[best]
        _change(nodes, best, -kept.free[best])
        left -= worker
    place = kept.length[0]
    kept.length[0] += 1
    while place > 0 and kept.jobs[place - 1] > job:
        kept.jobs[place] = kept.jobs[place - 1]
        place -= 1
    kept.jobs[place] = job
    return True


@_inlined
def _give_back(world: World, job: int) -> None:
    """Its nodes are kept no more."""
    kept, left = world.kept, 0
    for node in range(kept.job.shape[0]):
        if kept.job[node] == job:
            kept.job[node] = -1
            _change(world.nodes, node, kept.free[node])
    for place in range(kept.length[0]):
        if kept.jobs[place] != job:
            kept.jobs[left] = kept.jobs[place]
            left += 1
    kept.length[0] = left


@_inlined
def _give_back_of_started(world: World) -> None:
    """Nodes of jobs that have started elsewhere, when a window is over: they are room from the next one on, where they
    may be kept for others that have waited too long."""
    place = 0
    while place < world.kept.length[0]:
        job = world.kept.jobs[place]
        if np.isnan(world.start[job]):
            place += 1
        else:
            _give_back(world, job)


@_inlined
def _take_kept(world: World, job: int) -> bool:
    """Whether the job fits the nodes that are kept for it, and then has them: the first of these that suffice."""
    kept, whole = world.kept, int(world.nodes.having.shape[0]) - 1
    left, at = world.gpus[job], world.placed_at[job]
    while left > 0:
        worker, node = min(left, whole), 0
        while node < kept.job.shape[0] and not (kept.job[node] == job and kept.free[node] >= worker):
            node += 1
        if node == kept.job.shape[0]:
            break
        kept.free[node] -= worker
        world.placed[at] = node
        at += 1
        left -= worker
    if left == 0:
        return True
    taken = world.gpus[job] - left
    for place in range(world.placed_at[job], at):
        kept.free[world.placed[place]] += min(taken, whole)
        taken -= whole
    return False


@_inlined
def _release(world: World, job: int) -> None:
    """The GPUs of a job that has ended."""
    whole, left = int(world.nodes.having.shape[0]) - 1, world.gpus[job]
    for at in range(world.placed_at[job], world.placed_at[job + 1]):
        node = world.placed[at]
        if world.kept.job[node] >= 0:
            world.kept.free[node] += min(left, whole)
        else:
            _change(world.nodes, node, min(left, whole))
        left -= whole


@_inlined
def _start_kept(world: World, now: float) -> None:
    """The first to arrive whose nodes have drained starts there."""
    for place in range(world.kept.length[0]):
        job = world.kept.jobs[place]
        if _take_kept(world, job):
            waited = world.asked[0]
            _give_back(world, job)
            _run_on(world, job, now)
            _forget_started(world, waited)
            break


@_inlined
def _choose_anew(world: World) -> None:
    """All kept nodes are given back, and chosen for the same jobs among all there are: those with most room now."""
    kept, count = world.kept, world.kept.length[0]
    for node in range(kept.job.shape[0]):
        if kept.job[node] >= 0:
            kept.job[node] = -1
            _change(world.nodes, node, kept.free[node])
    kept.length[0] = 0
    for place in range(count):
        _keep(world, kept.jobs[place])


@_inlined
def _keep_for_overdue(world: World, now: float) -> None:
    """Keep nodes for jobs that have waited too long, the first to arrive first."""
    _choose_anew(world)
    place, hopeless = 0, np.int64(2**62)
    while place < world.asked[0] and world.kept.length[0] < world.kept.most:
        job = world.queue[place]
        if world.submit[job] + world.kept.after_s > now:
            break
        if world.gpus[job] < hopeless and not _keeps_for(world, job) and not _keep(world, job):
            hopeless = world.gpus[job]
        place += 1


@_inlined
def _pass(world: World, program: Program, layers: Layers, now: float) -> None:
    """One look at all that fit; started in the order of their scores."""
    waited, limit = world.asked[0], _largest_fitting(world.nodes)
    count = _find_fitting(world, limit, waited) if limit > 0 else 0
    if count == 0:
        return
    world.stack[0, 0] = 0.0
    if count > 1 and layers.sizes.shape[0] > 0:
        _look_at_cluster(world, True)
        _infer(world, layers, world.fitting, count, now)
    elif count > 1:
        if program.cluster:
            _look_at_cluster(world, program.fragmentation)
        _evaluate(world, program, 0, program.length, world.fitting, count, now)
    place = _best(world, count, limit)
    while place >= 0:
        _begin(world, world.fitting[place], now)
        world.fitting[place] = -1
        limit = _largest_fitting(world.nodes)
        place = _best(world, count, limit) if limit > 0 else -1
    _give_back_of_started(world)
    _forget_started(world, waited)


@_inlined
def _windows(world: World, program: Program, layers: Layers, now: float) -> None:
    """All that starts at a moment. Where nodes are kept, one more window follows on each that started something."""
    if world.kept.after_s == np.inf:
        _pass(world, program, layers, now)
        return
    waited = world.asked[0] + 1
    while 0 < world.asked[0] < waited:
        waited = world.asked[0]
        _keep_for_overdue(world, now)
        _start_kept(world, now)
        if world.asked[0] > 0:
            _pass(world, program, layers, now)


@_inlined
def _next_moment(world: World, arrived: int, now: float) -> float:
    """The next arrival or completion; what is integrated over time is so until then."""
    moment = world.submit[arrived] if arrived < world.submit.shape[0] else np.inf
    if world.running.length[0] > 0:
        moment = min(moment, world.running.end[0])
    _show_kept(world, 1)
    world.sums[0] += world.asked[0] * (moment - now)
    world.sums[1] += (world.capacity - _free(world.nodes)) * (moment - now)
    _show_kept(world, -1)
    return float(moment)


@_inlined
def _complete(world: World, now: float) -> None:
    while world.running.length[0] > 0 and world.running.end[0] <= now:
        job = _pop_end(world.running)
        _release(world, job)
        world.finish[job] = now


@_inlined
def _arrive(world: World, arrived: int, now: float) -> int:
    """How many have arrived."""
    while arrived < world.submit.shape[0] and world.submit[arrived] <= now:
        world.queue[world.asked[0]] = arrived
        _count(world, world.gpus[arrived], 1)
        arrived += 1
    return arrived


@_inlined
def _schedule(world: World, program: Program, layers: Layers) -> None:
    """Every job from arrival to completion."""
    world.start[:] = np.nan
    world.sums[:] = 0.0
    arrived, now = 0, world.submit[0]
    while arrived < world.submit.shape[0] or world.running.length[0] > 0:
        now = _next_moment(world, arrived, now)
        _complete(world, now)
        arrived = _arrive(world, arrived, now)
        if world.asked[0] > 0:
            _windows(world, program, layers, now)
            world.sums[2] += 1
            world.sums[3] = max(world.sums[3], world.asked[0])


# ── episodes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Trail(NamedTuple):
    """What is kept of each decision, so that nothing is left to do in Python."""

    features: Float32s
    """[decision, choice, feature]"""
    choices: Ints
    """[decision] how many there were."""
    chosen: Ints
    """[decision] which of them."""
    job: Ints
    """[decision]"""
    time: Floats
    """[decision]"""
    log_p: Floats
    """[decision] ln of its probability."""
    queue_job_s: Floats
    """[decision] integral of the queue's length until then."""
    length: Ints
    """[1]"""
    random: npt.NDArray[np.uint64]
    """[1] state of the generator."""


@_inlined
def _uniform(random: npt.NDArray[np.uint64]) -> float:
    """In [0, 1): SplitMix64 (Steele et al., OOPSLA 2014, figure 16), the same in every version of numba."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    z = random[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) * 2.0**-53


@_inlined
def _draw(world: World, trail: Trail, count: int, temperature: float) -> int:
    """A choice by the softmax of the scores, noted with its probability; the best one at temperature 0."""
    scores, best = world.stack[0], 0
    for i in range(count):
        best = i if scores[i] > scores[best] else best
    if temperature <= 0.0:
        trail.log_p[trail.length[0]] = 0.0
        return best
    highest, total = scores[best], 0.0
    for i in range(count):
        scores[i] = math.exp((scores[i] - highest) / ROUNDED / temperature)
        total += scores[i]
    left, place = _uniform(trail.random) * total, 0
    while place < count - 1 and left >= scores[place]:
        left -= scores[place]
        place += 1
    trail.log_p[trail.length[0]] = math.log(max(scores[place], TINY) / total)
    return place


@_inlined
def _note(world: World, trail: Trail, count: int, now: float) -> None:
    """What is seen before a decision."""
    number = trail.length[0]
    for place in range(COUNT):
        a = world.stack[1]
        _load_feature(world, place, world.fitting, count, now, a)
        for i in range(count):
            trail.features[number, i, place] = a[i]
    trail.choices[number] = count
    trail.time[number] = now
    trail.queue_job_s[number] = world.sums[0]


@_inlined
def _decide(world: World, layers: Layers, trail: Trail, now: float, temperature: float) -> None:
    """One job, where any fits, chosen from the first that fit and a look at how it is now. Where one alone fits there
    is nothing to decide."""
    waited, limit = world.asked[0], _largest_fitting(world.nodes)
    count = _find_fitting(world, limit, trail.features.shape[1]) if limit > 0 else 0
    if count == 0:
        return
    place = 0
    if count > 1:
        _look_at_cluster(world, True)
        _note(world, trail, count, now)
        _infer(world, layers, world.fitting, count, now)
        place = _draw(world, trail, count, temperature)
        trail.chosen[trail.length[0]] = place
        trail.job[trail.length[0]] = world.fitting[place]
        trail.length[0] += 1
    _begin(world, world.fitting[place], now)
    _give_back_of_started(world)
    _forget_started(world, waited)


@_inlined
def _decisions(world: World, layers: Layers, trail: Trail, now: float, temperature: float) -> None:
    """As `_windows`, each of them of one job."""
    waited = world.asked[0] + 1
    while 0 < world.asked[0] < waited:
        waited = world.asked[0]
        if world.kept.after_s < np.inf:
            _keep_for_overdue(world, now)
            _start_kept(world, now)
        if world.asked[0] > 0:
            _decide(world, layers, trail, now, temperature)


@_inlined
def _episode(world: World, layers: Layers, trail: Trail, temperature: float) -> None:
    """As `_schedule`, by decisions."""
    world.start[:] = np.nan
    world.sums[:] = 0.0
    arrived, now = 0, world.submit[0]
    while arrived < world.submit.shape[0] or world.running.length[0] > 0:
        now = _next_moment(world, arrived, now)
        _complete(world, now)
        arrived = _arrive(world, arrived, now)
        if world.asked[0] > 0:
            _decisions(world, layers, trail, now, temperature)
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


@_compiled
def _nothing() -> Layers:
    return Layers(np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0), np.empty(0))


@_entry
def run_program(
    instance: Instance, codes: Codes, constants: Floats, stack: int
) -> tuple[Floats, Floats, Ints, Ints, Floats]:
    """As `fast_kernel.run`. `stack`: values that the program holds at once."""
    world = _world(instance, stack)
    _schedule(world, _staged(world, codes, constants), _nothing())
    return world.start, world.finish, world.placed_at, world.placed, world.sums


@_entry
def measure_programs(instance: Instance, codes: Codes, lengths: Ints, constants: Floats, stack: int) -> Floats:
    """[program, measure] of `codes` [program, place], of which `lengths` [program] count, and `constants`
    [program, constant]."""
    world, nothing = _world(instance, stack), _nothing()
    measures = np.empty((codes.shape[0], MEASURES))
    for number in range(codes.shape[0]):
        _schedule(world, _staged(world, codes[number, : lengths[number]], constants[number]), nothing)
        _measure(world, instance.fixed[WEIGHT], measures[number])
    return measures


@_compiled
def _world_of(instance: Instance, layers: Layers) -> World:
    return _world(instance, 1 + CLUSTER + 2 * layers.sizes[1:].max())


@_entry
def run_network(instance: Instance, layers: Layers) -> tuple[Floats, Floats, Ints, Ints, Floats]:
    """As `run_program`."""
    world = _world_of(instance, layers)
    no_codes = np.empty(0, np.int16)
    _schedule(world, Program(no_codes, 0, np.empty(0), False, False), layers)
    return world.start, world.finish, world.placed_at, world.placed, world.sums


@_entry
def run_episode(
    instance: Instance, layers: Layers, choices: int, temperature: float, seed: int
) -> tuple[tuple[Floats, Floats, Ints, Ints, Floats], Trail]:
    """As `run_program`, and what was decided."""
    world, total = _world_of(instance, layers), instance.gpus.shape[0]
    trail = Trail(
        np.zeros((total, choices, COUNT), np.float32),
        np.zeros(total, np.int64),
        np.zeros(total, np.int64),
        np.zeros(total, np.int64),
        np.zeros(total),
        np.zeros(total),
        np.zeros(total),
        np.zeros(1, np.int64),
        np.full(1, seed, np.uint64),
    )
    _episode(world, layers, trail, temperature)
    return (world.start, world.finish, world.placed_at, world.placed, world.sums), trail
