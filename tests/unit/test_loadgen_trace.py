"""Traces are read to their end, whatever is in them; what makes a whole file unusable is one clear line."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest

from loadgen.jobs import Gang, Refusals, gang_of, parse_moment, tenant_name
from loadgen.trace import Window, clamp, read_trace
from streamsched.errors import UserError

PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n"
VENUS = "job_id,source_row,submit_time,duration,gpu_num,duration_clamped\n"
HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
NEUTRAL = "job_id,submit_s,duration_s,gpus,tenant\n"


def write(folder: Path, content: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_philly_is_sorted_stably_and_equal_rows_are_different_jobs(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        PHILLY + "2017-10-09 07:01:55,66.0,1,66.0,b\n2017-10-09 06:13:03,2951.5,8,0,a\n"
        "2017-10-09 07:01:55,66.0,1,66.0,a\n2017-10-09 07:01:55,66.0,1,66.0,a\n\n",
    )
    trace = read_trace(path)
    assert trace.format == "Philly CSV"
    assert [(job.index, job.line, job.tenant) for job in trace.jobs] == [
        (0, 3, "a"),
        (1, 2, "b"),
        (2, 4, "a"),
        (3, 5, "a"),
    ]
    assert trace.jobs[0].duration_s == 2951.5
    assert trace.jobs[0].submit_s == parse_moment("2017-10-09T06:13:03Z")
    assert trace.refusals.total == 0


def test_zoneless_times_cross_a_daylight_saving_fold_without_a_jump(tmp_path: Path) -> None:
    rows = [f"2017-11-05 0{hour}:30:00,1,1,1,a\n" for hour in range(4)]
    submits = [job.submit_s for job in read_trace(write(tmp_path, PHILLY + "".join(rows))).jobs]
    assert [later - earlier for earlier, later in itertools.pairwise(submits)] == [3600.0] * 3


def test_odd_rows_are_counted_by_kind_and_line_and_the_rest_is_read(tmp_path: Path) -> None:
    rows = {
        "2017-10-09 07:01:55,66.0,1,66.0,a": None,
        "not a time,66.0,1,66.0,a": "bad-time",
        ",66.0,1,66.0,a": "no-time",
        "2017-10-09,66.0,1,66.0,a": "bad-time",
        "2017-10-09 07:01:55+00:00,66.0,1,66.0,a": "zoned-time",
        "2017-10-09 07:01:55,nan,1,66.0,a": "bad-duration",
        "2017-10-09 07:01:55,,1,66.0,a": "no-duration",
        "2017-10-09 07:01:55,-1,1,66.0,a": "negative-duration",
        "2017-10-09 07:01:55,66.0,0,66.0,a": "cpu-job",
        "2017-10-09 07:01:55,66.0,1.5,66.0,a": "fractional-gpus",
        "2017-10-09 07:01:55,66.0,-2,66.0,a": "bad-gpus",
        "2017-10-09 07:01:55,66.0,1e9,66.0,a": "bad-gpus",
        "2017-10-09 07:01:55,66.0,1,66.0,a,more": "extra-columns",
        '2017-10-09 07:01:55,"66.0,1,66.0,a': "missing-columns",
        "2017-10-09 07:01:56,5184000.0,3,66.0,a": None,
        "2017-10-09 07:0": "missing-columns",  # the file was cut here
    }
    trace = read_trace(write(tmp_path, PHILLY + "\n".join(rows)))
    assert [(job.gpus, job.duration_s) for job in trace.jobs] == [(1, 66.0), (3, 5184000.0)]
    expected = Refusals()
    for line, kind in enumerate(rows.values(), start=2):
        if kind:
            expected.add(kind, line)
    assert trace.refusals == expected
    assert "2 bad-time (lines 3, 5)" in trace.refusals.describe()


def test_only_the_first_lines_of_a_kind_are_kept(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, PHILLY + "x,1,1,1,a\n" * 50 + "2017-10-09 07:01:55,1,1,1,a\n"))
    assert trace.refusals.count == {"bad-time": 50}
    assert trace.refusals.lines["bad-time"] == list(range(2, 22))
    assert trace.refusals.describe().endswith("21, ...)")


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_line_ends_bom_and_gzip_make_no_difference(
    tmp_path: Path, ends: str, bom: bytes, compress: type[bytes]
) -> None:
    text = (PHILLY + "2017-10-09 07:01:55,66.0,1,66.0,a\n\n").replace("\n", ends)
    trace = read_trace(write(tmp_path, compress(bom + text.encode()), "philly.txt"))
    assert [(job.line, job.tenant) for job in trace.jobs] == [(2, "a")]


def test_venus_marks_clamped_durations(tmp_path: Path) -> None:
    trace = read_trace(
        write(tmp_path, VENUS + "363167,0,2020-03-18 04:01:39,172800,32,1\n394948,2,2020-03-25 17:00:06,60,40,0\n")
    )
    assert trace.format == "Helios GPU jobs CSV"
    assert [(job.gpus, job.clamped, job.tenant) for job in trace.jobs] == [
        (32, True, "default"),
        (40, False, "default"),
    ]
    assert trace.clamped == 1


def test_official_helios_leaves_out_cpu_jobs_and_unfinished_ones(tmp_path: Path) -> None:
    row = "{id},u,vcA,{gpus},1,1,{state},2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0\n"
    states = ["COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "RUNNING", "SUSPENDED", "HOT"]
    rows = [row.format(id=i, gpus=1, state=state) for i, state in enumerate(states)]
    trace = read_trace(write(tmp_path, HELIOS + row.format(id=9, gpus=0, state="COMPLETED") + "".join(rows)))
    assert trace.format == "Helios cluster_log.csv"
    assert len(trace.jobs) == 5
    assert trace.refusals.count == {"cpu-job": 1, "not-finished": 2, "unknown-state": 1}


def test_columns_may_be_in_any_order_and_further_ones_are_ignored(tmp_path: Path) -> None:
    text = 'cluster,note,num_gpus,duration,timestamp\nvc 1,"a, b",2,7,2017-10-09 07:01:55\n'
    (job,) = read_trace(write(tmp_path, text)).jobs
    assert (job.tenant, job.gpus, job.duration_s) == ("vc-1", 2, 7.0)


def test_the_window_keeps_a_jobs_index(tmp_path: Path) -> None:
    path = write(tmp_path, NEUTRAL + "".join(f"j{i},{i},1,1,\n" for i in range(10)))
    trace = read_trace(path, Window(submitted_from=3.0, submitted_before=8.0, limit=2))
    assert [job.index for job in trace.jobs] == [3, 4]
    assert trace.outside == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"trace: is empty; expected a header line"),
        (b"\n\n  \n", r"trace: is empty"),
        (b"a,b,c\n1,2,3\n", r"trace:1: no known trace format begins with 'a,b,c'; expected .*timestamp,duration"),
        (PHILLY.replace(",", ";").encode(), r"trace:1: columns of Philly CSV separated by ';': expected ','"),
        (VENUS.replace(",", "\t").encode(), r"trace:1: columns of Helios GPU jobs CSV separated by tabs"),
        (PHILLY.encode(), r"trace: no usable job; refused rows: none"),
        ((PHILLY + "x,1,1,1,a\n").encode(), r"no usable job; refused rows: 1 bad-time \(line 2\)"),
        ((NEUTRAL + "a,5,1,1,\n").encode(), r"none of its 1 jobs is in the window; .*1970-01-01 00:00:05"),
        (b"timestamp,duration,duration,num_gpus,cluster\n", r"trace:1: column 'duration' is there 2 times"),
        (b"PK\x03\x04", r"is a zip archive; expected CSV"),
        (b"a\x00b\n", r"trace:1: not a text file"),
        (gzip.compress(PHILLY.encode() * 3000)[:-30], r"the gzip data end or break after line \d+"),
        (b"\x1f\x8bnonsense", r"gzip"),
        (b"x" * (1 << 20), r"a line of over 1,048,576 characters"),
    ],
)
def test_an_unusable_file_is_one_clear_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UserError, match=message) as caught:
        read_trace(path, Window(submitted_from=100.0))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(UserError, match="is a directory"):
        read_trace(tmp_path)


def test_clamping_counts_what_it_cuts(tmp_path: Path) -> None:
    jobs = read_trace(write(tmp_path, NEUTRAL + "a,0,10,1,\nb,1,11,1,\nc,2,500,1,\n")).jobs
    cut, count = clamp(jobs, 10.0)
    assert count == 2
    assert [(job.duration_s, job.clamped) for job in cut] == [(10.0, False), (10.0, True), (10.0, True)]


@pytest.mark.parametrize(
    ("gpus", "gang"),
    [(1, Gang(1, 1)), (7, Gang(1, 7)), (8, Gang(1, 8)), (12, Gang(1, 8, 4)), (24, Gang(3, 8)), (9, Gang(1, 8, 1))],
)
def test_gangs_take_whole_nodes_and_the_rest_on_one_more(gpus: int, gang: Gang) -> None:
    assert gang_of(gpus) == gang


def test_names_and_moments() -> None:
    assert tenant_name("  -vc one ") == "vc-one"
    assert tenant_name("") == "default"
    assert parse_moment("2017-10-02") == parse_moment("2017-10-02T02:00:00+02:00") == 1506902400.0
    assert parse_moment("12.5") == 12.5
    with pytest.raises(UserError, match="'soon' is not a time"):
        parse_moment("soon")


@pytest.mark.traces
def test_the_standard_slices_have_the_jobs_that_the_scenarios_state(traces_dir: Path) -> None:
    philly = read_trace(
        traces_dir / "philly" / "philly_jobs_until_2017-11-15.csv",
        Window(parse_moment("2017-10-02"), parse_moment("2017-10-30")),
    )
    assert (len(philly.jobs), philly.usable, philly.refusals.total) == (46_070, 65_028, 0)
    assert max(job.duration_s for job in philly.jobs) > 30 * 86400
    venus = read_trace(
        traces_dir / "helios-venus" / "venus_gpu_jobs_until_2020-07-31.csv",
        Window(parse_moment("2020-06-29"), parse_moment("2020-07-27")),
    )
    assert (len(venus.jobs), venus.usable, venus.clamped) == (20_980, 77_574, 321)
    official = read_trace(traces_dir / "official-examples" / "helios_cluster_log.csv")
    assert [job.gpus for job in official.jobs] == [1, 4, 1]
