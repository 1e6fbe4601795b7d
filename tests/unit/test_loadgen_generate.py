"""Generated workloads: equal seed, equal bytes; the shape of the real traces."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest

from loadgen.describe import variation
from loadgen.formats import neutral_csv
from loadgen.generate import PROFILES, WorkloadOptions, generate
from loadgen.jobs import TraceJob, parse_moment
from loadgen.trace import Window, read_trace
from streamsched.errors import UserError


def text(options: WorkloadOptions) -> str:
    out = io.StringIO()
    neutral_csv.write(generate(options), out)
    return out.getvalue()


def gaps(jobs: list[TraceJob]) -> list[float]:
    return [later.submit_s - earlier.submit_s for earlier, later in itertools.pairwise(jobs)]


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_equal_seed_equal_bytes_and_another_seed_another_workload(profile: str) -> None:
    options = WorkloadOptions(jobs=300, seed=7, profile=profile)
    assert text(options) == text(options)
    assert text(options) != text(replace(options, seed=8))


def test_the_bytes_of_a_seed_stay_the_same_across_versions() -> None:
    lines = text(WorkloadOptions(jobs=3, seed=1)).splitlines()
    assert lines[0] == "job_id,submit_s,duration_s,gpus,tenant,duration_clamped"
    assert lines[1:] == GOLDEN


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    jobs = generate(WorkloadOptions(jobs=500, seed=3, start_s=1_500_000_000.0))
    path = tmp_path / "workload"
    with path.open("w") as file:
        neutral_csv.write(jobs, file)
    trace = read_trace(path)
    assert trace.format == "neutral CSV"
    assert trace.refusals.total == 0
    assert trace.jobs == jobs


def test_options_change_what_they_name_and_nothing_else() -> None:
    plain = generate(WorkloadOptions(jobs=400, seed=5))
    smooth = generate(WorkloadOptions(jobs=400, seed=5, burstiness=0.0))
    assert [(job.gpus, job.duration_s) for job in plain] == [(job.gpus, job.duration_s) for job in smooth]
    assert variation(gaps(smooth)) < 1.2 < variation(gaps(plain))
    short = generate(WorkloadOptions(jobs=400, seed=5, duration_max_s=100.0, gpus_max=4, tenants=2))
    assert max(job.duration_s for job in short) == 100.0
    assert {job.duration_s == 100.0 for job in short if job.clamped} == {True}
    assert max(job.gpus for job in short) == 4
    assert {job.tenant for job in short} <= {"tenant-00", "tenant-01"}


def test_a_load_is_met_over_the_time_of_arrivals() -> None:
    jobs = generate(WorkloadOptions(jobs=3000, seed=2, load=0.8, cluster_gpus=640))
    work = sum(job.gpus * job.duration_s for job in jobs)
    assert work / (640 * (jobs[-1].submit_s - jobs[0].submit_s)) == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": "mars"}, "unknown profile 'mars': use one of philly, venus"),
        ({"jobs": 0}, "at least 1"),
        ({"rate_per_h": -1.0}, "rate must be more than 0"),
        ({"load": 0.5}, "needs the GPUs"),
        ({"load": 0.5, "cluster_gpus": 8, "rate_per_h": 5.0}, "not both"),
        ({"duration_scale": float("nan")}, "duration scale"),
        ({"burstiness": -1.0}, "burstiness"),
    ],
)
def test_wrong_options_are_told(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(replace(WorkloadOptions(jobs=10), **changes))  # type: ignore[arg-type]


REAL = {
    "philly": ("philly/philly_jobs_until_2017-11-15.csv", "2017-10-02", "2017-10-30"),
    "venus": ("helios-venus/venus_gpu_jobs_until_2020-07-31.csv", "2020-06-29", "2020-07-27"),
}


@pytest.mark.traces
@pytest.mark.parametrize("profile", sorted(REAL))
def test_generated_workloads_resemble_the_real_ones(profile: str, traces_dir: Path) -> None:
    """Same order of magnitude in what makes scheduling hard; the fit is to the whole trace, the figures to a slice."""
    name, first, before = REAL[profile]
    real = read_trace(traces_dir / name, Window(parse_moment(first), parse_moment(before))).jobs
    made = generate(WorkloadOptions(jobs=len(real), seed=1, profile=profile))

    def within(figure: float, target: float, factor: float) -> bool:
        return target / factor <= figure <= target * factor

    assert abs(_share_of_one(made) - _share_of_one(real)) < 0.06
    assert variation(gaps(made)) > 1.5
    assert within(variation(gaps(made)), variation(gaps(real)), 2.0)
    assert within(_mean_over_median(made), _mean_over_median(real), 1.5)
    assert within(fmean(job.duration_s for job in made), fmean(job.duration_s for job in real), 1.5)
    assert within(fmean(gaps(made)), fmean(gaps(real)), 1.5)


def _share_of_one(jobs: list[TraceJob]) -> float:
    return sum(job.gpus == 1 for job in jobs) / len(jobs)


def _mean_over_median(jobs: list[TraceJob]) -> float:
    durations = [job.duration_s for job in jobs]
    return fmean(durations) / median(durations)


GOLDEN = ["job-0,0.000,9.327,1,tenant-00,0", "job-1,48.748,83.681,1,tenant-01,0", "job-2,64.654,1034.305,1,tenant-00,0"]
