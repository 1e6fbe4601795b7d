"""Reports and log lines become fractions, fractions what is left."""

from __future__ import annotations

import math

import pytest

from streamsched.errors import UserError
from streamsched.predict import Lines, Track, reading_of
from streamsched.predict.progress import LINE_MAX, Reading

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ({"fraction": 0.25}, Reading(0.25)),
        ({"step": 50.0, "total": 200.0}, Reading(0.25, 50.0)),
        ({"fraction": 0.9, "step": 50.0, "total": 200.0}, Reading(0.25, 50.0)),
        ({"fraction": 0.9, "step": 50.0}, Reading(0.9, 50.0)),
        ({"step": 50.0}, Reading(0.0, 50.0)),
        ({"step": 50.0, "total": 0.0}, Reading(0.0, 50.0)),
        ({"step": 300.0, "total": 200.0}, None),
        ({"fraction": 0.0}, None),
        ({"fraction": 1.5}, None),
        ({"fraction": NAN}, None),
        ({"fraction": -1.0, "step": -3.0}, None),
        ({"step": INF}, None),
        ({"step": 3.0, "total": NAN}, Reading(0.0, 3.0)),
        ({}, None),
    ],
)
def test_reports(told: dict[str, float], read: Reading | None) -> None:
    assert reading_of(**told) == read


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("Epoch 3/10", Reading(0.2)),
        ("epoch [6 / 10] loss 0.3", Reading(0.5)),
        ("Epoch: 3 of 10, step 50/100, loss=1.2", Reading(0.25)),
        ("step 1,500/6,000 loss 2.3", Reading(0.25, 1500.0)),
        (" iteration      500/    2000 | consumed samples: 12800", Reading(0.25, 500.0)),
        ("[Iter 250 of 1000]", Reading(0.25, 250.0)),
        ("global_step: 4200, lr 1e-4", Reading(0.0, 4200.0)),
        (" 45%|████▌     | 450/1000 [00:10<00:12, 44.1it/s]", Reading(0.45, 450.0)),
        ("train:  45%|████▌     | 450/1000 [00:10<00:12, 44.1it/s]", Reading(0.45, 450.0)),
        ("progress: 12.5%", Reading(0.125)),
        ("40 % done", Reading(0.4)),
    ],
)
def test_lines_that_tell(line: str, read: Reading) -> None:
    assert Lines().read(line) == read


@pytest.mark.parametrize(
    "line",
    [
        "",
        "loading 3/4 shards",
        "Epoch 3:  45%|████▌     | 450/1000 [00:10<00:12, 44.1it/s]",  # of this epoch, not of the job
        "Epoch 1/10",  # nothing is done yet
        "accuracy 93.4 %",
        "GPU utilisation 100%",
        "2024/10/12 started",
        "step 900/100",
        "step 0/100",
        "progress: 250 %",
        "x" * LINE_MAX + " step 5/10",
    ],
)
def test_lines_that_do_not(line: str) -> None:
    assert Lines().read(line) is None


def test_users_add_expressions_which_come_first() -> None:
    lines = Lines([r"^tick (?P<step>\d+) of (?P<total>\d+)$", r"share=(?P<fraction>[\d.]+)"])
    assert lines.read("tick 5 of 20") == Reading(0.25, 5.0)
    assert lines.read("share=0.5 step 1/10") == Reading(0.5)
    assert lines.read("share=1.2.3") is None
    assert lines.read("step 1/10") == Reading(0.1, 1.0)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "not a regular expression"),
        (r"step \d+", "its groups are"),
        (r"(?P<total>\d+)", "its groups are"),
        (r"(?P<step>\d+) (?P<speed>\d+)", "its groups are"),
    ],
)
def test_expressions_that_cannot_be_used_are_told(pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Lines([pattern])


def test_the_rate_is_that_between_reports_so_a_slow_start_does_not_count() -> None:
    track = Track()
    track.add(Reading(0.1), 1_000.0)  # 900 s of start-up
    assert track.total_s() == pytest.approx(10_000.0)
    track.add(Reading(0.5), 1_400.0)
    assert track.fraction() == 0.5
    assert track.total_s() == pytest.approx(1_900.0)


def test_going_back_starts_anew_and_reports_out_of_order_are_left_out() -> None:
    track = Track()
    track.add(Reading(0.5), 100.0)
    track.add(Reading(0.6), 50.0)
    assert track.fraction() == 0.5
    track.add(Reading(0.2), 200.0)  # an earlier checkpoint
    track.add(Reading(0.4), 300.0)
    assert track.total_s() == pytest.approx(600.0)


def test_steps_without_a_total_need_what_history_expects() -> None:
    track = Track()
    track.add(Reading(0.0, 100.0), 50.0)
    track.add(Reading(0.0, 300.0), 150.0)
    assert math.isnan(track.fraction())
    assert math.isnan(track.total_s())
    assert track.fraction(1_000.0) == 0.3
    assert track.total_s(1_000.0) == pytest.approx(500.0)
    assert track.steps == 300.0


@pytest.mark.parametrize("age_s", [NAN, INF, -1.0, 0.0])
def test_a_report_without_a_time_is_left_out(age_s: float) -> None:
    track = Track()
    track.add(Reading(0.5), age_s)
    track.add(None, 10.0)
    assert track == Track()
