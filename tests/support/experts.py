"""A small module of gated experts, its slow twin, a row of routed tokens, and recorded routes of a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from treepack.data.batch import Batch
from treepack.model.experts.interface import compute_experts


def relative(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected.double()).detach().norm() / expected.double().detach().norm())


def random_routes(batch: Batch) -> Tensor:
    """Return routes of a row, uint8 [T, 2 layers, 2 of 4 experts], missing for its fourth token and its padding."""
    generator = torch.Generator().manual_seed(batch.num_tokens)
    scores = torch.rand(len(batch.input_ids), 2, 4, generator=generator)
    routes = scores.argsort(-1)[..., :2].to(torch.uint8)
    routes[3:4] = routes[batch.num_tokens :] = 255
    return routes


class Tiny(nn.Module):
    """Gated experts as transformers stores them, in float32."""

    def __init__(self, count: int = 4, size: int = 64, width: int = 128) -> None:
        super().__init__()
        self.num_experts, self.act_fn = count, nn.SiLU()
        generator = torch.Generator().manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * width, size, generator=generator) / size**0.5)
        self.down_proj = nn.Parameter(torch.randn(count, size, width, generator=generator) / width**0.5)

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return silu(gate) * up

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = compute_experts(self, hidden, index, weights)
        return out


def exact(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(hidden)
    for e in range(module.num_experts):
        token, slot = (index == e).nonzero(as_tuple=True)
        gate, up = (hidden[token] @ module.gate_up_proj[e].double().t()).chunk(2, -1)
        rows = (silu(gate) * up) @ module.down_proj[e].double().t()
        out = out.index_add(0, token, rows * weights[token, slot, None])
    return out


def routed(tokens: int, count: int = 4, size: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, two experts of each token, their weights, and an output gradient; expert 1 has no token."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, count, generator=generator)
    scores[:, 0] += 0.5  # expert 0 has more than a tile of tokens
    scores[:, 1] = -1
    hidden, grad = torch.randn(2, tokens, size, generator=generator)
    return hidden, scores.topk(2, -1).indices, torch.rand(tokens, 2, generator=generator), grad


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN, so that an element that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
