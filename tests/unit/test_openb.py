"""The openb pod and node lists: every row is read or counted by kind and line; unusable files are one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.formats.openb_csv import Machine, Pod, read_machines, read_pods
from streamsched.errors import UserError

PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
TIMES = ",LS,Running,0,1,\n"
NODES = "sn,cpu_milli,memory_mib,gpu,model\n"


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "list.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_pods_are_read_and_odd_rows_counted_by_kind_and_line(tmp_path: Path) -> None:
    rows = {
        "p,6000,12288,1,460,": Pod(6000, 12288, 1, 460),
        "p,8000,0,8,1000,V100M32|G2": Pod(8000, 0, 8, 1000, ("G2", "V100M32")),
        "p,8000,1,0,0,": "cpu-job",
        "p,8000,1,2,500,": "bad-gpu-milli",
        "p,8000,1,1,1001,": "bad-gpu-milli",
        "p,8000,1,1,0,": "bad-gpu-milli",
        "p,8000,1,1,,": "bad-gpu-milli",
        "p,-1,1,1,1000,": "bad-cpu",
        "p,8000,much,1,1000,": "bad-memory",
        "p,8000,1,1.5,1000,": "fractional-gpus",
        "p,8000,1,1,1000,,": "extra-columns",
    }
    pods, refused = read_pods(write(tmp_path, PODS + "".join(row + TIMES for row in rows) + "\np,1,1\n"))
    assert pods == [told for told in rows.values() if isinstance(told, Pod)]
    lines: dict[str, list[int]] = {}
    for number, told in enumerate(rows.values(), start=2):
        if isinstance(told, str):
            lines.setdefault(told, []).append(number)
    assert refused.lines == lines | {"missing-columns": [14]}


def test_a_list_without_times_and_types_is_a_workload_too(tmp_path: Path) -> None:
    pods, refused = read_pods(write(tmp_path, "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1,2,1,1000\n"))
    assert (pods, refused.total) == ([Pod(1, 2, 1, 1000)], 0)


def test_machines_are_read_and_those_without_gpus_counted(tmp_path: Path) -> None:
    text = NODES + "n0,32000,262144,0,\nn1,64000,262144,2,P100\n,1,1,1,T4\nn3,1,1,1,\n"
    machines, refused = read_machines(write(tmp_path, text))
    assert machines == [Machine("n1", 64000, 262144, 2, "P100")]
    assert refused.lines == {"cpu-node": [2], "no-name": [4], "no-model": [5]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "list.csv:1: no column 'cpu_milli'; expected cpu_milli,memory_mib,num_gpu,gpu_milli"),
        (b"name,cpu_milli\n", "list.csv:1: no column 'memory_mib'"),
        (PODS.encode(), "list.csv: no usable row; refused: none"),
        ((PODS + "p,1,1,0,0," + TIMES).encode(), "no usable row; refused: 1 cpu-job (line 2)"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
    ],
)
def test_an_unusable_file_is_one_clear_line(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(UserError) as caught:
        read_pods(write(tmp_path, content))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_machines(tmp_path / "none.csv")


@pytest.mark.traces
def test_the_real_lists(traces_dir: Path) -> None:
    folder = traces_dir / "alibaba-gpu-v2023"
    machines, odd = read_machines(folder / "openb_node_list_gpu_node.csv")
    assert (len(machines), sum(m.gpus for m in machines), odd.total) == (1213, 6212, 0)
    pods, refused = read_pods(folder / "openb_pod_list_default.csv")
    assert (len(pods), refused.count) == (7064, {"cpu-job": 1088})
    assert sum(pod.gpu_milli < 1000 for pod in pods) == 3078
