"""The production core in virtual time on the standard scenarios: reference figures, and the compiled path's starts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from loadgen.trace import Window, read_trace
from streamsched.core.config import SchedulerConfig
from streamsched.policy import by_name
from streamsched.sim import fast
from streamsched.sim.scenario import read_scenario
from streamsched.sim.simulator import Lived, simulate
from streamsched.sim.workload import SimJob, job, nodes_of

FIGURES = {
    ("philly-4w", "fcfs"): (2_279, 12_719),
    ("philly-4w", "smallest"): (1_879, 12_318),
    ("venus-4w", "fcfs"): (1_684, 11_170),
    ("venus-4w", "smallest"): (3_743, 13_230),
}
"""(scenario, rule) -> mean wait and mean JCT with backfill, of an independent count."""


def run(traces_dir: Path, scenario: str, rule: str, limit: int | None = None) -> tuple[list[Lived], fast.Outcome]:
    told = read_scenario(traces_dir.parent / "scenarios" / f"{scenario}.toml")
    jobs = read_trace(told.trace, Window(told.submitted_from, told.submitted_before, limit)).jobs
    group = told.nodes[0]
    config = SchedulerConfig(window_jobs=10_000, reservations_max=0, finished_keep_s=3600.0)
    known = [job(n, j.submit_s, j.duration_s, j.gpus) for n, j in enumerate(jobs)]
    result = simulate(known, nodes_of([(group.count, group.gpus, group.gpu_type)]), config, by_name(rule))
    compiled = fast.simulate(fast.Workload.of(jobs), [group.gpus] * group.count, fast.Rule.named(rule))
    return result.jobs, compiled


@pytest.mark.traces
@pytest.mark.parametrize("scenario", ["philly-4w", "venus-4w"])
def test_the_first_jobs_of_a_scenario_start_when_the_compiled_path_starts_them(traces_dir: Path, scenario: str) -> None:
    lived, compiled = run(traces_dir, scenario, "fcfs", limit=1_500)
    assert [one.first_start_s for one in lived] == compiled.start_s.tolist()


@pytest.mark.slow
@pytest.mark.traces
@pytest.mark.parametrize(("scenario", "rule"), FIGURES)
def test_the_core_meets_the_reference_figures(traces_dir: Path, scenario: str, rule: str) -> None:
    lived, compiled = run(traces_dir, scenario, rule)
    assert [one.first_start_s for one in lived] == compiled.start_s.tolist()
    wait = math.fsum(one.wait_s or 0.0 for one in lived) / len(lived)
    jct = math.fsum((one.finish_s or 0.0) - one.job.spec.submitted_at for one in lived) / len(lived)
    assert (wait, jct) == pytest.approx(FIGURES[scenario, rule], rel=0.01)


class Spy:
    """Notes what is told and asked, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, float]] = []

    def estimate(self, job: SimJob) -> float:
        self.heard.append(("asked", job.spec.job_id, job.spec.submitted_at))
        return {"j1": 50.0, "j2": 20.0}.get(job.spec.job_id, 1.0)

    def observe(self, job: SimJob, now: float) -> None:
        self.heard.append(("ended", job.spec.job_id, now))


def test_an_estimator_is_told_of_ends_before_it_is_asked_and_of_nothing_else() -> None:
    """One node: j0 runs until 10, when j2 arrives; the estimates, not the run times, say that j2 goes before j1."""
    jobs = [job(0, 0.0, 10.0, 8), job(1, 1.0, 5.0, 8), job(2, 10.0, 30.0, 8)]
    spy = Spy()
    config = SchedulerConfig(policy="sjf", reservations_max=0)
    result = simulate(jobs, nodes_of([(1, 8, "any")]), config, by_name("sjf"), estimator=spy)
    assert [one.first_start_s for one in result.jobs] == [0, 40, 10]
    assert spy.heard == [
        *(("asked", "j0", 0.0), ("asked", "j1", 1.0), ("ended", "j0", 10.0), ("asked", "j2", 10.0)),
        *(("ended", "j2", 40.0), ("ended", "j1", 45.0)),
    ]
