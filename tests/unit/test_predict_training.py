"""Trees: fitted apart, served without scikit-learn, versioned, swapped whole or not at all."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from predict_jobs import features, finished

from streamsched.errors import UserError
from streamsched.predict import Ending, Finished, training
from streamsched.predict.boosting import Boosting, DamagedModel, Trees, decode, encode
from streamsched.predict.recent import FEATURES, Recent


def past(jobs: int = 400) -> list[Finished]:
    draw, rows = random.Random(1), []
    for number in range(jobs):
        name, middle = draw.choice([("eval", 100.0), ("train", 20_000.0)])
        run_s = middle * draw.lognormvariate(0.0, 0.3)
        at = 3_600.0 * number
        ending = draw.choice([Ending.COMPLETED] * 9 + [Ending.CANCELLED])
        rows.append(
            replace(finished(run_s, name, user="u", gpus=1, submitted_at=at), ended_at=at + run_s, ending=ending)
        )
    return rows


# ── without scikit-learn ─────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_model_the_answer_is_wide() -> None:
    boosting = Boosting()
    for job in past(20):
        boosting.observe(job)
    low, high = boosting.predict(features("eval", user="u")).interval_s
    assert high / low > 1_000


def test_what_is_kept_for_training_is_bounded_and_short() -> None:
    boosting = Boosting(rows_max=10)
    long = {"script": "x" * 4_000, "steps": "9" * 4_000}
    for number in range(50):
        boosting.observe(finished(10.0, "n" * 4_000, job_id=str(number), labels=long))
    assert len(boosting.finished) == 10
    assert all(len(repr(job)) < 600 for job in boosting.finished)
    assert boosting.observed == 50


@pytest.mark.parametrize("data", [b"", b"junk", b"\x81\xa6format\x01"])
def test_bytes_that_are_no_model_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedModel, match="run-time model"):
        decode(data)


def test_a_folder_without_a_model_has_none_and_a_damaged_pointer_is_told(tmp_path: Path) -> None:
    assert training.load(tmp_path) is None
    (tmp_path / "current.json").write_text("{")
    with pytest.raises(DamagedModel, match=r"no usable current\.json"):
        training.load(tmp_path)


def test_censored_jobs_weigh_nothing_and_those_that_outlived_them_more() -> None:
    jobs = [finished(100.0), finished(1_000.0, ending=Ending.CANCELLED), finished(10_000.0), finished(10_000.0)]
    weights = training._weights(jobs)
    assert weights[:2] == [1.0, 0.0]
    assert weights[2] == pytest.approx(1.5)  # one of the three at risk was cancelled


def test_a_row_has_the_last_run_time_of_the_same_name() -> None:
    recent = Recent()
    recent.observe(finished(100.0, "eval-1", user="u"))
    row = dict(zip(FEATURES, recent.row(features("eval-2", user="u")), strict=True))
    assert row["name_last"] == pytest.approx(np.log(100.0))
    assert recent.row(features("other", user="v"))[FEATURES.index("name_last")] < 0


# ── with it ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def trees() -> Trees:
    return Trees(training.fit(past(), version=3, seed=1))


def test_fitting_the_same_jobs_again_gives_the_same_bytes(trees: Trees) -> None:
    assert encode(training.fit(past(), version=3, seed=1)) == encode(trees.model)


def test_a_model_answers_the_same_after_a_round_trip_and_learned_something(trees: Trees) -> None:
    boosting = Boosting()
    for job in past():
        boosting.observe(job)
    boosting.use(decode(encode(trees.model)))
    short, long = boosting.predict_many([features("eval", user="u"), features("train", user="u")])
    assert short.median_s == pytest.approx(100.0, rel=0.5)
    assert long.median_s == pytest.approx(20_000.0, rel=0.5)
    again = Boosting.restored(boosting.state())
    assert again.predict(features("eval", user="u")).at == pytest.approx(short.at)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 99},
        {"features": ("a",)},
        {"leaves": b"1234"},
        {"trees": (1, 1, 1, 1, -1)},
        {"baselines": (1.0, 2.0, 3.0, 4.0, float("nan"))},
    ],
)
def test_a_model_that_does_not_hold_together_is_refused(trees: Trees, changes: dict[str, object]) -> None:
    with pytest.raises(DamagedModel):
        decode(encode(replace(trees.model, **changes)))


def test_too_few_jobs_are_told() -> None:
    with pytest.raises(UserError, match="too few"):
        training.fit(past(50), version=1, seed=1)


def test_the_pointer_moves_last_and_a_changed_file_is_not_used(trees: Trees, tmp_path: Path) -> None:
    training.write(tmp_path, trees.model, past(), seed=1)
    loaded = training.load(tmp_path)
    assert loaded is not None
    assert loaded.version == 3
    card = json.loads((tmp_path / "card-3.json").read_text())
    assert (card["version"], card["jobs"], card["seed"]) == (3, 400, 1)
    assert card["censored"] == sum(job.censored for job in past())
    file = tmp_path / "model-3.msgpack"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedModel, match="not what was trained"):
        training.load(tmp_path)


def test_a_schedule_goes_on_from_the_model_that_is_there(trees: Trees, tmp_path: Path) -> None:
    training.write(tmp_path, trees.model, past(), seed=1)
    boosting, schedule = Boosting(), training.Training(tmp_path, every_jobs=100, every_s=10.0)
    for job in past():
        boosting.observe(job)
    schedule.resume(boosting, 1e6)
    assert boosting.trees is not None
    assert boosting.trees.version == 3
    schedule.poll(boosting, 2e6)
    assert not list(tmp_path.glob("jobs-*")), "no job has ended since"


def test_a_child_trains_and_its_model_is_swapped_in(tmp_path: Path) -> None:
    boosting, schedule = Boosting(), training.Training(tmp_path / "models", every_jobs=100, every_s=10.0)
    for job in past():
        boosting.observe(job)
    assert not schedule.poll(boosting, 0.0)  # started
    give_up = time.monotonic() + 120
    while not schedule.poll(boosting, 1.0):
        assert not schedule.failures, schedule.last_failure
        assert time.monotonic() < give_up
        time.sleep(0.1)
    assert boosting.trees is not None
    assert boosting.trees.version == 1
    assert not list((tmp_path / "models").glob("jobs-*"))
    assert not schedule.poll(boosting, 1e9)  # nothing new to learn from
    schedule.stop()


def test_a_child_that_fails_leaves_the_model_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "JOBS_LEAST", 10)  # here, not in the child, which refuses so few
    boosting, schedule = Boosting(), training.Training(tmp_path, every_jobs=10, every_s=0.0)
    for job in past(20):
        boosting.observe(job)
    schedule.poll(boosting, 0.0)
    give_up = time.monotonic() + 120
    while not schedule.failures:
        schedule.poll(boosting, 1.0)
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert boosting.trees is None
    assert "the model before it stays" in schedule.last_failure
    assert "\n" not in schedule.last_failure
    schedule.stop()


def test_what_a_killed_child_left_is_gone_with_the_next(tmp_path: Path) -> None:
    boosting, schedule = Boosting(), training.Training(tmp_path, every_jobs=100, every_s=0.0)
    for name in ("jobs-7.msgpack", "model-7.part"):
        (tmp_path / name).write_bytes(b"half")
    for job in past():
        boosting.observe(job)
    schedule.poll(boosting, 0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs-1.msgpack", "training.log"]
    schedule.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["training.log"]


def test_a_child_whose_folder_went_away_is_told_of_in_one_line(tmp_path: Path) -> None:
    boosting, schedule = Boosting(), training.Training(tmp_path / "models", every_jobs=100, every_s=0.0, limit_s=-1.0)
    for job in past():
        boosting.observe(job)
    schedule.poll(boosting, 0.0)
    schedule.stop()
    shutil.rmtree(tmp_path / "models")
    assert str(tmp_path / "models") in schedule._last_words(1)
