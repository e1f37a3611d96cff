"""Fields of a teacher in tokenised records are columns of the trained tokens, wherever a program stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.read_rollouts import read_trajectories
from treepack.errors import TreepackError
from treepack.trajectory import Tokens

IDS = [5, 6, 7, 8]  # of which 7 and 8 are trained


def content_of(tmp_path: Path, record: dict[str, Any]) -> Tokens:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (item,) = read_trajectories([path])
    content: Any = getattr(item, "content", item)
    assert isinstance(content, Tokens), item
    return content


TOKENS = {"input_ids": IDS, "loss_mask": [0, 0, 1, 1], "reward": 1.0}
SLIME = {"tokens": IDS, "response_length": 2, "status": "completed", "index": 0, "reward": 1.0, "response": "x"}
PRIME = {"token_ids": IDS, "mask": [0, 0, 1, 1], "env_name": "e", "logprobs": [0, 0, -1, -1], "advantages": [1.0] * 4}
VERL = {"prompt_ids": [5, 6], "response_ids": [7, 8], "response_mask": [1, 1], "reward_score": 1.0}


@pytest.mark.parametrize(
    "record",
    [
        TOKENS | {"teacher_logprobs": [0, 0, -1.5, -2.5]},
        TOKENS | {"teacher_per_token_logps": [-1.5, -2.5]},
        SLIME | {"teacher_log_probs": [-1.5, -2.5]},
        PRIME | {"teacher_logprobs": [0, 0, -1.5, -2.5]},
        # verl's rows are at the token before, and the last one means nothing
        VERL | {"teacher_ids": [[6], [7], [8], [0]], "teacher_logprobs": [[-9], [-1.5], [-2.5], [0]]},
    ],
    ids=["tokens", "trl", "slime", "prime-rl", "verl"],
)
def test_the_log_probability_of_the_sampled_token_is_kept(tmp_path: Path, record: dict[str, Any]) -> None:
    content = content_of(tmp_path, record)
    assert content.teacher_logprob is not None
    assert content.teacher_logprob.tolist() == [-1.5, -2.5]
    assert content.teacher_topk_ids is None


def test_logits_of_nemo_rl_are_normalised_over_their_words(tmp_path: Path) -> None:
    logits = [[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0], [0.0, 0.0]]
    content = content_of(
        tmp_path, TOKENS | {"teacher_topk_indices": [[1, 2], [7, 3], [4, 8], [0, 0]], "teacher_topk_logits": logits}
    )
    assert content.teacher_topk_logprobs is not None
    expected = [np.array(row) - np.log(np.exp(row).sum()) for row in logits[1:3]]
    np.testing.assert_allclose(content.teacher_topk_logprobs.flat, np.concatenate(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"teacher_topk_ids": [[1], [2]], "teacher_topk_logprobs": [[-1]] * 2}, "2 rows for 4 tokens"),
        ({"teacher_topk_ids": [1, 2, 3, 4], "teacher_topk_logprobs": [[-1]] * 4}, "not tables of one shape"),
        ({"teacher_topk_ids": [[1, 2]] * 4, "teacher_topk_logprobs": [[-1]] * 4}, "not tables of one shape"),
        ({"teacher_topk_ids": [[1, 2]] * 4, "teacher_topk_logprobs": [[2, -1]] * 4}, "impossible value"),
        ({"teacher_topk_ids": [[1, -2]] * 4, "teacher_topk_logprobs": [[-2, -1]] * 4}, "impossible value"),
        ({"teacher_topk_ids": [[1, 1]] * 4, "teacher_topk_logprobs": [[-2, -1]] * 4}, "repeats an id"),
        ({"teacher_topk_ids": [[1, 2]] * 4, "teacher_topk_logprobs": [[-0.1, -0.2]] * 4}, "more than 1 together"),
        ({"teacher_topk_ids": [[9]] * 4, "teacher_topk_logprobs": [[-1]] * 4}, "not the sampled one"),
    ],
)
def test_wrong_words_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        content_of(tmp_path, TOKENS | fields)
