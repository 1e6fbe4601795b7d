"""How fast job families are on each GPU type, learned from progress reports.

A run that reports steps (or its fraction) twice has a *rate*; it counts for the GPU type of its workers when that is
one. Jobs of one family (label `family`) with the same number of GPUs are compared with each other. With m(f, t) the
mean logarithm of family f's rates on type t, n(f, t) jobs behind it:

    prior     b(t)    = sum_f w(f) (m(f, t) - m(f, r)) / (sum_f w(f) + K),   w(f) = min(n(f, t), n(f, r))
    anchor    a(f)    = sum_t n(f, t) (m(f, t) - b(t)) / sum_t n(f, t)
    estimate  s(f, t) = (n(f, t) (m(f, t) - a(f)) + K b(t)) / (n(f, t) + K)

where r is the type with most rates. The speed on t is exp(s(f, t)): means shrunk towards what the pool's families make
of the type (empirical Bayes: Efron & Morris, JASA 1975), and that towards 1. So one odd job changes little, and a new
family is thought to be as fast as the others.

Rates are kept in the jobs as whole hundredths of their logarithm: sums of integers are the same in whatever order jobs
are counted, and a rate that hardly changes is no change of the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from .model import Job, JobSpec, Mark, Rate

FAMILY: Final = "family"
"""The label that names a job's family."""
PRIOR_JOBS: Final = 3
"""K: how many jobs the prior counts as."""
MEASURED_S: Final = 10.0
"""A rate is taken from reports at least so far apart."""
_GRAIN: Final = 0.1
"""Speeds are rounded to these steps of their logarithm: jobs of like speeds are one kind for the model."""


def measured(mark: Mark, now: Mark, gpu_type: str) -> Rate | None:
    """The rate between two reports of one run; None when they do not give any."""
    done, took_s = now.amount - mark.amount, now.time - mark.time
    if mark.unit != now.unit or done <= 0 or took_s < MEASURED_S:
        return None
    return Rate(gpu_type=gpu_type, unit=mark.unit, log_centi=round(100 * math.log(done / took_s)))


Family = tuple[str, int, str]
"""(name, GPUs of the job, unit of the rates)."""


@dataclass
class Speeds:
    """Rates by family and type; follows from the jobs alone (an index, see `index.py`)."""

    counted: dict[Family, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """Family -> GPU type -> (jobs, sum of their log_centi)."""
    _of: dict[str, tuple[Family, Rate]] = field(default_factory=dict)
    _prior: dict[str, float] | None = field(default=None, compare=False)
    _known: dict[Family | None, dict[str, float]] = field(default_factory=dict, compare=False)

    def job(self, job: Job) -> None:
        """Count the job's rate, which may have changed."""
        entry = None if job.rate is None else (_family(job.spec, job.rate.unit), job.rate)
        before = self._of.get(job.spec.job_id)
        if entry == before:
            return
        if before is not None:
            self.forget(job.spec.job_id)
        if entry is not None:
            self._of[job.spec.job_id] = entry
            self._count(*entry, 1)

    def forget(self, job_id: str) -> None:
        entry = self._of.pop(job_id, None)
        if entry is not None:
            self._count(*entry, -1)

    def _count(self, family: Family, rate: Rate, sign: int) -> None:
        self._prior = None
        self._known.clear()
        types = self.counted.setdefault(family, {})
        jobs, total = types.get(rate.gpu_type, (0, 0))
        if jobs + sign:
            types[rate.gpu_type] = jobs + sign, total + sign * rate.log_centi
            return
        del types[rate.gpu_type]
        if not types:
            del self.counted[family]

    def of(self, spec: JobSpec) -> Mapping[str, float]:
        """GPU type -> speed, relative to each other; types without any evidence are not named."""
        families = [f for unit in ("step", "fraction") if (f := _family(spec, unit)) in self.counted]
        family = families[0] if families else None
        if family not in self._known:
            self._known[family] = self._speeds(self.counted.get(family, {}) if family else {})
        return self._known[family]

    def _speeds(self, own: Mapping[str, tuple[int, int]]) -> dict[str, float]:
        prior = self._priors()
        if not prior:
            return {}
        jobs = sum(n for n, _ in own.values())
        anchor = math.fsum(total / 100 - n * prior[t] for t, (n, total) in sorted(own.items())) / jobs if jobs else 0.0
        found = {}
        for gpu_type, expected in prior.items():
            n, total = own.get(gpu_type, (0, 0))
            estimate = (total / 100 - n * anchor + PRIOR_JOBS * expected) / (n + PRIOR_JOBS)
            found[gpu_type] = math.exp(_GRAIN * round(estimate / _GRAIN))
        return found

    def _priors(self) -> dict[str, float]:
        """Logarithm of the speed that a job of no known family is thought to have on each type, by name."""
        if self._prior is None:
            totals: dict[str, int] = {}
            for types in self.counted.values():
                for gpu_type, (n, _) in types.items():
                    totals[gpu_type] = totals.get(gpu_type, 0) + n
            reference = min(totals, key=lambda t: (-totals[t], t), default="")
            self._prior = {t: self._relative(t, reference) for t in sorted(totals)} if len(totals) > 1 else {}
        return self._prior

    def _relative(self, gpu_type: str, reference: str) -> float:
        weights, terms = 0, []
        for types in self.counted.values():
            if gpu_type in types and reference in types and gpu_type != reference:
                (n, total), (n_ref, total_ref) = types[gpu_type], types[reference]
                weight = min(n, n_ref)
                weights += weight
                terms.append(weight * (total / n - total_ref / n_ref) / 100)
        return math.fsum(terms) / (weights + PRIOR_JOBS)


def _family(spec: JobSpec, unit: str) -> Family:
    return spec.labels.get(FAMILY, ""), spec.total_gpu_milli, unit
