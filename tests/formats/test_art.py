"""ART: choices with and without token ids, in lines, in rows of Parquet, and in YAML."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories
from support.readings import Items, only, read_as, trajectories
from support.token_rollouts import back
from treepack.errors import TreepackError
from treepack.files.input_files.yaml_files import read_yaml
from treepack.trajectory import Chat, Skipped, Trajectory

GROUP = json.loads((ROLLOUTS / "art.jsonl").read_text())
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def items(value: dict[str, Any]) -> Items:
    return read_as("art", value)


def read(value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(items(value))


def chats(found: list[Trajectory]) -> list[Chat]:
    return [item.content for item in found if isinstance(item.content, Chat)]


def without(value: Any, *names: str) -> Any:
    if isinstance(value, dict):
        return {name: without(field, *names) for name, field in value.items() if name not in names}
    return [without(field, *names) for field in value] if isinstance(value, list) else value


def test_choices_with_token_ids_are_joined_where_they_continue_each_other() -> None:
    first, summary, second = read(GROUP)
    ids = [151644, 872, 198, 17, 151645, 198, 50, 51, 2, 8, 9, 52, 2]
    assert back(first) == (ids, [6, 7, 8, 11, 12], [-0.5, -0.25, -0.125, -1.0, -0.0625], 1.0)
    assert back(summary) == ([151644, 60, 198, 61, 2], [3, 4], [-0.25, -0.5], 1.0)
    assert back(second) == ([*ids[:6], 50, 53, 2], [6, 7, 8], [-0.5, -2.0, -0.125], 0.0)
    names = [item.trajectory_id for item in (first, summary, second)]
    assert names == ["r.jsonl:1/0/turn-1", "r.jsonl:1/0/turn-3", "r.jsonl:1/1"]
    assert {item.group_id for item in (first, summary, second)} == {"r.jsonl:1"}
    assert first.metadata == {"metadata": {"scenario": "add-7"}, "extra": {"duration": 1.5}}


def test_ids_of_completions_are_found_in_the_names_of_their_tokens() -> None:
    found = read(without(GROUP, "token_ids"))
    assert [back(item) for item in found] == [back(item) for item in read(GROUP)]


def test_an_assistant_message_that_is_no_choice_is_not_trained() -> None:
    (trajectory,) = read({"messages_and_choices": [USER, ANSWER, USER, {"message": ANSWER}], "reward": 1.0})
    assert chats([trajectory])[0].message_weights == [0.0, 0.0, 0.0, 1.0]
    nothing = {"messages_and_choices": [USER, ANSWER], "reward": 1.0}
    assert items(nothing) == [Skipped("r.jsonl:1", "no message that the model wrote")]


@pytest.mark.parametrize(
    "more", [{"additional_histories": None}, {"group_metadata": '{"a": 1}', "group_metrics": None, "group_logs": ["b"]}]
)
def test_rows_of_parquet_train_what_they_mark_as_trainable(tmp_path: Path, more: dict[str, Any]) -> None:
    call = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    messages = [
        USER | {"trainable": False, "tool_calls": None},
        ANSWER | {"trainable": True, "tool_calls": json.dumps(call)},
    ]
    row = {
        "group_index": 3,
        "reward": 0.5,
        "metrics": '{"a": 1.0}',
        "metadata": None,
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
        "logs": ["ok"],
        "messages": messages,
        **more,
    }
    path = tmp_path / "0007.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    trajectory = only(read_trajectories([path]))
    assert (trajectory.reward, trajectory.group_id) == (0.5, f"{path}/3")
    assert set(trajectory.notes) <= {f"field '{name}' not used" for name in ("logs", "group_logs", "group_metadata")}
    (chat,) = chats([trajectory])
    assert chat.message_weights == [0.0, 1.0]
    assert chat.messages[1]["tool_calls"][0]["function"]["name"] == "f"
    assert chat.tools == [{"type": "function", "function": {"name": "f"}}]


def test_yaml_that_holds_code_or_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(TreepackError, match=r"^r.yaml: not YAML of plain values .*; fix it"):
        read_yaml(b"!!python/object/apply:os.getcwd []", "r.yaml")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(TreepackError, match=r"^r.yaml: is YAML; install pyyaml"):
        read_yaml(b"[]", "r.yaml")
