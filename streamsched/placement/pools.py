"""Slots that the same workers may take, over all cells with patterns: what the model counts workers in.

Workers of one kind need not be told apart by cell. For one slot size and GPU type let C(k) be the cells that kind k
may go to. Where these sets are *laminar* (any two are disjoint or one holds the other) one number per kind is enough:
by Hall's condition, the workers can be seated exactly when in each set no more of them have to stay than it has
slots. A set that crosses others is replaced by the *atoms* it consists of (cells that the same kinds go to), with a
number per atom. Over GPU types the sets of kinds cross as they like, so there is a number per type anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .groups import Slot


@dataclass(frozen=True)
class Pool:
    """Slots of one size in a set of cells."""

    slot: Slot
    cells: tuple[int, ...]
    kinds: tuple[int, ...]
    """Whose workers are counted here."""
    inner: tuple[int, ...]
    """Pools (indexes) within this one."""


def pools_of(places: Iterable[tuple[int, str, dict[int, Slot]]]) -> list[Pool]:
    """`places`: (cell, GPU type, slot of each kind that fits). Pools in an order in which inner ones come first."""
    where: dict[tuple[Slot, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for cell, gpu_type, slot_of in places:
        for kind, slot in slot_of.items():
            where[slot, gpu_type][kind].add(cell)
    pools: list[Pool] = []
    for (slot, _), cells_of in sorted(where.items()):
        pools += _family(slot, {kind: frozenset(cells) for kind, cells in cells_of.items()}, len(pools))
    return pools


def _family(slot: Slot, cells_of: dict[int, frozenset[int]], first: int) -> list[Pool]:
    """The pools of one slot size and type; `first` is the index that the first of them gets."""
    kinds_of: dict[frozenset[int], list[int]] = defaultdict(list)
    for kind, cells in sorted(cells_of.items()):
        kinds_of[cells].append(kind)
    whole: list[frozenset[int]] = []
    for cells in sorted(kinds_of, key=lambda cells: (-len(cells), sorted(cells))):
        if all(cells <= other or cells.isdisjoint(other) for other in whole):
            whole.append(cells)
    counted: dict[frozenset[int], set[int]] = {cells: set(kinds_of[cells]) for cells in whole}
    crossing = [cells for cells in kinds_of if cells not in counted]
    if crossing:
        for atom in _atoms(kinds_of):
            for cells in crossing:
                if atom <= cells:
                    counted.setdefault(atom, set()).update(kinds_of[cells])
    ordered = sorted(counted, key=lambda cells: (len(cells), sorted(cells)))
    return [
        Pool(
            slot=slot,
            cells=tuple(sorted(cells)),
            kinds=tuple(sorted(counted[cells])),
            inner=tuple(first + i for i, other in enumerate(ordered[:number]) if other < cells),
        )
        for number, cells in enumerate(ordered)
    ]


def _atoms(kinds_of: dict[frozenset[int], list[int]]) -> list[frozenset[int]]:
    """Cells by the sets that they are in."""
    sets = list(kinds_of)
    atoms: dict[tuple[bool, ...], set[int]] = defaultdict(set)
    for cell in frozenset().union(*sets):
        atoms[tuple(cell in cells for cells in sets)].add(cell)
    return [frozenset(cells) for cells in atoms.values()]
