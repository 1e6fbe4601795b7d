"""The contract as documents: JSON Schemas, golden samples and an AsyncAPI 3.0 document, generated from the types.

    python -m streamsched.bus.schemas            write topics/
    python -m streamsched.bus.schemas --check    exit 1 when topics/ differs from the types
    python -m streamsched.bus.schemas --freeze   also keep today's samples as those of this version, for ever

A test makes the same comparison, so types and documents cannot drift apart. Frozen samples must go on decoding: they
are what producers of that version write.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from streamsched import __version__

from . import codec
from .messages import Message
from .samples import SAMPLES
from .topics import DECLARATIONS, DEFAULT_PARTITIONS, TopicDeclaration

Document = dict[str, Any]

DIRECTORY: Final = Path("topics")
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_BINDING: Final = "0.5.0"

_ONE_OF: Final[dict[str, Document]] = {
    "JobArrival": {
        "oneOf": [
            {
                "required": ["gpus_per_worker"],
                "properties": {
                    "gpus_per_worker": {"type": "integer"},
                    "gpu_fraction": {"type": "null"},
                    "gpu_memory_mib": {"const": 0},
                    "mig_profile": {"type": "null"},
                },
            },
            {
                "anyOf": [
                    {"required": ["gpu_fraction"], "properties": {"gpu_fraction": {"type": "number"}}},
                    {"required": ["gpu_memory_mib"], "properties": {"gpu_memory_mib": {"minimum": 1}}},
                ],
                "properties": {
                    "gpus_per_worker": {"type": "null"},
                    "mig_profile": {"type": "null"},
                    "remainder_gpus": {"const": 0},
                },
            },
            {
                "required": ["mig_profile"],
                "properties": {
                    "mig_profile": {"type": "string"},
                    "gpus_per_worker": {"type": "null"},
                    "gpu_fraction": {"type": "null"},
                    "gpu_memory_mib": {"const": 0},
                    "remainder_gpus": {"const": 0},
                },
            },
        ]
    },
    "Reprioritise": {
        "anyOf": [
            {"required": ["priority_class"], "properties": {"priority_class": {"type": "string"}}},
            {"required": ["weight"], "properties": {"weight": {"type": "number"}}},
        ]
    },
    "PoolJob": {
        "oneOf": [
            {"required": ["arrival"], "properties": {"arrival": {"type": "object"}, "command": {"type": "null"}}},
            {"required": ["command"], "properties": {"command": {"type": "object"}, "arrival": {"type": "null"}}},
        ]
    },
}
"""What the codec checks beyond the types, as far as JSON Schema can say it."""

_HEADERS: Final[Document] = {
    "type": "object",
    "description": "Kafka record headers, all optional.",
    "properties": {
        "traceparent": {"type": "string", "description": "W3C trace context; the placement's span links back to it."},
        "ce_id": {"type": "string", "description": "CloudEvents binary mode: the producer's id of this event."},
        "ce_time": {"type": "string", "format": "date-time", "description": "CloudEvents: when it happened."},
    },
}


# ── JSON Schema ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _published(node: Any) -> Any:
    """As other languages read it: `$` for Python's `\\Z`, no OpenAPI `discriminator` (tags are one-value enums)."""
    if isinstance(node, list):
        return [_published(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: _published(value) for key, value in node.items() if key != "discriminator"}
    if isinstance(pattern := out.get("pattern"), str) and pattern.endswith(r"\Z"):
        out["pattern"] = pattern.removesuffix(r"\Z") + "$"
    return out


def _components(types: list[Any], ref_template: str) -> tuple[list[Document], dict[str, Document]]:
    roots, definitions = msgspec.json.schema_components(types, ref_template=ref_template)
    published: dict[str, Document] = {name: _published(definitions[name]) for name in sorted(definitions)}
    for name, also in _ONE_OF.items():
        if name in published:
            published[name] |= copy.deepcopy(also)
    return [_published(root) for root in roots], published


def schema_of(declaration: TopicDeclaration) -> Document:
    """JSON Schema 2020-12 of one topic's messages."""
    (root,), definitions = _components([declaration.union], "#/$defs/{name}")
    head = {
        "$schema": _DIALECT,
        "$id": f"urn:streamsched:{declaration.name}",
        "title": declaration.name,
        "description": declaration.summary,
    }
    return head | root | {"$defs": definitions}


# ── AsyncAPI ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _draft7(node: Any) -> Any:
    """AsyncAPI's schemas are of draft 7, where a fixed-length array is said otherwise."""
    if isinstance(node, list):
        return [_draft7(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: _draft7(value) for key, value in node.items()}
    if "prefixItems" in out:
        out["additionalItems"] = out.pop("items", True)
        out["items"] = out.pop("prefixItems")
    return out


_RECEIVES: Final = ("the router", "the scheduler")


def asyncapi() -> Document:
    """AsyncAPI 3.0.0 of all topics, told from the side of the scheduler."""
    types = [type_ for declaration in DECLARATIONS for type_ in declaration.types]
    roots, definitions = _components(types, "#/components/schemas/{name}")
    return {
        "asyncapi": "3.0.0",
        "id": "urn:streamsched",
        "info": {
            "title": "streamsched",
            "version": __version__,
            "description": (
                "Topics of a streaming GPU-cluster scheduler. Times are UTC epoch seconds or RFC 3339 text with an "
                "offset. An installation may put a prefix before every topic's name (STREAMSCHED_TOPIC_PREFIX)."
            ),
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {"kafka": _server()},
        "channels": {declaration.name: _channel(declaration) for declaration in DECLARATIONS},
        "operations": {
            f"{action}.{declaration.name}": _operation(action, declaration)
            for declaration in DECLARATIONS
            for action in _actions(declaration)
        },
        "components": {
            "messages": {
                type_.__name__: _message(declaration, type_, roots.pop(0))
                for declaration in DECLARATIONS
                for type_ in declaration.types
            },
            "schemas": {"RecordHeaders": _HEADERS} | _draft7(definitions),
        },
    }


def _server() -> Document:
    return {
        "host": "{bootstrap}",
        "protocol": "kafka",
        "description": "The Kafka cluster; any address of it.",
        "variables": {"bootstrap": {"default": "localhost:9092", "examples": ["kafka.example.com:9092"]}},
        "bindings": {"kafka": {"bindingVersion": _BINDING}},
    }


def _channel(declaration: TopicDeclaration) -> Document:
    return {
        "address": declaration.name,
        "title": declaration.name,
        "summary": declaration.summary,
        "description": f"Written by {declaration.written_by}, read by {declaration.read_by}. Key: {declaration.key}.",
        "servers": [{"$ref": "#/servers/kafka"}],
        "messages": {
            type_.__name__: {"$ref": f"#/components/messages/{type_.__name__}"} for type_ in declaration.types
        },
        "bindings": {
            "kafka": {
                "partitions": DEFAULT_PARTITIONS,
                "topicConfiguration": _topic_configuration(declaration),
                "bindingVersion": _BINDING,
            }
        },
    }


def _topic_configuration(declaration: TopicDeclaration) -> Document:
    configs: Document = {
        key: int(value) if value.lstrip("-").isdigit() else value for key, value in declaration.configs.items()
    }
    return configs | {"cleanup.policy": declaration.configs["cleanup.policy"].split(",")}


def _actions(declaration: TopicDeclaration) -> list[str]:
    sends = declaration.written_by.startswith(_RECEIVES)
    receives = declaration.read_by.startswith(_RECEIVES)
    return ["receive"] * receives + ["send"] * sends


def _operation(action: str, declaration: TopicDeclaration) -> Document:
    channel = f"#/channels/{declaration.name}"
    return {
        "action": action,
        "channel": {"$ref": channel},
        "summary": declaration.summary,
        "messages": [{"$ref": f"{channel}/messages/{type_.__name__}"} for type_ in declaration.types],
        "bindings": {"kafka": {"bindingVersion": _BINDING}},
    }


def _message(declaration: TopicDeclaration, type_: type[Message], payload: Document) -> Document:
    summary = (type_.__doc__ or "").split("\n", 1)[0]
    key = {
        "job_id": "The job's id.",
        "pool": "The pool's name.",
        "pool#slot#part": "Pool, slot and part.",
        "as input": "The key of the refused input.",
    }
    return {
        "name": type_.__name__,
        "title": type_.__name__,
        "summary": summary,
        "contentType": "application/json",
        "headers": {"$ref": "#/components/schemas/RecordHeaders"},
        "payload": payload,
        "bindings": {
            "kafka": {
                "key": {"type": "string", "description": key[declaration.key]},
                "bindingVersion": _BINDING,
            }
        },
        "examples": [
            {"payload": json.loads(codec.encode(sample))}
            for sample in SAMPLES[declaration.name]
            if type(sample) is type_
        ],
    }


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pretty(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _topics_toml() -> str:
    lines = [
        "# Generated from streamsched/bus/topics.py by `python -m streamsched.bus.schemas`.",
        '# Topics of the group "shared" must all have the same number of partitions.',
    ]
    for declaration in DECLARATIONS:
        lines += ["", f'["{declaration.name}"]', f"summary = {json.dumps(declaration.summary)}"]
        lines += [f"key = {json.dumps(declaration.key)}"]
        lines += [f"written_by = {json.dumps(declaration.written_by)}", f"read_by = {json.dumps(declaration.read_by)}"]
        lines += [f"messages = {json.dumps([type_.__name__ for type_ in declaration.types])}"]
        lines += [f"partitions = {DEFAULT_PARTITIONS}", f"partition_group = {json.dumps(declaration.partition_group)}"]
        lines += [f"max_body_bytes = {declaration.max_body_bytes}"]
        lines += [f'configs."{key}" = {json.dumps(value)}' for key, value in declaration.configs.items()]
    return "\n".join(lines) + "\n"


def _samples_text(declaration: TopicDeclaration) -> str:
    return "".join(codec.encode(sample).decode() + "\n" for sample in SAMPLES[declaration.name])


def generate() -> dict[str, str]:
    """All generated files: path below topics/ -> text."""
    files = {"topics.toml": _topics_toml(), "asyncapi.json": _pretty(asyncapi())}
    for declaration in DECLARATIONS:
        first = SAMPLES[declaration.name][0]
        files[f"{declaration.name}/schema.json"] = _pretty(schema_of(declaration))
        files[f"{declaration.name}/sample.json"] = _pretty(json.loads(codec.encode(first)))
        files[f"{declaration.name}/samples.jsonl"] = _samples_text(declaration)
    return files


def drift(directory: Path) -> list[str]:
    """Names of the generated files that are missing or differ."""

    def differs(name: str, text: str) -> bool:
        path = directory / name
        return not path.is_file() or path.read_text(encoding="utf-8") != text

    return [name for name, text in generate().items() if differs(name, text)]


def write(directory: Path, names: list[str]) -> None:
    files = generate()
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[name], encoding="utf-8")


def freeze(directory: Path) -> list[str]:
    """Keep today's samples as `frozen/<version>.jsonl`. What is frozen already is never written again."""
    frozen = []
    for declaration in DECLARATIONS:
        path = directory / declaration.name / "frozen" / f"{__version__}.jsonl"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_samples_text(declaration), encoding="utf-8")
            frozen.append(str(path))
    return frozen


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m streamsched.bus.schemas", description="Write topics/.")
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    parser.add_argument("--freeze", action="store_true", help="keep today's samples as those of this version")
    options = parser.parse_args(arguments)
    names = drift(options.directory)
    if options.check:
        sys.stdout.write("".join(f"differs: {options.directory / name}\n" for name in names))
        return 1 if names else 0
    write(options.directory, names)
    sys.stdout.write("".join(f"wrote {options.directory / name}\n" for name in names))
    if options.freeze:
        sys.stdout.write("".join(f"froze {path}\n" for path in freeze(options.directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
