"""Networks: values by hand, the file, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from core_builder import Pool, placed

from streamsched.policy import network as networks
from streamsched.policy.features import FEATURES, INDEX, NAMES, Features
from streamsched.policy.network import ByNetwork, Network, UnusableModel, from_bytes, load

COUNT = len(FEATURES)
LOW, HIGH = Network.blank().low, Network.blank().high


def random_network(seed: int, *hidden: int) -> Network:
    like = Network.blank(*hidden)
    return like.with_weights(np.random.default_rng(seed).normal(0.0, 0.5, len(like.weights)))


def features(seed: int, jobs: int) -> np.ndarray:  # type: ignore[type-arg]
    random = np.random.default_rng(seed)
    found = np.exp(random.uniform(-3.0, 12.0, (jobs, COUNT)))
    found[:, INDEX["free_gpus"] :] = found[0, INDEX["free_gpus"] :]
    return found.astype(np.float32)


def test_a_score_by_hand() -> None:
    """Two hidden units: the wait and the load, of which one is rectified away."""
    first = np.zeros((COUNT, 2), np.float32)
    first[INDEX["wait_s"], 0] = 2.0
    first[INDEX["load"], 1] = -1.0
    weights = np.concatenate([first.ravel(), [0.5, 0.25], [3.0, 100.0], [-1.0]]).astype(np.float32)
    network = Network((COUNT, 2, 1), weights, np.zeros(COUNT), np.full(COUNT, np.e - 1.0))
    row = np.zeros((2, COUNT), np.float32)
    row[0, INDEX["wait_s"]] = np.e**0.5 - 1.0
    row[1, INDEX["wait_s"]] = 1e6
    row[:, INDEX["load"]] = np.e - 1.0
    assert (network.scores(row) / networks.ROUNDED).tolist() == pytest.approx([3.5, 6.5], rel=1e-6)
    row[:, INDEX["load"]] = 0.0
    assert (network.scores(row) / networks.ROUNDED).tolist() == pytest.approx([28.5, 31.5], rel=1e-6)


def test_the_order_of_the_jobs_does_not_matter() -> None:
    network, rows = random_network(1, 32, 32), features(2, 1_000)
    rows[500:] = rows[:500]
    scores = network.scores(rows)
    assert scores[500:].tolist() == scores[:500].tolist()
    order = np.random.default_rng(3).permutation(len(rows))
    assert network.scores(rows[order]).tolist() == scores[order].tolist()
    assert [float(network.scores(row[None])[0]) for row in rows[:50]] == scores[:50].tolist()
    assert len(set(scores.tolist())) > 400


def test_the_file_gives_the_same_network(tmp_path: Path) -> None:
    network = random_network(4, 16)
    (tmp_path / "model").write_bytes(network.to_bytes())
    again = load(tmp_path / "model")
    assert again.scores(features(5, 9)).tolist() == network.scores(features(5, 9)).tolist()
    assert again.digest == network.digest != random_network(5, 16).digest
    assert again.to_bytes() == network.to_bytes()


def body_with(**changes: object) -> bytes:
    """A file whose digest is right."""
    data = random_network(4, 16).to_bytes()
    told = msgspec.msgpack.decode(data[networks._HEAD :])
    body = msgspec.msgpack.encode({**told, **changes})
    return data[:9] + hashlib.sha256(body).digest() + body


GOOD = random_network(4, 16).to_bytes()
SOME = random_network(4, 16).weights


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no network"),
        (b"something else" * 9, "no network"),
        (GOOD[:30], "no network"),
        (GOOD[:8] + b"\x07" + GOOD[9:], "format 7, this version reads 1"),
        (GOOD[:-5], "cut or damaged"),
        (GOOD[:-5] + b"12345", "cut or damaged"),
        (body_with(features_version=99), "features of version 99, this version has 1; train it anew"),
        (body_with(features=list(NAMES[::-1])), "features of version 1"),
        (body_with(sizes=[COUNT, 17, 1]), "290 finite weights expected"),
        (body_with(sizes=[COUNT - 1, 16, 1]), "15 features to 1 score expected"),
        (body_with(sizes=[COUNT, 0, 1]), "units expected"),
        (body_with(sizes=[COUNT, 10**12, 1]), "units expected"),
        (body_with(sizes=[COUNT]), "15 features to 1 score expected"),
        (body_with(weights=np.where(np.arange(len(SOME)) == 3, np.nan, SOME).astype("<f4").tobytes()), "finite"),
        (body_with(weights=b"123"), "multiple of element size"),
        (body_with(low=[1.0]), "range of 15 features"),
        (body_with(low=HIGH.tolist()), "to a larger number"),
        (body_with(high=(HIGH * np.inf).tolist()), "to a larger number"),
        (body_with(low="x"), r"Expected `array`, got `str`"),
        (body_with(more=1), "unknown field"),
    ],
)
def test_what_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(data)
    with pytest.raises(UnusableModel, match=message) as refused:
        load(tmp_path / "model")
    assert str(refused.value).startswith(f"model {tmp_path / 'model'}: ")
    assert "\n" not in str(refused.value)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match="No such file"):
        load(tmp_path / "model")
    with pytest.raises(UnusableModel, match="directory"):
        load(tmp_path)


def test_any_flipped_byte_is_noticed() -> None:
    for place in range(0, len(GOOD), 7):
        with pytest.raises(UnusableModel):
            from_bytes(GOOD[:place] + bytes([GOOD[place] ^ 0x55]) + GOOD[place + 1 :])


def test_features_outside_the_range_of_training_are_told() -> None:
    rows = np.tile(((LOW + HIGH) / 2).astype(np.float32), (4, 1))
    network = random_network(1, 4)
    assert network.outside(rows) == {}
    rows[0, INDEX["wait_s"]] = 1e9
    rows[:, INDEX["load"]] = -0.5
    assert network.outside(rows) == {"wait_s": 0.25, "load": 1.0}


def test_a_blank_network_has_the_usual_ranges_and_prefers_nobody() -> None:
    like = Network.blank(4, 2, levels_gpu_s=[60.0])
    assert (like.sizes, like.levels_gpu_s) == ((COUNT, 4, 2, 1), (60.0,))
    assert like.scores(features(0, 5)).tolist() == [0.0] * 5
    assert [(low, high) for low, high in zip(like.low, like.high, strict=True)] == [(f.low, f.high) for f in FEATURES]
    told = Network.blank(4).with_weights(np.arange(COUNT * 4 + 9) / 10.0)
    assert (told.weights.dtype, told.sizes) == (np.float32, (COUNT, 4, 1))
    assert told.layers[0][0][0, :2] == pytest.approx([0.0, 0.1])
    with pytest.raises(ValueError, match="finite weights expected"):
        like.with_weights(np.zeros(3))


def test_the_core_ranks_by_a_network(make_pool: Callable[..., Pool]) -> None:
    """One layer that wants many GPUs; equal jobs in order of arrival."""
    weights = np.zeros(COUNT + 1)
    weights[INDEX["gpus"]] = 1.0
    pool = Pool(ranker=ByNetwork("net", Network.blank().with_weights(weights), Features()))
    pool.node("a", 8)
    for job_id, gpus in (("one", 1), ("two", 2), ("again", 2), ("four", 4)):
        pool.arrive(job_id, gpus)
    assert list(placed(pool.solve())) == ["four", "two", "again"]
