"""EASY and conservative backfilling in the core: for whom nodes are kept free, and what the others are told."""

from __future__ import annotations

import pytest
from core_builder import placed

from streamsched.core import events as ev
from streamsched.core.instructions import SolveWindow
from streamsched.core.tenants import TenantPolicy


def asked(pool):
    return [c.job_id for i in pool.window() if isinstance(i, SolveWindow) for c in i.problem.candidates]


@pytest.fixture
def pool(make_pool):
    """Two nodes of 8: on n0 6 GPUs run until 100, on n1 7 until 200, as was said."""

    def make(backfill: str, **config):
        pool = make_pool(backfill=backfill, **config)
        pool.node("n0", 8)
        pool.node("n1", 8)
        pool.arrive("six", 6, estimate_s=100.0)
        pool.running("six")
        pool.arrive("seven", 7, estimate_s=200.0)
        pool.running("seven")
        pool.arrive("eight", 8, estimate_s=50.0)
        return pool

    return make


def test_easy_keeps_the_nodes_where_the_first_without_room_starts_first(pool):
    p = pool("easy")
    p.arrive("long", 2, estimate_s=1_000.0)
    p.arrive("unknown", 2)
    assert asked(p) == []
    assert p.why("eight").startswith("gpus: 1 x 8 of any type needed, room now for 0")
    assert p.why("eight").endswith("on n0 if runs end as said")
    assert p.why("long") == "behind: it would delay eight, for which nodes are kept free"
    assert p.why("unknown") == p.why("long")


def test_easy_lets_start_what_ends_in_time_or_elsewhere(pool):
    p = pool("easy")
    p.arrive("short", 2, estimate_s=20.0)
    p.arrive("long", 1, estimate_s=1_000.0)
    assert asked(p) == ["short", "long"]
    assert placed(p.solve()) == {"short": {"n0": 2}, "long": {"n1": 1}}


def test_easy_protects_one_job_and_conservative_all(pool):
    for backfill, expected in (("easy", ["long"]), ("conservative", [])):
        p = pool(backfill)
        p.arrive("eight more", 8, estimate_s=50.0)
        p.arrive("long", 1, estimate_s=1_000.0)
        assert asked(p) == expected


def test_no_time_is_known_where_nothing_is_said_of_the_runs(make_pool):
    p = make_pool(backfill="easy")
    p.node("n0", 8)
    p.arrive("six", 6)
    p.running("six")
    p.arrive("eight", 8)
    p.arrive("long", 2, estimate_s=1_000.0)
    assert asked(p) == ["long"]
    assert p.why("eight").endswith("no time is known at which it could start")


def test_who_cannot_start_for_a_reason_of_its_own_holds_up_nobody(pool):
    """A job over its quota is not without room."""
    p = pool("easy", tenants={"poor": TenantPolicy(quota_gpus=0.0)})
    p.command(ev.CancelRequested, "eight")
    p.arrive("over", 8, tenant="poor", estimate_s=50.0)
    p.arrive("long", 2, estimate_s=1_000.0)
    assert asked(p) == ["long"]
