"""A share of the queue ranked by another rule; how alike two orders are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from core_builder import Pool
from hypothesis import given
from hypothesis import strategies as st

from streamsched.core.cluster import ClusterState
from streamsched.core.model import Job
from streamsched.core.window import Ranking, rank
from streamsched.policy.shares import ByShares, Share, likeness


class Told:
    """Scores by the number in a job's name."""

    def __init__(self, name: str, scores: Sequence[float]) -> None:
        self.name, self._scores = name, scores

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        return [self._scores[int(job.spec.job_id[1:])] for job in jobs]


SCORES = st.integers(-3, 3).map(float)
QUEUES = st.integers(0, 12).flatmap(
    lambda n: st.tuples(*(st.lists(kind, min_size=n, max_size=n) for kind in (SCORES, SCORES, st.booleans())))
)


def queue(inside: Sequence[bool]) -> Pool:
    pool = Pool()
    pool.node("n", 8)
    for number, is_in in enumerate(inside):
        pool.arrive(f"j{number}", 1, tenant="in" if is_in else "out")
    return pool


def names(ranking: Ranking) -> list[str]:
    return [job.spec.job_id for _, job in ranking]


@given(case=QUEUES)
def test_who_is_outside_of_the_share_neither_wins_nor_loses(
    case: tuple[list[float], list[float], list[bool]],
) -> None:
    """By the main rule alone and with the canary: scores of the others are the same, and the share has the same ones to
    deal out, but for jobs that the canary holds equal."""
    main, canary, inside = case
    pool = queue(inside)
    both = ByShares(Told("main", main), Told("model:canary", canary), Share(0.0, ["in"]))
    jobs = pool.state.queued_jobs()
    alone = dict(zip((job.spec.job_id for job in jobs), main, strict=True))
    told = dict(zip(alone, both.scores(jobs, pool.state, 0.0), strict=True))
    share = [job.spec.job_id for job in jobs if job.spec.tenant == "in"]
    assert {name: told[name] for name in told if name not in share} == {n: alone[n] for n in alone if n not in share}
    assert set(told.values()) <= set(alone.values())
    distinct = len({canary[int(name[1:])] for name in share}) == len(share)
    if distinct:
        assert sorted(told[name] for name in share) == sorted(alone[name] for name in share)
    ordered = sorted(share, key=lambda name: -canary[int(name[1:])])
    assert [told[name] for name in ordered] == sorted((told[name] for name in share), reverse=True)
    for one in share:
        for other in share:
            if canary[int(one[1:])] == canary[int(other[1:])]:
                assert told[one] == told[other]


@given(case=QUEUES)
def test_a_share_of_all_is_the_order_of_the_canary(case: tuple[list[float], list[float], list[bool]]) -> None:
    _, canary, inside = case
    pool, count = queue(inside), len(inside)
    main = Told("main", [float(-n) for n in range(count)])
    both = ByShares(main, Told("model:canary", canary), Share(1.0))
    assert names(rank(pool.state, both, 0.0)) == names(rank(pool.state, Told("x", canary), 0.0))
    assert both.name == "main/canary:canary"


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 1.0])
def test_a_fraction_is_about_that_many_jobs_and_each_is_in_or_out_for_good(fraction: float) -> None:
    pool = Pool()
    pool.node("n", 8)
    for number in range(2_000):
        pool.arrive(f"run-{number:05d}", 1)
    specs = [job.spec for job in pool.state.queued_jobs()]
    share = Share(fraction, salt="a")
    drawn = [spec in share for spec in specs]
    assert [spec in Share(fraction, salt="a") for spec in specs] == drawn
    assert sum(drawn) / 2_000 == pytest.approx(fraction, abs=0.0 if fraction in (0.0, 1.0) else 0.035)
    if 0.0 < fraction < 1.0:
        assert [spec in Share(fraction, salt="b") for spec in specs] != drawn


def ranking(scores: Sequence[float]) -> Ranking:
    jobs = queue([False] * len(scores)).state.queued_jobs()
    return Ranking(jobs, [0] * len(jobs), scores)


@given(scores=st.lists(st.tuples(st.integers(), st.integers()), min_size=2, max_size=30))
def test_likeness_is_spearmans_correlation(scores: list[tuple[int, int]]) -> None:
    one, other = np.array(scores, float).T
    ranks = [np.argsort(np.argsort(-values, kind="stable"), kind="stable") for values in (one, other)]
    found = likeness(ranking(one), ranking(other), among=5)
    assert found.correlation == pytest.approx(np.corrcoef(ranks[0], ranks[1])[0, 1])
    among = min(5, len(scores))
    both = set(np.flatnonzero(ranks[0] < among)) & set(np.flatnonzero(ranks[1] < among))
    assert (found.jobs, found.among, found.first) == (len(scores), among, len(both) / among)


def test_orders_of_nobody_and_of_one_are_alike() -> None:
    assert likeness(ranking([]), ranking([]), 5) == (0, 1.0, 1.0, 0)
    assert likeness(ranking([1.0]), ranking([2.0]), 5) == (1, 1.0, 1.0, 1)
