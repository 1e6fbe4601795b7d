"""zstd-compressed traces: whole, in several frames, cut, damaged, and without the extra."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import zstandard

from loadgen.trace import read_trace
from streamsched.errors import UserError

HEADER = b"job_id,submit_s,duration_s,gpus\n"
ROWS = b"".join(b"j%d,%d,%d,1\n" % (i, i, i * 7919 % 10007) for i in range(60_000))


def write(folder: Path, content: bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(content)
    return path


def test_frames_one_after_another_are_one_file(tmp_path: Path) -> None:
    compress = zstandard.ZstdCompressor().compress
    jobs = read_trace(
        write(tmp_path, compress(b"\xef\xbb\xbf" + HEADER + ROWS[:500_000]) + compress(ROWS[500_000:]))
    ).jobs
    assert [job.line for job in jobs] == list(range(2, 60_002))


@pytest.mark.parametrize("left_off", [1, 30, 200_000])
def test_a_cut_file_is_told(tmp_path: Path, left_off: int) -> None:
    whole = zstandard.ZstdCompressor().compress(HEADER + ROWS)
    with pytest.raises(UserError, match=r"trace: the zstd data end or break after line \d+"):
        read_trace(write(tmp_path, whole[:-left_off]))


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trace: the zstd data end or break after line 0"):
        read_trace(write(tmp_path, b"\x28\xb5\x2f\xfd" + b"\xff" * 40))


def test_without_the_extra_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, zstandard.ZstdCompressor().compress(HEADER + ROWS))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"is zstd-compressed; reading it needs the extra `trace`"):
        read_trace(path)
