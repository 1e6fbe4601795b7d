"""What a live pool pays for predicted run times: asking through the cache, learning, and keeping what was learned.

Times are of the processor, medians of seven. The stall is of the event loop, by the clock, and counts whatever else the
machine does.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from collections.abc import Awaitable, Callable

import numpy as np
from rich.console import Console

from benchmarks.prediction import synthetic
from streamsched.core.model import Job, JobSpec, JobState
from streamsched.predict import Combination, Features, Finished
from streamsched.predict.run_times import STANDS_S, Predicted
from streamsched.predict.state import to_bytes
from streamsched.service.predictions import _AT_ONCE, _RUNNING_MAX

ASKED = 1_000


def run(quick: bool) -> None:
    console = Console()
    predictor, draw = Combination(), np.random.default_rng(1)
    jobs = 20_000 if quick else 200_000
    for first in range(0, jobs, 1_000):
        batch = [synthetic(first + i, draw) for i in range(1_000)]
        predictor.expect([job.features for job in batch])
        _observe(predictor, batch)
    later = [synthetic(jobs + i, draw) for i in range(4 * ASKED)]
    predictor.expect([job.features for job in later])
    console.print(f"after {jobs:,} jobs:", markup=False)
    for line in (*asking(predictor, later[:ASKED]), *learning(predictor, later[ASKED:])):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def asking(predictor: Combination, finished: list[Finished]) -> list[str]:
    """1,000 jobs, as a window asks."""
    now = itertools.count(0.0, STANDS_S)  # every answer is due at every question
    jobs, ran_s = [_job(each.features) for each in finished], [100.0 + n for n in range(len(finished))]
    due, kept = Predicted(predictor, lambda: next(now)), Predicted(predictor, lambda: 0.0)
    kept.expect([each.features for each in finished])
    alone = Predicted(predictor, lambda: 0.0)
    cases = {
        "all due: what is left": lambda: due.remaining_s(jobs, ran_s),
        "all due: ranks": lambda: due.gittins_s(jobs, ran_s),
        "all kept: what is left": lambda: kept.remaining_s(jobs, ran_s),
        "all kept: ranks": lambda: kept.gittins_s(jobs, ran_s),
        "all kept: whole": lambda: kept.whole_s(jobs),
    }
    alone_ms = _once_ms(lambda: [alone.total_s([job], [0.0]) for job in jobs])
    return [
        *(f"1,000 answers, {what} {_median_ms(call):.2f} ms" for what, call in cases.items()),
        f"1,000 answers, all new, one by one: {alone_ms:.0f} ms",
    ]


def learning(predictor: Combination, later: list[Finished]) -> list[str]:
    """What the event loop waits for."""
    slices = [later[n : n + _AT_ONCE] for n in range(0, len(later), _AT_ONCE)]
    longest = max(_once_ms(lambda part=part: _observe(predictor, part)) for part in slices)  # type: ignore[misc]
    running = [job.features for job in later[:_RUNNING_MAX]]
    ages = [100.0] * len(running)
    running_ms = _median_ms(lambda: predictor.set_running(running, ages))
    stall, took, size = asyncio.run(keeping(predictor))
    return [
        f"{_AT_ONCE} jobs learned from in one go: {longest:.0f} ms at most",
        f"{len(running):,} running jobs told as such: {running_ms:.0f} ms",
        f"state: {size / 1e6:.1f} MB packed in {took:.2f} s by a thread; meanwhile the loop stood still for "
        f"{1e3 * stall:.0f} ms at most",
    ]


def _observe(predictor: Combination, jobs: list[Finished]) -> None:
    for job in jobs:
        predictor.observe(job)


async def keeping(predictor: Combination) -> tuple[float, float, int]:
    """(longest stall of the loop, s; time taken, s; bytes)."""
    stalls = [0.0]

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            stalls.append(time.perf_counter() - began - 0.001)

    async def timed(work: Awaitable[bytes]) -> tuple[float, int]:
        began = time.perf_counter()
        data = await work
        return time.perf_counter() - began, len(data)

    watching = asyncio.create_task(watch())
    took, size = await timed(asyncio.to_thread(lambda: zlib.compress(to_bytes(predictor), 1)))
    watching.cancel()
    return max(stalls), took, size


def _job(features: Features) -> Job:
    spec = JobSpec(
        job_id=features.job_id,
        submitted_at=features.submitted_at,
        gpus_per_worker=features.gpus,
        tenant=features.tenant,
        labels={"user": features.user, "name": features.name},
    )
    return Job(spec=spec, seq=0, state=JobState.QUEUED, queued_at=0.0)


def _once_ms(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return 1e3 * (time.process_time() - began)


def _median_ms(call: Callable[[], object]) -> float:
    _once_ms(call)
    return float(np.median([_once_ms(call) for _ in range(7)]))
