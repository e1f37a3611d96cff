"""Damaged records and files: refused by name, or with `skip_bad` skipped and counted while good records survive."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.paths import ROLLOUTS
from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.files.input_files.limits import RecordLimits
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.yaml_files import read_yaml
from treepack.ingest.options import BuildOptions
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import read_parts
from treepack.ingest.stream import read
from treepack.trajectory import Skipped, Trajectory

SKIP = ReadOptions(limits=RecordLimits(skip_bad=True))


def rollout(number: int) -> dict[str, Any]:
    return {"id": f"r{number}", "input_ids": [1, 2, number], "loss_mask": [0, 1, 1], "group_id": "g"}


def write(folder: Path, data: bytes, name: str = "r.jsonl") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def lines(*records: Any) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in records)


def names_and_faults(path: str, options: ReadOptions = SKIP) -> tuple[list[str], list[Skipped]]:
    items = [item for part in read_parts([path], options) for item in part.trajectories()]
    names = [item.trajectory_id for item in items if isinstance(item, Trajectory)]
    return names, [item for item in items if isinstance(item, Skipped)]


DAMAGED_LINES = {
    "malformed": (b'{"input_ids": [1, 2', "malformed JSON"),
    "not an object": (b"null", "contains null; expected a JSON object"),
    "a mask of another length": ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 values for 2 tokens"),
    "half of a surrogate pair": (b'{"input_ids": [1], "note": "\\ud800"}', "half of a surrogate pair"),
    "not UTF-8": (b'{"input_ids": [1], "note": "\xff"}', "not UTF-8"),
    "another format": ({"what": 1}, "expected input_ids, or prompt_ids and response_ids"),
}


@pytest.mark.parametrize(("line", "sentence"), DAMAGED_LINES.values(), ids=DAMAGED_LINES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_line_is_skipped_and_named_and_the_others_survive(
    tmp_path: Path, line: Any, sentence: str, place: int
) -> None:
    good = [rollout(1), rollout(2)]
    path = write(tmp_path, lines(*good[:place], line, *good[place:]))
    names, (fault,) = names_and_faults(path)
    assert names == ["r1", "r2"]
    assert (fault.source, fault.reason) == (f"{path}:{place + 1}", "damaged record")
    assert fault.detail.startswith(f"{path}:{place + 1}: ")
    assert sentence in fault.detail
    with pytest.raises(TreepackError):
        names_and_faults(path, ReadOptions())


@pytest.mark.parametrize("value", [float("nan"), "high", {"a": None}, [None]])
def test_a_bad_reward_skips_its_rollout_and_no_other(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path, lines(rollout(1), rollout(9) | {"reward": value, "group_id": "g"}, rollout(2)))
    names, (fault,) = names_and_faults(path, ReadOptions(reward_key="a"))
    assert names == ["r1", "r2"]
    assert (fault.source, fault.reason.partition(" of ")[0], fault.group_id) == (f"{path}:2", "bad value", "g")
    assert fault.detail.startswith(f"{path}:2: ")


def test_a_damaged_record_keeps_the_group_that_it_names(tmp_path: Path) -> None:
    path = write(tmp_path, lines(rollout(1), rollout(2) | {"loss_mask": [1]}))
    _, (fault,) = names_and_faults(path)
    assert fault.group_id == "g"


def test_a_record_of_several_rollouts_is_skipped_as_a_whole(tmp_path: Path) -> None:
    transition = {"ob": [1, 2], "ac": {"tokens": [3], "maybe_logprobs": [-0.5]}, "reward": 0.0}
    good, bad = {"transitions": [transition]}, {"transitions": [transition | {"reward": "high"}]}
    path = write(tmp_path, lines({"trajectories_G": [good]}, {"trajectories_G": [good, bad]}))
    names, (fault,) = names_and_faults(path)
    assert names == ["r.jsonl:1/0"]
    assert "reward is" in fault.detail


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_elements_of_a_damaged_array_survive(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps([rollout(i) for i in range(4)], indent=indent)
    # The id of r1 loses its second quote. On one line, nothing tells where the next element begins.
    damaged = text.replace('"r1"', '"r1')
    path = write(tmp_path, damaged.encode(), "r.json")
    names, (fault,) = names_and_faults(path)
    assert names == (["r0"] if indent is None else ["r0", "r2", "r3"])
    assert fault.source == f"{path}[1]"
    assert "malformed JSON" in fault.detail


def test_elements_that_are_no_text_or_no_object_are_skipped_one_by_one(tmp_path: Path) -> None:
    elements = [json.dumps(rollout(0)), '{"note": "\\ud800"}', "null", json.dumps(rollout(3))]
    for text in ("[" + ",".join(elements) + "]", "[\n" + ",\n".join(elements) + "\n]"):
        path = write(tmp_path, text.encode(), "r.json")
        names, faults = names_and_faults(path)
        assert names == ["r0", "r3"]
        assert [fault.source for fault in faults] == [f"{path}[1]", f"{path}[2]"]


@pytest.mark.parametrize("end", ["", ",", '{"a"'])
def test_an_array_that_is_cut_off_keeps_its_elements_and_says_so(tmp_path: Path, end: str) -> None:
    text = "[\n" + json.dumps(rollout(0)) + ",\n" + end
    path = write(tmp_path, text.encode(), "r.json")
    names, faults = names_and_faults(path)
    assert names == ["r0"]
    assert len(faults) >= 1


def test_rows_before_the_damage_of_a_compressed_file_survive(tmp_path: Path) -> None:
    data = lines(*({"pad": str(i**40)} | rollout(i) for i in range(9000)))
    whole = gzip.compress(data, 1)
    path = write(tmp_path, whole[: len(whole) // 2], "r.jsonl.gz")
    names, (fault,) = names_and_faults(path)
    assert 0 < len(names) < 9000
    assert fault.detail == f"{path}: cannot be read (Truncated compressed stream); restore the file or its permissions"


def test_a_row_of_parquet_that_is_no_text_is_skipped(tmp_path: Path) -> None:
    ids = pa.array([b"r0", b"\xff", b"r2"], pa.binary()).view(pa.string())
    table = pa.table({"id": ids, "input_ids": [[1, 2, i] for i in range(3)], "loss_mask": [[0, 1, 1]] * 3})
    path = str(tmp_path / "r.parquet")
    pq.write_table(table, path)
    names, (fault,) = names_and_faults(path)
    assert names == ["r0", "r2"]
    assert fault.source == f"{path}[1]"


def test_a_file_that_is_no_file_of_its_kind_is_skipped_as_a_whole(tmp_path: Path) -> None:
    good = write(tmp_path, lines(rollout(1)), "good.jsonl")
    for name, data in (("a.parquet", b"PAR1 broken"), ("b.pt", b"PK\x03\x04"), ("c.yaml", b"a: !!bool maybe")):
        bad = write(tmp_path, data, name)
        items = [item for part in read_parts([bad, good], SKIP) for item in part.trajectories()]
        assert [type(item) for item in items] == [Skipped, Trajectory]
        assert isinstance(items[0], Skipped)
        assert items[0].is_rollout
        assert items[0].detail.startswith(f"{bad}: ")


def test_records_that_belong_together_are_read_without_the_damaged_one(tmp_path: Path) -> None:
    good = (ROLLOUTS / "otel-genai" / "spans.jsonl").read_bytes().splitlines()
    bad = json.loads(good[0])
    bad["attributes"] |= {"gen_ai.input.messages": "[{", "gen_ai.conversation.id": "other"}
    bad["trace_id"] = "0xbb"
    path = write(tmp_path, lines(good[0], bad, *good[1:]))
    whole, _ = names_and_faults(str(ROLLOUTS / "otel-genai" / "spans.jsonl"))
    names, faults = names_and_faults(path)
    assert names == whole
    assert f"{path}:2" in [fault.source for fault in faults]


@pytest.mark.parametrize("workers", [1, 2])
def test_several_workers_skip_what_one_skips(tmp_path: Path, workers: int) -> None:
    records = [rollout(i) | {"pad": "x" * 2000} if i % 7 else b"{" for i in range(2000)]
    path = write(tmp_path, lines(*records))
    items = list(read([path], BuildOptions(skip_bad=True, workers=workers)))
    assert sum(isinstance(item, Skipped) for item in items) == len(range(0, 2000, 7))
    assert [item.source for item in items if isinstance(item, Skipped)][:2] == [f"{path}:1", f"{path}:8"]


# Limits


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("place", [0, 1])
def test_a_line_above_the_limit_is_refused_or_skipped(tmp_path: Path, compress: Any, place: int) -> None:
    large = rollout(9) | {"pad": "x" * (3 << 20)}
    records = [rollout(1), rollout(2)]
    records.insert(place, large)
    path = write(tmp_path, compress(lines(*records)))
    with pytest.raises(TreepackError) as caught:
        names_and_faults(path, ReadOptions(limits=RecordLimits(1 << 20)))
    sentence = f"{path}:{place + 1}: the line has more than 1 MB; raise --max-record-size, or remove the line"
    assert str(caught.value) == sentence
    names, faults = names_and_faults(path, ReadOptions(limits=RecordLimits(1 << 20, skip_bad=True)))
    assert (names, [fault.detail for fault in faults]) == ((["r1", "r2"], [sentence]) if place else ([], [sentence]))


def test_a_small_file_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    """The compressed data is damaged after 20 MB, which would be the error if it were read so far."""
    import zlib

    packer = zlib.compressobj(9, wbits=31)
    data = packer.compress(b'{"pad": "') + b"".join(packer.compress(b"x" * (1 << 20)) for _ in range(20))
    path = write(tmp_path, data + packer.flush(zlib.Z_SYNC_FLUSH) + b"\xff" * 100, "r.jsonl.gz")
    assert "r.jsonl.gz:1: the line has more than 2 MB" in refusal(
        names_and_faults, path, ReadOptions(limits=RecordLimits(2 << 20))
    )


@pytest.mark.parametrize(
    ("name", "start"), [("r.json", b"[\n1,\n"), ("r.yaml", b"a: "), ("r.pt", b"PK\x03\x04"), ("r.json", b"{\n")]
)
def test_a_file_that_is_read_as_a_whole_has_a_limit(tmp_path: Path, name: str, start: bytes) -> None:
    path = write(tmp_path, start + b"x" * (3 << 20), name)
    assert "more than 1 MB; raise --max-record-size" in refusal(
        names_and_faults, path, ReadOptions(limits=RecordLimits(1 << 20))
    )


# YAML


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: !!bool maybe", "a value does not fit its tag: KeyError 'maybe'"),
        ('a: !!int ""', "a value does not fit its tag: IndexError"),
        ("a: !!timestamp foo", "a value does not fit its tag: AttributeError"),
        ("[" * 300, "nested more than 200 deep"),
        ("[" * 100_000, ""),  # some versions of PyYAML have a limit of their own
        ("a: &a [*a]", "alias a is inside of what it repeats"),
        ("a: *b", "alias b is inside of what it repeats, or stands for nothing"),
    ],
)
def test_yaml_that_pyyaml_fails_on_is_refused_in_one_sentence(text: str, fault: str) -> None:
    with pytest.raises(TreepackError) as caught:
        read_yaml(text.encode(), "r.yaml")
    assert str(caught.value).startswith(f"r.yaml: not YAML of plain values ({fault}")
    assert str(caught.value).endswith("; fix it or write it as JSONL")


def test_aliases_that_expand_to_much_are_refused_and_a_few_are_read() -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    bomb = "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *levels])
    with pytest.raises(TreepackError, match=r"its aliases expand 5.. bytes to more than 1,048,576"):
        read_yaml(bomb.encode(), "r.yaml")
    assert read_yaml(b"a: &x {k: [1]}\nb: [*x, *x]\n7: {<<: *x}", "r.yaml") == {
        "a": {"k": [1]},
        "b": [{"k": [1]}, {"k": [1]}],
        "7": {"k": [1]},
    }


# Files of other kinds


@pytest.mark.parametrize(
    ("name", "text"), [("r.csv", "prompt,response\nHi,Yo\n"), ("rollouts", "id;score\n1;2\n"), ("r.tsv", "{a}\tb\n")]
)
def test_csv_is_named_as_what_it_is(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path, text.encode(), name)
    assert refusal(names_and_faults, path, ReadOptions()) == (
        f"{path}: is CSV, which is not read; convert it to JSONL or Parquet, for example with "
        "polars.read_csv(...).write_parquet(...)"
    )


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("options", [ReadOptions(), SKIP])
@pytest.mark.parametrize("format_name", ["auto", "tokens"])
def test_the_only_list_of_a_document_is_read(
    tmp_path: Path, indent: int | None, options: ReadOptions, format_name: str
) -> None:
    document = {"version": 2, "data": [rollout(0), {**rollout(1), "id": None}]}
    path = write(tmp_path, json.dumps(document, indent=indent).encode(), "r.json")
    names, (beside,) = names_and_faults(path, replace(options, format=format_name))
    assert names == ["r0", "r.json.data[1]"]
    assert (beside.reason, beside.is_rollout) == ("fields beside the list 'data' of a document", False)


def test_a_document_with_two_lists_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"train": [rollout(0)], "test": [rollout(1)]}).encode(), "r.json")
    assert "write each element of train or test as one record" in refusal(names_and_faults, path, ReadOptions())


def test_a_misspelt_field_is_named_with_the_field_that_it_may_be(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    path = write(tmp_path, lines({"mesages": chat}))
    assert "but the fields mesages; rename 'mesages' if it is 'messages'" in refusal(
        names_and_faults, path, ReadOptions()
    )
    path = write(tmp_path, lines({"messages": chat}, {"mesages": chat}))
    assert "r.jsonl:2: has no messages, but mesages; expected" in refusal(names_and_faults, path, ReadOptions())


def test_of_two_equal_keys_the_last_one_counts(tmp_path: Path) -> None:
    for text in (b'{"a": 1, "a": 2}', b'{"a": 1, "a": 2, "b": NaN}'):
        (record,) = read_records(write(tmp_path, text))
        assert record.value["a"] == 2
