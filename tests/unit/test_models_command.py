"""`streamsched models`: what is listed, what is written, and what is refused before it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_files import made
from typer.testing import CliRunner

from streamsched.commands.models import models_app
from streamsched.errors import CheckFailed, UserError
from streamsched.policy.models import Canary, Registry, read_registry, write_registry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made(tmp_path, "one")
    made(tmp_path, "two", "wait_s - run_s", kind="expression", file="rule.txt", regime="any")
    made(tmp_path, "broken", b"no network")
    return tmp_path


def models(folder: Path, *arguments: str) -> str:
    """Raises what the command raised."""
    done = CliRunner().invoke(models_app, [*arguments, "--models-dir", str(folder)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_the_list_says_what_each_is_used_as_and_what_is_wrong(folder: Path) -> None:
    write_registry(folder, Registry(default="one", shadow="two", canary=Canary("two", 0.25, ("a", "b"))))
    rows = {line.split()[0]: " ".join(line.split()) for line in models(folder, "list").splitlines()}
    assert rows["one"].startswith("one default network plain sjf ")
    assert rows["one"].endswith(" yes")
    assert "shadow, canary (25% of the jobs and 2 tenants) expression any sjf" in rows["two"]
    assert rows["broken"] == "broken model broken, network.bin: these bytes are no network"
    told = json.loads(models(folder, "list", "--json"))
    assert [row["name"] for row in told["models"]] == ["broken", "one", "two"]
    assert told["registry"]["canary"] == {"model": "two", "fraction": 0.25, "tenants": ["a", "b"]}
    assert told["problem"] == ""


def test_the_list_has_what_the_registry_names_and_nobody_has(folder: Path) -> None:
    write_registry(folder, Registry(default="gone"))
    rows = {row["name"]: row for row in json.loads(models(folder, "list", "--json"))["models"]}
    assert rows["gone"]["used_as"] == "default"
    assert rows["gone"]["problem"].endswith("no such file or directory")


def test_a_list_without_a_registry_says_that_rules_rank(folder: Path) -> None:
    assert "registry.toml: no such file or directory: until there is one, rules rank" in models(folder, "list")
    assert json.loads(models(folder, "list", "--json"))["problem"].endswith("no such file or directory")


def test_use_shadow_and_canary_change_their_own_part(folder: Path) -> None:
    models(folder, "use", "one")
    models(folder, "use", "--base", "las")
    models(folder, "shadow", "two")
    models(folder, "canary", "two", "--fraction", "0.1", "--tenant", "b", "--tenant", "a", "--tenant", "b")
    canary = Canary("two", 0.1, ("b", "a"))
    assert read_registry(folder) == Registry(default="one", base="las", shadow="two", canary=canary)
    models(folder, "shadow", "--off")
    models(folder, "use", "two", "--base", "sjf")
    assert read_registry(folder) == Registry(default="two", base="sjf", canary=canary)
    models(folder, "canary", "--off")
    assert models(folder, "use", "--off").startswith("ranks: the base rule; workers look once a second")
    assert read_registry(folder) == Registry(base="sjf")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["use", "broken"], "these bytes are no network"),
        (["use", "nobody"], "model nobody: .*no such file"),
        (["use", "../one"], "is no name"),
        (["use"], "give a NAME, or --off"),
        (["use", "one", "--off"], "give a NAME, or --off"),
        (["use", "--base", "best"], "unknown policy 'best'"),
        (["shadow", "broken"], "these bytes are no network"),
        (["shadow"], "models shadow: give a NAME, or --off"),
        (["shadow", "one", "--off"], "models shadow: give a NAME, or --off"),
        (["canary", "broken", "--fraction", "0.1"], "these bytes are no network"),
        (["canary", "one"], "give a fraction above 0, or tenants"),
        (["canary", "one", "--fraction", "2"], "fraction 2: expected a number from 0 to 1"),
        (["canary", "one", "--fraction", "nan"], "fraction nan: expected"),
        (["canary", "--off", "--fraction", "0.5"], "--off goes without a share"),
    ],
)
def test_what_is_refused_changes_nothing(folder: Path, arguments: list[str], said: str) -> None:
    before = Registry(default="two", shadow="one")
    write_registry(folder, before)
    with pytest.raises(UserError, match=said):
        models(folder, *arguments)
    assert read_registry(folder) == before


def test_a_registry_that_cannot_be_read_is_not_written_over(folder: Path) -> None:
    (folder / "registry.toml").write_text("default = ")
    with pytest.raises(UserError, match=r"registry of models: .*registry.toml: Invalid value"):
        models(folder, "use", "one")
    assert (folder / "registry.toml").read_text() == "default = "


def test_check_tells_what_a_model_is(folder: Path) -> None:
    network = models(folder, "check", "one")
    assert "layers of 15 x 1 units" in network
    assert "trained from sjf, for pools of regime plain" in network
    assert "wait_s - run_s" in models(folder, "check", "two")
    with pytest.raises(CheckFailed, match="these bytes are no network"):
        models(folder, "check", "broken")


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"models folder .*nowhere: not there; name it by --models-dir"):
        models(tmp_path / "nowhere", "list")
    monkeypatch.setenv("STREAMSCHED_MODELS_DIR", str(tmp_path / "elsewhere"))
    done = CliRunner().invoke(models_app, ["list"])
    assert "elsewhere: not there" in str(done.exception)
