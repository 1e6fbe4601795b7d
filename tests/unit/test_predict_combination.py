"""Several pooled, calibrated; cold starts, drift, progress, state."""

from __future__ import annotations

import builtins
import math
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from predict_jobs import features, finished

from streamsched.predict import Combination, Ending, Track, history
from streamsched.predict import state as states
from streamsched.predict.calibration import calibrated
from streamsched.predict.combination import MEMBERS, Shares
from streamsched.predict.counts import Counts
from streamsched.predict.curves import bin_of
from streamsched.predict.jobs import Features, stem
from streamsched.predict.neighbours import Neighbours
from streamsched.predict.progress import Reading
from streamsched.predict.state import DamagedState, from_bytes, restored, to_bytes


def taught(jobs: int = 300) -> Combination:
    """One user whose `eval` takes 100 s and whose `train` takes 10,000 s."""
    predictor, draw = Combination(), np.random.default_rng(2)
    for number in range(jobs):
        name, middle = (("eval", 100.0), ("train", 10_000.0))[number % 2]
        run_s = middle * float(np.exp(0.1 * draw.standard_normal()))
        predictor.observe(finished(run_s, f"{name}-model-{number}", user="u", job_id=f"j{number}"))
    return predictor


def test_a_cold_start_has_an_answer_and_a_wide_one() -> None:
    low, high = Combination().predict(features()).interval_s
    assert 0 < low < 60
    assert high > 86_400


def test_no_jobs_no_answers() -> None:
    assert Combination().predict_many([]) == []
    assert len(history().times([]).median_s) == 0


def test_history_tells_families_apart_and_its_intervals_get_narrow() -> None:
    short, long = taught().predict_many([features("eval-model-x", user="u"), features("train-model-x", user="u")])
    assert short.median_s == pytest.approx(100.0, rel=0.25)
    assert long.median_s == pytest.approx(10_000.0, rel=0.25)
    assert long.interval_s[1] / long.interval_s[0] < 30


def test_the_members_that_see_what_happens_coming_count_most() -> None:
    """Survival curves know neither user nor name: here they say little."""
    weights = taught().weights()
    assert weights["history"] + weights["neighbours"] > 0.9
    assert math.fsum(weights.values()) == pytest.approx(1.0)


def test_an_answer_is_the_weighted_mean_of_the_members_curves() -> None:
    predictor, asked = taught(20), [features("eval-model-x", user="u"), features("other", user="v")]
    weights = predictor.weights()
    assert weights["boosting"] == 0.0
    assert min(weights[name] for name in ("survival", "history", "neighbours")) > 0.02
    mean = sum(weights[name] * getattr(predictor, name).curves(asked) for name in MEMBERS)
    assert predictor.curves(asked) == pytest.approx(calibrated(mean, np.array(predictor.calibration.levels)))


def test_shares_go_to_whoever_was_right_and_come_back() -> None:
    shares = Shares([0.25] * 4)
    for _ in range(2_000):
        shares.add([0.3, 0.1, 0.1, 0.0])
    assert shares.of[0] > 0.9
    assert min(shares.of) > 0.005  # nobody is lost for good
    for _ in range(5_000):
        shares.add([0.1, 0.1, 0.1, 0.3])
    assert shares.of[3] > 0.9
    assert math.fsum(shares.of) == pytest.approx(1.0)


def test_shares_are_those_of_the_mixture_that_jobs_come_from() -> None:
    """Two members with two points each; 70 % of the jobs come from the first."""
    shares, draw = Shares([0.5, 0.5]), np.random.default_rng(3)
    means = []
    for _ in range(6_000):
        place = draw.choice(3, p=(0.7 * 0.5, 0.7 * 0.5 + 0.3 * 0.5, 0.3 * 0.5))
        shares.add([(0.5, 0.5, 0.0)[place], (0.0, 0.5, 0.5)[place]])
        means.append(shares.of[0])
    assert np.mean(means[1_000:]) == pytest.approx(0.7, abs=0.03)


def test_age_and_progress_change_what_is_left() -> None:
    predictor, job = taught(), features("train-model-x", user="u")
    fresh, old = predictor.predict(job), predictor.predict(job, 8_000.0)
    assert old.median_s < 0.5 * fresh.median_s
    assert predictor.predict(job, 8_000.0, 0.2).median_s > 1.3 * old.median_s
    assert predictor.predict(job, 8_000.0, 0.95).median_s < 0.5 * old.median_s


def test_steps_without_a_total_are_judged_by_those_of_earlier_runs() -> None:
    predictor = Combination()
    for number in range(30):
        predictor.observe(finished(1_000.0, "train", user="u", job_id=str(number), steps=500.0))
    job, track = features("train", user="u"), Track()
    track.add(Reading(0.0, 50.0), 1_000.0)
    track.add(Reading(0.0, 100.0), 2_000.0)  # this run is ten times as slow
    assert predictor.expected_steps(job, 100.0) == pytest.approx(500.0, rel=0.15)
    assert predictor.predict(job, 2_000.0, track).median_s == pytest.approx(8_000.0, rel=0.4)
    assert predictor.expected_steps(features("other", user="else"), 100.0) == 0.0


def test_arrays_for_policies_agree_with_single_answers() -> None:
    predictor = taught()
    jobs, ages = [features("eval-model-x", user="u"), features("train-model-x", user="u")], [30.0, 500.0]
    times = predictor.times(jobs, ages)
    alone = [predictor.predict(job, age) for job, age in zip(jobs, ages, strict=True)]
    assert times.median_s == pytest.approx([one.median_s for one in alone])
    assert times.mean_s == pytest.approx([one.mean_s for one in alone])
    assert times.total_median_s == pytest.approx(np.array(ages) + times.median_s)
    ranks = predictor.gittins_s(jobs, ages)
    assert ranks[0] < ranks[1]


def test_censored_jobs_are_known_to_run_longer() -> None:
    cut, done = history(), history()
    for _ in range(20):
        cut.observe(finished(100.0, "a", ending=Ending.CANCELLED))
        done.observe(finished(100.0, "a"))
    assert done.predict(features("a")).median_s == pytest.approx(100.0, rel=0.2)
    assert cut.predict(features("a")).median_s > 500.0


# ── drift ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_drift_is_seen_when_jobs_become_longer_and_is_gone_when_they_are_learned() -> None:
    predictor, draw, seen = Combination(), np.random.default_rng(5), False

    def run(jobs: int, middle_s: float) -> None:
        nonlocal seen
        predictor.expect([features(job_id=str(number)) for number in range(jobs)])
        for number in range(jobs):
            run_s = middle_s * float(np.exp(0.4 * draw.standard_normal()))
            predictor.observe(finished(run_s, job_id=str(number)))
            seen = seen or bool(predictor.drift().reasons)

    for _ in range(40):
        run(20, 100.0)
    assert predictor.drift().reasons == ()
    assert predictor.drift().coverage == pytest.approx(0.9, abs=0.06)
    seen = False
    run(80, 50_000.0)
    assert seen
    assert any("covers" in reason or "longer" in reason for reason in predictor.drift().reasons)
    for _ in range(100):
        run(20, 50_000.0)
    assert not any("covers" in reason for reason in predictor.drift().reasons)


# ── texts of users ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_names_are_alike_without_what_changes_from_run_to_run() -> None:
    assert stem("Train_ResNet50-lr3e-4_run17") == stem("train_resnet50-lr1e-3_run18") == "train resnet lr run"
    assert len(stem("long" * 1_000)) <= 64


def test_neighbours_find_the_job_of_the_most_alike_words() -> None:
    near = Neighbours()
    for number in range(20):
        near.observe(finished(100.0, f"eval bert wiki {number}", user="a"))
        near.observe(finished(9_000.0, f"train llama genome {number}", user="b"))
    assert near.predict(features("train llama traffic", user="b")).median_s > 2_000
    assert near.predict(features("eval bert coco", user="a")).median_s < 500


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_longest_unused_make_room() -> None:
    counts = Counts(5.0, keys_max=3)
    for key in ("a", "b", "c", "a", "d"):
        counts.add([key], 10.0, False)
    assert list(counts.slots) == ["c", "a", "d"]
    assert counts.weight(counts.rows(["b", "d"])).tolist() == [0.0, 1.0]


def test_old_jobs_count_half_after_the_half_life() -> None:
    counts = Counts(half_life=4.0, keys_max=3)
    for _ in range(500):
        counts.add(["a"], 10.0, False)
    assert float(counts.weight(counts.rows(["a"]))[0]) == pytest.approx(1 / (1 - 2**-0.25), rel=1e-3)


def test_of_the_jobs_that_run_the_latest_count_most() -> None:
    """A hundred that run weigh no more than the jobs that a half-life leaves of a hundred that ended."""
    counts = Counts(half_life=4.0, keys_max=3)
    counts.add(["a"], 10.0, False)
    counts.set_running([["a"]] * 100, [float(10 * age) for age in range(100)])
    running = counts.running[counts.running_row[counts.rows(["a"])]][0]
    assert float(running[0]) == pytest.approx(1 / (1 - 2**-0.25), rel=1e-3)
    assert running[bin_of(100.0)] < 0.25 * running[0]
    counts.set_running([], [])
    assert not counts.running_row.any()


def test_jobs_announced_and_never_seen_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamsched.predict.combination.PENDING_MAX", 10)
    predictor = Combination()
    predictor.expect([features(job_id=str(number)) for number in range(25)])
    assert list(predictor.expected) == [str(number) for number in range(15, 25)]
    predictor.forget("20")
    assert "20" not in predictor.expected


# ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_damaged_states_make_a_cold_start_and_a_line() -> None:
    data = to_bytes(taught(20))
    for odd in (b"junk", data[:50], data[:-1], data[:40] + b"\xff" + data[41:], data[:8] + b"\x63" + data[9:]):
        with pytest.raises(DamagedState):
            from_bytes(odd)
        predictor, reason = restored(odd)
        assert predictor.observed == 0
        assert reason.startswith("run-time predictor:")
        assert "\n" not in reason
    assert restored(None)[1] == restored(data)[1] == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["survival"].__setitem__(1, math.nan),
        lambda s: s["history"][2].__setitem__(0, -1.0),
        lambda s: s["history"][2].__setitem__(5, b""),
        lambda s: s["shares"]["of"].pop(),
        lambda s: s["shares"]["of"].__setitem__(0, math.nan),
        lambda s: s["calibration"][0].__setitem__(1, math.inf),
        lambda s: s["expected"]["later"].__setitem__(0, b"short"),
        lambda s: s["expected"]["later"][1].__setitem__(0, 1.5),
        lambda s: s["expected"]["later"][2].pop(),
        lambda s: s["watched"].__setitem__("loss", math.nan),
        lambda s: s["boosting"]["recent"][2][0].__setitem__(1, -1.0),
        lambda s: s["steps"].__setitem__(0, "survival"),
    ],
)
def test_a_state_that_does_not_hold_together_is_refused(change: Any) -> None:
    predictor = taught(20)
    predictor.expect([features(job_id="later")])
    plain = msgspec.msgpack.decode(to_bytes(predictor)[states._HEAD :])
    change(plain)
    body = msgspec.msgpack.encode(plain)
    data = states._MAGIC + bytes([states.FORMAT]) + states.zlib.crc32(body).to_bytes(4, "big") + body
    with pytest.raises(DamagedState, match="does not hold together"):
        from_bytes(data)


def test_nothing_here_needs_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "sklearn":
            raise ModuleNotFoundError(name)
        return imported(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refusing)
    assert from_bytes(to_bytes(taught(50))).predict(Features(gpus=1)).median_s > 0


@pytest.mark.parametrize("key", ["cost  center", " a", "b ", "\u2003wide\u2003", "tab\tand\nline"])
def test_a_label_of_whatever_key_is_learned_from(key: str) -> None:
    predictor = Combination()
    for number in range(50):
        predictor.expect([features(job_id=f"j{number}", labels={key: "vision"})])
        predictor.observe(finished(100.0, job_id=f"j{number}", labels={key: "vision"}))
    assert predictor.observed == 50
    assert from_bytes(to_bytes(predictor)).observed == 50


def test_names_in_any_script_are_told_apart() -> None:
    assert stem("训练 图像 17") != stem("评估 语言 17")
    assert stem("обучение-3") == stem("Обучение-4") != ""
