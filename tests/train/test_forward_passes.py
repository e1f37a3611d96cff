"""Passes without gradients whose memory runs out get smaller, stay smaller, and have the same results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from support.packed_objectives import packed_model
from support.strategies import make
from support.value_models import critic
from treepack.errors import TreepackError
from treepack.fit.rung import RunPlan
from treepack.pack.plan.planning import plan_rows
from treepack.train.critic import Critic, critic_values
from treepack.train.forward_passes import ForwardPasses, forward_plan
from treepack.train.scoring_options import CriticOptions, ScoreOptions
from treepack.trie.builders.in_memory import build_trie


@dataclass(frozen=True)
class Sized:
    row_id: int
    num_tokens: int


def run(fits: Any, sizes: list[int], options: ScoreOptions) -> tuple[list[int], list[tuple[int, int | None, int]]]:
    """Return the rows in the order of their results, and tokens, pieces and chunk of every pass that was tried."""
    tried = []

    def compute(rows: Sequence[Sized], plan: RunPlan, _: Any) -> Sequence[int]:
        total = sum(row.num_tokens for row in rows)
        tried.append((total, plan.carry, plan.loss_chunk))
        if not fits(min(total, plan.carry or total), plan.loss_chunk):
            raise torch.OutOfMemoryError
        return [row.num_tokens for row in rows]

    rows, plan = [Sized(i, size) for i, size in enumerate(sizes)], forward_plan(options, torch.device("cpu"))
    found = list(ForwardPasses(packed_model("qwen3"), plan).results(rows, compute))
    assert [row.row_id for row, _ in found] == list(range(len(sizes)))
    return [size for _, size in found], tried


def test_a_pass_is_cut_then_pieces_get_shorter_then_chunks_of_logits() -> None:
    sizes = [900, 800, 700, 20_000, 600, 500]
    found, tried = run(lambda tokens, _: tokens <= 3000, sizes, ScoreOptions(pass_tokens=5000))
    assert found == sizes
    assert tried == [
        (2400, None, 2048),
        (20_000, None, 2048),
        (20_000, 9984, 2048),
        (20_000, 4992, 2048),
        (20_000, 2432, 2048),
        (1100, 2432, 2048),
    ]
    options = ScoreOptions(pass_tokens=5000)
    found, tried = run(lambda tokens, chunk: tokens <= 1000 or chunk < 200, [900, 800, 1700], options)
    assert found == [900, 800, 1700]
    assert [tokens for tokens, _, _ in tried[:5]] == [3400, 1700, 900, 800, 1700]
    assert [chunk for _, _, chunk in tried[-4:]] == [1024, 512, 256, 128]


def test_the_end_names_the_smallest_plan_and_other_errors_are_not_tried_again() -> None:
    smallest = "pieces of 1,408 tokens, not joined, logits of 64 targets"
    with pytest.raises(
        TreepackError,
        match=rf"^out of memory in row 0 of 3,000 tokens with the smallest plan \({smallest}\)"
        r", and [\d.]+ GiB are free; compute with",
    ):
        run(lambda *_: False, [3000], ScoreOptions(pass_tokens=1))

    def fails(*_: Any) -> bool:
        raise RuntimeError("another reason")

    with pytest.raises(RuntimeError, match="another reason"):
        run(fails, [900], ScoreOptions())


def test_a_pass_in_which_other_ranks_wait_does_not_run_again() -> None:
    sharded = replace(packed_model("qwen3"), root=torch.nn.Identity())

    def fails(*_: Any) -> list[int]:
        raise torch.OutOfMemoryError

    passes = ForwardPasses(sharded, forward_plan(ScoreOptions(pass_tokens=1), torch.device("cpu")))
    with pytest.raises(
        TreepackError,
        match=r"^out of memory in row 0 of 3,000 tokens with whole rows, .* targets, and other ranks wait, "
        r"and [\d.]+ GiB are free;",
    ):
        list(passes.results([Sized(0, 3000)], fails))


def test_values_of_a_critic_are_equal_in_passes_that_had_to_be_cut() -> None:
    trie = build_trie([make(f"t{i}", [i, *range(1, 8)], reward=0.0) for i in range(6)], share="all")
    members = plan_rows(trie, capacity=8, method="contiguous").members()
    loaded = critic("qwen3")
    asked = Critic(trie, members, loaded, CriticOptions(pass_tokens=48))
    expected, sizes = list(critic_values(asked)), list[int]()

    def check(_: Any, __: Any, options: Any) -> None:
        sizes.append(options["input_ids"].numel())
        if sizes[-1] > 16:
            raise torch.OutOfMemoryError

    hook = loaded.causal.base_model.register_forward_pre_hook(check, with_kwargs=True)
    found = list(critic_values(replace(asked)))
    hook.remove()
    assert sizes == [48, 24, 8, 8, 8, 8, 8, 8]
    for (places, values), (other, own) in zip(expected, found, strict=True):
        assert places.tolist() == other.tolist()
        np.testing.assert_allclose(own, values, rtol=1e-12)
