"""Logs of tree searches: ToolBench, DARS, Tree of Thoughts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.read_rollouts import read_trajectories
from support.readings import chats, read_value, real, reasons, turns
from treepack.errors import TreepackError
from treepack.formats.agents import dars
from treepack.formats.evaluations import toolbench, tree_of_thoughts
from treepack.trajectory import Chat, Trajectory


def node(kind: str, text: str, *children: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"node_type": kind, "description": text, "children": list(children), **more}


def finish(code: int) -> dict[str, Any]:
    return node("Action", "Finish", node("Action Input", "{}", observation="done", observation_code=code))


def read_tree(*children: dict[str, Any], **answer: Any) -> list[tuple[Trajectory, Chat]]:
    value = {
        "win": True,
        "tree": {"tree": node("Action Input", "", *children)},
        "answer_generation": {"query": "Q"} | answer,
    }
    return chats(read_value(toolbench.read_toolbench, value, "runs/G1/7.json"))


def call(number: int, name: str, arguments: str, content: str = "") -> dict[str, Any]:
    function = {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [function]}


def test_a_turn_of_a_search_tree_is_up_to_three_nodes() -> None:
    search = node("Action", "search", node("Action Input", '{"q": 1}', finish(3), observation="found"))
    ((trajectory, content),) = read_tree(node("Thought", "first", node("Thought", "think", search)))
    assert content.messages == [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "first"},
        call(0, "search", '{"q": 1}', "think"),
        {"role": "tool", "content": "found", "name": "search", "tool_call_id": "call00000"},
        call(1, "Finish", "{}"),
        {"role": "tool", "content": "done", "name": "Finish", "tool_call_id": "call00001"},
    ]
    assert content.message_weights == [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.reward) == ("G1/7/leaf-0", "G1/7", 1.0)
    assert trajectory.metadata == {"win": True}


def test_the_paths_of_a_tree_come_in_depth_first_order() -> None:
    inner = node("Action Input", "{}", finish(4), node("Thought", "b"), observation="o")
    paths = read_tree(node("Action", "f", inner), node("Thought", "c"), finish(3))
    assert [trajectory.trajectory_id for trajectory, _ in paths] == [f"G1/7/leaf-{k}" for k in range(4)]
    assert [content.messages[-1]["content"] for _, content in paths] == ["done", "b", "c", "done"]
    assert [trajectory.reward for trajectory, _ in paths] == [0.0, 0.0, 0.0, 1.0]
    shared = [content.messages[:3] for _, content in paths[:2]]
    assert shared[0] == shared[1]


def test_a_tree_is_opened_by_the_prompt_of_its_file() -> None:
    first = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "user", "content": "try something else", "valid": False},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "later"},
    ]
    function = {"name": "f", "parameters": {}}
    ((_, content),) = read_tree(node("Thought", "T"), train_messages=[first], function=[function])
    assert [message["content"] for message in content.messages] == ["S", "Q", "T"]
    assert content.tools == [{"type": "function", "function": function}]


def test_a_deep_tree_needs_no_recursion() -> None:
    root = deepest = node("Thought", "t")
    for _ in range(5000):
        deepest["children"] = [node("Thought", "t")]
        deepest = deepest["children"][0]
    ((_, content),) = read_tree(root)
    assert len(content.messages) == 5002


@pytest.mark.parametrize(
    ("children", "answer", "expected"),
    [
        ([5], {}, "children is [5]; expected a list of objects"),
        (5, {}, "children is 5; expected a list of objects"),
        ([node("Thought", "t") | {"children": {"a": 1}}], {}, 'children is {"a": 1}; expected a list of objects'),
        ([], {"function": 5}, "answer_generation.function is 5; expected a list of objects"),
        ([], {"function": ["f"]}, 'answer_generation.function is ["f"]; expected a list of objects'),
        (
            [],
            {"train_messages": 5},
            "answer_generation.train_messages is 5; expected a list of lists of messages",
        ),
        (
            [],
            {"train_messages": {"a": 1}},
            'answer_generation.train_messages is {"a": 1}; expected a list of lists of messages',
        ),
    ],
)
def test_a_search_tree_with_a_field_of_another_kind_is_refused(
    children: Any, answer: dict[str, Any], expected: str
) -> None:
    value = {"tree": {"tree": {"children": children}}, "answer_generation": {"query": "Q"} | answer}
    with pytest.raises(TreepackError) as caught:
        read_value(toolbench.read_toolbench, value, "runs/7.json")
    assert str(caught.value) == f"runs/7.json: {expected}"


def test_real_search_trees_are_read() -> None:
    pairs = chats(read_trajectories([real("toolbench-dfsdt")]))
    assert len(pairs) == len({item.trajectory_id for item, _ in pairs}) == 111
    assert sorted(Counter(item.group_id for item, _ in pairs).values()) == [1, 1, 1, 1, 4, 9, 16, 18, 22, 38]
    assert sum(item.reward or 0.0 for item, _ in pairs) == 7
    for _, content in pairs:
        assert content.tools
        for before, message in zip(content.messages, content.messages[1:], strict=False):
            called = [call["id"] for call in before.get("tool_calls", [])]
            assert ([message["tool_call_id"]] if message["role"] == "tool" else []) == called


def said(role: str, content: str, *children: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "children": list(children), **more}


def read_dars(root: dict[str, Any]) -> list[tuple[Trajectory, Chat]]:
    return chats(read_value(dars.read_dars, {"root": root, "node_count": 9}, "runs/lib-7/lib-7.root"))


def test_an_alternative_is_trained_with_the_request_that_asked_for_it_and_nowhere_else() -> None:
    later = said("user", "ok", said("assistant", "D"))
    other = said("assistant", "C", later, expansion_prompt="Another, please.")
    pairs = read_dars(said("system", "S", said("user", "Q", said("assistant", "B"), other)))
    assert [item.trajectory_id for item, _ in pairs] == ["lib-7/leaf-0", "lib-7/leaf-1", "lib-7/node-0"]
    assert {item.group_id for item, _ in pairs} == {"lib-7"}
    opening = [("system", "S", 0.0), ("user", "Q", 0.0)]
    assert turns(pairs[0][1]) == [*opening, ("assistant", "B", 1.0)]
    assert turns(pairs[1][1]) == [*opening, ("assistant", "C", 0.0), ("user", "ok", 0.0), ("assistant", "D", 1.0)]
    assert turns(pairs[2][1]) == [opening[0], ("user", "Q\n\nAnother, please.", 0.0), ("assistant", "C", 1.0)]


def test_demonstrations_and_submissions_of_the_program_are_not_trained() -> None:
    submitted = said("assistant", "bye", thought="Auto-submitting")
    shown = said(
        "assistant",
        "demo",
        said("user", "Q", said("assistant", "A", said("user", "R", submitted), is_demo="false")),
        is_demo="True",
    )
    ((_, content),) = read_dars(said("user", "D", shown))
    assert [weight for role, _, weight in turns(content) if role == "assistant"] == [0.0, 1.0, 0.0]


def test_a_checkpoint_is_skipped_where_the_finished_tree_lies_beside_it(tmp_path: Path) -> None:
    text = json.dumps({"root": said("user", "Q", said("assistant", "A")), "node_count": 2})
    for name in ("a.root", "a.cur.root", "a.prev.root", "b.cur.root", "b.prev.root", "c.prev.root"):
        (tmp_path / name).write_text(text)
    items = list(read_trajectories([tmp_path]))
    assert {item.group_id for item, _ in chats(items)} == {"a", "b", "c"}
    assert sorted(reasons(items)) == ["checkpoint of a.root", "checkpoint of a.root", "checkpoint of b.cur.root"]


def thoughts(*steps: tuple[list[str], list[str]], **more: Any) -> dict[str, Any]:
    made = [{"x": "1 2", "new_ys": new, "select_new_ys": kept, "values": [0.5] * len(new)} for new, kept in steps]
    return {"idx": 4, "steps": made, "ys": steps[-1][1] if steps else [], "infos": [{"r": 1}]} | more


def test_the_candidates_of_the_last_step_are_the_leaves_and_the_answer_has_a_reward() -> None:
    value = thoughts((["a", "b"], ["a"]), (["ac", "ad"], ["ad"]))
    pairs = chats(read_value(tree_of_thoughts.read_tree_of_thoughts, value, "logs/game/run.json"))
    assert [item.trajectory_id for item, _ in pairs] == ["run/4/leaf-0", "run/4/leaf-1"]
    assert {item.group_id for item, _ in pairs} == {"game/4"}
    assert [item.reward for item, _ in pairs] == [None, 1.0]
    assert [turns(content) for _, content in pairs] == [
        [("user", "1 2", 0.0), ("assistant", text, 1.0)] for text in ("ac", "ad")
    ]
    noted = "candidates that the search dropped before its last step not used"
    assert [item.notes for item, _ in pairs] == [(noted,), ()]


def test_a_search_that_drops_nothing_before_its_last_step_says_nothing() -> None:
    pairs = chats(read_value(tree_of_thoughts.read_tree_of_thoughts, thoughts((["a"], ["a"]), (["ab", "ac"], ["ab"]))))
    assert [item.notes for item, _ in pairs] == [(), ()]


def test_answers_of_an_old_log_have_no_reward_and_those_without_a_search_no_puzzle() -> None:
    old = thoughts((["a"], ["a"]), accs=[0])
    del old["infos"]
    assert tree_of_thoughts.FORMAT.matches(old)
    ((trajectory, _),) = chats(read_value(tree_of_thoughts.read_tree_of_thoughts, old))
    assert trajectory.reward is None
    without = {"idx": 4, "ys": ["a"], "infos": [{"r": 1}]}
    assert reasons(read_value(tree_of_thoughts.read_tree_of_thoughts, without)) == [
        "no steps and therefore no puzzle, as in runs without a search"
    ]


def test_answers_and_what_they_were_worth_must_be_as_many() -> None:
    with pytest.raises(TreepackError, match=r"has 1 ys and 2 infos; expected one info per answer"):
        read_value(tree_of_thoughts.read_tree_of_thoughts, thoughts((["a"], ["a"]), infos=[{"r": 1}, {"r": 0}]))
