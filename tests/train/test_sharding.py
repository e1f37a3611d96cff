"""Which weights are gathered when: the embedding for its lookup only, and the output layer until its backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from support.hybrid_models import HARD
from support.oracle_model import tiny_config
from treepack.model.forward import WholeRows
from treepack.model.layers import find_layers
from treepack.model.load import load_model
from treepack.train.options import TrainOptions
from treepack.train.sharding import load_sharded

CPU = torch.device("cpu")


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_gathered_for_its_lookup_only(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tmp_path / "config.json", tie_word_embeddings=tied)
    loaded = load_sharded(config, TrainOptions(device="cpu"), CPU)
    words, output = loaded.causal.get_input_embeddings(), loaded.causal.get_output_embeddings()
    seen: dict[str, tuple[bool, bool]] = {}

    def note(when: str) -> None:
        seen[when] = tuple(not isinstance(each.weight, DTensor) for each in (words, output))  # type: ignore[assignment]

    def look(_: Any, __: Any) -> None:
        note("forward")

    layer = find_layers(loaded.causal)[0]
    layer.register_forward_pre_hook(look)
    layer.register_full_backward_pre_hook(lambda *_: note("backward"))
    loss = float(WholeRows(loaded).backward(HARD).loss)
    assert seen == {"forward": (tied, True), "backward": (tied, True)}
    # One process has the same loss and gradients.
    alone = load_model(config)
    assert float(WholeRows(alone).backward(HARD).loss) == pytest.approx(loss, rel=1e-6)
    for ours, theirs in zip(loaded.model.parameters(), alone.model.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad, rtol=1e-5, atol=1e-6)
