"""The kernels in plain torch against the dense twin, in float64: output, log-sum-exp and every gradient."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from support.attention_trees import comb, random_tree, star
from treepack.attention import naive as tiles
from treepack.attention.build_schedule import build_schedule
from treepack.attention.kernel_launch import AttentionInputs
from treepack.attention.reach import KeyReach, first_visible
from treepack.attention.reference import reference_attention, visible_pairs


def rows_of(length: int) -> Tensor:
    return torch.cat([random_tree(length, seed=1), random_tree(length, seed=2)])


SHORT = [rows_of(1), rows_of(130), rows_of(401), comb(70, 40, 6), torch.arange(1, 200)[None]]


# The star is long enough for key blocks in several shares, and slow.
@pytest.mark.parametrize(
    ("end", "granules"),
    [
        *itertools.product(SHORT, [1, 2, 4]),
        (star(150, 12, 70), 1),
        pytest.param(star(150, 40, 70), 4, marks=pytest.mark.slow),
    ],
)
def test_tiles_are_the_reference_in_output_and_every_gradient(end: Tensor, granules: int) -> None:
    generator = torch.Generator().manual_seed(0)
    (batch, length), schedule, scale = end.shape, build_schedule(end), 0.3
    q, do = torch.randn(2, batch, 4, length, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, batch, 2, length, 16, generator=generator, dtype=torch.float64)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    expected = reference_attention(q, k, v, end, scale=scale)
    gradients = torch.autograd.grad(expected, (q, k, v), do)
    with torch.no_grad():
        inputs = AttentionInputs(q, k, v, schedule, scale)
        out, lse = tiles.naive_forward(inputs, granules=granules)
        results = tiles.naive_backward(inputs, out, lse, do, granules=granules)
        # [B, 4, T, D] @ [B, 4, D, T] -> [B, 4, T, T]
        scores = q @ k.repeat_interleave(2, dim=1).mT * scale
        scores = scores.masked_fill(~visible_pairs(end)[:, None], -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1) / math.log(2))
    # In a row of single tokens dq and dk cancel to 0, so the tolerance is relative to `do` at least.
    size = float(do.norm())
    assert results[3] is None
    for ours, theirs in zip((out, *results[:3]), (expected, *gradients), strict=True):
        ours, theirs = ours.detach(), theirs.detach()
        assert (ours - theirs).norm() <= 1e-13 * max(float(theirs.norm()), size)


@pytest.mark.parametrize("reach", [None, KeyReach("window", 60), KeyReach("chunk", 90)])
@pytest.mark.parametrize(("sinks", "softcap"), [(True, None), (False, 2.0), (True, 2.0)])
def test_windows_sinks_caps_and_narrow_values(reach: KeyReach | None, sinks: bool, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    end, scale = rows_of(300), 0.4
    start = first_visible(end, reach)
    shapes = [(2, 4, 300, 24), (2, 2, 300, 24), (2, 2, 300, 16), (2, 4, 300, 16), (4,)]
    q, k, v, do, sink = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k, v, sink = (x.requires_grad_() for x in (q, k, v, sink))
    options = {"sinks": sink if sinks else None, "softcap": softcap}
    expected = reference_attention(q, k, v, end, scale=scale, start=start, **options)  # type: ignore[arg-type]
    leaves = (q, k, v, sink) if sinks else (q, k, v)
    gradients = torch.autograd.grad(expected, leaves, do)
    schedule = build_schedule(end, start)
    with torch.no_grad():
        inputs = AttentionInputs(q, k, v, schedule, scale, **options)  # type: ignore[arg-type]
        out, lse = tiles.naive_forward(inputs)
        results = tiles.naive_backward(inputs, out, lse, do)
    for ours, theirs in zip((out, *results), (expected.detach(), *gradients), strict=False):
        assert ours is not None
        assert (ours - theirs).norm() <= 1e-13 * max(float(theirs.norm()), 1.0)
    assert (results[3] is None) == (not sinks)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_reference_has_the_weights_of_one_softmax_with_the_sink(softcap: float | None) -> None:
    q, k, v = torch.randn(3, 1, 1, 3, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    end, start, sink = torch.tensor([[3, 3, 3]]), torch.tensor([[0, 0, 1]]), torch.tensor([0.7], dtype=torch.float64)
    out = reference_attention(q, k, v, end, start=start, sinks=sink, softcap=softcap)
    scores = q[0, 0, 2] @ k[0, 0, 1:].T * 8**-0.5  # token 2 sees the tokens 1 and 2
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = scores.exp() / (scores.exp().sum() + sink.exp())
    torch.testing.assert_close(out[0, 0, 2], weights @ v[0, 0, 1:])
