"""Trees of text: every path from the root to a leaf is a trajectory, and no field of a node is lost in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories
from support.readings import chats, read_value, reasons, turns
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.formats.data_sets import text_trees
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import detect_format
from treepack.trajectory import PromptCompletion, Skipped, Trajectory

Node = dict[str, Any]


def read(value: Node) -> list[Trajectory | Skipped]:
    return read_value(text_trees.read_text_trees, value, "trees.jsonl:1")


def built(value: Node) -> list[Trajectory]:
    return [item for item in read(value) if isinstance(item, Trajectory)]


def texts(value: Node) -> list[tuple[str, str]]:
    return [
        (item.content.prompt, item.content.completion)
        for item in built(value)
        if isinstance(item.content, PromptCompletion)
    ]


def said(value: Node) -> list[str]:
    """The messages of each path as `role:text`; trained texts are in capitals."""
    return [
        " ".join(f"{role}:{text.upper() if weight else text}" for role, text, weight in turns(content))
        for _, content in chats(read(value))
    ]


def node(text: str, *children: Node, **more: Any) -> Node:
    return {"text": text, "children": list(children)} | more


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> Node:
    below = draw(st.lists(trees(depth - 1), max_size=3)) if depth else []
    return node(draw(st.sampled_from("abc")), *below)


def twin(below: list[Node], before: str) -> list[str]:
    """The texts of all leaves by recursion."""
    return [
        text
        for child in below
        for text in (twin(child["children"], before + child["text"]) if child["children"] else [before + child["text"]])
    ]


@given(st.lists(trees(), min_size=1, max_size=3))
def test_each_leaf_of_a_tree_of_plain_text_is_the_text_of_its_path(below: list[Node]) -> None:
    value = {"prompt": "p", "children": below}
    assert texts(value) == [("p", text) for text in twin(below, "")]
    assert [item.trajectory_id for item in built(value)] == [
        f"trees.jsonl:1/leaf-{i}" for i in range(len(built(value)))
    ]


def test_the_advantage_of_a_leaf_is_read_and_of_an_inner_node_refused() -> None:
    assert [item.advantage for item in built({"prompt": "p", "children": [node("a", advantage=2)]})] == [2.0]
    with pytest.raises(TreepackError, match="above a leaf has an advantage"):
        read({"prompt": "p", "children": [node("a", node("b"), advantage=2)]})


@pytest.mark.parametrize(
    "said_by",
    [
        {"message": {"role": "assistant", "content": "a"}},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"role": "assistant", "content": "a"},
        {"role": "ai", "text": "a"},
        {"text": "a"},
        {"content": "a"},
        {"completion": "a"},
        {"response": "a"},
        {"response": {"role": "assistant", "content": "a"}},
        {"completion": [{"role": "assistant", "content": "a"}]},
        {"content": [{"type": "text", "text": "a"}]},
    ],
)
def test_a_node_says_its_text_under_any_of_these_names(said_by: Node) -> None:
    assert said({"messages": [{"role": "user", "content": "q"}], "children": [said_by]}) == ["user:q assistant:A"]


def test_the_text_of_a_root_without_a_role_is_the_prompt() -> None:
    assert texts(node("q", node("a"))) == [("q", "a")]
    assert texts({"tree": node("q", node("a"))}) == [("q", "a")]
    assert texts({"prompt": "q", "root": node("q", node("a"))}) == [("q", "a")]


def test_the_name_of_a_node_without_a_role_is_no_part_of_a_message() -> None:
    assert texts({"prompt": "q", "children": [node("a", node("b", name="2"), name="1")]}) == [("q", "ab")]


def test_a_path_without_an_answer_is_counted() -> None:
    value = {"messages": [{"role": "user", "content": "q"}], "children": [node("a"), {"role": "user", "content": "r"}]}
    assert reasons(read(value)) == [text_trees.NO_ANSWER_PATH]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (node("a", response="b"), "has text and response"),
        (node("a", thought="b"), "field thought"),
        (node("a", label=True), "field label"),
        (node("a", loss_mask=[1]), "field loss_mask"),
        ({"state": "x = 4"}, "but state"),
        ({"message": {"role": "assistant", "text": "a"}}, "expected text, or a message with content"),
        ({"content": {"parts": ["a"]}}, "expected text, or a message with content"),
        ({"messages": [{"role": "assistant", "content": "a"}], "role": "assistant"}, "move it into the messages"),
    ],
)
def test_a_node_that_may_have_another_answer_or_a_mask_is_refused(bad: Node, words: str) -> None:
    with pytest.raises(TreepackError, match=words):
        read({"prompt": "q", "children": [node("c"), bad]})


@pytest.mark.parametrize("beside", [{"messages": [{"role": "user", "content": "r"}]}, {"text": "r"}])
def test_a_root_with_two_prompts_is_refused(beside: Node) -> None:
    with pytest.raises(TreepackError, match="keep the one that is the prompt"):
        read({"prompt": "q", "children": [node("a")]} | beside)


def test_a_tree_is_recognised_and_its_sample_read() -> None:
    value = {"messages": [{"role": "user", "content": "q"}], "children": [node("a")]}
    assert detect_format(Record("r:1", "r", value)) == "text-trees"
    assert detect_format(Record("r:1", "r", value | {"children": []})) == "chat"
    items = list(read_trajectories([ROLLOUTS / "text-trees.jsonl"]))
    assert [item.trajectory_id for item in items if isinstance(item, Trajectory)] == [
        *(f"add/leaf-{i}" for i in range(3)),
        *(f"shop/leaf-{i}" for i in range(3)),
        *(f"name/leaf-{i}" for i in range(2)),
    ]


@pytest.mark.parametrize(
    "said_by",
    [
        {"text": ["It is"]},
        {"response": ["4"]},
        {"message": '{"role": "assistant", "content": "4"}'},
        {"messages": "[]"},
    ],
)
def test_a_node_with_a_list_of_texts_or_messages_as_json_text_is_refused(said_by: Node) -> None:
    with pytest.raises(TreepackError, match="expected text, or messages as objects"):
        read({"prompt": "2 + 2?", "children": [said_by]})


def test_children_that_are_json_text_are_the_same_tree() -> None:
    value = {"prompt": "2 + 2?", "children": [node("It is", node(" 4."), node(" 5."))]}
    stored = Record("r:1", "r", value | {"children": json.dumps(value["children"])})
    assert detect_format(stored) == "text-trees"
    assert [item.content for item in text_trees.FORMAT.trajectories([stored], ReadOptions())] == [  # type: ignore[union-attr]
        item.content for item in built(value)
    ]
