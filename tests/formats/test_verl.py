"""verl: rollouts as ids with and without padding, dumps as text, datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.read_rollouts import read_trajectories
from support.readings import chat_of, only, read_as
from support.token_rollouts import back
from treepack.errors import TreepackError
from treepack.trajectory import Skipped, Trajectory

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
ROW = {"prompts": [0, 7], "responses": [8, 0], "attention_mask": [0, 1, 1, 0], "response_mask": [1, 0]}


def one(name: str, value: dict[str, Any]) -> Trajectory:
    return only(read_as(name, value))


def test_a_batch_of_columns_reads_like_its_rows(tmp_path: Path) -> None:
    rows = [ROW | {"uid": "a", "rm_scores": [0.0, 1.0]}, ROW | {"uid": "b", "rm_scores": [0.0, 0.5]}]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    tensors = {name: torch.tensor(field) for name, field in columns.items() if name != "uid"}
    dumped = tmp_path / "batch.pt"
    torch.save({"batch": tensors, "non_tensor_batch": {"uid": columns["uid"]}, "meta_info": {"a": 1}}, dumped)
    expected = [(back(one("verl", row)), row["uid"]) for row in rows]
    for trajectories in (read_as("verl", columns), list(read_trajectories([dumped]))):
        assert [(back(item), item.group_id) for item in trajectories if isinstance(item, Trajectory)] == expected


def test_a_rollout_with_images_is_skipped() -> None:
    value = ROW | {"multi_modal_inputs": {"pixel_values": [[0.5]]}}
    assert read_as("verl", value) == [Skipped("r.jsonl:1", "images, audio and video are not read")]


def test_enable_thinking_of_a_conversation_goes_to_its_template() -> None:
    content = chat_of(one("verl-data", {"messages": [USER, ANSWER], "enable_thinking": False}))
    assert (content.message_weights, content.chat_template_kwargs) == ([0.0, 1.0], {"enable_thinking": False})
    assert chat_of(one("verl-data", {"messages": [USER, ANSWER], "enable_thinking": None})).chat_template_kwargs is None
    with pytest.raises(TreepackError, match="enable_thinking is 1; expected true or false"):
        read_as("verl-data", {"messages": [USER, ANSWER], "enable_thinking": 1})


def test_a_prompt_without_a_response_is_skipped_and_each_generated_response_is_a_trajectory() -> None:
    row: dict[str, Any] = {"prompt": [USER], "reward_model": {"ground_truth": "4"}, "data_source": "s"}
    assert read_as("verl-data", row) == [Skipped("r.jsonl:1", "prompt without a response", is_rollout=False)]
    items = read_as("verl-data", row | {"responses": ["4", "5"]})
    assert [chat_of(item).messages for item in items] == [[USER, ANSWER], [USER, ANSWER | {"content": "5"}]]
    names = [item.trajectory_id for item in items if isinstance(item, Trajectory)]
    assert names == ["r.jsonl:1/response-1", "r.jsonl:1/response-2"]
    assert isinstance(items[0], Trajectory)
    assert items[0].metadata == {"data_source": "s", "ground_truth": "4"}


def test_a_conversation_with_images_is_skipped() -> None:
    value = {"messages": [USER, ANSWER], "enable_thinking": True, "images": ["a.png"]}
    assert read_as("verl-data", value) == [Skipped("r.jsonl:1", "images, audio and video are not read")]
