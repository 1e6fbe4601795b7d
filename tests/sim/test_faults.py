"""The seeded fault simulation over 200 fixed seeds, its determinism, and proof that it can fail.

`python -m tests.sim.faults --forever` (make sim-forever) looks for a seed that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .faults import run_seed

REPOSITORY = Path(__file__).resolve().parents[2]
_CHUNKS = [range(first, first + 10) for first in range(1, 201, 10)]


@pytest.mark.parametrize("seeds", _CHUNKS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_safe_under_faults_and_done_when_they_end(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed).raise_if_failed()


def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Also where sets and dicts of strings are in another order: nothing may depend on it."""
    program = "from tests.sim.faults import run_seed; print(*(run_seed(seed).digest for seed in (3, 28, 105, 370)))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().split()) == 4
