"""Sessions of opencode: every step of an answer is a call of the model, after the history that opencode sent."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.readings import Items, chats, notes_of, read_whole, said_in
from treepack.errors import TreepackError
from treepack.formats.agents import opencode
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON

Part = dict[str, Any]
START: Part = {"type": "step-start"}


def text(words: str, **more: Any) -> Part:
    return {"type": "text", "text": words} | more


def tool(name: str, **state: Any) -> Part:
    return {"type": "tool", "tool": "f", "callID": name, "state": {"input": {"x": 1}} | state}


def finish(reason: str) -> Part:
    return {"type": "step-finish", "reason": reason}


def message(name: str, *parts: Part, **info: Any) -> dict[str, Any]:
    """An answer if the name is a capital letter, else a message of the user; without parts, its text is its name."""
    role = "assistant" if name.isupper() else "user"
    return {"info": {"id": name, "role": role} | info, "parts": list(parts) or [text(name)]}


def read(*messages: dict[str, Any], **info: Any) -> Items:
    value = {"info": {"id": "S", "directory": "/w"} | info, "messages": list(messages)}
    return read_whole("opencode", value, path="s.json")


def test_each_step_is_a_message_with_its_calls_and_their_results_follow() -> None:
    steps = [START, {"type": "reasoning", "text": "Hm."}, text("A"), tool("c", output="1"), tool("d", error="2")]
    items = read(message("q"), message("A", *steps, finish("tool-calls"), START, text("B"), finish("stop")))
    ((_, content),) = chats(items)
    assert [(each["role"], each["content"]) for each in content.messages] == [
        ("user", "q"),
        ("assistant", "A"),
        ("tool", "1"),
        ("tool", "2"),
        ("assistant", "B"),
    ]
    answer = content.messages[1]
    assert answer["reasoning_content"] == "Hm."
    assert [call["id"] for call in answer["tool_calls"]] == ["c", "d"]
    assert [each.get("tool_call_id") for each in content.messages[2:4]] == ["c", "d"]


def test_a_compaction_replaces_the_history_and_keeps_its_tail() -> None:
    summary = message("Z", summary=True)
    ask = message("c", {"type": "compaction", "auto": True})
    asked = opencode.COMPACTION.lower()
    items = read(message("q"), message("A"), ask, summary, message("r"), message("B"))
    assert said_in(items) == {"S/turn-1": "q A", "S/turn-2": f"{asked} z r B"}
    ask = message("c", {"type": "compaction", "tail_start_id": "A"})
    items = read(message("q"), message("A"), ask, summary, message("r"), message("B"))
    assert said_in(items) == {"S/turn-1": "q A", "S/turn-2": f"a {asked} z r B"}
    assert opencode.SUMMARY_NOTE in notes_of(items)


@pytest.mark.parametrize(
    ("turn", "said", "note"),
    [
        (message("X", error={"name": opencode.ABORTED}), "q x r B", opencode.INTERRUPTED_NOTE),
        (message("X", error={"name": "APIError"}), "q r B", opencode.FAILED_NOTE),
        (message("X", text("X", synthetic=True)), "q x r B", opencode.SYNTHETIC_NOTE),
        (message("X", error={"name": opencode.TOO_LONG}), "q X r B", opencode.CONTEXT_NOTE),
    ],
)
def test_what_was_not_sampled_to_its_end_is_not_trained(turn: dict[str, Any], said: str, note: str) -> None:
    items = read(message("q"), turn, message("r"), message("B"))
    assert said_in(items) == {"S": said}
    assert note in notes_of(items)


def test_the_finish_reason_of_a_step_is_passed_on() -> None:
    session = opencode._SessionState()
    parts = [START, text("A"), finish("tool-calls"), START, text("B")]
    opencode._add_answer(session, {"finish": "length"}, parts, "s.json")
    assert [call.response[0]["finish_reason"] for call in session.log.calls] == ["tool-calls", "length"]


def test_the_system_prompt_of_the_user_is_read_and_hidden_parts_are_not() -> None:
    parts = [text("q"), text("x", ignored=True), {"type": "file", "mime": "text/plain"}, {"type": "subtask"}]
    items = read(message("q", *parts, system="s"), message("A"))
    assert said_in(items) == {"S": f"s q{opencode.SUBTASK.lower()} A"}


def test_calls_after_an_image_are_left_out_and_calls_without_a_result_noted() -> None:
    image = message("i", {"type": "file", "mime": "image/png"})
    items = read(message("q"), message("A", text("A"), tool("c", status="running")), image, message("B"))
    assert said_in(items) == {"S": "q A"}
    assert {opencode.RESULT_NOTE, f"call not used: {MEDIA_REASON}"} <= set(notes_of(items))


def test_a_call_after_a_result_with_an_image_is_left_out() -> None:
    shown = tool("c", output="1", attachments=[{"type": "file", "mime": "image/png", "url": "data:"}])
    items = read(message("q"), message("A", text("A"), shown, START, text("B")))
    assert said_in(items) == {"S": "q A"}
    assert f"call not used: {MEDIA_REASON}" in notes_of(items)


def test_a_session_of_a_sub_agent_belongs_to_its_parent() -> None:
    ((item, _),) = chats(read(message("q"), message("A"), parentID="P"))
    assert (item.trajectory_id, item.rollout_id) == ("S", "P")


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"info": {"role": "critic"}}, "expected an object with role, user or assistant"),
        ({"info": {"role": "assistant", "error": "MessageAbortedError"}}, 'has the error "MessageAbortedError"'),
        ({"info": {"role": "assistant", "summary": "true"}}, 'has the summary "true"'),
        ({"parts": [{"type": ["text"], "text": "A"}]}, 'a part with the type ["text"]; expected text'),
        ({"parts": [{"type": "text", "text": "A", "synthetic": "yes"}]}, "expected true or false"),
        ({"parts": [{"type": "tool", "tool": "f", "state": "{}"}]}, "expected an object"),
    ],
)
def test_a_field_of_another_kind_is_refused(changed: dict[str, Any], fault: str) -> None:
    with pytest.raises(TreepackError, match=re.escape(fault)):
        read(message("q"), message("A") | changed)


def test_parts_and_answers_that_are_not_read_are_noted() -> None:
    found = notes_of(
        read(message("q"), message("A", text("")), message("B", text("B"), {"type": "patch", "hash": "h"}))
    )
    assert {opencode.NO_TEXT_NOTE, "part of type 'patch' not used", "field 'parts.hash' not used"} <= set(found)
