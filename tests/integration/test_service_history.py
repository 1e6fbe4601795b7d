"""A pool's past on a real broker: read at any point, and whatever else is written where it is kept."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, MessageSizeTooLargeError
from service_fixture import Service, installed

from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.bus.journal import Validity
from streamsched.bus.producer import Producer
from streamsched.bus.topics import partition_of
from streamsched.core import events as ev
from streamsched.errors import EXIT_FAILED, EXIT_UNUSABLE
from streamsched.service.stacks import Stack

pytestmark = pytest.mark.integration


@pytest.fixture
def service(stack: Stack, tmp_path: Path) -> Iterator[Service]:
    with installed(stack, f"t{uuid.uuid4().hex[:8]}", tmp_path) as running:
        yield running


def work(service: Service, *job_ids: str) -> None:
    """A node, and jobs that run on it."""
    service.send(service.names.nodes, m.Joined(pool="default", node_id="n", time=time.time(), gpu_type="A", gpus=8))
    for job_id in job_ids:
        service.send(service.names.arrivals, m.JobArrival(job_id=job_id, submitted_at=time.time(), gpus_per_worker=1))
        service.wait_placed(job_id)


def cli(service: Service, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "streamsched.cli", *arguments],
        env=service.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def records(service: Service) -> list[m.JournalRecord]:
    return [codec.decode_journal(record.value) for record in service.read(service.names.journal)]


def write_journal(service: Service, *values: bytes) -> list[int]:
    at = partition_of("default", service.settings.partitions)
    return [offset for _, offset in service.produce(service.names.journal, [(b"default", v) for v in values], at)]


def test_replay_until_a_record_and_until_a_time(service: Service) -> None:
    worker = service.start()
    work(service, "a", "b", "c")
    assert worker.stop() == 0
    history = [record for record in records(service) if Validity(record.epoch, record.seq - 1).counts(record)]
    placed = next(record for record in history if any(d.job_id == "b" for d in record.decisions))
    moment = datetime.fromtimestamp(placed.now + 0.0005, UTC).isoformat()
    states = []
    for until in (str(placed.seq), moment):
        code, out, _ = cli(service, "replay", "--pool", "default", "--until", until)
        assert code == 0
        assert f"pool default after record {placed.seq}, epoch {placed.epoch}" in out
        code, out, _ = cli(service, "replay", "--pool", "default", "--json", "--until", until)
        states.append(msgspec.json.decode(out))
    assert states[0] == states[1]
    assert set(states[0]["jobs"]) == {"a", "b"}
    last = history[-1].seq
    code, out, error = cli(service, "replay", "--pool", "default", "--until", str(last + 1))
    assert (code, out) == (EXIT_UNUSABLE, "")
    assert error == f"streamsched: pool default: the journal ends at record {last}, there is no {last + 1} (yet)\n"
    code, _, error = cli(service, "replay", "--pool", "default", "--until", "soon")
    assert code == EXIT_UNUSABLE
    assert error.count("\n") == 1


def test_foreign_records_in_the_journal_stop_nothing(service: Service) -> None:
    worker = service.start()
    work(service, "a")
    stranger = m.JournalRecord(pool="another", epoch=99, seq=99, now=1.0, events=(ev.WindowElapsed(),))
    offsets = write_journal(service, b"not json", b'{"hello": 1}', codec.encode(stranger))
    work(service, "b")  # the owner finds that others have written, and looks for a successor
    assert worker.process.poll() is None
    worker.kill()
    service.redis(lambda client: client.flushall())
    heir = service.start()
    work(service, "c")
    for offset in offsets:
        assert heir.said(rf"\]@{offset} is no record of this pool and is passed over") >= 1
    assert heir.stop() == 0
    assert heir.said("Traceback") == 0
    code, out, error = cli(service, "replay", "--pool", "default", "--check")
    assert (code, error.count("passed over")) == (0, 3)
    assert "value for value" in out
    code, out, _ = cli(service, "rebuild", "--pool", "default")
    assert code == 0
    assert "jobs: 3 placed" in out
    assert [len(service.placed(job_id)) for job_id in "abc"] == [1, 1, 1]


def test_a_record_of_another_version_ends_worker_replay_and_rebuild_with_a_line(service: Service) -> None:
    worker = service.start()
    work(service, "a")
    worker.kill()
    last = records(service)[-1]
    with_decision = next(record for record in records(service) if record.decisions)
    forged = msgspec.structs.replace(
        last, seq=last.seq + 1, events=(ev.WindowElapsed(),), decisions=with_decision.decisions
    )
    [offset] = write_journal(service, codec.encode(forged))
    named = f"pool default: journal record {forged.seq} of epoch {forged.epoch}, journal offset {offset}: "
    heir = service.spawn()
    assert heir.ended() == EXIT_UNUSABLE
    assert heir.said(named) == 1
    assert heir.said("Traceback") == 0
    for command in ("replay", "rebuild"):
        code, _, error = cli(service, command, "--pool", "default")
        assert code == EXIT_UNUSABLE
        assert error.startswith(f"streamsched: {named}")
        assert error.count("\n") == 1


# ── writes that are refused ──────────────────────────────────────────────────────────────────────────────────────────


async def _admin(stack: Stack, action: Any) -> None:
    admin = AIOKafkaAdminClient(**stack.kafka.client_options())
    await admin.start()
    try:
        await action(admin)
    finally:
        await admin.close()


def needs_idempotence(stack: Stack) -> None:
    if not stack.traits.idempotent_producer:
        pytest.skip(f"stack {stack.name} has no idempotent producers, so no sequence to break")


def test_a_producer_says_that_a_refused_write_has_broken_its_sequence(stack: Stack, namespace: str) -> None:
    needs_idempotence(stack)
    topic = NewTopic(namespace, 1, 1, topic_configs={"max.message.bytes": "1000"})
    reasons: list[str] = []

    async def yes() -> bool:
        return True

    async def write() -> None:
        await _admin(stack, lambda admin: admin.create_topics([topic]))
        bounded = Producer(stack.kafka, print, {namespace: 1000})
        unaware = Producer(stack.kafka, print)
        await bounded.start()
        await unaware.start()
        watches = [asyncio.create_task(each.watch(yes, reasons.append)) for each in (bounded, unaware)]
        for size in (10, 5000, 10, 900):
            try:
                await bounded.send_and_wait(namespace, b"x" * size)
            except MessageSizeTooLargeError:
                assert size == 5000
        assert not reasons
        await unaware.send_and_wait(namespace, b"x")
        for size in (5000, 10):
            with pytest.raises(KafkaError):
                await unaware.send_and_wait(namespace, b"x" * size)
        await asyncio.wait([watches[1]], timeout=5.0)
        watches[0].cancel()
        await bounded.stop(5.0)
        await unaware.stop(5.0)

    asyncio.run(write())
    [reason] = reasons
    assert f"takes no more writes of this process to {namespace} since it refused one" in reason


def test_a_worker_whose_sequence_is_broken_ends_and_the_next_one_goes_on(service: Service) -> None:
    needs_idempotence(service.stack)
    topic = service.names.placements

    def limit(size: int) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {"max.message.bytes": str(size)})
        asyncio.run(_admin(service.stack, lambda admin: admin.alter_configs([resource])))

    worker = service.start()
    work(service, "a")
    limit(100)
    service.send(service.names.arrivals, m.JobArrival(job_id="b", submitted_at=time.time(), gpus_per_worker=1))
    assert worker.ended() == EXIT_FAILED
    assert (
        worker.said(rf"takes no more writes of this process to {topic} since it refused one .*: this worker ends") == 1
    )
    assert worker.said("Traceback") == 0
    limit(8 * 2**20)
    heir = service.start()
    service.wait_placed("b")
    assert heir.stop() == 0
    assert [len(service.placed(job_id)) for job_id in "ab"] == [1, 1]
