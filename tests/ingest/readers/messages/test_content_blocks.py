"""Anthropic's content blocks in messages, and the reasons for which a conversation with other parts is skipped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.readings import turns
from treepack.calls.chat_calls import ChatCall, join_chats
from treepack.calls.chat_records import read_chat
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON, skip_reason, split_blocks
from treepack.ingest.readers.messages.normal_form import normalise_messages
from treepack.trajectory import Chat, Skipped, Trajectory

SOURCE = "log.jsonl:3"
SIGNED = {"type": "thinking", "thinking": "", "signature": "c2ln"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{name}", "name": name, "input": arguments}


def result(name: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{name}", "content": content, **more}


def said(*blocks: dict[str, Any], role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def read(**value: Any) -> list[Trajectory | Skipped]:
    return list(read_chat(Record(SOURCE, "log.jsonl", value), ReadOptions()))


def test_a_turn_of_blocks_becomes_reasoning_text_and_calls() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        text("I look."),
        use("ls", path="."),
        use("pwd"),
    ]
    (message,) = normalise_messages(split_blocks([said(*blocks)]), source=SOURCE).messages
    assert message == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "toolu_ls", "type": "function", "function": {"name": "ls", "arguments": {"path": "."}}},
            {"id": "toolu_pwd", "type": "function", "function": {"name": "pwd", "arguments": {}}},
        ],
    }


def test_results_and_texts_of_a_user_message_keep_their_order() -> None:
    blocks = [text("a"), text("b"), result("ls", "c"), result("pwd", [text("d"), text("e")]), text("f")]
    done = normalise_messages(split_blocks([said(*blocks, role="user")]), source=SOURCE)
    assert [(each["role"], each["content"]) for each in done.messages] == [
        ("user", "ab"),
        ("tool", "c"),
        ("tool", "de"),
        ("user", "f"),
    ]
    assert [each.get("tool_call_id") for each in done.messages] == [None, "toolu_ls", "toolu_pwd", None]


def test_encrypted_reasoning_and_the_mark_of_an_error_are_counted() -> None:
    redacted = said({"type": "redacted_thinking", "data": "x"}, text("A"))
    failed = said(result("ls", "no such file", is_error=True), result("pwd", None, is_error=False), role="user")
    done = normalise_messages(split_blocks([redacted, said(SIGNED, text("B")), failed]), source=SOURCE)
    assert done.notes == (
        "message field 'redacted_thinking' not used",
        "message field 'is_error' not used",
        "message of role 'tool' without text",
    )
    assert [each["content"] for each in done.messages] == ["A", "B", "no such file", ""]
    assert not any("reasoning_content" in each for each in done.messages)


MESSAGES = st.lists(
    st.one_of(
        st.builds(lambda role, words: {"role": role, "content": words}, st.sampled_from(["user", "system"]), st.text()),
        st.builds(lambda words: said(text(words), role="user"), st.text()),
        st.builds(lambda words: {"role": "assistant", "content": words, "weight": 0.5}, st.text()),
    )
)


@given(messages=MESSAGES)
def test_messages_without_blocks_stay_as_they_are(messages: list[dict[str, Any]]) -> None:
    assert split_blocks(messages) == messages


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image", "source": {}}, MEDIA_REASON),
        (result("ls", [text("a"), {"type": "image", "source": {}}]), MEDIA_REASON),
        ({"type": "document", "source": {}}, "content parts of type 'document' are not read"),
        (use("ls"), None),
        (result("ls", "a"), None),
        (SIGNED, None),
    ],
)
def test_a_conversation_is_skipped_for_the_part_that_is_not_read(part: dict[str, Any], reason: str | None) -> None:
    role = "assistant" if part["type"] in ("tool_use", "thinking") else "user"
    messages = [said(text("Q"), role="user"), said(part, role=role)]
    assert skip_reason(messages) == reason
    items = read(messages=[*messages, said(text("A"))])
    assert [item.reason for item in items if isinstance(item, Skipped)] == ([reason] if reason else [])


def test_a_request_to_the_api_has_its_system_prompt_beside_the_messages() -> None:
    asked = [{"role": "user", "content": "Q"}, said(use("ls")), said(result("ls", "R"), role="user"), said(text("A"))]
    tools = [{"name": "ls", "input_schema": {"type": "object"}}]
    (item,) = read(system=[text("S")], messages=asked, tools=tools)
    assert isinstance(item, Trajectory)
    assert isinstance(item.content, Chat)
    assert turns(item.content) == [
        ("system", "S", 0.0),
        ("user", "Q", 0.0),
        ("assistant", "", 1.0),
        ("tool", "R", 0.0),
        ("assistant", "A", 1.0),
    ]
    assert item.content.tools == [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
    assert item.notes == ()


def test_only_the_completion_is_trained_if_the_prompt_has_results() -> None:
    prompt = [said(use("ls")), said(result("ls", "R"), text("Q"), role="user")]
    (item,) = read(prompt=prompt, completion=[said(text("A"))])
    assert isinstance(item, Trajectory)
    assert isinstance(item.content, Chat)
    assert item.content.message_weights == [0.0, 0.0, 0.0, 1.0]


def test_calls_with_blocks_that_continue_each_other_are_one_conversation() -> None:
    first = [{"role": "user", "content": "Q"}]
    second = [*first, said(use("ls")), said(result("ls", "R"), text("Go on."), role="user")]
    calls = [ChatCall(first, [said(use("ls"))]), ChatCall(second, [said(text("A"))])]
    (joined,) = join_chats(calls, source=SOURCE)
    assert joined.content.message_weights == [0.0, 1.0, 0.0, 0.0, 1.0]
