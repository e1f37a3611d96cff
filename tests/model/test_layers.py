"""Layers that run again in the backward pass: those that draw random numbers draw the same ones again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treepack.model import layers
from treepack.model.layers import AdaptedLayers, adapted_forward
from treepack.model.offload import Offload


class Layer(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, states: Tensor, scale: float = 1.0) -> Tensor:
        return nn.functional.dropout((states @ self.weight * scale).exp(), self.rate)


def steps(rates: list[float], adapted: AdaptedLayers | None) -> list[Tensor]:
    """Gradients of the layers with these rates of dropout, for three passes of one random sequence."""
    torch.manual_seed(0)
    stack = [Layer(rate) for rate in rates]
    calls: list[Any] = [
        layer if adapted is None else adapted_forward(layer, i, adapted) for i, layer in enumerate(stack)
    ]
    gradients = []
    for _ in range(3):
        states = torch.randn(5, 4)
        for call in calls:
            states = call(states, scale=0.5)
        torch.autograd.backward(states.sum())
        for layer in stack:
            assert layer.weight.grad is not None
            gradients.append(layer.weight.grad.clone())
            layer.weight.grad = None
    return gradients


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_random_layers_repeat_their_numbers_and_others_keep_no_states(
    monkeypatch: pytest.MonkeyPatch, is_offloaded: bool
) -> None:
    rates = [0.0, 0.5, 0.0]
    offload = Offload(torch.device("cpu")) if is_offloaded else None
    adapted = AdaptedLayers((), len(rates), offload)
    for own, recomputed in zip(steps(rates, None), steps(rates, adapted), strict=True):
        assert torch.equal(own, recomputed)
    assert adapted.not_random == {0, 2}
    reads, states = [], layers._generator_states

    def counted() -> tuple[Tensor, ...]:
        reads.append(1)
        return states()

    monkeypatch.setattr(layers, "_generator_states", counted)
    steps(rates, adapted)
    assert len(reads) == 6  # before and after each pass of the random layer
