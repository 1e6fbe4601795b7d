"""The files under topics/ are what the types say, and what was promised before still holds."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from streamsched.bus import codec, schemas
from streamsched.bus.samples import SAMPLES
from streamsched.bus.topics import DECLARATIONS, TopicDeclaration, TopicNames, partition_of

ROOT = Path(__file__).parents[2]
TOPICS = ROOT / "topics"
ASYNCAPI_META = ROOT / "node_modules" / "@asyncapi" / "specs" / "schemas" / "3.0.0.json"

each_topic = pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda declaration: declaration.name)


def read(name: str) -> Any:
    return json.loads((TOPICS / name).read_text(encoding="utf-8"))


def test_the_files_do_not_differ_from_the_types() -> None:
    assert schemas.drift(TOPICS) == [], "run: python -m streamsched.bus.schemas"


def test_check_finds_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert schemas.main(["--directory", str(tmp_path), "--check"]) == 1
    assert schemas.main(["--directory", str(tmp_path)]) == 0
    assert schemas.main(["--directory", str(tmp_path), "--check"]) == 0
    (tmp_path / "placements" / "schema.json").write_text("{}")
    capsys.readouterr()
    assert schemas.main(["--directory", str(tmp_path), "--check"]) == 1
    assert "placements/schema.json" in capsys.readouterr().out


def test_what_is_frozen_is_never_written_again(tmp_path: Path) -> None:
    assert len(schemas.freeze(tmp_path)) == len(DECLARATIONS)
    assert schemas.freeze(tmp_path) == []


@each_topic
def test_samples_come_back_equal_and_obey_the_schema(declaration: TopicDeclaration) -> None:
    schema = read(f"{declaration.name}/schema.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    decode = codec.DECODERS[declaration.name]
    lines = (TOPICS / declaration.name / "samples.jsonl").read_bytes().splitlines()
    for line, sample in zip(lines, SAMPLES[declaration.name], strict=True):
        assert decode(line) == sample
        assert decode(codec.encode(decode(line))) == sample
        validator.validate(json.loads(line))
    assert read(f"{declaration.name}/sample.json") == json.loads(lines[0])


@each_topic
def test_every_kind_has_a_sample(declaration: TopicDeclaration) -> None:
    assert {type(sample) for sample in SAMPLES[declaration.name]} == set(declaration.types)


@each_topic
def test_samples_of_earlier_versions_still_decode(declaration: TopicDeclaration) -> None:
    frozen = sorted((TOPICS / declaration.name / "frozen").glob("*.jsonl"))
    assert frozen
    for path in frozen:
        for line in path.read_bytes().splitlines():
            codec.DECODERS[declaration.name](line)


@pytest.mark.parametrize(
    ("topic", "fields"),
    [
        ("jobs.arrivals", {"job_id": "j", "submitted_at": 1}),
        ("jobs.arrivals", {"job_id": "j", "submitted_at": 1, "gpus_per_worker": 1, "gpu_fraction": 0.5}),
        ("jobs.arrivals", {"job_id": "j", "submitted_at": 1, "gpu_fraction": 0.5, "remainder_gpus": 1}),
        ("jobs.arrivals", {"job_id": "j", "submitted_at": 1, "gpus_per_worker": 1, "gpu_memory_mib": 5}),
        ("jobs.arrivals", {"job_id": "j", "submitted_at": 1, "gpus_per_worker": 1, "mig_profile": "1g.5gb"}),
        ("jobs.arrivals", {"job_id": "j", "submitted_at": 1, "gpu_memory_mib": 5, "mig_profile": "1g.5gb"}),
        ("jobs.arrivals", {"job_id": "j", "submitted_at": 1, "gpu_memory_mib": 5, "remainder_gpus": 1}),
        ("jobs.arrivals", {"job_id": "j", "submitted_at": "2026-01-01T00:00:00", "gpus_per_worker": 1}),
        ("jobs.commands", {"type": "reprioritise", "job_id": "j", "time": 1}),
        ("jobs.commands", {"type": "explode", "job_id": "j", "time": 1}),
        ("pool.jobs", {"pool": "p", "origin": {"topic": "t", "partition": 0, "offset": 0}}),
    ],
)
def test_the_schema_refuses_what_the_codec_refuses(topic: str, fields: dict[str, Any]) -> None:
    assert not jsonschema.Draft202012Validator(read(f"{topic}/schema.json")).is_valid(fields)
    with pytest.raises(codec.Refused):
        codec.DECODERS[topic](json.dumps(fields).encode())


# ── AsyncAPI ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(reference := node.get("$ref"), str):
            yield reference
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def resolve(document: Any, reference: str) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        document = document[part]
    return document


def test_asyncapi_refers_to_what_is_there() -> None:
    document = read("asyncapi.json")
    assert document["asyncapi"] == "3.0.0"
    for reference in set(references(document)):
        assert resolve(document, reference), reference
    assert set(document["channels"]) == {declaration.name for declaration in DECLARATIONS}
    assert all(channel["messages"] for channel in document["channels"].values())
    for operation in document["operations"].values():
        assert operation["action"] in ("send", "receive")
        channel = resolve(document, operation["channel"]["$ref"])
        assert [resolve(document, message["$ref"]) for message in operation["messages"]] == list(
            channel["messages"].values()
        )
    used = {operation["channel"]["$ref"].removeprefix("#/channels/") for operation in document["operations"].values()}
    assert used == set(document["channels"])


def test_asyncapi_examples_obey_their_payload_schema() -> None:
    document = read("asyncapi.json")
    for message in document["components"]["messages"].values():
        validator = jsonschema.Draft7Validator({"components": document["components"]} | message["payload"])
        for example in message["examples"]:
            validator.validate(example["payload"])


def test_asyncapi_obeys_the_specification() -> None:
    if not ASYNCAPI_META.is_file():
        pytest.skip("npm install --no-save @asyncapi/specs gives the AsyncAPI meta-schema")
    jsonschema.Draft7Validator(json.loads(ASYNCAPI_META.read_text())).validate(read("asyncapi.json"))


# ── declarations ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_topics_toml_is_toml() -> None:
    with (TOPICS / "topics.toml").open("rb") as file:
        table = tomllib.load(file)
    assert {name: topic["configs"] for name, topic in table.items()} == {
        declaration.name: dict(declaration.configs) for declaration in DECLARATIONS
    }


@each_topic
def test_a_topic_takes_what_its_decoder_takes(declaration: TopicDeclaration) -> None:
    assert int(declaration.configs["max.message.bytes"]) >= declaration.max_body_bytes


def test_all_topics_but_dead_letters_are_partitioned_alike() -> None:
    own = [declaration.name for declaration in DECLARATIONS if declaration.partition_group == "own"]
    assert own == ["dead.letters"]


def test_names_take_a_prefix() -> None:
    names = TopicNames.from_env({"STREAMSCHED_TOPIC_PREFIX": "t1-"})
    assert names.arrivals == "t1-jobs.arrivals"
    assert {names.of(declaration) for declaration in DECLARATIONS} == {
        names.arrivals,
        names.commands,
        names.completions,
        names.telemetry,
        names.nodes,
        names.pool_jobs,
        names.placements,
        names.rankings,
        names.journal,
        names.snapshots,
        names.dead_letters,
    }
    assert TopicNames.from_env({}).placements == "placements"


@pytest.mark.parametrize(
    ("key", "murmur2"),
    [("21", -973932308), ("foobar", -790332482), ("a-little-bit-long-string", -985981536), ("abc", 479470107)],
)
def test_partitions_are_those_of_kafkas_own_client(key: str, murmur2: int) -> None:
    """Hashes from Kafka's UtilsTest.testMurmur2."""
    for partitions in (1, 8, 13):
        assert partition_of(key, partitions) == (murmur2 & 0x7FFFFFFF) % partitions
