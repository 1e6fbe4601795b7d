"""The event loop of `fast.py`, compiled by numba. Plain arrays and loops; see there for what it does and why.

A heap is an array of job numbers ordered by (key, number), its length kept apart.
"""

# numba infers types itself, and its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_WHOLE = 8
_WFP3 = 1
_STRICT, _SKIP, _EASY = 0, 1, 2


@njit(cache=True)
def _before(a: int, b: int, key: Any) -> bool:
    return bool(key[a] < key[b] or (key[a] == key[b] and a < b))


@njit(cache=True)
def _push(heap: Any, length: int, item: int, key: Any) -> int:
    at = length
    while at > 0:
        above = (at - 1) >> 1
        if not _before(item, heap[above], key):
            break
        heap[at] = heap[above]
        at = above
    heap[at] = item
    return length + 1


@njit(cache=True)
def _pop(heap: Any, length: int, key: Any) -> int:
    """Take the first out; returns the new length."""
    length -= 1
    item = heap[length]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= length:
            break
        if child + 1 < length and _before(heap[child + 1], heap[child], key):
            child += 1
        if not _before(heap[child], item, key):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = item
    return length


@njit(cache=True)
def _best_fit(free: Any, gpus: int, taken: Any, n_taken: int) -> int:
    """The node with the fewest free GPUs that suffice, lowest number first, not among the taken ones; -1: none."""
    best = -1
    for node in range(len(free)):
        if free[node] >= gpus and (best < 0 or free[node] < free[best]):
            skip = False
            for i in range(n_taken):
                if taken[i] == node:
                    skip = True
                    break
            if not skip:
                best = node
                if free[node] == gpus and n_taken == 0:
                    break
    return best


@njit(cache=True)
def _place(free: Any, gpus: int, nodes: Any, counts: Any) -> int:
    """Take the GPUs of a job: how many nodes it got (written to `nodes`, `counts`), 0 when it does not fit."""
    if gpus <= _WHOLE:
        node = _best_fit(free, gpus, nodes, 0)
        if node < 0:
            return 0
        nodes[0], counts[0] = node, gpus
        free[node] -= gpus
        return 1
    whole, rest = gpus // _WHOLE, gpus % _WHOLE
    found = 0
    # Whole nodes by best fit are the fullest that have eight free; lowest number first among equals.
    while found < whole:
        node = _best_fit(free, _WHOLE, nodes, found)
        if node < 0:
            return 0
        nodes[found], counts[found] = node, _WHOLE
        found += 1
    if rest:
        node = _best_fit(free, rest, nodes, found)
        if node < 0:
            return 0
        nodes[found], counts[found] = node, rest
        found += 1
    for i in range(found):
        free[nodes[i]] -= counts[i]
    return found


@njit(cache=True)
def _score(job: int, now: float, timed: int, submit: Any, estimate: Any, gpus: int, log_gpus: float) -> float:
    """As `policy.formulas`, lower first."""
    wait = now - submit[job]
    if timed == _WFP3:
        ratio = wait / estimate[job]
        return float(-(ratio * ratio * ratio) * gpus)
    return float(-wait / (log_gpus * estimate[job]))


@njit(cache=True)
def run(
    submit: Any,
    run_s: Any,
    estimate: Any,
    static_key: Any,
    timed: int,
    backfill: int,
    sizes: Any,
    log_sizes: Any,
    size_of: Any,
    able: Any,
    node_gpus: Any,
) -> Any:
    """(start, finish) of each job, seconds; NaN for jobs of sizes that are not `able`."""
    n, k, m = len(submit), len(sizes), len(node_gpus)
    start = np.full(n, np.nan)
    finish = np.full(n, np.nan)
    free = node_gpus.copy()
    key = static_key.copy()

    # The heap of each size has its own stretch of one array.
    first = np.zeros(k + 1, np.int64)
    for j in range(n):
        first[size_of[j] + 1] += 1
    for c in range(k):
        first[c + 1] += first[c]
    waiting = np.empty(n, np.int64)
    length = np.zeros(k, np.int64)

    running = np.empty(n, np.int64)
    n_running = 0
    most = 1
    for c in range(k):
        if able[c]:
            most = max(most, sizes[c] // _WHOLE + 1)
    held_nodes = np.empty((n, most), np.int32)
    held_counts = np.empty((n, most), np.int32)
    n_held = np.zeros(n, np.int64)
    nodes = np.empty(m + 1, np.int64)
    counts = np.empty(m + 1, np.int64)
    failed = np.zeros(k, np.bool_)

    arriving = 0
    while arriving < n or n_running > 0:
        while arriving < n and not able[size_of[arriving]]:
            arriving += 1  # what can never run makes no moment
        if arriving == n and n_running == 0:
            break
        now = np.inf
        if arriving < n:
            now = submit[arriving]
        if n_running > 0 and finish[running[0]] < now:
            now = finish[running[0]]

        completed = False
        while n_running > 0 and finish[running[0]] == now:
            job = running[0]
            n_running = _pop(running, n_running, finish)
            for i in range(n_held[job]):
                free[held_nodes[job, i]] += held_counts[job, i]
            completed = True
        came = arriving
        while arriving < n and submit[arriving] == now:
            c = size_of[arriving]
            if able[c]:
                if timed:
                    waiting[first[c] + length[c]] = arriving
                    length[c] += 1
                else:
                    length[c] = _push(waiting[first[c] : first[c + 1]], length[c], arriving, key)
            arriving += 1

        for c in range(k):
            failed[c] = length[c] == 0
        if backfill == _SKIP and not completed:
            # Nothing that waited fits: only sizes of which all that wait have just come can.
            for c in range(k):
                if not failed[c]:
                    fresh = 0
                    for j in range(came, arriving):
                        if size_of[j] == c:
                            fresh += 1
                    failed[c] = fresh < length[c]
        if timed:
            for c in range(k):
                if not failed[c] or backfill == _EASY:
                    for i in range(length[c]):
                        j = waiting[first[c] + i]
                        key[j] = _score(j, now, timed, submit, estimate, sizes[c], log_sizes[c])
                    # Build a heap from what is there.
                    heap = waiting[first[c] : first[c + 1]]
                    for i in range(length[c]):
                        _push(heap, i, heap[i], key)

        head = -1
        while True:
            best = -1
            for c in range(k):
                if not failed[c] and (best < 0 or _before(waiting[first[c]], waiting[first[best]], key)):
                    best = c
            if best < 0:
                break
            job = waiting[first[best]]
            got = _place(free, sizes[best], nodes, counts)
            if got == 0:
                if backfill != _SKIP:
                    head = job
                    break
                failed[best] = True
                continue
            length[best] = _pop(waiting[first[best] : first[best + 1]], length[best], key)
            if length[best] == 0:
                failed[best] = True
            start[job], finish[job] = now, now + run_s[job]
            n_held[job] = got
            for i in range(got):
                held_nodes[job, i], held_counts[job, i] = nodes[i], counts[i]
            n_running = _push(running, n_running, job, finish)

        if head >= 0 and backfill == _EASY:
            n_running = _easy(
                now, head, run_s, estimate, key, sizes, size_of, first, waiting, length, free, running, n_running,
                start, finish, held_nodes, held_counts, n_held, nodes, counts,
            )  # fmt: skip
    return start, finish


@njit(cache=True)
def _easy(
    now: float, head: int, run_s: Any, estimate: Any, key: Any, sizes: Any, size_of: Any, first: Any,
    waiting: Any, length: Any, free: Any, running: Any, n_running: int, start: Any, finish: Any, held_nodes: Any,
    held_counts: Any, n_held: Any, nodes: Any, counts: Any,
) -> int:  # fmt: skip
    """Start later jobs that do not delay the head: they end before its shadow time, or leave it room then.

    A job that runs beyond its estimate is taken to end right now.
    """
    ends = np.empty(n_running, np.float64)
    for i in range(n_running):
        job = running[i]
        ends[i] = max(now, start[job] + estimate[job])
    order = np.argsort(ends, kind="mergesort")
    # Equal ends go by number, whatever the order of the heap.
    by_end = np.empty(n_running, np.int64)
    for i in range(n_running):
        by_end[i] = running[order[i]]
    for i in range(1, n_running):
        at = i
        while at > 0 and (
            max(now, start[by_end[at - 1]] + estimate[by_end[at - 1]])
            == max(now, start[by_end[at]] + estimate[by_end[at]])
            and by_end[at - 1] > by_end[at]
        ):
            by_end[at - 1], by_end[at] = by_end[at], by_end[at - 1]
            at -= 1
    later = free.copy()
    shadow = np.inf
    gpus = sizes[size_of[head]]
    trial = later.copy()
    i = 0
    while i < n_running:
        end = max(now, start[by_end[i]] + estimate[by_end[i]])
        while i < n_running and max(now, start[by_end[i]] + estimate[by_end[i]]) == end:
            job = by_end[i]
            for h in range(n_held[job]):
                later[held_nodes[job, h]] += held_counts[job, h]
            i += 1
        trial[:] = later
        if _place(trial, gpus, nodes, counts) > 0:
            shadow = end
            break
    total = 0
    for c in range(len(sizes)):
        total += length[c]
    queue = np.empty(total, np.int64)
    keys = np.empty(total, np.float64)
    at = 0
    for c in range(len(sizes)):
        for j in range(length[c]):
            queue[at] = waiting[first[c] + j]
            at += 1
    queue.sort()
    for j in range(total):
        keys[j] = key[queue[j]]
    rank = np.argsort(keys, kind="mergesort")
    gone = np.zeros(len(sizes), np.bool_)
    for position in range(total):
        job = queue[rank[position]]
        if job == head:
            continue
        c = size_of[job]
        got = _place(free, sizes[c], nodes, counts)
        if got == 0:
            continue
        ends_later = now + estimate[job] > shadow
        if ends_later:
            for h in range(got):
                later[nodes[h]] -= counts[h]
            trial[:] = later
            kept_nodes = nodes[:got].copy()
            kept_counts = counts[:got].copy()
            fits = _place(trial, gpus, nodes, counts) > 0
            nodes[:got] = kept_nodes
            counts[:got] = kept_counts
            if not fits:
                for h in range(got):
                    free[nodes[h]] += counts[h]
                    later[nodes[h]] += counts[h]
                continue
        start[job], finish[job] = now, now + run_s[job]
        n_held[job] = got
        for h in range(got):
            held_nodes[job, h], held_counts[job, h] = nodes[h], counts[h]
        n_running = _push(running, n_running, job, finish)
        gone[c] = True
    for c in range(len(sizes)):
        if gone[c]:
            left = 0
            heap = waiting[first[c] : first[c + 1]]
            for j in range(length[c]):
                if np.isnan(start[heap[j]]):
                    left = _push(heap, left, heap[j], key)
            length[c] = left
    return n_running
