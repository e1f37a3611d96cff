"""Usual homemade layouts without `--columns`, JSON text in containers, and the remedies for all other layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from support.read_rollouts import read_trajectories
from support.readings import chat_of, only, turns
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import column_map
from treepack.ingest.options import BuildOptions
from treepack.ingest.readers.column_records import read_columns
from treepack.ingest.readers.columns.aliases import ALIASES, CONTAINERS, SYSTEM
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.registry import formats_by_name
from treepack.ingest.stream import read
from treepack.trajectory import Chat, Skipped, Trajectory

USER, ANSWER = {"role": "user", "content": "Bolts?"}, {"role": "assistant", "content": "Seven."}
SHOP = [("user", "Bolts?", 0.0), ("assistant", "Seven.", 1.0)]
SPOKEN = [{"speaker": "human", "text": "Bolts?"}, {"speaker": "bot", "text": "Seven."}]
OLD = [{"from": "human", "value": "Bolts?"}, {"from": "gpt", "value": "Seven."}]


def items(folder: Path, *values: Any) -> list[Trajectory | Skipped]:
    path = folder / "r.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return list(read_trajectories([path]))


def one(folder: Path, value: Any) -> Trajectory:
    return only(items(folder, value))


def refusal(folder: Path, *values: Any) -> str:
    with pytest.raises(TreepackError) as caught:
        items(folder, *values)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [USER], "response": "Seven."},
        {"prompt": [USER], "response": [ANSWER]},
        {"prompt": [USER], "raw_output": "Seven."},
        {"prompt": json.dumps([USER]), "response": "Seven."},
        {"instruction": "Bolts?", "response": "Seven."},
        {"instruction": "Bolts?", "input": "", "response": "Seven.", "context": None},
        {"question": "Bolts?", "answer": "Seven."},
        {"question": [USER], "answer": [ANSWER]},
        {"query": "Bolts?", "answer": "Seven."},
        {"problem": "Bolts?", "solution": "Seven."},
        {"conversation": OLD},
        {"conversations": SPOKEN},
        {"trajectory": [USER, ANSWER]},
        {"dialog": SPOKEN},
        {"dialogue": SPOKEN},
        {"history": [USER, ANSWER]},
        {"chat": [USER, ANSWER]},
        {"turns": [USER, ANSWER]},
        {"turns": json.dumps([USER, ANSWER])},
        {"messages": json.dumps([USER, ANSWER])},
        {"messages": [json.dumps(USER), json.dumps(ANSWER)]},
        {"conversations": json.dumps(OLD)},
        {"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])},
    ],
)
def test_usual_layouts_are_read_as_a_conversation(tmp_path: Path, value: dict[str, Any]) -> None:
    item = one(tmp_path, value | {"shelf": "A"})
    assert turns(chat_of(item)) == SHOP
    assert item.metadata == {"shelf": "A"}
    assert item.notes == ()


def test_the_text_of_a_system_message_may_be_its_system_prompt(tmp_path: Path) -> None:
    said = [{"role": "system", "text": "", "system_prompt": "Be brief."}, {"role": "user", "text": "Bolts?"}]
    item = one(tmp_path, {"trajectory": [*said, {"role": "ai", "text": "Seven.", "system_prompt": None}]})
    assert turns(chat_of(item)) == [("system", "Be brief.", 0.0), *SHOP]
    assert item.notes == ()


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (
            {"problem": "Bolts?", "solution": "Seven.", "answer": "7"},
            ["question=problem,answer=solution,ignore=answer", "question=problem,answer=answer"],
        ),
        (
            {"question": "Bolts?", "response": "Seven.", "answer": "Eight."},
            ["question=question,answer=answer,ignore=response", "question=question,answer=response,ignore=answer"],
        ),
        (
            {"prompt": "Bolts?", "response": "Seven.", "output": "Eight."},
            ["prompt=prompt,answer=response,ignore=output", "prompt=prompt,answer=output,ignore=response"],
        ),
        (
            {"conversation": [USER, ANSWER, USER], "response": "Eight."},
            ["messages=conversation,ignore=response", "prompt=conversation,answer=response"],
        ),
        (
            {"prompt": "Bolts?", "trajectory": [ANSWER, USER, ANSWER]},
            ["prompt=prompt,answer=trajectory", "messages=trajectory,ignore=prompt"],
        ),
    ],
)
def test_two_possible_answers_are_refused_with_the_lines_that_read_them(
    tmp_path: Path, value: dict[str, Any], lines: list[str]
) -> None:
    said = refusal(tmp_path, value)
    assert said.startswith("r.jsonl:1: can be read in several ways; choose one: ")
    assert re.findall(r"--columns (\S+)", said) == lines
    trained = []
    for line in lines:
        record = Record("r:1", "r", value)
        item = only(formats_by_name()["columns"].trajectories([record], ReadOptions(columns=column_map(line))))
        trained.append(str(item.content))
    assert len(set(trained)) == len(lines)


@pytest.mark.parametrize(
    ("name", "rounds"), [("history", [["Nuts?", "Four."]]), ("rounds", [USER, ANSWER]), ("talk", json.dumps([USER]))]
)
def test_earlier_rounds_beside_a_question_are_never_left_out_in_silence(tmp_path: Path, name: str, rounds: Any) -> None:
    said = refusal(tmp_path, {"query": "Bolts?", "answer": "Seven.", name: rounds})
    assert said == (
        f"r.jsonl:1: has earlier rounds in {name}, which belong to the prompt; write them as messages, or leave them "
        f"out with --columns question=query,answer=answer,ignore={name}"
    )
    assert turns(chat_of(one(tmp_path, {"query": "Bolts?", "answer": "Seven.", "history": []}))) == SHOP


@pytest.mark.parametrize("line", ALIASES)
def test_every_line_of_the_table_is_a_valid_map_and_in_the_documentation(line: str) -> None:
    assert column_map(line).line == line
    assert f"`{line.removesuffix(f',{SYSTEM}')}`" in (ROOT / "docs/inputs.md").read_text()


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_name_of_a_conversation_is_in_the_documentation_and_read(name: str, tmp_path: Path) -> None:
    assert f"`{name}`" in (ROOT / "docs/inputs.md").read_text()
    assert turns(chat_of(one(tmp_path, {name: [USER, ANSWER]}))) == SHOP


# JSON text


def test_calls_and_tools_as_json_texts_are_parsed(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "stock", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "stock", "parameters": {}}}
    value = {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": json.dumps([call])},
            {"role": "tool", "content": "7", "tool_call_ids": ["c"]},
            {"role": "assistant", "content": "", "tool_calls": [json.dumps(call)]},
        ],
        "tools": [json.dumps(tool)],
    }
    item = one(tmp_path, value)
    assert isinstance(item.content, Chat)
    assert item.content.messages[1]["tool_calls"] == item.content.messages[3]["tool_calls"] == [call]
    assert item.content.messages[2]["tool_call_id"] == "c"
    assert item.content.tools == [tool]
    assert item.notes == ()


def test_a_pair_as_json_text_is_a_pair_of_conversations(tmp_path: Path) -> None:
    rejected = [USER, ANSWER | {"content": "Nine."}]
    both = items(tmp_path, {"chosen": json.dumps([USER, ANSWER]), "rejected": json.dumps(rejected)})
    assert [turns(chat_of(each))[1][1] for each in both] == ["Seven.", "Nine."]


# Remedies


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            {"log": {"steps": [{"who": "customer", "said": "Bolts?"}, {"who": "clerk", "said": "Seven."}]}},
            "messages=log.steps,role=who,content=said,user=customer,assistant=clerk",
        ),
        (
            {"ask": "2 + 2?", "tries": [{"text": "4", "score": 1.0}, {"text": "5", "score": 0.0}]},
            "question=ask,answer=tries[].text,reward=tries[].score",
        ),
        ({"user_query": "Bolts?", "final_reply": "Seven."}, "question=user_query,answer=final_reply"),
        ({"q": "Bolts?", "a": "Seven."}, "question=q,answer=a"),
        ({"data": {"messages": [USER, ANSWER]}}, "messages=data.messages"),
        (
            {
                "ask": "Bolts?",
                "completions": [{"model": "small", "said": "Seven."}, {"model": "large", "said": "Six."}],
            },
            "question=ask,answer=completions[].said",
        ),
        ({"prompt": "Sum.", "canonical_solution": "a + b", "solution": "b + a"}, "prompt=prompt,answer=solution"),
        (
            {"messages": [{"speaker": "human", "text": "Bolts?"}, {"speaker": "agent", "text": "Seven."}]},
            "messages=messages,role=speaker,content=text,assistant=agent",
        ),
    ],
)
def test_an_unknown_layout_is_refused_with_the_columns_that_read_it(
    tmp_path: Path, value: dict[str, Any], line: str
) -> None:
    said = refusal(tmp_path, value)
    assert re.findall(r"--columns '?([^\s;']+)", said) == [line]
    made = list(read_columns(Record("r:1", "r", value), ReadOptions(columns=column_map(line))))
    assert all(isinstance(item, Trajectory) for item in made)
    assert len(made) > 0


THREAD = [{"who": "customer", "said": "Bolts?"}, {"who": "clerk", "said": "Seven."}]


@pytest.mark.parametrize(
    "value",
    [
        {"thread": THREAD, "earlier": THREAD[::-1]},
        {"thread": THREAD, "log": {"steps": [{"note": "a"}, {"note": "b"}]}},
        {"ask": "Bolts?", "said": "Seven.", "rounds": [{"note": "a"}, {"note": "b"}]},
        {"thread": THREAD, "earlier": json.dumps(THREAD)},
        {"ask": "Nuts?", "final_reply": "Four.", "rounds": THREAD},
        {"question_text": "How many nuts?", "rounds": THREAD},
        {"meta": {"output_text": "Four."}, "rounds": json.dumps(THREAD)},
    ],
)
def test_no_hint_leaves_out_other_turns(tmp_path: Path, value: dict[str, Any]) -> None:
    assert "--columns m" not in refusal(tmp_path, value)
    assert "--columns question" not in refusal(tmp_path, value)


@pytest.mark.parametrize(
    "value",
    [
        {"id": 3, "trajectory_id": "t", "score": 1},
        {"conversation_hash": "x", "language": "English"},
        {"context": 7, "generation_mask": [1, 0]},
        {"sample_idx": 0, "traj_id": "t"},
        {"source": "web", "generator": "a program", "task_type": "sum"},
        {"prompt": "Name a bolt.", "instruction": "Be brief."},
        {"agents": [{"id": "A", "country": "here"}, {"id": "B", "country": "there"}]},
        {"defaults": {"task_mapping": "rows", "outputDirectory": "out/run", "response_mode": "json"}},
        {"meta_instruction": "Be brief.", "rounds": {"first": {"Tool Responses": "Seven bolts."}}},
    ],
)
def test_no_remedy_names_a_field_whose_new_name_would_not_be_read(tmp_path: Path, value: dict[str, Any]) -> None:
    said = refusal(tmp_path, value)
    assert "rename" not in said
    assert "write each element" not in said
    assert said.endswith("'treepack formats' lists the formats and their fields, and --columns reads other layouts")


def test_a_first_record_of_no_known_format_is_refused_as_any_other(tmp_path: Path) -> None:
    good = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in ({"error": "timeout"}, good, good)))
    with pytest.raises(TreepackError, match=r"r.jsonl:1: has the fields error; expected input_ids"):
        list(read([str(path)], BuildOptions()))
    bad, *others = read([str(path)], BuildOptions(skip_bad=True))
    assert isinstance(bad, Skipped)
    assert len(others) == 2


@pytest.mark.parametrize("name", ["r.jsonl", "r.json", "r.parquet", "r.yaml", "r.pt"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_pointer_of_git_lfs_is_named_as_what_it_is(tmp_path: Path, name: str, workers: int) -> None:
    path = tmp_path / name
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1048576\n")
    with pytest.raises(TreepackError) as caught:
        list(read([str(path)], BuildOptions(workers=workers)))
    assert str(caught.value) == f"{path}: is a pointer of Git LFS; fetch the file with git lfs pull"
