"""Run times predicted by a running worker: learned from what ends, kept across a restart, given up where damaged."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from service_fixture import Service, installed

from streamsched.bus import messages as m
from streamsched.routing.least_loaded import PoolSummary, RunTimesSummary
from streamsched.service.stacks import Stack
from streamsched.store.pool_store import summaries

pytestmark = pytest.mark.integration

NODES, GPUS, JOBS = 5, 8, 15
LONG_S = 4.0


@pytest.fixture
def service(stack: Stack, tmp_path: Path) -> Iterator[Service]:
    """Finished jobs are forgotten at once: what is known of them then is what the predictor has learned."""
    with installed(stack, f"t{uuid.uuid4().hex[:8]}", tmp_path) as running:
        running.env |= {
            "STREAMSCHED_RUN_TIMES": "predicted",
            "STREAMSCHED_POLICY": "sjf",
            "STREAMSCHED_FINISHED_KEEP_S": "0.5",
            "STREAMSCHED_LEASE_S": "600",
        }
        yield running


def submit(service: Service, name: str, *job_ids: str, gpus: int = 1, workers: int = 1) -> None:
    service.send(
        service.names.arrivals,
        *(
            m.JobArrival(
                job_id=job_id,
                submitted_at=time.time(),
                gpus_per_worker=gpus,
                workers=workers,
                labels={"name": name},
            )
            for job_id in job_ids
        ),
    )


def report(service: Service, kind: type[m.RunReport], placement_ids: dict[str, str]) -> None:
    reports = [
        kind(pool="default", job_id=job_id, placement_id=placement_id, time=time.time())
        for job_id, placement_id in placement_ids.items()
    ]
    service.send(service.names.completions, *reports)


def placed(service: Service, *job_ids: str) -> dict[str, str]:
    def look() -> dict[str, str]:
        found = {p.decision.job_id: p.decision.placement_id for p in service.placements()}
        return {job_id: found[job_id] for job_id in job_ids} if found.keys() >= set(job_ids) else {}

    return service.wait_for(look, f"placements of {', '.join(job_ids)}")


def told(service: Service) -> RunTimesSummary:
    [found] = service.redis(lambda client: summaries(client, service.settings.key_prefix, ["default"]))
    summary = msgspec.json.decode(found or b"{}", type=PoolSummary).run_times
    assert summary is not None
    return summary


def run_all(service: Service, number: int) -> None:
    """Jobs of two names, side by side, half of which end at once."""
    kinds = {kind: [f"{kind}-{number}-{n}" for n in range(JOBS)] for kind in ("short", "long")}
    for kind, job_ids in kinds.items():
        submit(service, kind, *job_ids)
    runs = {kind: placed(service, *job_ids) for kind, job_ids in kinds.items()}
    for kind in kinds:
        report(service, m.Started, runs[kind])
    report(service, m.Completed, runs["short"])
    service.wait_job(f"long-{number}-0", lambda job: job.state == "running")
    until = time.time() + LONG_S
    service.wait_for(lambda: time.time() > until, "the long ones to have run for a while")
    report(service, m.Completed, runs["long"])
    blocked(service, f"blocker-{number}")

    def has_learned() -> bool:
        report(service, m.Progress, placed(service, f"blocker-{number}"))  # each commit tells how far it is
        summary = told(service)
        return summary.waiting <= 2 and summary.jobs >= 2 * JOBS * (number + 1)

    service.wait_for(has_learned, "all of them to be learned from")


def blocked(service: Service, job_id: str) -> None:
    """A job has all GPUs, so that others wait."""
    submit(service, "whole", job_id, gpus=GPUS, workers=NODES)
    report(service, m.Started, placed(service, job_id))


def learn(service: Service) -> None:
    """Twice: only jobs that come when something is known tell which way of predicting is good."""
    run_all(service, 0)
    report(service, m.Completed, placed(service, "blocker-0"))
    run_all(service, 1)


def ranked(service: Service, *job_ids: str) -> list[str]:
    """The kinds of these jobs, best first, once a window has ranked all of them (before, their scores are 0)."""

    def look() -> list[str]:
        ranking = service.ranking()
        found = (
            [job.job_id.split("-")[0] for job in ranking.jobs if job.job_id in job_ids and job.score < 0]
            if ranking
            else []
        )
        return found if len(found) == len(job_ids) else []

    return service.wait_for(look, f"a ranking of {', '.join(job_ids)}")


def test_names_are_learned_and_stay_learned(service: Service) -> None:
    worker = service.start()
    nodes = [m.Joined(pool="default", node_id=f"n{n}", time=time.time(), gpu_type="A", gpus=GPUS) for n in range(NODES)]
    service.send(service.names.nodes, *nodes)
    learn(service)
    for n, name in enumerate(("long", "short", "long", "short")):
        submit(service, name, f"{name}-new-{n}")
    first = ("long-new-0", "short-new-1", "long-new-2", "short-new-3")
    assert ranked(service, *first) == ["short", "short", "long", "long"]
    assert worker.stop() == 0

    again = service.start()
    submit(service, "long", "long-late")
    submit(service, "short", "short-late")
    later = ("long-new-0", "short-new-1", "long-late", "short-late")
    assert ranked(service, *later) == ["short", "short", "long", "long"]
    assert told(service).jobs == 4 * JOBS + 1
    assert told(service).failures == 0
    assert again.stop() == 0

    key = f"{service.settings.key_prefix}{{default}}:predictor"
    names = service.redis(lambda client: client.hkeys(key))
    assert sorted(names)[-1] == b"head"
    service.redis(lambda client: client.hset(key, sorted(names)[0], b"nonsense"))
    damaged = service.start()
    assert damaged.said("what is kept of it is damaged .*; it learns anew") == 1
    report(service, m.Completed, placed(service, "blocker-1"))
    placed(service, *first, *later)
    assert told(service).failures == 0
    assert damaged.stop() == 0
    assert [worker.said("Traceback") for worker in service.workers] == [0, 0, 0]
