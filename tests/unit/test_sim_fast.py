"""The compiled path: cases by hand, and the reference figures of the standard scenarios."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import numpy as np
import pytest

from loadgen.trace import Window, read_trace
from streamsched.errors import UserError
from streamsched.sim.fast import Workload, mean, simulate


def workload(*jobs: tuple[float, float, int]) -> Workload:
    """(submit, run time, GPUs) of each."""
    submit, run, gpus = (np.array(column) for column in zip(*jobs, strict=True))
    return Workload(submit.astype(float), run.astype(float), gpus.astype(np.int64), run.astype(float))


BLOCKED = ((0, 10, 6), (1, 5, 8), (2, 20, 2), (3, 4, 2))
"""On one node of 8: the second waits for the first; the third would delay it, the fourth would not."""


@pytest.mark.parametrize(
    ("backfill", "starts"),
    [("none", [0.0, 10.0, 15.0, 15.0]), ("skip", [0.0, 22.0, 2.0, 10.0]), ("easy", [0.0, 10.0, 15.0, 3.0])],
)
def test_backfill(backfill: str, starts: list[float]) -> None:
    assert simulate(workload(*BLOCKED), [8], "fcfs", backfill).start_s.tolist() == starts


def test_easy_lets_a_long_job_beside_the_reservation() -> None:
    """The head will take one whole node; the long job fits on the other and may stay there."""
    jobs = workload((0, 10, 8), (0, 100, 4), (1, 5, 8), (2, 50, 4))
    assert simulate(jobs, [8, 8], "fcfs", "easy").start_s.tolist() == [0.0, 0.0, 10.0, 2.0]


def test_best_fit_fills_the_fullest_node() -> None:
    jobs = workload((0, 10, 3), (0, 10, 6), (0, 10, 2), (0, 10, 5))
    assert simulate(jobs, [8, 8], "fcfs", "skip").start_s.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_a_large_job_takes_whole_nodes_and_the_rest_on_one_more() -> None:
    jobs = workload((0, 10, 20), (0, 10, 4), (0, 10, 5))
    assert simulate(jobs, [8, 8, 8], "fcfs", "skip").start_s.tolist() == [0.0, 0.0, 10.0]


def test_what_no_empty_cluster_holds_is_not_started() -> None:
    outcome = simulate(workload((0, 1, 9), (0, 1, 1)), [8], "fcfs", "none")
    assert np.isnan(outcome.start_s).tolist() == [True, False]


@pytest.mark.parametrize("wrong", [{"rule": "fancy"}, {"backfill": "some"}])
def test_unknown_names_are_told(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match="choose one of"):
        simulate(workload((0, 1, 1)), [8], **wrong)


def test_a_workload_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order"):
        workload((1, 1, 1), (0, 1, 1))


# ── reference figures of the standard scenarios ──────────────────────────────────────────────────────────────────────

SHARED = Path(os.environ.get("STREAMSCHED_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
FIGURES = [
    ("fcfs", "none", (10_051, 20_491), (14_775, 24_262)),
    ("fcfs", "skip", (2_279, 12_719), (1_684, 11_170)),
    ("smallest", "skip", (1_879, 12_318), (3_743, 13_230)),
    ("sjf", "skip", (1_406, 11_845), (1_214, 10_701)),
    ("unicep", "skip", (1_437, 11_877), (1_009, 10_496)),
]
"""(rule, backfill, mean wait and mean JCT on philly-4w, on venus-4w), of an independent count."""


@pytest.mark.traces
@pytest.mark.parametrize("scenario", ["philly-4w", "venus-4w"])
def test_the_reference_figures_are_met_within_one_percent(scenario: str) -> None:
    path = SHARED.parent / "scenarios" / f"{scenario}.toml"
    if not path.exists():
        pytest.skip(f"no scenarios at {path.parent}: set STREAMSCHED_TRACES")
    told = tomllib.loads(path.read_text())
    window = Window(*(_epoch(told[name]) for name in ("submitted_from", "submitted_before")))
    jobs = read_trace(SHARED / told["trace"], window).jobs
    run = np.array([job.duration_s for job in jobs])
    w = Workload(np.array([job.submit_s for job in jobs]), run, np.array([job.gpus for job in jobs]), run)
    nodes = [group["gpus"] for group in told["nodes"] for _ in range(group["count"])]
    for rule, backfill, *figures in FIGURES:
        outcome = simulate(w, nodes, rule, backfill)
        found = mean(outcome.start_s - w.submit_s), mean(outcome.finish_s - w.submit_s)
        assert found == pytest.approx(figures[scenario == "venus-4w"], rel=0.01), (rule, backfill)


def _epoch(day: object) -> float:
    from loadgen.jobs import parse_moment

    return parse_moment(str(day))
