"""The production core in virtual time on the standard scenarios: reference figures, and the compiled path's starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadgen.trace import Window, read_trace
from streamsched.core.config import SchedulerConfig
from streamsched.core.model import Job, JobState
from streamsched.core.run_times import Said
from streamsched.policy import by_name
from streamsched.sim import fast
from streamsched.sim.learning import Learned
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


class Spy(Said):
    """Notes what is told, in order, and has estimates of its own."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, float]] = []

    def submitted(self, job: SimJob, now: float) -> None:
        self.heard.append(("submitted", job.spec.job_id, now))

    def whole_s(self, jobs: Sequence[Job]) -> Sequence[float | None]:
        return [{"j1": 50.0, "j2": 20.0}.get(job.spec.job_id, 1.0) for job in jobs]

    def observe(self, job: SimJob, now: float) -> None:
        self.heard.append(("ended", job.spec.job_id, now))


def test_an_estimator_is_told_of_ends_before_submissions_and_of_nothing_else() -> None:
    """One node: j0 runs until 10, when j2 arrives; the estimates, not the run times, say that j2 goes before j1."""
    jobs = [job(0, 0.0, 10.0, 8), job(1, 1.0, 5.0, 8), job(2, 10.0, 30.0, 8)]
    spy = Spy()
    config = SchedulerConfig(policy="sjf", reservations_max=0)
    result = simulate(jobs, nodes_of([(1, 8, "any")]), config, by_name("sjf"), estimator=spy)
    assert [one.first_start_s for one in result.jobs] == [0, 40, 10]
    assert spy.heard == [
        *(("submitted", "j0", 0.0), ("submitted", "j1", 1.0), ("ended", "j0", 10.0), ("submitted", "j2", 10.0)),
        *(("ended", "j2", 40.0), ("ended", "j1", 45.0)),
    ]


class Short(Learned):
    """Knows two kinds of jobs: those of the tenant `two` take some 100 s or, one in ten, 20,000 s, those of `one` some
    1,500 s."""

    def __init__(self) -> None:
        super().__init__()
        for n in range(300):
            for tenant, run_s in (("two", 20_000.0 if n % 10 == 0 else 90.0 + n % 20), ("one", 1_450.0 + n % 100)):
                self.observe(job(-1 - n, 0.0, run_s, 8, tenant), 0.0)


@pytest.mark.parametrize("rule", ["srtf", "gittins"])
def test_a_job_that_runs_beyond_its_like_makes_room(rule: str) -> None:
    """After 5,000 s it has outlived the short ones of its kind, what is left to it is long. Before it has run it may
    end soon, and goes first."""
    jobs = [job(0, 0.0, 20_000.0, 8, "two", preemptible=True), job(1, 5_000.0, 1_500.0, 8, "one", preemptible=True)]
    config = SchedulerConfig(policy=rule, preempt="score", reservations_max=0)
    lived = simulate(jobs, nodes_of([(1, 8, "any")]), config, by_name(rule), estimator=Short()).jobs
    assert [one.preemptions for one in lived] == [1, 0]
    assert lived[1].first_start_s == 5_000
    both = [job(0, 0.0, 400.0, 8, "one"), job(1, 1.0, 1_500.0, 8, "one"), job(2, 2.0, 20_000.0, 8, "two")]
    lived = simulate(both, nodes_of([(1, 8, "any")]), config, by_name(rule), estimator=Short()).jobs
    assert [one.first_start_s for one in lived] == [0, 20_400, 400]


def test_learned_run_times_are_asked_for_again_as_jobs_run() -> None:
    told = Short()
    long = job(0, 0.0, 20_000.0, 8, "two")
    told.submitted(long, 0.0)
    waiting = Job(spec=long.spec, seq=0, state=JobState.QUEUED, queued_at=0.0)
    [whole] = told.whole_s([waiting])
    [at_first], [later] = told.total_s([waiting], [0.0]), told.total_s([waiting], [2_000.0])
    assert whole == pytest.approx(100, rel=0.3)
    assert at_first == pytest.approx(whole, rel=0.05), "it is kept as a sketch what was said"
    assert later is not None
    assert later > 10_000
    assert told.whole_s([waiting]) == [whole]
