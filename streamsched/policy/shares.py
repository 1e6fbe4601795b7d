"""Two rules over one queue: one of them ranks a share of the jobs, or is only compared with the other."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from streamsched.core.cluster import ClusterState
from streamsched.core.model import Job, JobSpec
from streamsched.core.window import Ranker, Ranking

from .features import Floats

_REMEMBERED: Final = 100_000
"""Jobs whose share is kept in mind; more are reckoned again."""


class Share:
    """Which jobs are in: all of some tenants, and a fraction of all others, drawn by their ids.

    A job is in or out for good, on every worker; another `salt` draws others.
    """

    def __init__(self, fraction: float, tenants: Collection[str] = (), salt: str = "") -> None:
        self._limit, self._tenants, self._salt = fraction * 2.0**64, frozenset(tenants), salt.encode()
        self._known: dict[str, bool] = {}

    def __contains__(self, spec: JobSpec) -> bool:
        if spec.tenant in self._tenants:
            return True
        known = self._known.get(spec.job_id)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            drawn = hashlib.blake2b(self._salt + b"/" + spec.job_id.encode(), digest_size=8).digest()
            known = self._known[spec.job_id] = int.from_bytes(drawn, "big") < self._limit
        return known


class ByShares:
    """Jobs of a share are ranked among themselves by `canary`; everything else is as `main` has it.

    The places that jobs of the share have in the order of `main` go to the same jobs, in the order of `canary`. So
    nobody outside of the share moves up or down for it, whatever the canary's scores are: what it does wrong is paid by
    its own jobs. Where the canary holds several equal, they are equal: they share the middle one of their places.
    """

    def __init__(self, main: Ranker, canary: Ranker, share: Share) -> None:
        self.main, self.canary, self.share = main, canary, share
        self.name = f"{main.name}/canary:{canary.name.removeprefix('model:')}"

    def scores(self, jobs: Sequence[Job], state: ClusterState, now: float) -> Sequence[float]:
        main = self.main.scores(jobs, state, now)
        places = [place for place, job in enumerate(jobs) if job.spec in self.share]
        if len(places) < 2:
            return main
        mine = np.asarray(self.canary.scores(jobs, state, now), np.float64)[places]
        told = np.array(main, np.float64)
        told[places] = _dealt(np.sort(told[places])[::-1], mine)
        found: list[float] = told.tolist()
        return found


def _dealt(given: Floats, order: Floats) -> Floats:
    """[job] the numbers of `given` (descending), the highest for the highest of `order`; equals get their median."""
    best_first = np.argsort(-order, kind="stable")
    ranked = order[best_first]
    starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    ends = np.concatenate([starts[1:], [len(order)]])
    found = np.empty(len(order))
    found[best_first] = np.repeat(given[(starts + ends - 1) // 2], ends - starts)
    return found


class Likeness(NamedTuple):
    """Of two orders of the same jobs."""

    jobs: int
    correlation: float
    """Spearman's, of the places: 1 the same order, -1 the opposite one."""
    first: float
    """Share of the first `among` of one that are among the first of the other."""
    among: int


def likeness(one: Ranking, other: Ranking, among: int) -> Likeness:
    """Both of the same jobs, given in the same order."""
    count = len(one)
    places, others = _places(one), _places(other)
    apart = float(np.square(places - others).sum())
    correlation = 1.0 - 6.0 * apart / (count * (count * count - 1.0)) if count > 1 else 1.0
    among = min(among, count)
    both = int(np.count_nonzero((places < among) & (others < among)))
    return Likeness(count, correlation, both / among if among else 1.0, among)


def _places(ranking: Iterable[tuple[int, Job]]) -> Floats:
    """[job] its place in the order, from 0."""
    order = np.array([place for place, _ in ranking], np.int64)
    found = np.empty(len(order))
    found[order] = np.arange(len(order))
    return found
