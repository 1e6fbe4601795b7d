"""Confidence intervals by the bootstrap: seeded, and quick enough for every figure of a table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]


class Bootstrap:
    """Percentile intervals (Efron 1979) of figures of `total` values, drawn in blocks of neighbours.

    What stands side by side is alike (waits of jobs that were submitted together), so whole blocks are drawn, disjoint
    ones (Carlstein, "The use of subseries values for estimating the variance of a general statistic from a stationary
    sequence", 1986): of about sqrt(total) values, of `block` values, or those that begin at the places `starts`, the
    first of which is 0. Blocks that are shorter than what holds together give intervals that are too narrow. All
    figures of one instance are of the same draws: differences and ratios of them are paired.
    """

    def __init__(
        self,
        total: int,
        seed: int = 1,
        draws: int = 1_000,
        share: float = 0.95,
        block: int | None = None,
        starts: npt.NDArray[np.int64] | None = None,
    ):
        self.total, self.draws, self.share = total, draws, share
        length = block or max(1, round(total**0.5))
        self._starts = np.arange(0, total, length) if starts is None else starts
        self._block = np.searchsorted(self._starts, np.arange(total), side="right") - 1
        """[value] its block."""
        blocks = len(self._starts)
        self._chosen = np.random.default_rng(seed).integers(0, max(1, blocks), size=(draws, blocks))
        counts = np.bincount((self._chosen + np.arange(draws)[:, None] * blocks).ravel(), minlength=draws * blocks)
        self._counts = counts.reshape(draws, blocks)
        """[draw, block] how often it was drawn."""
        self._sizes = np.diff(np.append(self._starts, total))

    def means(self, values: Floats) -> Floats:
        """[draw]"""
        sums = np.add.reduceat(values, self._starts)
        found: Floats = sums[self._chosen].sum(axis=1) / self._sizes[self._chosen].sum(axis=1)
        return found

    def percentiles(self, values: Floats, q: float) -> Floats:
        """[draw] the q-th percentile of the values that there are (no interpolation).

        No draw is sorted: how often a value was drawn is the count of its block, so the values are sorted once and the
        counts summed up in that order until the rank is reached, first by groups of neighbours, then in one group.
        """
        order = np.argsort(values, kind="stable")
        size = max(1, round(self.total**0.5))
        groups = -(-self.total // size)
        blocks = len(self._sizes)
        of_group = np.bincount(
            self._block[order] * groups + np.arange(self.total) // size, minlength=blocks * groups
        ).reshape(blocks, groups)
        # Floats, for the quick product; all of them are whole numbers, so nothing is rounded.
        until = np.cumsum(self._counts.astype(np.float64) @ of_group.astype(np.float64), axis=1)
        rank = np.maximum(1.0, np.ceil(until[:, -1] * (q / 100.0) - 1e-9))
        group = np.argmax(until >= rank[:, None], axis=1)
        missing = rank - np.where(group > 0, np.take_along_axis(until, np.maximum(group - 1, 0)[:, None], 1)[:, 0], 0.0)
        places = group[:, None] * size + np.arange(size)
        inside = np.minimum(places, self.total - 1)
        counts = np.take_along_axis(self._counts, self._block[order[inside]], 1) * (places < self.total)
        place = group * size + np.argmax(np.cumsum(counts, axis=1) >= missing[:, None], axis=1)
        found: Floats = values[order[place]]
        return found

    def between(self, drawn: Floats) -> Interval:
        """The middle `share` of what was drawn."""
        low, high = np.percentile(drawn, [50 * (1 - self.share), 50 * (1 + self.share)])
        return float(low), float(high)
