"""`streamsched train rl`: where its settings come from, and what is told when it cannot run."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from streamsched.commands import train
from streamsched.errors import UserError
from streamsched.learn.rl_config import RlConfig, read_config
from streamsched.learn.windows import drawn_instance


def failing(*args: object) -> str:
    result = CliRunner().invoke(train.train_app, [str(a) for a in args])
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    return str(result.exception)


def test_every_setting_is_an_option() -> None:
    told = CliRunner().invoke(train.train_app, ["rl", "--help"], env={"COLUMNS": "200"}).output
    for one in fields(RlConfig):
        assert f"--{one.name.replace('_', '-')}" in told, one.name
        assert one.metadata["help"]


def test_without_torch_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "streamsched.learn.ppo", raising=False)
    told = failing("rl", "--trace", "jobs.csv", "--nodes", "1x8", "--out", tmp_path)
    assert told == "reinforcement learning needs torch: pip install 'streamsched[train]'"


@pytest.mark.parametrize(
    ("text", "told"),
    [("updates = 3\nwarm = 1\n", "unknown key `warm`"), ('clip = "x"\n', "Expected `float`"), ("=", "is no TOML file")],
)
def test_settings_that_make_no_sense_are_said(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=told):
        read_config(path)
    assert told in failing("rl", "--config", path, "--out", tmp_path)


def test_options_have_limits(tmp_path: Path) -> None:
    assert "clip -1.0: expected more than 0" in failing("rl", "--clip", -1, "--out", tmp_path)
    assert "expected best" in failing("rl", "--base", "lifo", "--out", tmp_path)
    with pytest.raises(UserError, match="more than the whole"):
        RlConfig(train_share=0.8, validation_share=0.3)


def test_parts_do_not_overlap_and_the_last_is_not_looked_at() -> None:
    whole = drawn_instance(0, jobs=400)
    learned_from, validation, unseen_from_s = train._parts(whole, RlConfig(warm_jobs=50, base="sjf"))
    submit = whole.jobs.submit_s
    assert unseen_from_s == pytest.approx(submit[0] + 0.75 * (submit[-1] - submit[0]))
    middle = submit[0] + 0.5 * (submit[-1] - submit[0])
    assert len(learned_from.jobs) == int((submit < middle).sum())
    assert validation.new == int(((submit >= middle) & (submit < unseen_from_s)).sum())
    new = validation.instance.jobs.gpus[-validation.new :]
    assert np.array_equal(new, whole.jobs.gpus[len(learned_from.jobs) :][: validation.new])
