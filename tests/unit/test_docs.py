"""The documentation names what there is: every setting with its default, and only commands that exist."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import typer

import loadgen.cli
import streamsched.cli
from streamsched.bus import codec
from streamsched.bus.app import GroupTimes
from streamsched.bus.connection import FETCH_WAIT_MS, KafkaConnection
from streamsched.bus.messages import RefusalCode
from streamsched.core.config import SchedulerConfig
from streamsched.core.lifecycle import TRANSITIONS
from streamsched.policy import RULES
from streamsched.service.settings import BOUNDS, CLASS_BOUNDS, TENANT_BOUNDS, Settings
from streamsched.store.connection import RedisConnection

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/settings.md", "docs/operations.md")
PROGRAMS = {"streamsched": streamsched.cli.app, "loadgen": loadgen.cli.app}
_VALUES_OF_THEIR_OWN = {"kafka", "redis", "names", "times", "scheduler"}


def page(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


# --- settings --------------------------------------------------------------------------------------------------------


def settings() -> Iterator[tuple[str, str, Any]]:
    """(variable, name, default) of every setting."""
    yield from ((f"KAFKA_{name.upper()}", name, value) for name, value in defaults(KafkaConnection()))
    yield from ((f"REDIS_{name.upper()}", name, value) for name, value in defaults(RedisConnection()))
    for section in (Settings(), GroupTimes(), SchedulerConfig()):
        yield from ((name.upper(), name, value) for name, value in defaults(section))


def defaults(section: Any) -> Iterator[tuple[str, Any]]:
    names = section.__struct_fields__ if isinstance(section, msgspec.Struct) else names_of(section)
    yield from ((name, getattr(section, name)) for name in names if name not in _VALUES_OF_THEIR_OWN)


def names_of(section: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


def as_written(default: Any) -> str:
    if default is None or default == "":
        return "none"
    if isinstance(default, bool):
        return "`on`" if default else "`off`"
    if isinstance(default, tuple):
        return f"`{','.join(default)}`"
    if isinstance(default, dict):
        return f"`{msgspec.json.encode(default).decode()}`"
    return f"`{int(default)}`" if isinstance(default, float) and default.is_integer() else f"`{default}`"


@pytest.mark.parametrize(("variable", "name", "default"), list(settings()))
def test_settings_page_has_every_setting_with_its_default(variable: str, name: str, default: Any) -> None:
    rows = [line.split("|") for line in page("docs/settings.md").splitlines() if line.startswith(f"| `{name}` |")]
    told = [(row[2].strip(), row[4].strip()) for row in rows]
    assert told == [(f"`STREAMSCHED_{variable}`", as_written(default))]


@pytest.mark.parametrize(("name", "bounds"), [*BOUNDS.items(), ("fetch_wait_ms", FETCH_WAIT_MS)])
def test_settings_page_has_the_bounds_of_every_number(name: str, bounds: tuple[float, float]) -> None:
    [row] = [line.split("|") for line in page("docs/settings.md").splitlines() if line.startswith(f"| `{name}` |")]
    assert row[5].strip() == between(bounds)


def test_settings_page_has_the_bounds_within_tables() -> None:
    for name, bounds in [*TENANT_BOUNDS.items(), ("priority_classes", CLASS_BOUNDS)]:
        [row] = [
            line for line in page("docs/settings.md").splitlines() if line.startswith("| `") and f"`{name}`" in line
        ]
        assert between(bounds) in row or " to ".join(map(str, bounds)) in row


def between(bounds: tuple[float, float]) -> str:
    return " to ".join(str(int(b)) if float(b).is_integer() else str(b) for b in bounds)


def test_settings_page_has_every_policy() -> None:
    [row] = [line for line in page("docs/settings.md").splitlines() if line.startswith("| `policy` |")]
    assert [name for name in RULES if f"`{name}`" not in row] == []


def test_settings_page_has_no_setting_that_is_gone() -> None:
    known = {name for _, name, _ in settings()} | {"prefix"}
    rows = re.findall(r"^\| `([a-z_]+)` \| `STREAMSCHED_", page("docs/settings.md"), re.MULTILINE)
    assert set(rows) - known == set()


# --- commands --------------------------------------------------------------------------------------------------------


def commands(app: typer.Typer) -> set[str]:
    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def code(name: str) -> str:
    """Lines of the page's blocks and inline code."""
    found = re.findall(r"^```\w*\n(.*?)^```$|`([^`\n]+)`", page(name), re.DOTALL | re.MULTILINE)
    return "\n".join(block or inline for block, inline in found)


@pytest.fixture(scope="module", autouse=True)
def mounted() -> None:
    streamsched.cli._mount()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("program", "app"), PROGRAMS.items(), ids=PROGRAMS)
def test_commands_exist(name: str, program: str, app: typer.Typer) -> None:
    told = set(re.findall(rf"^(?:\$ )?{program} ([a-z-]+)", code(name), re.MULTILINE))
    assert told - commands(app) == set()


@pytest.mark.parametrize(("program", "app"), PROGRAMS.items(), ids=PROGRAMS)
def test_readme_tells_of_every_command(program: str, app: typer.Typer) -> None:
    told = set(re.findall(rf"^(?:\$ )?{program} ([a-z-]+)", code("README.md"), re.MULTILINE))
    assert commands(app) - told == set()


@pytest.mark.parametrize("name", PAGES)
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", code(name), re.MULTILINE)) - targets == set()


def test_operations_page_has_every_code_of_a_refusal() -> None:
    codes = re.findall(r"^\| `([a-z-]+)` \|", page("docs/operations.md").partition("## Dead letters")[2], re.MULTILINE)
    assert set(codes) == set(get_args(RefusalCode))


# --- examples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "docs/operations.md"])
def test_python_examples_compile(name: str) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)
    assert examples
    for number, example in enumerate(examples):
        compile(example, f"{name}, example {number}", "exec")


def test_json_examples_are_messages() -> None:
    for example in re.findall(r"^```json\n(.*?)^```", page("README.md"), re.DOTALL | re.MULTILINE):
        codec.decode_placement(example.encode())


def test_lifecycle_diagram_is_the_table() -> None:
    drawn = re.findall(r"^    ([A-Z]+) --> ([A-Z]+): (.+)$", page("ARCHITECTURE.md"), re.MULTILINE)
    ways = {(start, trigger, end) for start, end, triggers in drawn for trigger in triggers.split(", ")}
    assert ways == {(start.name, trigger.value, end.name) for (start, trigger), end in TRANSITIONS.items()}
