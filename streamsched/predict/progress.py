"""How far a job is: from reports of a fraction or of steps, or from lines of its log.

`Lines` reads a line by a small set of regular expressions, to which users add their own; `Track` keeps the first and
the last report of a run and extrapolates. A bar *within* an epoch says nothing of the job, so a line that names an
epoch without saying of how many is not read by its percentage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from streamsched.errors import UserError

LINE_MAX: Final = 400
"""Characters of a line that are looked at."""
APART_S: Final = 10.0
"""A rate is taken from reports at least so far apart; before, everything since the start counts."""
GROUPS: Final = ("fraction", "percent", "step", "total", "epoch", "epochs")
"""What an expression may name; `step` within `epoch` of `epochs` counts as a part of that epoch."""

_NUMBER: Final = r"\d[\d,_]*(?:\.\d+)?"
_OF: Final = r"\s*(?:/|of)\s*"
_STEP: Final = r"\b(?:global[_ ])?(?:step|iter|iteration|batch)s?\b[\s:=\[(]*"
_EPOCH: Final = r"\bepochs?\b[\s:=\[(]*"
PATTERNS: Final = (
    rf"(?i){_EPOCH}(?P<epoch>{_NUMBER}){_OF}(?P<epochs>{_NUMBER})\b.*?{_STEP}(?P<step>{_NUMBER}){_OF}(?P<total>{_NUMBER})",
    rf"(?i){_EPOCH}(?P<epoch>{_NUMBER}){_OF}(?P<epochs>{_NUMBER})\b",
    rf"(?i)^(?!.*\bepoch\b).*?{_STEP}(?P<step>{_NUMBER}){_OF}(?P<total>{_NUMBER})",
    r"^(?!.*\b[Ee]poch\b)\s*(?:\S+:\s*)?\d{1,3}%\|[^|]*\|\s*(?P<step>\d+)/(?P<total>\d+)\s*\[",  # tqdm
    r"(?i)^(?!.*\bepoch\b).*?\b(?:progress|completed?|done|finished)\b[\s:=(]*(?P<percent>\d+(?:\.\d+)?)\s*%",
    r"(?i)^(?!.*\bepoch\b).*?\b(?P<percent>\d+(?:\.\d+)?)\s*%\s*(?:completed?|done|finished)\b",
    rf"(?i)^(?!.*\bepoch\b).*?{_STEP}(?P<step>{_NUMBER})\b",
)
"""In this order; the first that matches is used."""


class Reading(Struct, frozen=True):
    """One report; 0: not told."""

    fraction: float = 0.0
    step: float = 0.0


def reading_of(fraction: float | None = None, step: float | None = None, total: float | None = None) -> Reading | None:
    """Of a report; None where it says nothing that can be true. Steps of a total are finer than a fraction."""
    done = step if step is not None and _positive(step) else 0.0
    if done and total is not None and _positive(total):
        return Reading(done / total, done) if done <= total else None
    part = fraction if fraction is not None and 0.0 < fraction <= 1.0 else 0.0
    return Reading(part, done) if part or done else None


class Lines:
    """Reads lines of logs. Raises UserError for an expression that cannot be used."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        """`more`: expressions with groups named as in `GROUPS`; they come before `PATTERNS`."""
        self._patterns = [_compiled(pattern) for pattern in (*more, *PATTERNS)]

    def read(self, line: str) -> Reading | None:
        """None for a line that does not tell how far the job is."""
        line = line[:LINE_MAX]
        for pattern in self._patterns:
            if found := pattern.search(line):
                return _reading({key: _number(text) for key, text in found.groupdict().items() if text})
        return None


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise UserError(f"progress pattern {pattern!r}: not a regular expression: {error}") from None
    names = set(found.groupindex)
    if not names <= set(GROUPS) or not names & {"fraction", "percent", "step", "epoch"}:
        raise UserError(f"progress pattern {pattern!r}: its groups are {sorted(names)}, but may be {', '.join(GROUPS)}")
    return found


def _number(text: str) -> float:
    try:
        return float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return math.nan


def _reading(told: dict[str, float]) -> Reading | None:
    if "epoch" in told and "epochs" in told:
        within = told["step"] / told["total"] if told.get("total") and "step" in told else 0.0
        done = reading_of(step=told["epoch"] - 1.0 + within, total=told["epochs"]) if 0.0 <= within <= 1.0 else None
        return Reading(done.fraction) if done else None
    fraction = told["percent"] / 100.0 if "percent" in told else told.get("fraction")
    return reading_of(fraction, told.get("step"), told.get("total"))


def _positive(number: float) -> bool:
    return 0.0 < number < math.inf


class Track(Struct):
    """What one run has reported: two reports, whatever their number. Ages are s since the run started."""

    first: float = 0.0
    first_age_s: float = 0.0
    amount: float = 0.0
    """As last reported: a fraction, or steps. 0: nothing."""
    age_s: float = 0.0
    by_steps: bool = False
    """Of a number of steps that was not told."""
    steps: float = 0.0
    """As last reported, for `Finished`."""

    def add(self, reading: Reading | None, age_s: float) -> None:
        """A report that goes back (an earlier checkpoint, another unit) starts anew; one out of order is left out."""
        if reading is None or not _positive(age_s) or age_s < self.age_s:
            return
        amount, by_steps = reading.fraction or reading.step, not reading.fraction
        if not self.amount or amount < self.amount or by_steps != self.by_steps:
            self.first, self.first_age_s, self.by_steps = amount, age_s, by_steps
        self.amount, self.age_s = amount, age_s
        self.steps = reading.step or self.steps

    def fraction(self, expected_steps: float = 0.0) -> float:
        """NaN: not known. `expected_steps`: in the end, where the job does not say."""
        total = expected_steps if self.by_steps else 1.0
        return min(self.amount / total, 1.0) if total > 0 and self.amount > 0 else math.nan

    def total_s(self, expected_steps: float = 0.0) -> float:
        """Run time that follows, s: what is left at the rate between the first and the last report (so a slow start
        does not count), or at the mean rate where these are close. NaN: not known."""
        total = expected_steps if self.by_steps else 1.0
        if not total > 0 or not self.amount > 0:
            return math.nan
        took_s, done = self.age_s - self.first_age_s, self.amount - self.first
        rate = done / took_s if took_s >= APART_S and done > 0 else self.amount / self.age_s
        return self.age_s + max(total - self.amount, 0.0) / rate if rate > 0 else math.nan
