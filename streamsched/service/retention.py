"""Is a finished job remembered for longer than its arrival can be read once more?

A consumer group that lost its offsets reads `jobs.arrivals` from the beginning. An arrival whose job is remembered is
recognised; one whose job is forgotten is a new job, which runs again. Of the other inputs none needs this: those routed
to a pool are known by their offsets, and a command or report on what is forgotten is refused or absorbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from streamsched.bus.admin import Change
from streamsched.bus.topics import ARRIVALS

from .settings import Settings

_MARGIN_S = 3600.0
"""The broker looks now and then what is old enough, and clocks differ."""


def unsafe_keep(settings: Settings, changes: Iterable[Change]) -> str | None:
    """What is wrong, in one line; None when all is well. `changes`: how the topics differ from their declaration."""
    topic = settings.names.arrivals
    found = {change.setting: change.found for change in changes if change.topic == topic and change.kind == "config"}
    kept_s = _kept_s(dict(ARRIVALS.configs) | {name: value for name, value in found.items() if value is not None})
    keep_s = settings.scheduler.finished_keep_s
    if kept_s is None:
        return (
            f"{topic} is kept for ever and finished jobs for {keep_s:.0f} s: if the group's offsets are lost, jobs "
            "that have ended run again. Give the topic a retention (`streamsched topics apply`)"
        )
    if keep_s >= kept_s + _MARGIN_S:
        return None
    return (
        f"finished jobs are remembered for {keep_s:.0f} s, {topic} is kept for up to {kept_s:.0f} s (retention.ms and "
        "segment.ms): if the group's offsets are lost, jobs that have ended run again. "
        f"Set STREAMSCHED_FINISHED_KEEP_S to {kept_s + _MARGIN_S:.0f} or more"
    )


def _kept_s(configs: Mapping[str, str]) -> float | None:
    """How old a message can get; None when there is no limit. Only whole segments are deleted."""
    retention_ms, segment_ms = int(configs["retention.ms"]), int(configs["segment.ms"])
    if retention_ms < 0 or "delete" not in configs["cleanup.policy"]:
        return None
    return (retention_ms + segment_ms) / 1000
