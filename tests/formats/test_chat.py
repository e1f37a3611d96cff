"""Conversations: normalised messages, trained messages, and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.read_rollouts import read_trajectories
from support.readings import chat_of, only, read_as, refusal_as
from treepack.calls.chat_records import read_chat
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import detect_format
from treepack.ingest.readers.registry import formats_by_name
from treepack.trajectory import Chat, Skipped, Trajectory

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def read(value: dict[str, Any]) -> Trajectory:
    return only(read_as("chat", value))


def content(value: dict[str, Any]) -> Chat:
    chat_content = read(value).content
    assert isinstance(chat_content, Chat)
    return chat_content


def second(message: dict[str, Any]) -> dict[str, Any]:
    return content({"messages": [USER, message]}).messages[1]


@pytest.mark.parametrize(
    ("marks", "weight"),
    [
        ({"train": False}, 0.0),
        ({"train": "false"}, 0.0),
        ({"train": True, "weight": "0.5"}, 0.5),
        ({"training": 0}, 0.0),
        ({"loss": 0.0}, 0.0),
        ({"trainable": "1", "loss_weight": 2}, 2.0),
        ({"mask": 0}, 0.0),
        ({"mask": 1}, 1.0),
        ({"masked": True}, 0.0),
        ({"masked": False}, 1.0),
        ({"weight": False}, 0.0),
        ({"loss_scale": 0.25, "loss_weight": 2}, 0.5),
        ({"train_detail": []}, 1.0),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 4, "train": True}]}, 1.0),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 4, "train": False}]}, 0.0),
    ],
)
def test_marks_of_all_dialects_decide_the_weight_of_a_turn(marks: dict[str, Any], weight: float) -> None:
    item = read({"messages": [USER, ASSISTANT | marks, ASSISTANT]})
    assert (chat_of(item).message_weights, item.notes) == ([0.0, weight, 1.0], ())


def test_a_turn_whose_last_character_is_not_trained_is_left_out_and_counted() -> None:
    detail = [{"begin_offset": 0, "end_offset": 3, "train": True}]
    item = read({"messages": [USER, ASSISTANT | {"train_detail": detail}, ASSISTANT]})
    assert chat_of(item).message_weights == [0.0, 0.0, 1.0]
    assert item.notes == ("turn with a train_detail that trains a part of it, not trained",)


@pytest.mark.parametrize("nothing", [None, "", " \n", "null", "{}", '""', [], "[]"])
def test_a_call_without_arguments_has_an_empty_object(nothing: Any) -> None:
    for call in ({"name": "f", "arguments": nothing}, {"function": {"name": "f", "arguments": nothing}}):
        assert _arguments(call) == "{}"


def _arguments(call: dict[str, Any]) -> Any:
    messages = content({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}).messages
    return messages[1]["tool_calls"][0]["function"]["arguments"]


def test_a_record_with_images_is_skipped() -> None:
    value = {"messages": [USER, ASSISTANT], "images": ["1.jpg"]}
    items = list(read_chat(Record("r.jsonl:1", "r.jsonl", value), ReadOptions()))
    assert items == [Skipped("r.jsonl:1", "images, audio and video are not read")]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": {"type": "text", "text": "a"}}, {"content": "a"}),
        ({"content": "a", "thinking": "r"}, {"content": "a", "reasoning_content": "r"}),
        (
            {"content": "a", "reasoning_details": [{"type": "reasoning.text", "text": "r"}]},
            {"content": "a", "reasoning_content": "r"},
        ),
        ({"tool_calls": CALL}, {"content": "", "tool_calls": [CALL]}),
        (
            {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f"}, "arguments": '{"x": 1}'}]},
            {"content": "", "tool_calls": [CALL]},
        ),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": "ab"}),
        ({"content": "a", "thought": "a\n"}, {"content": "a"}),
        ({"tool_call": CALL}, {"content": "", "tool_calls": [CALL]}),
        ({"tool_calls": [], "toolCalls": [CALL]}, {"content": "", "tool_calls": [CALL]}),
        ({"content": [], "reasoning": "r"}, {"content": "", "reasoning_content": "r"}),
        ({"content": "a", "reasoning_content": "r", "reasoning": "q"}, {"content": "a", "reasoning_content": "r"}),
        ({"content": "a", "tool_calls": None, "name": None}, {"content": "a"}),
        ({"tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}),
        (
            {"tool_calls": [{"id": "c1", "name": "f", "arguments": '{"x": 1}'}]},
            {"content": "", "tool_calls": [CALL]},
        ),
        (
            {"function_call": {"name": "f", "arguments": {"x": 1}}},
            {
                "content": "",
                "tool_calls": [
                    {"id": "call00100", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
                ],
            },
        ),
    ],
)
def test_an_assistant_message_is_brought_to_one_form(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert second({"role": "assistant"} | message) == {"role": "assistant"} | expected


def test_other_roles_are_brought_to_one_form() -> None:
    messages = [
        {"role": "developer", "content": "D"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "R", "timestamp": 3},
    ]
    trajectory = read({"messages": messages})
    assert chat_of(trajectory).messages[0] == {"role": "system", "content": "D"}
    result = {"role": "tool", "content": "R", "name": "f", "tool_call_id": "call00100"}
    assert chat_of(trajectory).messages[2] == result
    assert trajectory.notes == ("role 'developer' read as 'system'", "message field 'timestamp' not used")


def test_the_fields_of_every_format_are_read() -> None:
    value = {"messages": [USER, ASSISTANT], "id": "a", "uid": "g", "step": 2, "weight": 3, "score": 0.5, "env": "e"}
    item = read(value)
    assert (item.trajectory_id, item.group_id, item.step, item.weight, item.reward) == ("a", "g", 2, 3.0, 0.5)
    assert item.metadata == {"env": "e"}


EXPECTED = "expected system, user, assistant or tool"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistent", "content": ""}, f"message 3 has role 'assistent'; {EXPECTED}"),
        ({"content": ""}, f"message 3 has no role; {EXPECTED}"),
        ({"role": 3}, f"message 3 has role 3; {EXPECTED}"),
        ({"role": "x" * 99}, f"message 3 has role '{'x' * 37}...'; {EXPECTED}"),
        ({"role": nested(20_000)}, f"message 3 has role nested too deeply to be shown; {EXPECTED}"),
        ("text", 'message 3 is "text"; expected an object with role and content'),
        (USER | {"content": 3}, "message 3 has the content 3; expected text or a list of text parts"),
        (USER | {"tool_calls": [CALL]}, "message 3 has role 'user' and tool calls; only the assistant can call a tool"),
        (
            ASSISTANT | {"tool_calls": [{"id": "c"}]},
            'message 3 has the tool call {"id": "c"}; expected a name and arguments',
        ),
        (ASSISTANT | {"tool_calls": ["f"]}, 'message 3: tool_calls is ["f"]; expected a list of objects'),
        (
            ASSISTANT | {"tool_calls": [{"name": "f", "arguments": 3}]},
            "message 3 calls f with 3; expected an object or JSON text",
        ),
        (ASSISTANT | {"reasoning": [1]}, "message 3 has the reasoning [1]; expected text"),
        ({"role": "assistant"}, "message 3 has no content; expected text, or the calls of a turn"),
        ({"role": "assistant", "content": None}, "message 3 has no content; expected text, or the calls of a turn"),
        (
            {"role": "user", "text": "Hi", "parts": ["x"]},
            "message 3 has no content, but text, parts; name the field of the text with --columns content=text",
        ),
        (
            ASSISTANT | {"loss_mask": [1]},
            "message 3 has the field 'loss_mask', which can be a mask and is not read; leave it out with --columns "
            "ignore=loss_mask",
        ),
        (ASSISTANT | {"loss": 2}, "message 3 has loss 2; expected true or false"),
        (ASSISTANT | {"trainable": "half"}, 'message 3 has trainable "half"; expected true or false'),
        (ASSISTANT | {"weight": -1}, "message 3 has weight -1; expected 0 or a number in [1e-12, 1e+12]"),
        (ASSISTANT | {"weight": 1e-320}, "message 3 has weight 1e-320; expected 0 or a number in [1e-12, 1e+12]"),
        (
            ASSISTANT | {"tool_calls": 1, "function_call": {"name": "f", "arguments": "{}"}},
            "message 3: tool_calls is 1; expected a list of objects",
        ),
        (
            ASSISTANT | {"tool_calls": [{"name": "f", "arguments": nested(1000)}]},
            "message 3 calls f with arguments nested more than 100 deep; expected an object in JSON",
        ),
        (
            ASSISTANT | {"tool_calls": [CALL | {"id": [1]}]},
            "message 3 has the id [1]; expected text or an integer",
        ),
        (
            ASSISTANT | {"content": ["Well", '{"type": "text"}']},
            'message 3 has the content part "{\\"type\\": \\"text\\"}"; expected text, or an object in place of JSON',
        ),
        (
            {"role": "tool", "content": "", "tool_call_id": {}},
            "message 3 has the tool_call_id {}; expected text or an integer",
        ),
    ],
)
def test_a_bad_message_is_refused_in_one_sentence(message: Any, expected: str) -> None:
    assert refusal_as("chat", {"messages": [USER, ASSISTANT, message]}) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"x": 1}, "has no messages; expected messages, or prompt and completion"),
        ({"prompt": "a"}, "has no messages; expected messages, or prompt and completion"),
        ({"messages": "a"}, 'messages is "a"; expected a list of messages'),
        (
            {"prompt": "a", "completion": [ASSISTANT]},
            "prompt is text and completion is messages; expected both as text or both as messages",
        ),
        (
            {"messages": [USER, ASSISTANT], "tools": "[1"},
            "tools is not JSON (Expecting ',' delimiter: line 1 column 3 (char 2)); expected a list of schemas",
        ),
        (
            {"messages": [USER, ASSISTANT], "tools": [1]},
            "tools is [1]; expected a list of schemas or one as JSON text",
        ),
        (
            {"messages": [USER, ASSISTANT], "tools": [nested(1000)]},
            "tools is nested more than 100 deep; expected schemas in JSON",
        ),
        (
            {"messages": [USER, ASSISTANT], "chat_template_kwargs": ["enable_thinking"]},
            'chat_template_kwargs is ["enable_thinking"]; expected an object of the template\'s variables',
        ),
        (
            {"messages": [USER, ASSISTANT], "chat_template_kwargs": {"a": 1, "tools": []}},
            "chat_template_kwargs sets tools, which treepack sets; remove it there",
        ),
        (
            {"messages": [USER, ASSISTANT], "chat_template_kwargs": nested(1000)},
            "chat_template_kwargs is nested more than 100 deep; expected an object in JSON",
        ),
    ],
)
def test_a_bad_record_is_refused_in_one_sentence(value: dict[str, Any], expected: str) -> None:
    assert refusal_as("chat", value) == expected


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"messages": [USER]}, "chat"),
        ({"prompt": "a", "completion": "b"}, "chat"),
        ({"messages": [USER], "input_ids": [1]}, "tokens"),
        ({"tokens": ["a"], "messages": [USER]}, "chat"),
        ({"prompt_ids": [1], "response_ids": []}, "tokens"),
        ({"task_id": 1, "traj": [USER]}, "tau-bench"),
        ({"history": [USER], "trajectory": [], "info": {}}, "swe-agent"),
        ({"tree": {"tree": {}}, "answer_generation": {}}, "toolbench"),
    ],
)
def test_the_format_is_told_from_the_fields(value: dict[str, Any], name: str) -> None:
    assert detect_format(Record("r:1", "r", value)) == name


def test_an_unknown_record_or_format_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"x": 1, "y": 2}')
    with pytest.raises(TreepackError) as caught:
        list(read_trajectories([path]))
    expected = f"{path}:1: has no known format, but the fields x, y; "
    expected += "'treepack formats' lists the formats and their fields, and --columns reads other layouts"
    assert str(caught.value) == expected
    with pytest.raises(TreepackError) as caught:
        list(read_trajectories([path], format="yaml"))
    assert str(caught.value) == "format 'yaml' is not known; expected auto or a name that 'treepack formats' lists"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokens", "has the fields x; expected input_ids, or prompt_ids and response_ids"),
        ("chat", "has no messages; expected messages, or prompt and completion"),
        ("tau-bench", "has no task_id; expected task_id and traj, a list of messages (format tau-bench)"),
        ("toolbench", "has no tree.tree; expected tree.tree and answer_generation (format toolbench)"),
    ],
)
def test_a_record_without_the_fields_of_its_format_is_refused(name: str, expected: str) -> None:
    with pytest.raises(TreepackError) as caught:
        list(formats_by_name()[name].trajectories([Record("r:2", "r", {"x": 1})], ReadOptions()))
    assert str(caught.value) == f"r:2: {expected}"


def test_a_record_of_many_or_long_fields_is_refused_in_one_short_sentence(tmp_path: Any) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({f"board\n{number} {'_' * 99}": 1 for number in range(1020)}))
    with pytest.raises(TreepackError) as refused:
        list(read_trajectories([path]))
    said = str(refused.value)
    assert ("board 19 ___" in said, "and 1,000 more;" in said, "\n" in said) == (True, True, False)
    assert len(said) < 1500
