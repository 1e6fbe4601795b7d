"""Bad input is refused with a code and a line; good input becomes the core's values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamsched.bus import codec, topics
from streamsched.bus import messages as m
from streamsched.bus.codec import Refused
from streamsched.core import events as ev
from streamsched.core import model

ARRIVAL: dict[str, Any] = {"job_id": "j", "submitted_at": 1.5, "gpus_per_worker": 8}
CANCEL: dict[str, Any] = {"type": "cancel", "job_id": "j", "time": 1}
RUN: dict[str, Any] = {"pool": "p", "job_id": "j", "placement_id": "j.1", "time": 10}
NODE: dict[str, Any] = {"pool": "p", "node_id": "n", "time": 10}


def arrival(**fields: Any) -> bytes:
    return json.dumps(ARRIVAL | fields).encode()


def refusal(decode: Any, raw: bytes | None) -> Refused:
    with pytest.raises(Refused) as caught:
        decode(raw)
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"",
        b" ",
        b"not json",
        b"{",
        b"\xff\xfe",
        b'{"job_id":"\xff","submitted_at":1,"gpus_per_worker":1}',
        b'{"job_id":"j","submitted_at":1,"gpus_per_worker":1,"unknown":"\xff"}',
        b"\xef\xbb\xbf" + arrival(),
        b'{"job_id":"j","submitted_at":NaN,"gpus_per_worker":1}',
        b'{"job_id":"j","submitted_at":1,"gpus_per_worker":NaN}',
        b'{"job_id":"j","submitted_at":1,"gpus_per_worker":Infinity}',
        b'{"job_id":"j","submitted_at":1,"gpus_per_worker":-Infinity}',
        b'{"job_id":"j","submitted_at":1,"gpus_per_worker":1,"labels":{"a":"\\ud800"}}',
        b'{"unknown":' + b"[" * 100_000,
        b'{"unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"unknown":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    ],
)
def test_what_is_not_json_is_malformed(raw: bytes | None) -> None:
    for decode in codec.DECODERS.values():
        assert refusal(decode, raw).code == "malformed"


def test_nothing_may_follow_the_object() -> None:
    assert refusal(codec.decode_arrival, arrival() + b" {}").code == "malformed"


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b"null", "null"),
        (b"[]", "array"),
        (b'"text"', "str"),
        (b"{}", "job_id"),
        (json.dumps({"job_id": "j", "gpus_per_worker": 1}).encode(), "submitted_at"),
        (arrival(job_id=""), "$.job_id"),
        (arrival(job_id=7), "$.job_id"),
        (arrival(job_id="a b"), "$.job_id"),
        (arrival(job_id="line\n"), "$.job_id"),
        (arrival(job_id="x" * 254), "$.job_id"),
        (arrival(submitted_at="2026-01-01T00:00:00"), "$.submitted_at"),
        (arrival(submitted_at="2026-01-01"), "$.submitted_at"),
        (arrival(submitted_at="1767225600"), "$.submitted_at"),
        (arrival(submitted_at="1969-12-31T23:59:59Z"), "$.submitted_at"),
        (arrival(submitted_at="0001-01-01T00:00:00+12:00"), "$.submitted_at"),
        (arrival(submitted_at="9999-12-31T23:59:59-12:00"), "$.submitted_at"),
        (arrival(submitted_at=-1), "$.submitted_at"),
        (arrival(submitted_at=True), "$.submitted_at"),
        (b'{"job_id":"j","submitted_at":1e400,"gpus_per_worker":1}', "$.submitted_at"),
        (arrival(gpus_per_worker=0), "$.gpus_per_worker"),
        (arrival(gpus_per_worker=-1), "$.gpus_per_worker"),
        (arrival(gpus_per_worker=10**30), "$.gpus_per_worker"),
        (arrival(gpus_per_worker="8"), "$.gpus_per_worker"),
        (arrival(gpus_per_worker=8.0), "$.gpus_per_worker"),
        (arrival(gpus_per_worker=True), "$.gpus_per_worker"),
        (arrival(gpus_per_worker=None), "exactly one of"),
        (arrival(gpu_fraction=0.5), "exactly one of"),
        (arrival(gpus_per_worker=None, gpu_fraction=0.0004), "$.gpu_fraction"),
        (arrival(gpus_per_worker=None, gpu_fraction=0.9996), "$.gpu_fraction"),
        (arrival(gpus_per_worker=None, gpu_fraction=1), "$.gpu_fraction"),
        (arrival(gpus_per_worker=None, gpu_fraction=0.5, remainder_gpus=1), "$.remainder_gpus"),
        (arrival(remainder_gpus=8), "$.remainder_gpus"),
        (arrival(workers=10_001), "$.workers"),
        (arrival(workers=10_000, gpus_per_worker=11), "at most 100000 GPUs"),
        (arrival(workers=2, elastic={"min_workers": 3, "max_workers": 4}), "$.elastic"),
        (arrival(workers=2, elastic={"min_workers": 1, "max_workers": 1}), "$.elastic"),
        (arrival(workers=1, gpus_per_worker=11, elastic={"min_workers": 1, "max_workers": 10_000}), "GPUs"),
        (arrival(weight=0), "$.weight"),
        (arrival(weight=-1.0), "$.weight"),
        (arrival(estimate_s=-1), "$.estimate_s"),
        (arrival(labels={"note": "x" * 1_000_000}), "$.labels"),
        (arrival(labels={"a": 1}), "$.labels"),
        (arrival(labels={str(i): "" for i in range(65)}), "$.labels"),
        (arrival(topology={"level": "planet"}), "$.topology.level"),
        (arrival(speeds={"A": 0}), "$.speeds"),
        (arrival(speeds={"A": -1.0}), "$.speeds"),
        (arrival(speeds={"A": 1e7}), "$.speeds"),
        (b'{"job_id":"j","submitted_at":1,"gpus_per_worker":1,"speeds":{"A":1e400}}', "$.speeds"),
        (arrival(speeds={"A": 1.0, "B": 2.0}, gpu_types=["A"]), "B is not among `gpu_types` - at `$.speeds`"),
        (arrival(gpu_memory_mib=-1), "$.gpu_memory_mib"),
        (
            arrival(gpu_memory_mib=8138),
            "Not together with `gpus_per_worker`: it asks",
        ),
        (arrival(gpus_per_worker=None, gpu_memory_mib=1, remainder_gpus=1), "$.remainder_gpus"),
        (arrival(mig_profile="1g.5gb"), "Not together with `gpus_per_worker`"),
        (arrival(gpus_per_worker=None, gpu_fraction=0.5, mig_profile="1g.5gb"), "Not together with `gpu_fraction`"),
        (arrival(gpus_per_worker=None, gpu_memory_mib=1, mig_profile="1g.5gb"), "Not together with `gpu_memory_mib`"),
        (arrival(gpus_per_worker=None, mig_profile="1g.5gb", remainder_gpus=1), "$.remainder_gpus"),
        (arrival(gpus_per_worker=None, mig_profile="small"), "$.mig_profile"),
        (arrival(gpus_per_worker=None, mig_profile=""), "$.mig_profile"),
        (arrival(anti_affinity=""), "$.anti_affinity"),
        (
            arrival(workers=2, anti_affinity="x", topology={"level": "node", "required": True}),
            "Workers apart cannot all be on one node",
        ),
    ],
)
def test_an_arrival_that_does_not_fit_is_invalid_and_says_where(raw: bytes, where: str) -> None:
    refused = refusal(codec.decode_arrival, raw)
    assert refused.code == "invalid"
    assert where in refused.detail
    assert "\n" not in refused.detail


@pytest.mark.parametrize(
    ("decode", "fields", "where"),
    [
        (codec.decode_command, {"job_id": "j", "time": 1}, "type"),
        (codec.decode_command, CANCEL | {"type": "explode"}, "explode"),
        (codec.decode_command, CANCEL | {"type": 3}, "$.type"),
        (codec.decode_command, CANCEL | {"type": "reprioritise"}, "priority_class"),
        (codec.decode_command, CANCEL | {"time": "2026-01-01T00:00:00"}, "$.time"),
        (codec.decode_command, CANCEL | {"time": "1950-01-01T00:00:00Z"}, "$.time"),
        (codec.decode_completion, RUN | {"type": "finished"}, "finished"),
        (codec.decode_completion, RUN | {"type": "progress", "fraction": 1.1}, "$.fraction"),
        (codec.decode_completion, RUN | {"type": "progress", "step": 1, "total_steps": 0}, "$.total_steps"),
        (codec.decode_completion, RUN | {"type": "completed", "exit_code": 2**60}, "$.exit_code"),
        (codec.decode_completion, RUN | {"type": "started", "time": "1950-01-01T00:00:00Z"}, "$.time"),
        (codec.decode_node, NODE | {"type": "joined", "gpu_type": "A", "gpus": -1}, "$.gpus"),
        (codec.decode_node, NODE | {"type": "joined", "gpu_type": "", "gpus": 1}, "$.gpu_type"),
        (codec.decode_telemetry, NODE | {"gpus": [{"gpu": 0, "DCGM_FI_DEV_GPU_UTIL": 101}]}, "$.gpus[0]"),
        (codec.decode_pool_job, {"pool": "p", "origin": {"topic": "t", "partition": 0, "offset": 0}}, "exactly one"),
        (
            codec.decode_pool_job,
            {"pool": "p", "origin": {"topic": "t", "partition": 0, "offset": 0}, "arrival": ARRIVAL, "command": CANCEL},
            "exactly one",
        ),
        (
            codec.decode_pool_job,
            {
                "pool": "p",
                "origin": {"topic": "t", "partition": 0, "offset": 0},
                "arrival": ARRIVAL | {"remainder_gpus": 9},
            },
            "$.remainder_gpus",
        ),
    ],
)
def test_other_inputs_that_do_not_fit_are_invalid(decode: Any, fields: dict[str, Any], where: str) -> None:
    refused = refusal(decode, json.dumps(fields).encode())
    assert refused.code == "invalid"
    assert where in refused.detail


def test_a_body_of_10_mb_is_too_large_and_its_dead_letter_fits_its_topic() -> None:
    body = arrival(labels={"a": "x" * 10_000_000})
    refused = refusal(codec.decode_arrival, body)
    assert refused.code == "too-large"
    letter = codec.dead_letter(refused, codec.origin("jobs.arrivals", 1, 2), 3.0, b"j", body)
    raw = codec.encode(letter)
    assert len(raw) < int(topics.DEAD_LETTERS.configs["max.message.bytes"])
    assert codec.decode_dead_letter(raw) == letter
    assert letter.original == body


def test_of_a_giant_body_the_dead_letter_keeps_the_beginning_and_says_so() -> None:
    body = b"x" * (codec.MAX_ORIGINAL_BYTES + 1)
    letter = codec.dead_letter(refusal(codec.decode_node, body), codec.origin("n", 0, 0), 0.0, None, body)
    assert len(letter.original) == codec.MAX_ORIGINAL_BYTES
    assert str(len(body)) in letter.detail
    assert len(codec.encode(letter)) < topics.DEAD_LETTERS.max_body_bytes


def test_a_tombstone_has_a_dead_letter_too() -> None:
    letter = codec.dead_letter(refusal(codec.decode_node, None), codec.origin("n", 0, 0), 0.0, b"k", None)
    assert codec.decode_dead_letter(codec.encode(letter)) == letter


def test_a_detail_that_quotes_the_input_is_cut() -> None:
    refused = refusal(codec.decode_command, json.dumps(CANCEL | {"type": "x" * 100_000}).encode())
    assert len(refused.detail) < 1000


def test_the_limit_is_of_the_body_not_of_the_job() -> None:
    body = arrival()
    assert codec.decode_arrival(body + b" " * (codec.MAX_BODY_BYTES - len(body))).job_id == "j"
    assert refusal(codec.decode_arrival, body + b" " * codec.MAX_BODY_BYTES).code == "too-large"


def test_any_arrival_that_fits_its_topic_fits_pool_jobs() -> None:
    labels = {f"{i:03}" + "é" * 250: "x" * 4096 for i in range(64)}
    job = codec.decode_arrival(arrival(labels=labels))
    routed = m.PoolJob(pool="p", origin=codec.origin("jobs.arrivals", 0, 0), arrival=job)
    assert codec.decode_pool_job(codec.encode(routed)) == routed


def test_unknown_fields_are_ignored_and_the_last_of_a_repeated_key_counts() -> None:
    raw = b'{"job_id":"first","new":{"a":[1]},"submitted_at":1,"gpus_per_worker":1,"job_id":"last"}'
    assert codec.decode_arrival(raw).job_id == "last"


def test_a_nan_is_never_written() -> None:
    ranked = m.RankedJob(job_id="j", rank=0, score=float("nan"), state="queued", reason="", waited_s=0.0)
    ranking = m.QueueRanking(pool="p", time=0.0, epoch=1, seq=1, policy="f1", queued=1, jobs=(ranked,))
    with pytest.raises(ValueError, match="QueueRanking"):
        codec.encode(ranking)
    cancel = m.Cancel(job_id="null", time=1.0, reason='"x":null')
    assert codec.decode_command(codec.encode(cancel)) == cancel


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-01T00:00:00Z", 1767225600.0),
        ("2026-01-01T02:00:00.5+02:00", 1767225600.5),
        (1767225600, 1767225600.0),
        (0, 0.0),
    ],
)
def test_times_are_instants(text: str | int, seconds: float) -> None:
    assert codec.epoch_seconds(codec.decode_arrival(arrival(submitted_at=text)).submitted_at) == seconds


def test_job_spec_carries_everything() -> None:
    raw = arrival(
        workers=2,
        remainder_gpus=4,
        gpu_types=["A100"],
        cpu_milli=1,
        memory_mib=2,
        tenant="t",
        topology={"level": "rack", "required": True},
        priority_class="high",
        weight=2,
        estimate_s=3,
        preemptible=True,
        elastic={"min_workers": 1, "max_workers": 3},
        labels={"a": "b"},
    )
    assert codec.job_spec(codec.decode_arrival(raw), "tp") == model.JobSpec(
        job_id="j",
        submitted_at=1.5,
        gpus_per_worker=8,
        workers=2,
        remainder_gpus=4,
        gpu_types=("A100",),
        cpu_milli=1,
        memory_mib=2,
        tenant="t",
        topology=model.TopologyWish(level=model.TopologyLevel.RACK, required=True),
        priority_class="high",
        weight=2.0,
        estimate_s=3.0,
        preemptible=True,
        elastic=model.ElasticRange(min_workers=1, max_workers=3),
        labels={"a": "b"},
        traceparent="tp",
    )


@pytest.mark.parametrize(("fraction", "milli"), [(0.001, 1), (0.3333, 333), (0.5, 500), (0.999, 999)])
def test_a_share_is_kept_in_thousandths(fraction: float, milli: int) -> None:
    raw = arrival(gpus_per_worker=None, gpu_fraction=fraction, workers=3)
    spec = codec.job_spec(codec.decode_arrival(raw))
    assert (spec.gpus_per_worker, spec.gpu_milli, spec.workers) == (1, milli, 3)


@pytest.mark.parametrize(
    ("fields", "event"),
    [
        ({"type": "cancel"}, ev.CancelRequested(job_id="j", offset=7)),
        ({"type": "hold"}, ev.HoldRequested(job_id="j", offset=7)),
        ({"type": "release"}, ev.ReleaseRequested(job_id="j", offset=7)),
        ({"type": "reprioritise", "weight": 2}, ev.ReprioritiseRequested(job_id="j", offset=7, weight=2.0)),
    ],
)
def test_commands_become_events(fields: dict[str, Any], event: ev.CoreEvent) -> None:
    assert codec.command_event(codec.decode_command(json.dumps(CANCEL | fields).encode()), 7) == event


ABOUT: dict[str, Any] = {"placement_id": "j.1", "job_id": "j", "time": 10.0}


@pytest.mark.parametrize(
    ("fields", "event"),
    [
        ({"type": "started"}, ev.RunStarted(**ABOUT)),
        ({"type": "progress", "fraction": 0.25}, ev.RunProgressed(**ABOUT, fraction=0.25)),
        ({"type": "progress", "step": 1, "total_steps": 4}, ev.RunProgressed(**ABOUT, fraction=0.25, step=1)),
        ({"type": "progress", "step": 9, "total_steps": 4}, ev.RunProgressed(**ABOUT, fraction=1.0, step=9)),
        ({"type": "progress", "step": 9, "checkpointed": True}, ev.RunProgressed(**ABOUT, step=9, checkpointed=True)),
        ({"type": "completed", "exit_code": 3}, ev.RunCompleted(**ABOUT, exit_code=3)),
        (
            {"type": "failed", "exit_code": -9, "reason": "r", "retryable": True},
            ev.RunFailed(**ABOUT, exit_code=-9, reason="r", retryable=True),
        ),
        ({"type": "preempted"}, ev.RunPreempted(**ABOUT)),
        ({"type": "rejected", "node_id": "n", "reason": "r"}, ev.RunRejected(**ABOUT, node_id="n", reason="r")),
        ({"type": "released", "node_ids": ["n"]}, ev.RunReleased(**ABOUT, node_ids=("n",))),
        ({"type": "started", "time": "1970-01-01T00:00:10Z"}, ev.RunStarted(**ABOUT)),
    ],
)
def test_reports_become_events(fields: dict[str, Any], event: ev.CoreEvent) -> None:
    assert codec.run_event(codec.decode_completion(json.dumps(RUN | fields).encode())) == event


@pytest.mark.parametrize(
    ("fields", "event"),
    [
        (
            {"type": "joined", "gpu_type": "A", "gpus": 8, "rack": "r", "labels": {"a": "b"}},
            ev.NodeJoined(spec=model.NodeSpec(node_id="n", gpu_type="A", gpus=8, rack="r", labels={"a": "b"})),
        ),
        ({"type": "capacity", "gpus": 7}, ev.NodeCapacityChanged(node_id="n", gpus=7)),
        ({"type": "heartbeat"}, ev.NodeHeard(node_id="n")),
        ({"type": "cordon"}, ev.NodeCordoned(node_id="n")),
        ({"type": "uncordon"}, ev.NodeUncordoned(node_id="n")),
        ({"type": "drain"}, ev.NodeDrained(node_id="n")),
        ({"type": "lost", "fenced": True}, ev.NodeLost(node_id="n", fenced=True, time=float(NODE["time"]))),
    ],
)
def test_node_messages_become_events(fields: dict[str, Any], event: ev.CoreEvent) -> None:
    assert codec.node_event(codec.decode_node(json.dumps(NODE | fields).encode())) == event


def test_keys() -> None:
    assert codec.key_of(codec.decode_arrival(arrival(pool="p"))) == b"j"
    assert codec.key_of(codec.decode_command(json.dumps(CANCEL).encode())) == b"j"
    assert codec.key_of(codec.decode_node(json.dumps(NODE | {"type": "drain"}).encode())) == b"p"


def test_traceparent_comes_from_the_headers_when_it_may_be_one() -> None:
    assert codec.traceparent([("ce_id", b"1"), ("traceparent", b"00-aa-bb-01")]) == "00-aa-bb-01"
    assert codec.traceparent([("traceparent", b"\xff")]) is None
    assert codec.traceparent([("traceparent", b"x" * 129)]) is None
    assert codec.traceparent([]) is None


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"gpu_memory_mib": 8138}, {"gpu_memory_mib": 8138}),
        ({"gpu_memory_mib": 8138, "gpu_fraction": 0.25}, {"gpu_memory_mib": 8138, "gpu_milli": 250}),
        ({"mig_profile": "3g.20gb", "workers": 2}, {"mig_profile": "3g.20gb", "gpu_milli": 428, "workers": 2}),
        ({"mig_profile": "9g.90gb"}, {"mig_profile": "9g.90gb", "gpu_milli": 1000}),
    ],
    ids=["memory", "memory and fraction", "instance", "a profile of the future"],
)
def test_parts_of_a_device(fields: dict[str, object], spec: dict[str, object]) -> None:
    asked = codec.decode_arrival(arrival(gpus_per_worker=None, **fields))
    assert codec.job_spec(asked) == model.JobSpec(job_id="j", submitted_at=1.5, gpus_per_worker=1, **spec)


def test_wishes_reach_the_core() -> None:
    asked = codec.decode_arrival(
        arrival(gpu_types=["A", "B"], mixed_types=True, speeds={"A": 2}, anti_affinity="db", workers=2)
    )
    spec = codec.job_spec(asked)
    assert (spec.mixed_types, spec.speeds, spec.anti_affinity) == (True, {"A": 2.0}, "db")
    assert not codec.job_spec(codec.decode_arrival(arrival())).mixed_types


def test_a_node_says_its_devices_memory_and_mig() -> None:
    joined = {"type": "joined", "pool": "p", "node_id": "n", "time": 1, "gpu_type": "A", "gpus": 8}
    event = codec.node_event(codec.decode_node(json.dumps(joined | {"gpu_memory_mib": 16276, "mig": "A30"}).encode()))
    assert event == ev.NodeJoined(
        spec=model.NodeSpec(node_id="n", gpu_type="A", gpus=8, gpu_memory_mib=16276, mig="A30")
    )
    refused = refusal(codec.decode_node, json.dumps(joined | {"mig": "A100"}).encode())
    assert refused.code == "invalid"
    assert refused.detail == "Expected one of A100-40GB, A100-80GB, A30, H100-80GB - at `$.mig`"
