"""Batches in memory on two ranks with one and five rows: the gradients are the mean over both ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.online_ranks import SAMPLES, SHARES, WRAPPERS, loss_of, run_wrapped, tree_model
from support.oracle_model import alone, gradients, tiny_model, worst_error
from support.oracle_online import MemoryBatch, each_alone
from treepack.online import agree_on_rows


def of_rank(rank: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities of a rank's sequences, and the gradients of its loss, every sequence alone."""
    batch = MemoryBatch(SHARES[rank], [[True] * len(each) for each in SHARES[rank]])
    model = tiny_model("qwen3")
    logprobs, entropies = each_alone(model, batch, 0.5)
    torch.autograd.backward(loss_of(logprobs, entropies))
    return logprobs, gradients(model)


def mean(*of_ranks: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in of_ranks]).mean(0) for name in of_ranks[0]}


def test_a_process_alone_agrees_with_itself() -> None:
    assert agree_on_rows(tree_model(), 3) == 3
    assert agree_on_rows(tree_model(), 0) == 1


@pytest.mark.slow
def test_ranks_with_one_and_five_rows_train_as_one_through_every_wrapper(tmp_path: Path) -> None:
    logprobs, of_each = zip(*[of_rank(rank) for rank in range(2)], strict=True)
    expected = mean(*of_each)
    losses = [alone(tiny_model("qwen3"), samples)[1] for samples in SAMPLES]
    zero = {name: torch.zeros_like(gradient) for name, gradient in losses[0].items()}
    for rank, found in enumerate(run_wrapped(2, tmp_path, list(WRAPPERS))):
        for name, outcome in found.items():
            where = f"{name} on rank {rank}"
            assert outcome["rows"] == [1, 5][rank]
            assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(outcome["old"], logprobs[rank], strict=True))
            for step in ("first", "second"):
                assert worst_error(outcome[step], expected) < 1e-9, where
            if "accumulated" in outcome:
                assert outcome["exchanges"] == 2, where  # one for each of two backward passes of five rows
                before, after = outcome["accumulated"]
                assert worst_error(before, of_each[rank]) < 1e-9, where  # not exchanged yet
                assert worst_error(after, {k: 2 * v for k, v in expected.items()}) < 1e-9, where
            assert worst_error(outcome["loss"], mean(*losses)) < 1e-9, where
            assert worst_error(outcome["padding"], mean(zero, losses[1])) < 1e-9, where
