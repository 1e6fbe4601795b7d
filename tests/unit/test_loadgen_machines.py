"""Lists of machines: what `--nodes` is given of them, what is left out and why, and errors in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import loadgen.cli as cli
from loadgen.machines import read
from streamsched.errors import UserError
from streamsched.sim import nodes
from streamsched.sim.nodes import parse_nodes

PHILLY = "machineId, number of GPUs, single GPU mem\nm0,2, 12GB\nm1,2, 12GB\nm96,8, 24GB\n"
REVISED = ",machineId,number of GPUs\n0,m0,8\n1,m1,0\n2,m2,4\n"
OPENB = "sn,cpu_milli,memory_mib,gpu,model\nn0,32000,1,0,\nn1,64000,1,2,P100\nn2,64000,1,8,G2\nn3,1,1,2,P100\n"
PAI = "a,CPU,96,512,0\nb,V100M32,96,384,8\nc,MISC,96,512,8\nd,V100M32,96,384,8\n"
PAI_HEADER = "machine,gpu_type,cap_cpu,cap_mem,cap_gpu\n"
LISTS = {
    "philly": (PHILLY, "2x2:any,1x8:any", 0),
    "philly revised": (REVISED, "1x4:any,1x8:any", 1),
    "openb": (OPENB, "1x8:G2,2x2:P100", 1),
    "pai": (PAI, "1x8:MISC,2x8:V100M32", 1),
    "pai with header": (PAI_HEADER + PAI, "1x8:MISC,2x8:V100M32", 1),
}


def write(folder: Path, content: str) -> Path:
    path = folder / "machines.csv"
    path.write_text(content)
    return path


@pytest.mark.parametrize(("content", "nodes", "without"), LISTS.values(), ids=LISTS)
def test_lists_become_nodes(tmp_path: Path, content: str, nodes: str, without: int) -> None:
    found = read(write(tmp_path, content))
    assert (found.nodes, found.without_gpus, found.refusals.count) == (nodes, without, {})


@pytest.mark.parametrize(("content", "nodes", "without"), LISTS.values(), ids=LISTS)
def test_nodes_are_read_as_they_are_written(tmp_path: Path, content: str, nodes: str, without: int) -> None:
    found = read(write(tmp_path, content))
    assert parse_nodes(found.nodes) == found.groups


@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8")), st.integers(1, 1024)), min_size=1, max_size=20))
def test_whatever_the_types_are_called_nodes_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, told: list[tuple[str, int]]
) -> None:
    def one_cell(text: str) -> str:
        return "".join(text.replace(",", " ").replace('"', " ").replace("\0", " ").split()) or "T4"

    rows = [f"m{place},{one_cell(gpu_type)},1,1,{gpus}\n" for place, (gpu_type, gpus) in enumerate(told)]
    path = tmp_path_factory.mktemp("machines") / "m.csv"
    path.write_text(PAI_HEADER + "".join(rows), encoding="utf-8", newline="")
    found = read(path)
    assert parse_nodes(found.nodes) == found.groups
    assert sum(group.count for group in found.groups) == len(told)


def test_memory_is_the_type_only_to_who_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, PHILLY + "m97,8,\nm98,0,\n")
    assert read(path).nodes == "2x2:any,2x8:any"
    found = read(path, memory_as_type=True)
    assert (found.nodes, found.refusals.lines, found.without_gpus) == ("2x2:12GB,1x8:24GB", {"no-type": [5]}, 1)
    for content in (REVISED, OPENB):
        with pytest.raises(UserError, match="tell no memory of GPUs to take for their type"):
            read(write(tmp_path, content), memory_as_type=True)


def test_odd_rows_are_counted_by_kind_and_line(tmp_path: Path) -> None:
    rows = [
        ("n0,1,1,4,T4", None),
        ("n1,1,1,,T4", "no-gpus"),
        ("n2,1,1,many,T4", "bad-gpus"),
        ("n3,1,1,1.5,T4", "bad-gpus"),
        ("n4,1,1,-1,T4", "bad-gpus"),
        ("n5,1,1,1025,T4", "bad-gpus"),
        ("n6,1,1,inf,T4", "bad-gpus"),
        ("n7,1,1,4,", "no-type"),
        (",1,1,4,T4", "no-name"),
        ("n0,1,1,4,T4", "repeated-machine"),
        ("n8,1,1,4", "missing-columns"),
        ("n8,1,1,4,T4,", "extra-columns"),
        ("n9,1,1,4.0,T4", None),
    ]
    header = OPENB.partition("\n")[0]
    found = read(write(tmp_path, "\n".join([header, *(row for row, _ in rows)]) + "\n\n"))
    expected: dict[str, list[int]] = {}
    for place, (_, kind) in enumerate(rows, start=2):
        if kind:
            expected.setdefault(kind, []).append(place)
    assert found.refusals.lines == expected
    assert found.nodes == "2x4:T4"


def test_types_are_made_to_fit_and_told(tmp_path: Path) -> None:
    found = read(write(tmp_path, "a,Tesla V100 (32 GB),1,1,8\nb,Ω,1,1,2\nc,A100-80G.b_1,1,1,4\n"))
    assert found.nodes == "1x4:A100-80G.b_1,1x8:Tesla-V100-32-GB,1x2:any"
    assert found.left_out() == [
        "type 'Tesla V100 (32 GB)' is written as Tesla-V100-32-GB",
        "type 'Ω' is written as any",
    ]


def test_compressed_lists_with_a_mark_and_other_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "machines.csv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf\r\n" + PHILLY.replace("\n", "\r\n").encode()))
    assert read(path).nodes == "2x2:any,1x8:any"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty; expected a list of machines in CSV"),
        ("a\0b\n", ":1: not a text file"),
        ("\nname,size\n", ":2: no known list of machines begins with 'name,size'; expected the columns of Philly"),
        ("a,T4,96,much,8\n", ":1: no known list of machines"),
        ("a,CPU,96,512,0\nb,T4,1\n", "no machine with GPUs; without: 1; refused rows: 1 missing-columns (line 2)"),
    ],
)
def test_unusable_lists_are_one_clear_line(tmp_path: Path, content: str, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_machines_than_nodes_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "NODES_MAX", 2)
    assert read(write(tmp_path, REVISED)).groups
    with pytest.raises(UserError, match="at most 2 nodes of at most 1,024 GPUs"):
        read(write(tmp_path, PHILLY))


def test_the_command_writes_nodes_alone_on_standard_output(tmp_path: Path) -> None:
    path = write(tmp_path, OPENB + "n9,1,1,x,T4\n")
    result = CliRunner().invoke(cli.app, ["nodes", str(path)])
    assert result.exit_code == 0
    assert result.stdout == "1x8:G2,2x2:P100\n"
    assert result.stderr.splitlines() == [
        f"{path}: left out without GPUs: 1",
        f"{path}: refused rows: 1 bad-gpus (line 6)",
    ]


def test_json_has_everything(tmp_path: Path) -> None:
    path = write(tmp_path, PAI + "e,V 100,1,1,2\nf,T4,1,1,x\n")
    result = CliRunner().invoke(cli.app, ["nodes", str(path), "--json"])
    assert json.loads(result.stdout) == {
        "path": str(path),
        "format": "PAI machines",
        "nodes": "1x8:MISC,1x2:V-100,2x8:V100M32",
        "machines": 4,
        "gpus": 26,
        "groups": [
            {"count": 1, "gpus": 8, "gpu_type": "MISC"},
            {"count": 1, "gpus": 2, "gpu_type": "V-100"},
            {"count": 2, "gpus": 8, "gpu_type": "V100M32"},
        ],
        "without_gpus": 1,
        "renamed": {"V 100": "V-100"},
        "refused": [{"kind": "bad-gpus", "count": 1, "lines": [6]}],
    }


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "machines_and_gpus", "without"),
    [
        ("philly/cluster_machine_list", (552, 2490), 0),
        ("philly/revised_machine_list.csv", (539, 3205), 13),
        ("alibaba-gpu-v2023/openb_node_list_gpu_node.csv", (1213, 6212), 0),
        ("alibaba-gpu-v2023/openb_node_list_all_node.csv", (1213, 6212), 310),
        ("alibaba-gpu-v2020/pai_machine_spec.csv", (1814, 6742), 83),
    ],
)
def test_the_lists_of_the_traces(traces_dir: Path, name: str, machines_and_gpus: tuple[int, int], without: int) -> None:
    found = read(traces_dir / name)
    assert (sum(g.count for g in found.groups), sum(g.count * g.gpus for g in found.groups)) == machines_and_gpus
    assert (found.without_gpus, found.refusals.total, found.renamed) == (without, 0, {})
    assert [(g.count, g.gpus, g.gpu_type) for g in parse_nodes(found.nodes)] == [
        (g.count, g.gpus, g.gpu_type) for g in found.groups
    ]
