"""Chaos: workers, Redis and broker die, freeze and forget at random moments; the topics tell that no promise broke.

The short form is part of `make test`; `make chaos` (STREAMSCHED_CHAOS=long) runs the long one. Both print their counts.
STREAMSCHED_CHAOS_SEED repeats the choices of a run (not its timing).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
import uuid
from pathlib import Path

import pytest
from chaos import (
    BOUND_BEYOND_SESSION_S,
    BROKER,
    FLUSH,
    FREEZE,
    KILL,
    REDIS,
    Evidence,
    Form,
    Storm,
    command,
    report,
    same_partition_nowhere,
    seed_of,
)
from rich.console import Console
from service_fixture import Service, installed, pools_apart

from loadgen.fleet import FleetOptions
from loadgen.replay import ReplayOptions, ReplayResult, run_replay
from streamsched.service.history import compare_with_redis
from streamsched.service.stacks import Stack
from streamsched.sim.nodes import parse_nodes

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

LONG = os.environ.get("STREAMSCHED_CHAOS") == "long"
ALL_KINDS = (KILL, FREEZE, REDIS, BROKER, FLUSH)
SPEED = 100.0


def form_of(stack: Stack) -> Form:
    """A broker that keeps nothing cannot be killed, and one that takes its time with groups is not frozen out of."""
    keeps = stack.traits.broker_keeps_data
    kinds = ALL_KINDS if keeps else (KILL, FLUSH)
    if LONG:
        faults = {kind: 6 if kind == KILL else 3 for kind in kinds}
        return Form(20_000, 100.0, "14x8:P100", faults, gap_s=(0.0, 10.0), after_kill_s=13.0)
    return Form(600, 40.0, "5x8:P100", dict.fromkeys(kinds, 1), gap_s=(0.5, 2.0), after_kill_s=4.0)


def write_trace(path: Path, form: Form, rng: random.Random) -> Path:
    """Jobs of 1 to 16 GPUs for 0.2 to 3 real seconds."""
    rows = ["job_id,submit_s,duration_s,gpus,tenant"]
    for number in range(form.jobs):
        at = int(SPEED * form.arrivals_s * number / form.jobs)
        rows.append(f"j{number},{at},{rng.randint(20, 300)},{rng.choice((1, 1, 2, 4, 8, 16))},t{number % 5}")
    path.write_text("\n".join(rows) + "\n")
    return path


async def storm_over(storm: Storm, trace: Path) -> ReplayResult:
    service = storm.service
    options = ReplayOptions(
        trace=trace,
        speed=SPEED,
        nodes={pool: parse_nodes(storm.form.nodes) for pool in service.settings.pools},
        pool=None,
        job_prefix="job",
        stall_timeout_s=120.0,
        allow_repeated_placements=True,
        fleet=FleetOptions(start_delay_s=0.01, duplicate_share=0.02, delay_s=0.05),
    )
    supervisor = asyncio.create_task(storm.supervise())
    watcher = asyncio.create_task(storm.watch())
    beside = asyncio.create_task(storm.rage())
    try:
        with (service.folder / "replay.log").open("w") as log:
            console = Console(file=log, width=200)
            result = await run_replay(options, service.stack.kafka, service.names, console)
        await beside
        await asyncio.to_thread(service.wait_for, storm.settled, "all pools to be done", 120.0)
    finally:
        tasks = (beside, watcher, supervisor)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return result


def test_chaos(
    private_stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aiokafka")  # it complains of every broken connection
    seed = seed_of()
    rng = random.Random(seed)
    form = form_of(private_stack)
    began = time.monotonic()

    def say(text: object) -> None:
        with capsys.disabled():
            Console(width=110).print(text, highlight=False)

    say(f"\nchaos: STREAMSCHED_CHAOS_SEED={seed}, {form.jobs:,} jobs, {sum(form.faults.values())} faults, {tmp_path}")
    with installed(private_stack, f"t{uuid.uuid4().hex[:8]}", tmp_path, pools_apart(4)) as service:
        assert same_partition_nowhere(service)
        storm = Storm(service, form, rng, say)
        storm.start()
        result = asyncio.run(storm_over(storm, write_trace(tmp_path / "trace.csv", form, rng)))
        stops = storm.stop()
        evidence = Evidence(service)
        checks = {pool: check(service, pool, by_command=LONG or not n) for n, pool in enumerate(service.settings.pools)}
        takeovers = evidence.takeovers(storm.faults)
        last = evidence.last_completion()
        notes = {
            "faults with jobs in flight": f"{sum(f.began < last for f in storm.faults)} of {len(storm.faults)}",
            "executors: decisions that came again": f"{sum(fleet.counts.repeated for fleet in result.fleets):,}",
            "most jobs at one time": f"{evidence.most_in_flight():,}",
            "Redis equal to its journal, byte by byte": f"{list(checks.values()).count([])} of 4 pools",
        }
        say(report(storm, evidence, takeovers, time.monotonic() - began, notes))
        for story in evidence.stories():
            say(story)
        judge(service, storm, evidence, result)
        assert not any(checks.values()), checks
        assert stops == [0] * len(stops), logs(service)
        bound = service.settings.times.session_s + BOUND_BEYOND_SESSION_S
        clean = [t for t in takeovers if t.clean and t.seconds is not None]
        if LONG:  # in the short form a pool may have nothing left to place when its worker dies
            assert all(takeover.seconds is not None for takeover in takeovers)
            assert clean
            late = [t for t in clean if t.seconds is not None and t.seconds > bound]
            assert not [t for t in late if not t.overloaded], (late, bound)


def check(service: Service, pool: str, by_command: bool) -> list[str]:
    """What differs between Redis and the journal folded without any solver."""
    if not by_command:  # the same without the second that a process takes to start
        return asyncio.run(compare_with_redis(service.settings, pool))
    code, said = command(service, "replay", "--pool", pool, "--check")
    return [f"exit code {code}: {said}"] if code else []


def judge(service: Service, storm: Storm, evidence: Evidence, result: ReplayResult) -> None:
    assert not evidence.violations.counts, (evidence.violations.details, logs(service))
    assert result.ok, (result.audit.details, logs(service))
    assert evidence.counts["jobs submitted"] == evidence.counts["completed runs"] == storm.form.jobs
    wanted = {"malformed": storm.mischief["no JSON"], "conflict": storm.mischief["other spec"]}
    refused = {code: len({x.origin for x in evidence.letters if x.code == code}) for code in wanted}
    assert all(refused[code] >= count for code, count in wanted.items()), (refused, wanted)
    # 3 is fenced; 2 is a start while a server is away.
    assert set(storm.exits) <= {2, 3}, (storm.exits, logs(service))
    if LONG:
        assert evidence.last_completion() > storm.faults[-1].ended, "the last fault came too late to hit anything"


def logs(service: Service) -> str:
    bad = [
        f"{worker.log.name}: {line}"
        for worker in service.workers
        for line in worker.lines()
        if " CRITICAL " in line or "Traceback" in line or "Error" in line
    ]
    return f"logs in {service.folder}\n" + "\n".join(bad[-30:])
