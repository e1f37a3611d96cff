"""Tasks of Cline and Roo Code: messages of Anthropic's API with marks of the program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories
from support.readings import Items, chats, notes_of, read_whole, reasons, said_in
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.formats.agents import cline
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON
from treepack.ingest.readers.reading import detect_format
from treepack.trajectory import Trajectory

Message = dict[str, Any]
PATH = "tasks/17/api_conversation_history.json"


def read(*messages: Message) -> Items:
    return read_whole("cline", *messages, path=PATH)


def say(text: str, **more: Any) -> Message:
    """A message of the model if the text is a capital letter, else of the user."""
    role = "assistant" if text[0].isupper() else "user"
    return {"role": role, "content": [{"type": "text", "text": text}], "ts": 1} | more


def test_a_summary_of_the_model_is_context_and_messages_without_the_mark_stay() -> None:
    summary = say("Z", isSummary=True, condenseId="k")
    items = read(say("q"), say("A", condenseParent="k"), summary, say("r"), say("B"))
    assert said_in(items) == {"17/turn-1": "q A", "17/turn-2": "q z r B"}
    assert cline.SUMMARY_NOTE in notes_of(items)


def test_a_truncation_hides_messages_and_the_results_of_hidden_calls() -> None:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    call = say("A", content=[use], truncationParent="x")
    result = say("r", content=[{"type": "tool_result", "tool_use_id": "c", "content": "r"}])
    marker = say("m", isTruncationMarker=True, truncationId="x")
    items = read(say("q"), call, result, marker, say("B"))
    assert said_in(items) == {"17/turn-1": "q ", "17/turn-2": "q m B"}


@pytest.mark.parametrize(
    ("turn", "note"),
    [
        (say("X\n\n[Response interrupted by user]"), cline.INTERRUPTED_NOTE),
        (say("X\n\n[Response interrupted by API Error]"), cline.INTERRUPTED_NOTE),
        (say(cline.BY_PROGRAM), cline.PROGRAM_NOTE),
    ],
)
def test_what_the_program_broke_off_or_wrote_is_context(turn: Message, note: str) -> None:
    items = read(say("q"), turn, say("r"), say("B"))
    assert said_in(items)["17"] == f"q {turn['content'][0]['text'].lower()} r B"
    assert note in notes_of(items)


def test_encrypted_reasoning_is_noted_and_calls_after_an_image_are_left_out() -> None:
    hidden = {"type": "reasoning", "role": "assistant", "encrypted_content": "x"}
    image = say("i", content=[{"type": "image", "source": {}}])
    items = read(say("q"), hidden, say("A"), image, say("B"))
    assert said_in(items) == {"17": "q A"}
    assert {cline.REASONING_NOTE, f"call not used: {MEDIA_REASON}"} <= set(notes_of(items))


def test_a_session_has_its_system_prompt_files_and_results_that_are_objects() -> None:
    items = list(read_trajectories([ROLLOUTS / "cline" / "s-peas.messages.json"]))
    ((item, content),) = chats(items)
    texts = [(message["role"], message["content"]) for message in content.messages]
    assert texts == [
        ("system", "You keep a garden."),
        ("user", 'How many peas?<file_content path="peas.txt">\n30\n</file_content>'),
        ("assistant", ""),
        ("tool", json.dumps([{"query": "peas", "result": "30"}])),
        ("assistant", "Thirty."),
    ]
    assert (item.trajectory_id, item.metadata) == ("s-peas", {"agent": "lead", "model": "m-2"})


def test_files_of_the_interface_beside_a_task_are_skipped_as_such(tmp_path: Path) -> None:
    task = tmp_path / "17"
    shutil.copytree(ROLLOUTS / "cline" / "1700000000001", task)
    (task / "ui_messages.json").write_text(json.dumps([{"ts": 1, "type": "say", "say": "text", "text": "Seeds"}]))
    (task / "task_metadata.json").write_text(json.dumps({"files_in_context": [], "model_usage": []}))
    items = list(read_trajectories([task]))
    assert reasons(items) == [cline.SHOWN, cline.SHOWN]
    names = [item.trajectory_id for item in items if isinstance(item, Trajectory)]
    assert names == ["17/turn-1", "17/turn-4", "17/turn-5"]


def test_a_message_with_a_field_of_another_program_is_no_task() -> None:
    assert detect_format(Record("r", "r", say("q"))) == "cline"
    with pytest.raises(TreepackError, match="no known format"):
        detect_format(Record("r", "r", say("q", conversation_id=7)))


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"condenseId": ["k"], "isSummary": True}, "condenseId of a message is"),
        ({"truncationParent": True}, "truncationParent of a message is true; expected text"),
        ({"reasoning_details": "hm"}, "reasoning_details is"),
        ({"reasoning_details": [{"text": ["hm"]}]}, "expected objects with text"),
        (
            {"content": [{"type": "thinking", "thinking": True}, {"type": "text", "text": "A"}]},
            "has the reasoning_content",
        ),
    ],
)
def test_a_field_of_another_type_is_refused(more: Message, fault: str) -> None:
    with pytest.raises(TreepackError, match=fault):
        read(say("q"), say("A") | more)


def test_marks_that_replace_nothing_and_turns_without_text_are_noted() -> None:
    found = notes_of(
        read(say("q"), say("A") | {"content": ""}, say("r", isSummary=True), say("s", condenseId="k"), say("B"))
    )
    assert {"isSummary without condenseId, so no message is replaced", cline.EMPTY_NOTE} <= set(found)
    assert "condenseId without isSummary, so no message is replaced" in found
