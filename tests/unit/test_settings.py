"""All settings from the environment or a file by one rule, each checked where it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamsched.errors import UserError
from streamsched.service.settings import _VARIABLES, Settings

VALUES = {int: ("7", 7), float: ("2.5", 2.5), str: ("greedy", "greedy"), tuple[str, ...]: ("a, b", ("a", "b"))}


def section_of(settings: Settings, section: str) -> object:
    return getattr(settings, section) if section else settings


@pytest.mark.parametrize("variable", sorted(v for v, (_, _, kind) in _VARIABLES.items() if kind in VALUES))
def test_every_setting_has_a_variable(variable: str) -> None:
    section, name, kind = _VARIABLES[variable]
    text, value = VALUES[kind]
    assert getattr(section_of(Settings.from_env({variable: text}), section), name) == value


def test_tables_are_json() -> None:
    settings = Settings.from_env({"STREAMSCHED_PRIORITY_CLASSES": '{"gold": 5}'})
    assert settings.scheduler.priority_classes == {"gold": 5}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("STREAMSCHED_WINDOW_S", "fast"),
        ("STREAMSCHED_WINDOW_S", "-1"),
        ("STREAMSCHED_WINDOW_S", "nan"),
        ("STREAMSCHED_SESSION_S", "0"),
        ("STREAMSCHED_PARTITIONS", "0"),
        ("STREAMSCHED_PARTITIONS", "2.5"),
        ("STREAMSCHED_POOLS", " , "),
        ("STREAMSCHED_PLACEMENT", "random"),
        ("STREAMSCHED_PRIORITY_CLASSES", "{gold"),
        ("STREAMSCHED_PRIORITY_CLASSES", '{"gold": "first"}'),
    ],
)
def test_a_bad_value_names_its_variable(variable: str, text: str) -> None:
    with pytest.raises(UserError, match=variable):
        Settings.from_env({variable: text})


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('group = "g"\nwindow_s = 1\n[times]\nsession_s = 20\n[scheduler]\npolicy = "sjf"\nlease_s = 5\n')
    settings = Settings.from_env({"STREAMSCHED_CONFIG": str(path), "STREAMSCHED_LEASE_S": "9"})
    assert (settings.group, settings.window_s, settings.times.session_s) == ("g", 1.0, 20.0)
    assert (settings.scheduler.policy, settings.scheduler.lease_s) == ("sjf", 9.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("windows_s = 1\n", "no setting windows_s"),
        ("[scheduler]\nlease = 1\n", "no setting scheduler.lease"),
        ("window_s = 'x'\n", "window_s = 'x'"),
        ("times = 3\n", "times is a table"),
        ("pools = []\n", "at least one pool"),
        ("window_s = \n", "s.toml"),
    ],
)
def test_a_bad_file_is_told(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(content)
    with pytest.raises(UserError, match=said):
        Settings.from_env({"STREAMSCHED_CONFIG": str(path)})


def test_whether_runs_are_preempted_is_one_of_three_words() -> None:
    assert Settings.from_env({"STREAMSCHED_PREEMPT": "class"}).scheduler.preempt == "class"
    with pytest.raises(UserError, match="STREAMSCHED_PREEMPT='yes'"):
        Settings.from_env({"STREAMSCHED_PREEMPT": "yes"})
