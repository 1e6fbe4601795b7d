"""`streamsched up` refuses settings before it starts anything: a worker that cannot start would be started again."""

from __future__ import annotations

import pytest

from streamsched.commands import up
from streamsched.errors import UserError


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("STREAMSCHED_POLICY", "nosuch", "unknown policy 'nosuch'"),
        ("STREAMSCHED_RUN_TIMES", "magic", "choose one of said, predicted"),
        ("STREAMSCHED_CONFIG", "/no/such/file.toml", "No such file"),
    ],
)
def test_bad_settings_start_nothing(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(up, "start_stack", lambda *_: pytest.fail("started"))
    with pytest.raises(UserError, match=said), up.running_stack("embedded", None):
        pass


def test_addresses_of_another_cluster_do_not_matter_to_a_stack_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSCHED_KAFKA_BOOTSTRAP", "nowhere")

    def refuse(*_: object) -> None:
        raise UserError("came as far as the stack")

    monkeypatch.setattr(up, "start_stack", refuse)
    with pytest.raises(UserError, match="as far as the stack"), up.running_stack("embedded", None):
        pass
