"""The kernels in plain torch against the dense twin, in float64: output, log-sum-exp and every gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from support.attention_trees import comb, random_tree
from treepack.attention import naive as tiles
from treepack.attention.reference import reference_attention, visible_pairs
from treepack.attention.schedule import build_schedule


def rows_of(length: int) -> Tensor:
    return torch.cat([random_tree(length, seed=1), random_tree(length, seed=2)])


@pytest.mark.parametrize("end", [rows_of(1), rows_of(130), rows_of(401), comb(70, 40, 6), torch.arange(1, 200)[None]])
@pytest.mark.parametrize("granules", [1, 2, 4])
def test_tiles_are_the_reference_in_output_and_every_gradient(end: Tensor, granules: int) -> None:
    generator = torch.Generator().manual_seed(0)
    (batch, length), schedule, scale = end.shape, build_schedule(end), 0.3
    q, do = torch.randn(2, batch, 4, length, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, batch, 2, length, 16, generator=generator, dtype=torch.float64)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    expected = reference_attention(q, k, v, end, scale=scale)
    gradients = torch.autograd.grad(expected, (q, k, v), do)
    with torch.no_grad():
        out, lse = tiles.forward(q, k, v, schedule, scale, granules=granules)
        results = tiles.backward(q, k, v, out, lse, do, schedule, scale, granules=granules)
        # [B, 4, T, D] @ [B, 4, D, T] -> [B, 4, T, T]
        scores = q @ k.repeat_interleave(2, dim=1).mT * scale
        scores = scores.masked_fill(~visible_pairs(end)[:, None], -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1) / math.log(2))
    # In a row of single tokens dq and dk cancel to 0, so the tolerance is relative to `do` at least.
    size = float(do.norm())
    for ours, theirs in zip((out, *results), (expected, *gradients), strict=True):
        ours, theirs = ours.detach(), theirs.detach()
        assert (ours - theirs).norm() <= 1e-13 * max(float(theirs.norm()), size)
