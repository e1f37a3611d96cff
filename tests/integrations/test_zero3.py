"""Weights that ZeRO-3 of DeepSpeed has sharded over two CPU ranks get the gradients of every sequence alone.

DeepSpeed has no wheel, so .venv-integrations lacks it: `pip install --no-build-isolation deepspeed` before.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.online_ranks import SAMPLES, SHARES, loss_of
from support.oracle_model import alone, gradients, tiny_model, worst_error
from support.oracle_online import MemoryBatch, each_alone

pytestmark = pytest.mark.integrations
pytest.importorskip("deepspeed")


def mean_of_ranks() -> dict[str, Tensor]:
    found = []
    for share in SHARES:
        model = tiny_model("qwen3")
        batch = MemoryBatch(share, [[True] * len(each) for each in share])
        torch.autograd.backward(loss_of(*each_alone(model, batch, 0.5)))
        found.append(gradients(model))
    return {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}


def test_sharded_weights_get_the_gradients_of_every_sequence_alone(tmp_path: Path) -> None:
    from support.zero3_ranks import run_sharded

    found = run_sharded(tmp_path)
    of_ranks = [alone(tiny_model("qwen3"), samples)[1] for samples in SAMPLES]
    loss = {name: (of_ranks[0][name] + of_ranks[1][name]) / 2 for name in of_ranks[0]}
    # DeepSpeed computes in float32, whose rounding is 6e-8.
    assert worst_error(found["loss"], loss) < 1e-5
    assert worst_error(found["one row"], mean_of_ranks()) < 1e-5
    assert worst_error(found["kept rows"], mean_of_ranks()) < 1e-5
    assert "DeepSpeed reduces gradients once per backward pass, but 5 rows" in found["recomputed rows"]
