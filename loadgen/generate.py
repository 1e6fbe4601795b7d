"""Seeded synthetic workloads with the shape of real GPU clusters.

Four things are drawn, each from its own stream of the seed, so that changing one option leaves the others as they were:

- **Sizes**: GPUs per job, from the profile's table.
- **Durations**: a mixture of lognormals (short debugging runs, the bulk, long training) whose upper end is replaced by
  a Pareto tail cut at `duration_max_s`; jobs of more GPUs run longer by (min(GPUs, 8))^`size_exponent`.
- **Arrivals**: jobs come in batches (one user's sweep). The rate of batches is diurnal x an hourly level that wanders
  (lognormal AR(1)); given their number, the points of such a process are uniform in operational time, which is how they
  are drawn. Most batches are small (geometric), a few are large (log-uniform), with short gaps inside.
- **Tenants**: Zipf, one per batch.

The profiles were fitted by eye to real traces: `philly` to Microsoft Philly 2017, `venus` to SenseTime Helios Venus
2020 (median, mean and upper quantiles of durations, the table of sizes, batch sizes and hourly counts). Not
modelled: weekly rhythm, likeness of jobs within a batch beyond their tenant, failures and resubmissions.

Only `Random.random` is used, whose sequence Python promises for a seed: equal seed, equal bytes on any version.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from statistics import NormalDist
from typing import Final

from streamsched.errors import UserError

from .jobs import TraceJob

_HOUR: Final = 3600.0
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one cluster's workload looks like."""

    gpu_share: dict[int, float]
    """GPUs -> share of jobs."""
    duration_mix: tuple[tuple[float, float, float], ...]
    """(share, mean, standard deviation) of ln(seconds) for one GPU."""
    size_exponent: float
    tail_from_s: float
    """Durations beyond this follow a Pareto law of exponent `tail_alpha`."""
    tail_alpha: float
    duration_max_s: float
    rate_per_h: float
    diurnal_amplitude: float
    """0..1: the rate swings between (1 - a) and (1 + a) times its mean."""
    peak_hour: float
    level_sigma: float
    """Standard deviation of ln(hourly level)."""
    level_memory: float
    """Correlation of the level from one hour to the next."""
    batch_mean: float
    """Mean of the small batches."""
    sweep_share: float
    """Share of batches that are large."""
    sweep_sizes: tuple[float, float]
    gap_s: float
    """Median gap within a batch."""
    tenants: int
    tenant_skew: float
    """Exponent of the Zipf law."""


PROFILES: Final = {
    "philly": Profile(
        gpu_share={1: 0.938, 2: 0.019, 4: 0.0226, 8: 0.018, 12: 0.0001, 16: 0.0017, 24: 0.0001, 32: 0.0005},
        duration_mix=((0.17, 4.16, 0.3), (0.314, 7.49, 0.57), (0.516, 7.2, 2.1)),
        size_exponent=1.2,
        tail_from_s=200_000.0,
        tail_alpha=1.38,
        duration_max_s=4_600_000.0,
        rate_per_h=68.6,
        diurnal_amplitude=0.3,
        peak_hour=6.0,
        level_sigma=0.6,
        level_memory=0.5,
        batch_mean=1.9,
        sweep_share=0.06,
        sweep_sizes=(12.0, 500.0),
        gap_s=5.0,
        tenants=13,
        tenant_skew=1.4,
    ),
    "venus": Profile(
        gpu_share={
            1: 0.5113, 2: 0.049, 3: 0.001, 4: 0.0748, 5: 0.001, 6: 0.001, 7: 0.0021, 8: 0.2543, 12: 0.001, 16: 0.0513,
            24: 0.0101, 32: 0.0236, 40: 0.003, 48: 0.0032, 56: 0.0017, 64: 0.0017, 80: 0.0019, 160: 0.0025,
        },
        duration_mix=((0.74, 5.2, 2.35), (0.153, 5.03, 0.41), (0.107, 10.85, 0.85)),
        size_exponent=0.1,
        tail_from_s=100_000.0,
        tail_alpha=1.4,
        duration_max_s=172_800.0,
        rate_per_h=31.2,
        diurnal_amplitude=0.75,
        peak_hour=16.0,
        level_sigma=0.6,
        level_memory=0.7,
        batch_mean=1.3,
        sweep_share=0.003,
        sweep_sizes=(20.0, 500.0),
        gap_s=12.0,
        tenants=25,
        tenant_skew=1.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """How many jobs of which profile, and what to change of it.

    The rate is the profile's unless `rate_per_h` is given, or `load`: the work offered per second as a share of
    `cluster_gpus` (over the time in which jobs arrive). `burstiness` scales batches and wandering: 1 as in the trace,
    0 a Poisson process. `duration_scale` multiplies all durations, `duration_max_s` cuts them.
    """

    jobs: int
    seed: int = 1
    profile: str = "philly"
    rate_per_h: float | None = None
    load: float | None = None
    cluster_gpus: int | None = None
    burstiness: float = 1.0
    duration_scale: float = 1.0
    duration_max_s: float | None = None
    gpus_max: int | None = None
    tenants: int | None = None
    start_s: float = 0.0


def generate(options: WorkloadOptions) -> list[TraceJob]:
    """`options.jobs` jobs by submit time, first at `options.start_s`."""
    profile = _validated(options)
    sizes = _sizes(profile, options)
    durations, clamped = _durations(profile, options, sizes)
    rate_per_s = _rate_per_s(profile, options, sizes, durations)
    submits, tenants = _arrivals(profile, options, rate_per_s)
    return [
        TraceJob(
            index=i,
            line=i + 2,
            submit_s=submits[i],
            duration_s=durations[i],
            gpus=sizes[i],
            tenant=tenants[i],
            clamped=clamped[i],
        )
        for i in range(options.jobs)
    ]


def _validated(options: WorkloadOptions) -> Profile:
    if options.profile not in PROFILES:
        raise UserError(f"unknown profile {options.profile!r}: use one of {', '.join(sorted(PROFILES))}")
    checks = (
        (options.jobs >= 1, "the number of jobs must be at least 1"),
        (options.burstiness >= 0 and math.isfinite(options.burstiness), "the burstiness must be 0 or more"),
        (_positive(options.duration_scale), "the duration scale must be more than 0"),
        (options.duration_max_s is None or _positive(options.duration_max_s), "the maximum duration must be over 0 s"),
        (options.rate_per_h is None or _positive(options.rate_per_h), "the rate must be more than 0 jobs per hour"),
        (options.load is None or _positive(options.load), "the load must be more than 0"),
        (options.rate_per_h is None or options.load is None, "give a rate or a load, not both"),
        (options.load is None or (options.cluster_gpus or 0) >= 1, "a load needs the GPUs of the cluster"),
        (options.tenants is None or options.tenants >= 1, "the number of tenants must be at least 1"),
        (options.gpus_max is None or options.gpus_max >= 1, "the largest job must have at least 1 GPU"),
    )
    for holds, message in checks:
        if not holds:
            raise UserError(f"workload: {message}")
    profile = PROFILES[options.profile]
    return replace(profile, tenants=options.tenants) if options.tenants else profile


def _positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def _stream(options: WorkloadOptions, name: str) -> Random:
    return Random(f"{options.seed}/{name}")


def _picker(weights: Sequence[float]) -> Callable[[Random], int]:
    """Draws an index with probability in proportion to its weight."""
    steps = list(accumulate(weights))

    def pick(rng: Random) -> int:
        return min(bisect.bisect_right(steps, rng.random() * steps[-1]), len(steps) - 1)

    return pick


def _normal(rng: Random) -> float:
    return _NORMAL.inv_cdf(max(rng.random(), 1e-12))


def _sizes(profile: Profile, options: WorkloadOptions) -> list[int]:
    rng, gpus, pick = _stream(options, "sizes"), list(profile.gpu_share), _picker(list(profile.gpu_share.values()))
    return [min(gpus[pick(rng)], options.gpus_max or gpus[-1]) for _ in range(options.jobs)]


def _durations(profile: Profile, options: WorkloadOptions, sizes: list[int]) -> tuple[list[float], list[bool]]:
    rng, pick = _stream(options, "durations"), _picker([share for share, _, _ in profile.duration_mix])
    limit_s = min(profile.duration_max_s, options.duration_max_s or math.inf)
    seconds = [
        _duration(profile, rng, pick) * min(gpus, 8) ** profile.size_exponent * options.duration_scale for gpus in sizes
    ]
    return [round(min(max(s, 1.0), limit_s), 3) for s in seconds], [s > limit_s for s in seconds]


def _duration(profile: Profile, rng: Random, pick: Callable[[Random], int]) -> float:
    _, mean, deviation = profile.duration_mix[pick(rng)]
    seconds: float = math.exp(mean + deviation * _normal(rng))
    if seconds <= profile.tail_from_s:
        return seconds
    tail_s: float = profile.tail_from_s * (1.0 - rng.random()) ** (-1.0 / profile.tail_alpha)
    return tail_s


def _rate_per_s(profile: Profile, options: WorkloadOptions, sizes: list[int], durations: list[float]) -> float:
    if options.load is None or options.cluster_gpus is None:
        return (options.rate_per_h or profile.rate_per_h) / _HOUR
    gpu_s_per_job = sum(g * d for g, d in zip(sizes, durations, strict=True)) / options.jobs
    return options.load * options.cluster_gpus / gpu_s_per_job


def _arrivals(profile: Profile, options: WorkloadOptions, rate_per_s: float) -> tuple[list[float], list[str]]:
    """Submit times in order, the first at `start_s`, and the tenant of each."""
    rng = _stream(options, "arrivals")
    batches = _batch_sizes(profile, options, rng)
    starts = _batch_starts(profile, options, len(batches), options.jobs / rate_per_s, rng)
    pick_tenant = _picker([1.0 / rank**profile.tenant_skew for rank in range(1, profile.tenants + 1)])
    gap_s = min(profile.gap_s, 0.5 / rate_per_s)  # a batch is denser than the stream it is in, at any rate
    arrivals: list[tuple[float, int]] = []
    for start_s, size in zip(starts, batches, strict=True):
        tenant, at = pick_tenant(rng), start_s
        for _ in range(size):
            arrivals.append((at, tenant))
            at += gap_s * math.exp(_normal(rng))
    arrivals.sort()
    origin = options.start_s - arrivals[0][0]
    return [round(at + origin, 3) for at, _ in arrivals], [f"tenant-{tenant:02d}" for _, tenant in arrivals]


def _batch_sizes(profile: Profile, options: WorkloadOptions, rng: Random) -> list[int]:
    """Sizes that add up to the number of jobs. No batch is over a tenth of the workload."""
    stop = 1.0 - 1.0 / (1.0 + (profile.batch_mean - 1.0) * options.burstiness)
    low, high = profile.sweep_sizes
    largest = max(1, options.jobs // 10)
    sizes: list[int] = []
    left = options.jobs
    while left:
        if rng.random() < profile.sweep_share * min(options.burstiness, 1.0):
            size = int(low * (high / low) ** rng.random())
        else:
            size = 1 + (int(math.log(1.0 - rng.random()) / math.log(stop)) if stop > 0 else 0)
        sizes.append(min(size, largest, left))
        left -= sizes[-1]
    return sizes


def _batch_starts(profile: Profile, options: WorkloadOptions, count: int, span_s: float, rng: Random) -> list[float]:
    """`count` points on [0, span_s) of a process with the wandering diurnal rate, in order.

    The rate is constant within a step: an hour, or less for short workloads.
    """
    step_s = min(_HOUR, span_s / 20.0)
    steps = min(math.ceil(span_s / step_s), 1_000_000)
    step_s = span_s / steps
    elapsed = list(accumulate(_levels(profile, options, steps, step_s, rng)))  # operational time at each step's end
    points = sorted(rng.random() * elapsed[-1] for _ in range(count))
    starts = []
    for point in points:
        step = min(bisect.bisect_right(elapsed, point), steps - 1)
        before = elapsed[step - 1] if step else 0.0
        starts.append((step + (point - before) / (elapsed[step] - before)) * step_s)
    return starts


def _levels(profile: Profile, options: WorkloadOptions, steps: int, step_s: float, rng: Random) -> list[float]:
    sigma = profile.level_sigma * options.burstiness
    amplitude = profile.diurnal_amplitude * min(options.burstiness, 1.0)
    memory = profile.level_memory
    level, levels = _normal(rng), []
    for step in range(steps):
        hour = (options.start_s + (step + 0.5) * step_s) / _HOUR
        diurnal = 1.0 + amplitude * math.cos((hour - profile.peak_hour) * math.pi / 12.0)
        levels.append(diurnal * math.exp(sigma * max(-6.0, min(level, 6.0))))
        level = memory * level + math.sqrt(1.0 - memory**2) * _normal(rng)
    return levels
