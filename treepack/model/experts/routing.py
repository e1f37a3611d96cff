"""Sort the (token, expert) pairs of a row by expert, so that each expert multiplies one block of rows.

top_k_index [[2, 0],        slots t * k + j:  0 1 2 3    experts of the slots:  2 0 0 1
             [0, 1]]        order [1, 2, 3, 0]           pairs, sorted:         0 0 1 2
                            token [0, 1, 1, 0]           ends  [2, 3, 4]        one past the last pair of each expert
                            place [[3, 0], [1, 2]]       the pair of each slot
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class ExpertRouting(NamedTuple):
    """The S <= T * k pairs of a row of T tokens with k experts each, sorted by expert, then by token.

    order  int64 [S], the slot t * k + j of each pair
    token  int64 [S], the token t of each pair
    place  int64 [T, k], the pair of each slot: the inverse of `order`; S for none
    ends   int32 [E], one past the last pair of each expert
    """

    order: Tensor
    token: Tensor
    place: Tensor
    ends: Tensor


def sort_pairs(top_k_index: Tensor, num_experts: int, *, num_pairs: int | None = None) -> ExpertRouting:
    """Return the pairs of `top_k_index`, integers [T, k] in [0, num_experts); does not wait for the GPU.

    With `num_pairs`, that many are below `num_experts`, and the others are slots without an expert.
    """
    experts, order = torch.sort(top_k_index.flatten(), stable=True)
    numbers = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    # sorted experts [0, 0, 1, 2], numbers [0, 1, 2] -> [2, 3, 4]
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    if num_pairs is not None:
        order, place = order[:num_pairs], place.clamp(max=num_pairs)
    return ExpertRouting(order, order // top_k_index.shape[1], place.view_as(top_k_index), ends)


class _SpreadTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routing: ExpertRouting) -> Tensor:
        ctx.routing = routing
        return hidden.index_select(0, routing.token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_pairs(grad, ctx.routing.place, grad.dtype), None


class _SortTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, routing: ExpertRouting) -> Tensor:
        ctx.routing = routing
        return slots.flatten()[routing.order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return with_none(grad, ctx.routing.place)[ctx.routing.place], None


class _CombineExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, routing: ExpertRouting, dtype: torch.dtype) -> Tensor:
        ctx.routing, ctx.dtype = routing, pairs.dtype
        return _sum_pairs(pairs, routing.place, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype).index_select(0, ctx.routing.token), None, None


# torch does not annotate `apply`.
_spread: Any = _SpreadTokens.apply
_sort: Any = _SortTokens.apply
_combine: Any = _CombineExperts.apply


def spread_tokens(hidden: Tensor, routing: ExpertRouting) -> Tensor:
    """Return a row [S, D] for each pair, of rows [T, D] of tokens; a token's gradients are added in one order."""
    rows: Tensor = _spread(hidden, routing)
    return rows


def sort_slots(slots: Tensor, routing: ExpertRouting) -> Tensor:
    """Return the numbers [S] of the pairs, of numbers [T, k] of the slots."""
    numbers: Tensor = _sort(slots, routing)
    return numbers


def combine_pairs(pairs: Tensor, routing: ExpertRouting, dtype: torch.dtype) -> Tensor:
    """Return `_sum_pairs` of rows [S, D], with its gradient."""
    total: Tensor = _combine(pairs, routing, dtype)
    return total


def _sum_pairs(pairs: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [T, D] in `dtype`: the sum over j of pairs[place[:, j]], from j = 0 on, in float32 or float64."""
    exact = torch.promote_types(pairs.dtype, torch.float32)
    pairs = with_none(pairs, place)
    total = pairs.index_select(0, place[:, 0]).to(exact)
    for j in range(1, place.shape[1]):
        total += pairs.index_select(0, place[:, j])
    return total.to(dtype)


def with_none(pairs: Tensor, place: Tensor) -> Tensor:
    """Return the rows of pairs [S, ...] with a row of zeros for slots without an expert, if `place` has some."""
    return pairs if place.numel() == len(pairs) else torch.cat([pairs, pairs.new_zeros(1, *pairs.shape[1:])])
