"""MIG: how one device can be partitioned into instances, and what an instance counts.

Profiles are those of NVIDIA's Multi-Instance GPU User Guide ("Supported MIG Profiles") without media extensions: name
and number of instances per device. A100-80GB and H100-80GB have the A100-40GB's with twice the memory. A geometry here
is what a device is partitioned into when it is opened for a profile: as many of that as it takes, the rest one-slice
instances where the guide's placements leave room for them. The profiles 4g on seven slices and 1g with double memory
are not offered.

A device is repartitioned only while it is idle: the first instance on it fixes its geometry until the last one is gone.
So the free instances of a node are plain numbers per profile, whatever device they are on.
"""

from __future__ import annotations

from typing import Final

from .model import WHOLE_GPU

Geometry = tuple[tuple[str, int], ...]
"""((profile, instances of it), ...), the profile that it is chosen for first."""

TABLES: Final[dict[str, tuple[Geometry, ...]]] = {
    "A100-40GB": (
        (("1g.5gb", 7),),
        (("2g.10gb", 3), ("1g.5gb", 1)),
        (("3g.20gb", 2),),
        (("7g.40gb", 1),),
    ),
    "A100-80GB": (
        (("1g.10gb", 7),),
        (("2g.20gb", 3), ("1g.10gb", 1)),
        (("3g.40gb", 2),),
        (("7g.80gb", 1),),
    ),
    "H100-80GB": (
        (("1g.10gb", 7),),
        (("2g.20gb", 3), ("1g.10gb", 1)),
        (("3g.40gb", 2),),
        (("7g.80gb", 1),),
    ),
    "A30": (
        (("1g.6gb", 4),),
        (("2g.12gb", 2),),
        (("4g.24gb", 1),),
    ),
}
"""`NodeSpec.mig` -> the geometries of one device."""


def slices(profile: str) -> int:
    """Compute slices of an instance: 3 for 3g.20gb."""
    return int(profile.partition("g")[0])


def _thousandths() -> dict[str, int]:
    """Rounded down, so that the instances of a device never add up to more than the device."""
    found = {}
    for geometries in TABLES.values():
        of_device = max(slices(profile) for geometry in geometries for profile, _ in geometry)
        for geometry in geometries:
            found.update({profile: WHOLE_GPU * slices(profile) // of_device for profile, _ in geometry})
    return found


MILLI: Final = _thousandths()
"""Profile -> thousandths of a device that an instance counts (7 slices: 142, 285, 428, 1000; 4: 250, 500, 1000).

A profile counts the same on every device that has it."""


def opened(table: str, profile: str) -> Geometry | None:
    """What an idle device becomes for an instance of this profile: the geometry with most of them; None: not there."""
    fitting = [g for g in TABLES.get(table, ()) if count_in(g, profile)]
    return max(fitting, key=lambda geometry: count_in(geometry, profile), default=None)


def per_device(table: str, profile: str) -> int:
    """Instances of the profile that an idle device gives, 0 when it has none or the table is not known."""
    geometry = opened(table, profile)
    return count_in(geometry, profile) if geometry else 0


def count_in(geometry: Geometry, profile: str) -> int:
    return sum(count for name, count in geometry if name == profile)
