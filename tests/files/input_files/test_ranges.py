"""Ranges of files that another process opens: the same records, faults and hashes as from reading in order."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.files.input_files import json_files, ranges
from treepack.files.input_files.inputs import InputHash
from treepack.files.input_files.limits import RecordLimits
from treepack.files.input_files.ranges import LineRange, RowGroups
from treepack.files.input_files.record_files import read_blocks
from treepack.trajectory import Skipped

in_one_folder = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
MAX_SIZE = 40
LINES = [
    '{"a": 1}',
    "",
    "  ",
    '{"b": "%s"}' % ("x" * 20),
    '{"c": "%s"}' % ("x" * 29),
    '{"d": "%s"}' % ("x" * 90),
    "{bad",
]


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "MIN_FILE", 1)
    monkeypatch.setattr(ranges, "GROUP_BYTES", 1)
    for module in (ranges, json_files):
        monkeypatch.setattr(module, "FIRST_LINES", 12)
        monkeypatch.setattr(module, "next_size", lambda size, position: min(2 * size, 30))


def reading(path: Path, *, as_ranges: bool, skip_bad: bool, max_size: int = MAX_SIZE) -> tuple[list[Any], str, Any]:
    """The records and faults of a file in order, the error that ends the reading, and the hash of the file."""
    results: list[Any] = []
    digest, error = InputHash(), ""
    damaged: list[Skipped] | None = [] if skip_bad else None
    try:
        limits = RecordLimits(max_size, skip_bad)
        for block in read_blocks(str(path), limits, input_hash=digest, as_ranges=as_ranges):
            results += [(record.source, record.value) for record in block.records(damaged)]
            results += damaged or []
            if damaged:
                damaged.clear()
    except TreepackError as failure:
        error = str(failure)
    return results, error, digest.files


@in_one_folder
@given(
    st.lists(st.sampled_from(LINES), min_size=1, max_size=12),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "\ufeff"]),
    st.booleans(),
    st.booleans(),
)
def test_ranges_of_lines_are_read_as_the_stream(
    tmp_path: Path, lines: list[str], end: str, mark: str, is_ended: bool, skip_bad: bool
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes((mark + end.join(lines) + (end if is_ended else "")).encode())
    assert reading(path, as_ranges=True, skip_bad=skip_bad) == reading(path, as_ranges=False, skip_bad=skip_bad)


def test_a_file_of_objects_is_split_into_ranges_that_contain_no_data(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n' * 20)
    digest = InputHash()
    blocks = list(read_blocks(str(path), input_hash=digest, as_ranges=True))
    assert len(blocks) > 3
    assert all(isinstance(block, LineRange) for block in blocks)
    assert digest.files == [(str(path), hashlib.sha256(path.read_bytes()).hexdigest())]


@pytest.mark.parametrize("data", ["[1, 2]\n", '{"a":\n1}\n', "# no JSON\n" * 9])
def test_other_files_are_read_in_order(tmp_path: Path, data: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(data)
    assert ranges.plan_ranges(str(path), RecordLimits(), None) is None


@pytest.mark.parametrize("skip_bad", [False, True])
def test_row_groups_are_read_as_the_stream(tmp_path: Path, skip_bad: bool) -> None:
    path = tmp_path / "r.parquet"
    pq.write_table(pa.table({"a": list(range(100))}), path, row_group_size=7)
    blocks = list(read_blocks(str(path), RecordLimits(skip_bad=skip_bad), as_ranges=True))
    # With skip_bad, damage would end the file, so that one worker reads all of it.
    assert len(blocks) == (1 if skip_bad else 15)
    assert all(isinstance(block, RowGroups) for block in blocks)
    results = [reading(path, as_ranges=as_ranges, skip_bad=skip_bad) for as_ranges in (True, False)]
    assert results[0] == results[1]
    assert len(results[0][0]) == 100


@pytest.mark.parametrize("skip_bad", [False, True])
def test_damage_in_a_row_group_has_the_same_sentence(tmp_path: Path, skip_bad: bool) -> None:
    path = tmp_path / "r.parquet"
    pq.write_table(
        pa.table({"a": ["text" * 20] * 100}), path, row_group_size=50, compression=None, write_page_checksum=True
    )
    data = bytearray(path.read_bytes())
    second = pq.ParquetFile(path).metadata.row_group(1).column(0)
    start = second.dictionary_page_offset or second.data_page_offset
    data[start : start + 30] = b"\xff" * 30
    path.write_bytes(data)
    split, whole = (reading(path, as_ranges=as_ranges, skip_bad=skip_bad) for as_ranges in (True, False))
    if skip_bad:
        assert split == whole
        assert [type(item) for item in split[0]][-1] is Skipped
    else:
        # The rows before the damage do not count, because the error ends the reading.
        assert split[1:] == whole[1:]
        assert split[1].startswith(f"{path}: ")


def test_a_file_that_vanishes_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n' * 20)
    blocks = list(read_blocks(str(path), as_ranges=True))
    path.unlink()
    assert "r.jsonl: cannot be read (No such file or directory)" in refusal(list, blocks[1].records())
