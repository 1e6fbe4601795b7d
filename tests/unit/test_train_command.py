"""`streamsched train`: where its settings come from, what is written, and what is told when it cannot run."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from streamsched.commands import train
from streamsched.errors import UserError
from streamsched.learn import cards
from streamsched.learn.es_config import EsConfig
from streamsched.learn.rl_config import RlConfig, read_config
from streamsched.learn.windows import drawn_instance
from streamsched.policy.network import load


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


# ── evolution strategies ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    given = drawn_instance(0, jobs=400).jobs
    rows = zip(given.submit_s.tolist(), given.duration_s.tolist(), given.gpus.tolist(), strict=True)
    lines = ["job_id,submit_s,duration_s,gpus", *(f"{i},{s:.3f},{r:.3f},{g}" for i, (s, r, g) in enumerate(rows))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(("base", "regime"), [("las", "preemptive"), ("smallest", "plain")])
def test_a_model_is_written_and_the_same_command_ends_at_once(
    trace: Path, tmp_path: Path, base: str, regime: str
) -> None:
    out = tmp_path / "model"
    told = ["es", "--trace", str(trace), "--nodes", "4x8", "--out", str(out), "--estimates", "none", "--base", base]
    told += ["--generations", "1", "--pairs", "1", "--hidden", "2", "--window-days", "0.2", "--seeds", "4,5"]
    result = CliRunner().invoke(train.train_app, told, catch_exceptions=False)
    assert f"of the cost of {base} on the choosing part" in result.stdout
    model = tomllib.loads((out / "model.toml").read_text())
    assert (model["kind"], model["file"], model["regime"]) == ("network", "network.bin", regime)
    networks = [load(out / f"{name}.bin") for name in ("network", "seed-4", "seed-5")]
    assert networks[0].digest in {network.digest for network in networks[1:]}
    assert bool(networks[0].levels_gpu_s) == (regime == "preemptive")
    training = cards.read_training(out)
    assert training.seeds == [4, 5]
    assert training.run_times == "nothing is seen of them"
    before = (out / "network.bin").read_bytes()
    assert CliRunner().invoke(train.train_app, told, catch_exceptions=False).stdout == result.stdout
    assert (out / "network.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--seeds", "a"], "--seeds a: expected whole numbers, such as 1,2,3"),
        (["--load", "2:1"], "--load 2:1: expected FROM:TO, such as 0.9:1.1"),
        (["--cluster", "1"], "--cluster 1: expected FROM:TO, such as 0.9:1.1"),
        (["--base", "best"], "no base 'best'"),
        (["--limit", "3"], "too few jobs to learn from and to choose by"),
    ],
)
def test_what_makes_no_sense_is_said(trace: Path, tmp_path: Path, options: list[str], expected: str) -> None:
    out = tmp_path / "model"
    assert expected in failing("es", "--trace", trace, "--nodes", "4x8", "--out", out, "--estimates", "none", *options)
    assert not (out / "network.bin").exists()


def test_a_rule_of_any_base_is_named_and_the_time_left_is_told(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    told = ["es", "--trace", str(trace), "--nodes", "4x8", "--out", str(out), "--estimates", "none", "--base", "lcfs"]
    told += ["--generations", "11", "--pairs", "1", "--hidden", "1", "--window-days", "0.2"]
    result = CliRunner().invoke(train.train_app, told, catch_exceptions=False)
    assert tomllib.loads((out / "model.toml").read_text())["base"] == "lcfs"
    lines = [line for line in result.stderr.splitlines() if line.startswith("seed 1, generation")]
    assert [line.rsplit("; ", 1)[1].lstrip("0123456789") for line in lines] == [
        "time left not known yet", " s left", " s left",
    ]  # fmt: skip


def test_defaults_are_those_of_the_configuration(trace: Path, tmp_path: Path) -> None:
    told = ["es", "--trace", str(trace), "--nodes", "4x8", "--out", str(tmp_path / "model"), "--estimates", "none"]
    CliRunner().invoke(train.train_app, [*told, "--generations", "1", "--pairs", "1"], catch_exceptions=False)
    written = json.loads((tmp_path / "model" / "training.json").read_text())["searches"][str(EsConfig.seed)]["config"]
    expected = json.loads(json.dumps(asdict(EsConfig(generations=1, pairs=1))))
    assert written == expected


def test_the_time_left_follows_what_was_done_since_the_first_line() -> None:
    moments = iter([100.0, 110.0, 130.0, 3_100.0])
    pace = train._Pace(50, lambda: next(moments))
    assert pace.left(20) == "time left not known yet"
    assert pace.left(25) == "50 s left"
    assert pace.left(30) == "60 s left"
    assert pace.left(40) == "25 min left"
