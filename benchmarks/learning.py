"""Learned priorities: schedules and decisions per second in the compiled simulation, and the time to rank a queue.

The jobs are drawn, not real: sizes of 1 to 8 GPUs, log-normal run times, estimates that are wrong by a factor of about
two, Poisson arrivals. "load": GPU time asked for of what there is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from streamsched.core import events as ev
from streamsched.core import window
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.model import JobSpec, NodeSpec
from streamsched.learn.windows import drawn_instance
from streamsched.policy import network as networks
from streamsched.policy.expression import ByExpression, parse
from streamsched.policy.features import Features
from streamsched.policy.network import ByNetwork, Network
from streamsched.policy.rules import FirstComeFirstServed
from streamsched.sim.scored import Instance, episode, measure, simulate_expression

RULE = "min(wait_s, 3600) / work_gpu_s + if_less(free_gpus, 8, -gpus, 0) - log1p(run_s) * sqrt(queue_length)"
SHIPPED = Path(__file__).parent.parent / "models/venus-4w-preemptive/network.bin"
LOADS = (0.9, 1.1, 1.3, 1.6)


def instance(seed: int, load: float) -> Instance:
    """500 jobs on 8 nodes of 8 GPUs."""
    return drawn_instance(seed, jobs=500, nodes=8, load=load)


def network() -> Network:
    """Untrained, of two hidden layers of 32."""
    like = Network.blank(32, 32)
    return like.with_weights(np.random.default_rng(0).normal(0.0, 0.3, len(like.weights)))


def search(console: Console, quick: bool) -> None:
    """Random trees, as those of a first generation."""
    from streamsched.learn.gp import GpConfig, evolve, random_expressions

    trees = random_expressions(50 if quick else 500)
    table = Table("load", "jobs waiting", "schedules/s, 1 thread", "2 threads", title=f"{len(trees)} trees x 500 jobs")
    for seed, load in enumerate(LOADS):
        one = instance(seed, load)
        waiting = simulate_expression(one, parse(RULE))
        measure([one], trees[:1])
        speeds = []
        for threads in (1, 2):
            began, cpu = time.perf_counter(), time.process_time()
            measure([one], trees, threads)
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            speeds.append(f"{len(trees) / wall:,.0f} ({len(trees) / cpu:,.0f} per s of CPU)")
        table.add_row(f"{load:g}", f"{waiting.queue_job_s / waiting.span_s:.1f}", *speeds)
    console.print(table)
    config = GpConfig(population=50, generations=4) if quick else GpConfig()
    instances = [instance(seed, load) for seed, load in enumerate(LOADS)]
    began, cpu = time.perf_counter(), time.process_time()
    done = evolve(instances, config)
    console.print(
        f"evolve: {config.population} trees x {config.generations} generations x {config.instances} instances, parents"
        f" judged again: {done.schedules:,} schedules, with operators and selection in"
        f" {time.perf_counter() - began:.1f} s ({time.process_time() - cpu:.1f} s of CPU)"
    )


def decisions(console: Console, quick: bool) -> None:
    net, one = network(), instance(1, 1.3)
    episode(one, net, 0)
    cpu, made = time.process_time(), 0
    for seed in range(20 if quick else 200):
        made += len(episode(one, net, seed).job)
    console.print(f"episodes: {made / (time.process_time() - cpu):,.0f} sampled decisions per s of CPU")


def ranking(console: Console, quick: bool) -> None:
    queued = 1_000 if quick else 10_000
    state = ClusterState("p", SchedulerConfig(), FirstComeFirstServed())
    for number in range(queued // 8):
        state.handle(ev.NodeJoined(spec=NodeSpec(node_id=f"n{number}", gpu_type="any", gpus=8)), 0.0)
    for number in range(queued):
        spec = JobSpec(job_id=f"j{number}", submitted_at=0.0, gpus_per_worker=1 + number % 8, estimate_s=1.0 + number)
        state.handle(ev.JobArrived(spec=spec), 0.0)
    jobs, features = list(state.queued_jobs()), Features()
    by_expression, by_network = ByExpression("e", parse(RULE), features), ByNetwork("n", network(), features)
    shipped = ByNetwork("shipped", networks.load(SHIPPED), features)
    calls: dict[str, Callable[[], object]] = {
        "features": lambda: features(jobs, state, 60.0),
        "features and expression": lambda: by_expression.scores(jobs, state, 60.0),
        "features and network of 2 x 32": lambda: by_network.scores(jobs, state, 60.0),
        "the core ranks by it: all this, and sorted": lambda: window.rank(state, by_network, 60.0),
        f"the core ranks by {SHIPPED.parent.name}": lambda: window.rank(state, shipped, 60.0),
        "the core makes a window of it": lambda: window.build(state, by_network, 1, 60.0),
    }
    table = Table("", "median, ms", "least, ms", title=f"{queued:,} waiting jobs, CPU time of the process")
    for name, call in calls.items():
        call()
        took = []
        for _ in range(30):
            began = time.process_time()
            call()
            took.append(1e3 * (time.process_time() - began))
        table.add_row(name, f"{statistics.median(took):.1f}", f"{min(took):.1f}")
    console.print(table)


def run(quick: bool) -> None:
    console = Console()
    search(console, quick)
    decisions(console, quick)
    ranking(console, quick)
