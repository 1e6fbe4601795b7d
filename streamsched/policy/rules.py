"""Classic rules. A score is a finite float, higher first; ties go by order of arrival (the core sorts stably)."""

from __future__ import annotations

from collections.abc import Sequence

from streamsched.core.cluster import ClusterState
from streamsched.core.model import Job


class FirstComeFirstServed:
    """Order of arrival in the pool. With the window's candidates this is FCFS with backfill and no reservation."""

    name = "fcfs"

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        return [-float(job.seq) for job in jobs]


class Smallest:
    """Fewest GPUs first ("feasible-smallest", as the window leaves out what does not fit now)."""

    name = "smallest"

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> list[float]:
        return [-float(job.spec.total_gpu_milli) for job in jobs]
