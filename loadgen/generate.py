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
modelled: weekly rhythm, and, but for `generate_recurrent`, likeness of jobs within a batch beyond their tenant.

`generate_recurrent` gives the jobs users and names: most are another run of something the user has run before, as in
production (65 % of the tasks of Alibaba PAI had at least five runs: Weng et al., "MLaaS in the Wild", NSDI'22), so
that predicting from history can be tested.

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
    submits, tenants, _ = _arrivals(profile, options, rate_per_s)
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


def _arrivals(
    profile: Profile, options: WorkloadOptions, rate_per_s: float
) -> tuple[list[float], list[str], list[int]]:
    """Submit times in order, the first at `start_s`, and the tenant and the batch of each."""
    rng = _stream(options, "arrivals")
    batches = _batch_sizes(profile, options, rng)
    starts = _batch_starts(profile, options, len(batches), options.jobs / rate_per_s, rng)
    pick_tenant = _picker([1.0 / rank**profile.tenant_skew for rank in range(1, profile.tenants + 1)])
    gap_s = min(profile.gap_s, 0.5 / rate_per_s)  # a batch is denser than the stream it is in, at any rate
    arrivals: list[tuple[float, int, int]] = []
    for batch, (start_s, size) in enumerate(zip(starts, batches, strict=True)):
        tenant, at = pick_tenant(rng), start_s
        for _ in range(size):
            arrivals.append((at, tenant, batch))
            at += gap_s * math.exp(_normal(rng))
    arrivals.sort()
    origin = options.start_s - arrivals[0][0]
    return (
        [round(at + origin, 3) for at, _, _ in arrivals],
        [f"tenant-{tenant:02d}" for _, tenant, _ in arrivals],
        [batch for _, _, batch in arrivals],
    )


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


# ── recurrent users and job families ─────────────────────────────────────────────────────────────────────────────────

_VERBS: Final = ("train", "finetune", "pretrain", "eval", "distill")
_MODELS: Final = ("resnet", "bert", "unet", "llama", "vit", "whisper", "yolo", "gnn", "tabular", "diffusion")
_DATA: Final = ("imagenet", "wiki", "coco", "speech", "logs", "clicks", "genome", "traffic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Who submits, and how alike the runs of one family are."""

    users_per_tenant: int = 6
    user_skew: float = 1.0
    """Exponent of the Zipf law of a tenant's users."""
    recurrent_share: float = 0.8
    """Share of batches that run something of the user's families; the others are run once."""
    families_per_user: int = 5
    family_skew: float = 1.0
    run_sigma: float = 0.3
    """Standard deviation of ln(duration) within a family."""
    failed_share: float = 0.1
    """Share of runs that fail, after a part of their duration that is uniform in its logarithm down to 1 s."""
    cancelled_share: float = 0.05
    """Share of runs that their users end, likewise."""
    lifetime_runs: float = 200.0
    """Mean runs after which a family gives way to a new one (geometric)."""


@dataclass(frozen=True, slots=True)
class RecurrentJob:
    """`job.duration_s` is how long it really runs, whatever ends it."""

    job: TraceJob
    user: str
    name: str
    """With the number of the run in it, as users do."""
    ending: str
    """completed, failed or cancelled."""


@dataclass(slots=True)
class _Family:
    name: str
    gpus: int
    duration_s: float
    runs: int = 0


def generate_recurrent(options: WorkloadOptions, recurrence: Recurrence | None = None) -> list[RecurrentJob]:
    """Jobs that arrive as those of `generate` (which is not changed by this), with sizes and durations by family.

    A family's size and median duration are drawn by the profile's laws, so the mix of all jobs is about the profile's.
    All jobs of a batch are of one user and one family.
    """
    told = recurrence or Recurrence()
    _check_recurrence(told)
    profile = _validated(options)
    sizes = _sizes(profile, options)
    rate_per_s = _rate_per_s(profile, options, sizes, _durations(profile, options, sizes)[0])
    submits, tenants, batches = _arrivals(profile, options, rate_per_s)
    draw, of_batch = _Families(profile, options, told), dict[int, tuple[str, _Family]]()
    jobs = []
    for i, (submit_s, tenant, batch) in enumerate(zip(submits, tenants, batches, strict=True)):
        if batch not in of_batch:
            of_batch[batch] = draw.family(tenant)
        user, family = of_batch[batch]
        family.runs += 1
        duration_s, clamped, ending = draw.run(family)
        job = TraceJob(
            index=i,
            line=i + 2,
            submit_s=submit_s,
            duration_s=duration_s,
            gpus=family.gpus,
            tenant=tenant,
            clamped=clamped,
        )
        jobs.append(RecurrentJob(job, user, f"{family.name}-run{family.runs}", ending))
    return jobs


def _check_recurrence(told: Recurrence) -> None:
    shares = (told.recurrent_share, told.failed_share, told.cancelled_share)
    if not all(0 <= share <= 1 for share in shares) or told.failed_share + told.cancelled_share > 1:
        raise UserError("workload: shares of recurrent, failed and cancelled jobs are between 0 and 1")
    if told.users_per_tenant < 1 or told.families_per_user < 1 or not told.lifetime_runs >= 1:
        raise UserError("workload: at least one user, one family and one run of it are needed")
    if not (0 <= told.user_skew < 100 and 0 <= told.family_skew < 100):
        raise UserError("workload: the exponents of users and families are 0 or more, and below 100")
    if not (told.run_sigma >= 0 and math.isfinite(told.run_sigma)):
        raise UserError("workload: the deviation within a family must be 0 or more")


class _Families:
    """Draws users, their families and the runs of these, each from its own stream."""

    def __init__(self, profile: Profile, options: WorkloadOptions, told: Recurrence) -> None:
        self.profile, self.options, self.told = profile, options, told
        self.users, self.families, self.runs = (_stream(options, name) for name in ("users", "families", "runs"))
        self.pick_user = _zipf(told.users_per_tenant, told.user_skew)
        self.pick_family = _zipf(told.families_per_user, told.family_skew)
        self.pick_size, self.gpus = _picker(list(profile.gpu_share.values())), list(profile.gpu_share)
        self.pick_mix = _picker([share for share, _, _ in profile.duration_mix])
        self.limit_s = min(profile.duration_max_s, options.duration_max_s or math.inf)
        self.of_user: dict[str, list[_Family | None]] = {}

    def family(self, tenant: str) -> tuple[str, _Family]:
        """A user of the tenant, and what is run next."""
        user = f"{tenant}-user-{self.pick_user(self.users):02d}"
        if self.users.random() >= self.told.recurrent_share:
            return user, self._new()
        place = self.pick_family(self.users)
        known = self.of_user.setdefault(user, [None] * self.told.families_per_user)
        family = known[place]
        if family is None or self.users.random() < 1.0 / self.told.lifetime_runs:
            family = known[place] = self._new()
        return user, family

    def _new(self) -> _Family:
        rng, profile, options = self.families, self.profile, self.options
        gpus = min(self.gpus[self.pick_size(rng)], options.gpus_max or self.gpus[-1])
        name = "_".join(words[int(rng.random() * len(words))] for words in (_VERBS, _MODELS, _DATA))
        seconds = _duration(profile, rng, self.pick_mix) * min(gpus, 8) ** profile.size_exponent
        return _Family(name, gpus, seconds * options.duration_scale)

    def run(self, family: _Family) -> tuple[float, bool, str]:
        """(duration in s, whether it was cut, how it ended) of one run."""
        rng = self.runs
        whole_s = family.duration_s * math.exp(self.told.run_sigma * _normal(rng))
        ending, part = rng.random(), rng.random()
        clamped = whole_s > self.limit_s
        whole_s = min(max(whole_s, 1.0), self.limit_s)
        if ending >= self.told.failed_share + self.told.cancelled_share:
            return round(whole_s, 3), clamped, "completed"
        return round(whole_s**part, 3), False, "failed" if ending < self.told.failed_share else "cancelled"


def _zipf(count: int, skew: float) -> Callable[[Random], int]:
    return _picker([1.0 / rank**skew for rank in range(1, count + 1)])
