"""What a predictor is told of jobs, and what it answers. One protocol for all of them (`Predictor`).

Times are seconds; run times below one second count as one.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from streamsched.core.model import Job, JobSpec, JobState

Floats = NDArray[np.float64]

LEVELS: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Probabilities of the quantiles of an answer; the outer two bound the 90 % interval."""
NAME_LABELS: Final = ("name", "job_name", "family")
"""Labels that may hold a job's name, the first that is there counts."""
SCRIPT_LABELS: Final = ("script", "command")
_DIGITS: Final = re.compile(r"\d+")
_SPLIT: Final = re.compile(r"[^a-z]+")
_TEXT_MAX: Final = 4096
"""Characters of one text that are looked at."""


class Ending(enum.StrEnum):
    """How a run ended. Only the first two say how long such a job runs; of the others it is known that it runs longer
    (they are *censored*)."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CLAMPED = "clamped"
    """Cut by a limit, or by whoever wrote the trace."""

    @property
    def censored(self) -> bool:
        return self in (Ending.CANCELLED, Ending.CLAMPED)


class Features(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a job when it is submitted."""

    gpus: int
    tenant: str = "default"
    user: str = ""
    """Empty: not told; the tenant stands for it."""
    name: str = ""
    queue: str = ""
    labels: dict[str, str] = {}
    job_id: str = ""
    submitted_at: float = 0.0
    """Epoch seconds."""

    @property
    def owner(self) -> str:
        return self.user or self.tenant


class Finished(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job whose run has ended."""

    features: Features
    run_s: float
    ending: Ending = Ending.COMPLETED
    ended_at: float = 0.0

    @property
    def censored(self) -> bool:
        return self.ending.censored


class Quantiles(Struct, frozen=True, kw_only=True):
    """Remaining run time, s: at `LEVELS`, and its mean."""

    at: tuple[float, ...]
    mean_s: float

    @property
    def median_s(self) -> float:
        return self.at[len(self.at) // 2]

    @property
    def interval_s(self) -> tuple[float, float]:
        """The 90 % interval."""
        return self.at[0], self.at[-1]


class Predictor(Protocol):
    """Learns from jobs that have ended, in the order of their ends, and is asked about others at any time."""

    def observe(self, job: Finished) -> None:
        """O(1) amortised; memory is bounded."""
        ...

    def curves(self, jobs: Sequence[Features]) -> Floats:
        """[job, edge] probability that the whole run time exceeds `curves.EDGES_S[edge]`."""
        ...


def features_of(spec: JobSpec) -> Features:
    """Of a job as the core knows it. User, name and queue are labels; without a queue, its priority class is one."""
    labels = spec.labels
    return Features(
        gpus=spec.total_gpus,
        tenant=spec.tenant,
        user=labels.get("user", ""),
        name=next((labels[key] for key in NAME_LABELS if key in labels), ""),
        queue=labels.get("queue", spec.priority_class),
        labels=labels,
        job_id=spec.job_id,
        submitted_at=spec.submitted_at,
    )


def finished_of(job: Job, run_s: float, ended_at: float) -> Finished | None:
    """None for a job that is not over, or a time that is none. `run_s`: of its last run."""
    endings = {
        JobState.COMPLETED: Ending.COMPLETED,
        JobState.FAILED: Ending.FAILED,
        JobState.CANCELLED: Ending.CANCELLED,
    }
    ending = endings.get(job.state)
    if ending is None or not usable(run_s):
        return None
    return Finished(features=features_of(job.spec), run_s=run_s, ending=ending, ended_at=ended_at)


def usable(run_s: float) -> bool:
    """Whether this can be a run time. Clocks that ran backwards and broken reports are not learned from."""
    return math.isfinite(run_s) and run_s >= 0


def gpu_class(gpus: int) -> int:
    """Sizes that are alike: 1, 2, 3-4, 5-8, 9-16, ... as 0, 1, 2, 3, 4, ..."""
    return max(0, math.ceil(math.log2(max(1, gpus))))


@functools.lru_cache(maxsize=1 << 14)
def stem(name: str) -> str:
    """A name without what changes from run to run: `Train_ResNet50-lr3e-4_run17` and `train_resnet50-lr1e-3_run18` are
    the same."""
    return " ".join(tokens(name))


@functools.lru_cache(maxsize=1 << 14)
def tokens(text: str) -> tuple[str, ...]:
    """Words of a name or script in order, lower case, digits and single letters left out."""
    words = _SPLIT.split(_DIGITS.sub(" ", text[:_TEXT_MAX].lower()))
    return tuple(word for word in words if len(word) > 1)
