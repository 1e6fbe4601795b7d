"""Which node was how full when: what the report draws over time, from the record of runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ROWS_MAX, COLUMNS = 120, 400
"""Of the heat map: of larger clusters, neighbouring nodes share a row."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Where jobs ran: one entry per worker of each run, be it whole or cut short. Seconds; nodes from 0."""

    node: Ints
    gpus: Ints
    start_s: Floats
    end_s: Floats
    node_gpus: Ints
    """[node]"""


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Shares of the free GPUs that are of little use, from each moment to the next; 0 where no GPU is free."""

    time_s: Floats
    partly: Floats
    """Those on nodes where something runs: no worker that takes a whole node can have them."""
    expected: Floats
    """Those that a job of the workload cannot have, as each node alone has too few, expected over the jobs (Weng et
    al., "Beware of Fragmentation", USENIX ATC'23, section 4, for whole GPUs). Of a gang one worker counts."""


def fragmentation(runs: Runs, asked: Ints, first_s: float) -> Fragmentation:
    """`asked`: GPUs of each job; `first_s`: from when on the empty cluster counts."""
    sizes, largest = runs.node_gpus, int(runs.node_gpus.max())
    asks = np.bincount(np.minimum(asked, largest), minlength=largest + 1)
    larger = np.append(np.cumsum(asks[::-1])[::-1][1:], 0)
    """[g] jobs of which a worker takes more than g GPUs."""

    node, time, change = _changes(runs)
    used = np.cumsum(change)  # every node ends with nothing in use, so one sum runs through all nodes
    before, after = sizes[node] - (used - change), sizes[node] - used
    times, at = np.unique(time, return_inverse=True)

    def over_time(start: int, grows: Ints) -> Ints:
        sums = np.zeros(len(times) + 1, dtype=np.int64)
        sums[0] = start
        np.add.at(sums, at + 1, grows)
        return np.cumsum(sums)

    free = over_time(int(sizes.sum()), -change)
    partly = over_time(0, np.where(after < sizes[node], after, 0) - np.where(before < sizes[node], before, 0))
    useless = over_time(int((sizes * larger[sizes]).sum()), after * larger[after] - before * larger[before])
    known = np.maximum(free, 1)
    return Fragmentation(
        np.concatenate([[min(first_s, times[0]) if len(times) else first_s], times]),
        partly / known,
        useless / known / max(1, len(asked)),
    )


def _changes(runs: Runs) -> tuple[Ints, Floats, Ints]:
    """(node, time, GPUs more in use) by node and time, with one entry for all that happens on a node at a moment."""
    node = np.concatenate([runs.node, runs.node])
    time = np.concatenate([runs.start_s, runs.end_s])
    change = np.concatenate([runs.gpus, -runs.gpus])
    order = np.lexsort((time, node))
    node, time, change = node[order], time[order], change[order]
    if not len(node):
        return node, time, change
    new = np.append(True, (np.diff(node) != 0) | (np.diff(time) != 0))
    return node[new], time[new], np.add.reduceat(change, np.flatnonzero(new))


def means(time_s: Floats, values: npt.NDArray[np.generic], edges_s: Floats) -> Floats:
    """Means of a step function between neighbouring edges (ascending). `values[i]` holds from `time_s[i]` (ascending)
    to the next, the last one from there on; before the first it is 0."""
    if not len(time_s):
        return np.zeros(len(edges_s) - 1)
    times = np.append(time_s, max(float(time_s[-1]), float(edges_s[-1])))
    area = np.append(0.0, np.cumsum(np.diff(times) * values))
    found: Floats = np.diff(np.interp(edges_s, times, area)) / np.diff(edges_s)
    return found


def heat(runs: Runs, first_s: float, last_s: float, rows: int = ROWS_MAX, columns: int = COLUMNS) -> Floats:
    """[row, column] share of the GPUs in use: rows are nodes in order, columns equal spans of [first_s, last_s].

    Ends after `last_s` are cut; of nodes that share a row it is the share of all their GPUs.
    """
    nodes = len(runs.node_gpus)
    rows = min(rows, nodes)
    row_of = np.arange(nodes) * rows // nodes
    if last_s <= first_s:
        return np.zeros((rows, columns))
    width = (last_s - first_s) / columns
    # GPU-seconds until each edge: what starts at t adds gpus x (edge - t) to its own column's end and gpus x width to
    # every later one; an end takes the same away.
    part, whole = np.zeros(rows * columns), np.zeros(rows * columns)
    row = row_of[np.concatenate([runs.node, runs.node])]
    change = np.concatenate([runs.gpus, -runs.gpus]).astype(np.float64)
    place = (np.clip(np.concatenate([runs.start_s, runs.end_s]), first_s, last_s) - first_s) / width
    column = np.minimum(place.astype(np.int64), columns - 1)
    np.add.at(part, row * columns + column, change * (column + 1 - place))
    later = column + 1 < columns
    np.add.at(whole, (row * columns + column + 1)[later], change[later])
    used = part.reshape(rows, columns) + np.cumsum(whole.reshape(rows, columns), axis=1)
    capacity = np.bincount(row_of, weights=runs.node_gpus, minlength=rows)
    return np.clip(used / capacity[:, None], 0.0, 1.0)
