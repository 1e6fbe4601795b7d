"""The compiled event loop (numba). `fast.py` is its front; nothing else imports this module.

Theory of operation
-------------------
A job's room depends on its number of GPUs alone, and what fits only shrinks within a pass. So the queue is held as
*lanes*, one for each number of GPUs asked for, each in the order of the rule:

- Room is monotone: where g GPUs fit, so do fewer (a gang of whole nodes and a remainder included). A pass with skipping
  therefore ends the lanes from the first that does not fit upwards, and never looks at a second job of such a lane.
- The order of a static rule is known before the run: each job has a rank. A lane is a segment tree over its jobs by
  rank that holds the least estimate among the waiting ones; the first waiting job behind a rank, or the first that is
  short enough for EASY, is found in O(log jobs). Thus the cost of a pass hardly depends on the length of the queue.
- Rules that change with time (WFP3, UNICEP, multifactor) have no such order: they are evaluated for the whole queue
  once for each job started. These cost O(queue) per started job, and so does conservative backfilling.

All functions are in this file on purpose: numba's cache of compiled code notices changes of the file of the entry
function only.

Units: seconds and GPUs; jobs and nodes are numbers from 0. Nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.typed import List

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Log = Any
"""A typed list: (job, beginning, end) of stretches, or their nodes."""

BACKFILL_NONE: Final = 0
BACKFILL_SKIP: Final = 1
BACKFILL_EASY: Final = 2
BACKFILL_CONSERVATIVE: Final = 3

BY_RANK: Final = 0
BY_WFP3: Final = 1
BY_UNICEP: Final = 2
BY_MULTIFACTOR: Final = 3

MAX_AGE_S: Final = 604_800.0
AGE_WEIGHT: Final = 1_000.0
"""As in `policy.formulas`; here, because the cache of compiled code does not notice changes there."""

OVERDUE_S: Final = 1e-3
"""No running job is taken to end sooner than this after now, however long ago it should have ended."""

_ANY: Final = float(np.finfo(np.float64).max)
"""Later than any end, and still less than the infinity that marks an absent job."""
_NO_RANK: Final = int(np.iinfo(np.int64).max)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compiled with the entry function, on which the cache is."""
    return cast("Callable[_P, _R]", njit(nogil=True)(function))


def _inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """As `_compiled`, and inlined wherever it is called: LLVM then drops most of the reference counting of arrays,
    which would cost half as much again as the work itself."""
    return cast("Callable[_P, _R]", njit(nogil=True, forceinline=True)(function))


def _entry(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compiled and kept on disk, beside this file or in the user's cache; only compiled where nothing is writable."""
    try:
        return cast("Callable[_P, _R]", njit(nogil=True, cache=True)(function))
    except RuntimeError:  # "no locator available": numba found no folder that it may write to
        return _compiled(function)


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Nodes(NamedTuple):
    free: Ints
    """[node] free GPUs."""
    having: Ints
    """[g] nodes with exactly g free GPUs; the last g is the size of the largest node, which is a "whole node"."""


@_compiled
def _nodes(sizes: Ints) -> Nodes:
    nodes = Nodes(sizes.copy(), np.zeros(sizes.max() + 1, np.int64))
    for size in sizes:
        nodes.having[size] += 1
    return nodes


@_compiled
def _copy_nodes(source: Nodes, target: Nodes) -> None:
    target.free[:] = source.free
    target.having[:] = source.having


@_inlined
def _change(nodes: Nodes, node: int, gpus: int) -> None:
    """`gpus` more are free on `node` (fewer where negative)."""
    free = nodes.free[node]
    nodes.having[free] -= 1
    nodes.having[free + gpus] += 1
    nodes.free[node] = free + gpus


@_inlined
def _free(nodes: Nodes) -> int:
    free = 0
    for gpus in range(1, nodes.having.shape[0]):
        free += gpus * nodes.having[gpus]
    return free


@_inlined
def _level(nodes: Nodes, gpus: int) -> int:
    """The fewest free GPUs, at least `gpus`, that some node has; -1 if none has."""
    for level in range(gpus, nodes.having.shape[0]):
        if nodes.having[level] > 0:
            return level
    return -1


@_inlined
def _fits(nodes: Nodes, gpus: int) -> bool:
    whole = int(nodes.having.shape[0]) - 1
    if gpus <= whole:
        return _level(nodes, gpus) >= 0
    spare = int(nodes.having[whole]) - gpus // whole
    if spare != 0 or gpus % whole == 0:
        return spare >= 0
    level = _level(nodes, gpus % whole)
    return 0 <= level < whole


@_inlined
def _take(nodes: Nodes, gpus: int, placed: Ints, at: int) -> None:
    """Place a job that fits, worker by worker, and write its nodes to `placed[at:]`.

    Whole nodes first, the lowest numbers; the remainder by best fit. The nodes taken whole have nothing free any more,
    so the remainder goes to another.
    """
    whole = nodes.having.shape[0] - 1
    node = -1
    while gpus > 0:
        worker = min(gpus, whole)
        level = _level(nodes, worker)
        node = node + 1 if worker == whole else 0
        while nodes.free[node] != level:
            node += 1
        _change(nodes, node, -worker)
        placed[at] = node
        at += 1
        gpus -= worker


@_inlined
def _shift(nodes: Nodes, gpus: int, placed: Ints, at: int, sign: int) -> None:
    """Free (`sign` 1) or occupy (-1) the nodes of a placed job."""
    whole = nodes.having.shape[0] - 1
    while gpus > 0:
        worker = min(gpus, whole)
        _change(nodes, placed[at], sign * worker)
        at += 1
        gpus -= worker


@_compiled
def _placed_at(gpus: Ints, whole: int) -> Ints:
    """[job + 1] where the nodes of a job begin in the list of all placements."""
    begin = np.zeros(gpus.shape[0] + 1, np.int64)
    for job in range(gpus.shape[0]):
        begin[job + 1] = begin[job] + (gpus[job] + whole - 1) // whole
    return begin


# ── running jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Running(NamedTuple):
    length: Ints
    """[1]"""
    end: Floats
    """Binary heap of completions: equal moments in any order, since all of a moment happen before its pass."""
    job: Ints
    """[place in the heap]"""
    due: Floats
    """Estimated ends, ascending (EASY only)."""
    due_job: Ints


@_compiled
def _running(capacity: int) -> Running:
    return Running(
        np.zeros(1, np.int64),
        np.empty(capacity),
        np.empty(capacity, np.int64),
        np.empty(capacity),
        np.empty(capacity, np.int64),
    )


@_inlined
def _push_end(running: Running, end: float, job: int) -> None:
    place = running.length[0]
    running.length[0] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if running.end[parent] <= end:
            break
        running.end[place] = running.end[parent]
        running.job[place] = running.job[parent]
        place = parent
    running.end[place] = end
    running.job[place] = job


@_inlined
def _pop_end(running: Running) -> int:
    """The job that ends first."""
    first = running.job[0]
    running.length[0] -= 1
    length = running.length[0]
    end, job = running.end[length], running.job[length]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= length:
            break
        if child + 1 < length and running.end[child + 1] < running.end[child]:
            child += 1
        if end <= running.end[child]:
            break
        running.end[place] = running.end[child]
        running.job[place] = running.job[child]
        place = child
    running.end[place] = end
    running.job[place] = job
    return int(first)


@_inlined
def _insert_due(running: Running, due: float, job: int) -> None:
    """Called after `_push_end`: `length` counts the new job."""
    place = running.length[0] - 1
    while place > 0 and running.due[place - 1] > due:
        running.due[place] = running.due[place - 1]
        running.due_job[place] = running.due_job[place - 1]
        place -= 1
    running.due[place] = due
    running.due_job[place] = job


@_inlined
def _remove_due(running: Running, due: float, job: int) -> None:
    """Called after `_pop_end`: `length` leaves the job out."""
    place = np.searchsorted(running.due[: running.length[0] + 1], due)
    while running.due_job[place] != job:
        place += 1
    for later in range(place, running.length[0]):
        running.due[later] = running.due[later + 1]
        running.due_job[later] = running.due_job[later + 1]


# ── the queue ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Lanes(NamedTuple):
    size: Ints
    """[lane] GPUs, ascending."""
    of: Ints
    """[job] its lane."""
    waiting: Ints
    """[lane] jobs that wait."""
    begin: Ints
    """[lane + 1] where the lane begins in `jobs`."""
    jobs: Ints
    """All jobs (also those yet to come) by lane, then rank."""
    place: Ints
    """[job] its place in its lane."""
    rank: Ints
    """[job] its place in the order of a static rule."""
    width: Ints
    """[lane] leaves of its tree, a power of two."""
    root: Ints
    """[lane] the lane's tree is tree[root + 1 :], its leaves tree[root + width :]."""
    tree: Floats
    """Least estimate of the waiting jobs below; infinite where none waits."""
    first: Ints
    """[lane] least rank of its waiting jobs, `_NO_RANK` if none waits (rules by rank only)."""


@_compiled
def _lanes(gpus: Ints, order: Ints) -> Lanes:
    """`order`: all jobs in the order of a static rule."""
    total = gpus.shape[0]
    per_size = np.zeros(gpus.max() + 1, np.int64)
    for job in range(total):
        per_size[gpus[job]] += 1
    size = np.flatnonzero(per_size).astype(np.int64)
    lane_of_size = np.zeros(per_size.shape[0], np.int64)
    begin = np.zeros(size.shape[0] + 1, np.int64)
    width = np.ones(size.shape[0], np.int64)
    root = np.zeros(size.shape[0], np.int64)
    leaves = 0
    for lane in range(size.shape[0]):
        lane_of_size[size[lane]] = lane
        begin[lane + 1] = begin[lane] + per_size[size[lane]]
        while width[lane] < per_size[size[lane]]:
            width[lane] *= 2
        root[lane] = leaves
        leaves += 2 * width[lane]
    of = np.empty(total, np.int64)
    place = np.empty(total, np.int64)
    rank = np.empty(total, np.int64)
    jobs = np.empty(total, np.int64)
    taken = np.zeros(size.shape[0], np.int64)
    for r in range(total):
        job = order[r]
        lane = lane_of_size[gpus[job]]
        of[job], rank[job], place[job] = lane, r, taken[lane]
        jobs[begin[lane] + taken[lane]] = job
        taken[lane] += 1
    waiting = np.zeros(size.shape[0], np.int64)
    first = np.full(size.shape[0], _NO_RANK, np.int64)
    return Lanes(size, of, waiting, begin, jobs, place, rank, width, root, np.full(leaves, np.inf), first)


@_inlined
def _set_leaf(lanes: Lanes, job: int, value: float) -> None:
    lane = lanes.of[job]
    root = lanes.root[lane]
    i = lanes.width[lane] + lanes.place[job]
    lanes.tree[root + i] = value
    i >>= 1
    while i > 0:
        least = min(lanes.tree[root + 2 * i], lanes.tree[root + 2 * i + 1])
        if lanes.tree[root + i] == least:
            break
        lanes.tree[root + i] = least
        i >>= 1


@_inlined
def _find(lanes: Lanes, lane: int, place: int, now: float, latest: float) -> int:
    """The first waiting job of the lane from `place` on with now + estimate <= latest; -1 if there is none."""
    root, width = lanes.root[lane], lanes.width[lane]
    if place >= width:
        return -1
    i = width + place
    while now + lanes.tree[root + i] > latest:
        while i & 1:  # a right child, or the root: what lies behind is behind its parent
            i >>= 1
        if i == 0:
            return -1
        i += 1
    while i < width:
        i *= 2
        if now + lanes.tree[root + i] > latest:
            i += 1
    return int(lanes.jobs[lanes.begin[lane] + i - width])


@_compiled
def _place_behind(lanes: Lanes, lane: int, rank: int) -> int:
    """Place in the lane of the first job, waiting or not, of a larger rank."""
    low, high = lanes.begin[lane], lanes.begin[lane + 1]
    while low < high:
        middle = (low + high) >> 1
        if lanes.rank[lanes.jobs[middle]] > rank:
            high = middle
        else:
            low = middle + 1
    return int(low - lanes.begin[lane])


@_inlined
def _enqueue(lanes: Lanes, job: int, estimate: float) -> None:
    lane = lanes.of[job]
    lanes.waiting[lane] += 1
    _set_leaf(lanes, job, estimate)
    lanes.first[lane] = min(lanes.first[lane], lanes.rank[job])


@_inlined
def _dequeue(lanes: Lanes, job: int) -> None:
    lane = lanes.of[job]
    lanes.waiting[lane] -= 1
    _set_leaf(lanes, job, np.inf)
    if lanes.first[lane] == lanes.rank[job]:
        following = _find(lanes, lane, lanes.place[job] + 1, 0.0, _ANY) if lanes.waiting[lane] > 0 else -1
        lanes.first[lane] = lanes.rank[following] if following >= 0 else _NO_RANK


@_inlined
def _lanes_that_fit(lanes: Lanes, nodes: Nodes) -> int:
    """Jobs of the lanes below fit, and no others."""
    lane = 0
    while lane < lanes.size.shape[0] and _fits(nodes, lanes.size[lane]):
        lane += 1
    return lane


# ── passes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class World(NamedTuple):
    duration: Floats
    submit: Floats
    gpus: Ints
    estimate: Floats
    """Zeros where there are none."""
    term: Floats
    """By what UNICEP and WFP3 divide the wait."""
    nodes: Nodes
    later: Nodes
    """Scratch: the nodes at the shadow time."""
    open: Nodes
    """Scratch: the nodes without those that are kept for jobs that start before a given time."""
    kept: Floats
    """[node] when a job without room starts there, infinite where none does (EASY and conservative)."""
    running: Running
    lanes: Lanes
    order: Ints
    """All jobs in the order of the rule by rank."""
    queue: Ints
    """Waiting jobs in order of arrival (rules that change with time only)."""
    queued: Ints
    """[1] how many wait."""
    start: Floats
    placed_at: Ints
    placed: Ints
    """The nodes of job j, worker by worker: placed[placed_at[j] : placed_at[j + 1]]."""


@_inlined
def _start(world: World, job: int, now: float, backfill: int) -> None:
    _take(world.nodes, world.gpus[job], world.placed, world.placed_at[job])
    _run_on(world, job, now, backfill)


@_inlined
def _start_open(world: World, job: int, now: float, backfill: int) -> None:
    """As `_start`, on the open nodes."""
    _take(world.open, world.gpus[job], world.placed, world.placed_at[job])
    _shift(world.nodes, world.gpus[job], world.placed, world.placed_at[job], -1)
    _run_on(world, job, now, backfill)


@_inlined
def _run_on(world: World, job: int, now: float, backfill: int) -> None:
    """The job has its nodes."""
    world.start[job] = now
    _push_end(world.running, now + world.duration[job], job)
    if backfill >= BACKFILL_EASY:
        _insert_due(world.running, now + world.estimate[job], job)
    world.queued[0] -= 1


@_inlined
def _complete(world: World, backfill: int) -> int:
    job = _pop_end(world.running)
    if backfill >= BACKFILL_EASY:
        _remove_due(world.running, world.start[job] + world.estimate[job], job)
    _shift(world.nodes, world.gpus[job], world.placed, world.placed_at[job], 1)
    return job


@_inlined
def _first_rank(lanes: Lanes, end: int) -> int:
    """The least rank that waits in the lanes below `end`."""
    best = _NO_RANK
    for lane in range(end):
        best = min(best, lanes.first[lane])
    return best


@_inlined
def _pass_by_rank(world: World, now: float, backfill: int) -> bool:
    """Whether another pass at this moment may start more."""
    lanes = world.lanes
    fitting = _lanes_that_fit(lanes, world.nodes)
    while fitting > 0:
        rank = _first_rank(lanes, fitting if backfill == BACKFILL_SKIP else lanes.size.shape[0])
        if rank == _NO_RANK:
            return False
        job = world.order[rank]
        if lanes.of[job] >= fitting:  # never with skipping
            return backfill == BACKFILL_EASY and _backfill_by_rank(world, job, now)
        _start(world, job, now, backfill)
        _dequeue(lanes, job)
        fitting = _lanes_that_fit(lanes, world.nodes)
    return False


@_compiled
def _shadow(world: World, blocked: int, now: float) -> float:
    """When the blocked job would fit if estimates were true; `world.later` becomes the nodes of that moment."""
    running, later = world.running, world.later
    _copy_nodes(world.nodes, later)
    shadow = now
    for place in range(running.length[0]):
        due = max(running.due[place], now + OVERDUE_S)
        if due > shadow:  # all that end at one moment are released before one looks
            if _fits(later, world.gpus[blocked]):
                break
            shadow = due
        job = running.due_job[place]
        _shift(later, world.gpus[job], world.placed, world.placed_at[job], 1)
    return shadow


@_compiled
def _keep(world: World, blocked: int, shadow: float) -> None:
    """Give the blocked job its nodes at the shadow time, of which `world.later` is."""
    whole = world.nodes.having.shape[0] - 1
    gpus = world.gpus[blocked]
    taken = np.empty((gpus + whole - 1) // whole, np.int64)
    _take(world.later, gpus, taken, 0)
    for node in taken:
        world.kept[node] = shadow


@_compiled
def _open(world: World, end: float) -> None:
    """`world.open` becomes the nodes that a job may use that runs until `end`."""
    opened = world.open
    opened.having[:] = 0
    for node in range(opened.free.shape[0]):
        opened.free[node] = world.nodes.free[node] if world.kept[node] >= end else 0
        opened.having[opened.free[node]] += 1


@_compiled
def _start_behind(world: World, job: int, now: float, shadow: float) -> None:
    """Start a job that fits behind the one that nodes are kept for: on all nodes when it ends in time."""
    if now + world.estimate[job] > shadow:
        _start_open(world, job, now, BACKFILL_EASY)
    else:
        _start(world, job, now, BACKFILL_EASY)
        _open(world, _ANY)


@_compiled
def _backfill_by_rank(world: World, blocked: int, now: float) -> bool:
    """Whether some job started."""
    lanes = world.lanes
    shadow = _shadow(world, blocked, now)
    world.kept[:] = np.inf
    _keep(world, blocked, shadow)
    _open(world, _ANY)
    rank, some = lanes.rank[blocked], False
    while rank != _NO_RANK:
        behind, rank = rank, _NO_RANK
        for lane in range(_lanes_that_fit(lanes, world.nodes)):
            if lanes.waiting[lane] > 0:
                latest = _ANY if _fits(world.open, lanes.size[lane]) else shadow
                job = _find(lanes, lane, _place_behind(lanes, lane, behind), now, latest)
                if job >= 0:
                    rank = min(rank, lanes.rank[job])
        if rank != _NO_RANK:
            started = world.order[rank]
            _start_behind(world, started, now, shadow)
            _dequeue(lanes, started)
            some = True
    return some


# ── rules that change with time ──────────────────────────────────────────────────────────────────────────────────────


@_inlined
def _score(world: World, rule: int, job: int, now: float) -> float:
    """Higher first. See `policy.formulas` for the sources."""
    if rule == BY_MULTIFACTOR:
        return float(AGE_WEIGHT * min(1.0, (now - world.submit[job]) / MAX_AGE_S) + world.term[job])
    ratio = (now - world.submit[job]) / world.term[job]
    if rule == BY_WFP3:
        return float(ratio * ratio * ratio * world.gpus[job])
    return float(ratio)


@_inlined
def _best(world: World, rule: int, now: float, lanes_end: int) -> int:
    """Place in the queue of the job of the highest score, the first to arrive of equals; -1 if there is none."""
    best, highest = -1, -np.inf
    for place in range(world.queued[0]):
        job = world.queue[place]
        if world.lanes.of[job] < lanes_end:
            score = _score(world, rule, job, now)
            if score > highest:
                best, highest = place, score
    return best


@_compiled
def _unqueue(world: World, place: int) -> None:
    """Called before the job is started: `queued` counts it."""
    world.lanes.waiting[world.lanes.of[world.queue[place]]] -= 1
    for behind in range(place, world.queued[0] - 1):
        world.queue[behind] = world.queue[behind + 1]


@_compiled
def _start_from_queue(world: World, place: int, now: float, backfill: int) -> None:
    job = world.queue[place]
    _unqueue(world, place)
    _start(world, job, now, backfill)


@_compiled
def _pass_by_time(world: World, rule: int, now: float, backfill: int) -> bool:
    """Whether another pass at this moment may start more."""
    lanes = world.lanes
    fitting = _lanes_that_fit(lanes, world.nodes)
    while fitting > 0 and world.queued[0] > 0:
        place = _best(world, rule, now, fitting if backfill == BACKFILL_SKIP else lanes.size.shape[0])
        if place < 0:
            return False
        if lanes.of[world.queue[place]] >= fitting:
            return backfill == BACKFILL_EASY and _backfill_by_time(world, rule, place, now)
        _start_from_queue(world, place, now, backfill)
        fitting = _lanes_that_fit(lanes, world.nodes)
    return False


@_compiled
def _backfill_by_time(world: World, rule: int, place: int, now: float) -> bool:
    """Whether some job started."""
    lanes, blocked = world.lanes, world.queue[place]
    shadow = _shadow(world, blocked, now)
    world.kept[:] = np.inf
    _keep(world, blocked, shadow)
    _open(world, _ANY)
    latest = np.empty(lanes.size.shape[0])
    behind, behind_score = blocked, _score(world, rule, blocked, now)
    some = False
    while place >= 0:
        fitting = _lanes_that_fit(lanes, world.nodes)
        for lane in range(fitting):
            latest[lane] = _ANY if _fits(world.open, lanes.size[lane]) else shadow
        place, highest = -1, -np.inf
        for i in range(world.queued[0] if fitting > 0 else 0):
            job = world.queue[i]
            lane = lanes.of[job]
            if lane < fitting and now + world.estimate[job] <= latest[lane]:
                score = _score(world, rule, job, now)
                follows = score < behind_score or (score == behind_score and job > behind)
                if follows and score > highest:
                    place, highest = i, score
        if place >= 0:
            behind, behind_score = world.queue[place], highest
            _unqueue(world, place)
            _start_behind(world, behind, now, shadow)
            some = True
    return some


# ── conservative backfilling ─────────────────────────────────────────────────────────────────────────────────────────


@_compiled
def _shadow_unkept(world: World, blocked: int, now: float) -> float:
    """As `_shadow`, on nodes that are kept for nobody; -1 where the job would never fit there."""
    running, later, gpus = world.running, world.later, world.gpus[blocked]
    whole = later.having.shape[0] - 1
    later.having[:] = 0
    for node in range(later.free.shape[0]):
        later.free[node] = world.nodes.free[node] if world.kept[node] == np.inf else 0
        later.having[later.free[node]] += 1
    shadow = now
    for place in range(running.length[0]):
        due = max(running.due[place], now + OVERDUE_S)
        if due > shadow:
            if shadow > now and _fits(later, gpus):
                return shadow
            shadow = due
        job = running.due_job[place]
        left, at = world.gpus[job], world.placed_at[job]
        while left > 0:
            if world.kept[world.placed[at]] == np.inf:
                _change(later, world.placed[at], min(left, whole))
            left -= whole
            at += 1
    return shadow if _fits(later, gpus) and running.length[0] > 0 else -1.0


@_compiled
def _pass_conservative(world: World, rule: int, now: float) -> None:
    """In order: who fits beside the nodes that are kept starts, who does not has nodes kept for it. After starts the
    nodes that are kept are chosen anew."""
    count = world.queued[0]
    keys = np.empty(count)
    for i in range(count):
        job = world.queue[i]
        keys[i] = float(world.lanes.rank[job]) if rule == BY_RANK else -_score(world, rule, job, now)
    ordered = world.queue[:count][np.argsort(keys, kind="mergesort")]
    again = _free(world.nodes) > 0
    while again:
        again = False
        world.kept[:] = np.inf
        hopeless = _NO_RANK
        for i in range(count):
            job = ordered[i]
            if job < 0:
                continue
            _open(world, now + world.estimate[job])
            if _fits(world.open, world.gpus[job]):
                _start_open(world, job, now, BACKFILL_CONSERVATIVE)
                ordered[i] = -1
                again = True
            elif again:
                break
            elif world.gpus[job] < hopeless:
                shadow = _shadow_unkept(world, job, now)
                if shadow >= 0.0:
                    _keep(world, job, shadow)
                else:
                    hopeless = world.gpus[job]
    left = 0
    for i in range(count):
        if np.isnan(world.start[world.queue[i]]):
            world.queue[left] = world.queue[i]
            left += 1


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@_inlined
def _arrive(world: World, rule: int, backfill: int, job: int) -> None:
    if rule == BY_RANK and backfill != BACKFILL_CONSERVATIVE:
        _enqueue(world.lanes, job, world.estimate[job])
    else:
        world.lanes.waiting[world.lanes.of[job]] += 1
        world.queue[world.queued[0]] = job
    world.queued[0] += 1


@_entry
def run(
    submit: Floats,
    duration: Floats,
    gpus: Ints,
    estimate: Floats,
    term: Floats,
    node_gpus: Ints,
    order: Ints,
    rule: int,
    backfill: int,
) -> tuple[Floats, Floats, Ints, Ints, Floats]:
    """Every job from arrival to completion.

    Jobs are by (submit, seq); each fits the empty cluster. Returns starts [job], finishes [job], `placed_at` and
    `placed` (see `World`), and [integral of the queue's length, integral of the busy GPUs, passes, longest queue].
    """
    total, whole, capacity = submit.shape[0], node_gpus.max(), node_gpus.sum()
    placed_at = _placed_at(gpus, whole)
    world = World(
        duration,
        submit,
        gpus,
        estimate,
        term,
        _nodes(node_gpus),
        _nodes(node_gpus),
        _nodes(node_gpus),
        np.full(node_gpus.shape[0], np.inf),
        _running(min(total, capacity) + 1),
        _lanes(gpus, order),
        order,
        np.empty(total + 1, np.int64),
        np.zeros(1, np.int64),
        np.full(total, np.nan),
        placed_at,
        np.empty(placed_at[total], np.int64),
    )
    finish = np.empty(total)
    sums = np.zeros(4)
    arrived, busy, now = 0, 0, submit[0]
    while arrived < total or world.running.length[0] > 0:
        moment = submit[arrived] if arrived < total else np.inf
        if world.running.length[0] > 0:
            moment = min(moment, world.running.end[0])
        sums[0] += world.queued[0] * (moment - now)
        sums[1] += busy * (moment - now)
        now = moment
        while world.running.length[0] > 0 and world.running.end[0] <= now:
            job = _complete(world, backfill)
            finish[job] = now
        while arrived < total and submit[arrived] <= now:
            _arrive(world, rule, backfill, arrived)
            arrived += 1
        if world.queued[0] > 0:
            more = True
            while more:
                if backfill == BACKFILL_CONSERVATIVE:
                    _pass_conservative(world, rule, now)
                    more = False
                elif rule == BY_RANK:
                    more = _pass_by_rank(world, now, backfill)
                else:
                    more = _pass_by_time(world, rule, now, backfill)
            sums[2] += 1
            sums[3] = max(sums[3], world.queued[0])
        busy = capacity - _free(world.nodes)
    return world.start, finish, placed_at, world.placed, sums


# ── index policies, with preemption ──────────────────────────────────────────────────────────────────────────────────


class Shares(NamedTuple):
    submit: Floats
    duration: Floats
    gpus: Ints
    nodes: Nodes
    later: Nodes
    """Scratch: the nodes without the victims."""
    thresholds: Floats
    """Attained service, ascending: a job's level is how many of them it has reached."""
    rate: Floats
    """[job] service per second of running: its GPUs, or 1."""
    table: Floats
    """[kind, level] rank, lower first."""
    kind: Ints
    """[job]"""
    weight: Floats
    """[job] what its remaining time counts, where that is the rank; empty where the table is."""
    left: Floats
    """[job] estimated run time without what was saved before the present stretch."""
    bound_s: float
    """A job that has waited so long goes before all others, and nobody takes its place any more."""
    move_after_s: float
    """Jobs that have run so long on a node may be moved to make room for others; infinite: never."""
    least_loss: bool
    """Of equal rank who loses least is evicted first, else who came last."""
    urgent: Bools
    """[job] that it has."""
    level: Ints
    attained: Floats
    """Service before the present stretch."""
    remaining: Floats
    """Seconds of work that were not saved before the present stretch."""
    since: Floats
    """Start of the present stretch."""
    restart: Floats
    """Seconds at the beginning of the present stretch in which no work is done."""
    event: Floats
    """When the running job next completes or reaches a level."""
    preemptions: Ints
    running: Ints
    """Jobs in any order, the first `length[0]`."""
    waiting: Ints
    """Jobs in any order, the first `length[1]`."""
    length: Ints
    """[2]"""
    start: Floats
    placed_at: Ints
    placed: Ints


@_inlined
def _rank_waiting(shares: Shares, job: int) -> float:
    if shares.urgent[job]:
        return float(-np.inf)
    if shares.weight.shape[0] > 0:
        return float(shares.weight[job] * shares.left[job])
    return float(shares.table[shares.kind[job], shares.level[job]])


@_inlined
def _rank_running(shares: Shares, job: int, now: float) -> float:
    if shares.urgent[job]:
        return float(-np.inf)
    if shares.weight.shape[0] > 0:
        worked = max(0.0, now - shares.since[job] - shares.restart[job])
        return float(shares.weight[job] * (shares.left[job] - worked))
    return float(shares.table[shares.kind[job], shares.level[job]])


@_inlined
def _next_level(shares: Shares, job: int) -> int:
    """The threshold behind which the job's rank is another one; levels between which it is the same are passed over."""
    level, ranks = int(shares.level[job]), shares.table[shares.kind[job]]
    while level < shares.thresholds.shape[0] and ranks[level + 1] == ranks[level]:
        level += 1
    return level


@_compiled
def _next_event(shares: Shares, job: int) -> float:
    moment = shares.since[job] + shares.restart[job] + shares.remaining[job]
    level = _next_level(shares, job)
    if level < shares.thresholds.shape[0]:
        reached = shares.since[job] + (shares.thresholds[level] - shares.attained[job]) / shares.rate[job]
        moment = min(moment, max(reached, shares.since[job]))
    return float(moment)


@_inlined
def _urgent_at(shares: Shares, job: int) -> float:
    """When the waiting job has waited for the bound: what was saved of its work is no waiting."""
    return float(shares.submit[job] + shares.bound_s + (shares.duration[job] - shares.remaining[job]))


@_compiled
def _begin_stretch(shares: Shares, job: int, now: float, restart_s: float) -> None:
    _take(shares.nodes, shares.gpus[job], shares.placed, shares.placed_at[job])
    shares.since[job] = now
    if np.isnan(shares.start[job]):
        shares.start[job] = now
    else:
        shares.restart[job] = restart_s
    shares.event[job] = _next_event(shares, job)
    shares.running[shares.length[0]] = job
    shares.length[0] += 1


@_compiled
def _end_stretch(shares: Shares, place: int, now: float, log: Log, where: Log) -> int:
    """The job at a place of `running`, which runs no more."""
    job = int(shares.running[place])
    log.append((job, float(shares.since[job]), now))
    for at in range(shares.placed_at[job], shares.placed_at[job + 1]):
        where.append(shares.placed[at])
    shares.length[0] -= 1
    shares.running[place] = shares.running[shares.length[0]]
    shares.attained[job] += shares.rate[job] * (now - shares.since[job])
    _shift(shares.nodes, shares.gpus[job], shares.placed, shares.placed_at[job], 1)
    return job


@_compiled
def _evict(shares: Shares, place: int, now: float, checkpoint_s: float, log: Log, where: Log) -> None:
    """The work since the last checkpoint of the stretch is lost."""
    job = _end_stretch(shares, place, now, log, where)
    worked = max(0.0, now - shares.since[job] - shares.restart[job])
    saved = np.floor(worked / checkpoint_s) * checkpoint_s
    shares.remaining[job] -= saved
    shares.left[job] -= saved
    shares.preemptions[job] += 1
    shares.waiting[shares.length[1]] = job
    shares.length[1] += 1


@_inlined
def _loss(shares: Shares, job: int, now: float, restart_s: float, checkpoint_s: float) -> float:
    """What stopping a running job costs it, s: a restart, and the work since its last checkpoint."""
    worked = max(0.0, now - shares.since[job] - shares.restart[job])
    return float(restart_s + worked - np.floor(worked / checkpoint_s) * checkpoint_s)


@_compiled
def _victims(shares: Shares, job: int, now: float, restart_s: float, checkpoint_s: float) -> Ints:
    """Running jobs to evict so that `job` fits, none if that is not possible.

    Of higher rank only. From the last in order (rank, arrival; with `least_loss` rank, then what is lost) on until it
    fits; then the first in order of them that need not go are spared.
    """
    mine = _rank_waiting(shares, job)
    above = np.empty(shares.length[0], np.int64)
    ranks = np.empty(shares.length[0])
    losses = np.zeros(shares.length[0])
    found = 0
    for place in range(shares.length[0]):
        other = shares.running[place]
        rank = _rank_running(shares, other, now)
        if rank > mine:
            above[found] = other
            ranks[found] = rank
            if shares.least_loss:
                losses[found] = _loss(shares, other, now, restart_s, checkpoint_s)
            found += 1
    by_arrival = np.argsort(-above[:found], kind="mergesort")
    by_loss = by_arrival[np.argsort(losses[:found][by_arrival], kind="mergesort")]
    by_rank = by_loss[np.argsort(-ranks[:found][by_loss], kind="mergesort")]
    last_first: Ints = above[:found][by_rank]
    _copy_nodes(shares.nodes, shares.later)
    count = 0
    while not _fits(shares.later, shares.gpus[job]):
        if count == found:
            return np.empty(0, np.int64)
        victim = last_first[count]
        _shift(shares.later, shares.gpus[victim], shares.placed, shares.placed_at[victim], 1)
        count += 1
    needed = np.ones(count, np.bool_)
    for place in range(count - 1, -1, -1):
        victim = last_first[place]
        _shift(shares.later, shares.gpus[victim], shares.placed, shares.placed_at[victim], -1)
        needed[place] = not _fits(shares.later, shares.gpus[job])
        if needed[place]:
            _shift(shares.later, shares.gpus[victim], shares.placed, shares.placed_at[victim], 1)
    evicted: Ints = last_first[:count][needed]
    return evicted


class Movers(NamedTuple):
    """Running jobs by place: in order of arrival."""

    job: Ints
    loss: Floats
    """What stopping it loses, s."""
    outranked: Bools
    able: Bools
    """It may leave: outranked, or on one node alone and there for `move_after_s`."""
    begin: Ints
    """[node + 1] where the places of those on a node begin in `on`."""
    on: Ints
    """Places by node, those that lose least first."""


@_compiled
def _movers(shares: Shares, mine: float, now: float, restart_s: float, checkpoint_s: float) -> Movers:
    running: Ints = np.sort(shares.running[: shares.length[0]])
    total = running.shape[0]
    loss, outranked, able = np.zeros(total), np.zeros(total, np.bool_), np.zeros(total, np.bool_)
    begin = np.zeros(shares.nodes.free.shape[0] + 1, np.int64)
    for place in range(total):
        job = running[place]
        loss[place] = _loss(shares, job, now, restart_s, checkpoint_s)
        outranked[place] = _rank_running(shares, job, now) > mine
        first, end = shares.placed_at[job], shares.placed_at[job + 1]
        able[place] = outranked[place] or (end - first == 1 and now - shares.since[job] >= shares.move_after_s)
        for at in range(first, end):
            begin[shares.placed[at] + 1] += 1
    begin = np.cumsum(begin)
    on, filled = np.empty(begin[-1], np.int64), begin.copy()
    for place in np.argsort(loss, kind="mergesort"):
        job = running[place]
        for at in range(shares.placed_at[job], shares.placed_at[job + 1]):
            node = shares.placed[at]
            on[filled[node]] = place
            filled[node] += 1
    return Movers(running, loss, outranked, able, begin, on)


@_compiled
def _could_have(shares: Shares, movers: Movers) -> Ints:
    """[node] GPUs that would be free if all that may leave did."""
    whole = shares.nodes.having.shape[0] - 1
    found = shares.nodes.free.copy()
    for place in range(movers.job.shape[0]):
        if movers.able[place]:
            job = movers.job[place]
            gpus = shares.gpus[job]
            for at in range(shares.placed_at[job], shares.placed_at[job + 1]):
                found[shares.placed[at]] += min(gpus, whole)
                gpus -= whole
    return found


@_compiled
def _vacate(
    shares: Shares,
    movers: Movers,
    node: int,
    need: int,
    free: Ints,
    closed: Bools,
    leaving: Bools,
    best_cost: float,
) -> float:
    """Make `need` GPUs free on a node, in `free` and `leaving` [place]; what is lost, infinite where it cannot be done
    or is not below `best_cost`."""
    whole = shares.nodes.having.shape[0] - 1
    cost = 0.0
    for outranked in (True, False):
        for at_node in range(movers.begin[node], movers.begin[node + 1]):
            place = movers.on[at_node]
            if free[node] >= need or cost >= best_cost:
                break
            if leaving[place] or not movers.able[place] or movers.outranked[place] != outranked:
                continue
            job = movers.job[place]
            first, end, gpus = shares.placed_at[job], shares.placed_at[job + 1], shares.gpus[job]
            if not outranked:
                other = -1
                for candidate in range(free.shape[0]):
                    room = candidate != node and not closed[candidate] and free[candidate] >= gpus
                    if room and (other < 0 or free[candidate] < free[other]):
                        other = candidate
                if other < 0:
                    continue
                free[other] -= gpus
            leaving[place] = True
            cost += movers.loss[place]
            for at in range(first, end):
                free[shares.placed[at]] += min(gpus, whole)
                gpus -= whole
    return cost if free[node] >= need and cost < best_cost else np.inf


@_compiled
def _could_move(shares: Shares, job: int, now: float) -> bool:
    """Those that go on elsewhere hold as much there: without enough that is free or outranked nothing can be done."""
    mine, room = _rank_waiting(shares, job), _free(shares.nodes)
    for place in range(shares.length[0]):
        if room >= shares.gpus[job]:
            break
        other = shares.running[place]
        room += shares.gpus[other] if _rank_running(shares, other, now) > mine else 0
    return room >= int(shares.gpus[job])


@_compiled
def _moves(shares: Shares, job: int, now: float, restart_s: float, checkpoint_s: float) -> Ints:
    """Running jobs, in order of arrival, that have to leave so that `job` fits, if those that it does not outrank go on
    elsewhere at once; none if that is not possible.

    Worker by worker the node is taken on which least is lost. Those that are outranked leave first. The others have run
    there for `move_after_s`, on that node alone, and find room on another (the one with the least that suffices).
    """
    if not _could_move(shares, job, now):
        return np.empty(0, np.int64)
    whole, count = shares.nodes.having.shape[0] - 1, shares.nodes.free.shape[0]
    movers = _movers(shares, _rank_waiting(shares, job), now, restart_s, checkpoint_s)
    could_have = _could_have(shares, movers)
    free, closed = shares.nodes.free.copy(), np.zeros(count, np.bool_)
    leaving = np.zeros(movers.job.shape[0], np.bool_)
    left = shares.gpus[job]
    if np.sum(could_have >= min(left, whole)) < left // whole:
        return np.empty(0, np.int64)
    while left > 0:
        need = min(left, whole)
        left -= need
        best, least, free_then, leaving_then = -1, np.inf, free, leaving
        for node in range(count):
            if not closed[node] and could_have[node] >= need:
                trial, gone = free.copy(), leaving.copy()
                cost = _vacate(shares, movers, node, need, trial, closed, gone, least)
                if cost < least:
                    best, least, free_then, leaving_then = node, cost, trial, gone
        if best < 0:
            return np.empty(0, np.int64)
        free, leaving = free_then, leaving_then
        free[best] -= need
        closed[best] = True
    found: Ints = movers.job[leaving]
    return found


@_compiled
def _start_waiting(shares: Shares, job: int, now: float, restart_s: float) -> None:
    place = 0
    while shares.waiting[place] != job:
        place += 1
    shares.length[1] -= 1
    shares.waiting[place] = shares.waiting[shares.length[1]]
    _begin_stretch(shares, job, now, restart_s)


@_compiled
def _next_in_order(shares: Shares, size_end: int) -> int:
    """Place in `waiting` of the least (rank, arrival) among jobs below `size_end` GPUs; -1 if there is none."""
    best, least, first = -1, np.inf, _NO_RANK
    for place in range(shares.length[1]):
        job = shares.waiting[place]
        if shares.gpus[job] < size_end:
            rank = _rank_waiting(shares, job)
            if best < 0 or rank < least or (rank == least and job < first):
                best, least, first = place, rank, job
    return best


@_compiled
def _preemptive_pass(shares: Shares, now: float, restart_s: float, checkpoint_s: float, log: Log, where: Log) -> None:
    """In order of (rank, arrival). What found no room, even by eviction, will not for a later job as large."""
    size_end = _NO_RANK
    while True:
        place = _next_in_order(shares, size_end)
        if place < 0:
            return
        job = shares.waiting[place]
        moved = np.empty(0, np.int64)
        if not _fits(shares.nodes, shares.gpus[job]):
            victims = _victims(shares, job, now, restart_s, checkpoint_s)
            if victims.shape[0] == 0 and shares.move_after_s < np.inf and _free(shares.nodes) > 0:
                victims = _moves(shares, job, now, restart_s, checkpoint_s)
                mine = _rank_waiting(shares, job)
                stays = np.zeros(victims.shape[0], np.bool_)
                for number in range(victims.shape[0]):
                    stays[number] = _rank_running(shares, victims[number], now) <= mine
                moved = victims[stays]
            if victims.shape[0] == 0:
                size_end = shares.gpus[job]
                continue
            for victim in victims:
                at = 0
                while shares.running[at] != victim:
                    at += 1
                _evict(shares, at, now, checkpoint_s, log, where)
        _start_waiting(shares, job, now, restart_s)
        for other in moved:
            if _fits(shares.nodes, shares.gpus[other]):
                _start_waiting(shares, int(other), now, restart_s)


@_compiled
def _progress(shares: Shares, now: float, finish: Floats, log: Log, where: Log) -> None:
    """Completions, levels reached, and bounds of waiting reached at this moment."""
    place = 0
    while place < shares.length[0]:
        job = shares.running[place]
        if shares.event[job] > now:
            place += 1
        elif shares.since[job] + shares.restart[job] + shares.remaining[job] <= now:
            finish[job] = now
            _end_stretch(shares, place, now, log, where)
        else:
            shares.level[job] = _next_level(shares, job) + 1
            shares.event[job] = _next_event(shares, job)
    for place in range(shares.length[1]):
        job = shares.waiting[place]
        if _urgent_at(shares, job) <= now:
            shares.urgent[job] = True


@_entry
def run_index(
    submit: Floats,
    duration: Floats,
    gpus: Ints,
    node_gpus: Ints,
    thresholds: Floats,
    rate: Floats,
    table: Floats,
    kind: Ints,
    weight: Floats,
    estimate: Floats,
    bound_s: float,
    move_after_s: float,
    least_loss: bool,
    restart_s: float,
    checkpoint_s: float,
) -> tuple[Floats, Floats, Ints, Ints, Floats, Floats, Ints, Ints, Ints, Floats]:
    """Returns first starts, finishes, preemptions [job], the stretches (their jobs, beginnings and ends, in order of
    the ends, and the nodes of all), and the last three of `run`."""
    total, capacity = submit.shape[0], node_gpus.sum()
    placed_at = _placed_at(gpus, node_gpus.max())
    shares = Shares(
        submit,
        duration,
        gpus,
        _nodes(node_gpus),
        _nodes(node_gpus),
        thresholds,
        rate,
        table,
        kind,
        weight,
        estimate.copy(),
        bound_s,
        move_after_s,
        least_loss,
        np.zeros(total, np.bool_),
        np.zeros(total, np.int64),
        np.zeros(total),
        duration.copy(),
        np.zeros(total),
        np.zeros(total),
        np.zeros(total),
        np.zeros(total, np.int64),
        np.empty(min(total, capacity) + 1, np.int64),
        np.empty(total + 1, np.int64),
        np.zeros(2, np.int64),
        np.full(total, np.nan),
        placed_at,
        np.empty(placed_at[total], np.int64),
    )
    finish = np.empty(total)
    log = List()
    log.append((np.int64(0), 0.0, 0.0))
    log.clear()
    where = List()
    where.append(np.int64(0))
    where.clear()
    sums = np.zeros(4)
    arrived, now = 0, submit[0]
    while arrived < total or shares.length[0] > 0:
        moment = submit[arrived] if arrived < total else np.inf
        for place in range(shares.length[0]):
            moment = min(moment, shares.event[shares.running[place]])
        for place in range(shares.length[1]):
            job = shares.waiting[place]
            if not shares.urgent[job]:
                moment = min(moment, max(now, _urgent_at(shares, job)))
        sums[0] += shares.length[1] * (moment - now)
        sums[1] += (capacity - _free(shares.nodes)) * (moment - now)
        now = moment
        _progress(shares, now, finish, log, where)
        while arrived < total and submit[arrived] <= now:
            shares.waiting[shares.length[1]] = arrived
            shares.length[1] += 1
            arrived += 1
        if shares.length[1] > 0:
            _preemptive_pass(shares, now, restart_s, checkpoint_s, log, where)
            sums[2] += 1
            sums[3] = max(sums[3], shares.length[1])
    jobs, began, ended = np.empty(len(log), np.int64), np.empty(len(log)), np.empty(len(log))
    for number in range(len(log)):
        jobs[number], began[number], ended[number] = log[number]
    nodes = np.empty(len(where), np.int64)
    for number in range(len(where)):
        nodes[number] = where[number]
    return shares.start, finish, shares.preemptions, jobs, began, ended, nodes, placed_at, shares.placed, sums
