"""Models on disk: what is read, what is refused with which words, and the registry."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from model_files import COUNT, made, network

from streamsched.errors import UserError
from streamsched.policy.expression import parse
from streamsched.policy.features import FEATURES_VERSION, INDEX
from streamsched.policy.models import (
    Canary,
    Registry,
    UnusableModel,
    load,
    model_of,
    read_registry,
    write_registry,
)
from streamsched.policy.network import Network

# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_network_is_read_with_its_digest(tmp_path: Path) -> None:
    made(tmp_path, "short")
    model = load(tmp_path, "short", preempts=False)
    assert isinstance(model.program, Network)
    assert model.policy == "model:short"
    assert model.manifest.base == "sjf"
    assert len(model.digest) == 64


def test_an_expression_may_have_remarks_and_ranges(tmp_path: Path) -> None:
    text = "# shortest first, but for\n# those that have waited\n wait_s / 10\n - run_s\n"
    made(
        tmp_path,
        "mine",
        text,
        kind="expression",
        file="rule.txt",
        more="[ranges]\nrun_s = [10, 100]\nwait_s = [0, 9]\n",
    )
    model = load(tmp_path, "mine")
    assert model.program == parse("wait_s / 10 - run_s")
    rows = np.zeros((4, COUNT), np.float32)
    rows[:, INDEX["run_s"]] = [5, 10, 100, 101]
    rows[:, INDEX["gpus"]] = 1e6  # not looked at
    assert model.outside(rows) == {"run_s": 0.5, "wait_s": 0.0}


def test_only_features_that_a_network_looks_at_are_outside(tmp_path: Path) -> None:
    made(tmp_path, "short")
    rows = np.full((2, COUNT), 1e9, np.float32)
    rows[0, INDEX["run_s"]] = 60.0
    assert load(tmp_path, "short").outside(rows) == {"run_s": 0.5}
    assert load(tmp_path, "short").outside(rows[:0]) == {}


def test_what_a_network_does_not_look_at() -> None:
    assert network(run_s=-1.0, gpus=2.0).looked_at == {"run_s", "gpus"}


DAMAGED = bytearray(network(run_s=-1.0).to_bytes())
DAMAGED[-1] ^= 1


@pytest.mark.parametrize(
    ("data", "changes", "said"),
    [
        (bytes(DAMAGED), {}, "model bad, network.bin: cut or damaged"),
        (network(run_s=-1.0).to_bytes()[:-9], {}, "model bad, network.bin: cut or damaged"),
        (b"", {}, "model bad, network.bin: these bytes are no network"),
        (None, {"version": FEATURES_VERSION + 1}, rf"model.toml: features of version {FEATURES_VERSION + 1}, this"),
        (None, {"base": "best"}, "model.toml: base 'best' is no rule"),
        (None, {"kind": "forest"}, "model.toml: Invalid enum value 'forest'"),
        (None, {"regime": "mixed"}, "model.toml: Invalid enum value 'mixed'"),
        (None, {"more": f"unknown = {'9' * 5_000}\n"}, "model.toml: Exceeds the limit"),
        (None, {"more": "unknown = 1\n"}, "model.toml: Object contains unknown field `unknown`"),
        (None, {"more": "base = 1\n"}, "model.toml: Cannot overwrite a value"),
        (None, {"more": "[ranges]\nspeed = [0, 1]\n"}, "ranges: no feature 'speed'"),
        (None, {"more": "[ranges]\ngpus = [1, 1]\n"}, "ranges: gpus from 1 to 1 is no range"),
        (None, {"more": "[ranges]\ngpus = [nan, 1]\n"}, "ranges: gpus from nan to 1 is no range"),
        ("run_s +", {"kind": "expression"}, "network.bin: expression: "),
        ("speed", {"kind": "expression"}, "network.bin: expression: no feature 'speed'"),
        (b"\xff", {"kind": "expression"}, "network.bin: 'utf-8' codec"),
        (None, {"regime": "preemptive"}, "trained with preemption: the setting `preempt` has to be score or rank"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(
    tmp_path: Path, data: bytes | str | None, changes: dict[str, str], said: str
) -> None:
    made(tmp_path, "bad", data, **changes)  # type: ignore[arg-type]
    with pytest.raises(UnusableModel, match=said) as raised:
        load(tmp_path, "bad", preempts=False)
    assert "\n" not in str(raised.value)


def test_a_model_without_preemption_is_not_for_pools_with_it(tmp_path: Path) -> None:
    made(tmp_path, "plain")
    made(tmp_path, "both", regime="any")
    with pytest.raises(UnusableModel, match="trained without preemption: the setting `preempt` has to be off or class"):
        load(tmp_path, "plain", preempts=True)
    assert load(tmp_path, "both", preempts=True).name == load(tmp_path, "both", preempts=False).name == "both"


@pytest.mark.parametrize("name", ["../short", "..", ".", "", "a/b", "/etc", "-x", "a" * 65, "x\0y", "ü"])
def test_a_name_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    made(tmp_path, "short")
    with pytest.raises(UnusableModel, match="is no name"):
        load(tmp_path / "inner", name)


@pytest.mark.parametrize("file", ["../../secret", "/etc/passwd", ".hidden", "a/b"])
def test_a_manifest_names_a_file_beside_it(tmp_path: Path, file: str) -> None:
    where = made(tmp_path, "short")
    (where / "model.toml").write_text((where / "model.toml").read_text().replace("network.bin", file))
    with pytest.raises(UnusableModel, match="is no name of a file beside it"):
        load(tmp_path, "short")


def test_links_may_lead_within_the_folder_and_not_out_of_it(tmp_path: Path) -> None:
    """Kubernetes mounts a ConfigMap as links to a folder beside them."""
    folder, outside = tmp_path / "models", tmp_path / "elsewhere"
    made(folder, "..data-1")
    (folder / "short").symlink_to("..data-1")
    assert load(folder, "short").name == "short"
    made(outside, "theirs")
    (folder / "theirs").symlink_to(outside / "theirs")
    with pytest.raises(UnusableModel, match="leads out of"):
        load(folder, "theirs")
    (folder / "loop").symlink_to("loop")
    with pytest.raises(UnusableModel, match="model loop"):
        load(folder, "loop")


def test_what_is_no_plain_file_is_not_opened(tmp_path: Path) -> None:
    where = made(tmp_path, "pipe")
    (where / "network.bin").unlink()
    os.mkfifo(where / "network.bin")
    with pytest.raises(UnusableModel, match="is no file"):
        load(tmp_path, "pipe")
    (where / "network.bin").unlink()
    with pytest.raises(UnusableModel, match="no such file"):
        load(tmp_path, "pipe")
    with (where / "network.bin").open("wb") as file:
        file.truncate(1 << 25)
    with pytest.raises(UnusableModel, match="33,554,432 bytes, 16,777,216 at most"):
        load(tmp_path, "pipe")


def test_policies_that_ask_for_a_model() -> None:
    assert model_of("model") == ""
    assert model_of("model:mine") == "mine"
    assert model_of("fcfs") is None
    assert model_of("models") is None


# ── the registry ─────────────────────────────────────────────────────────────────────────────────────────────────────

FULL = Registry(
    default="one", base="las", shadow="two", canary=Canary("three", fraction=0.05, tenants=("team-a", "team/b"))
)


@pytest.mark.parametrize("registry", [FULL, Registry(), Registry(default="one"), Registry(canary=FULL.canary)])
def test_a_registry_is_read_as_it_was_written(tmp_path: Path, registry: Registry) -> None:
    write_registry(tmp_path, registry)
    assert read_registry(tmp_path) == registry
    assert [path.name for path in tmp_path.iterdir()] == ["registry.toml"]


def test_writing_keeps_the_permissions_and_fails_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_registry(tmp_path, FULL)
    path = tmp_path / "registry.toml"
    path.chmod(0o640)
    write_registry(tmp_path, Registry())
    assert path.stat().st_mode & 0o777 == 0o640

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="no space left on device"):
        write_registry(tmp_path, FULL)
    assert read_registry(tmp_path) == Registry()
    assert [one.name for one in tmp_path.iterdir()] == ["registry.toml"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('default = "../x"', "'../x' is no name of a model"),
        ('base = "best"', "base 'best' is no rule"),
        ("default = 1", "Expected `str`, got `int`"),
        ('defualt = "x"', "unknown field `defualt`"),
        ("default = ", "Invalid value"),
        (f"default = {'9' * 5_000}", "Exceeds the limit"),
        (f"default = {'[' * 5_000}", "recursion"),
        ('default = "\\ud800"', "not a Unicode scalar value"),
        ('[canary]\nmodel = "x"', "give a fraction above 0, or tenants"),
        ('[canary]\nmodel = "x"\nfraction = 1.5', "fraction 1.5: expected a number from 0 to 1"),
        ('[canary]\nmodel = "x"\nfraction = nan', "fraction nan: expected"),
        ('[canary]\nmodel = ""\nfraction = 0.5', "canary: name a model"),
        ("[canary]\nfraction = 0.5", "missing required field `model`"),
    ],
)
def test_a_bad_registry_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "registry.toml").write_text(text)
    with pytest.raises(UnusableModel, match=said) as raised:
        read_registry(tmp_path)
    assert "registry.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_models_of_this_repository_can_be_used() -> None:
    folder = Path(__file__).parent.parent.parent / "models"
    registry = read_registry(folder)
    names = sorted(path.parent.name for path in folder.glob("*/model.toml"))
    assert registry.default in names
    assert [load(folder, name).name for name in names] == names
