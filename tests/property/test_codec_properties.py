"""Whatever the bytes, the codec answers with a message or with `Refused`; and it agrees with the published schemas."""

from __future__ import annotations

import copy
import json
import re
from datetime import UTC, datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.bus.codec import Refused
from streamsched.bus.samples import SAMPLES
from streamsched.core import mig
from streamsched.core.model import TopologyLevel

TOPICS = Path(__file__).parents[2] / "topics"
INPUTS = ("jobs.arrivals", "jobs.commands", "jobs.completions", "gpu.telemetry", "nodes.events", "pool.jobs")

topic_names = st.sampled_from(sorted(codec.DECODERS))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["a", "a\n", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00", 0, 1, 8, 8.0, 0.5, -1, 10**6]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


# ── nothing but Refused ──────────────────────────────────────────────────────────────────────────────────────────────


def decoded(topic: str, raw: bytes | None) -> m.Message | Refused:
    try:
        message: m.Message = codec.DECODERS[topic](raw)
    except Refused as refused:
        return refused
    return message


@given(topic_names, st.none() | st.binary(max_size=300))
def test_any_bytes(topic: str, raw: bytes | None) -> None:
    decoded(topic, raw)


@given(topic_names, json_values)
def test_any_json(topic: str, value: Any) -> None:
    decoded(topic, json.dumps(value).encode())


@given(st.data(), topic_names)
def test_any_damage_to_a_sample(data: st.DataObject, topic: str) -> None:
    raw = bytearray(codec.encode(SAMPLES[topic][0]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    assume(raw)
    decoded(topic, bytes(raw))


@st.composite
def altered(draw: st.DrawFn, topics: st.SearchStrategy[str]) -> tuple[str, Any]:
    """A sample message with a few fields replaced, removed or added."""
    topic = draw(topics)
    document = copy.deepcopy(json.loads(codec.encode(draw(st.sampled_from(SAMPLES[topic])))))
    for _ in range(draw(st.integers(0, 3))):
        node = document
        for descend in draw(st.lists(st.booleans(), max_size=4)):
            if descend and (inner := children(node)):
                node = draw(st.sampled_from(inner))
        alter(draw, node)
    return topic, document


def children(node: Any) -> list[Any]:
    values = node.values() if isinstance(node, dict) else node
    return [value for value in values if isinstance(value, dict | list) and value]


def alter(draw: st.DrawFn, node: Any) -> None:
    keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
        return
    key = draw(st.sampled_from(keys))
    if draw(st.booleans()):
        node[key] = draw(json_values)
    elif isinstance(node, dict) and draw(st.booleans()):
        node[draw(st.text(max_size=5))] = draw(json_values)
    else:
        del node[key]


@given(altered(topic_names))
def test_what_is_taken_can_be_passed_on(case: tuple[str, Any]) -> None:
    topic, document = case
    message = decoded(topic, json.dumps(document).encode())
    if not isinstance(message, Refused):
        assert decoded(topic, codec.encode(message)) == message


@given(altered(st.sampled_from(INPUTS)))
def test_what_is_taken_becomes_events(case: tuple[str, Any]) -> None:
    topic, document = case
    message = decoded(topic, json.dumps(document).encode())
    match message:
        case m.JobArrival():
            spec = codec.job_spec(message)
            assert 1 <= spec.gpu_milli <= 1000
            assert spec.remainder_gpus < spec.gpus_per_worker
            assert 1 <= spec.total_gpus <= codec.MAX_GPUS
            assert spec.submitted_at >= 0
        case m.JobCommand():
            codec.command_event(message, 1)  # type: ignore[arg-type]
        case m.RunReport():
            codec.run_event(message)  # type: ignore[arg-type]
        case m.NodeMessage():
            codec.node_event(message)  # type: ignore[arg-type]


# ── the schema says the same ─────────────────────────────────────────────────────────────────────────────────────────

BEYOND_SCHEMA = re.compile(
    r"\$\.(arrival\.)?(remainder_gpus|elastic|speeds|anti_affinity|mig\b)|at most \d+ GPUs|from 1970|RFC3339|base64"
    r"|out of range|got `float`"
)


@cache
def validator(topic: str) -> jsonschema.Draft202012Validator:
    """The published schema; its `$` means the end of the text, which Python writes otherwise."""
    text = (TOPICS / topic / "schema.json").read_text(encoding="utf-8")
    return jsonschema.Draft202012Validator(json.loads(text.replace('$"', r'\\Z"')))


@settings(max_examples=300)
@given(altered(topic_names))
def test_codec_and_schema_agree(case: tuple[str, Any]) -> None:
    topic, document = case
    answer = decoded(topic, json.dumps(document).encode())
    if validator(topic).is_valid(document):
        assert not isinstance(answer, Refused) or BEYOND_SCHEMA.search(answer.detail), answer
    else:
        assert isinstance(answer, Refused), answer


# ── any valid message comes back ─────────────────────────────────────────────────────────────────────────────────────

ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,30}", fullmatch=True)
zones = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
times = st.floats(0, 32503680000) | st.builds(
    lambda at, zone: at.replace(tzinfo=UTC).astimezone(zone),
    st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2999, 12, 31)),
    zones,
)
labels = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), st.text(max_size=50), max_size=4
)
optional_seconds = st.none() | st.floats(0, 1e10)


@st.composite
def arrivals(draw: st.DrawFn) -> m.JobArrival:
    kind = draw(st.sampled_from(["whole", "share", "memory", "share and memory", "mig"]))
    share = draw(st.floats(0.001, 0.999)) if kind.startswith("share") else None
    workers = draw(st.integers(1, 100))
    gpus_per_worker = draw(st.integers(1, 64))
    gpu_types = tuple(draw(st.lists(ids, max_size=3)))
    typed = st.sampled_from(gpu_types) if gpu_types else ids
    topology = st.builds(m.Topology, level=st.sampled_from(list(TopologyLevel)[1:]), required=st.booleans())
    return m.JobArrival(
        job_id=draw(ids),
        submitted_at=draw(times),
        gpus_per_worker=gpus_per_worker if kind == "whole" else None,
        gpu_fraction=share,
        gpu_memory_mib=draw(st.integers(1, 2**50)) if kind.endswith("memory") else 0,
        mig_profile=draw(st.sampled_from(["1g.5gb", "3g.20gb", "9g.90gb"])) if kind == "mig" else None,
        workers=workers,
        remainder_gpus=draw(st.integers(0, gpus_per_worker - 1)) if kind == "whole" else 0,
        gpu_types=gpu_types,
        mixed_types=draw(st.booleans()),
        speeds=draw(st.dictionaries(typed, st.floats(0, 1e6, exclude_min=True), max_size=3)),
        anti_affinity=draw(st.none() | ids),
        cpu_milli=draw(st.integers(0, 2**50)),
        memory_mib=draw(st.integers(0, 2**50)),
        tenant=draw(ids),
        pool=draw(st.none() | ids),
        topology=draw(st.none() | topology),
        weight=draw(st.floats(0, 1e9, exclude_min=True)),
        estimate_s=draw(optional_seconds),
        preemptible=draw(st.booleans()),
        elastic=draw(
            st.none()
            | st.builds(m.Elastic, min_workers=st.integers(1, workers), max_workers=st.integers(workers, 1000))
        ),
        labels=draw(labels),
    )


@given(arrivals(), ids, st.integers(0, 2**53))
def test_any_valid_arrival_comes_back_also_when_routed(job: m.JobArrival, pool: str, offset: int) -> None:
    assert codec.decode_arrival(codec.encode(job)) == job
    origin = codec.origin("jobs.arrivals", 0, offset)
    routed = m.PoolJob(pool=pool, origin=origin, arrival=job)
    assert codec.decode_pool_job(codec.encode(routed)) == routed
    assert validator("jobs.arrivals").is_valid(json.loads(codec.encode(job)))


@given(arrivals())
def test_a_share_is_off_by_half_a_thousandth_at_most(job: m.JobArrival) -> None:
    spec = codec.job_spec(job)
    if job.gpu_fraction is not None:
        assert abs(spec.gpu_milli / 1000 - job.gpu_fraction) <= 0.0005 + 1e-12
    else:
        assert spec.gpu_milli == mig.MILLI.get(spec.mig_profile, 1000)


@given(ids, ids, ids, times, st.none() | st.floats(0, 1), st.none() | st.integers(0, 2**50))
def test_any_valid_progress_comes_back(
    pool: str, job: str, run: str, time: m.Time, fraction: float | None, step: int | None
) -> None:
    report = m.Progress(pool=pool, job_id=job, placement_id=run, time=time, fraction=fraction, step=step)
    assert codec.decode_completion(codec.encode(report)) == report


@given(st.binary(max_size=200), st.none() | st.binary(max_size=20), st.floats(0, 32503680000))
def test_dead_letters_keep_the_bytes(original: bytes, key: bytes | None, time: float) -> None:
    letter = codec.dead_letter(Refused("malformed", "x"), codec.origin("t", 0, 0), time, key, original)
    back = codec.decode_dead_letter(codec.encode(letter))
    assert (back.original, back.key) == (original, key)
