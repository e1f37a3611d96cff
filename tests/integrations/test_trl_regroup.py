"""Micro-batches of TRL are cut again inside an optimiser step, siblings together."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from treepack.integrations.trl_policy import regroup


def micro_batches(tokens: list[list[int]], size: int) -> list[dict[str, Any]]:
    """Return micro-batches of `size` samples; a sample is a prompt of one token with padding on its left."""
    batches: list[dict[str, Any]] = []
    for start in range(0, len(tokens), size):
        ids = torch.tensor([[0, *each] for each in tokens[start : start + size]])
        batches.append(
            {
                "prompt_ids": ids[:, :2],
                "prompt_mask": torch.tensor([[0, 1]] * size),
                "completion_ids": ids[:, 2:],
                "completion_mask": torch.ones(size, 2, dtype=torch.int64),
                "names": [f"{start + i}" for i in range(size)],
                "advantages": torch.arange(start, start + size),
                "num_items_in_batch": torch.tensor(len(tokens)),
                "images": None,
            }
        )
    return batches


samples = st.lists(st.integers(1, 3), min_size=3, max_size=3)


@given(
    st.integers(1, 3).flatmap(
        lambda size: st.tuples(st.just(size), st.lists(samples, min_size=4 * size, max_size=4 * size))
    ),
    st.sampled_from([1, 2, 4]),
)
def test_every_sample_stays_in_its_optimiser_step(case: tuple[int, list[list[int]]], window: int) -> None:
    size, tokens = case
    batches = micro_batches(tokens, size)
    result = regroup(batches, window)
    assert [len(batch["names"]) for batch in result] == [size] * len(batches)
    for start in range(0, len(batches), window):
        before, after = (
            sorted(int(value) for batch in each[start : start + window] for value in batch["advantages"])
            for each in (batches, result)
        )
        assert before == after


def test_all_columns_move_together_and_siblings_meet() -> None:
    batches = micro_batches([[2, 1, 1], [1, 1, 1], [1, 1, 3], [2, 1, 2]], 2)
    first, second = regroup(batches, 2)
    assert first["completion_ids"].tolist() == [[1, 1], [1, 3]]
    assert (first["names"], first["advantages"].tolist()) == (["1", "2"], [1, 2])
    assert second["prompt_ids"].tolist() == [[0, 2], [0, 2]]
    assert (second["names"], second["advantages"].tolist()) == (["0", "3"], [0, 3])
    assert (int(first["num_items_in_batch"]), first["images"]) == (4, None)
