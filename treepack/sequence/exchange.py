"""Exchange of tokens and heads among the ranks that share a row, with gradients.

    rank 0   tokens 0 .. 3, heads a b c d   --exchange-->   tokens 0 .. 7, heads a b      one all-to-all
    rank 1   tokens 4 .. 7, heads a b c d   <--exchange--   tokens 0 .. 7, heads c d

The backward pass of one direction is the other one. Two further functions join values of a loss. After them, every rank
computes the same loss; in the backward pass each rank keeps the part of its own values, so gradients of parameters are
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


# Defined without torch.library.custom_op, as in `attention.operator`. torch.compile may trace it.
_LIBRARY: Any = torch.library.Library("treepack", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "exchange(Tensor x, SymInt tokens, SymInt heads, bool gathers_tokens, str group, Tensor? after) -> Tensor"
)


def _exchange(x: Tensor, tokens: int, heads: int, gathers_tokens: bool, group: str, after: Tensor | None) -> Tensor:
    """Send blocks [t, h, ...] of own tokens and heads of each rank, or blocks of tokens of each rank and own heads."""
    ranks, inner = distributed.distributed_c10d._resolve_process_group(group), x.shape[2:]  # type: ignore[attr-defined, arg-type]
    rank, size = distributed.get_rank(ranks), distributed.get_world_size(ranks)
    whole = (tokens, x.shape[1]) if gathers_tokens else (len(x), heads)
    sizes, widths = ([end - begin for begin, end in pairwise(split_evenly(count, size))] for count in whole)
    own, width = sizes[rank], inner.numel()
    by_heads = [own * each * width for each in widths]  # numbers of own tokens, by the rank that has the heads
    by_tokens = [each * widths[rank] * width for each in sizes]  # numbers of own heads, by the rank of the tokens
    blocks, result = x.new_empty(sum(by_heads)), x.new_empty(tokens, heads, *inner)
    # Of each rank that has heads: its block of the flat numbers, and its heads of the own tokens
    parts = torch.split((x if gathers_tokens else result)[:own], widths, 1)
    pairs = zip(torch.split(blocks, by_heads), parts, strict=True)
    if gathers_tokens:
        for block, part in pairs:
            block.view_as(part).copy_(part)
        distributed.all_to_all_single(result.view(-1), blocks, by_tokens, by_heads, group=ranks)
        return result
    distributed.all_to_all_single(blocks, x.contiguous().view(-1), by_heads, by_tokens, group=ranks)
    for block, part in pairs:
        part.copy_(block.view_as(part))
    result[own:] = 0  # the one token of a rank without tokens
    return result


def _result_shape(x: Tensor, tokens: int, heads: int, *_: Any) -> Tensor:
    """Return a tensor without values that has the shape of the result of `_exchange`."""
    return x.new_empty(tokens, heads, *x.shape[2:])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, _, gathers_tokens, group, _ = inputs
    ctx.options = *x.shape[:2], not gathers_tokens, group
    ctx.save_for_backward(output)


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (output,) = ctx.saved_tensors
    return torch.ops.treepack.exchange(grad, *ctx.options, output), None, None, None, None, None


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("exchange", _exchange, _device)
torch.library.register_fake("treepack::exchange", _result_shape, lib=_LIBRARY)
torch.library.register_autograd("treepack::exchange", _exchange_back, setup_context=_save_for_backward, lib=_LIBRARY)


def exchange(
    x: Tensor, tokens: int, heads: int, group: Any, *, gathers_tokens: bool, after: Tensor | None = None
) -> Tensor:
    """Return all tokens of this rank's heads [T, h, ...], of its own tokens with all heads [t, H, ...]; or back.

    All ranks must exchange in one order. A compiler may move an exchange across others that it does not depend on, on
    one rank only. So it depends on `after`, and its backward pass, which may follow a recomputation, on its result.

    Args:
        x: the own tokens, or the own heads. A rank without tokens has one, which no rank gets.
        tokens, heads: of the result.
        group: the process group.
        gathers_tokens: False for the way back.
        after: the result of the exchange before this one, if `x` is not computed from it alone.
    """
    exchanged: Tensor = torch.ops.treepack.exchange(x, tokens, heads, gathers_tokens, group.group_name, after)
    return exchanged


def gather_values(values: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
    """Return [count, ...] values, of which this rank has `values` [m, ...] at `places` int64 [m], others the rest."""
    own = values.detach()
    whole = own.new_zeros(count, *own.shape[1:]).index_copy_(0, places, own)
    distributed.all_reduce(whole, group=group)
    return whole.index_copy(0, places, values)  # the same values, with their graph


def sum_values(values: Tensor, group: Any) -> Tensor:
    """Return the sum of `values` over the ranks."""
    place = torch.full((1,), distributed.get_rank(group), device=values.device)
    return gather_values(values[None], place, distributed.get_world_size(group), group).sum(0)
