"""The seeded fault simulation over 200 fixed seeds, its determinism, and proof that it can fail.

`python -m tests.sim.faults --forever` (make sim-forever) looks for a seed that fails.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamsched.service import predictions

from .faults import draw, run_plan, run_seed

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


@pytest.mark.parametrize("seed", [3, 28, 105, 370])
def test_safe_with_predicted_run_times(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept every second, so that workers die while they keep and while they read it; there are no threads here."""

    async def at_once(call: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0.05)
        return call(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    monkeypatch.setattr(predictions, "KEEP_EVERY_S", 1.0)
    plan = draw(seed)
    plan.predicts = True
    plan.config = msgspec.structs.replace(plan.config, policy="sjf")
    result, simulation = run_plan(seed, plan)
    result.raise_if_failed()
    assert any(key.endswith(b":predictor") for key in simulation.world.redis.data.hashes)
    workers = [worker for worker in simulation.world.workers.values() if not worker.process.dead]
    told = [runner._predictions for worker in workers for runner in worker.scheduler.runners.values()]
    assert told
    assert [each.counts for each in told if each is not None and each.counts] == []
    assert any(each._predictor.observed for each in told if each is not None)
