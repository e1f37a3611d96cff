"""Anthropic's content blocks in messages, and the reasons for which a conversation with other parts is skipped."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from treepack.ingest.readers.messages.content_blocks import split_blocks
from treepack.ingest.readers.messages.normal_form import normalise_messages

SOURCE = "log.jsonl:3"
SIGNED = {"type": "thinking", "thinking": "", "signature": "c2ln"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(name: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{name}", "content": content, **more}


def said(*blocks: dict[str, Any], role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


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
