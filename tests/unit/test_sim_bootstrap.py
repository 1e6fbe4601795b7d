"""Bootstrap intervals: against plain resampling, what they cover, and what they are of constants."""

from __future__ import annotations

import numpy as np
import pytest

from streamsched.sim.bootstrap import Bootstrap


def plain(values: np.ndarray, drawn: Bootstrap, draw: int) -> np.ndarray:
    """The values of one draw, block by block."""
    length = int(drawn._sizes[0])
    return np.concatenate([values[block * length : (block + 1) * length] for block in drawn._chosen[draw]])


@pytest.mark.parametrize("total", [1, 2, 3, 10, 37, 400])
def test_draws_are_those_of_plain_resampling(total: int) -> None:
    random = np.random.default_rng(total)
    values = np.round(random.exponential(3.0, total))  # many ties
    drawn = Bootstrap(total, seed=3, draws=50)
    samples = [plain(values, drawn, draw) for draw in range(50)]
    assert drawn.means(values).tolist() == pytest.approx([sample.mean() for sample in samples])
    for q in (0, 1, 50, 90, 99, 100):
        expected = [float(np.percentile(sample, q, method="inverted_cdf")) for sample in samples]
        assert drawn.percentiles(values, q).tolist() == expected


def test_a_constant_has_an_interval_without_width() -> None:
    drawn = Bootstrap(100)
    values = np.full(100, 7.0)
    assert drawn.between(drawn.means(values)) == (7.0, 7.0)
    assert drawn.between(drawn.percentiles(values, 99)) == (7.0, 7.0)


@pytest.mark.parametrize(("q", "truth"), [(None, 1.0), (50, np.log(2.0)), (90, np.log(10.0))])
def test_intervals_cover_the_truth_about_as_often_as_they_say(q: float | None, truth: float) -> None:
    random = np.random.default_rng(1)
    hits = 0
    for seed in range(300):
        values = random.exponential(1.0, 900)
        drawn = Bootstrap(900, seed, draws=400)
        low, high = drawn.between(drawn.means(values) if q is None else drawn.percentiles(values, q))
        hits += low <= truth <= high
    assert 0.90 <= hits / 300 <= 0.99


def test_blocks_widen_the_interval_of_what_comes_in_runs() -> None:
    values = np.repeat(np.random.default_rng(1).exponential(1.0, 30), 30)
    single, blocks = Bootstrap(900, block=1), Bootstrap(900)
    low, high = single.between(single.means(values))
    wide_low, wide_high = blocks.between(blocks.means(values))
    assert wide_high - wide_low > 3 * (high - low)


def test_the_seed_decides() -> None:
    values = np.arange(100.0)
    same = [Bootstrap(100, seed).means(values).tolist() for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


def test_blocks_may_begin_where_they_are_told() -> None:
    """Two blocks of 1 and of 3 values: means are those of the draws (first, first), (first, second) and so on."""
    drawn = Bootstrap(4, draws=200, starts=np.array([0, 1]))
    found = set(drawn.means(np.array([10.0, 0.0, 0.0, 6.0])).tolist())
    assert found == {10.0, 4.0, 2.0}
    assert set(drawn.percentiles(np.array([10.0, 0.0, 0.0, 6.0]), 100).tolist()) == {10.0, 6.0}
