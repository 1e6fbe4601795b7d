"""Alibaba's GPU trace of 2020 (PAI): tables without a header line, known by the shape of their first row.

`pai_job_table` (job_name,inst_id,user,status,start_time,end_time) says when a job was submitted (`start_time`) and by
whom; `pai_task_table` (job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type) has
its GPUs: `inst_num` instances of `plan_gpu` percent of a GPU each, and when its tasks ran; `pai_group_tag_table`
(inst_id,user,gpu_type_spec,group,workload) has the type asked for and what recurs. They are joined: any of the first
two names them, the others are found beside it. A row of tasks that spoils something is counted as `task-...`, its line
is that of the task table.

`pai_instance_table` (job_name,task_name,inst_name,worker_name,inst_id,status,start_time,end_time,machine) does not tell
GPUs. By itself it is read for its times: one job per job_name, each distinct instance counted as one GPU. Its instances
were retried under the same name.

Times are seconds, printed as `5271439.0`. Only `Terminated` is success; `Interrupted` is not documented.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from loadgen.jobs import MAX_GPUS, Refusals, TraceJob, gpus_of, tenant_name
from loadgen.text import numbered, text_of
from streamsched.errors import UserError

from .base import Head, HeaderCsv, OddRow, Row, duration, gpu_types, not_negative, number, split

_STATES: Final = frozenset({"Terminated", "Failed", "Running", "Waiting", "Interrupted"})
_JOB: Final = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
_TASK: Final = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu",
    "gpu_type",
)  # fmt: skip
_INSTANCE: Final = (
    "job_name", "task_name", "inst_name", "worker_name", "inst_id", "status", "start_time", "end_time", "machine",
)  # fmt: skip
_TAG: Final = ("inst_id", "user", "gpu_type_spec", "group", "workload")
_HEX: Final = frozenset("0123456789abcdef")
_NO_TYPE: Final = frozenset({"", "CPU", "MISC"})
"""MISC is what is none of the others: nothing to ask for."""
_SUFFIXES: Final = (".csv", ".csv.gz", ".csv.zst")


class _Table:
    """What the three tables that can be named have in common. The official files have no header; ours may."""

    name: str
    columns: tuple[str, ...]

    @property
    def expects(self) -> str:
        return f"{self.name} ({','.join(self.columns)}; no header)"

    def matches(self, head: Head) -> bool:
        cells = split(head.line)
        return tuple(cells) == self.columns or (
            len(cells) == len(self.columns) and cells[self.columns.index("status")] in _STATES
        )

    def near_miss(self, head: Head) -> str | None:
        return None

    def rows(
        self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals, prefix: str = ""
    ) -> Iterator[tuple[int, Row]]:
        for line, text in _with_head(head, lines):
            cells = split(text)
            if not text.strip() or tuple(cells) == self.columns:
                continue
            if len(cells) != len(self.columns):
                refusals.add(prefix + ("missing-columns" if len(cells) < len(self.columns) else "extra-columns"), line)
                continue
            yield line, dict(zip(self.columns, cells, strict=True))


class _JobTable(_Table):
    name = "PAI v2020 pai_job_table"
    columns = _JOB

    def read(self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals) -> Iterator[TraceJob]:
        path = Path(head.path)
        beside = _beside(path, "pai_task_table")
        if beside is None:
            raise UserError(f"{path}: has no GPU counts; expected pai_task_table.csv beside it")
        tasks = _read_tasks(beside, refusals)
        tags = _read_tags(path, refusals)
        seen: set[str] = set()
        for line, row in self.rows(head, lines, refusals):
            try:
                job = _joined(row, tasks.get(row["job_name"]), tags.get(row["inst_id"], _NO_TAG), refusals, line)
            except OddRow as kind:
                refusals.add(str(kind), line)
                continue
            if row["job_name"] in seen:
                refusals.notes.add("repeated-job", line)
            seen.add(row["job_name"])
            yield job


class _TaskTable(_Table):
    """With the job table beside it the two are joined; alone a job is submitted when its first task starts."""

    name = "PAI v2020 pai_task_table"
    columns = _TASK

    def read(self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals) -> Iterator[TraceJob]:
        if jobs := _beside(Path(head.path), "pai_job_table"):
            with text_of(jobs) as file:
                numbers = numbered(file, str(jobs))
                first = next(numbers, (1, ""))
                yield from JOBS.read(Head(str(jobs), first[1], first[0]), numbers, refusals)
            return
        for name, tasks in _tasks(self.rows(head, lines, refusals), refusals, "").items():
            try:
                row = dict.fromkeys(_JOB, "") | {"job_name": name, "status": "Terminated"}
                row["start_time"] = "" if tasks.start_s is None else str(tasks.start_s)
                yield _joined(row, tasks, _NO_TAG, refusals, tasks.line)
            except OddRow as kind:
                refusals.add(str(kind), tasks.line)


class _InstanceTable(_Table):
    name = "PAI v2020 pai_instance_table"
    columns = _INSTANCE

    def read(self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals) -> Iterator[TraceJob]:
        jobs: dict[str, _Instances] = {}
        for line, row in self.rows(head, lines, refusals):
            job = jobs.setdefault(row["job_name"], _Instances(line))
            name = row["inst_name"]
            job.tries[name] = job.tries.get(name, 0) + 1
            if job.tries[name] > 1:
                refusals.notes.add("repeated-instance", line)
            try:
                start_s, end_s = _span(row)
            except OddRow as kind:
                refusals.add(str(kind), line)
                job.open = job.open or str(kind) == "not-finished"
                continue
            job.ran.add(name)
            if start_s == end_s:
                refusals.notes.add("zero-duration-instance", line)
            job.start_s, job.end_s = min(job.start_s, start_s), max(job.end_s, end_s)
        for job in jobs.values():
            if not job.ran:
                continue  # each of its rows has been counted
            refusals.notes.add("gpus-not-told", job.line)
            yield TraceJob(
                submit_s=job.start_s,
                duration_s=job.end_s - job.start_s,
                gpus=min(len(job.ran), MAX_GPUS),
                clamped=job.open,
                attempts=max(job.tries[name] for name in job.ran),
                line=job.line,
            )


class _TagTable(_Table):
    """Says nothing of when or how large: only beside the others."""

    name = "PAI v2020 pai_group_tag_table"
    columns = _TAG

    def matches(self, head: Head) -> bool:
        cells = split(head.line)
        shaped = len(cells) == len(_TAG) and all(cells[i] and set(cells[i]) <= _HEX for i in (0, 1, 3))
        return tuple(cells) == _TAG or shaped

    def read(self, head: Head, lines: Iterable[tuple[int, str]], refusals: Refusals) -> Iterator[TraceJob]:
        raise UserError(
            f"{head.path}:{head.number}: {self.name} has no jobs; expected pai_job_table.csv with pai_task_table.csv"
            " beside it"
        )


@dataclass(slots=True)
class _Instances:
    """Instances of one job. `open`: one of them was still running."""

    line: int
    start_s: float = float("inf")
    end_s: float = float("-inf")
    open: bool = False
    tries: dict[str, int] = field(default_factory=dict)
    """Rows of each instance."""
    ran: set[str] = field(default_factory=set)
    """Instances with a row that has a start and an end."""


@dataclass(slots=True)
class _Tasks:
    """Tasks of one job: thousandths of GPUs in all, first start, last end; `line` is that of the first."""

    line: int
    gpu_milli: float = 0.0
    start_s: float | None = None
    end_s: float | None = None
    open: bool = False


@dataclass(frozen=True, slots=True)
class _Tag:
    gpu_type: str = ""
    group: str = ""


_NO_TAG: Final = _Tag()


def _joined(row: Row, tasks: _Tasks | None, tag: _Tag, refusals: Refusals, line: int) -> TraceJob:
    state = row["status"]
    if state not in _STATES:
        raise OddRow("unknown-state")
    if state in ("Waiting", "Running"):
        raise OddRow("never-started" if state == "Waiting" else "not-finished")
    if tasks is None:
        raise OddRow("no-task")
    submit_s = _time(row["start_time"])
    if submit_s is None:
        raise OddRow(f"{state.lower()}-without-start" if tasks.start_s is not None else "never-started")
    if tasks.start_s is None:
        raise OddRow("never-started")
    end_s = _time(row["end_time"])
    end_s = tasks.end_s if end_s is None else end_s
    if end_s is None:
        raise OddRow(f"{state.lower()}-without-end")
    if end_s < tasks.start_s:
        raise OddRow("negative-duration")
    if tasks.gpu_milli == 0:
        raise OddRow("cpu-job")
    if tasks.gpu_milli > MAX_GPUS * 1000:
        raise OddRow("bad-gpus")
    if tasks.start_s < submit_s:
        refusals.notes.add("started-before-submission", line)
    gpus, milli = gpus_of(tasks.gpu_milli)
    return TraceJob(
        submit_s=submit_s,
        duration_s=end_s - tasks.start_s,
        gpus=gpus,
        gpu_milli=milli,
        gpu_types=() if tag.gpu_type in _NO_TYPE else gpu_types(tag.gpu_type),
        tenant=tenant_name(row["user"]),
        clamped=tasks.open,
        queued_s=max(0.0, tasks.start_s - submit_s) if row["user"] else None,
        group=tag.group,
        line=line,
    )


def _tasks(rows: Iterable[tuple[int, Row]], refusals: Refusals, prefix: str) -> dict[str, _Tasks]:
    found: dict[str, _Tasks] = {}
    for line, row in rows:
        job = found.setdefault(row["job_name"], _Tasks(line))
        try:
            instances = number(row["inst_num"], "bad-inst-num")
            percent = number(row["plan_gpu"], "bad-plan-gpu") if row["plan_gpu"] else 0.0
            start_s, end_s = _time(row["start_time"]), _time(row["end_time"])
            if instances < 0 or percent < 0:
                raise OddRow("bad-inst-num" if instances < 0 else "bad-plan-gpu")
        except OddRow as kind:
            refusals.add(f"{prefix}{kind}", line)
            continue
        if not row["plan_gpu"]:
            refusals.notes.add("task-without-plan-gpu", line)
        job.gpu_milli += instances * percent * 10.0
        job.open = job.open or row["status"] == "Running"
        if start_s is not None:
            job.start_s = start_s if job.start_s is None else min(job.start_s, start_s)
        if end_s is not None:
            job.end_s = end_s if job.end_s is None else max(job.end_s, end_s)
    return found


def _read_tasks(path: Path, refusals: Refusals) -> dict[str, _Tasks]:
    with text_of(path) as file:
        lines = numbered(file, str(path))
        head = _first(lines, path)
        if not TASKS.matches(head):
            raise UserError(f"{path}:{head.number}: expected a row of {TASKS.expects}")
        return _tasks(TASKS.rows(head, lines, refusals, "task-"), refusals, "task-")


def _read_tags(beside: Path, refusals: Refusals) -> dict[str, _Tag]:
    """By inst_id; empty when there is no such table."""
    path = _beside(beside, "pai_group_tag_table")
    if path is None:
        return {}
    with text_of(path) as file:
        lines = numbered(file, str(path))
        head = _first(lines, path)
        found = {}
        for _, row in _TagTable().rows(head, lines, refusals, "tag-"):
            # The workload is known of few groups: it goes before the group, which is a hash.
            group = "/".join(filter(None, (row["workload"], row["group"])))
            found[row["inst_id"]] = _Tag(row["gpu_type_spec"], group)
        return found


def _first(lines: Iterator[tuple[int, str]], path: Path) -> Head:
    for line, text in lines:
        if text.strip():
            return Head(str(path), text, line)
    raise UserError(f"{path}: is empty; expected the rows of a table")


def _beside(path: Path, table: str) -> Path | None:
    """The file of that table in the folder of `path`: `TABLE.csv` before `TABLE.part.csv`."""
    found = sorted(path.parent.glob(table + "*"), key=lambda file: (len(file.name), file.name))
    return next((file for file in found if file.is_file() and file.name.endswith((table, *_SUFFIXES))), None)


def table_in(folder: Path) -> Path | None:
    """The table of a folder that names the others."""
    names = ("pai_job_table", "pai_task_table", "pai_instance_table")
    return next((found for name in names if (found := _beside(folder / name, name))), None)


def _span(row: Row) -> tuple[float, float]:
    state = row["status"]
    if state not in _STATES:
        raise OddRow("unknown-state")
    if state in ("Waiting", "Running"):
        raise OddRow("never-started" if state == "Waiting" else "not-finished")
    start_s, end_s = _time(row["start_time"]), _time(row["end_time"])
    if start_s is None or end_s is None:
        missing = "start" if end_s is not None else "end" if start_s is not None else "times"
        raise OddRow(f"{state.lower()}-without-{missing}")
    if end_s < start_s:
        raise OddRow("negative-duration")
    return start_s, end_s


def _time(text: str) -> float | None:
    return number(text, "bad-time") if text else None


def _with_head(head: Head, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield head.number, head.line
    yield from lines


def _derived(row: Row, line: int) -> TraceJob:
    """One row is one job, as in the trace's own simulator; parameter servers without GPUs are rows of their own."""
    milli = number(row["num_gpu"], "bad-gpus" if row["num_gpu"] else "no-gpus") * 1000.0
    if milli == 0:
        raise OddRow("cpu-job")
    if not 0 < milli <= MAX_GPUS * 1000:
        raise OddRow("bad-gpus")
    gpus, part = gpus_of(milli)
    return TraceJob(
        submit_s=number(row["submit_time"], "bad-time" if row["submit_time"] else "no-time"),
        duration_s=duration(row["duration"]),
        gpus=gpus,
        gpu_milli=part,
        gpu_types=() if row["gpu_type"] in _NO_TYPE else gpu_types(row["gpu_type"]),
        tenant=tenant_name(row["user"]),
        queued_s=not_negative(row["wait_time"]),
        group=row["group"],
        line=line,
    )


JOBS: Final = _JobTable()
TASKS: Final = _TaskTable()
INSTANCES: Final = _InstanceTable()
TAGS: Final = _TagTable()
DERIVED: Final = HeaderCsv(
    "PAI v2020 job durations (simulator)",
    ("user", "num_gpu", "num_pod", "duration", "submit_time", "group", "gpu_type", "wait_time"),
    (),
    _derived,
)
