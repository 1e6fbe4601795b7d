"""The simulation can fail: each mutant puts a bug back, and some seed must find it.

If a mutant survives, the simulation has stopped to look where that bug would be; the fix is there, not here.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from streamsched.bus.messages import JournalRecord
from streamsched.core import cluster
from streamsched.core.cluster import ClusterState
from streamsched.core.instructions import Revoke
from streamsched.core.model import JobState
from streamsched.service import recovery, runner
from streamsched.service.runner import PoolRunner
from streamsched.store.pool_store import Outcome

from . import redis
from .faults import run_seed
from .test_cases import wake_the_old_one, wake_the_old_one_as_it_writes_anew
from .world import Violation

_SEEDS = range(1, 201)
_make_durable = PoolRunner._make_durable
_stop = ClusterState._stop


async def _publish_first(self: PoolRunner, works: Any, now: float, decisions: Any, changes: Any) -> None:
    record = JournalRecord(
        pool=self.pool, epoch=self.state.epoch, seq=self._position.seq + 1, now=now, decisions=tuple(decisions)
    )
    await self._publish(self._placements(record))
    await _make_durable(self, works, now, decisions, changes)


def _free_at_revoke(self: ClusterState, job: Any, how: Any, reason: str, then: JobState) -> None:
    _stop(self, job, how, reason, then)
    if how is Revoke and reason == "not started within its lease":
        run = self.runs[job.placement_id]
        self._end_run(run)
        self._after_stop(run)


async def _publish_once(self: PoolRunner, placements: Any) -> None:
    for placement in placements:
        await self._send(placement)


async def _acknowledge_at_once(self: PoolRunner, inputs: Any) -> None:
    batch = runner._Batch(inputs, mock.Mock(done=lambda: True))
    self._put(batch)


async def _nothing_is_missing(pool: Any, fold: Any) -> list[Any]:
    return []


async def _state_only(pool: Any, pool_jobs: Any, state: ClusterState, position: Any) -> list[str]:
    return list(state.jobs)


async def _do_not_look(self: Any, start: int, stop: int) -> None:
    return None


def _judge_nothing(self: PoolRunner, outcome: Outcome) -> None:
    return None


def _surely(run: Any, fenced_at: float | None) -> bool:
    return True


def _always_owner(meta: Any, epoch: int) -> int:
    return redis.DONE


MUTANTS: dict[str, tuple[int, Any, str, Any]] = {
    "offsets are not kept with the state": (2, PoolRunner, "_pass", lambda self, source: None),
    "the outbox is skipped at a takeover": (7, recovery, "_not_on_topic", _nothing_is_missing),
    "GPUs are free when a revoke is sent": (35, ClusterState, "_stop", _free_at_revoke),
    "a failed publish is not repeated": (31, PoolRunner, "_publish", _publish_once),
    "inputs are acknowledged before they are safe": (25, PoolRunner, "submit", _acknowledge_at_once),
    "a lost Redis is not noticed": (29, PoolRunner, "_judge", _judge_nothing),
    "old news of a fence ends new runs": (59, cluster, "_was_there", _surely),
    "the index forgets jobs on their way": (455, runner, "known_jobs", _state_only),
    "placements are published before the journal has them": (5, PoolRunner, "_make_durable", _publish_first),
    "a read that a closing connection cuts off ends the pool": (15, runner, "connection_errors", nullcontext),
}
"""Bug -> (a seed that found it when this was written, where to put it)."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seed_finds_the_mutant(name: str) -> None:
    first, owner, attribute, bug = MUTANTS[name]
    with mock.patch.object(owner, attribute, bug):
        for seed in (first, *_SEEDS):
            if run_seed(seed).failure is not None:
                return
    pytest.fail(f"no seed of {len(_SEEDS)} finds it: {name}")


def test_case_09_finds_a_zombie_that_does_not_look_for_its_successor() -> None:
    """Too rare for seeds alone: Redis has to come back from an old copy while the zombie wakes."""
    with mock.patch.object(PoolRunner, "_look_for_successor", _do_not_look), pytest.raises(Violation):
        wake_the_old_one("sent scheduler.journal", forgetful=True)


def test_case_09_finds_a_store_that_takes_any_epoch() -> None:
    """Too rare for seeds since a takeover writes a state anew only where Redis has lost it.

    All that a zombie does to a Redis that is there is refused by the number of its record already.
    """
    with mock.patch.object(redis, "_owner", _always_owner), pytest.raises(Violation):
        wake_the_old_one_as_it_writes_anew("redis fill executed")
