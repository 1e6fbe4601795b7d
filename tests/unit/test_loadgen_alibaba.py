"""Alibaba's traces: the tables of PAI v2020, joined and alone, and the pod lists of openb v2023."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from loadgen.trace import Trace, read_trace
from streamsched.errors import UserError

PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"


def folder(tmp_path: Path, **tables: str) -> Path:
    for name, text in tables.items():
        (tmp_path / f"pai_{name}_table.csv").write_text(text)
    return tmp_path


def job(name: str, state: str = "Terminated", start: object = "100.0", end: object = "400.0") -> str:
    return f"{name},i-{name},user1,{state},{start},{end}\n"


def task(
    name: str, instances: object = "1.0", plan: object = "100.0", start: object = "130.0", end: object = "390.0"
) -> str:
    return f"{name},worker,{instances},Terminated,{start},{end},600.0,29.3,{plan},MISC\n"


def told(trace: Trace) -> list[tuple[float, float, int, int | None, float | None]]:
    return [(j.submit_s, j.duration_s, j.gpus, j.gpu_milli, j.queued_s) for j in trace.jobs]


def test_pai_tables_are_joined_from_a_folder_and_from_either_table(tmp_path: Path) -> None:
    tasks = task("a", 2, 25) + task("a", 1, "", start=120) + task("b", 10, 25) + task("c", 4, 200)
    tags = "i-a,user1,V100,f00d,nmt\ni-c,user1,MISC,beef,\n"
    path = folder(tmp_path, job=job("a") + job("b", end="") + job("c", "Failed", end=130), task=tasks, group_tag=tags)
    for named in (path, path / "pai_job_table.csv", path / "pai_task_table.csv"):
        trace = read_trace(named)
        assert told(trace) == [
            (100.0, 280.0, 1, 500, 20.0),
            (100.0, 260.0, 3, 2500, 30.0),
            (100.0, 0.0, 8, None, 30.0),
        ]
        assert [(j.tenant, j.group, j.gpu_types) for j in trace.jobs] == [
            ("user1", "nmt/f00d", ("V100",)),
            ("user1", "", ()),
            ("user1", "beef", ()),
        ]
        assert trace.refusals.total == 0
        assert trace.refusals.notes.lines == {
            "task-without-plan-gpu": [2],
            "zero-duration": [3],
            "gpus-rounded-up": [2],
        }


@pytest.mark.parametrize(
    ("row", "tasks", "kind"),
    [
        (job("x", "Waiting", "", ""), task("x"), "never-started"),
        (job("x", "Running", 5, ""), task("x"), "not-finished"),
        (job("x", "Failed", "", ""), task("x"), "failed-without-start"),
        (job("x", "Failed", 5, ""), task("x", end=""), "failed-without-end"),
        (job("x", "Interrupted", "", 9), task("x"), "interrupted-without-start"),
        (job("x", "Lost"), task("x"), "unknown-state"),
        (job("x", start="soon"), task("x"), "bad-time"),
        (job("x", end=129), task("x"), "negative-duration"),
        (job("x"), task("x", plan=""), "cpu-job"),
        (job("x"), task("x", start="", end=""), "never-started"),
        (job("x"), "", "no-task"),
        ("x,i,u\n", "", "missing-columns"),
    ],
)
def test_pai_job_oddities_are_counted_with_their_lines(tmp_path: Path, row: str, tasks: str, kind: str) -> None:
    trace = read_trace(folder(tmp_path, job=job("a") + row, task=task("a") + tasks))
    assert (len(trace.jobs), trace.refusals.lines) == (1, {kind: [2]})


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (task("a", "many"), "task-bad-inst-num"),
        (task("a", 1, "-5"), "task-bad-plan-gpu"),
        ("a\n", "task-missing-columns"),
    ],
)
def test_odd_rows_of_the_task_table_are_told_apart(tmp_path: Path, row: str, kind: str) -> None:
    trace = read_trace(folder(tmp_path, job=job("a"), task=task("a") + row))
    assert (trace.jobs[0].gpus, trace.refusals.lines) == (1, {kind: [2]})


def test_a_task_table_alone_is_submitted_when_its_tasks_start(tmp_path: Path) -> None:
    trace = read_trace(folder(tmp_path, task=task("a", 2) + task("a", start=110, end=500)))
    assert told(trace) == [(110.0, 390.0, 3, None, None)]


def test_tables_that_say_too_little_are_told(tmp_path: Path) -> None:
    path = folder(tmp_path, job=job("a"))
    with pytest.raises(
        UserError, match=r"pai_job_table\.csv: has no GPU counts; expected pai_task_table\.csv beside it"
    ):
        read_trace(path)
    (path / "pai_group_tag_table.csv").write_text("f7f6,d2d3,V100M32,fbeb,nmt\n")
    with pytest.raises(UserError, match=r"pai_group_tag_table has no jobs; expected pai_job_table\.csv"):
        read_trace(path / "pai_group_tag_table.csv")
    (path / "pai_task_table.csv").write_text("a,b\n")
    with pytest.raises(UserError, match=r"pai_task_table\.csv:1: expected a row of PAI v2020 pai_task_table"):
        read_trace(path)


def test_a_folder_without_tables_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a directory; expected a trace file, or a folder with pai_job_table\.csv"):
        read_trace(tmp_path)


def test_pai_tables_may_be_compressed(tmp_path: Path) -> None:
    for name, text in (("job", job("a")), ("task", task("a"))):
        (tmp_path / f"pai_{name}_table.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert told(read_trace(tmp_path)) == [(100.0, 270.0, 1, None, 30.0)]


def instance(name: str, state: str = "Terminated", start: object = "10.0", end: object = "30.0", job: str = "j") -> str:
    return f"{job},worker,{name},w,i,{state},{start},{end},m\n"


def test_instances_make_one_job_of_distinct_names(tmp_path: Path) -> None:
    rows = (
        instance("a"),
        instance("b", start=5, end=25),
        instance("a", "Interrupted", "", 9),
        instance("c", "Running", 8, ""),
        instance("d", "Waiting", "", "", job="k"),
        instance("e", "Failed", 7, 7, job="l"),
    )
    trace = read_trace(folder(tmp_path, instance="".join(rows)))
    assert [(j.submit_s, j.duration_s, j.gpus, j.clamped, j.attempts) for j in trace.jobs] == [
        (5.0, 25.0, 2, True, 2),
        (7.0, 0.0, 1, False, 1),
    ]
    assert trace.refusals.lines == {"interrupted-without-start": [3], "not-finished": [4], "never-started": [5]}
    assert trace.refusals.notes.lines["repeated-instance"] == [3]


def pod(gpus: int = 1, milli: int = 1000, times: str = "5,30,10", phase: str = "Succeeded", spec: str = "") -> str:
    return f"p,1000,1024,{gpus},{milli},{spec},LS,{phase},{times}\n"


def test_openb_pods_carry_parts_types_and_waits(tmp_path: Path) -> None:
    path = tmp_path / "pods.csv"
    path.write_text(
        PODS + pod(2, times="50,90,60", phase="Running", spec="T4|G2") + pod(milli=460, phase="Running") + pod()
    )
    trace = read_trace(path)
    assert told(trace) == [(5.0, 20.0, 1, 460, 5.0), (5.0, 20.0, 1, None, 5.0), (50.0, 30.0, 2, None, 10.0)]
    assert [job.clamped for job in trace.jobs] == [False, False, True]
    assert (trace.jobs[2].gpu_types, trace.jobs[0].tenant) == (("G2", "T4"), "LS")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (pod(times="5,30,"), "never-started"),
        (pod(times="5,5,"), "never-started"),
        (pod(times="5,,10"), "not-finished"),
        (pod(times="5,9,10"), "negative-duration"),
        (pod(times="11,30,10"), "started-before-submission"),
        (pod(times=",30,10"), "no-time"),
        (pod(gpus=0, milli=0), "cpu-job"),
        (pod(gpus=2, milli=500), "bad-gpu-milli"),
    ],
)
def test_openb_oddities_are_counted_with_their_lines(tmp_path: Path, row: str, kind: str) -> None:
    path = tmp_path / "pods.csv"
    path.write_text(PODS + pod() + row)
    assert read_trace(path).refusals.lines == {kind: [3]}


def test_an_openb_list_without_times_is_told(tmp_path: Path) -> None:
    path = tmp_path / "pods.csv"
    path.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1,2,1,1000\n")
    with pytest.raises(UserError, match=r"pods\.csv:1: openb pods without creation_time.* expected name,cpu_milli"):
        read_trace(path)


@pytest.mark.traces
def test_the_real_files_are_read_whole(traces_dir: Path) -> None:
    pods = read_trace(traces_dir / "alibaba-gpu-v2023" / "openb_pod_list_default.csv")
    assert (len(pods.jobs), pods.refusals.count) == (6203, {"cpu-job": 1088, "never-started": 861})
    instances = read_trace(traces_dir / "alibaba-gpu-v2020")
    assert instances.refusals.count == {
        "failed-without-end": 1350,
        "failed-without-start": 291,
        "interrupted-without-start": 1344,
        "never-started": 665,
        "not-finished": 1583,
    }
    derived = read_trace(traces_dir / "official-examples" / "pai_job_duration_estimate_100K.head.csv")
    assert (len(derived.jobs), derived.refusals.lines) == (6, {"cpu-job": [2, 9]})
    assert derived.jobs[-1].gpu_milli == 250
    assert derived.jobs[0].queued_s == 2.0
