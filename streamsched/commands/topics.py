"""`streamsched topics`: make the topics, compare them with their declarations, show what goes on them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from streamsched.bus import codec, schemas
from streamsched.bus.admin import Change, apply_topics, diff_topics
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.samples import SAMPLES
from streamsched.bus.topics import BY_NAME, DEFAULT_PARTITIONS, TopicDeclaration, TopicNames
from streamsched.errors import EXIT_FAILED, UserError

topics_app = typer.Typer(help="Make, compare and show the Kafka topics.", no_args_is_help=True)

Bootstrap = Annotated[
    str | None, typer.Option("--bootstrap", help="HOST:PORT[,HOST:PORT...]; default STREAMSCHED_KAFKA_BOOTSTRAP.")
]
Prefix = Annotated[
    str | None, typer.Option("--prefix", help="Put before every topic's name; default STREAMSCHED_TOPIC_PREFIX.")
]
Partitions = Annotated[int, typer.Option("--partitions", min=1, help="Of every topic; cannot be changed later.")]
Replication = Annotated[
    int | None, typer.Option("--replication", min=1, help="Replicas of each partition; default is the broker's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]


@topics_app.command()
def apply(
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    partitions: Partitions = DEFAULT_PARTITIONS,
    replication: Replication = None,
    as_json: AsJson = False,
) -> None:
    """Create missing topics and set configs as declared. Exit 1 when something is still not as declared."""
    connection, names = _target(bootstrap, prefix)
    changes = asyncio.run(apply_topics(connection, names, partitions, replication))
    _report(changes, as_json)


@topics_app.command()
def diff(
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    partitions: Partitions = DEFAULT_PARTITIONS,
    as_json: AsJson = False,
) -> None:
    """Compare the cluster with the declarations. Exit 1 when they differ, 2 when no broker answers."""
    connection, names = _target(bootstrap, prefix)
    changes = asyncio.run(diff_topics(connection, names, partitions))
    _report(changes, as_json)


@topics_app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a topic, without prefix.")],
    as_json: AsJson = False,
) -> None:
    """Show one topic: who writes and reads it, its settings, where its schema is, and a sample message."""
    declaration = BY_NAME.get(name)
    if declaration is None:
        raise UserError(f"no topic {name!r}; there are {', '.join(BY_NAME)}")
    sample = json.loads(codec.encode(SAMPLES[name][0]))
    if as_json:
        typer.echo(json.dumps(_facts(declaration) | {"sample": sample}, indent=2, ensure_ascii=False))
        return
    table = Table(show_header=False, box=None)
    for fact, value in _facts(declaration).items():
        table.add_row(fact, "\n".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value))
    console = Console()
    console.print(table)
    console.print("sample")
    typer.echo(json.dumps(sample, indent=2, ensure_ascii=False))


def _target(bootstrap: str | None, prefix: str | None) -> tuple[KafkaConnection, TopicNames]:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what it would say comes as one line from us
    names = TopicNames.from_env() if prefix is None else TopicNames(prefix)
    return KafkaConnection.from_env().with_bootstrap(bootstrap), names


def _report(changes: list[Change], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_change(change) for change in changes], indent=2))
    else:
        _print_changes(changes)
    if any(change.is_difference for change in changes):
        raise typer.Exit(EXIT_FAILED)


def _change(change: Change) -> dict[str, Any]:
    return dataclasses.asdict(change) | {"difference": change.is_difference}


def _print_changes(changes: list[Change]) -> None:
    console = Console()
    told = [change for change in changes if change.kind != "unreported"]
    if told:
        table = Table("topic", "setting", "declared", "found", "state")
        for change in told:
            table.add_row(change.topic, change.setting, change.wanted, change.found or "-", _state(change))
        console.print(table)
    else:
        console.print("All topics are as declared." if not changes else "No difference found.")
    for note in dict.fromkeys(change.note for change in told if change.note):
        console.print(f"Note: {note}.", highlight=False)
    if unreported := len(changes) - len(told):
        console.print(f"{unreported} settings are not reported by this broker and could not be compared.")


def _state(change: Change) -> str:
    if change.done:
        return "created" if change.kind == "missing" else "changed"
    return "missing" if change.kind == "missing" else "differs"


def _facts(declaration: TopicDeclaration) -> dict[str, Any]:
    return {
        "topic": declaration.name,
        "summary": declaration.summary,
        "key": declaration.key,
        "written by": declaration.written_by,
        "read by": declaration.read_by,
        "messages": ", ".join(type_.__name__ for type_ in declaration.types),
        "partitions": f"{DEFAULT_PARTITIONS} by default"
        + (", the same for all topics of the group" if declaration.partition_group == "shared" else ""),
        "configs": dict(declaration.configs),
        "schema": str(schemas.DIRECTORY / declaration.name / "schema.json"),
    }
