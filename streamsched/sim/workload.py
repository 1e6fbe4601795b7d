"""Jobs and nodes of a simulation, and how they become what the core knows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Final

from streamsched.core.model import WHOLE_GPU, JobSpec, NodeSpec
from streamsched.errors import UserError

WHOLE_NODE_GPUS: Final = 8
SIGMA_MAX: Final = 10.0
"""Of noise: by e^10 and more an estimate says nothing, and its tail is no number any more."""


@dataclass(frozen=True, slots=True)
class SimJob:
    """One job: what the scheduler is told of it (`spec`) and what only the simulation knows (`run_s`)."""

    spec: JobSpec
    run_s: float
    """Run time without interruption, on the fastest of its GPU types, s."""
    clamped: bool = False
    """`run_s` is a lower bound: whoever made the trace cut it."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """What the scheduler believes of run times.

    `none`: nothing. `user`: what the trace says users said. `true`: the run time (rules that look at it are oracles).
    `noisy`: the run time times exp(sigma N(0, 1)), drawn once per job. `predicted`: what is learned from jobs that have
    finished by then (`learning.py`).
    """

    kind: str
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Estimates:
        """`none`, `user`, `true`, `predicted` or `noisy:SIGMA`."""
        kind, _, sigma = text.partition(":")
        if kind == "noisy":
            try:
                value = float(sigma)
            except ValueError:
                value = math.nan
            if not 0 <= value <= SIGMA_MAX:
                raise UserError(
                    f"--estimates {text}: expected noisy:SIGMA with a number of 0 to {SIGMA_MAX:g}, as noisy:0.5"
                )
            return cls(kind, value)
        if kind not in ("none", "user", "true", "predicted") or sigma:
            raise UserError(f"--estimates {text}: expected none, user, true, predicted or noisy:SIGMA")
        return cls(kind)

    @property
    def are_true(self) -> bool:
        return self.kind == "true" or (self.kind == "noisy" and self.sigma == 0)

    def __str__(self) -> str:
        return f"{self.kind}:{self.sigma:g}" if self.kind == "noisy" else self.kind

    def of(self, run_s: float, user_s: float | None, random: Random) -> float | None:
        match self.kind:
            case "user":
                return user_s
            case "true":
                return run_s
            case "noisy":
                return run_s * math.exp(self.sigma * random.gauss(0.0, 1.0))
        return None


def gang(gpus: int, whole: int) -> tuple[int, int, int]:
    """(workers, GPUs of each, GPUs of one more): a job that fits one node is one worker, a larger one takes whole
    nodes of `whole` GPUs and the rest on one more."""
    if gpus <= whole:
        return 1, gpus, 0
    workers, rest = divmod(gpus, whole)
    return workers, whole, rest


def job(
    number: int,
    submit_s: float,
    run_s: float,
    gpus: int,
    tenant: str = "default",
    estimate_s: float | None = None,
    preemptible: bool = False,
    whole: int = WHOLE_NODE_GPUS,
    gpu_milli: int = WHOLE_GPU,
    gpu_types: tuple[str, ...] = (),
    clamped: bool = False,
) -> SimJob:
    """`number` is the job's place in the trace and becomes its id; `whole`: GPUs of the cluster's largest nodes;
    `gpu_milli`: thousandths of the one GPU that it takes a part of; `gpu_types`: that it may run on, empty for any."""
    workers, each, rest = gang(gpus, whole)
    spec = JobSpec(
        job_id=f"j{number}",
        submitted_at=submit_s,
        tenant=tenant,
        estimate_s=estimate_s,
        preemptible=preemptible,
        workers=workers,
        gpus_per_worker=each,
        remainder_gpus=rest,
        gpu_milli=gpu_milli,
        gpu_types=gpu_types,
    )
    return SimJob(spec, run_s, clamped)


def is_share(job: SimJob) -> bool:
    """Whether it takes a part of a device."""
    return job.spec.gpu_milli != WHOLE_GPU


def nodes_of(groups: Iterable[tuple[int, int, str]]) -> list[NodeSpec]:
    """(count, GPUs, type) of each group; names in order."""
    found: list[NodeSpec] = []
    for count, gpus, gpu_type in groups:
        found += [NodeSpec(node_id=f"n{len(found) + i:05}", gpu_type=gpu_type, gpus=gpus) for i in range(count)]
    return found


def in_order(jobs: Sequence[SimJob]) -> bool:
    return all(a.spec.submitted_at <= b.spec.submitted_at for a, b in pairwise(jobs))
