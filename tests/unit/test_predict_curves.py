"""What is read from a survival curve: quantiles, means, conditioning on age, progress, Gittins' rank."""

from __future__ import annotations

import math

import numpy as np
import pytest

from streamsched.predict import curves as grid
from streamsched.predict.curves import BINS, EDGES_S, LONGEST_S

NAN = math.nan


def exponential(mean_s: float) -> np.ndarray:
    curve = np.exp(-(EDGES_S - 1.0) / mean_s)
    curve[-1] = 0.0
    return curve[None, :]


def steps(*parts: tuple[float, float]) -> np.ndarray:
    """(share, s): runs that take just so long, but for the width of a bin."""
    mass = np.zeros(BINS)
    for share, seconds in parts:
        mass[grid.bin_of(seconds)] += share
    return np.concatenate([[1.0], 1.0 - np.cumsum(mass)])[None, :].clip(0.0)


def ages(*seconds: float) -> np.ndarray:
    return np.array(seconds, np.float64)


@pytest.mark.parametrize(
    ("seconds", "place"),
    [
        (-5.0, 0),
        (0.0, 0),
        (1.0, 0),
        (2.01, 6),
        (1e300, BINS - 1),
        (math.inf, BINS - 1),
        (NAN, 0),
        (LONGEST_S, BINS - 1),
    ],
)
def test_every_number_has_a_bin(seconds: float, place: int) -> None:
    assert grid.bin_of(seconds) == place


def test_quantiles_and_mean_of_a_known_law() -> None:
    left, mean = grid.remaining(exponential(1000.0), ages(0.0))
    assert left[0] == pytest.approx([-1000.0 * math.log(1 - p) for p in (0.05, 0.25, 0.5, 0.75, 0.95)], rel=0.03)
    assert mean[0] == pytest.approx(1000.0, rel=0.02)


def test_an_exponential_has_no_memory_and_a_step_ends_when_it_ends() -> None:
    fresh, _ = grid.remaining(exponential(1000.0), ages(0.0))
    later, mean = grid.remaining(exponential(1000.0), ages(3000.0))
    assert later[0, 2] == pytest.approx(fresh[0, 2], rel=0.05)
    assert mean[0] == pytest.approx(1000.0, rel=0.1)
    left, _ = grid.remaining(steps((1.0, 1000.0)), ages(600.0))
    assert left[0, 2] == pytest.approx(400.0, rel=0.2)


def test_an_age_rules_out_what_would_have_ended() -> None:
    """Half take 100 s, half 10,000 s: who has run 200 s is one of the latter."""
    curve = steps((0.5, 100.0), (0.5, 10_000.0))
    first, _ = grid.remaining(curve, ages(0.0))
    later, _ = grid.remaining(curve, ages(200.0))
    assert first[0, 0] < 130.0
    assert later[0, 0] == pytest.approx(9_800.0, rel=0.15)


@pytest.mark.parametrize("age_s", [1e5, 1e9, 1e40])
def test_beyond_the_curve_a_job_may_run_as_long_again(age_s: float) -> None:
    left, mean = grid.remaining(steps((1.0, 100.0)), ages(age_s))
    assert left[0, 2] == pytest.approx(age_s)
    assert np.isfinite(left).all()
    assert np.isfinite(mean).all()


def test_progress_outweighs_the_curve_the_more_the_further_it_is() -> None:
    curve = exponential(1000.0)

    def median(fraction: float) -> float:
        told = grid.with_progress(curve, ages(500.0), np.array([fraction]), np.array([NAN]))
        return float(grid.remaining(told, ages(500.0))[0][0, 2])

    plain = float(grid.remaining(curve, ages(500.0))[0][0, 2])
    assert median(NAN) == plain
    assert median(0.05) < 9_500.0  # 9,500 s would be left at this rate: the curve has its say
    assert median(0.05) > plain
    assert median(0.9) == pytest.approx(500.0 / 9.0, rel=0.5)
    assert median(0.999) < 60.0


def test_an_extrapolated_run_time_counts_before_the_ratio() -> None:
    curve = exponential(1000.0)
    told = grid.with_progress(curve, ages(500.0), np.array([0.5]), np.array([2_000.0]))
    assert float(grid.remaining(told, ages(500.0))[0][0, 2]) == pytest.approx(1_500.0, rel=0.35)


def test_quantiles_become_a_curve_with_these_quantiles() -> None:
    quantiles = np.array([[10.0, 100.0, 100.0, 5_000.0, 1e5]])
    curve = grid.from_quantiles(quantiles, (0.05, 0.25, 0.5, 0.75, 0.95))
    assert (np.diff(curve[0]) <= 1e-12).all()
    found, _ = grid.remaining(curve, ages(0.0))
    assert found[0] == pytest.approx(quantiles[0], rel=0.15)


# ── Gittins ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rank_of_an_exponential_is_its_mean_at_any_age() -> None:
    ranks = grid.gittins_s(np.repeat(exponential(1000.0), 3, axis=0), ages(0.0, 200.0, 2_000.0))
    assert ranks == pytest.approx([1000.0] * 3, rel=0.06)


def test_rank_of_a_known_run_time_is_what_is_left_of_it() -> None:
    ranks = grid.gittins_s(np.repeat(steps((1.0, 1000.0)), 2, axis=0), ages(0.0, 600.0))
    assert ranks[0] == pytest.approx(1000.0, rel=0.1)
    assert ranks[1] == pytest.approx(400.0, rel=0.2)


def test_rank_knows_when_to_give_up() -> None:
    """9 of 10 take 10 s, the others 10,000 s: serve for 10 s at first, then come back last."""
    curve = np.repeat(steps((0.9, 10.0), (0.1, 10_000.0)), 2, axis=0)
    first, later = grid.gittins_s(curve, ages(0.0, 20.0))
    assert first == pytest.approx(10.0 / 0.9, rel=0.12)
    assert later == pytest.approx(9_980.0, rel=0.12)


def test_rank_by_brute_force_and_by_table() -> None:
    rng = np.random.default_rng(3)
    curves = grid.survival(rng.random((4, BINS)) ** 6)
    table = grid.gittins_table_s(curves)
    for edge in (0, 17, 60, 143):
        here = np.full(4, EDGES_S[edge])
        assert grid.gittins_s(curves, here) == pytest.approx(table[:, edge], rel=1e-6)
        for row in range(4):
            alive, area, least = curves[row, edge], 0.0, math.inf
            for to in range(edge + 1, BINS + 1):
                area += 0.5 * (curves[row, to - 1] + curves[row, to]) * (EDGES_S[to] - EDGES_S[to - 1])
                if alive - curves[row, to] > 1e-9:
                    least = min(least, area / (alive - curves[row, to]))
            if alive >= 1e-9:
                assert table[row, edge] == pytest.approx(least, rel=1e-9)


def test_rank_beyond_the_curve_is_the_age() -> None:
    assert grid.gittins_s(steps((1.0, 100.0)), ages(5_000.0)) == pytest.approx([5_000.0])
