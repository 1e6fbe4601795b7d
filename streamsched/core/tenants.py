"""What each tenant holds now and has used lately.

Usage decays exponentially, as in Slurm's fair share (PriorityDecayHalfLife): with half-life H and `held` GPUs since
`as_of`, usage at t is  u·d + held·(H / ln 2)·(1 - d)  with  d = 2^(-(t - as_of) / H), in GPU-seconds. The closed form
is exact whatever the interval, so nothing has to be sampled and the value never reaches zero by rounding in steps.
"""

from __future__ import annotations

import math

from msgspec import Struct

from .model import WHOLE_GPU

_LN2 = math.log(2.0)


class TenantPolicy(Struct, frozen=True, kw_only=True):
    """What a tenant is entitled to."""

    weight: float = 1.0
    """Share of a saturated pool, relative to the other tenants."""
    quota_gpus: float | None = None
    """Most GPUs held at one time; None: no limit."""


class TenantUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Stored per tenant. `usage_gpu_s` is as of `as_of`."""

    held_milli: int = 0
    usage_gpu_s: float = 0.0
    as_of: float = 0.0


def usage_at(usage: TenantUsage, now: float, half_life_s: float) -> float:
    """Decayed usage in GPU-seconds at `now`."""
    decay = math.exp2(-max(0.0, now - usage.as_of) / half_life_s)
    return usage.usage_gpu_s * decay + usage.held_milli / WHOLE_GPU * half_life_s / _LN2 * (1.0 - decay)


def with_change(usage: TenantUsage, now: float, half_life_s: float, milli: int) -> TenantUsage:
    """The tenant takes (or, negative, gives back) `milli` thousandths of GPUs at `now`."""
    return TenantUsage(
        held_milli=usage.held_milli + milli,
        usage_gpu_s=usage_at(usage, now, half_life_s),
        as_of=max(now, usage.as_of),
    )
