"""Homemade layouts: a map of columns turns any record into one of a known format, and hides no field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.byte_tokenizer import PLAIN, save
from support.command_line import Run
from support.readings import chat_of, only, turns
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.files.manifest import read_manifest
from treepack.ingest.column_map import column_map
from treepack.ingest.options import BuildOptions
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.registry import formats_by_name
from treepack.ingest.readers.turn_flags import TurnWeights
from treepack.ingest.stream import read
from treepack.trajectory import Chat, PromptCompletion, Skipped, Tokens, Trajectory

TURNS = [{"who": "customer", "said": "Bolts?"}, {"who": "clerk", "said": "Seven."}]
NAMED, FLAGS = [("human", "Bolts?"), ("AI", "Seven.")], [(False, "Bolts?"), (True, "Seven.")]
ANSWER = {"role": "assistant", "content": "Seven."}
PARTS = "role=who,content=said,user=customer,assistant=clerk"


def items(line: str | dict[str, Any], value: dict[str, Any]) -> list[Trajectory | Skipped]:
    options = ReadOptions(columns=column_map(line))
    return list(formats_by_name()["columns"].trajectories([Record("r.jsonl:1", "r.jsonl", value)], options))


def one(line: str | dict[str, Any], value: dict[str, Any]) -> Trajectory:
    return only(items(line, value))


def refusal(line: str, value: dict[str, Any]) -> str:
    with pytest.raises(TreepackError) as caught:
        items(line, value)
    return str(caught.value)


SHOP = [("user", "Bolts?", 0.0), ("assistant", "Seven.", 1.0)]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (f"messages=turns,{PARTS}", {"turns": TURNS}),
        (f"messages=log.turns,{PARTS}", {"log": {"turns": TURNS}}),
        (f"messages=log.turns,{PARTS}", {"log": json.dumps({"turns": TURNS})}),
        (f"messages=runs[0].turns,{PARTS}", {"runs": [{"turns": TURNS}]}),
        (f"messages=runs[-1].turns,{PARTS}", {"runs": [{"turns": TURNS}]}),
        (f"messages=turns,{PARTS}", {"turns": [json.dumps(turn) for turn in TURNS]}),
        (f"messages=a.b,{PARTS}", {"a.b": TURNS}),
        ("role=turns[].who,content=turns[].said,user=customer,assistant=clerk", {"turns": TURNS}),
        ("messages=t,content=c.text", {"t": [{"role": role, "c": {"text": text}} for role, text in NAMED]}),
        (
            "messages=t,role=bot,assistant=true,user=false",
            {"t": [{"bot": bot, "content": text} for bot, text in FLAGS]},
        ),
        ("question=ask,answer=said", {"ask": "Bolts?", "said": "Seven."}),
        ("question=ask,answer=said", {"ask": "Bolts?", "said": {"content": "Seven."}}),
        ("prompt=ask,answer=said", {"ask": [{"role": "user", "content": "Bolts?"}], "said": "Seven."}),
        ("prompt=ask,answer=r.choices[0].message", {"ask": "Bolts?", "r": {"choices": [{"message": ANSWER}]}}),
    ],
)
def test_a_conversation_is_read_from_wherever_it_is(line: str, value: dict[str, Any]) -> None:
    assert turns(chat_of(one(line, value))) == SHOP
    assert one(line, value).notes == ()


def test_a_file_or_an_object_gives_the_same_map_as_text(tmp_path: Path) -> None:
    given = {"messages": "turns", "role": "who", "content": "said", "user": ["customer"], "assistant": ["clerk", "bot"]}
    path = tmp_path / "columns.json"
    path.write_text(json.dumps(given))
    text = "messages=turns,role=who,content=said,user=customer,assistant=clerk+bot"
    assert column_map(given) == column_map(str(path)) == column_map(text)
    assert column_map(text).line == text


def test_scalars_are_read_from_their_columns_and_other_fields_are_kept_or_named() -> None:
    value = {
        "turns": TURNS,
        "info": {"score": 0.5, "judge": "strict"},
        "task": "t1",
        "epoch": 4,
        "key": "k",
        "w": 2.0,
        "shelf": "A",
        "grid": [[1]],
        "uid": "other",
    }
    line = f"messages=turns,{PARTS},reward=info.score,group=task,step=epoch,id=key,weight=w"
    item = one(line, value)
    assert (item.reward, item.group_id, item.step, item.trajectory_id, item.weight) == (0.5, "t1", 4, "k", 2.0)
    assert item.metadata == {"info": {"judge": "strict"}, "shelf": "A"}
    assert set(item.notes) == {"field 'grid' not used", "field 'uid' not used"}


def test_the_rest_of_a_mapped_list_of_answers_is_no_other_answer() -> None:
    value = {
        "prompt": "Bolts?",
        "completions": [{"by": "A", "completion": "Seven."}, {"by": "B", "completion": "Six."}],
    }
    both = items("prompt=prompt,answer=completions[].completion", value)
    assert [item.content for item in both if isinstance(item, Trajectory)] == [
        PromptCompletion("Bolts?", "Seven."),
        PromptCompletion("Bolts?", "Six."),
    ]


def test_columns_without_content_are_added_to_a_record_of_a_known_layout() -> None:
    chat = [{"role": "user", "content": "Bolts?"}, {"role": "agent", "content": "Seven."}]
    item = one("reward=info.score,assistant=agent", {"messages": chat, "info": {"score": 1}})
    assert (turns(chat_of(item)), item.reward) == (SHOP, 1.0)
    item = one("reward=info.score", {"prompt": "Bolts?", "response": "Seven.", "info": {"score": 1}})
    assert (item.content, item.reward) == (PromptCompletion("Bolts?", "Seven."), 1.0)
    item = one("group=t", {"input_ids": [1, 2], "loss_mask": [0, 1], "t": 7})
    assert isinstance(item.content, Tokens)
    assert item.group_id == "7"


def test_several_answers_are_one_group_with_a_reward_each() -> None:
    value = {"ask": "2 + 2?", "tries": [{"text": "4", "ok": 1}, {"text": "5", "ok": 0}, {"text": "", "ok": 0}]}
    first, second, third = items("question=ask,answer=tries[].text,reward=tries[].ok", value)
    assert isinstance(first, Trajectory)
    assert isinstance(second, Trajectory)
    assert [turns(chat_of(each))[1] for each in (first, second)] == [("assistant", "4", 1.0), ("assistant", "5", 1.0)]
    assert [each.reward for each in (first, second)] == [1.0, 0.0]
    assert (first.trajectory_id, second.trajectory_id) == ("r.jsonl:1/answer-1", "r.jsonl:1/answer-2")
    assert first.group_id == second.group_id == "r.jsonl:1"
    assert isinstance(third, Skipped)
    assert (third.reason, third.group_id) == ("no answer", "r.jsonl:1")
    assert refusal("question=ask,answer=a,reward=r", {"ask": "2 + 2?", "a": ["4", "5"], "r": [1]}) == (
        "r.jsonl:1: has 2 answers, and 1 values in the column reward; give one each"
    )


def test_several_answers_may_be_messages_or_token_ids() -> None:
    answers = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    both = items("question=ask,answer=a", {"ask": "2 + 2?", "a": answers, "rewards": [1.0, 0.0]})
    assert [turns(chat_of(each))[-1][1] for each in both] == ["4", "5"]
    assert [each.reward for each in both if isinstance(each, Trajectory)] == [1.0, 0.0]
    value = {"p": [1, 2], "a": [[3], [4, 5]], "lp": [[-1.0], [-1.0, -2.0]], "task": "t"}
    ids = items("prompt_ids=p,answer_ids=a,logprobs=lp,group=task", value)
    contents = [each.content for each in ids if isinstance(each, Trajectory)]
    assert all(isinstance(content, Tokens) and content.sampling_logprob is not None for content in contents)
    assert [content.tokens.tolist() for content in contents if isinstance(content, Tokens)] == [[1, 2, 3], [1, 2, 4, 5]]


@pytest.mark.parametrize(
    ("name", "said"), [("responses", ["4", "5"]), ("response", ['["4", "5"]']), ("answers", ["4", "5"])]
)
def test_texts_in_json_under_a_plural_name_are_answers_of_their_own(name: str, said: list[str]) -> None:
    found = items(f"question=ask,answer={name}", {"ask": "2 + 2?", name: '["4", "5"]'})
    assert [turns(chat_of(each))[-1][1] for each in found] == said


def test_answers_in_json_are_texts_and_not_messages() -> None:
    both = items("question=ask,answer=a", {"ask": "Call stock.", "a": ['{"name": "stock"}', '{"name": "box"}']})
    assert [turns(chat_of(each))[-1][1] for each in both] == ['{"name": "stock"}', '{"name": "box"}']


@pytest.mark.parametrize("mask", ["flag", "flags"])
def test_a_mask_of_messages_is_in_each_message_or_beside_them(mask: str) -> None:
    said = ["Bolts?", "Seven.", "Nuts?", "Four."]
    roles = ["user", "assistant"] * 2
    flags = [True, False, True, True]
    talk: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    if mask == "flag":
        talk = [turn | {"flag": flag} for turn, flag in zip(talk, flags, strict=True)]
    value = {"talk": talk} | ({"flags": flags} if mask == "flags" else {})
    assert [weight for _, _, weight in turns(chat_of(one(f"messages=talk,mask={mask}", value)))] == [0.0, 0.0, 0.0, 1.0]


def test_calls_results_and_reasoning_are_read_from_their_columns() -> None:
    talk = [
        {"role": "user", "content": "Bolts?"},
        {"role": "assistant", "content": "", "think": "Look.", "acts": [{"id": "c", "name": "stock", "arguments": {}}]},
        {"role": "tool", "content": "7", "for": "c"},
        {"role": "assistant", "content": "Seven."},
    ]
    item = one("messages=talk,calls=acts,reasoning=think,call_id=for", {"talk": talk})
    assert isinstance(item.content, Chat)
    assert item.content.messages[1]["tool_calls"][0]["function"]["name"] == "stock"
    assert item.content.messages[1]["reasoning_content"] == "Look."
    assert item.content.messages[2]["tool_call_id"] == "c"
    assert one("messages=talk,calls=act,reasoning=think,call_id=for", {"talk": talk}).notes == (
        "column calls=act in no message",
        "message field 'acts' not used",
    )


def test_ignored_fields_are_counted_and_other_content_is_refused() -> None:
    value = {"turns": TURNS, "messages": [{"role": "user", "content": "x"}], "draft": "Six."}
    line = f"messages=turns,{PARTS}"
    assert refusal(line, value) == (
        "r.jsonl:1: has the field messages beside the columns of --columns; add ignore=messages, or map it"
    )
    item = one(f"{line},ignore=messages+draft+absent", value)
    assert item.notes == ("field 'messages' ignored", "field 'draft' ignored")
    assert item.metadata == {}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("messages=turn", "has no turn (column messages); correct the path"),
        (f"messages=turns,{PARTS},reward=info.reward", "(column reward); correct the path, or write"),
        ("messages=shelf", 'the column messages is "A"; expected a list of messages'),
        ("prompt=shelf,answer=number", "the column answer is 7; expected text or messages"),
        ("messages=turns,role=who,content=said", "message 1 has role 'customer'; expected system, user"),
        ("question=shelf,answer=number.x", "has no number.x (column answer)"),
    ],
)
def test_a_path_to_nothing_or_to_another_kind_is_refused_in_one_sentence(line: str, sentence: str) -> None:
    said = refusal(line, {"turns": TURNS, "shelf": "A", "number": 7, "info": {}})
    assert said.startswith("r.jsonl:1: ")
    assert sentence in said


def test_a_path_that_may_be_absent_is_absent_in_silence() -> None:
    item = one("question=q,answer=a,reward=info.r?", {"q": "Bolts?", "a": "Seven.", "info": {}})
    assert (item.reward, turns(chat_of(item))) == (None, SHOP)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("mesages=turns", "unknown key 'mesages', did you mean messages"),
        ("messages=turns,messages=log", "has the key messages twice"),
        ("messages", "'messages' is neither KEY=PATH pairs nor a file that can be read"),
        ("messages=a..b", "messages=a..b is no path"),
        ("messages=a[x]", r"messages=a[x] is no path"),
        ("messages=a+b", "messages has 2 paths"),
        ("prompt=a", "names prompt; the content of a rollout is one of"),
        ("messages=a,answer=b", "names messages and answer; the content"),
        ("user=x,assistant=x", "'x' is user and assistant"),
        ("messages=a,logprobs=b", "logprobs needs token ids"),
        ("ids=a,system_prompt=b", "system_prompt is text"),
        ("=a", "'=a' is not KEY=PATH"),
        (f"messages=a[{'9' * 5000}]", "messages=a[99"),
        (f"messages=a[-{'9' * 5000}]", "is no path; expected names with dots"),
        (f"messages=a{'[]' * 100_000}", "messages has a path of 100001 steps; expected at most 100"),
        (f"messages={'a.' * 100_000}b", "messages has a path of 100001 steps; expected at most 100"),
        (f"{'m' * 5000}=a", "has the unknown key 'mmm"),
        ("m" * 5000, "is neither KEY=PATH pairs nor a file that can be read (File name too long)"),
        ({"messages": ["a"] * 100_000 + [7]}, "messages is ['a', 'a',"),
    ],
)
def test_a_map_that_makes_no_sense_is_refused_before_anything_is_read(line: Any, sentence: str) -> None:
    with pytest.raises(TreepackError) as caught:
        BuildOptions(columns=line)
    assert len(str(caught.value)) < 1000
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"messages": ' + "9" * 5000 + "}"]
)
def test_a_file_of_columns_that_json_cannot_hold_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "columns.json"
    path.write_text(text)
    with pytest.raises(TreepackError) as caught:
        BuildOptions(columns=str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 1000


def test_columns_and_another_format_exclude_each_other() -> None:
    with pytest.raises(TreepackError, match="columns maps records of no known format, and format is chat"):
        BuildOptions(columns="messages=turns", format="chat")


def test_parquet_and_a_document_with_one_list_are_mapped_too(tmp_path: Path) -> None:
    records = [{"p": [1, 2], "a": [3, 4], "m": 0.5}, {"p": [1, 2], "a": [5], "m": 1.0}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "r.parquet")
    (tmp_path / "r.json").write_text(json.dumps({"data": records}))
    options = BuildOptions(columns={"prompt_ids": "p", "answer_ids": "a", "reward": "m"})
    for name in ("r.parquet", "r.json"):
        made = [each for each in read([str(tmp_path / name)], options) if isinstance(each, Trajectory)]
        assert [each.reward for each in made] == [0.5, 1.0]
        assert [each.content.tokens.tolist() for each in made if isinstance(each.content, Tokens)] == [
            [1, 2, 3, 4],
            [1, 2, 5],
        ]


def test_every_command_of_rollouts_takes_columns_and_a_trie_records_them(tmp_path: Path, treepack: Run) -> None:
    path, tokenizer = tmp_path / "r.jsonl", save(tmp_path / "tokenizer", PLAIN)
    path.write_text(json.dumps({"turns": TURNS, "id": "a"}) + "\n")
    given = ("--columns", f"messages=turns,{PARTS}", "--tokenizer", str(tokenizer), "--quiet")
    for number, command in enumerate(
        (
            ("build-trie", path, "--out", tmp_path / "trie"),
            ("stats", path),
            ("show", path),
            ("report", path, "--out", tmp_path / "page.html"),
            ("prepare", path, "--out", tmp_path / "both", "--capacity", "64"),
        )
    ):
        result = treepack(*map(str, command), *given)
        assert result.status == 0, (number, result.err)
    recorded = read_manifest(tmp_path / "trie")["options"]["columns"]
    assert recorded["assistant"] == ["clerk"]
    assert recorded["messages"] == ["turns"]


def test_of_equal_answers_the_one_with_a_weight_keeps_it() -> None:
    weights = TurnWeights()
    for weight in (0.5, 0.0):
        weights.add({"role": "assistant", "content": "A"}, weight, is_marked=True)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    item = weights.applied(Trajectory("t", "r:1", Chat(messages, [0.0, 1.0])))
    assert chat_of(item).message_weights == [0.0, 0.5]
