"""Rules that training begins with: each ranks by one feature, so that a network can be exactly it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FEATURE_OF: Final[Mapping[str, tuple[str, float]]] = {
    "fcfs": ("wait_s", 1.0),
    "lcfs": ("wait_s", -1.0),
    "sjf": ("run_s", -1.0),
    "smallest": ("gpus", -1.0),
    "qssf": ("work_gpu_s", -1.0),
    "las": ("attained_gpu_s", -1.0),
}
"""[rule] (feature of `policy.features`, sign): the highest product goes first. `las` is for preemption."""
