"""Classic rules. A score is a finite float, higher first; ties go by order of arrival (the core sorts stably)."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import numpy as np

from streamsched.core.cluster import ClusterState
from streamsched.core.model import WHOLE_GPU, Job
from streamsched.core.run_times import attained_gpu_s, ran_s
from streamsched.core.tenants import TenantPolicy, usage_at

from . import formulas
from .gittins import in_steps


class FirstComeFirstServed:
    """Order of arrival in the pool. With the window's candidates this is FCFS with backfill and no reservation."""

    name = "fcfs"
    static = True

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        return [-float(job.seq) for job in jobs]


class Smallest:
    """Fewest GPUs first ("feasible-smallest", as the window leaves out what does not fit now)."""

    name = "smallest"
    static = True

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        return [-float(job.spec.total_gpu_milli) for job in jobs]


UNKNOWN_RUN_S = 86_400.0
"""What a job counts as of whose run time nothing is known, in rules that look at run times."""


class ByFormula:
    """A classic rule of `formulas.py`, by run times as believed at submission. `origin_s`: see there, for F1 to F4."""

    def __init__(self, name: str, formula: formulas.Formula, origin_s: float = 0.0) -> None:
        self.name, self._formula, self._origin_s = name, formula, origin_s
        self.static = name in formulas.STATIC

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        columns = np.array(
            [
                (
                    job.seq,
                    job.spec.submitted_at,
                    UNKNOWN_RUN_S if whole_s is None else whole_s,
                    job.spec.total_gpu_milli / WHOLE_GPU,
                )
                for job, whole_s in zip(jobs, state.run_times.whole_s(jobs), strict=True)
            ],
            dtype=np.float64,
        ).reshape(-1, 4)
        seq, submit_s, estimate_s, gpus = columns.T
        cluster = sum(node.spec.gpus for node in state.inventory) if not self.static else 1.0
        keys = self._formula(formulas.Jobs(seq, submit_s, estimate_s, gpus, self._origin_s, max(1.0, cluster)), now)
        found: list[float] = (-keys).tolist()
        return found


class LeastAttainedService:
    """Least attained service in GPU-seconds, by levels: 2D-LAS of Gu et al., "Tiresias" (NSDI'19), section 3.

    A job is in the level of the first of `levels_gpu_s` that it has not reached; within a level the first to arrive
    goes first. For `preempt` score: who has had less takes the place of who has had more. Needs no run times.
    """

    name = "las"

    def __init__(self, levels_gpu_s: Sequence[float] = (300.0, 1_800.0, 7_200.0, 36_000.0, 200_000.0)) -> None:
        self._levels = tuple(levels_gpu_s)

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        return [-float(bisect_right(self._levels, attained_gpu_s(job, state, now))) for job in jobs]


class ShortestRemaining:
    """Shortest remaining run time first (SRPT: Schrage, Operations Research 16(3), 1968).

    For `preempt` score. What a job has had counts as done, also what it lost when it was stopped.
    """

    name = "srtf"

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        ran = [ran_s(job, state, now) for job in jobs]
        told = zip(state.run_times.remaining_s(jobs, ran), ran, strict=True)
        return [-(max(0.0, UNKNOWN_RUN_S - had) if left is None else left) for left, had in told]


class Gittins:
    """Least seconds of service per completion first (Gittins, J. R. Stat. Soc. B 41, 1979), as far as it is known what
    is left to a job that has run so long; in steps of two octaves (`gittins.in_steps`), of equals the first to arrive.

    For `preempt` rank: without steps two jobs whose chances get worse as they run stop each other for ever.
    `policy/gittins.py` has the same of GPU-seconds, from a table.
    """

    name = "gittins"

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        ranks = state.run_times.gittins_s(jobs, [ran_s(job, state, now) for job in jobs])
        known = np.array([UNKNOWN_RUN_S if rank is None else rank for rank in ranks], np.float64)
        found: list[float] = (-in_steps(known)).tolist()
        return found


class FairShare:
    """Weighted fair share of decayed usage: the tenant with least usage per weight goes next, then order of arrival.

    Each job taken counts as used right away for `run_s` seconds of its GPUs, so that one look at the queue deals it out
    in turns instead of emptying one tenant's first. Usage decays with `SchedulerConfig.usage_half_life_s`, as Slurm's
    (priority/multifactor, PriorityDecayHalfLife).
    """

    name = "fairshare"

    def __init__(self, run_s: float = 600.0) -> None:
        self._run_s = run_s

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        def cost(job: Job) -> float:
            return job.spec.total_gpu_milli / WHOLE_GPU * self._run_s / _weight(state, job.spec.tenant)

        return deal_out(jobs, lambda tenant: self._share(state, tenant, now), cost)

    @staticmethod
    def _share(state: ClusterState, tenant: str, now: float) -> float:
        """GPU-seconds used per weight."""
        return usage_at(state.usage(tenant), now, state.config.usage_half_life_s) / _weight(state, tenant)


class MaxMin:
    """Weighted max-min fair share of what is held now: the tenant with fewest GPUs per weight goes next (progressive
    filling: Bertsekas and Gallager, "Data Networks", section 6.5.2), then order of arrival. With one resource it is
    dominant resource fairness (Ghodsi et al., NSDI'11). What a tenant had before does not count.
    """

    name = "maxmin"

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        # Running jobs that are asked about are dealt out as well, and do not count before.
        own: dict[str, int] = defaultdict(int)
        for job in jobs:
            if job.placement_id is not None:
                own[job.spec.tenant] += job.spec.total_gpu_milli

        def share(tenant: str) -> float:
            return (state.usage(tenant).held_milli - own[tenant]) / WHOLE_GPU / _weight(state, tenant)

        def cost(job: Job) -> float:
            return job.spec.total_gpu_milli / WHOLE_GPU / _weight(state, job.spec.tenant)

        return deal_out(jobs, share, cost)


class Multifactor:
    """Slurm's priority/multifactor: age and size as in `formulas.multifactor`, and the classic fair-share factor
    2^(-U/S), U the tenant's share of the decayed usage of all, S its share of the weights (Slurm, "Classic Fairshare
    Algorithm"). Weights are those of the example on the plugin's page.
    """

    name = "multifactor-fairshare"

    def __init__(self, fairshare_weight: float = 10_000.0) -> None:
        self._fairshare_weight = fairshare_weight
        self._rest = ByFormula("multifactor", formulas.multifactor)

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        tenants = sorted({*state.tenants, *(job.spec.tenant for job in jobs)})
        half_life_s = state.config.usage_half_life_s
        usage = {tenant: usage_at(state.usage(tenant), now, half_life_s) for tenant in tenants}
        used, weights = math.fsum(usage.values()), math.fsum(_weight(state, tenant) for tenant in tenants)

        def factor(tenant: str) -> float:
            return math.exp2(-(usage[tenant] / used) / (_weight(state, tenant) / weights)) if used > 0 else 1.0

        factors = {tenant: factor(tenant) for tenant in {job.spec.tenant for job in jobs}}
        rest = self._rest.scores(jobs, state, now)
        return [
            score + self._fairshare_weight * factors[job.spec.tenant] for score, job in zip(rest, jobs, strict=True)
        ]


def deal_out(jobs: Sequence[Job], share: Callable[[str], float], cost: Callable[[Job], float]) -> list[float]:
    """Scores that take the tenants' jobs in turns: always the next of the tenant with the least share, which then grows
    by the job's cost; the jobs of one tenant in order of arrival, and of equal tenants the one whose job came first."""
    waiting: dict[str, deque[int]] = defaultdict(deque)
    for place in sorted(range(len(jobs)), key=lambda place: jobs[place].seq):
        waiting[jobs[place].spec.tenant].append(place)
    heap = [(share(tenant), jobs[waiting[tenant][0]].seq, tenant) for tenant in waiting]
    heapq.heapify(heap)
    scores = [0.0] * len(jobs)
    for turn in range(len(jobs)):
        least, _, tenant = heap[0]
        place = waiting[tenant].popleft()
        scores[place] = -float(turn)
        if waiting[tenant]:
            heapq.heapreplace(heap, (least + cost(jobs[place]), jobs[waiting[tenant][0]].seq, tenant))
        else:
            heapq.heappop(heap)
    return scores


def _weight(state: ClusterState, tenant: str) -> float:
    return state.config.tenants.get(tenant, TenantPolicy()).weight
