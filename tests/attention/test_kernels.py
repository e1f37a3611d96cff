"""The Triton kernels against the float64 reference: output and every gradient, in Triton's interpreter without a GPU.

Inputs and gradients are views into buffers of NaN, and `torch.empty` returns NaN. So the results show if a kernel reads
memory outside of the row, or leaves an element unwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support.attention_trees import chain, comb, ends_of, random_tree, star
from support.kernel_inputs import surrounded
from support.refusal import refusal
from support.strategies import trees

pytest.importorskip("triton")

from support.interpreter import poison  # noqa: F401
from treepack.attention.autograd import triton_attention
from treepack.attention.build_schedule import build_schedule
from treepack.attention.portable import forward as portable
from treepack.attention.portable.forward import LoopConfigs, PortableConfig
from treepack.attention.reference import reference_attention
from treepack.pack.plan.problem import PlanTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Inputs:
    """Arguments of attention, as leaves, and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    def widened(self) -> Inputs:
        q, k, v = (x.detach().double().requires_grad_() for x in (self.q, self.k, self.v))
        return Inputs(q, k, v, self.do.double())


def make_inputs(
    end: Tensor, *, heads: int = 2, kv_heads: int = 1, width: int = 16, dtype: torch.dtype = torch.float32
) -> Inputs:
    generator = torch.Generator().manual_seed(width)
    made = []  # q, k, v and do
    for count in (heads, kv_heads, kv_heads, heads):
        x = torch.randn(len(end), count, end.shape[1], width, generator=generator).to(DEVICE, dtype)
        made.append(surrounded(x))
    q, k, v, do = made
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do)


def run(inputs: Inputs, end: Tensor, scale: float | None = None) -> list[Tensor]:
    """Return output and gradients of the kernels."""
    schedule = build_schedule(end.to(DEVICE))
    out = triton_attention(inputs.q, inputs.k, inputs.v, schedule, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.do)]


def expect(inputs: Inputs, end: Tensor, scale: float | None = None) -> list[Tensor]:
    """Return output and gradients of the reference in float64."""
    wide = inputs.widened()
    out = reference_attention(wide.q, wide.k, wide.v, end.to(DEVICE), scale=scale)
    return [out.detach(), *torch.autograd.grad(out, (wide.q, wide.k, wide.v), wide.do)]


def check(inputs: Inputs, end: Tensor, *, tolerance: float = 1e-5, scale: float | None = None) -> None:
    results, expected = run(inputs, end, scale), expect(inputs, end, scale)
    for ours, theirs, like in zip(results, expected, (inputs.q, inputs.q, inputs.k, inputs.v), strict=True):
        assert ours.dtype == like.dtype
        assert ours.shape == like.shape
        assert ours.isfinite().all()
        # In a row of single tokens the gradients of q and k cancel to 0, so small ones are compared with `do`.
        yardstick = max(float(theirs.norm()), float(inputs.do.double().norm()) * 1e-2)
        assert float((ours.double() - theirs).norm()) <= tolerance * yardstick


@pytest.mark.parametrize("width", [8, 48, 128, 256])
def test_every_head_dimension(width: int) -> None:
    end = ends_of((20, -1), (15, 0), (14, 0), (11, 2), (10, -1))
    check(make_inputs(end, width=width), end)


@pytest.mark.parametrize(("block", "tile"), [(32, 64), (64, 32), (64, 128), (128, 32), (128, 64)])
def test_every_size_of_block_and_tile(monkeypatch: pytest.MonkeyPatch, block: int, tile: int) -> None:
    config = PortableConfig(block, tile, 4, 1)
    monkeypatch.setitem(portable.FLOAT32, 64, LoopConfigs(config, config, PortableConfig(block, min(tile, 64), 4, 1)))
    end = random_tree(150, seed=3)
    check(make_inputs(end), end)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (4, 1)])
def test_grouped_heads_and_batches(heads: int, kv_heads: int) -> None:
    end = torch.cat([random_tree(150, seed=0), comb(30, 20, 6), torch.arange(1, 151)[None].int()])
    check(make_inputs(end, heads=heads, kv_heads=kv_heads), end)


def test_heads_in_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "CACHE_BYTES", 1)  # no head fits, so each section has one key head
    end = random_tree(140, seed=4)
    check(make_inputs(end, heads=6, kv_heads=3), end)


@pytest.mark.parametrize("length", [1, 33, 127, 129, 256])
def test_rows_of_any_length(length: int) -> None:
    end = random_tree(length, seed=length)
    check(make_inputs(end), end)


@pytest.mark.parametrize("length", [1, 130])
def test_a_row_of_padding_gives_back_its_values(length: int) -> None:
    end = torch.arange(1, length + 1)[None]
    inputs = make_inputs(end)
    out, _, _, dv = run(inputs, end)
    assert torch.equal(out, inputs.v.detach().expand_as(out))
    torch.testing.assert_close(dv, inputs.do.sum(1, keepdim=True))
    check(inputs, end)


@pytest.mark.parametrize(
    "end",
    [star(128, 2, 128), star(64, 4, 64), star(96, 3, 32), chain(256), ends_of((32, -1), (128, 0), (96, 0), (128, -1))],
)
def test_intervals_that_end_at_the_edges_of_blocks(end: Tensor) -> None:
    check(make_inputs(end, heads=1), end)


@given(trees(max_leaves=8, max_size=30))
@settings(max_examples=8)
def test_any_tree_as_planners_make_them(tree: PlanTree) -> None:
    starts = np.append(0, tree.size.cumsum())
    end = torch.from_numpy(starts[tree.end].repeat(tree.size))[None]
    assume(end.numel() > 32)
    check(make_inputs(end, heads=2, width=40), end)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_ten_thousand_give_numbers_in_half_precision(dtype: torch.dtype) -> None:
    end = comb(20, 15, 3)
    inputs = make_inputs(end, dtype=dtype)
    inputs.q = (inputs.q.detach() * 100).requires_grad_()
    expected = expect(inputs, end, scale=20.0)
    assert (inputs.q @ inputs.k.mT).detach().abs().max() * 20 > 1e4
    results = run(inputs, end, scale=20.0)
    assert all(x.isfinite().all() for x in results)
    assert float((results[0].double() - expected[0]).norm()) <= 2**-7 * float(expected[0].norm())


def test_under_checkpointing_without_gradients_and_from_a_sum() -> None:
    end = random_tree(60, seed=9)
    inputs, schedule = make_inputs(end), build_schedule(end.to(DEVICE))
    leaves = inputs.q, inputs.k, inputs.v
    with torch.no_grad():
        silent = triton_attention(*leaves, schedule)
    plain = triton_attention(*leaves, schedule)
    again = checkpoint(triton_attention, *leaves, schedule, use_reentrant=False)
    assert isinstance(again, Tensor)
    assert torch.equal(plain, again)
    assert torch.equal(plain.detach(), silent)
    for ours, theirs in zip(
        torch.autograd.grad(again.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_rows_that_are_not_dense_are_copied() -> None:
    end = random_tree(40, seed=10)
    inputs = make_inputs(end)
    # .mT.contiguous().mT keeps the shape and makes the tokens, not D, dense in memory.
    inputs.k = inputs.k.detach().mT.contiguous().mT.requires_grad_()
    inputs.do = inputs.do.mT.contiguous().mT
    check(inputs, end)


def test_a_scale_or_schedule_that_does_not_fit_is_refused() -> None:
    end = random_tree(40, seed=11)
    inputs, schedule = make_inputs(end), build_schedule(end.to(DEVICE))
    for scale in (0.0, -1.0, float(np.nan)):
        assert "positive" in refusal(triton_attention, inputs.q, inputs.k, inputs.v, schedule, scale=scale)
    assert "schedule of these rows" in refusal(
        triton_attention, inputs.q[:, :, 1:], inputs.k[:, :, 1:], inputs.v[:, :, 1:], schedule
    )
    assert "schedule of these rows" in refusal(triton_attention, inputs.q, inputs.k, inputs.v, schedule.to("meta"))
