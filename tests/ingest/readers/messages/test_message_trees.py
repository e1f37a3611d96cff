"""Trees of messages that people branch: Open Assistant, exports of ChatGPT."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories
from support.readings import Items, chats, notes_of, read_value, read_whole, reasons, turns
from treepack.errors import TreepackError
from treepack.formats.agents.chatgpt import chatgpt
from treepack.formats.data_sets import openassistant
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON
from treepack.trajectory import Trajectory

Node = dict[str, Any]


def said(items: Items) -> dict[str, str]:
    """The messages of each trajectory as `role:text`; trained texts are in capitals."""
    return {
        item.trajectory_id: " ".join(
            f"{role}:{text.upper() if weight else text.lower()}" for role, text, weight in turns(content)
        )
        for item, content in chats(items)
    }


def message(name: str, *replies: Node, **more: Any) -> Node:
    """An answer if the name is a capital letter, else a question."""
    role = "assistant" if name.isupper() else "prompter"
    return {"message_id": name, "text": name, "role": role, "replies": list(replies)} | more


def read_oasst(*values: Node, reward_key: str | None = None) -> Items:
    return read_whole("openassistant", *values, reward_key=reward_key)


def tree(prompt: Node, **more: Any) -> Node:
    return {"message_tree_id": prompt["message_id"], "tree_state": "ready_for_export", "prompt": prompt} | more


def test_a_message_without_its_parent_and_a_repeated_one_are_counted() -> None:
    rows: list[Node] = [
        {"message_id": "q", "parent_id": None, "text": "q", "role": "prompter"},
        {"message_id": "A", "parent_id": "q", "text": "A", "role": "assistant"},
        {"message_id": "A", "parent_id": "q", "text": "A", "role": "assistant"},
        {"message_id": "r", "parent_id": "x", "text": "r", "role": "prompter"},
        {"message_id": "B", "parent_id": "r", "text": "B", "role": "assistant"},
    ]
    items = read_oasst(*rows)
    assert reasons(items) == [openassistant.REPEATED, openassistant.ORPHAN, openassistant.ORPHAN]
    assert said(items) == {"q/leaf-0": "user:q assistant:A"}


def test_ranks_are_metadata_and_a_label_is_the_reward_on_request() -> None:
    of_object = message("A", labels={"quality": {"value": 0.75, "count": 3}}, rank=1)
    of_lists = message("B", labels={"name": ["spam", "quality"], "value": [0.0, 0.5], "count": [1, 1]}, rank=0)
    value = tree(message("q", of_object, of_lists, message("C")))
    plain = [item for item in read_oasst(value) if isinstance(item, Trajectory)]
    assert [(item.reward, item.metadata.get("rank")) for item in plain] == [(None, 1), (None, 0), (None, None)]
    chosen = [item for item in read_oasst(value, reward_key="quality") if isinstance(item, Trajectory)]
    assert [item.reward for item in chosen] == [0.75, 0.5, None]


def test_unknown_fields_of_a_message_are_named_and_another_text_is_refused() -> None:
    assert notes_of(read_oasst(tree(message("q", message("A", emojis={"+1": 1}))))) == ["field 'emojis.+1' not used"]
    assert reasons(read_oasst(tree(message("q", mood="m")))) == [
        f"{openassistant.NO_ANSWER}; node field 'mood' not used"
    ]
    with pytest.raises(TreepackError, match="field completion"):
        read_oasst(tree(message("q", message("A", completion="B"))))


def node(name: str, parent: str | None, role: str | None = None, content: Any = None, **more: Any) -> Node:
    """A node of an export; a text as `content` is the content of type text."""
    if isinstance(content, str):
        content = {"content_type": "text", "parts": [content]}
    body = {"author": {"role": role}, "content": content, "recipient": "all", "metadata": {}} | more
    return {"id": name, "parent": parent, "children": [], "message": body if role else None}


def export(*nodes: Node, **more: Any) -> Node:
    mapping = {each["id"]: each for each in nodes}
    for each in nodes:
        if each["parent"] in mapping:
            mapping[each["parent"]]["children"].append(each["id"])
    return {"title": "t", "conversation_id": "C", "current_node": nodes[-1]["id"], "mapping": mapping} | more


def code(text: str) -> Node:
    return {"content_type": "code", "language": "python", "text": text}


def read_chatgpt(*nodes: Node, **more: Any) -> Items:
    return read_value(chatgpt.read_chatgpt, export(*nodes, **more), "conversations.json")


def test_thoughts_and_a_call_are_one_message_and_the_tool_answers_it() -> None:
    thoughts = {"content_type": "thoughts", "thoughts": [{"summary": "s", "content": "Hm."}, {"summary": "Short"}]}
    items = read_chatgpt(
        node("1", None, "user", "q"),
        node("2", "1", "assistant", thoughts),
        node("3", "2", "assistant", {"content_type": "reasoning_recap", "content": "Thought for 2s"}),
        node("4", "3", "assistant", code("x = 1"), recipient="python"),
        node("5", "4", "assistant", code('{"q": "nuts"}'), recipient="web.run"),
        node("6", "5", "tool", {"content_type": "execution_output", "text": "1"}, author={"role": "tool", "name": "p"}),
        node("7", "6", "assistant", "A"),
    )
    ((_, content),) = chats(items)
    ask, result, answer = content.messages[1:]
    assert ask["reasoning_content"] == "Hm.\n\nShort"
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in ask["tool_calls"]]
    assert calls == [("call00001", "python", {"code": "x = 1"}), ("call00002", "web.run", {"q": "nuts"})]
    assert (result["content"], result["tool_call_id"], result["name"]) == ("1", "call00001", "p")
    assert answer["content"] == "A"
    assert chatgpt.RECAP_NOTE in notes_of(items)


def test_a_path_ends_before_an_image_and_a_spoken_text_is_read() -> None:
    image = {"content_type": "multimodal_text", "parts": [{"content_type": "image_asset_pointer"}, "and this?"]}
    spoken = {
        "content_type": "multimodal_text",
        "parts": [{"content_type": "audio_transcription", "text": "q"}, {"content_type": "audio_asset_pointer"}],
    }
    seen = [node("3", "2", "user", image), node("4", "3", "assistant", "B")]
    items = read_chatgpt(node("1", None, "user", spoken), node("2", "1", "assistant", "A"), *seen)
    assert said(items) == {"C/leaf-0": "user:q assistant:A"}
    assert f"turns after it not used: {MEDIA_REASON}" in notes_of(items)
    assert reasons(read_chatgpt(node("3", None, "user", image), seen[1])) == [MEDIA_REASON]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"metadata": {"finish_details": {"type": "max_tokens"}}}, "max_tokens"),
        ({"status": "in_progress"}, "interrupted"),
        ({"metadata": {"finish_details": {"type": "stop"}}}, "stop"),
        ({}, None),
    ],
)
def test_the_end_of_an_answer_is_passed_on(more: Node, reason: str | None) -> None:
    turn = chatgpt._PathTurns()
    answer = node("2", "1", "assistant", "A", **more)["message"]
    chatgpt._add_answer(turn, answer, "A", answer["metadata"])
    assert turn.messages[0].get("finish_reason") == reason


def test_nodes_that_are_their_own_ancestors_are_refused() -> None:
    first, second = node("1", "2", "user", "q"), node("2", "1", "assistant", "A")
    with pytest.raises(TreepackError, match="own ancestors"):
        read_chatgpt(first, second)


def test_the_samples_are_read() -> None:
    items = list(read_trajectories([ROLLOUTS / "chatgpt.json"]))
    assert list(said(items)) == ["c-shelf/leaf-0", "c-shelf/leaf-1", "c-photo/leaf-0"]
    items = list(read_trajectories([ROLLOUTS / "openassistant"]))
    assert list(said(items)) == ["r-1/leaf-0", "r-1/leaf-1", "t-1/leaf-0", "t-1/leaf-1", "t-1/leaf-2", "w-2/leaf-0"]
    assert json.loads((ROLLOUTS / "chatgpt.json").read_text())[0]["current_node"] == "f"


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"status": ["finished_successfully"]}, "status of a message is"),
        ({"recipient": True}, "recipient of a message is true; expected text"),
        ({"metadata": "{}"}, "has the metadata"),
        ({"content": {"content_type": "text", "parts": "A"}}, 'has the parts "A"; expected texts or objects'),
        ({"content": {"content_type": "code", "text": ["A"]}}, "text of a message is"),
        ({"content": {"content_type": "thoughts", "thoughts": [{"content": True}]}}, "has the thought"),
        ({"content": {"content_type": "thoughts", "content": "A"}}, "has thoughts and content"),
    ],
)
def test_a_message_of_chatgpt_of_another_form_is_refused(more: Node, fault: str) -> None:
    odd, end = node("2", "1", **{"role": "assistant", "content": "A", **more}), node("3", "2", "assistant", "B")
    with pytest.raises(TreepackError, match=fault):
        read_chatgpt(node("1", None, "user", "q"), odd, end)


def test_links_and_empty_answers_of_chatgpt_are_noted() -> None:
    call = node("3", "2", "assistant", "", recipient="python")
    items = read_chatgpt(
        node("1", "lost", "user", "q"), node("2", "1", "assistant", ""), call, node("4", "3", "assistant", "B")
    )
    assert {chatgpt.PARENT_NOTE, chatgpt.EMPTY_NOTE, chatgpt.EMPTY_CALL_NOTE} <= set(notes_of(items))


@pytest.mark.parametrize("name", ["deleted", "review_result"])
def test_a_flag_of_another_type_is_refused(name: str) -> None:
    with pytest.raises(TreepackError, match=f'has the {name} "no"; expected true or false'):
        read_oasst(tree(message("q", message("A", **{name: "no"}))))


def test_labels_that_are_no_reward_are_noted() -> None:
    value = tree(message("q", message("A", labels={"quality": {"value": 0.75}, "spam": {"value": 0.0}})))
    assert notes_of(read_oasst(value)) == [openassistant.LABELS_NOTE]
    assert notes_of(read_oasst(value, reward_key="quality")) == [openassistant.OTHER_LABELS_NOTE]
    rejected = tree(message("q", message("A"), review_result=False))
    assert notes_of(read_oasst(rejected)) == [openassistant.QUESTION_NOTE]
