"""Who is silent for too long is a question of what we could have heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from streamsched.bus.hearing import FETCH_STALE_S, Ears, Hearing
from streamsched.service.silence import SignsOfLife

SILENT_S = 60.0
NODES = ("a", "b", "c")


def beating(signs: SignsOfLife, begin: float, end: float, nodes: tuple[str, ...] = NODES, every: float = 20.0) -> None:
    """The nodes' signs of life, staggered, in order of time."""
    beats = [
        (begin + every * i + 6.0 * k, n) for k, n in enumerate(nodes) for i in range(1 + int((end - begin) / every))
    ]
    for at, node in sorted(beats):
        if at <= end:
            signs.note(node, at)


def test_a_node_that_says_nothing_while_others_do_is_silent() -> None:
    signs = SignsOfLife(SILENT_S, 0.0)
    beating(signs, 0.0, 20.0)
    beating(signs, 20.0, 200.0, ("a", "b"))
    assert signs.silent(NODES, Hearing.PART, 71.0) == ["c"], "c was last heard at 12"


@pytest.mark.parametrize("ends_at", [80.0, 100.0, 400.0])
def test_staggered_nodes_are_not_silent_while_nothing_is_heard_nor_right_after_it(ends_at: float) -> None:
    signs = SignsOfLife(SILENT_S, 0.0)
    beating(signs, 0.0, 40.0)
    for now in range(41, int(ends_at)):
        assert signs.silent(NODES, Hearing.PART, float(now)) == []
    signs.note("b", ends_at)  # the first of what has piled up
    assert signs.silent(NODES, Hearing.PART, ends_at) == []
    beating(signs, ends_at, ends_at + 300.0, ("a", "b"))
    assert signs.silent(NODES, Hearing.PART, ends_at + 300.0) == ["c"]


def test_while_the_partition_is_not_read_time_does_not_count() -> None:
    signs = SignsOfLife(SILENT_S, 0.0)
    beating(signs, 0.0, 20.0)
    beating(signs, 20.0, 70.0, ("a", "b"))
    assert signs.silent(NODES, Hearing.NOTHING, 70.0) == []
    assert signs.silent(NODES, Hearing.ALL, 71.0) == []
    beating(signs, 71.0, 125.0, ("a", "b"))
    assert signs.silent(NODES, Hearing.PART, 125.0) == [], "it has its full time again"
    beating(signs, 125.0, 140.0, ("a", "b"))
    assert signs.silent(NODES, Hearing.PART, 140.0) == ["c"]


@pytest.mark.parametrize(("hearing", "lost"), [(Hearing.ALL, ["a"]), (Hearing.PART, []), (Hearing.NOTHING, [])])
def test_the_only_node_is_silent_if_we_know_that_there_was_nothing(hearing: Hearing, lost: list[str]) -> None:
    signs = SignsOfLife(SILENT_S, 0.0)
    signs.note("a", 1.0)
    for now in range(2, 62):
        assert signs.silent(["a"], hearing, float(now)) == []
    assert signs.silent(["a"], hearing, 62.0) == lost


def test_all_of_several_at_once_are_not_silent() -> None:
    signs = SignsOfLife(SILENT_S, 0.0)
    for node in NODES:
        signs.note(node, 1.0)
    for now in range(2, 200):
        assert signs.silent(NODES, Hearing.ALL, float(now)) == []


def test_two_nodes_that_beat_slowly_are_told_apart_by_knowing_that_there_was_nothing() -> None:
    signs = SignsOfLife(SILENT_S, 0.0)
    signs.note("dead", 0.0)
    for now in range(70):
        if now % 40 == 0:
            signs.note("slow", float(now))
        found = signs.silent(["dead", "slow"], Hearing.ALL, float(now))
        assert found == (["dead"] if now > 60 else [])


def test_those_that_are_gone_are_forgotten() -> None:
    signs = SignsOfLife(SILENT_S, 0.0)
    for i in range(1000):
        signs.note(f"n{i}", 1.0)
    signs.silent(NODES, Hearing.ALL, 1.0)
    assert len(signs._heard) == 0


# ── how much is heard ────────────────────────────────────────────────────────────────────────────────────────────────


def ears(under_way: bool = False, **state: Any) -> Ears:
    found = {"timestamp": 1000_000, "has_valid_position": True, "position": 7, "highwater": 7} | state
    bound = Ears(fetch_wait_s=1.0, clock=lambda: 1001.0)
    bound.bind(lambda partition: SimpleNamespace(**found), lambda partition: under_way)
    return bound


def test_before_there_is_a_consumer_nothing_is_heard() -> None:
    assert Ears()(0) is Hearing.NOTHING


def test_a_partition_that_is_held_back_or_not_ours_is_not_heard() -> None:
    held = ears()
    held.bind(lambda partition: None, lambda partition: False)
    assert held(0) is Hearing.NOTHING


@pytest.mark.parametrize(
    ("state", "hearing"),
    [
        ({}, Hearing.ALL),
        ({"under_way": True}, Hearing.PART),
        ({"position": 6}, Hearing.PART),
        ({"highwater": None}, Hearing.PART),
        ({"has_valid_position": False}, Hearing.PART),
        ({"timestamp": None}, Hearing.NOTHING),
        ({"timestamp": 1000 * (1000 - FETCH_STALE_S - 0.1)}, Hearing.NOTHING),
        ({"timestamp": 1000 * (1002 + FETCH_STALE_S + 0.1)}, Hearing.NOTHING),
        ({"timestamp": 1000 * (1000 - FETCH_STALE_S + 0.1)}, Hearing.ALL),
    ],
)
def test_how_much_is_heard(state: dict[str, Any], hearing: Hearing) -> None:
    assert ears(**state)(0) is hearing
