"""The recipes of docs/your-trainer.md for slime and torchtitan run as the page describes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from support.oracle_model import tiny_model
from support.paths import ROOT
from treepack import register_attention
from treepack.attention.reference import reference_attention


def recipe(heading: str, name: str) -> Any:
    """Return the function `name` from the programs below a heading."""
    section = (ROOT / "docs" / "your-trainer.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    programs = re.findall(r"^```py\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert programs
    assert all(len(program.splitlines()) <= 20 for program in programs)
    names: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, "docs/your-trainer.md", "exec"), names)
    return names[name]


def samples() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 50, 9) for _ in range(3)]
    return [np.concatenate([prompts[i % 3], draw.integers(0, 50, 1 + i % 4)]) for i in range(11)]


def test_the_schedule_for_slime_gives_every_sample_to_one_micro_batch_of_one_rank() -> None:
    tokens = samples()
    partitions, indices, count = recipe("slime", "build_schedule")(tokens, 40, 2)
    assert sorted(sample for partition in partitions for sample in partition) == list(range(len(tokens)))
    for partition, batches in zip(partitions, indices, strict=True):
        assert len(batches) == count
        assert [place for batch in batches for place in batch] == list(range(len(partition)))
        assert all(sum(len(tokens[partition[place]]) for place in batch) <= 40 for batch in batches)


def test_the_hook_for_slime_returns_the_values_of_each_answer() -> None:
    register_attention()
    model = tiny_model("qwen3")
    tokens, lengths = [torch.from_numpy(each) for each in samples()], [1 + i % 4 for i in range(11)]
    model.set_attn_implementation("treepack_auto")
    logprobs, entropies = recipe("slime", "get_log_probs_and_entropy")(model, tokens, lengths, 0.7)
    model.set_attn_implementation("sdpa")
    for ids, length, found, entropy in zip(tokens, lengths, logprobs, entropies, strict=True):
        expected = torch.log_softmax(model(ids[None]).logits[0] / 0.7, -1)[-length - 1 : -1]
        assert found.tolist() == pytest.approx(expected.gather(1, ids[-length:, None])[:, 0].tolist(), rel=1e-9)
        assert entropy.tolist() == pytest.approx((-expected.exp() * expected).sum(-1).tolist(), rel=1e-9)


def test_the_mask_for_torchtitan_is_tree_attention() -> None:
    # Two rows of 6 tokens: a chain with two branches, and two trees.
    subtree_end = torch.tensor([[6, 6, 4, 4, 6, 6], [3, 2, 3, 6, 6, 6]])
    query, key, value = torch.randn(3, 2, 4, 6, 16, generator=torch.Generator().manual_seed(0))
    found = flex_attention(query, key, value, block_mask=recipe("torchtitan", "tree_mask")(subtree_end))
    expected = reference_attention(query, key, value, subtree_end)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
