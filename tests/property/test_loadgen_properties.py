"""Whatever is in a trace or told to the fleet: no crash, nothing uncounted, no device given twice."""

from __future__ import annotations

import csv
import re
import tempfile
from pathlib import Path

import polars
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.fleet import DURATION_LABEL, FleetOptions, SimulatedFleet
from loadgen.formats import neutral_csv
from loadgen.generate import PROFILES, WorkloadOptions, generate
from loadgen.history import History, Stamped, audit
from loadgen.jobs import TraceJob, gang_of, tenant_name
from loadgen.trace import read_trace
from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.core.instructions import Place, Preempt, Revoke, Why
from streamsched.core.model import Allocation
from streamsched.errors import UserError
from streamsched.sim.nodes import parse_nodes

HEADERS = (
    "timestamp,duration,num_gpus,gpu_time,cluster",
    "job_id,submit_time,duration,gpu_num,duration_clamped",
    "vc,gpu_num,state,submit_time,duration,queue",
    "job_id,submit_s,duration_s,gpus,tenant",
)
CELLS = st.one_of(
    st.sampled_from(
        [
            "",
            "1",
            "0",
            "-3",
            "8.0",
            "nan",
            "inf",
            "1e400",
            "2017-10-09 07:01:55",
            "2017-13-01 00:00:00",
            "COMPLETED",
            '"',
            "\0",
        ]
    ),
    st.text(max_size=8),
)


@given(header=st.sampled_from(HEADERS), rows=st.lists(st.lists(CELLS, max_size=8), max_size=12), cut=st.integers(0, 40))
def test_every_row_is_a_job_or_counted(header: str, rows: list[list[str]], cut: int) -> None:
    lines = [",".join(row).replace("\r", "").replace("\n", "") for row in rows]
    body = "\n".join(lines)
    body = body[: max(0, len(body) - cut)]
    lines = [line for line in body.split("\n") if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_text(f"{header}\n{body}", encoding="utf-8", errors="replace", newline="")
        try:
            trace = read_trace(path)
        except UserError as error:
            message = str(error)
        else:
            message = ""
    if message:
        assert "no usable job" in message
        return
    assert len(trace.jobs) + trace.refusals.total == len(lines)
    assert [job.index for job in trace.jobs] == list(range(len(trace.jobs)))
    for job in trace.jobs:
        assert job.gpus >= 1
        assert 0 <= job.duration_s < float("inf")
        arrival = m.JobArrival(job_id="j", submitted_at=0.0, gpus_per_worker=1, tenant=job.tenant)
        codec.decode_arrival(codec.encode(arrival))


@given(content=st.binary(max_size=300))
def test_any_bytes_are_a_trace_or_a_clear_error(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(content)
        try:
            read_trace(path)
        except UserError as error:
            message = str(error)
        else:
            message = str(path)
    assert str(path) in message


NUMBERS = st.none() | st.integers(-2, 4) | st.floats() | st.sampled_from([460.0, 1e11, 1e12, 2500, 100_001])
TEXTS = st.none() | st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=6)


@given(
    rows=st.lists(st.tuples(*[NUMBERS] * 8, *[TEXTS] * 3), min_size=1, max_size=8), good=st.booleans(), kept=st.data()
)
def test_parquet_is_read_as_the_csv_of_the_same_cells(
    rows: list[tuple[object, ...]], good: bool, kept: st.DataObject
) -> None:
    numbers = ("submit_s", "duration_s", "gpus", *neutral_csv.COLUMNS[5:8], "queued_s", "attempts")
    texts = ("tenant", "gpu_types", "group")
    named = [dict(zip(numbers + texts, row, strict=True)) | {"job_id": "j"} for row in rows]
    if good:
        named.append(dict.fromkeys(numbers + texts) | {"job_id": "g", "submit_s": 1, "duration_s": 2, "gpus": 1})
    optional = kept.draw(st.sets(st.sampled_from(neutral_csv.COLUMNS[4:])))
    columns = [name for name in neutral_csv.COLUMNS if name in neutral_csv.COLUMNS[:4] or name in optional]
    kinds = {name: polars.String if name in (*texts, "job_id") else polars.Float64 for name in columns}
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "trace.csv", Path(folder) / "trace.parquet"
        with plain.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_cell(row[name]) for name in columns] for row in named)
        cells = {name: [row[name] for row in named] for name in columns}
        polars.DataFrame(cells, schema=kinds, strict=False).write_parquet(packed)
        assert _seen(packed, header=0) == _seen(plain, header=1)


def _cell(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _seen(path: Path, header: int) -> tuple[list[TraceJob], dict[str, int], dict[str, list[int]]] | str:
    """Jobs and refusals by row, or the error without the name of the file."""
    try:
        trace = read_trace(path)
    except UserError as error:
        return re.sub(r"^\S+: |\((line|row)s? .*?\)", "", str(error))
    jobs = [replace(job, line=job.line - header) for job in trace.jobs]
    lines = {kind: [line - header for line in lines] for kind, lines in trace.refusals.lines.items()}
    return jobs, trace.refusals.count, lines


@given(gpus=st.integers(1, 5000), per_node=st.integers(1, 16))
def test_a_gang_has_the_gpus_asked_for_and_satisfies_the_contract(gpus: int, per_node: int) -> None:
    gang = gang_of(gpus, per_node)
    assert gang.workers * gang.gpus_per_worker + gang.remainder_gpus == gpus
    arrival = m.JobArrival(
        job_id="j",
        submitted_at=0.0,
        workers=gang.workers,
        gpus_per_worker=gang.gpus_per_worker,
        remainder_gpus=gang.remainder_gpus,
    )
    assert codec.decode_arrival(codec.encode(arrival)) == arrival


@given(text=st.text(max_size=300))
def test_any_tenant_has_a_name_that_the_contract_takes(text: str) -> None:
    arrival = m.JobArrival(job_id="j", submitted_at=0.0, gpus_per_worker=1, tenant=tenant_name(text))
    assert codec.decode_arrival(codec.encode(arrival)).tenant == arrival.tenant


@given(
    jobs=st.integers(1, 200),
    seed=st.integers(0, 1000),
    profile=st.sampled_from(sorted(PROFILES)),
    burstiness=st.floats(0, 3),
    load=st.none() | st.floats(0.01, 5.0),
)
def test_generated_jobs_are_sorted_complete_and_valid(
    jobs: int, seed: int, profile: str, burstiness: float, load: float | None
) -> None:
    workload = generate(
        WorkloadOptions(jobs=jobs, seed=seed, profile=profile, burstiness=burstiness, load=load, cluster_gpus=64)
    )
    assert len(workload) == jobs
    assert workload[0].submit_s == 0.0
    assert [job.submit_s for job in workload] == sorted(job.submit_s for job in workload)
    assert all(job.gpus >= 1 and 1.0 <= job.duration_s <= PROFILES[profile].duration_max_s for job in workload)


RUN = st.integers(0, 7)
STEPS = st.lists(
    st.tuples(st.sampled_from(["place", "preempt", "revoke", "wait"]), RUN, st.integers(0, 3), st.integers(0, 5)),
    max_size=40,
)


@given(steps=STEPS, seed=st.integers(0, 50), faults=st.booleans())
def test_whatever_the_fleet_is_told_it_never_runs_a_device_twice(
    steps: list[tuple[str, int, int, int]], seed: int, faults: bool
) -> None:
    """Runs that it accepted form a history without conflicts, and in the end nothing is held."""
    options = FleetOptions(
        seed=seed,
        start_delay_s=0.5,
        checkpoint_s=1.0,
        reject_share=0.2 * faults,
        fail_share=0.2 * faults,
        duplicate_share=0.3 * faults,
    )
    fleet = SimulatedFleet("p", parse_nodes("1x4:P100"), options)
    history, now = History(), 0.0

    def advance() -> None:
        history.completions += [Stamped(now, report) for report in fleet.advance(now)]

    for kind, run, gpu, seconds in steps:
        ids = {"placement_id": f"r{run}", "job_id": f"j{run % 3}", "attempt": 1}
        decision: Place | Preempt | Revoke
        if kind == "place":
            allocations = (Allocation(node_id="p-p100-0000", gpus=(gpu,)),)
            labels = {DURATION_LABEL: str(run)}
            decision = Place(**ids, allocations=allocations, lease_until=0.0, why=Why(), labels=labels)  # type: ignore[arg-type]
        elif kind == "preempt":
            decision = Preempt(**ids, reason="")  # type: ignore[arg-type]
        elif kind == "revoke":
            decision = Revoke(**ids, reason="")  # type: ignore[arg-type]
        else:
            now += seconds
            advance()
            continue
        message = m.Placement(pool="p", time=now, epoch=1, seq=1, decision=decision)
        history.placements.append(Stamped(now, message))
        fleet.handle(message, now)
        advance()
    now += 1000.0
    advance()
    assert fleet.live_runs == 0
    assert not any(sample.utilization for node in fleet.telemetry(now) for sample in node.gpus)
    rejected = {r.placement_id for _, r in history.completions if isinstance(r, m.Rejected)}
    history.placements = [s for s in history.placements if s.message.decision.placement_id not in rejected]
    found = audit(history, capacities=fleet.capacities(), allow_repeats=True)
    assert not {"device-conflict", "over-capacity", "unknown-node"} & set(found.counts)
