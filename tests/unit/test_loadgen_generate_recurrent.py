"""Recurrent users and job families: most jobs are another run of something, alike in size and duration."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from loadgen.generate import Recurrence, RecurrentJob, WorkloadOptions, generate, generate_recurrent
from streamsched.errors import UserError

OPTIONS = WorkloadOptions(jobs=3_000, seed=3)


def families(jobs: list[RecurrentJob]) -> dict[tuple[str, str, int], list[float]]:
    """(user, name without its run, GPUs) -> durations."""
    found = defaultdict[tuple[str, str, int], list[float]](list)
    for made in jobs:
        found[made.user, made.name.rpartition("-run")[0], made.job.gpus].append(made.job.duration_s)
    return found


def test_equal_seed_equal_jobs_and_another_seed_others() -> None:
    assert generate_recurrent(OPTIONS) == generate_recurrent(OPTIONS)
    assert generate_recurrent(OPTIONS) != generate_recurrent(replace(OPTIONS, seed=4))


def test_arrivals_and_tenants_are_those_of_the_plain_workload() -> None:
    plain, made = generate(OPTIONS), [found.job for found in generate_recurrent(OPTIONS)]
    assert [(job.submit_s, job.tenant) for job in made] == [(job.submit_s, job.tenant) for job in plain]


def test_most_jobs_recur_and_the_share_can_be_told() -> None:
    def recurring(share: float) -> float:
        found = families(generate_recurrent(replace(OPTIONS, burstiness=0.0), Recurrence(recurrent_share=share)))
        return sum(len(runs) for runs in found.values() if len(runs) >= 5) / OPTIONS.jobs

    assert recurring(0.9) > 0.65 > 0.3 > recurring(0.1)


def test_runs_of_a_family_are_alike_and_how_much_can_be_told() -> None:
    def spread(sigma: float) -> float:
        told = Recurrence(run_sigma=sigma, failed_share=0.0, cancelled_share=0.0)
        runs = [found for found in families(generate_recurrent(OPTIONS, told)).values() if len(found) >= 20]
        return fmean(pstdev(math.log(run) for run in found if run > 1.0) for found in runs)

    assert spread(0.0) < 0.1 < spread(0.3) < 0.8


def test_shares_of_endings_are_met_and_those_runs_are_shorter() -> None:
    made = generate_recurrent(OPTIONS, Recurrence(failed_share=0.2, cancelled_share=0.1))
    by = defaultdict[str, list[float]](list)
    for found in made:
        by[found.ending].append(math.log(found.job.duration_s))
    assert len(by["failed"]) / len(made) == pytest.approx(0.2, abs=0.03)
    assert len(by["cancelled"]) / len(made) == pytest.approx(0.1, abs=0.03)
    assert fmean(by["failed"]) < fmean(by["completed"])


@pytest.mark.parametrize(
    "changes",
    [
        {"recurrent_share": 1.5},
        {"failed_share": 0.7, "cancelled_share": 0.7},
        {"users_per_tenant": 0},
        {"lifetime_runs": 0.5},
        {"run_sigma": float("nan")},
        {"user_skew": float("inf")},
    ],
)
def test_wrong_parameters_are_told(changes: dict[str, float]) -> None:
    with pytest.raises(UserError, match="workload"):
        generate_recurrent(OPTIONS, Recurrence(**changes))  # type: ignore[arg-type]
