"""One window, from problem to checked solution.

1. Greedy: the fallback, and the MIP start. When it is within the gap of what all candidates that fit alone are
   worth, it is proved good enough and nothing else is done (the usual case on a cluster that is not scarce).
2. The model (`milp.py`), unless it would be too large.
3. Concrete nodes, who has to make room for whom (`evictions.py`), then greedy once more for what still fits beside
   (a gap of 1 % can be a whole job).
4. The better one of 1 and 3, checked by `check.py`, and a reason for each candidate that was not placed.

Shares of devices are kept out of the model: shares that go into partly used devices are placed before it, each
other share takes part as a whole device, and after it they are packed together device by device, which can only
need less. That is conservative, never infeasible, and no longer exact: with shares in the window the bound is the
sum of all values.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import msgspec
from msgspec import Struct

from streamsched.core.problem import Assignment, Candidate, Problem, Solution, SolveStatus

from .cells import Layout, expand, layout_of, plan_of
from .check import check, sift
from .evictions import settle
from .greedy import fill
from .groups import groups_of
from .objective import fragmentation_weight, placed_value
from .options import Options, options_of
from .parts import split
from .reasons import Judge, outranked
from .request import is_share
from .spots import Victims, spots_of
from .stock import Stock
from .worth import at_most

Clock = Callable[[], float]
SolveParts = Callable[[Sequence[Problem], "SolveLimits"], Sequence[Solution]]
"""Solves the parts of a window, whose answers come in the same order."""

log = logging.getLogger(__name__)

_NOISE = 1e-6
"""Of the solver's arithmetic, relative."""
_NOTE_MAX = 500
"""Characters of one remark in `Solution.note`."""
WORKERS_MAX = 20_000
"""Workers with whole devices that one window handles, and one job beyond."""
SHARES_MAX = 2_000
"""Workers with shares of devices that one window handles, and one job beyond."""


class SolveLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When to stop. `time_s` is a backstop (None: none); simulations stop by `gap` and `nodes_max` alone."""

    time_s: float | None = 1.0
    """Seconds to build and solve the model."""
    gap: float = 0.01
    """Relative; see `Solution.gap`."""
    nodes_max: int | None = None
    """Branch-and-bound nodes."""
    variables_max: int = 20_000
    """Larger models are not built: the clock is looked at too rarely in them."""
    patterns_max: int = 300
    """Groups with more packing patterns are modelled node by node."""
    domains_max: int = 48
    """Topology domains that one candidate is offered; with more to choose from the answer may miss the optimum."""
    seed: int = 0
    parts_max: int = 1
    """Parts that `solve_in_parts` divides a large window into; 1: never."""
    part_jobs: int = 128
    """Candidates of a part, about; smaller windows are not divided."""
    presolve: bool = False
    """Off: no slower on these models than on (measured), and presolve does not look at the clock."""


@dataclass(frozen=True)
class _Found:
    """A feasible set of assignments and what it is worth."""

    assignments: tuple[Assignment, ...]
    objective: float


class PartsFailed(RuntimeError):
    """For `SolveParts`: there are no answers, and it is nobody's bug. Greedy's answer is used."""


def solve(
    problem: Problem,
    limits: SolveLimits | None = None,
    on_greedy: Callable[[Solution], None] | None = None,
    clock: Clock = time.perf_counter,
) -> Solution:
    """Place the candidates of a window. Never raises for lack of room; the answer says how it was got.

    `on_greedy` is called with greedy's checked solution before the model is built, for callers that may not be able
    to wait. `clock` (seconds) is only for `build_s` and `solve_s`. One candidate never costs the others their answer:
    what cannot be handled is left out and says why, and what fails after greedy leaves greedy's answer.
    """
    return _Window(problem, limits or SolveLimits(), clock).solve(on_greedy)


def solve_in_parts(
    problem: Problem,
    limits: SolveLimits | None = None,
    on_greedy: Callable[[Solution], None] | None = None,
    run: SolveParts | None = None,
    clock: Clock = time.perf_counter,
) -> Solution:
    """As `solve`; a window of more than `limits.part_jobs` candidates is divided (`parts.split`), up to `parts_max`.

    What the parts place is joined, greedy finds room for what still fits beside it, and the answer is never below
    greedy's for the undivided window. The bound is what all candidates that fit are worth, for no part knows of the
    others. `run` solves the parts, here one after the other; `solve_s` is all the time it took.
    """
    limits = limits or SolveLimits()
    wanted = min(limits.parts_max, -(-len(problem.candidates) // max(1, limits.part_jobs)))
    parts = split(problem, wanted) if wanted > 1 else (problem,)
    if len(parts) == 1:
        return solve(problem, limits, on_greedy, clock)
    return _Window(problem, limits, clock).solve_parts(parts, run or _one_by_one, on_greedy)


def _one_by_one(parts: Sequence[Problem], limits: SolveLimits) -> list[Solution]:
    return [solve(part, limits) for part in parts]


class _Window:
    def __init__(self, problem: Problem, limits: SolveLimits, clock: Clock) -> None:
        self.problem, self.limits, self.clock = problem, limits, clock
        self.by_id: dict[str, Candidate] = {}
        for candidate in problem.candidates:
            self.by_id.setdefault(candidate.job_id, candidate)
        self.hopeless = {j: f"invalid: value {c.value}" for j, c in self.by_id.items() if not math.isfinite(c.value)}
        """Why these are not tried."""
        if self.hopeless:
            finite = tuple(c for c in problem.candidates if math.isfinite(c.value))
            self.problem = msgspec.structs.replace(problem, candidates=finite)
        self.weight = fragmentation_weight(self.problem)
        self._judge()
        self._hold_back()
        self.hopeful = [c for job_id, c in self.by_id.items() if job_id not in self.hopeless]
        self.worth = math.fsum(at_most(c) for c in self.hopeful)
        self.build_s = 0.0
        self.solve_s = 0.0
        self.note = ""

    def _judge(self) -> None:
        """What can never fit, once per kind of request."""
        judge = Judge(self.problem)
        known: dict[Candidate, str | None] = {}
        for job_id, candidate in self.by_id.items():
            if job_id in self.hopeless:
                continue
            kind = msgspec.structs.replace(candidate, job_id="", attempt=0, value=0.0, score=0.0)
            try:
                if kind not in known:
                    known[kind] = judge.never_fits(candidate)
                why = known[kind]
            except Exception as error:
                why = f"failed: {type(error).__name__}: {error}"
            if why is not None:
                self.hopeless[job_id] = why

    def _hold_back(self) -> None:
        """Bound the work of one window, whatever is asked: jobs beyond the workers of a window wait for another.

        Apart for whole devices and for shares. The first that goes beyond takes part all the same, so that each gets
        its turn; smaller ones after it too, so that nobody can keep them out by asking for much.
        """
        for shares, most in ((False, WORKERS_MAX), (True, SHARES_MAX)):
            used, beyond = 0, False
            for job_id, candidate in self.by_id.items():
                if job_id in self.hopeless or is_share(candidate) is not shares:
                    continue
                workers = sum(count for _, count in candidate.chunks)
                if used + workers <= most:
                    used += workers
                elif not beyond:
                    beyond = True
                else:
                    kind = "workers with shares of devices" if shares else "workers"
                    self.hopeless[job_id] = (
                        f"window: one window handles about {most} {kind}, this job waits for another"
                    )

    def solve(self, on_greedy: Callable[[Solution], None] | None) -> Solution:
        return self._after_greedy(on_greedy, self._improved)

    def solve_parts(
        self, parts: Sequence[Problem], run: SolveParts, on_greedy: Callable[[Solution], None] | None
    ) -> Solution:
        return self._after_greedy(on_greedy, lambda base: self._joined(base, parts, run))

    def _after_greedy(
        self, on_greedy: Callable[[Solution], None] | None, improve: Callable[[_Found], Solution]
    ) -> Solution:
        if not self.hopeful:
            return self._solution(_Found((), 0.0), SolveStatus.EMPTY, None)
        base = self._greedy()
        fallback = self._rate(base, self.worth, SolveStatus.GREEDY)
        if on_greedy is not None:
            on_greedy(fallback)
        if fallback.status is SolveStatus.OPTIMAL or self.problem.in_order or self.problem.by_rank:
            return fallback  # in strict order there is nothing to choose but where
        try:
            return improve(base)
        except PartsFailed as error:
            self._say(f"solver: {error}")
            return self._rate(base, self.worth, SolveStatus.GREEDY)
        except Exception as error:
            log.exception("window %d of pool %s", self.problem.window, self.problem.pool)
            self._say(f"bug: after greedy: {type(error).__name__}: {error}")
            return self._rate(base, self.worth, SolveStatus.GREEDY)

    def _joined(self, base: _Found, parts: Sequence[Problem], run: SolveParts) -> Solution:
        """What the parts place, those that wait for victims last, and what greedy finds room for beside it."""
        started = self.clock()
        solutions = run(parts, self.limits)
        self.solve_s = self.clock() - started
        for note in dict.fromkeys(s.note for s in solutions if s.note):
            self._say(note)
        placed = sorted((a for s in solutions for a in s.assignments), key=lambda a: bool(a.after))
        kept, violations = sift(self.problem, placed)
        if violations:
            self._say(f"bug: a part's answer was refused by the check: {violations[0]}")
        stock = Stock(self.problem)
        for assignment in kept:
            stock.put(self.by_id[assignment.job_id], assignment.workers, assignment.after)
        there = {a.job_id for a in kept}
        more = fill(stock, (c for c in self.hopeful if c.job_id not in there))
        found = self._worth_of((*kept, *more), stock)
        # A part handles as many workers as a window does, so it may have placed what the whole window holds back.
        worth = math.fsum((self.worth, *(at_most(self.by_id[j]) for j in there & self.hopeless.keys())))
        return self._checked(found, base, worth)

    def _in_turn(self) -> list[Candidate]:
        """In strict order, those before the first that is not tried."""
        if not self.problem.in_order:
            return self.hopeful
        return list(takewhile(lambda c: c.job_id not in self.hopeless, self.by_id.values()))

    def _greedy(self) -> _Found:
        """Greedy's answer, less what does not pass the check (which is a bug, but of one job)."""
        stock = Stock(self.problem)
        assignments = fill(stock, self._in_turn(), failed=self.hopeless, in_order=self.problem.in_order)
        self.hopeful = [c for c in self.hopeful if c.job_id not in self.hopeless]
        try:
            kept, violations = sift(self.problem, assignments)
            if not violations:
                return self._worth_of(assignments, stock)
            self._say(f"bug: greedy's answer was refused by the check: {violations[0]}")
            refused = {a.job_id for a in assignments} - {a.job_id for a in kept}
            self.hopeless.update(dict.fromkeys(sorted(refused), "failed: its nodes were refused by the check"))
            self.hopeful = [c for c in self.hopeful if c.job_id not in refused]
            return self._evaluate(kept)
        except Exception as error:  # each job is checked again at commit
            log.exception("window %d of pool %s", self.problem.window, self.problem.pool)
            self._say(f"bug: greedy's answer could not be checked: {type(error).__name__}: {error}")
            return _Found(assignments, placed_value(self.problem, assignments))

    def _improved(self, base: _Found) -> Solution:
        found, bound = self._by_model(base)
        if found is None:
            return self._rate(base, bound, SolveStatus.GREEDY)
        if self.problem.mix and found.objective == base.objective:
            found = base  # its nodes were chosen by the gradient
        return self._checked(found, base, bound)

    def _checked(self, found: _Found, base: _Found, bound: float) -> Solution:
        """`found` if it is allowed and worth more than greedy's."""
        if found.objective < base.objective:
            return self._rate(base, bound, SolveStatus.GREEDY)
        solution = self._rate(found, bound, SolveStatus.INCUMBENT)
        violations = check(self.problem, solution)
        if not violations:
            return solution
        self._say(f"bug: the model's answer was refused by the check: {violations[0]}")
        return self._rate(base, self.worth, SolveStatus.GREEDY)

    def _say(self, note: str) -> None:
        self.note = "; ".join(filter(None, (self.note, note[:_NOTE_MAX])))

    # ── the model ──────────────────────────────────────────────────────────────────────────────────

    def _by_model(self, base: _Found) -> tuple[_Found | None, float]:
        """The model's answer made concrete and completed (None: there is none), and an upper bound of the objective."""
        from . import milp  # Pyomo takes a second to import; callers that never need the model do not pay for it

        started = self.clock()
        stock = Stock(self.problem)
        filled = _fill_shares(stock, self.hopeful)
        left = {c.job_id: c for c in self.hopeful if c.job_id not in {a.job_id for a in filled}}
        victims = Victims(self.problem, self.worth)
        offer, layout = self._layout(stock, left, victims, base)
        if not layout.demands:
            return None, self._bound(0.0, offer)
        if layout.size > self.limits.variables_max:
            self._say(f"too large: {layout.size} variables, at most {self.limits.variables_max}")
            return None, self.worth
        model = milp.Model(layout, self.weight)
        model.start_from(plan_of(self._start(base, left), layout, offer.spots))
        built = self.clock()
        try:
            answer = milp.run(
                model,
                time_s=None if self.limits.time_s is None else max(0.0, self.limits.time_s - (built - started)),
                gap=self.limits.gap,
                nodes_max=self.limits.nodes_max,
                seed=self.limits.seed,
                presolve=self.limits.presolve,
            )
        except milp.SolverFailed as error:
            self._say(f"solver: {error}")
            return None, self.worth
        finally:
            self.build_s, self.solve_s = built - started, self.clock() - built
        bound = self._bound(answer.bound, offer)
        if answer.plan is None:
            return None, bound
        return self._complete(stock, filled, expand(answer.plan, left, layout), answer.plan.evicted, victims), bound

    def _layout(
        self, stock: Stock, left: dict[str, Candidate], victims: Victims, base: _Found
    ) -> tuple[Options, Layout]:
        """What the model is about; with fewer domains to choose from when it would be too large."""
        spots = spots_of(stock.lots(), self.problem, victims)
        used = {a.job_id: tuple(n for n, _ in a.workers) for a in base.assignments}
        domains_max = max(1, self.limits.domains_max)
        while True:
            offer = options_of(left.values(), self.problem, spots, victims, domains_max, used)
            groups = groups_of(offer.spots, offer.kinds)
            layout = layout_of(offer.kinds, offer.demands, groups, victims, self.limits.patterns_max)
            if layout.size <= self.limits.variables_max or domains_max == 1 or not offer.domains:
                return offer, layout
            domains_max = min(domains_max, offer.domains) // 2 or 1

    def _bound(self, bound: float | None, offer: Options) -> float:
        """Of the whole problem, from that of the model.

        Without the candidates that were not offered all their domains the model is exact; each of them adds its own
        value at most, and the GPUs it leaves idle.
        """
        if bound is None or any(is_share(c) for c in self.hopeful):
            return self.worth
        if offer.cut:
            self._say(f"{len(offer.cut)} candidates could choose among {self.limits.domains_max} domains at most")
            bound += math.fsum(at_most(c) + self.weight * c.total_gpus for c in self.hopeful if c.job_id in offer.cut)
        return min(self.worth, bound)

    def _start(self, base: _Found, left: dict[str, Candidate]) -> tuple[Assignment, ...]:
        """Greedy's answer with whole devices for shares."""
        if not any(is_share(c) for c in self.by_id.values()):
            return base.assignments
        stock = Stock(self.problem)
        _fill_shares(stock, self.hopeful)
        return fill(stock, left.values(), as_whole=True)

    def _complete(
        self,
        stock: Stock,
        filled: tuple[Assignment, ...],
        seated: tuple[Assignment, ...],
        evicted: set[int],
        victims: Victims,
    ) -> _Found:
        """Seat the model's jobs (shares first: they take nothing that victims free), then what still fits."""
        shares = tuple(a for a in seated if is_share(self.by_id[a.job_id]))
        for assignment in shares:
            stock.put(self.by_id[assignment.job_id], assignment.workers, assignment.after)
        whole = [a for a in seated if not is_share(self.by_id[a.job_id])]
        if evicted:
            taken_on = {n: c.affinity_taken for c in self.problem.classes if c.affinity_taken for n in c.node_ids}
            whole = list(settle(whole, self.by_id, victims, evicted, stock.left_on, taken_on))
        for assignment in whole:
            stock.put(self.by_id[assignment.job_id], assignment.workers, assignment.after)
        done = (*filled, *shares, *whole)
        placed = {a.job_id for a in done}
        more = fill(stock, (c for c in self.hopeful if c.job_id not in placed))
        found = self._worth_of((*done, *more), stock)
        return self._seated_anew(found) if self.problem.mix else found

    def _seated_anew(self, found: _Found) -> _Found:
        """Where devices are shared the model says who, and greedy where, if it finds room for as much: by the gradient
        (`gradient.py`), of which the model knows nothing."""
        placed = {a.job_id for a in found.assignments}
        stock = Stock(self.problem)
        again = self._worth_of(fill(stock, sorted(self.hopeful, key=lambda c: c.job_id not in placed)), stock)
        return again if again.objective >= found.objective else found

    # ── answers ────────────────────────────────────────────────────────────────────────────────────

    def _evaluate(self, assignments: tuple[Assignment, ...]) -> _Found:
        stock = Stock(self.problem)
        for assignment in assignments:
            stock.put(self.by_id[assignment.job_id], assignment.workers, assignment.after)
        return self._worth_of(assignments, stock)

    def _worth_of(self, assignments: tuple[Assignment, ...], stock: Stock) -> _Found:
        value = placed_value(self.problem, assignments) - self.weight * stock.stranded_gpus()
        return _Found(assignments, value)

    def _rate(self, found: _Found, bound: float, unproved: SolveStatus) -> Solution:
        """OPTIMAL when the bound proves it, however it was found; EMPTY when nothing is placed."""
        bound = max(bound, found.objective)
        gap = (bound - found.objective) / max(abs(found.objective), 1e-9)
        status = SolveStatus.OPTIMAL if gap <= self.limits.gap + _NOISE else unproved
        if not found.assignments:
            return self._solution(found, SolveStatus.EMPTY, bound)
        return self._solution(found, status, bound, gap)

    def _solution(self, found: _Found, status: SolveStatus, bound: float | None, gap: float | None = None) -> Solution:
        placed = {a.job_id for a in found.assignments}
        unplaced = {
            job_id: self.hopeless.get(job_id) or outranked(self.problem, c)
            for job_id, c in self.by_id.items()
            if job_id not in placed
        }
        return Solution(
            window=self.problem.window,
            policy=self.problem.policy,
            status=status,
            assignments=found.assignments,
            gap=gap,
            objective=found.objective,
            bound=bound,
            build_s=self.build_s,
            solve_s=self.solve_s,
            unplaced=unplaced,
            note=self.note,
        )


def _fill_shares(stock: Stock, candidates: list[Candidate]) -> tuple[Assignment, ...]:
    """Shares that go into partly used devices alone cost no idle device: placed before the model."""
    return fill(stock, (c for c in candidates if is_share(c)), open_devices=False)
