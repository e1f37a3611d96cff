"""Inputs to raw records: the search for files, the detection of their formats, and the errors."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.files.input_files.inputs import InputHash, list_inputs
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.records import Record
from treepack.trajectory import Skipped

RECORDS = [{"a": 1}, {"a": [1, 2], "b": "x"}]
JSONL = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
objects = st.dictionaries(st.text(max_size=5), scalars | st.lists(scalars, max_size=3), max_size=4)


def write(folder: Path, data: bytes, name: str = "r.jsonl") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def values(path: str) -> list[dict[str, Any]]:
    return [record.value for record in read_records(path)]


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)  # type: ignore[no-any-return]


@given(st.lists(objects, min_size=1, max_size=5), st.sampled_from(["lines", "crlf", "array", "pretty"]))
def test_every_layout_of_the_same_records_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]], layout: str
) -> None:
    end = "\r\n" if layout == "crlf" else "\n"
    text = end.join(json.dumps(record, ensure_ascii=False) for record in records)
    if layout in ("array", "pretty"):
        text = json.dumps(records, ensure_ascii=False, indent=2 if layout == "pretty" else None)
    path = tmp_path_factory.mktemp("layout") / "r"
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return
    path.write_bytes(data)
    assert values(str(path)) == records


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_only_a_newline_ends_a_line(tmp_path: Path, separator: str) -> None:
    text = f"a{separator}b"
    line = json.dumps({"text": text}, ensure_ascii=separator < " ").encode()
    assert values(write(tmp_path, line + b"\n" + line)) == [{"text": text}] * 2


def test_blank_lines_and_a_byte_order_mark_are_passed_over_but_counted(tmp_path: Path) -> None:
    path = write(tmp_path, b'\xef\xbb\xbf\n\n{"a": 1}\n \r\n{"a": 2}\n')
    assert [record.source for record in read_records(path)] == [f"{path}:3", f"{path}:5"]
    assert values(write(tmp_path, b'\xef\xbb\xbf{"a": 1}')) == [{"a": 1}]


@pytest.mark.parametrize(
    ("data", "sources"),
    [
        (JSONL, ["r.jsonl:1", "r.jsonl:2"]),
        (json.dumps(RECORDS).encode(), ["r.jsonl[0]", "r.jsonl[1]"]),
        (json.dumps(RECORDS[0], indent=1).encode(), ["r.jsonl"]),
        (b'[\n{"a": 1}\n]\n', ["r.jsonl[0]"]),
    ],
)
def test_sources_name_the_line_the_element_or_the_document(tmp_path: Path, data: bytes, sources: list[str]) -> None:
    records = list(read_records(write(tmp_path, data)))
    assert [record.label for record in records] == sources


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_compressed_files_read_like_plain_ones(tmp_path: Path, compress: Any) -> None:
    data = JSONL * 50_000
    assert values(write(tmp_path, compress(data))) == RECORDS * 50_000


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_truncated_compressed_file_is_refused(tmp_path: Path, compress: Any) -> None:
    path = write(tmp_path, compress(JSONL * 5000)[:-5])
    with pytest.raises(TreepackError) as caught:
        values(path)
    expected = f"{path}: cannot be read (Truncated compressed stream); restore the file or its permissions"
    assert str(caught.value) == expected


def test_a_damaged_compressed_file_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(JSONL * 5000))
    data[20:40] = b"\xff" * 20
    assert "cannot be read" in refusal(values, write(tmp_path, bytes(data)))


def test_standard_input_reads_like_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (JSONL, gzip.compress(JSONL), json.dumps(RECORDS, indent=1).encode()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        (path,), _, _ = list_inputs(["-"])
        digest = InputHash()
        records = list(read_records(path, input_hash=digest))
        assert [record.value for record in records] == RECORDS
        assert digest.files == [("<stdin>", hashlib.sha256(data).hexdigest())]


def test_parquet_lists_of_numbers_become_arrays(tmp_path: Path) -> None:
    columns = {
        "ids": pa.array([[1, 2, 3], None, []], pa.list_(pa.int32())),
        "flags": pa.array([[True], [False, True], []], pa.large_list(pa.bool_())),
        "pair": pa.array([[1.0, 2.0], [3.0, None], [5.0, 6.0]], pa.list_(pa.float32(), 2)),
        "messages": pa.array([[{"role": "user"}], [], None]),
        "id": ["a", "b", None],
    }
    path = str(tmp_path / "r.parquet")
    pq.write_table(pa.table(columns), path, row_group_size=2)
    records = list(read_records(path))
    assert [record.label for record in records] == ["r.parquet[0]", "r.parquet[1]", "r.parquet[2]"]
    first, second, third = (record.value for record in records)
    assert isinstance(first["ids"], np.ndarray)
    assert first["ids"].tolist() == [1, 2, 3]
    assert (second["ids"], third["ids"].tolist(), second["flags"].tolist()) == (None, [], [False, True])
    np.testing.assert_array_equal(second["pair"], [3.0, np.nan])
    assert (first["messages"], third["messages"], third["id"]) == ([{"role": "user"}], None, None)


def test_a_parquet_struct_has_only_the_fields_that_its_record_had(tmp_path: Path) -> None:
    messages = [[{"calls": [{"arguments": {"x": 1}}, {"arguments": {"y": [{"a": 1}, {"b": 2}]}}]}], [{"content": "c"}]]
    path = str(tmp_path / "r.parquet")
    pq.write_table(pa.table({"messages": messages, "info": [{"a": 1}, None]}), path)
    first, second = values(path)
    assert [first["messages"], second["messages"]] == messages
    assert (first["info"], second["info"]) == ({"a": 1}, None)


@pytest.mark.parametrize("opened", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_files_and_streams_give_what_parquet_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    table = pa.table({"id": [f"r{i}" for i in range(3000)], "input_ids": [list(range(i % 7)) for i in range(3000)]})
    plain, packed, parquet = (tmp_path / name for name in ("data-0.arrow", "data-1.arrow.gz", "r.parquet"))
    with opened(str(plain), table.schema) as writer:
        writer.write_table(table, max_chunksize=2000)
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    pq.write_table(table, parquet)
    digest = InputHash()
    expected = [repr(value) for value in values(str(parquet))]
    assert [repr(record.value) for record in read_records(str(plain), input_hash=digest)] == expected
    assert digest.files[0][1] == hashlib.sha256(plain.read_bytes()).hexdigest()
    assert [repr(value) for value in values(str(packed))] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(plain.read_bytes())))
    assert [repr(value) for value in values("<stdin>")] == expected
    assert list_inputs([tmp_path])[0] == [str(path) for path in (plain, packed, parquet)]


def test_a_truncated_arrow_stream_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.arrow"
    table = pa.table({"id": ["a" * 999] * 99})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(TreepackError, match=r"not a readable Parquet or Arrow file|cannot be read"):
        values(str(path))


def test_parquet_is_told_by_its_bytes_and_hashed_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.data"
    pq.write_table(pa.table({"id": ["a", "b"]}), path)
    packed = tmp_path / "r.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    digest = InputHash()
    assert [r.value for r in read_records(str(path), input_hash=digest)] == [{"id": "a"}, {"id": "b"}]
    assert values(str(packed)) == [{"id": "a"}, {"id": "b"}]
    assert digest.files == [(str(path), hashlib.sha256(path.read_bytes()).hexdigest())]


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    assert "not a readable Parquet or Arrow file" in refusal(values, write(tmp_path, b"PAR1 and nothing more"))


def test_a_parquet_column_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    column = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe"))
    pq.write_table(pa.table({"id": column}), path)
    with pytest.raises(TreepackError, match=f"{path}: not a readable .* \\('utf-8' codec.*; write the file again"):
        values(str(path))


@given(st.data())
def test_a_truncated_or_damaged_parquet_file_reads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "r.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "ids": [[1, 2], [3]]}), path)
    whole = bytearray(path.read_bytes())
    size = data.draw(st.integers(4, len(whole)))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(4, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole[:size])
    refused = ""
    try:
        values(str(path))
    except TreepackError as error:
        refused = str(error)
    assert refused.startswith(f"{path}") if refused else size == len(whole)
    assert "\n" not in refused


def test_the_hash_depends_on_the_bytes_alone(tmp_path: Path) -> None:
    files = [(JSONL, "a.jsonl"), (gzip.compress(JSONL, mtime=0), "b.jsonl.gz")]
    hashes = []
    for folder, order in (("one", files), ("two", files[::-1])):
        digest = InputHash()
        for data, name in order:
            list(read_records(write(tmp_path / folder, data, name), input_hash=digest))
        hashes.append(digest.hexdigest())
        assert digest.num_files == 2
    lines = sorted(hashlib.sha256(data).hexdigest() + "\n" for data, _ in files)
    assert hashes == [hashlib.sha256("".join(lines).encode()).hexdigest()] * 2


def test_a_folder_is_searched_sorted_and_counts_what_it_leaves(tmp_path: Path) -> None:
    names = ["b.jsonl", "a/z.traj.gz", "a/b.json", "c.parquet.zst", "notes.md", "LICENSE", "d.jsonl.bak", "e.txt.gz"]
    for name in names:
        write(tmp_path, JSONL, name)
    files, skipped, _ = list_inputs([tmp_path])
    assert [str(Path(path).relative_to(tmp_path)) for path in files] == [
        "a/b.json",
        "a/z.traj.gz",
        "b.jsonl",
        "c.parquet.zst",
    ]
    assert [item.reason for item in skipped] == [
        "file without extension not read",
        "file extension .bak not read",
        "file extension .txt not read",
        "file extension .md not read",
    ]


def test_links_in_a_folder_are_read_or_named(tmp_path: Path) -> None:
    write(tmp_path, JSONL, "data/a.jsonl")
    write(tmp_path, JSONL, "other/b.jsonl")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "b.jsonl").symlink_to(tmp_path / "other" / "b.jsonl")
    files, skipped, _ = list_inputs([tmp_path / "data"])
    assert [Path(path).name for path in files] == ["a.jsonl", "b.jsonl"]
    assert [(Path(item.source).name, item.reason) for item in skipped] == [("link", "link to a folder not followed")]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # of a reader without a file
def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.jsonl"
    path.symlink_to("loop.jsonl")
    for name in (tmp_path, path):
        with pytest.raises(TreepackError) as caught:
            [values(file) for file in list_inputs([name])[0]]
        reason = "Too many levels of symbolic links"
        assert str(caught.value) == f"{path}: cannot be read ({reason}); restore the file or its permissions"


def test_a_name_that_is_not_utf_8_is_read_and_shown_escaped(tmp_path: Path) -> None:
    for name in (b"\xff.jsonl", b"a.\xff"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(JSONL)
    files, skipped, _ = list_inputs([tmp_path])
    digest = InputHash()
    records = [record for path in files for record in read_records(path, input_hash=digest)]
    assert [record.source for record in records] == [f"{tmp_path}/\\xff.jsonl:{line}" for line in (1, 2)]
    assert [record.label for record in records] == ["\\xff.jsonl:1", "\\xff.jsonl:2"]
    assert skipped == [Skipped(f"{tmp_path}/a.\\xff", "file extension .\\xff not read", is_rollout=False)]
    assert digest.files[0][0] == f"{tmp_path}/\\xff.jsonl"


def test_globs_are_expanded_sorted_and_an_existing_name_is_no_glob(tmp_path: Path) -> None:
    paths = [write(tmp_path, JSONL, name) for name in ("a[1].jsonl", "b.jsonl", "sub/c.jsonl")]
    assert list_inputs([f"{tmp_path}/*.jsonl"])[0] == paths[:2]
    assert list_inputs([f"{tmp_path}/**/*.jsonl"])[0] == paths
    assert list_inputs([paths[0]])[0] == paths[:1]


def test_unusable_inputs_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, JSONL)
    (tmp_path / "empty").mkdir()
    long = "x" * 300
    for inputs, expected in (
        ([long], f"{long}: cannot be read (File name too long); check the path"),
        (
            [f"{tmp_path}/no.jsonl"],
            f"{tmp_path}/no.jsonl: no such file or folder, and no glob that matches one; check the path",
        ),
        ([path, tmp_path], f"{path}: named twice among the inputs; name it once"),
        (
            [tmp_path / "empty"],
            f"{tmp_path}/empty: contains no file to read; "
            "expected the extensions .arrow .eval .json .jsonl .ndjson .parquet .pt .root .traj, plain, .gz or .zst",
        ),
    ):
        with pytest.raises(TreepackError) as caught:
            list_inputs(inputs)  # type: ignore[arg-type]
        assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ": contains no record; remove it from the inputs"),
        (b"\n \n", ": contains no record; remove it from the inputs"),
        (b"[]", ": contains no record; remove it from the inputs"),
        (
            JSONL + b'{"a": 1 "b": 2}\n',
            ":3: malformed JSON (Expecting ',' delimiter at column 9); fix or remove the line",
        ),
        (
            b'{"a": 1 "b": 2}\n' + JSONL,
            ":1: malformed JSON (Expecting ',' delimiter at column 9); fix or remove the line",
        ),
        (b'{"a": 1', ":1: malformed JSON (Expecting ',' delimiter at column 8); fix or remove the line"),
        (b'\n{\n"a": 1\n"b": 2\n}', ":4: malformed JSON (Expecting ',' delimiter at column 1); fix the document"),
        (JSONL + b"[1]\n", ":3: contains an array; expected a JSON object"),
        (b'"text"\n', ":1: contains a string; expected a JSON object"),
        (b'[{"a": 1}, 2]', "[1]: contains a number; expected a JSON object"),
        (
            b"[{}]\n{}\n",
            ":2: text after a JSON array that is not messages; put one record on each line, or all into one array",
        ),
        (JSONL + b'{"a": "\xff"}\n', ":3: not UTF-8 (byte 0xff); fix or remove the line"),
        (b'{\n"a": "\xff"}\n', ":2: not UTF-8 (byte 0xff); fix the document"),
        (JSONL + b'{"a": "\\ud800"}\n', ":3: half of a surrogate pair in a string; fix or remove the line"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, data: bytes, expected: str) -> None:
    path = write(tmp_path, data)
    assert refusal(values, path) == path + expected


def test_json_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    assert "r.jsonl:1: unusable JSON (maximum recursion depth" in refusal(
        values, write(tmp_path, b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    )


def test_numbers_that_only_lenient_json_has_are_read(tmp_path: Path) -> None:
    (first, second) = values(write(tmp_path, b'{"a": [NaN, -Infinity]}\n{"a": 123456789012345678901234567890}\n'))
    np.testing.assert_array_equal(first["a"], [np.nan, -np.inf])
    assert second["a"] in (123456789012345678901234567890, 123456789012345678901234567890.0)


def test_a_label_is_the_source_without_its_folder() -> None:
    assert Record("some/where/r.jsonl:3", "some/where/r.jsonl", {}).label == "r.jsonl:3"
