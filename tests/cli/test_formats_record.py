"""treepack formats --record: the first record as a tree of fields, each with the use that its reader makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.command_line import Run
from support.paths import ROLLOUTS
from treepack.files.input_files.inputs import list_inputs
from treepack.files.input_files.records import Record
from treepack.ingest.readers import record_use
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import recognised_file
from treepack.ingest.readers.recognition import RecognisedFile
from treepack.ingest.readers.record_use import explain
from treepack.ingest.readers.registry import formats_by_name
from treepack.trajectory import Skipped, Trajectory

CHAT = {
    "messages": [
        {"role": "user", "content": "Bolts?"},
        {"role": "assistant", "content": "Seven.", "weight": 1.0, "mood": "good"},
    ],
    "score": 0.5,
    "task_id": "t",
    "step": 3,
    "shelf": "A",
    "grid": [["x"]],
    "note": None,
}


def write(folder: Path, *values: Any) -> str:
    path = folder / "r.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def uses(path: str, options: ReadOptions | None = None) -> dict[str, dict[str, int]]:
    return {field.path: field.uses for field in explain(path, options or ReadOptions()).fields}


def test_each_field_of_a_conversation_has_its_use(tmp_path: Path) -> None:
    assert uses(write(tmp_path, CHAT)) == {
        "messages[].role": {"structure": 2},
        "messages[].content": {"prompt": 1, "trained": 1},
        "messages[].weight": {"mask": 1},
        "messages[].mood": {"not used": 1},
        "score": {"reward": 1},
        "task_id": {"group": 1},
        "step": {"step": 1},
        "shelf": {"metadata": 1},
        "grid[][]": {"not used": 1},
        "note": {"empty": 1},
    }


def test_each_field_of_token_ids_has_its_use(tmp_path: Path) -> None:
    value = {"prompt_ids": [5, 6], "response_ids": [7, 8], "response_mask": [1, 0], "logprobs": [-1.0, -2.0], "id": "a"}
    assert uses(write(tmp_path, value)) == {
        "prompt_ids": {"prompt": 1},
        "response_ids": {"prompt": 1, "trained": 1},
        "response_mask": {"mask": 1},
        "logprobs": {"sampling logprobs": 1},
        "id": {"id": 1},
    }


def test_only_some_of_many_equal_fields_are_tried_and_all_are_counted(tmp_path: Path) -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(60)]
    (_, content) = explain(write(tmp_path, {"messages": turns}), ReadOptions()).fields
    assert (content.num_values, content.uses) == (60, {"prompt": 10, "trained": 10})


@pytest.mark.parametrize("field", ["x", [["x"]]])
def test_the_number_of_readings_does_not_grow_with_the_fields(tmp_path: Path, field: Any, monkeypatch: Any) -> None:
    form, num_read = formats_by_name()["chat"], [0]

    def counted(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
        num_read[0] += 1
        assert form.read is not None
        return form.read(record, options)

    def recognised(*arguments: Any) -> RecognisedFile:
        return replace(recognised_file(*arguments), format=replace(form, read=counted))

    monkeypatch.setattr(record_use, "recognised_file", recognised)
    path = write(tmp_path, CHAT | {f"field{number}": field for number in range(2000)})
    found = uses(path)
    assert {found[name] == {"metadata": 1} for name in found if name.startswith("field")} == {isinstance(field, str)}
    assert found["messages[].content"] == {"prompt": 1, "trained": 1}
    assert num_read[0] < 300


def test_the_first_record_with_an_answer_is_shown(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "Bolts?"}]}
    assert explain(write(tmp_path, asked, asked, CHAT), ReadOptions()).source.endswith("r.jsonl:3")
    assert explain(write(tmp_path, asked, asked), ReadOptions()).source.endswith("r.jsonl:1")
    session = explain(str(ROLLOUTS / "claude-code" / "session.jsonl"), ReadOptions())
    assert any("trained" in field.uses for field in session.fields)


@pytest.mark.parametrize("name", formats_by_name())
def test_the_sample_of_every_format_is_explained(name: str) -> None:
    (path,) = [each for each in ROLLOUTS.iterdir() if each.name.partition(".")[0] == name]
    use = explain(list_inputs([path])[0][0], ReadOptions(shapes=True))
    assert use.format == name
    assert use.error is None
    assert len(use.fields) > 0
    assert use.others.keys() == formats_by_name().keys() - {name}
    if any(not line.startswith("skipped") for line in use.outcome):
        found = {each for field in use.fields for each in field.uses}
        assert found - {"not used", "empty"}


def test_the_command_prints_the_tree_and_the_reasons(tmp_path: Path, treepack: Run) -> None:
    path = write(tmp_path, CHAT)
    tree, _, reasons = treepack("formats", "--record", path).out.partition("not tau2: ")
    assert tree.splitlines() == [
        f"{path}:1: format chat",
        "read as conversation: 1",
        "",
        "messages[]",
        '  role      "user"    structure (2)',
        '  content   "Bolts?"  prompt (1), trained (1)',
        "  weight    1.0       mask",
        '  mood      "good"    not used',
        "score       0.5       reward",
        'task_id     "t"       group',
        "step        3         step",
        'shelf       "A"       metadata',
        'grid[][]    "x"       not used',
        "note        null      empty",
        "",
        "- field 'grid' not used",
        "- message field 'mood' not used",
    ]
    assert reasons.startswith("has no termination_reason; expected")
    printed = treepack("formats", "--record", path, "--json").json
    assert printed["format"] == "chat"
    others = printed["others"]
    assert isinstance(others, dict)
    assert others["tau-bench"].startswith("has no traj; expected")


def test_columns_and_aliases_are_named(tmp_path: Path, treepack: Run) -> None:
    path = write(tmp_path, {"prompt": "Bolts?", "response": "Seven.", "system": None})
    assert "\ncolumns: prompt=prompt,answer=response\n" in treepack("formats", "--record", path).out
    path = write(tmp_path, {"ask": "Bolts?", "said": "Seven.", "ok": 1})
    out = treepack("formats", "--record", path, "--columns", "question=ask,answer=said,reward=ok").out
    assert "columns: question=ask,answer=said,reward=ok\n" in out
    assert 'ask   "Bolts?"  prompt\nsaid  "Seven."  trained\nok    1         reward\n' in out


def test_a_record_of_no_known_format_is_shown_with_the_remedy(tmp_path: Path, treepack: Run) -> None:
    path = write(tmp_path, {"ask": "Bolts?", "said": "Seven."})
    result = treepack("formats", "--record", path)
    assert result.status == 0
    assert result.out.startswith(f"{path}:1: no known format\nrefused: {path}:1: has no known format")
    assert "add --columns question=ask,answer=said;" in result.out
    assert 'ask   "Bolts?"  not read\nsaid  "Seven."  not read\n' in result.out


def test_a_name_is_the_format_that_the_file_must_have(tmp_path: Path, treepack: Run) -> None:
    path = write(tmp_path, {"x": 1})
    assert "refused" in treepack("formats", "tokens", "--record", path).out
    result = treepack("formats", "--columns", "question=a,answer=b")
    assert result.status == 2
    assert "--columns maps the record of --record" in result.err


def test_unused_fields_are_named_if_nothing_can_be_built(tmp_path: Path, treepack: Run, tokenizer_dir: Path) -> None:
    path = write(tmp_path, {"messages": [{"role": "user", "content": "Bolts?", "mood": "good"}], "grid": [["x"]]})
    result = treepack("build-trie", path, "--tokenizer", str(tokenizer_dir), "--out", str(tmp_path / "trie"))
    assert result.status == 1
    assert result.err.endswith("; skipped: no trained token (1); fields not used: mood, grid\n")


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    from support.byte_tokenizer import PLAIN, save

    return Path(save(tmp_path / "tokenizer", PLAIN))
