"""slime: samples as JSON and as files of torch."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.read_rollouts import read_trajectories
from support.readings import Items, only, read_as
from support.token_rollouts import back
from treepack.errors import TreepackError
from treepack.files.input_files.torch_files import read_torch
from treepack.trajectory import Chat, PromptCompletion, Skipped, Trajectory

SAMPLE: dict[str, Any] = {
    "group_index": 4,
    "index": 9,
    "tokens": [5, 6, 7, 8],
    "response_length": 2,
    "loss_mask": None,
    "status": "completed",
}


def read(value: dict[str, Any], **options: Any) -> Items:
    return read_as("slime", value, **options)


def one(value: dict[str, Any], **options: Any) -> Trajectory:
    return only(read(value, **options))


def test_the_reward_key_picks_the_reward_out_of_several() -> None:
    sample = SAMPLE | {"reward": {"acc": 1.0, "format": 0.25}}
    assert one(sample, reward_key="format").reward == 0.25
    with pytest.raises(TreepackError, match="choose one with --reward-key"):
        read(sample)


def test_samples_of_one_rollout_have_names_of_their_own() -> None:
    trajectories = read({"rollout_id": 3, "samples": [SAMPLE, SAMPLE | {"rollout_id": 8}, SAMPLE | {"rollout_id": 8}]})
    names = [item.trajectory_id for item in trajectories if isinstance(item, Trajectory)]
    assert names == ["9", "8/r.jsonl:1[1]", "8/r.jsonl:1[2]"]
    assert {item.step for item in trajectories if isinstance(item, Trajectory)} == {3}


def test_rewards_that_are_arrays_are_compared_as_wholes() -> None:
    samples = [
        SAMPLE | {"rollout_id": 8, "reward": np.array(values)} for values in ([0.5, 1.0], [0.5, 1.0], [0.5, 2.0])
    ]
    for chosen, expected in ((samples[:2], ["8", "8"]), (samples[1:], [None, None])):
        found = read({"rollout_id": 3, "samples": chosen})
        assert [item.rollout_id for item in found if isinstance(item, Trajectory)] == expected


def test_a_sample_without_tokens_is_read_as_text() -> None:
    sample = SAMPLE | {"tokens": [], "response_length": 0, "response": "4"}
    assert one(sample | {"prompt": "2+2="}).content == PromptCompletion("2+2=", "4")
    content = one(sample | {"prompt": [{"role": "user", "content": "2+2?"}]}).content
    assert isinstance(content, Chat)
    assert content.message_weights == [0.0, 1.0]
    assert read(sample | {"response": ""}) == [Skipped("r.jsonl:1", "empty response")]


def test_a_file_of_torch_reads_like_the_json_that_holds_the_same(tmp_path: Path) -> None:
    sample = SAMPLE | {"rollout_log_probs": [-0.5, -0.25], "rollout_routed_experts": np.zeros((3, 2), np.int32)}
    tensors = sample | {"tokens": torch.tensor(SAMPLE["tokens"]), "loss_mask": torch.ones(2, dtype=torch.int32)}
    (tmp_path / "dumps").mkdir()
    torch.save({"rollout_id": 3, "samples": [sample, tensors]}, tmp_path / "dumps" / "3.pt")
    trajectories = [item for item in read_trajectories([tmp_path / "dumps"]) if isinstance(item, Trajectory)]
    assert [back(item) for item in trajectories] == [([5, 6, 7, 8], [2, 3], [-0.5, -0.25], None)] * 2
    assert [(item.step, item.source.rpartition("/")[2]) for item in trajectories] == [(3, "3.pt[0]"), (3, "3.pt[1]")]


class Foreign:
    """A value that a safe load must refuse."""


def test_a_file_of_torch_that_holds_code_is_refused() -> None:
    stream = io.BytesIO()
    torch.save({"samples": [Foreign()]}, stream)
    with pytest.raises(TreepackError, match=r"^r.pt: not a file of tensors and plain values .*; write its rollouts"):
        read_torch(stream.getvalue(), "r.pt")


def test_a_tensor_that_repeats_stored_values_is_read_if_it_is_small_and_refused_if_not() -> None:
    for shape in ((1 << 20,), (2, 1 << 19)):
        stream = io.BytesIO()
        torch.save({"mask": torch.ones(1).expand(shape)}, stream)
        assert read_torch(stream.getvalue(), "r.pt")["mask"].shape == shape
    stream = io.BytesIO()
    torch.save({"samples": [{"tokens": torch.ones(1, dtype=torch.int32).expand(1 << 40)}]}, stream)
    with pytest.raises(TreepackError, match=r"a tensor of the shape \[1099511627776\] repeats stored values"):
        read_torch(stream.getvalue(), "r.pt")


def test_without_torch_its_files_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TreepackError, match="is a file of PyTorch, which is not installed; run pip install"):
        read_torch(b"PK\x03\x04", "r.pt")
