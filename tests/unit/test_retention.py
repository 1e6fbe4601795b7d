"""A finished job is remembered for longer than its arrival can be read once more, or a worker says so."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from streamsched.bus.admin import Change
from streamsched.bus.topics import ARRIVALS
from streamsched.service.retention import unsafe_keep
from streamsched.service.settings import Settings

DAY_S = 86400.0


def keeping(seconds: float) -> Settings:
    settings = Settings()
    return dataclasses.replace(settings, scheduler=msgspec.structs.replace(settings.scheduler, finished_keep_s=seconds))


def found(setting: str, value: str) -> Change:
    return Change("jobs.arrivals", "config", setting, ARRIVALS.configs[setting], value)


def test_the_defaults_are_safe() -> None:
    assert unsafe_keep(Settings(), []) is None
    assert unsafe_keep(Settings(), [Change("jobs.arrivals", "unreported", "retention.ms", "1")]) is None


@pytest.mark.parametrize("days", [1.0, 7.0, 8.0])
def test_a_shorter_memory_than_the_topic_is_said(days: float) -> None:
    line = unsafe_keep(keeping(days * DAY_S), [])
    assert line is not None
    assert "STREAMSCHED_FINISHED_KEEP_S to 694800" in line
    assert unsafe_keep(keeping(694800), []) is None


def test_it_is_the_retention_that_the_topic_has() -> None:
    longer = [found("retention.ms", str(int(30 * DAY_S * 1000)))]
    assert "kept for up to 2678400 s" in str(unsafe_keep(Settings(), longer))
    shorter = [found("retention.ms", "3600000"), found("segment.ms", "600000")]
    assert unsafe_keep(keeping(3 * 3600.0), shorter) is None


@pytest.mark.parametrize(("setting", "value"), [("retention.ms", "-1"), ("cleanup.policy", "compact")])
def test_a_topic_kept_for_ever(setting: str, value: str) -> None:
    assert "kept for ever" in str(unsafe_keep(Settings(), [found(setting, value)]))
