"""The part of a trace and the cluster that a command is given: options, what they come to, and the jobs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console

from streamsched.errors import UserError

if TYPE_CHECKING:
    from loadgen.jobs import TraceJob
    from loadgen.trace import Trace
    from streamsched.sim.nodes import NodeGroup

ScenarioFile = Annotated[Path | None, typer.Option("--scenario", help="TOML file with a trace, its slice and nodes.")]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="A trace file, with --nodes.")]
Nodes = Annotated[str | None, typer.Option(help="COUNTxGPUS[:TYPE][,...], such as 80x8:P100.")]
From = Annotated[str | None, typer.Option("--from", help="Jobs submitted at or after (2017-10-02[T12:00:00]).")]
Before = Annotated[str | None, typer.Option("--before", help="Jobs submitted before.")]
Limit = Annotated[int | None, typer.Option(min=1, help="The first N jobs of these.")]


@dataclass(frozen=True)
class Slice:
    """Jobs of a trace by their submission, epoch seconds, and the nodes they are for."""

    name: str
    trace: Path
    nodes: tuple[NodeGroup, ...]
    submitted_from: float | None
    submitted_before: float | None
    limit: int | None
    """The first so many of these jobs."""

    @property
    def node_gpus(self) -> list[int]:
        """[node]"""
        return [group.gpus for group in self.nodes for _ in range(group.count)]

    @property
    def cluster(self) -> str:
        """In words."""
        return ", ".join(map(str, self.nodes))

    def read(self) -> Trace:
        """Raises UserError where there is no job."""
        return _read(self.trace, self.submitted_from, self.submitted_before, self.limit)

    def before(self) -> list[TraceJob]:
        """Those submitted before the slice; none where it has no beginning."""
        if self.submitted_from is None:
            return []
        try:
            return _read(self.trace, None, self.submitted_from, None).jobs
        except UserError:  # there are none
            return []

    def fitting(self) -> list[TraceJob]:
        """Jobs that the nodes can hold. Raises UserError where there is none."""
        from streamsched.sim.fast import fits_cluster

        jobs = self.read().jobs
        able = fits_cluster(np.array([job.gpus for job in jobs], np.int64), self.node_gpus)
        if not able.any():
            raise UserError(f"{self.trace}: no job fits these nodes")
        return [job for job, fits in zip(jobs, able.tolist(), strict=True) if fits]

    def refused(self) -> str:
        """Rows of the trace that are not used, in words; empty: none."""
        refusals = self.read().refusals
        return f"{self.trace}: refused rows: {refusals.describe()}" if refusals.total else ""


@lru_cache(maxsize=2)
def _read(trace: Path, submitted_from: float | None, submitted_before: float | None, limit: int | None) -> Trace:
    """Once for all that a command asks of them: the jobs of the slice, and those before it."""
    from loadgen.trace import Window, read_trace

    return read_trace(trace, Window(submitted_from, submitted_before, limit))


def given_slice(
    scenario: Path | None,
    trace: Path | None,
    nodes: str | None,
    submitted_from: str | None,
    submitted_before: str | None,
    limit: int | None,
) -> Slice:
    """By the options, which go before what the scenario says. Raises UserError for what is missing or is none."""
    from loadgen.jobs import parse_moment
    from streamsched.sim.nodes import parse_nodes
    from streamsched.sim.scenario import read_scenario

    start, end = (parse_moment(text) if text else None for text in (submitted_from, submitted_before))
    if scenario is not None:
        if trace is not None:
            raise UserError("give --scenario, or --trace and --nodes, and not both")
        told = read_scenario(scenario)
        groups = parse_nodes(nodes) if nodes else told.nodes or _listed(told.node_list)
        start = told.submitted_from if start is None else start
        end = told.submitted_before if end is None else end
        return Slice(told.name, told.trace, groups, start, end, limit)
    if trace is None or nodes is None:
        raise UserError("give --scenario FILE, or --trace FILE and --nodes 80x8:P100")
    return Slice(trace.name, trace, parse_nodes(nodes), start, end, limit)


def _listed(path: Path | None) -> tuple[NodeGroup, ...]:
    """Like nodes together, in the order of the file. Their CPUs and memory are not simulated."""
    from loadgen.formats.openb_csv import read_machines
    from streamsched.sim.nodes import NodeGroup

    assert path is not None
    machines, refused = read_machines(path)
    counts = Counter((machine.gpus, machine.gpu_type) for machine in machines)
    if refused.total:
        Console(stderr=True).print(f"{path}: nodes left out: {refused.describe()}", markup=False, soft_wrap=True)
    return tuple(NodeGroup(count, gpus, name) for (gpus, name), count in counts.items())
