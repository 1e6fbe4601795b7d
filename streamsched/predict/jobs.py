"""What a predictor is told of jobs, and what it answers (`predictor.py` has the protocol).

Times are seconds; run times below one second count as one. Texts come from users and may be of any length and content:
what is kept of them is cut.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Callable
from typing import Final, TypeVar

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
_SPLIT: Final = re.compile(r"[\W\d_]+")
"""What is no letter, of whatever script."""
TEXT_MAX: Final = 1024
"""Characters of one text that are looked at."""
_WORD_MAX: Final = 32
_PART_MAX: Final = 64
"""Characters of one part of a key: memory is bounded by the number of keys only if they are."""
_GPU_CLASS_MAX: Final = 20


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


_T = TypeVar("_T")


def kept_with_job(make: Callable[[Features], _T]) -> Callable[[Features], _T]:
    """Made once for each `Features`: jobs that wait or run are asked about again and again, and most of the time went
    into making the texts of their keys."""
    name = f"{make.__module__}.{make.__qualname__}"

    @functools.wraps(make)
    def kept(job: Features) -> _T:
        found: _T | None = job.__dict__.get(name)
        if found is None:
            found = job.__dict__[name] = make(job)
        return found

    return kept


class Features(Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
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
    steps: float = 0.0
    """Training steps it had done when it ended; 0: not told."""

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


def finished_of(job: Job, run_s: float, ended_at: float, steps: float = 0.0) -> Finished | None:
    """None for a job that is not over, or a time that is none. `run_s`: of its last run; `steps`: as reported."""
    endings = {
        JobState.COMPLETED: Ending.COMPLETED,
        JobState.FAILED: Ending.FAILED,
        JobState.CANCELLED: Ending.CANCELLED,
    }
    ending = endings.get(job.state)
    if ending is None or not usable(run_s):
        return None
    return Finished(features=features_of(job.spec), run_s=run_s, ending=ending, ended_at=ended_at, steps=steps)


def usable(run_s: float) -> bool:
    """Whether this can be a run time. Clocks that ran backwards and broken reports are not learned from."""
    return math.isfinite(run_s) and run_s >= 0


def gpu_class(gpus: int) -> int:
    """Sizes that are alike: 1, 2, 3-4, 5-8, 9-16, ... as 0, 1, 2, 3, 4, ..."""
    return min(math.ceil(math.log2(max(1, gpus))), _GPU_CLASS_MAX)


def part(text: str) -> str:
    """As it stands in a key."""
    return text if len(text) <= _PART_MAX else text[:_PART_MAX]


def stem(name: str) -> str:
    """A name without what changes from run to run, as part of a key: `Train_ResNet50-lr3e-4_run17` and
    `train_resnet50-lr1e-3_run18` are the same."""
    return _stem(name[:TEXT_MAX])


def tokens(text: str) -> tuple[str, ...]:
    """Words of a name or script in order, lower case, digits and single letters left out."""
    return _tokens(text[:TEXT_MAX])


@functools.lru_cache(maxsize=1 << 12)
def _stem(name: str) -> str:
    return part(" ".join(_tokens(name)))


@functools.lru_cache(maxsize=1 << 12)
def _tokens(text: str) -> tuple[str, ...]:
    words = _SPLIT.split(_DIGITS.sub(" ", text.lower()))
    return tuple(word[:_WORD_MAX] for word in words if len(word) > 1)
