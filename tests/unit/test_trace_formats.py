"""Acme, Slurm and Standard Workload Format: what is read of a row, and how each oddity is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadgen import cli
from loadgen.jobs import TraceJob
from loadgen.trace import Trace, read_trace
from streamsched.errors import UserError


def read(tmp_path: Path, text: str) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path)


def facts(job: TraceJob) -> tuple[float, float, int, str, float | None]:
    return job.submit_s, job.duration_s, job.gpus, job.tenant, job.estimate_s


# ── Acme ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

SEREN = "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n"


def seren(gpus: object = 8, state: str = "COMPLETED", start: str = "1970-01-01 08:01:00+08:00", end: str = "") -> str:
    end = end or "1970-01-01 08:03:00+08:00"
    return f"1,u1,1,{gpus},8,Other,{state},1970-01-01 08:00:30+08:00,{start},{end},999,30,1.0\n"


def test_acme_run_times_come_from_the_timestamps(tmp_path: Path) -> None:
    trace = read(tmp_path, SEREN + seren())
    assert trace.format == "Acme trace CSV"
    assert [facts(job) for job in trace.jobs] == [(30.0, 120.0, 8, "u1", None)]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (seren(gpus=0), "cpu-job"),
        (seren(state="RUNNING"), "not-finished"),
        (seren(state="VANISHED"), "unknown-state"),
        (seren(start=" "), "never-started"),
        (seren(start="1970-01-01 08:01:00"), "naive-time"),
        (seren(start="yesterday"), "bad-time"),
        (seren(end="1970-01-01 08:00:59+08:00"), "negative-duration"),
    ],
)
def test_acme_oddities_are_counted_with_their_lines(tmp_path: Path, row: str, kind: str) -> None:
    trace = read(tmp_path, SEREN + seren() + row)
    assert (trace.refusals.count, trace.refusals.lines) == ({kind: 1}, {kind: [3]})


# ── Slurm ────────────────────────────────────────────────────────────────────────────────────────────────────────────

SACCT = "JobID|User|Account|State|Submit|Start|End|AllocTRES|Timelimit\n"


def sacct(
    job: str = "7", state: str = "COMPLETED", start: str = "1970-01-01T00:01:00", end: str = "1970-01-01T00:03:00",
    tres: str = "billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=1", limit: str = "1-02:03:04",
) -> str:  # fmt: skip
    return f"{job}|ann|lab|{state}|1970-01-01T00:00:30|{start}|{end}|{tres}|{limit}\n"


def test_sacct_gives_gpus_account_and_time_limit(tmp_path: Path) -> None:
    trace = read(tmp_path, SACCT + sacct())
    assert trace.format == "sacct --parsable2"
    assert [facts(job) for job in trace.jobs] == [(30.0, 120.0, 4, "lab", 86_400.0 + 2 * 3600 + 3 * 60 + 4)]


@pytest.mark.parametrize(
    ("row", "gpus", "estimate_s"),
    [
        (sacct(tres="cpu=8,gres/gpu:a100=2,gres/gpu:v100=3"), 5, 93_784.0),
        (sacct(limit="UNLIMITED"), 4, None),
        (sacct(limit="00:30:00"), 4, 1800.0),
        (sacct(state="CANCELLED by 1000"), 4, 93_784.0),
        (sacct(state="OUT_OF_MEMORY"), 4, 93_784.0),
    ],
)
def test_what_sacct_writes_in_several_ways(tmp_path: Path, row: str, gpus: int, estimate_s: float | None) -> None:
    (job,) = read(tmp_path, SACCT + row).jobs
    assert (job.gpus, job.estimate_s) == (gpus, estimate_s)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (sacct(job="7.batch"), "job-step"),
        (sacct(tres="cpu=8,mem=64G"), "cpu-job"),
        (sacct(state="PENDING"), "not-finished"),
        (sacct(state="LOST"), "unknown-state"),
        (sacct(state="CANCELLED", start="Unknown"), "never-started"),
        (sacct(end="Unknown"), "no-time"),
        (sacct(end="1970-01-01T00:00:59"), "negative-duration"),
        ("7|ann|lab\n", "missing-columns"),
    ],
)
def test_slurm_oddities_are_counted_with_their_lines(tmp_path: Path, row: str, kind: str) -> None:
    trace = read(tmp_path, SACCT + sacct() + row)
    assert (trace.refusals.count, trace.refusals.lines) == ({kind: 1}, {kind: [3]})


JOBCOMP = (
    "JobId=9 UserId=ann(1000) GroupId=lab(100) Name=train JobState=COMPLETED Partition=gpu TimeLimit=90"
    " StartTime=1970-01-01T00:01:00 EndTime=1970-01-01T00:03:00 NodeList=n1 NodeCnt=1 ProcCnt=8 WorkDir=/w"
    " ReservationName= Tres=cpu=8,mem=64G,node=1,gres/gpu=2 Account=lab QOS=normal SubmitTime=1970-01-01T00:00:30"
)


def test_jobcomp_lines_with_empty_values(tmp_path: Path) -> None:
    trace = read(tmp_path, f"{JOBCOMP}\n\n{JOBCOMP.replace('COMPLETED', 'RUNNING')}\nJobId=10 Name=cut\n")
    assert trace.format == "Slurm jobcomp"
    assert [facts(job) for job in trace.jobs] == [(30.0, 120.0, 2, "lab", 5400.0)]
    assert trace.refusals.lines == {"not-finished": [3], "missing-columns": [4]}


# ── Standard Workload Format ─────────────────────────────────────────────────────────────────────────────────────────


def swf(submit: object = 30, run: object = 120, allocated: object = 4, wanted: object = 8, limit: object = 600) -> str:
    return f"1 {submit} 5 {run} {allocated} -1 -1 {wanted} {limit} -1 1 17 3 -1 1 -1 -1 -1\n"


@pytest.mark.parametrize("head", ["; Version: 2.2\n; UnixStartTime: 1000\n", "; UnixStartTime: 1000\n\n"])
def test_swf_counts_from_its_start_time(tmp_path: Path, head: str) -> None:
    trace = read(tmp_path, head + swf())
    assert trace.format == "Standard Workload Format"
    assert [facts(job) for job in trace.jobs] == [(1030.0, 120.0, 8, "user17", 600.0)]


def test_swf_without_comments_and_with_unknown_fields(tmp_path: Path) -> None:
    trace = read(tmp_path, swf(wanted=-1, limit=-1))
    assert [facts(job) for job in trace.jobs] == [(30.0, 120.0, 4, "user17", None)]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (swf(run=-1), "no-duration"),
        (swf(submit=-1), "no-time"),
        (swf(allocated=-1, wanted=-1), "no-gpus"),
        (swf(wanted=0), "cpu-job"),
        (swf(run="long"), "bad-duration"),
        ("1 2 3\n", "missing-columns"),
        (swf().strip() + " 5\n", "extra-columns"),
    ],
)
def test_swf_oddities_are_counted_with_their_lines(tmp_path: Path, row: str, kind: str) -> None:
    trace = read(tmp_path, "; a comment\n" + swf() + row)
    assert (trace.refusals.count, trace.refusals.lines) == ({kind: 1}, {kind: [3]})


# ── what is none of them ─────────────────────────────────────────────────────────────────────────────────────────────


def test_sacct_with_commas_is_told_its_delimiter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trace:1: columns of sacct --parsable2 separated by .*: expected '\|'"):
        read(tmp_path, SACCT.replace("|", ";") + sacct())


@pytest.mark.traces
def test_the_official_examples_are_read(traces_dir: Path) -> None:
    """Counted by hand from the rows."""
    folder = traces_dir / "official-examples"
    kalos = read_trace(folder / "acme_trace_kalos.csv")
    assert [(job.gpus, job.duration_s) for job in kalos.jobs] == [(64, 8.0), (64, 70.0)]
    seren = read_trace(folder / "acme_trace_seren.csv")
    assert [(job.gpus, job.duration_s) for job in seren.jobs] == [(8, 117.0), (8, 2693.0)]


# ── Philly JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────


def attempt(start: object, end: object, gpus: int = 2) -> dict[str, object]:
    hosts = [{"ip": "m1", "gpus": [f"gpu{n}" for n in range(gpus)]}, {"ip": "m2", "gpus": ["gpu0"]}]
    return {"start_time": start, "end_time": end, "detail": hosts}


def clock(seconds: int) -> str:
    return f"1970-01-01 00:{seconds // 60:02}:{seconds % 60:02}"


def philly(*attempts: object, **more: object) -> dict[str, object]:
    return {"status": "Pass", "vc": "vc1", "submitted_time": clock(30), "user": "u", "attempts": [*attempts], **more}


def test_philly_json_sums_the_attempts_and_takes_the_first_ones_gpus(tmp_path: Path) -> None:
    first, second = attempt(clock(60), clock(180)), attempt(clock(200), clock(210), gpus=7)
    trace = read(tmp_path, json.dumps([philly(first, second)], indent=1))
    assert trace.format == "Philly JSON"
    assert [facts(job) for job in trace.jobs] == [(30.0, 130.0, 3, "vc1", None)]


@pytest.mark.parametrize("missing", [None, "", "None"])
def test_attempts_without_a_start_or_an_end_do_not_count(tmp_path: Path, missing: object) -> None:
    whole, no_start, no_end = attempt(clock(60), clock(90)), attempt(missing, clock(99)), attempt(clock(99), missing)
    (open_ended,) = read(tmp_path, json.dumps([philly(whole, no_start, no_end)])).jobs
    assert (open_ended.duration_s, open_ended.clamped) == (30.0, True)
    (ended,) = read(tmp_path, json.dumps([philly(no_end, no_start, whole)])).jobs
    assert (ended.duration_s, ended.clamped) == (30.0, False)


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        (philly(), "never-started"),
        (philly(attempt(clock(60), "None")), "no-duration"),
        (philly(attempt(clock(60), clock(59))), "negative-duration"),
        (philly({"start_time": clock(60), "end_time": clock(61)}), "no-gpus"),
        (philly(attempt("soon", clock(61))), "bad-time"),
        (philly(attempt(clock(60), clock(61)), submitted_time="None"), "no-time"),
        ({"vc": "v"}, "no-attempts"),
        (7, "no-attempts"),
    ],
)
def test_philly_oddities_are_counted_with_their_lines(tmp_path: Path, job: object, kind: str) -> None:
    good = philly(attempt(clock(60), clock(90)))
    trace = read(tmp_path, f"[\n{json.dumps(good)},\n\n{json.dumps(job)}\n]\n")
    assert (trace.refusals.count, trace.refusals.lines) == ({kind: 1}, {kind: [4]})


def test_json_that_ends_too_early_is_told_with_its_line(tmp_path: Path) -> None:
    good = json.dumps(philly(attempt(clock(60), clock(90))))
    with pytest.raises(UserError, match=r"trace:3: the JSON ends or breaks here .*; expected a list of jobs"):
        read(tmp_path, f"[\n{good},\n{good[:40]}")


def test_json_in_one_long_line_is_read(tmp_path: Path) -> None:
    jobs = [philly(attempt(clock(60), clock(90)), jobid="x" * 1000) for _ in range(1200)]
    assert len(read(tmp_path, json.dumps(jobs)).jobs) == 1200


@pytest.mark.traces
def test_the_philly_jsons_are_read(traces_dir: Path) -> None:
    official = read_trace(traces_dir / "official-examples" / "philly_cluster_job_log.json")
    assert [(job.gpus, job.duration_s, job.clamped) for job in official.jobs] == [
        (8, 193_256.0, False),
        (1, 43.0, False),
    ]
    assert official.refusals.count == {"never-started": 1}
    derived = read_trace(traces_dir / "philly" / "jobs_with_attempts.json")
    assert derived.usable + derived.refusals.total == 2165


# ── conversion ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", [SEREN + seren() + seren(gpus=0), SACCT + sacct(), swf() + swf(limit=-1)])
def test_a_converted_trace_has_the_same_jobs(tmp_path: Path, text: str) -> None:
    before = read(tmp_path, text)
    out = tmp_path / "neutral.csv"
    result = CliRunner().invoke(cli.app, ["convert", str(tmp_path / "trace"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    after = read_trace(out)
    assert after.format == "neutral CSV"
    assert [facts(job) for job in after.jobs] == [facts(job) for job in before.jobs]
    assert ("refused rows: 1 cpu-job (line 3)" in result.stderr) == bool(before.refusals.total)


def test_a_conversion_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    read(tmp_path, SACCT + sacct())
    result = CliRunner().invoke(cli.app, ["convert", str(tmp_path / "trace"), "--out", str(tmp_path / "no" / "file")])
    assert isinstance(result.exception, UserError)
    assert "no such file" in str(result.exception)
