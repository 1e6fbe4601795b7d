"""Run times predicted from history: how wrong, how often within the interval, how fast, how large.

Jobs are replayed in the order of events: predicted when they are submitted, learned from when they end. They start
as FCFS with backfilling lets them (`streamsched.sim.fast`) on the scenario's cluster; jobs of the trace before
the slice are replayed first and not counted. Trees are fitted now and then on what had ended by then.

Errors are of the median, in ln(seconds): 0.69 is a factor of two. Pinball: mean over the five levels. Coverage: share
of run times within the 90 % interval; a run that the trace cuts counts as covered when the interval reaches beyond the
cut, and is left out of the errors, as cancelled runs are of all of it. Members alone are as they are, not calibrated.
`after 60 min`: the combination's answer for
what is left to jobs that have run so long, each at the moment it reaches that age.
"""

from __future__ import annotations

import bisect
import csv
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from rich.table import Table

from loadgen.generate import Recurrence, WorkloadOptions, generate_recurrent
from loadgen.jobs import parse_moment
from loadgen.trace import Window, read_trace
from streamsched.errors import UserError
from streamsched.predict import LEVELS, Combination, Ending, Features, Finished, training
from streamsched.predict import curves as grid
from streamsched.predict.boosting import Trees
from streamsched.predict.combination import MEMBERS
from streamsched.predict.curves import LONGEST_S
from streamsched.predict.pinball import pinball
from streamsched.predict.replay import moments
from streamsched.predict.state import from_bytes, to_bytes
from streamsched.sim.fast import Workload, fits_cluster, simulate
from streamsched.sim.foresight import HISTORY_JOBS, as_finished

from . import _cases

ACME = "acme/converted_kalos_trace.csv"
ACME_NODES = 302
TRAIN_EVERY = 10_000
"""Ended jobs from one training to the next."""
RUNNING_EVERY_S = 3_600.0
"""How often the predictors are told what runs."""
AGES_S = (600.0, 3_600.0, 21_600.0)
"""Running jobs are asked about again at these ages, and what is left to them is judged."""
ALIVE = 1.0 - np.array(LEVELS)
BASELINES = ("global median", "group median", "user median")


@dataclass(frozen=True)
class Case:
    """Jobs by submission with their starts and ends; the first `warm_up` are not counted."""

    name: str
    jobs: list[Finished]
    start_s: list[float]
    warm_up: int


# ── cases ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def cases(quick: bool, wanted: Sequence[str]) -> Iterator[Case | str]:
    """Cases, or why one is left out."""
    makers: dict[str, Callable[[], Case]] = {name: lambda name=name: of_slice(name, quick) for name in _cases.SLICES}  # type: ignore[misc]
    makers |= {"acme": of_acme, "recurrent": lambda: of_generated(3_000 if quick else 20_000)}
    for name, make in makers.items():
        if name in wanted:
            try:
                yield make()
            except (UserError, OSError) as error:
                yield f"{name}: left out, {error}"


def of_slice(name: str, quick: bool) -> Case:
    file, first, before, nodes = _cases.SLICES[name]
    at = parse_moment(first)
    jobs = read_trace(_cases.traces() / file, Window(None, parse_moment(before))).jobs
    history = [job for job in jobs if job.submit_s < at][-2_000 if quick else -HISTORY_JOBS :]
    counted = [job for job in jobs if job.submit_s >= at][: 2_000 if quick else None]
    told = [as_finished(job) for job in (*history, *counted)]
    columns = [job.features for job in told], [job.run_s for job in told], [job.ending for job in told]
    return _scheduled(name, *columns, nodes, len(history))


def of_acme() -> Case:
    """Kalos: the duration is its iterations times what the file says one takes. Nothing but GPUs is known of a job."""
    with (_cases.traces() / ACME).open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows.sort(key=lambda row: float(row["arrival_time"]))
    features = [
        Features(gpus=int(row["gpu_workers"]), job_id=row["job_id"], submitted_at=float(row["arrival_time"]))
        for row in rows
    ]
    took = [
        int(row["num_iteration"]) * (float(row["iteration_computing_time"]) + float(row["iteration_networking_time"]))
        for row in rows
    ]
    return _scheduled("acme", features, took, [Ending.COMPLETED] * len(rows), ACME_NODES, 0)


def of_generated(jobs: int) -> Case:
    """Recurrent users with names; a quarter is warm-up. Failed and cancelled runs are among them."""
    made = generate_recurrent(WorkloadOptions(jobs=jobs, seed=5, load=0.9, cluster_gpus=640, gpus_max=64), Recurrence())
    features = [
        Features(
            gpus=found.job.gpus,
            tenant=found.job.tenant,
            user=found.user,
            name=found.name,
            job_id=str(found.job.index),
            submitted_at=found.job.submit_s,
        )
        for found in made
    ]
    endings = [Ending.CLAMPED if found.job.clamped else Ending(found.ending) for found in made]
    return _scheduled("recurrent", features, [found.job.duration_s for found in made], endings, 80, jobs // 4)


def _scheduled(
    name: str, features: list[Features], run_s: list[float], endings: list[Ending], nodes: int, warm_up: int
) -> Case:
    """Starts and ends by FCFS with backfilling; the warm-up is a schedule of its own, as the slice is in a scenario."""
    starts: list[float] = []
    ends: list[float] = []
    for part in (slice(0, warm_up), slice(warm_up, None)):
        if not features[part]:
            continue
        workload = Workload(
            np.array([job.submitted_at for job in features[part]]),
            np.array(run_s[part]),
            np.array([job.gpus for job in features[part]], np.int64),
        )
        if not fits_cluster(workload.gpus, [8] * nodes).all():
            raise UserError("a job is larger than the cluster")
        outcome = simulate(workload, [8] * nodes)
        starts += outcome.start_s.tolist()
        ends += outcome.finish_s.tolist()
    jobs = [
        Finished(features=job, run_s=took, ending=ending, ended_at=end)
        for job, took, ending, end in zip(features, run_s, endings, ends, strict=True)
    ]
    return Case(name, jobs, starts, warm_up)


# ── baselines ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Medians:
    """All run times seen by a key (ln s, sorted); everybody's where the key has had none; a guess where nobody has."""

    key: Callable[[Features], str]
    seen: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def observe(self, job: Finished) -> None:
        value = _ln(job.run_s)
        for key in {"", self.key(job.features)}:
            bisect.insort(self.seen[key], value)

    def quantiles(self, job: Features) -> tuple[float, ...]:
        values = self.seen.get(self.key(job)) or self.seen.get("") or [_ln(1800.0)]
        return tuple(_quantile(values, level) for level in LEVELS)


def _quantile(ascending: Sequence[float], level: float) -> float:
    """As numpy's, without looking at all of the values."""
    place = level * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)


def baselines() -> dict[str, Medians]:
    keys: tuple[Callable[[Features], str], ...] = (
        lambda job: "",
        lambda job: f"{job.tenant} {job.gpus}",
        lambda job: job.owner,
    )
    return {name: Medians(key) for name, key in zip(BASELINES, keys, strict=True)}


# ── the replay ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Score:
    """Of one predictor."""

    errors: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    covered: list[bool] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)

    def add(self, quantiles: Sequence[float], job: Finished) -> None:
        value = _ln(job.run_s)
        self.widths.append(quantiles[-1] - quantiles[0])
        if job.censored:
            if job.ending is Ending.CLAMPED:
                self.covered.append(quantiles[-1] >= value)
            return
        self.errors.append(abs(value - quantiles[len(quantiles) // 2]))
        self.losses.append(pinball(quantiles, value))
        self.covered.append(quantiles[0] <= value <= quantiles[-1])


def replay(case: Case, predictor: Combination, note: Callable[[str], None]) -> dict[str, Score]:
    """Scores by predictor, of the jobs after the warm-up, and by age of running ones."""
    plain, scores = baselines(), defaultdict[str, Score](Score)
    told_s, trained, version = -math.inf, 0, count(1)
    for moment in moments(case.jobs, case.start_s, AGES_S):
        for number in moment.ended:
            predictor.observe(case.jobs[number])
            for medians in plain.values():
                medians.observe(case.jobs[number])
        if moment.now_s - told_s >= RUNNING_EVERY_S:
            told_s = moment.now_s
            running = moment.running
            predictor.set_running(
                [case.jobs[i].features for i in running], [moment.now_s - start for start in running.values()]
            )
        warm = moment.asked[0][0] < case.warm_up
        if _due(predictor, trained, warm, case):
            trained = predictor.boosting.observed
            _train(predictor, next(version), note, case.name)
        _ask(case, predictor, moment.asked, plain, scores)
    weights = ", ".join(f"{name} {weight:.2f}" for name, weight in predictor.weights().items())
    note(f"{case.name}: weights at the end: {weights}; {predictor.drift()}")
    return dict(scores)


def _due(predictor: Combination, trained: int, warm: bool, case: Case) -> bool:
    boosting = predictor.boosting
    first = not warm and case.warm_up > 0 and boosting.trees is None and not trained
    return len(boosting.finished) >= training.JOBS_LEAST and (boosting.observed - trained >= TRAIN_EVERY or first)


def _train(predictor: Combination, version: int, note: Callable[[str], None], name: str) -> None:
    began = time.perf_counter()
    jobs = list(predictor.boosting.finished)
    try:
        predictor.boosting.use(Trees(training.fit(jobs, version, seed=1)))
    except UserError as error:
        note(f"{name}: no trees: {error}")
        return
    note(f"{name}: trained on {len(jobs):,} in {time.perf_counter() - began:.1f} s")


def _ask(
    case: Case,
    predictor: Combination,
    asked: Sequence[tuple[int, float]],
    plain: dict[str, Medians],
    scores: dict[str, Score],
) -> None:
    submitted = [i for i, age in asked if not age]
    predictor.expect([case.jobs[i].features for i in submitted])
    running = [(i, age) for i, age in asked if age and i >= case.warm_up]
    answers = predictor.predict_many([case.jobs[i].features for i, _ in running], [age for _, age in running])
    for (i, age), answer in zip(running, answers, strict=True):
        job = case.jobs[i]
        scores[f"after {age / 60:.0f} min"].add([_ln(q) for q in answer.at], replace(job, run_s=job.run_s - age))
    counted = [case.jobs[i] for i in submitted if i >= case.warm_up]
    for job in counted:
        scores["combination"].add(predictor.expected[job.features.job_id].answer, job)
        for name, medians in plain.items():
            scores[name].add(medians.quantiles(job.features), job)
    for name, member in zip(MEMBERS, predictor.members, strict=True):
        if counted and (name != "boosting" or predictor.boosting.trees is not None):
            told = grid.times(member.curves([job.features for job in counted]), np.tile(ALIVE, (len(counted), 1)))
            for job, quantiles in zip(counted, np.log(told).tolist(), strict=True):
                scores[name].add(quantiles, job)


def _ln(seconds: float) -> float:
    return math.log(min(max(seconds, 1.0), LONGEST_S))


def table(case: Case, scores: dict[str, Score]) -> Table:
    counted = len(case.jobs) - case.warm_up
    out = Table(title=f"{case.name}: {counted:,} jobs predicted at submission, {case.warm_up:,} before them as history")
    for column in ("predictor", "jobs", "median |error|", "mean |error|", "pinball", "90 % covers", "width, ln"):
        out.add_column(column, justify="left" if column == "predictor" else "right")
    for name in (*BASELINES, *MEMBERS, "combination", *(f"after {age / 60:.0f} min" for age in AGES_S)):
        if name not in scores:
            out.add_row(name, "0", *["-"] * 5)
            continue
        score = scores[name]
        out.add_row(
            name,
            f"{len(score.covered):,}",
            f"{np.median(score.errors):.3f}",
            f"{np.mean(score.errors):.3f}",
            f"{np.mean(score.losses):.4f}",
            f"{100 * np.mean(score.covered):.1f} %",
            f"{np.mean(score.widths):.2f}",
        )
    return out


# ── speed and memory ─────────────────────────────────────────────────────────────────────────────────────────────────


def synthetic(number: int, draw: np.random.Generator) -> Finished:
    """One of many users' many families; a tenth are names never seen before."""
    user, family = int(draw.zipf(1.3)) % 5_000, int(draw.integers(20))
    fresh = draw.random() < 0.1
    words = _letters(int(draw.integers(1 << 40))) if fresh else f"train_{_letters(user * 20 + family)}"
    features = Features(
        gpus=1 << (family % 5),
        tenant=f"tenant-{user % 50}",
        user=f"user-{user}",
        name=f"{words}_{number}",
        job_id=f"j{number}",
        submitted_at=60.0 * number,
    )
    run_s = float(np.exp(3.0 + 0.3 * family + 0.5 * draw.standard_normal()))
    return Finished(features=features, run_s=run_s, ended_at=60.0 * number + run_s)


def _letters(number: int) -> str:
    out = ""
    while number or not out:
        number, digit = divmod(number, 26)
        out += chr(97 + digit)
    return out + "q"


def costs(predictor: Combination, jobs: int, note: Callable[[str], None]) -> None:
    """Observe `jobs` synthetic jobs, in batches of 1,000 announced beforehand."""
    draw, observe_s, expect_s, since = np.random.default_rng(1), 0.0, 0.0, 0
    for first in range(0, jobs, 1_000):
        batch = [synthetic(first + i, draw) for i in range(1_000)]
        began = time.process_time()
        predictor.expect([job.features for job in batch])
        expected = time.process_time()
        for job in batch:
            predictor.observe(job)
        expect_s += expected - began
        observe_s += time.process_time() - expected
        if first + 1_000 in (10_000, 100_000, jobs):
            done = first + 1_000 - since
            note(
                f"{first + 1_000:,} observed: {predictor.memory_bytes / 1e6:.0f} MB held, {_resident_mb():.0f} in all; "
                f"since then expect {1e6 * expect_s / done:.0f} us, observe {1e6 * observe_s / done:.0f} us a job"
            )
            observe_s, expect_s, since = 0.0, 0.0, first + 1_000
    began = time.process_time()
    data = to_bytes(predictor)
    wrote = time.process_time()
    from_bytes(data)
    note(
        f"state: {len(data) / 1e6:.1f} MB, {wrote - began:.2f} s to write, {time.process_time() - wrote:.2f} s to read"
    )
    _train(predictor, 1, note, "costs")
    asked = [synthetic(jobs + i, draw).features for i in range(1_000)]
    ages = draw.exponential(3_600.0, 1_000)
    predictor.set_running(asked, ages.tolist())
    for member, name in zip(predictor.members, MEMBERS, strict=True):
        note(f"1,000 predictions, {name} alone: {_best_ms(lambda member=member: member.predict_many(asked)):.1f} ms")  # type: ignore[misc]
    weights = ", ".join(f"{name} {weight:.2f}" for name, weight in predictor.weights().items())
    note(f"1,000 predictions: {_best_ms(lambda: predictor.predict_many(asked)):.1f} ms; weights: {weights}")
    fresh = [[synthetic(jobs + 1_000 * n + i, draw).features for i in range(1_000)] for n in range(1, 9)]
    note(f"1,000 predictions of jobs never asked about: {_best_ms(lambda: predictor.predict_many(fresh.pop())):.1f} ms")
    note(f"1,000 predictions for running jobs: {_best_ms(lambda: predictor.predict_many(asked, ages)):.1f} ms")
    note(f"1,000 of them as arrays (`times`): {_best_ms(lambda: predictor.times(asked, ages)):.1f} ms")
    note(f"1,000 ranks of Gittins: {_best_ms(lambda: predictor.gittins_s(asked, ages)):.1f} ms")
    predictor.shares.of = [1.0 / len(MEMBERS)] * len(MEMBERS)
    note(f"1,000 as arrays where every member counts: {_best_ms(lambda: predictor.times(asked, ages)):.1f} ms")
    note(f"1 prediction: {_best_ms(lambda: predictor.predict(asked[0])):.2f} ms")


def _resident_mb() -> float:
    """The whole process; 0 where /proc does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _best_ms(call: Callable[[], object]) -> float:
    """Median of seven; of the processor's time, so that other work on the machine counts less."""
    call()
    took = []
    for _ in range(7):
        began = time.process_time()
        call()
        took.append(time.process_time() - began)
    return 1e3 * float(np.median(took))


def run(quick: bool) -> None:
    """STREAMSCHED_BENCH_CASES: philly-4w,venus-4w,acme,recurrent,costs (all)."""
    console = _cases.console(160)
    known = ("philly-4w", "venus-4w", "acme", "recurrent", "costs")
    wanted = _cases.chosen("prediction", known, console)
    for case in cases(quick, wanted):
        if isinstance(case, str):
            console.print(f"prediction: {case}", markup=False)
            continue
        predictor = Combination()
        scores = replay(case, predictor, lambda line: console.print(line, markup=False, style="dim"))
        console.print(table(case, scores))
    if "costs" in wanted:
        costs(Combination(), 20_000 if quick else 1_000_000, lambda line: console.print(line, markup=False))
