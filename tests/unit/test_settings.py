"""All settings from the environment or a file by one rule, each checked where it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamsched.errors import UserError
from streamsched.service.settings import _VARIABLES, BOUNDS, Settings, unknown_variables

VALUES = {int: ("7", 7), float: ("2.5", 2.5), str: ("greedy", "greedy"), tuple[str, ...]: ("a, b", ("a", "b"))}


def section_of(settings: Settings, section: str) -> object:
    return getattr(settings, section) if section else settings


@pytest.mark.parametrize("variable", sorted(v for v, (_, _, kind) in _VARIABLES.items() if kind in VALUES))
def test_every_setting_has_a_variable(variable: str) -> None:
    section, name, kind = _VARIABLES[variable]
    text, value = ("0.5", 0.5) if name == "mip_gap" else VALUES[kind]
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
        ("windows_s = 1\n", "no setting windows_s: is window_s meant?"),
        ("[scheduler]\nlease = 1\n", "no setting scheduler.lease: is lease_s meant?"),
        ("window_s = inf\n", "window_s = inf: expected a number from 0 to 60"),
        ("group = ''\n", "group = '': '' is no name"),
        ("[scheduler]\nusage_half_life_s = nan\n", "scheduler.usage_half_life_s = nan: expected a number from 1"),
        ("[scheduler.tenants.a]\nquota_gpu = 4\n", "tenant a: 'quota_gpu' is no setting of a tenant: is quota_gpus"),
        ("window_s = 'x'\n", "window_s = 'x'"),
        ("times = 3\n", "times is a table"),
        ("pools = []\n", "at least one pool"),
        ("window_s = \n", "s.toml"),
        (f"window_s = {'9' * 5_000}\n", "s.toml: Exceeds the limit"),
    ],
)
def test_a_bad_file_is_told(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(content)
    with pytest.raises(UserError, match=said):
        Settings.from_env({"STREAMSCHED_CONFIG": str(path)})


# --- what is absurd --------------------------------------------------------------------------------------------------

NUMBERS = sorted(v for v, (_, _, kind) in _VARIABLES.items() if kind in (int, float))


def refusal(variable: str, text: str) -> str:
    with pytest.raises(UserError) as refused:
        Settings.from_env({variable: text})
    line = str(refused.value)
    assert line.startswith(f"{variable}=")
    assert "\n" not in line
    assert len(line) < 400
    assert refused.value.exit_code == 2
    return line


def test_every_number_has_bounds_and_its_default_is_within() -> None:
    assert set(BOUNDS) == {_VARIABLES[variable][1] for variable in NUMBERS}
    for variable in NUMBERS:
        section, name, _ = _VARIABLES[variable]
        assert BOUNDS[name][0] <= getattr(section_of(Settings(), section), name) <= BOUNDS[name][1]


@pytest.mark.parametrize("variable", NUMBERS)
@pytest.mark.parametrize(
    "text", ["1e9999", "1e300", "-1e300", "-1", "nan", "inf", "-inf", "9" * 400, "\u00b2", " ", "1_0"]
)
def test_no_number_can_be_absurd(variable: str, text: str) -> None:
    refusal(variable, text)


@pytest.mark.parametrize("variable", NUMBERS)
def test_the_bounds_themselves_are_taken_and_what_is_beyond_is_not(variable: str) -> None:
    _, name, kind = _VARIABLES[variable]
    low, high = BOUNDS[name]
    env = {"STREAMSCHED_SESSION_S": "1800"} if name == "heartbeat_s" else {"STREAMSCHED_HEARTBEAT_S": "0.01"}
    for bound in (low, high):
        Settings.from_env(env | {variable: repr(kind(bound))})
    for beyond in (low - 1, high + 1):
        assert f"from {low:g}" in refusal(variable, repr(kind(beyond)))


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("STREAMSCHED_SESSION_S", "1e9", "expected a number from 0.1 to 1800"),
        ("STREAMSCHED_PARTITIONS", "-3", "from 1 to"),
        ("STREAMSCHED_PLACEMENT", "magic", "milp or greedy"),
        ("STREAMSCHED_HEARTBEAT_S", "10", "below STREAMSCHED_SESSION_S=10"),
        ("STREAMSCHED_USAGE_HALF_LIFE_S", "0", "expected a number from 1"),
        ("STREAMSCHED_KAFKA_FETCH_WAIT_MS", "99999999999999999999", "expected a whole number from 1 to 10000"),
        ("STREAMSCHED_KAFKA_FETCH_WAIT_MS", "0", "expected a whole number from 1 to 10000"),
        ("STREAMSCHED_KAFKA_FETCH_WAIT_MS", "\u00b2", "expected a whole number"),
        ("STREAMSCHED_KAFKA_IDEMPOTENCE", "of", "on or off"),
        ("STREAMSCHED_TOPIC_PREFIX", "a b", "letters, digits"),
        ("STREAMSCHED_GROUP", "a{b}", "is no name"),
        ("STREAMSCHED_POLICY", " ", "is no name"),
        ("STREAMSCHED_POOLS", "a,a", "named twice"),
        ("STREAMSCHED_TENANTS", '{"a": {"quota_gpus": 1e308}}', "tenant a: quota_gpus: expected a number from 0 to"),
        ("STREAMSCHED_TENANTS", '{"a": {"quota_gpus": -1}}', "quota_gpus must not be below 0"),
        ("STREAMSCHED_TENANTS", '{"a": {"weight": 1e-300}}', "tenant a: weight: expected a number from 0.001"),
        ("STREAMSCHED_TENANTS", '{"a": {"qouta_gpus": 4}}', "'qouta_gpus' is no setting of a tenant: is quota_gpus"),
        ("STREAMSCHED_TENANTS", '{"a": {"gpus": 4}}', "'gpus' is no setting of a tenant"),
        ("STREAMSCHED_TENANTS", '{"": {"weight": 1}}', "is no name"),
        ("STREAMSCHED_TENANTS", "[]", "object"),
        ("STREAMSCHED_PRIORITY_CLASSES", '{"gold": 99999999999999999999}', "gold: expected a number from -1000"),
        ("STREAMSCHED_PRIORITY_CLASSES", "[" * 10_000, "STREAMSCHED_PRIORITY_CLASSES"),
    ],
)
def test_absurd_values_are_one_clear_line(variable: str, text: str, said: str) -> None:
    assert said in refusal(variable, text)


@pytest.mark.parametrize("bootstrap", ["h:0x1", "h:\u00b2", "h:99999", "h:" + "9" * 5000])
def test_a_port_is_a_port(bootstrap: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        Settings.from_env({"STREAMSCHED_KAFKA_BOOTSTRAP": bootstrap})


def test_variables_that_nothing_reads_are_told(caplog: pytest.LogCaptureFixture) -> None:
    env = {
        "STREAMSCHED_WINDOWS_S": "1",
        "STREAMSCHED_KAFKA_BOOTSTRAPS": "a:1",
        "STREAMSCHED_ZZZ": "1",
        "STREAMSCHED_TEST_STACK": "local",
        "STREAMSCHED_TRACES": "/t",
        "STREAMSCHED_SERVICE_HOST": "10.0.0.1",
        "STREAMSCHED_PORT_9092_TCP_ADDR": "10.0.0.1",
        "STREAMSCHED_KAFKA_BOOTSTRAP": "a:1",
        "OTHER": "1",
    }
    assert unknown_variables(env) == [
        "STREAMSCHED_KAFKA_BOOTSTRAPS is no setting and has no effect: is STREAMSCHED_KAFKA_BOOTSTRAP meant?",
        "STREAMSCHED_WINDOWS_S is no setting and has no effect: is STREAMSCHED_WINDOW_S meant?",
        "STREAMSCHED_ZZZ is no setting and has no effect",
    ]
    Settings.from_env(env)
    assert len(caplog.records) == 3


def test_whether_runs_are_preempted_is_one_of_three_words() -> None:
    assert Settings.from_env({"STREAMSCHED_PREEMPT": "class"}).scheduler.preempt == "class"
    with pytest.raises(UserError, match="STREAMSCHED_PREEMPT='yes'"):
        Settings.from_env({"STREAMSCHED_PREEMPT": "yes"})
