"""The feature vector of learned policies: what the core's jobs look like, counted by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from core_builder import Pool

from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.model import Job
from streamsched.core.run_times import Said
from streamsched.policy.features import FEATURES, INDEX, NAMES, UNKNOWN_SPREAD, Features, Scope, fragmentation
from streamsched.policy.rules import UNKNOWN_RUN_S

MakePool = Callable[..., Pool]


def seen(pool: Pool, features: Features, *job_ids: str) -> list[dict[str, float]]:
    found = features([pool.job(job_id) for job_id in job_ids], pool.state, pool.now)
    assert found.dtype == np.float32
    return [dict(zip(NAMES, row, strict=True)) for row in found.tolist()]


def test_names_are_distinct_and_ranges_are_ranges() -> None:
    assert len(INDEX) == len(FEATURES)
    assert all(feature.low < feature.high for feature in FEATURES)
    scopes = [feature.scope for feature in FEATURES]
    assert scopes == sorted(scopes, key=list(Scope).index), "the compiled simulation reads them by these groups"


def test_waiting_jobs_by_hand(make_pool: MakePool) -> None:
    """Nodes of 4 and 8 GPUs, 6 of them in use. Of 4 + 2 free ones a worker of 4 can use 4, one of 8 none."""
    pool = make_pool()
    pool.node("small", 4)
    pool.node("large", 8)
    pool.arrive("runs", 6)
    pool.running("runs")
    pool.arrive("gang", 8, remainder_gpus=4, estimate_s=100.0, weight=3.0)
    pool.later(50.0)
    pool.arrive("half", 1, gpu_milli=500)
    pool.arrive("four", 4)
    gang, half, _ = seen(pool, Features(), "gang", "half", "four")
    cluster = {
        "free_gpus": 6.0,
        "largest_free": 4.0,
        "queue_length": 3.0,
        "queued_gpus": 16.5,
        "load": pytest.approx((6 + 16.5) / 12),
        "fragmentation": pytest.approx((6 + 0 + 2) / 3 / 6),
    }
    idle = {"attained_gpu_s": 0.0, "running": 0.0}
    job = {"gpus": 12.0, "nodes": 2.0, "run_s": 100.0, "spread": 0.0, "work_gpu_s": 1200.0, "weight": 3.0}
    assert gang == {**job, "wait_s": 50.0, **idle, **cluster}
    unknown = {"run_s": UNKNOWN_RUN_S, "spread": pytest.approx(UNKNOWN_SPREAD), "work_gpu_s": UNKNOWN_RUN_S / 2}
    assert half == {"gpus": 0.5, "nodes": 1.0, **unknown, "weight": 1.0, "wait_s": 0.0, **idle, **cluster}


def test_running_jobs_have_had_service_and_do_not_count_as_queued(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.node("a", 8)
    pool.arrive("runs", 6)
    pool.later(20.0)
    pool.running("runs")
    pool.later(100.0)
    pool.arrive("waits", 4)
    runs, waits = seen(pool, Features(), "runs", "waits")
    assert (runs["running"], runs["wait_s"], runs["attained_gpu_s"]) == (1.0, 20.0, 600.0)
    assert (waits["running"], waits["wait_s"], waits["attained_gpu_s"]) == (0.0, 0.0, 0.0)
    assert (runs["queue_length"], runs["queued_gpus"], runs["fragmentation"]) == (1.0, 4.0, 1.0)


def test_all_times_in_the_queue_count(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.node("a", 8)
    pool.arrive("job", 8, preemptible=True)
    pool.later(30.0)
    pool.running("job")
    pool.later(100.0)
    pool.send(ev.NodeDrained(node_id="a"))
    pool.report(ev.RunPreempted, "job")
    features = Features()
    pool.later(5.0)
    assert seen(pool, features, "job")[0]["wait_s"] == 35.0
    pool.later(5.0)
    again = seen(pool, features, "job")[0]
    assert (again["wait_s"], again["attained_gpu_s"], again["free_gpus"], again["load"]) == (40.0, 800.0, 0.0, 0.0)


def test_a_job_that_was_changed_is_looked_at_anew(make_pool: MakePool) -> None:
    pool, features = make_pool(), Features()
    pool.node("a", 8)
    pool.arrive("job", 1)
    assert seen(pool, features, "job")[0]["weight"] == 1.0
    pool.command(ev.ReprioritiseRequested, "job", weight=7.0)
    assert seen(pool, features, "job")[0]["weight"] == 7.0


def test_predictions_are_asked_for_once_per_job(make_pool: MakePool) -> None:
    asked: list[str] = []

    def predict(jobs: Sequence[Job], _: ClusterState) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        asked.extend(job.spec.job_id for job in jobs)
        return np.array([60.0 * len(job.spec.job_id) for job in jobs]), np.full(len(jobs), math.log(9.0))

    pool, features = make_pool(), Features(predict)
    pool.node("a", 8)
    pool.arrive("one", 2, estimate_s=5.0)
    assert seen(pool, features, "one")[0]["work_gpu_s"] == 360.0
    pool.arrive("second", 1)
    both = seen(pool, features, "second", "one")
    assert [row["run_s"] for row in both] == [360.0, 180.0]
    assert both[0]["spread"] == np.float32(math.log(9.0))
    assert asked == ["one", "second"]


class _Sure(Said):
    """Every job takes a minute, give or take."""

    def whole_s(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        return [60.0] * len(jobs)

    def spread(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        return [2.0] * len(jobs)


def test_run_times_are_those_of_the_pool_also_where_it_gets_another_source(make_pool: MakePool) -> None:
    pool, features = make_pool(), Features()
    pool.node("a", 8)
    pool.arrive("known", 2, estimate_s=5.0)
    pool.arrive("unknown", 2)
    said = seen(pool, features, "known", "unknown")
    assert [(row["run_s"], row["spread"]) for row in said] == [
        (5.0, 0.0),
        (np.float32(UNKNOWN_RUN_S), np.float32(UNKNOWN_SPREAD)),
    ]
    pool.state.run_times = _Sure()
    assert [(row["run_s"], row["spread"]) for row in seen(pool, features, "known", "unknown")] == [(60.0, 2.0)] * 2


def test_jobs_that_have_gone_are_forgotten(make_pool: MakePool) -> None:
    """Many more jobs than are asked about at a time; what is told stays right."""
    pool, features = make_pool(), Features()
    pool.node("a", 8)
    for number in range(3_000):
        pool.arrive(f"j{number}", 1 + number % 8)
    jobs = list(pool.state.queued_jobs())
    assert features(jobs, pool.state, pool.now)[:, 0].tolist() == [1.0 + n % 8 for n in range(3_000)]
    for first in range(0, 3_000, 100):
        few = jobs[first : first + 100]
        assert features(few, pool.state, pool.now)[:, 0].tolist() == [1.0 + n % 8 for n in range(first, first + 100)]
        assert len(features._kept) <= 3_000


def test_nobody_and_nothing() -> None:
    """An empty pool has no load and no fragmentation."""
    pool = Pool()
    assert Features()([], pool.state, 0.0).shape == (0, len(FEATURES))
    pool.arrive("job", 1)
    assert seen(pool, Features(), "job")[0]["load"] == 0.0
    assert fragmentation(np.array([3, 0]), np.array([0, 2]), 2) == 0.0
