"""Models as files, for tests of what reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from streamsched.policy.features import FEATURES, FEATURES_VERSION, INDEX
from streamsched.policy.network import Network

COUNT = len(FEATURES)
MANIFEST = """
kind = "{kind}"
file = "{file}"
regime = "{regime}"
base = "{base}"
features_version = {version}
"""


def network(**weights: float) -> Network:
    """Linear in these features."""
    flat = np.zeros(COUNT + 1, np.float32)
    for name, weight in weights.items():
        flat[INDEX[name]] = weight
    low, high = np.array([(feature.low, feature.high) for feature in FEATURES]).T.copy()
    return Network((COUNT, 1), flat, low, high)


def made(
    folder: Path,
    name: str,
    data: bytes | str | None = None,
    *,
    kind: str = "network",
    file: str = "network.bin",
    regime: str = "plain",
    base: str = "sjf",
    version: int = FEATURES_VERSION,
    more: str = "",
) -> Path:
    """A model's folder; by default of the shortest first."""
    where = folder / name
    where.mkdir(parents=True, exist_ok=True)
    manifest = MANIFEST.format(kind=kind, file=file, regime=regime, base=base, version=version)
    (where / "model.toml").write_text(manifest + more)
    given = network(run_s=-1.0).to_bytes() if data is None else data
    (where / file).write_bytes(given.encode() if isinstance(given, str) else given)
    return where
