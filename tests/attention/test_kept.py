"""Attention outputs kept over a checkpointed forward pass: one computation, and gradients equal in every bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.attention_trees import random_tree
from support.oracle_model import Sample, make_row

pytest.importorskip("triton")

from support import interpreter  # noqa: F401
from treepack.attention.autograd import KeptOutputs, triton_attention
from treepack.attention.build_schedule import build_schedule
from treepack.attention.portable import forward as portable
from treepack.attention.schedule import Schedule
from treepack.data.batch import make_batch
from treepack.model.forward import row_loss
from treepack.model.layers import checkpoint_layers
from treepack.model.load import load_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLES = [Sample((1, 2, 3, 4), (0.0, 1.0, 1.0, 1.0)), Sample((1, 2, 5), (0.0, 1.0, 2.0))]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every run of the forward kernel."""
    seen: list[int] = []
    forward = portable.portable_forward

    def counted(*args: Any) -> tuple[Tensor, Tensor]:
        seen.append(1)
        return forward(*args)

    monkeypatch.setattr(portable, "portable_forward", counted)
    return seen


class Layer(nn.Module):
    """Attention between two matrix products, as in a layer of a model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inward, self.outward = (nn.Parameter(torch.randn(16, 16, generator=generator)) for _ in range(2))

    def forward(self, x: Tensor, schedule: Schedule, kept: KeptOutputs | None) -> Tensor:
        heads = (x @ self.inward)[:, None]
        out = triton_attention(heads, heads, heads, schedule, kept=None if kept is None else (kept, self))
        return x + out[:, 0] @ self.outward


def gradients(layers: list[Layer], x: Tensor, schedule: Schedule, kept: KeptOutputs | None) -> list[Tensor]:
    """Return the gradients of the input and of every weight, with each layer under checkpointing."""
    hidden = leaf = x.clone().requires_grad_()
    for layer in layers:
        output: Any = checkpoint(layer, hidden, schedule, kept, use_reentrant=False)
        hidden = output
    # By identity, because the two layers may be one module.
    weights = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    return list(torch.autograd.grad(hidden.square().sum(), [leaf, *weights]))


@pytest.mark.parametrize("shared", [False, True], ids=["own modules", "one module twice"])
def test_recomputation_takes_what_the_forward_pass_kept(launches: list[int], shared: bool) -> None:
    layers = [Layer(0).to(DEVICE), Layer(1).to(DEVICE)]
    layers = [layers[0], layers[0]] if shared else layers
    end = random_tree(70, seed=3).to(DEVICE)
    x = torch.randn(1, 70, 16, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    schedule = build_schedule(end)
    expected = gradients(layers, x, schedule, None)
    assert len(launches) == 4
    launches.clear()
    results = gradients(layers, x, schedule, KeptOutputs())
    assert len(launches) == (4 if shared else 2), "a module that occurs twice is computed again"
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_without_a_backward_pass_nothing_is_taken(launches: list[int]) -> None:
    layer, end = Layer(0).to(DEVICE), random_tree(33, seed=1).to(DEVICE)
    kept, schedule = KeptOutputs(), build_schedule(end)
    x = torch.randn(1, 33, 16).to(DEVICE)
    with torch.no_grad():
        assert torch.equal(layer(x, schedule, kept), layer(x, schedule, kept))
        assert not torch.equal(layer(x, schedule, kept), layer(2 * x, schedule, kept))
    assert len(launches) == 4


def test_a_model_under_checkpointing_runs_its_attention_once(launches: list[int], tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(tmp_path / "config.json", attention="triton", dtype=torch.float32, device=DEVICE)
    loaded.model.train()
    batch = make_batch(make_row(SAMPLES))
    expected = torch.autograd.grad(row_loss(loaded, batch), list(loaded.model.parameters()))
    launches.clear()
    checkpoint_layers(loaded.model)
    results = torch.autograd.grad(row_loss(loaded, batch), list(loaded.model.parameters()))
    assert len(launches) == 2
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
