"""Logs of agents: tau-bench, SWE-agent, ToolBench; made-up ones, and real ones where they lie beside the checkout."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from treepack.errors import TreepackError
from treepack.readers import ReadOptions, Record, read_trajectories, swe_agent, toolbench
from treepack.trajectory import Chat, Trajectory

REAL = Path(__file__).parents[2] / "shared" / "data"


def real(name: str) -> Path:
    path = REAL / name
    if not path.exists():
        pytest.skip(f"no real rollouts at {path}")
    return path


def chats(items: Any) -> list[tuple[Trajectory, Chat]]:
    return [(item, item.content) for item in items if isinstance(item, Trajectory) and isinstance(item.content, Chat)]


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
    return chats(toolbench.read(Record("runs/G1/7.json", "runs/G1/7.json", value), ReadOptions()))


def call(number: int, name: str, arguments: str, content: str = "") -> dict[str, Any]:
    function = {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [function]}


def test_a_turn_of_a_search_tree_is_up_to_three_nodes() -> None:
    search = node("Action", "search", node("Action Input", '{"q": 1}', finish(3), observation="found"))
    ((found, content),) = read_tree(node("Thought", "first", node("Thought", "think", search)))
    assert content.messages == [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "first"},
        call(0, "search", '{"q": 1}', "think"),
        {"role": "tool", "content": "found", "name": "search", "tool_call_id": "call00000"},
        call(1, "Finish", "{}"),
        {"role": "tool", "content": "done", "name": "Finish", "tool_call_id": "call00001"},
    ]
    assert content.message_weights == [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert (found.trajectory_id, found.group_id, found.reward) == ("G1/7/leaf-0", "G1/7", 1.0)
    assert found.metadata == {"win": True}


def test_the_paths_of_a_tree_come_in_depth_first_order() -> None:
    inner = node("Action Input", "{}", finish(4), node("Thought", "b"), observation="o")
    paths = read_tree(node("Action", "f", inner), node("Thought", "c"), finish(3))
    assert [found.trajectory_id for found, _ in paths] == [f"G1/7/leaf-{k}" for k in range(4)]
    assert [content.messages[-1]["content"] for _, content in paths] == ["done", "b", "c", "done"]
    assert [found.reward for found, _ in paths] == [0.0, 0.0, 0.0, 1.0]
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


def test_an_empty_tree_has_one_path_without_a_turn() -> None:
    ((found, content),) = read_tree()
    assert (len(content.messages), found.reward) == (1, 0.0)


@pytest.mark.parametrize("bad", [node("Wish", "x"), node("Action Input", "{}")])
def test_a_node_out_of_place_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(TreepackError) as caught:
        read_tree(bad)
    assert str(caught.value) == (
        f"runs/G1/7.json: a node of type '{bad['node_type']}' out of place; "
        "expected Thought, Action, or Action Input after an Action"
    )


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
        list(toolbench.read(Record("runs/7.json", "runs/7.json", value), ReadOptions()))
    assert str(caught.value) == f"runs/7.json: {expected}"


def test_a_swe_agent_run_is_named_by_its_folder_and_its_task() -> None:
    value = {
        "environment": "e",
        "history": [
            {"role": "system", "content": "S", "agent": "a"},
            {"role": "assistant", "content": "demo", "is_demo": True},
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": "A", "thought": "A", "action": "ls", "agent": "a"},
        ],
        "trajectory": [{"action": "ls"}],
        "info": {"exit_status": "submitted", "submission": "diff"},
    }
    path = "runs/one/task-1.traj.gz"
    ((found, content),) = chats(swe_agent.read(Record(path, path, value), ReadOptions()))
    assert (found.trajectory_id, found.group_id) == ("one/task-1", "task-1")
    assert found.metadata == {"environment": "e", "info": {"exit_status": "submitted"}}
    assert content.message_weights == [0.0, 0.0, 0.0, 1.0]
    assert content.messages[3] == {"role": "assistant", "content": "A"}
    assert found.notes == ()


def test_a_tau_bench_trial_is_named_by_its_task_and_trial(tmp_path: Path) -> None:
    record = {"task_id": 3, "trial": 1, "reward": 1.0, "info": {}, "traj": [{"role": "assistant", "content": "A"}]}
    path = tmp_path / "r.json"
    path.write_text(json.dumps([record, record]))
    for found, _ in chats(read_trajectories([path])):
        assert (found.trajectory_id, found.group_id, found.reward) == ("3/1", "3", 1.0)


def test_real_tau_bench_rollouts_are_read() -> None:
    found = chats(read_trajectories([real("tau-bench-airline") / "gpt-4o-airline.json.gz"]))
    assert len(found) == len({item.trajectory_id for item, _ in found}) == 200
    assert Counter(item.group_id for item, _ in found) == {str(task): 4 for task in range(50)}
    roles = Counter(message["role"] for _, content in found for message in content.messages)
    assert roles == {"assistant": 2454, "user": 1490, "tool": 1164, "system": 200}
    assert {item.reward for item, _ in found} == {0.0, 1.0}
    assert all([message["role"] for message in content.messages[:2]] == ["system", "user"] for _, content in found)


def test_real_swe_agent_rollouts_are_read() -> None:
    found = chats(read_trajectories([real("swe-agent-lite")]))
    assert len(found) == len({item.trajectory_id for item, _ in found}) == 341
    assert len({item.group_id for item, _ in found}) == 114
    for _, content in found:
        roles = [message["role"] for message in content.messages]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
    assert sum(item.metadata["info"].get("exit_status") == "submitted" for item, _ in found) == 325


def test_real_search_trees_are_read() -> None:
    found = chats(read_trajectories([real("toolbench-dfsdt")]))
    assert len(found) == len({item.trajectory_id for item, _ in found}) == 111
    assert sorted(Counter(item.group_id for item, _ in found).values()) == [1, 1, 1, 1, 4, 9, 16, 18, 22, 38]
    assert sum(item.reward or 0.0 for item, _ in found) == 7
    for _, content in found:
        assert content.tools
        for before, message in zip(content.messages, content.messages[1:], strict=False):
            called = [call["id"] for call in before.get("tool_calls", [])]
            assert ([message["tool_call_id"]] if message["role"] == "tool" else []) == called
