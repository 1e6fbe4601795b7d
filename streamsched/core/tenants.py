"""What each tenant holds now and has used lately.

Usage decays exponentially, as in Slurm's fair share (PriorityDecayHalfLife): with half-life H and `held` GPUs since
`as_of`, usage at t is  u·d + held·(H / ln 2)·(1 - d)  with  d = 2^(-(t - as_of) / H), in GPU-seconds. The closed form
is exact whatever the interval, so nothing has to be sampled and the value never reaches zero by rounding in steps.
"""

from __future__ import annotations

import math
from collections.abc import Container

from msgspec import Struct

from .model import WHOLE_GPU

_LN2 = math.log(2.0)


class TenantPolicy(Struct, frozen=True, kw_only=True):
    """What a tenant is entitled to."""

    weight: float = 1.0
    """Share of a saturated pool, relative to the other tenants."""
    quota_gpus: float | None = None
    """Most GPUs held at one time; None: no limit."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError("a tenant's weight must be above 0")
        if self.quota_gpus is not None and not self.quota_gpus >= 0:
            raise ValueError("a tenant's quota_gpus must not be below 0")


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


TENANTS_KEPT = 1000
"""Accounts of tenants without settings that are kept while they hold nothing."""


class Accounts:
    """The usage of every tenant that has been charged. Names are free to choose, so those kept are bounded."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, TenantUsage] = {}

    def usage(self, tenant: str) -> TenantUsage:
        return self.by_tenant.get(tenant, _NO_USAGE)

    def charge(self, tenant: str, now: float, half_life_s: float, milli: int) -> None:
        """The tenant takes or gives back `milli` thousandths of GPUs at `now`."""
        self.by_tenant[tenant] = with_change(self.usage(tenant), now, half_life_s, milli)

    def forget_idle(self, now: float, half_life_s: float, keep: Container[str]) -> list[str]:
        """Of those that hold nothing drop the ones with least usage, a tenth of the limit at a time; returns them."""
        if len(self.by_tenant) <= TENANTS_KEPT:
            return []
        idle = [t for t, usage in self.by_tenant.items() if not usage.held_milli and t not in keep]
        idle.sort(key=lambda tenant: (usage_at(self.by_tenant[tenant], now, half_life_s), tenant))
        gone = idle[: max(0, len(idle) - TENANTS_KEPT * 9 // 10)]
        for tenant in gone:
            del self.by_tenant[tenant]
        return gone


_NO_USAGE = TenantUsage()
