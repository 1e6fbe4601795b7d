"""The Gittins index: distributions for which it is known."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.jobs import TraceJob
from streamsched.policy import gittins


def nobody_censored(count: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.zeros(count, dtype=np.bool_)


def test_one_known_run_time_gives_what_remains() -> None:
    """All take 100: at a the best is to go on to the end, so that 1 / index is 100 - a."""
    found = gittins.ranks(np.full(9, 100.0), nobody_censored(9), [10.0, 60.0, 99.0])
    assert found.tolist() == pytest.approx([100, 90, 40, 1])


def test_two_run_times_are_tried_for_the_short_one_first() -> None:
    """Half take 1, half 100. At 0: 1/2 of a completion per unit of time, so 2; from 1 on what remains of 100."""
    service = np.array([1.0, 100.0] * 5)
    assert gittins.ranks(service, nobody_censored(10), [1.0, 50.0]).tolist() == pytest.approx([2, 99, 50])


def test_a_memoryless_run_time_has_one_index() -> None:
    """Exponential of mean 10, by its quantiles."""
    shares = (np.arange(20_000) + 0.5) / 20_000
    found = gittins.ranks(-10.0 * np.log(1.0 - shares), nobody_censored(20_000), [1.0, 5.0, 10.0])
    assert found == pytest.approx([10, 10, 10, 10], rel=0.02)


def test_beyond_all_that_was_seen_there_is_no_hope() -> None:
    found = gittins.ranks(np.array([1.0, 2.0]), nobody_censored(2), [5.0])
    assert found[1] == gittins.HOPELESS


def test_jobs_that_were_cut_count_as_longer() -> None:
    """Kaplan and Meier by hand: of four, one dies at 1, one is lost at 2, one dies at 3 of two at risk, one is lost."""
    times, alive = gittins.kaplan_meier(np.array([1.0, 2.0, 3.0, 4.0]), np.array([False, True, False, True]))
    assert times.tolist() == [1, 2, 3, 4]
    assert alive.tolist() == pytest.approx([1, 0.75, 0.75, 0.375, 0.375])
    # Half die at 1, nobody is known to later: 1/2 for the 1.5 that all have had by 2.
    cut = gittins.ranks(np.array([1.0, 5.0]), np.array([False, True]), [2.0])
    assert cut.tolist() == pytest.approx([3, gittins.HOPELESS])


def test_classes_of_few_jobs_are_looked_up_in_the_curve_of_all() -> None:
    """60 jobs of one GPU, 10 of eight."""
    service = np.array([100.0] * 60 + [800.0] * 10)
    gpus = np.array([1] * 60 + [8] * 10)
    table = gittins.table(service, gpus, nobody_censored(70), [50.0])
    everybody = gittins.ranks(service, nobody_censored(70), [50.0])
    assert gittins.class_of(np.array([1, 2, 4, 5, 8, 9, 64])).tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert table[0].tolist() == pytest.approx([100, 50])
    assert table[2].tolist() == everybody.tolist()


def test_nothing_to_learn_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="no earlier job"):
        gittins.ranks(np.zeros(0), nobody_censored(0), [1.0])


def test_of_a_log_only_what_had_been_seen_counts() -> None:
    """At 100: one has run for 10 s on 2 GPUs, one runs since 40, one is queued until 120, one comes later."""
    jobs = [
        TraceJob(submit_s=0.0, duration_s=10.0, gpus=2, line=1),
        TraceJob(submit_s=0.0, queued_s=40.0, duration_s=500.0, gpus=1, line=2),
        TraceJob(submit_s=0.0, queued_s=120.0, duration_s=5.0, gpus=1, line=3),
        TraceJob(submit_s=200.0, duration_s=5.0, gpus=1, line=4),
    ]
    found = gittins.table_before(jobs, 100.0)
    assert found is not None
    expected = gittins.ranks(np.array([20.0, 60.0]), np.array([False, True]), gittins.LEVELS_GPU_S)
    assert found[0].tolist() == expected.tolist()
    assert gittins.table_before(jobs[3:], 100.0) is None
