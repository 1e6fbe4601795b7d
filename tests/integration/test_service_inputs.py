"""What a running worker does with inputs, good and bad: one worker for all of these tests."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from service_fixture import PARTITIONS, Service, installed

from streamsched.bus import messages as m
from streamsched.bus.topics import partition_of
from streamsched.core.instructions import Revoke
from streamsched.core.model import JobState
from streamsched.service.stacks import Stack

pytestmark = pytest.mark.integration

NODES, GPUS = 6, 8
TEN_MB = 10_000_000


@pytest.fixture(scope="module")
def service(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with installed(stack, f"t{uuid.uuid4().hex[:8]}", tmp_path_factory.mktemp("service")) as running:
        running.start()
        running.send(running.names.nodes, *(joined(f"node-{i}") for i in range(NODES)))
        yield running
        assert running.workers[0].stop() == 0
        assert running.workers[0].said("Traceback") == 0


@pytest.fixture
def job_id() -> str:
    return f"job-{uuid.uuid4().hex[:8]}"


def joined(node_id: str, gpus: int = GPUS, gpu_type: str = "P100") -> m.Joined:
    return m.Joined(pool="default", node_id=node_id, time=time.time(), gpu_type=gpu_type, gpus=gpus)


def arrival(job_id: str, gpus: int = 1, **fields: Any) -> m.JobArrival:
    return m.JobArrival(job_id=job_id, submitted_at=time.time(), gpus_per_worker=gpus, **fields)


def report(kind: type[m.RunReport], job_id: str, placement_id: str, **fields: Any) -> Any:
    return kind(pool="default", job_id=job_id, placement_id=placement_id, time=time.time(), **fields)


def finish(service: Service, job_id: str) -> None:
    """Its GPUs are free again, so that tests do not fill the cluster for each other."""
    placement_id = service.wait_placed(job_id).placement_id
    service.send(service.names.completions, report(m.Completed, job_id, placement_id))


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────


def bad_ones(good: dict[str, Any], missing: str, time_field: str, count: dict[str, Any]) -> dict[str, Any]:
    """Kind -> (code, bytes). `missing`: a field that must be there; `count`: a field with a negative number."""
    without = {name: value for name, value in good.items() if name != missing}
    not_a_number = json.dumps(good | {time_field: 0}).replace(f'"{time_field}": 0', f'"{time_field}": NaN')
    return {
        "not JSON": ("malformed", b"{never"),
        "not text": ("malformed", b'{"\xff": 1}'),
        "another type": ("invalid", b"[1, 2]"),
        "missing field": ("invalid", json.dumps(without).encode()),
        "naive time": ("invalid", json.dumps(good | {time_field: "2026-01-01T00:00:00"}).encode()),
        "NaN": ("malformed", not_a_number.encode()),
        "negative count": ("invalid", json.dumps(good | count).encode()),
        "10 MB": ("too-large", json.dumps(good | {"labels": {"x": "y" * TEN_MB}}).encode()),
        "tombstone": ("malformed", None),
    }


def unknown_pool(good: dict[str, Any]) -> dict[str, Any]:
    return {"unknown pool": ("unknown-pool", json.dumps(good | {"pool": "nowhere"}).encode())}


def check_refused(service: Service, topic: str, bad: dict[str, Any], key: bytes, good: Any, arrived: Any) -> None:
    """Each bad input is followed by a good one, which gets through; each bad one has its letter, and one only."""
    sent = {}
    for number, (kind, (code, value)) in enumerate(bad.items()):
        [where] = service.produce(topic, [(key, value)])
        sent[where] = (kind, code, value)
        service.send(topic, *good(number))
    service.wait_for(lambda: all(arrived(number) for number in range(len(bad))), "the good ones")
    letters = [letter for letter in service.letters() if letter.origin.topic == topic]
    found = {(letter.origin.partition, letter.origin.offset): letter for letter in letters}
    assert len(found) == len(letters), "two letters for one input"
    for where, (kind, code, value) in sent.items():
        letter = found.get(where)
        assert letter is not None, f"{kind}: no letter"
        assert letter.code == code, f"{kind}: {letter.detail}"
        assert letter.detail
        assert letter.original == (value or b""), kind
        assert letter.key == key
    later = [w for w in found if w not in sent and w >= min(sent)]
    assert not [w for w in later if found[w].code != "unknown-job"], "a letter for a good input"


def test_bad_arrivals(service: Service, job_id: str) -> None:
    good = {"job_id": job_id, "submitted_at": 1.0, "gpus_per_worker": 1}
    bad = bad_ones(good, "gpus_per_worker", "submitted_at", {"workers": -1}) | unknown_pool(good)

    def follow(number: int) -> list[m.JobArrival]:
        return [arrival(f"{job_id}-{number}")]

    check_refused(
        service,
        service.names.arrivals,
        bad,
        job_id.encode(),
        follow,
        lambda number: service.job(f"{job_id}-{number}") is not None,
    )
    for number in range(len(bad)):
        finish(service, f"{job_id}-{number}")


def test_bad_commands(service: Service, job_id: str) -> None:
    service.send(service.names.arrivals, arrival(job_id, NODES * GPUS + 1))
    service.wait_job(job_id, lambda job: job.state is JobState.UNFIT)
    good = {"type": "reprioritise", "job_id": job_id, "time": 1.0, "weight": 2.0}

    def follow(number: int) -> list[m.Reprioritise]:
        return [m.Reprioritise(job_id=job_id, time=time.time(), weight=100.0 + number)]

    def arrived(number: int) -> bool:
        job = service.job(job_id)
        return job is not None and (job.weight or 0) >= 100.0 + number

    bad = bad_ones(good, "time", "time", {"weight": -1})
    check_refused(service, service.names.commands, bad, job_id.encode(), follow, arrived)
    service.send(service.names.commands, m.Cancel(job_id=job_id, time=time.time()))


def test_bad_completions(service: Service, job_id: str) -> None:
    service.send(service.names.arrivals, arrival(job_id))
    placement_id = service.wait_placed(job_id).placement_id
    service.send(service.names.completions, report(m.Started, job_id, placement_id))
    good = {"type": "progress", "pool": "default", "job_id": job_id, "placement_id": placement_id, "time": 1.0}
    bad = bad_ones(good, "placement_id", "time", {"step": -1}) | unknown_pool(good)

    def follow(number: int) -> list[Any]:
        return [report(m.Progress, job_id, placement_id, fraction=(number + 1) / 100)]

    def arrived(number: int) -> bool:
        job = service.job(job_id)
        return job is not None and (job.progress or 0) >= (number + 1) / 100

    check_refused(service, service.names.completions, bad, b"default", follow, arrived)
    finish(service, job_id)


def test_bad_node_events(service: Service, job_id: str) -> None:
    good = {"type": "joined", "pool": "default", "node_id": "n", "time": 1.0, "gpu_type": "P100", "gpus": 0}
    bad = bad_ones(good, "gpu_type", "time", {"gpus": -8}) | unknown_pool(good)

    def arrived(number: int) -> bool:
        state = service.state()
        return state is not None and f"{job_id}-{number}" in state.nodes

    check_refused(
        service,
        service.names.nodes,
        bad,
        b"default",
        lambda number: [joined(f"{job_id}-{number}", gpus=0)],
        arrived,
    )


def test_bad_telemetry(service: Service, job_id: str) -> None:
    good = {"pool": "default", "node_id": job_id, "time": 1.0, "gpus": [{"gpu": 0}]}
    bad = bad_ones(good, "node_id", "time", {"gpus": [{"gpu": -1}]}) | unknown_pool(good)
    key = f"{service.settings.key_prefix}{{default}}:telemetry"
    service.send(service.names.nodes, *(joined(f"{job_id}-{number}", gpus=0) for number in range(len(bad))))
    last = f"{job_id}-{len(bad) - 1}"
    service.wait_for(lambda: (state := service.state()) is not None and last in state.nodes, "the nodes")

    def follow(number: int) -> list[m.GpuTelemetry]:
        sample = m.GpuSample(gpu=0, utilization=50.0)
        return [m.GpuTelemetry(pool="default", node_id=f"{job_id}-{number}", time=time.time(), gpus=(sample,))]

    def arrived(number: int) -> bool:
        return bool(service.redis(lambda client: client.hexists(key, f"{job_id}-{number}")))

    check_refused(service, service.names.telemetry, bad, b"default", follow, arrived)


def test_a_pool_in_the_wrong_partition_is_refused(service: Service, job_id: str) -> None:
    wrong = (partition_of("default", PARTITIONS) + 1) % PARTITIONS
    event = json.dumps({"type": "heartbeat", "pool": "default", "node_id": job_id, "time": 1.0}).encode()
    [where] = service.produce(service.names.nodes, [(b"default", event)], partition=wrong)
    letter = wait_letter(service, service.names.nodes, where)
    assert letter.code == "wrong-partition"
    assert "default partitioner" in letter.detail


def test_a_command_by_another_partition_than_its_jobs_is_refused(service: Service, job_id: str) -> None:
    """Its pool would take it for one that it has seen: each job's commands are told apart by their offsets."""
    service.send(service.names.arrivals, arrival(job_id, NODES * GPUS + 1))
    service.wait_job(job_id, lambda job: job.state is JobState.UNFIT)
    wrong = (partition_of(job_id, PARTITIONS) + 1) % PARTITIONS
    command = json.dumps({"type": "cancel", "job_id": job_id, "time": 1.0}).encode()
    [where] = service.produce(service.names.commands, [(job_id.encode(), command)], partition=wrong)
    letter = wait_letter(service, service.names.commands, where)
    assert letter.code == "wrong-partition"
    assert f"partition {partition_of(job_id, PARTITIONS)}" in letter.detail
    service.send(service.names.commands, m.Cancel(job_id=job_id, time=time.time()))
    service.wait_job(job_id, lambda job: job.state is JobState.CANCELLED)


def test_a_heartbeat_of_a_stranger_is_refused(service: Service, job_id: str) -> None:
    event = json.dumps({"type": "heartbeat", "pool": "default", "node_id": job_id, "time": 1.0}).encode()
    [where] = service.produce(service.names.nodes, [(b"default", event)])
    letter = wait_letter(service, service.names.nodes, where)
    assert letter.code == "unknown-node"
    assert job_id in letter.detail


def wait_letter(service: Service, topic: str, where: tuple[int, int]) -> m.DeadLetter:
    def look() -> list[m.DeadLetter]:
        return [
            letter
            for letter in service.letters()
            if (letter.origin.topic, letter.origin.partition, letter.origin.offset) == (topic, *where)
        ]

    [letter] = service.wait_for(look, f"a letter for {topic} {where}")
    return letter


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_job_again_is_one_job(service: Service, job_id: str) -> None:
    first = arrival(job_id, 2)
    service.send(service.names.arrivals, first, first)
    service.wait_placed(job_id)
    service.send(service.names.arrivals, first, arrival(f"{job_id}-after"))
    service.wait_placed(f"{job_id}-after")
    assert len(service.placed(job_id)) == 1
    assert not [letter for letter in service.letters() if job_id.encode() in letter.original]
    finish(service, job_id)
    finish(service, f"{job_id}-after")


def test_the_same_id_with_another_specification_is_a_conflict(service: Service, job_id: str) -> None:
    service.send(service.names.arrivals, arrival(job_id, 2))
    place = service.wait_placed(job_id)
    service.send(service.names.arrivals, arrival(job_id, 4))

    def conflict() -> list[m.DeadLetter]:
        return [letter for letter in service.letters() if job_id.encode() in letter.original]

    [letter] = service.wait_for(conflict, "the conflict's letter")
    assert letter.code == "conflict"
    job = service.job(job_id)
    assert job is not None
    assert (job.spec.gpus_per_worker, job.placement_id) == (2, place.placement_id)
    finish(service, job_id)


def test_a_command_for_a_job_that_never_comes_is_refused_after_a_while(service: Service, job_id: str) -> None:
    service.send(service.names.commands, m.Cancel(job_id=job_id, time=time.time()))

    def unknown() -> list[m.DeadLetter]:
        return [letter for letter in service.letters() if letter.key == job_id.encode()]

    [letter] = service.wait_for(unknown, "the letter")
    assert letter.code == "unknown-job"


def test_commands_that_come_before_their_job_work_and_keep_their_order(service: Service, job_id: str) -> None:
    now = time.time()
    service.send(
        service.names.commands,
        m.Hold(job_id=job_id, time=now),
        m.Release(job_id=job_id, time=now),
        m.Hold(job_id=job_id, time=now),
    )
    time.sleep(0.5)  # the router has seen them; nothing hangs on how long this is
    service.send(service.names.arrivals, arrival(job_id, NODES * GPUS))
    # In another batch, and the job may be known by now: it must not overtake either.
    service.send(service.names.commands, m.Reprioritise(job_id=job_id, time=now, weight=7.0))
    job = service.wait_job(job_id, lambda job: job.weight == 7.0)
    letters = [letter for letter in service.letters() if letter.key == job_id.encode()]
    if job.state is JobState.HELD:
        assert not letters
    else:  # it was placed before the hold came, which is then refused
        assert {letter.code for letter in letters} == {"not-applicable"}
    service.send(service.names.commands, m.Cancel(job_id=job_id, time=time.time()))
    release_all(service, job_id)


def release_all(service: Service, job_id: str) -> None:
    """Answer the revoke of a cancelled job, if it had a run."""
    job = service.wait_job(job_id, lambda job: job.state in (JobState.CANCELLED, JobState.STOPPING))
    if job.state is JobState.STOPPING and job.placement_id:
        service.send(service.names.completions, report(m.Released, job_id, job.placement_id))
        service.wait_job(job_id, lambda job: job.state is JobState.CANCELLED)


def test_cancelling_what_runs_frees_its_gpus_when_they_are_released(service: Service, job_id: str) -> None:
    first, second = f"{job_id}-first", f"{job_id}-second"
    everything = {"workers": NODES, "gpu_types": ("P100",)}
    service.send(service.names.arrivals, arrival(first, GPUS, **everything))
    run = service.wait_placed(first)
    service.send(service.names.completions, report(m.Started, first, run.placement_id))
    service.send(service.names.arrivals, arrival(second, GPUS, **everything))
    service.wait_job(second, lambda job: job.state is JobState.QUEUED)

    service.send(service.names.commands, m.Cancel(job_id=first, time=time.time()))

    def revoked() -> list[Revoke]:
        decisions = [p.decision for p in service.placements()]
        return [d for d in decisions if isinstance(d, Revoke) and d.placement_id == run.placement_id]

    assert len(service.wait_for(revoked, "the revoke")) == 1
    assert service.placed(second) == [], "GPUs count as free only when the executor says so"
    service.send(service.names.completions, report(m.Released, first, run.placement_id))
    assert {a.node_id for a in service.wait_placed(second).allocations} == {a.node_id for a in run.allocations}
    service.wait_job(first, lambda job: job.state is JobState.CANCELLED)
    finish(service, second)


def test_cancelling_what_waits_ends_it(service: Service, job_id: str) -> None:
    service.send(service.names.arrivals, arrival(job_id, GPUS, workers=NODES + 1))
    service.wait_job(job_id, lambda job: True)
    service.send(service.names.commands, m.Cancel(job_id=job_id, time=time.time()))
    service.wait_job(job_id, lambda job: job.state is JobState.CANCELLED)
    assert service.placed(job_id) == []


def test_the_ranking_tells_why_each_job_waits(service: Service, job_id: str) -> None:
    full, waits, unfit, held = (f"{job_id}-{name}" for name in ("full", "waits", "unfit", "held"))
    service.send(service.names.arrivals, arrival(full, GPUS, workers=NODES))
    run = service.wait_placed(full)
    service.send(service.names.arrivals, arrival(waits, GPUS), arrival(unfit, GPUS + 1), arrival(held))
    service.send(service.names.commands, m.Hold(job_id=held, time=time.time()))

    def listed() -> dict[str, m.RankedJob] | None:
        ranking = service.ranking()
        jobs = {job.job_id: job for job in ranking.jobs} if ranking else {}
        if not {waits, unfit, held} <= set(jobs) or jobs[held].state != "held":
            return None
        return jobs if "room now for 0" in jobs[waits].reason else None

    jobs = service.wait_for(listed, "the ranking")
    assert jobs is not None
    assert jobs[unfit].state == "unfit"
    assert "can never fit" in jobs[unfit].reason
    assert jobs[held].reason == "held"
    now = time.time()
    service.send(service.names.commands, *(m.Cancel(job_id=name, time=now) for name in (waits, unfit, held)))
    service.send(service.names.completions, report(m.Completed, full, run.placement_id))

    def empty() -> bool:
        ranking = service.ranking()
        return ranking is not None and not {waits, unfit, held} & {job.job_id for job in ranking.jobs}

    service.wait_for(empty, "a ranking without them")
