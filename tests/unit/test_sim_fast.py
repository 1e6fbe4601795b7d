"""The compiled simulation: cases counted by hand, what it refuses, and the figures of the standard scenarios."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.jobs import parse_moment
from loadgen.trace import Window, read_trace
from streamsched.errors import UserError
from streamsched.sim.fast import (
    Backfill,
    Index,
    Preemption,
    Rule,
    Workload,
    fits_cluster,
    las_index,
    simulate,
    simulate_index,
    simulate_las,
    static_scores,
    timed_terms,
)
from streamsched.sim.scored import Instance


def workload(*jobs: tuple[float, float, int] | tuple[float, float, int, float]) -> Workload:
    """(submit, duration, GPUs[, estimate]) of each job."""
    columns = [np.array(column, np.float64) for column in zip(*jobs, strict=True)]
    return Workload(columns[0], columns[1], columns[2].astype(np.int64), columns[3] if len(columns) > 3 else None)


def starts(jobs: Workload, nodes: list[int], rule: Rule = Rule.FCFS, mode: Backfill = Backfill.SKIP) -> list[float]:
    return simulate(jobs, nodes, rule, mode).start_s.tolist()


# A job of 6 of 8 GPUs runs until 10; one of 8 is blocked; small ones come behind: too long, short, and long.
BLOCKED = workload((0, 10, 6, 10), (1, 5, 8, 5), (2, 9, 1, 9), (3, 7, 1, 7), (4, 1, 1, 1))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Backfill.NONE, [0, 10, 15, 15, 15]),
        (Backfill.SKIP, [0, 11, 2, 3, 10]),
        # The second small job is estimated to end at the very moment at which the blocked one can start.
        (Backfill.EASY, [0, 10, 15, 3, 4]),
    ],
)
def test_the_modes_of_backfilling_differ_behind_a_blocked_job(mode: Backfill, expected: list[float]) -> None:
    assert starts(BLOCKED, [8], mode=mode) == expected


def test_easy_lets_a_long_job_run_where_the_blocked_one_will_not_be() -> None:
    """Two nodes: the blocked job of 8 is awaited on the first, so a long one may take the rest of the second."""
    jobs = workload((0, 10, 8, 10), (0, 50, 7, 50), (1, 5, 8, 5), (2, 90, 1, 90))
    assert starts(jobs, [8, 8], mode=Backfill.EASY) == [0, 0, 10, 2]


def test_the_whole_node_is_kept_for_the_blocked_job() -> None:
    """At the shadow time 2 of 8 GPUs would be to spare, but the node is kept: short jobs alone start there."""
    jobs = workload((0, 10, 4, 10), (1, 5, 6, 5), (1, 90, 2, 90), (1, 9, 2, 9))
    assert starts(jobs, [8], mode=Backfill.EASY) == [0, 10, 10, 1]


# As BLOCKED on two nodes; the second in order that finds no room is of 8 GPUs too.
TWICE = workload((0, 10, 6, 10), (0, 20, 6, 20), (1, 5, 8, 5), (2, 5, 8, 5), (3, 14, 1, 14), (3, 30, 1, 30))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Backfill.SKIP, [0, 0, 20, 25, 3, 3]),
        # The first node is kept until 10 for the first of 8; the second takes both small ones.
        (Backfill.EASY, [0, 0, 10, 15, 3, 3]),
        # The second node is kept until 20 for the second of 8: what runs for 14 ends in time, what runs for 30 not.
        (Backfill.CONSERVATIVE, [0, 0, 10, 15, 3, 10]),
    ],
)
def test_easy_keeps_nodes_for_one_job_and_conservative_for_all(mode: Backfill, expected: list[float]) -> None:
    assert starts(TWICE, [8, 8], mode=mode) == expected


def test_an_overdue_job_is_taken_to_end_at_once() -> None:
    """Estimated to end at 1, it runs until 10: nothing longer than a moment is let past the blocked job."""
    jobs = workload((0, 10, 6, 1), (2, 5, 8, 5), (3, 1, 1, 1), (4, 1, 1, 0.0005))
    assert starts(jobs, [8], mode=Backfill.EASY) == [0, 10, 15, 4]


def test_completions_come_before_arrivals_and_arrivals_before_the_pass() -> None:
    """At 10 a job ends and a shorter one arrives: it gets the GPU before the one that has waited."""
    assert starts(workload((0, 10, 1, 10), (1, 5, 1, 5), (10, 2, 1, 2)), [1], Rule.SJF) == [0, 12, 10]


def test_best_fit_takes_the_fullest_node_and_the_lowest_of_equals() -> None:
    outcome = simulate(workload((0, 9, 3), (0, 9, 6), (0, 9, 2), (0, 9, 8)), [8, 8, 8])
    assert outcome.placed.tolist() == [0, 1, 1, 2]


def test_a_gang_takes_whole_nodes_and_the_rest_by_best_fit_elsewhere() -> None:
    outcome = simulate(workload((0, 9, 5), (0, 9, 19)), [8, 8, 8, 8])
    assert outcome.placed[outcome.placed_at[1] :].tolist() == [1, 2, 0]
    assert outcome.start_s.tolist() == [0, 0]


def test_a_smaller_node_is_never_a_whole_one_but_takes_a_remainder() -> None:
    assert fits_cluster(np.array([12, 13, 16, 17]), [8, 4]).tolist() == [True, False, False, False]
    assert simulate(workload((0, 9, 12)), [4, 8]).placed.tolist() == [1, 0]


def test_the_integrals_of_a_case_counted_by_hand() -> None:
    outcome = simulate(workload((100, 10, 2), (104, 5, 1)), [2])
    assert (outcome.queue_job_s, outcome.busy_gpu_s, outcome.queue_max) == (6.0, 25.0, 1)
    assert (outcome.span_s, outcome.mean_wait_s) == (15.0, 3.0)
    assert outcome.utilisation == 25 / 30
    assert outcome.preemptions.tolist() == [0, 0]


def test_least_attained_service_counted_by_hand() -> None:
    """One GPU. The long job reaches the level at 5 and goes for the short one at 7, with 4 s of work saved.

    It is back at 10, restarts until 12 and does the other 16 s until 28; a job of its own level waits for it.
    """
    jobs = workload((0, 20, 1), (7, 3, 1))
    outcome = simulate_las(jobs, [1], levels_gpu_s=[5], restart_s=2, checkpoint_s=4)
    assert outcome.start_s.tolist() == [0, 7]
    assert outcome.finish_s.tolist() == [28, 10]
    assert outcome.preemptions.tolist() == [1, 0]
    assert outcome.wait_s.tolist() == [8, 0]
    assert (outcome.queue_job_s, outcome.busy_gpu_s, outcome.useful_gpu_s) == (3, 28, 23)


def test_no_more_is_evicted_than_is_needed_and_the_last_in_order_first() -> None:
    """Nodes of 8 with 4 + 4 and 8 in use, all at the level: a job of 4 takes the place of the one that came last of
    those of which one is enough."""
    jobs = workload((0, 100, 4), (0, 100, 4), (0, 100, 8), (50, 10, 4))
    outcome = simulate_las(jobs, [8, 8], levels_gpu_s=[100], restart_s=0, checkpoint_s=1)
    assert outcome.preemptions.tolist() == [0, 0, 1, 0]
    narrow = workload((0, 100, 4), (0, 100, 4), (50, 10, 4))
    assert simulate_las(narrow, [8], levels_gpu_s=[100]).preemptions.tolist() == [0, 1, 0]


def test_of_equal_rank_who_loses_least_is_evicted() -> None:
    """Two of 4 GPUs have run for 59 s and 41 s when a third comes; with checkpoints every 40 s that loses 19 s, 1 s."""
    jobs = workload((0, 100, 4), (18, 100, 4), (59, 10, 4))
    costs = Preemption(restart_s=0, checkpoint_s=40, least_loss=True)
    assert simulate_index(jobs, [8], las_index((150.0,)), costs).preemptions.tolist() == [0, 1, 0]
    later = workload((0, 100, 4), (18, 100, 4), (81, 10, 4))
    assert simulate_index(later, [8], las_index((150.0,)), costs).preemptions.tolist() == [1, 0, 0]
    by_arrival = Preemption(restart_s=0, checkpoint_s=40)
    assert simulate_index(later, [8], las_index((150.0,)), by_arrival).preemptions.tolist() == [0, 1, 0]


# Two nodes, on each a job of 7 GPUs until 50 and one of 1 until 1,000; then one of 8 comes, which outranks nobody.
SPREAD = workload((0, 50, 7), (0, 1000, 1), (0, 50, 7), (0, 1000, 1), (60, 100, 8))
NO_LEVELS = Index(np.zeros(0), np.zeros((1, 1)))


def test_a_job_is_moved_to_make_a_node_free() -> None:
    """The first of 1 GPU goes to the other node at 60: of its 60 s 50 are saved, and 2 pass before it goes on."""
    settled = Preemption(restart_s=2, checkpoint_s=25, move_after_s=10)
    outcome = simulate_index(SPREAD, [8, 8], NO_LEVELS, settled)
    assert outcome.start_s.tolist() == [0, 0, 0, 0, 60]
    assert outcome.finish_s.tolist() == [50, 1012, 50, 1000, 160]
    assert outcome.preemptions.tolist() == [0, 1, 0, 0, 0]


def test_nobody_is_moved_who_has_not_run_for_long_enough() -> None:
    """At 60 they have run for 60 s; nothing happens until the first of them ends."""
    outcome = simulate_index(SPREAD, [8, 8], NO_LEVELS, Preemption(2, 25, move_after_s=61))
    assert outcome.start_s[4] == 1000
    assert outcome.preemptions.sum() == 0


def test_who_has_waited_for_the_bound_goes_first() -> None:
    """By levels the job of 8 would wait for ever younger ones; at 30 it takes the node, and keeps it."""
    jobs = workload((0, 1000, 8), *((10 * n, 10, 8) for n in range(1, 20)))
    bounded = simulate_index(jobs, [8], las_index((8.0,)), Preemption(0, 1, bound_s=30))
    free = simulate_index(jobs, [8], las_index((8.0,)), Preemption(0, 1))
    # It ran from 0 to 10, of which all is saved; from 40 on it has waited for 30 s.
    assert bounded.runs.start_s[bounded.runs.job == 0].tolist() == [0, 40]
    assert bounded.finish_s[0] == 40 + 990
    assert free.finish_s[0] == 200 + 990


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"levels_gpu_s": [5, 5]}, "levels ascend"),
        ({"levels_gpu_s": [0]}, "levels ascend"),
        ({"restart_s": -1}, "restart_s"),
        ({"checkpoint_s": 0}, "checkpoint_s"),
    ],
)
def test_levels_and_times_that_make_no_sense_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        simulate_las(workload((0, 1, 1)), [1], **wrong)


def test_formulas_of_the_rules() -> None:
    """Two jobs, the second submitted 100 s after the first: 100 s estimated, 3 GPUs."""
    jobs = workload((1e6, 1, 1, 10), (1e6 + 100, 1, 3, 100))
    expected = {
        Rule.FCFS: -1,
        Rule.LCFS: 1,
        Rule.SJF: -100,
        Rule.SAF: -300,
        Rule.QSSF: -300,
        Rule.SMALLEST: -3,
        Rule.LARGEST: 3,
        Rule.F1: -(2 * 3 + 870 * 2),
        Rule.F2: -(10 * 3 + 25_600 * 2),
        Rule.F3: -(300 + 6_860_000 * 2),
        Rule.F4: -(100 * 3**0.5 + 530_000 * 2),
    }
    assert {rule: static_scores(rule, jobs)[1] for rule in expected} == pytest.approx(expected)
    assert set(expected) == {rule for rule in Rule if not rule.by_time}
    assert timed_terms(Rule.UNICEP, jobs, 8)[1] == 100 * 2
    assert timed_terms(Rule.WFP3, jobs, 8)[1] == 100


def test_multifactor_weighs_age_and_size() -> None:
    """4 of 8 GPUs are worth half of 1,000; a week of waiting, and no more than a week, is worth 1,000."""
    week = 7 * 86_400.0
    jobs = workload((0, week, 8), (0, 9, 1), (week / 2 + 1, 9, 4), (week, 9, 8))
    # At the end of the first: 1,000 + 125 for the one that has waited a week, 499 + 500, 0 + 1,000.
    assert starts(jobs, [8], Rule.MULTIFACTOR, Backfill.NONE) == [0, week, week + 18, week + 9]
    assert timed_terms(Rule.MULTIFACTOR, jobs, 8).tolist() == [1000, 125, 500, 1000]
    old = workload((0, 3 * week, 8), (0, 9, 1), (week, 9, 1))
    assert starts(old, [8], Rule.MULTIFACTOR, Backfill.NONE)[1:] == [3 * week, 3 * week]


def test_the_order_by_wfp3_and_unicep_changes_while_jobs_wait() -> None:
    """At 10 the first to wait scores 1 * 1 by WFP3, the second 0.027 * 8."""
    early = workload((0, 10, 8, 10), (0, 4, 1, 10), (7, 4, 8, 10))
    assert starts(early, [8], Rule.WFP3) == [0, 10, 14]
    # At 100 they are at 985 * 1 and 804 * 8 by WFP3, 9.95 and 2.9 by UNICEP.
    late = workload((0, 100, 8, 1), (0, 4, 1, 10), (7, 4, 8, 10))
    late = Workload(np.array([0.0, 0.5, 7.0]), late.duration_s, late.gpus, late.estimate_s)
    assert starts(late, [8], Rule.WFP3) == [0, 104, 100]
    assert starts(late, [8], Rule.UNICEP) == [0, 100, 104]


def test_a_rule_is_found_by_its_name_and_a_wrong_name_is_told() -> None:
    assert Rule.named("wfp3") is Rule.WFP3
    with pytest.raises(UserError, match=r"no rule 'fifo'; there are fcfs, lcfs, .*f4"):
        Rule.named("fifo")


def test_what_cannot_be_run_is_refused_in_one_clear_line() -> None:
    jobs = workload((0, 1, 1), (0, 1, 17), (0, 1, 20))
    with pytest.raises(UserError, match="2 of 3 jobs can never run on these nodes, the first is number 1 with 17 GPUs"):
        simulate(jobs, [8, 8])
    with pytest.raises(UserError, match="EASY backfilling needs estimates"):
        simulate(jobs, [8, 8, 8], backfill=Backfill.EASY)
    for rule in Rule:
        if rule.by_estimate:
            with pytest.raises(UserError, match=f"{rule.name.lower()} needs estimates"):
                simulate(jobs, [8, 8, 8], rule)
    with pytest.raises(UserError, match="at least one node"):
        simulate(jobs, [])


@pytest.mark.parametrize(
    ("jobs", "complaint"),
    [
        ([(1, 1, 1), (0, 1, 1)], "ascending"),
        ([(0, -1, 1)], "negative"),
        ([(0, np.nan, 1)], "not finite"),
        ([(0, 1, 0)], "less than one GPU"),
        ([(0, 1, 1, np.inf)], "estimate"),
    ],
)
def test_arrays_that_are_no_workload_are_refused(jobs: list[Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        workload(*jobs)


def test_rows_that_are_taken_stay_together() -> None:
    jobs = workload((0, 10, 1, 5), (1, 20, 2, 6), (2, 30, 3, 7), (3, 40, 4, 8))
    for which in (np.array([1, 3]), np.array([False, True, False, True]), slice(1, None, 2)):
        taken = jobs.take(which)
        assert (taken.submit_s.tolist(), taken.duration_s.tolist()) == ([1.0, 3.0], [20.0, 40.0])
        assert taken.estimate_s is not None
        assert (taken.gpus.tolist(), taken.estimate_s.tolist()) == ([2, 4], [6.0, 8.0])
    assert workload((0, 10, 1)).take(slice(1)).estimate_s is None
    turned = jobs.take(np.array([2, 0]), submit_s=np.array([5.0, 6.0]), duration_s=np.array([1.0, 2.0]))
    assert (turned.submit_s.tolist(), turned.duration_s.tolist()) == ([5.0, 6.0], [1.0, 2.0])
    assert turned.gpus.tolist() == [3, 1]
    with pytest.raises(ValueError, match="not ascending"):
        jobs.take(np.array([2, 0]))
    with pytest.raises(ValueError, match="above 0 expected"):
        jobs.take(slice(0))


def test_of_an_instance_weights_spreads_and_limits_go_along() -> None:
    jobs = workload((0, 10, 1), (1, 20, 2), (2, 30, 3))
    given = Instance(jobs, [4, 4], np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3]), 100.0, 2)
    taken = given.take(np.array([0, 2]), [8], submit_s=np.array([0.0, 1.0]))
    assert taken.weight is not None
    assert taken.spread is not None
    assert (taken.weight.tolist(), taken.spread.tolist()) == ([1.0, 3.0], [0.1, 0.3])
    assert (taken.jobs.gpus.tolist(), taken.jobs.submit_s.tolist(), taken.node_gpus) == ([1, 3], [0.0, 1.0], [8])
    assert (taken.reserve_after_s, taken.reservations_max) == (100.0, 2)
    assert list(given.take(slice(2)).node_gpus) == [4, 4]
    with pytest.raises(UserError):
        given.take(np.array([2]), [2])


def test_noisy_estimates_are_seeded_and_log_normal() -> None:
    jobs = Workload(np.zeros(20_000), np.full(20_000, 50.0), np.ones(20_000, np.int64))
    noisy = jobs.with_noisy_estimates(0.5, seed=3).estimate_s
    assert noisy is not None
    logs = np.log(noisy / 50)
    assert logs.std() == pytest.approx(0.5, rel=0.05)
    assert abs(logs.mean()) < 0.02
    again, other = jobs.with_noisy_estimates(0.5, seed=3), jobs.with_noisy_estimates(0.5, seed=4)
    assert np.array_equal(noisy, again.estimate_s)  # type: ignore[arg-type]
    assert not np.array_equal(noisy, other.estimate_s)  # type: ignore[arg-type]


def test_without_numba_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "numba":
            raise ModuleNotFoundError("No module named 'numba'", name="numba")
        return imported(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "streamsched.sim.fast_kernel", raising=False)
    monkeypatch.delattr("streamsched.sim.fast_kernel", raising=False)
    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(UserError, match=r"pip install 'streamsched\[fast\]'"):
        simulate(workload((0, 1, 1)), [8])


PHILLY = ("philly/philly_jobs_until_2017-11-15.csv", "2017-10-02", "2017-10-30", 80)
VENUS = ("helios-venus/venus_gpu_jobs_until_2020-07-31.csv", "2020-06-29", "2020-07-27", 84)


@pytest.mark.traces
@pytest.mark.parametrize(
    ("scenario", "rule", "mode", "wait_s", "jct_s"),
    [
        (PHILLY, Rule.FCFS, Backfill.NONE, 10_051, 20_491),
        (PHILLY, Rule.FCFS, Backfill.SKIP, 2_279, 12_719),
        (PHILLY, Rule.SMALLEST, Backfill.SKIP, 1_879, 12_318),
        (PHILLY, Rule.SJF, Backfill.SKIP, 1_406, 11_845),
        (PHILLY, Rule.UNICEP, Backfill.SKIP, 1_437, 11_877),
        (VENUS, Rule.FCFS, Backfill.NONE, 14_775, 24_262),
        (VENUS, Rule.FCFS, Backfill.SKIP, 1_684, 11_170),
        (VENUS, Rule.SMALLEST, Backfill.SKIP, 3_743, 13_230),
        (VENUS, Rule.SJF, Backfill.SKIP, 1_214, 10_701),
        (VENUS, Rule.UNICEP, Backfill.SKIP, 1_009, 10_496),
    ],
    ids=lambda value: (
        value[0].split("/")[0] if isinstance(value, tuple) else getattr(value, "name", str(value)).lower()
    ),
)
def test_an_independent_count_of_the_standard_scenarios_is_met(
    traces_dir: Path, scenario: tuple[str, str, str, int], rule: Rule, mode: Backfill, wait_s: float, jct_s: float
) -> None:
    """Mean wait and mean JCT as the scenarios' README states them, to within rounding (1 % would do)."""
    path, first, before, nodes = scenario
    trace = read_trace(traces_dir / path, Window(parse_moment(first), parse_moment(before)))
    jobs = Workload.of(trace.jobs).with_true_estimates()
    outcome = simulate(jobs, [8] * nodes, rule, mode)
    assert outcome.mean_wait_s == pytest.approx(wait_s, abs=0.6)
    assert float((outcome.finish_s - jobs.submit_s).mean()) == pytest.approx(jct_s, abs=0.6)
