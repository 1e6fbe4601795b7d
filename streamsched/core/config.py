"""The settings that decisions depend on. They are journalled with each epoch, so that a replay decides the same."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct, field

from .tenants import TenantPolicy


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    policy: str = "fcfs"
    priority_classes: dict[str, int] = field(default_factory=lambda: {"low": -1, "normal": 0, "high": 1})
    """Jobs of a higher class go first whatever their score; a name that is not here counts as 0."""
    backfill: Literal["skip", "none", "easy", "conservative"] = "skip"
    """What happens behind a job that has no room now. `skip`: later ones may start; `none`: none does before it (strict
    order); `easy`: those that do not delay it, by what is believed of run times (`core/shadow.py`);
    `conservative`: those that delay none of the jobs before them that have no room. Whatever it is, jobs that wait too
    long get reservations. Backoffs and quotas hold up nobody else."""
    window_jobs: int = 64
    """Jobs per MILP at most."""
    lease_s: float = 60.0
    """A placement that is not started within this time is revoked."""
    backoff_s: float = 2.0
    """First wait of a job after a refusal; doubles with each refusal in a row."""
    backoff_max_s: float = 600.0
    quarantine_after: int = 5
    """Refusals in a row by one node after which it gets no new runs for `quarantine_s`."""
    quarantine_s: float = 600.0
    finished_keep_s: float = 10 * 86400.0
    """How long a finished job is remembered; the same id after that is a new job.

    Longer than `jobs.arrivals` is kept (7 days and a segment of one): else an arrival read once more would run again.
    """
    reserve_after_s: float = 24 * 3600.0
    """A job that has waited longer gets a reservation that other jobs may not delay."""
    reservations_max: int = 4
    """Jobs with a reservation at one time."""
    tenants: dict[str, TenantPolicy] = {}
    """What is set for single tenants; the others have weight 1 and no quota."""
    usage_half_life_s: float = 168 * 3600.0
    """Half-life of a tenant's usage in the fair share."""
    preempt: Literal["off", "class", "score", "rank"] = "off"
    """Whether running preemptible jobs make room. `class`: for jobs of a higher priority class; `score`: for any job
    that the policy ranks better, where that is worth what the stop costs; `rank`: for any job that is ranked better,
    whatever it costs, as preemptive policies (LAS, SRPT, Gittins) are published."""
    preempt_interval_s: float = 300.0
    """A run is not told to make room before it has run so long, nor a job again before so long after the last time."""
    preempt_victims_max: int = 32
    """Runs that one window may consider."""
    restart_s: float = 60.0
    """What starting again costs a preempted job, beside what it did since its last checkpoint."""
    lost_grace_s: float = 30.0
    """How long a run on a node thought lost is waited for before its job is queued again."""

    @property
    def preempts_within_class(self) -> bool:
        return self.preempt in ("score", "rank")

    def __post_init__(self) -> None:
        """What no state could be kept with. Narrower bounds are for what is set anew (`service.settings`): a journal of
        earlier settings has to stay readable."""
        if not (math.isfinite(self.usage_half_life_s) and self.usage_half_life_s > 0):
            raise ValueError("usage_half_life_s must be above 0")
