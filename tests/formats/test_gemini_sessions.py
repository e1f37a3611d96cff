"""Sessions in the form of Gemini's API: Qwen Code, Gemini CLI."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.readings import Items, chats, notes_of, read_whole, reasons, said_in, turns
from treepack.calls.call_logs import ORDER_NOTE
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.formats.agents import gemini_cli, qwen_code
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON
from treepack.ingest.readers.messages.gemini_parts import (
    gemini_messages,
    messages_of_content,
    response_text,
)
from treepack.ingest.readers.messages.normal_form import normalise_messages
from treepack.ingest.readers.reading import detect_format

Line = dict[str, Any]


def read_qwen(*lines: Line) -> Items:
    return read_whole("qwen-code", *lines)


def read_gemini(*lines: Line) -> Items:
    return read_whole("gemini-cli", *lines)


def entry(uuid: str, parent: str | None, text: str | None = None, **more: Any) -> Line:
    """An answer if the uuid is a capital letter, else a message of the user."""
    kind, role = ("assistant", "model") if uuid.isupper() else ("user", "user")
    line = {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "S", "cwd": "/w"}
    return line | {"message": {"role": role, "parts": [{"text": uuid if text is None else text}]}} | more


def payload(uuid: str, parent: str | None, subtype: str, **fields: Any) -> Line:
    line = {"type": "system", "uuid": uuid, "parentUuid": parent, "sessionId": "S", "subtype": subtype}
    return line | {"systemPayload": fields}


def content(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"text": text}]}


@st.composite
def sessions(draw: st.DrawFn) -> tuple[list[Line], dict[str, list[str]]]:
    """Entries with any earlier parent, and for each answer the texts of its prompt."""
    lines: list[Line] = []
    paths: dict[str | None, list[str]] = {None: []}
    prompts: dict[str, list[str]] = {}
    for number in range(draw(st.integers(1, 12))):
        is_answer = draw(st.booleans())
        name = f"{'A' if is_answer else 'q'}{number}"
        parent = draw(st.sampled_from(list(paths)))
        role = "model" if is_answer else "user"
        line = {"type": "assistant" if is_answer else "user", "uuid": name, "parentUuid": parent, "sessionId": "S"}
        lines.append(line | {"message": content(role, name)})
        if is_answer:
            prompts[name] = paths[parent]
        paths[name] = [*paths[parent], name]
    return lines, prompts


@given(session=sessions())
def test_every_answer_of_qwen_code_is_trained_once_after_its_own_path(
    session: tuple[list[Line], dict[str, list[str]]],
) -> None:
    lines, prompts = session
    trained = []
    for _, chat in chats(read_qwen(*lines)):
        names = [words for _, words, _ in turns(chat)]
        for place, (name, weight) in enumerate(zip(names, chat.message_weights, strict=True)):
            if weight:
                trained.append(name)
                assert names[:place] == prompts[name]
    assert sorted(trained) == sorted(prompts)


@pytest.mark.parametrize("parent", ["q", "A"])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_session_of_qwen_code_whose_answer_passes_over_a_result_is_skipped(parent: str, is_before: bool) -> None:
    call = {"role": "model", "parts": [{"functionCall": {"id": "c", "name": "f", "args": {}}}]}
    result = {"role": "user", "parts": [{"functionResponse": {"id": "c", "name": "f", "response": {"output": "7"}}}]}
    after = [entry("r", "A", type="tool_result", message=result), entry("B", parent)]
    items = read_qwen(entry("q", None), entry("A", "q", message=call), *(after if is_before else after[::-1]))
    is_branch = parent == "q" and not is_before  # of an answer that the result could not reach
    assert reasons(items) == ([] if is_branch else [ORDER_NOTE])
    assert len(chats(read_qwen(entry("q", None), entry("A", "q", message=call), after[0], entry("B", "r")))) == 1


def test_lines_of_one_uuid_are_one_message_and_repeated_lines_add_nothing() -> None:
    thought = {"role": "model", "parts": [{"text": "Hm.", "thought": True}]}
    items = read_qwen(entry("q", None), entry("A", "q", message=thought), entry("A", "q"), entry("A", "q"))
    ((_, chat),) = chats(items)
    assert (chat.messages[1]["content"], chat.messages[1]["reasoning_content"]) == ("A", "Hm.")


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"inlineData": {"mimeType": "image/png", "data": ""}}, MEDIA_REASON),
        ({"codeExecutionResult": {"output": "1"}}, "content parts of type 'codeExecutionResult' are not read"),
    ],
)
def test_calls_after_a_part_that_is_not_text_are_left_out(part: Line, reason: str) -> None:
    other = {"role": "user", "parts": [part]}
    items = read_qwen(entry("q", None), entry("A", "q"), entry("i", "A", message=other), entry("B", "i"))
    assert said_in(items) == {"S": "q A"}
    assert f"call not used: {reason}" in notes_of(items)


def test_sessions_of_qwen_code_and_claude_code_are_told_by_their_messages() -> None:
    assert detect_format(Record("s:1", "s", entry("q", None))) == "qwen-code"
    assert detect_format(Record("s:1", "s", payload("q", None, "ui_telemetry", uiEvent={}))) == "qwen-code"
    block = {"role": "user", "content": "q"}
    assert detect_format(Record("s:1", "s", entry("q", None, message=block))) == "claude-code"


HEADER = {"sessionId": "G", "projectHash": "h"}


def message(name: str, **more: Any) -> Line:
    """A message of the model if the name is a capital letter, else of the user."""
    return {"id": name, "type": "gemini" if name.isupper() else "user", "content": name} | more


def test_a_rewind_and_a_new_history_begin_trajectories() -> None:
    lines = [message("q"), message("A"), message("r"), message("B")]
    items = read_gemini(HEADER, *lines, {"$rewindTo": "r"}, message("s"), message("C"))
    assert said_in(items) == {"G/turn-1": "q A r B", "G/turn-3": "q a s C"}
    items = read_gemini(HEADER, *lines, {"$set": {"messages": [message("z")]}}, message("C"))
    assert said_in(items) == {"G/turn-1": "q A r B", "G/turn-3": "z C"}


def test_calls_of_gemini_cli_have_their_results_and_missing_ones_are_noted() -> None:
    answered = {
        "id": "c",
        "name": "f",
        "args": {"x": 1},
        "result": [{"functionResponse": {"response": {"error": "e"}}}],
    }
    calls = [answered, {"id": "d", "name": "g", "args": {}, "result": None}]
    items = read_gemini(HEADER, message("q"), message("A", content="", toolCalls=calls), message("B"))
    ((_, chat),) = chats(items)
    assert [call["id"] for call in chat.messages[1]["tool_calls"]] == ["c", "d"]
    assert chat.messages[2] == {"role": "tool", "content": "e", "name": "f", "tool_call_id": "c"}
    assert gemini_cli.RESULT_NOTE in notes_of(items)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "7"}, "7"),
        ({"error": "e"}, "e"),
        ({"a": 1}, '{"a": 1}'),
        ({"a": "x", "b": "y"}, '{"a": "x", "b": "y"}'),
        (None, ""),
        ("7", "7"),
    ],
)
def test_the_response_of_a_function_is_its_only_text_or_json(response: Any, text: str) -> None:
    assert response_text(response) == text


@pytest.mark.parametrize(
    ("call", "result"), [("functionCall", "functionResponse"), ("function_call", "function_response")]
)
def test_both_names_of_calls_and_results_are_read_and_other_fields_are_noted(call: str, result: str) -> None:
    said = [{"text": "I look.", "mood": "x"}, {call: {"name": "f", "args": {"a": 1}, "cost": 2}}]
    answered = [{result: {"name": "f", "response": {"output": "7"}, "speed": 3}}, {"text": "Go on."}]
    contents = [{"role": "model", "parts": said, "grade": 4}, {"role": "user", "parts": answered}]
    messages = gemini_messages(contents, "Be brief.", "r:1")
    assert [each["role"] for each in messages] == ["system", "assistant", "tool", "user"]
    assert messages[1]["tool_calls"] == [{"id": None, "name": "f", "arguments": {"a": 1}}]
    assert messages[2]["content"] == "7"
    assert normalise_messages(messages, source="r:1").notes == tuple(
        f"message field '{name}' not used"
        for name in ("content.mood", "tool_calls.cost", "contents.grade", "results.speed")
    )


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ('{"text": "x"}', "has the content part"),
        ({"text": ["x"]}, 'text is ["x"]; expected text'),
        ({"text": "x", "thought": "yes"}, 'has the thought "yes"; expected true or false'),
    ],
)
def test_a_part_text_or_mark_of_another_type_is_refused(part: Any, fault: str) -> None:
    with pytest.raises(TreepackError, match=re.escape(fault)):
        messages_of_content({"role": "model", "parts": [part]}, where="r.jsonl:1")


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"thoughts": [{"subject": ["s"]}]}, "subject of a thought is"),
        ({"type": ["gemini"]}, "has the type"),
        ({"parts": [{"text": "other"}]}, "has content and parts, which differ"),
    ],
)
def test_a_message_of_gemini_cli_of_another_form_is_refused(more: Line, fault: str) -> None:
    with pytest.raises(TreepackError, match=fault):
        read_gemini(HEADER, message("q"), message("A", **more))


def test_a_history_of_qwen_code_without_its_beginning_is_noted() -> None:
    assert qwen_code.PARENT_NOTE in notes_of(read_qwen(entry("q", "lost"), entry("A", "q")))
    assert qwen_code.ROOT_NOTE in notes_of(
        read_qwen(entry("q", None), entry("A", "q"), entry("r", None), entry("B", "r"))
    )


@pytest.mark.parametrize("field", ["uuid", "parentUuid", "type", "subtype"])
def test_a_line_of_qwen_code_with_a_field_of_another_type_is_refused(field: str) -> None:
    with pytest.raises(TreepackError, match=rf"r.jsonl:2: {field} is \[\]; expected text"):
        read_qwen(entry("q", None), entry("A", "q") | {field: []})


def test_a_result_that_is_parts_as_json_text_is_read_as_parts() -> None:
    def session(result: Any) -> Items:
        call = {"id": "c", "name": "f", "args": {}, "result": result}
        asked, said = {"id": "1", "type": "user", "content": "q"}, {"id": "2", "type": "gemini", "content": "A"}
        end = {"id": "3", "type": "gemini", "content": "B"}
        messages = [asked, said | {"toolCalls": [call]}, end]
        return read_gemini({"sessionId": "S", "projectHash": "h", "messages": messages})

    parts = [{"functionResponse": {"id": "c", "name": "f", "response": {"output": "5"}}}]
    assert session(json.dumps(parts)) == session(parts)
    ((_, said),) = chats(session('[{"path": "a"}]'))  # output of the tool that is JSON stays text
    assert [message["content"] for message in said.messages if message["role"] == "tool"] == ['[{"path": "a"}]']
