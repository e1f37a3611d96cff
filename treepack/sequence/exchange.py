"""Exchange of tokens and heads among the ranks that share a row, with gradients.

    rank 0   tokens 0 .. 3, heads a b c d   --exchange-->   tokens 0 .. 7, heads a b      one all-to-all
    rank 1   tokens 4 .. 7, heads a b c d   <--exchange--   tokens 0 .. 7, heads c d

The backward pass of one direction is the other one. Two further functions join values of a loss. After them, every rank
computes the same loss; in the backward pass each rank keeps the part of its values, so gradients of parameters are
sums over the ranks.

    gather_values   [m] of this rank at their places of n --> [n] of all ranks
    sum_values      the sum over the ranks
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed


def split_evenly(count: int, parts: int) -> list[int]:
    """Return parts + 1 edges of `count` things in parts whose sizes differ by at most 1."""
    # 10 in 4 parts -> [0, 2, 5, 7, 10]
    return [count * part // parts for part in range(parts + 1)]


class _Exchange(torch.autograd.Function):
    """Exchange in one direction; in the backward pass in the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[int], heads: list[int], group: Any, gathers_tokens: bool) -> Tensor:
        ctx.options = tokens, heads, group, not gathers_tokens
        return _exchange(x, tokens, heads, group, gathers_tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _exchange(grad, *ctx.options), None, None, None, None


def _exchange(x: Tensor, tokens: list[int], heads: list[int], group: Any, gathers_tokens: bool) -> Tensor:
    """Send blocks [t, h, ...] of own tokens and heads of each rank, or blocks of tokens of each rank and own heads."""
    rank, inner = distributed.get_rank(group), x.shape[2:]
    sizes, widths = ([end - begin for begin, end in pairwise(edges)] for edges in (tokens, heads))
    own, width = sizes[rank], inner.numel()
    by_heads = [own * each * width for each in widths]  # numbers of own tokens, by the rank that has the heads
    by_tokens = [each * widths[rank] * width for each in sizes]  # numbers of own heads, by the rank of the tokens
    edges = list(zip(pairwise(heads), widths, strict=True))
    if gathers_tokens:
        sent, got = x.new_empty(sum(by_heads)), x.new_empty(tokens[-1], widths[rank], *inner)
        for block, ((begin, end), count) in zip(torch.split(sent, by_heads), edges, strict=True):
            block.view(own, count, *inner).copy_(x[:, begin:end])
        distributed.all_to_all_single(got.view(-1), sent, by_tokens, by_heads, group=group)
        return got
    received, whole = x.new_empty(sum(by_heads)), x.new_empty(own, heads[-1], *inner)
    distributed.all_to_all_single(received, x.contiguous().view(-1), by_heads, by_tokens, group=group)
    for block, ((begin, end), count) in zip(torch.split(received, by_heads), edges, strict=True):
        whole[:, begin:end].copy_(block.view(own, count, *inner))
    return whole


def exchange(x: Tensor, tokens: list[int], heads: list[int], group: Any, *, gathers_tokens: bool) -> Tensor:
    """Return all tokens of this rank's heads [T, h, ...] from its tokens with all heads [t, H, ...]; or back.

    Args:
        x: the own tokens, or the own heads.
        tokens: the edges of the tokens of each rank.
        heads: the edges of the heads of each rank.
        group: the process group.
        gathers_tokens: False for the way back.
    """
    exchanged: Tensor = _Exchange.apply(x, tokens, heads, group, gathers_tokens)  # type: ignore[no-untyped-call]
    return exchanged


class _GatherValues(torch.autograd.Function):
    """Values of all ranks at their places; the gradient is that of the own values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(count, *values.shape[1:]).index_copy_(0, places, values)
        distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def gather_values(values: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
    """Return [count, ...] values, of which this rank has `values` [m, ...] at `places` int64 [m], others the rest."""
    whole: Tensor = _GatherValues.apply(values, places, count, group)  # type: ignore[no-untyped-call]
    return whole


def sum_values(values: Tensor, group: Any) -> Tensor:
    """Return the sum of `values` over the ranks; the gradient is that of the own part."""
    place = torch.zeros(1, dtype=torch.int64, device=values.device)  # the same one on all ranks
    return gather_values(values[None], place, 1, group).sum(0)  # [0] is a view, about which FSDP2 warns
