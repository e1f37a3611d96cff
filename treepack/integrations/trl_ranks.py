"""Ranks of a trainer that compute rows together, though each has samples of its own.

    rank 0: samples a b --join_padded-->   a b c d on both ranks   --rows that the ranks share-->   values of a b c d
    rank 1: samples c d                                            rank 0: values of a b   <--own_values--

In the backward pass `own_values` joins the gradients of all ranks. So every rank runs the backward passes of all rows,
and has parts of the gradients of all samples, whose sum over the ranks is the sum of the gradients that each rank alone
would have. The mean over all ranks, which trainers take, is therefore the same as without sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from treepack.errors import TreepackError


class _OwnSamples(NamedTuple):
    """The samples of this rank among those of all ranks of a group: rows begin .. end - 1, of `width` tokens."""

    begin: int
    end: int
    width: int


def sequence_group(name: str, size: int) -> Any:
    """Return the group of `size` neighbouring ranks with this one; None for 1. All ranks must call it.

    Raises:
        TreepackError: the number of ranks is not a multiple of `size`.
    """
    if size == 1:
        return None
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    if size < 1 or world % size:
        raise TreepackError(
            f"{name}: sequence_ranks is {size}, and {world} processes train; start a multiple of it with "
            "`accelerate launch`, or set it to 1"
        )
    return distributed.new_subgroups(size)[0]  # type: ignore[no-untyped-call]


def join_padded(columns: Sequence[Tensor], group: Any) -> tuple[list[Tensor], _OwnSamples]:
    """Return the columns of the samples of all ranks, [sum of B, largest L] each, and the place of the own ones.

    Args:
        columns: integers or flags [B, L] of this rank's samples, 0 for padding; B and L may differ between ranks.
        group: the ranks.
    """
    own = torch.stack([each.long() for each in columns])
    shapes: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(shapes, tuple(own.shape[1:]), group=group)
    count, width = (max(each) for each in zip(*shapes, strict=True))
    padded = pad(own, (0, width - own.shape[2], 0, count - own.shape[1]))
    found = [torch.empty_like(padded) for _ in shapes]
    distributed.all_gather(found, padded, group=group)
    joined = torch.cat([each[:, :size] for each, (size, _) in zip(found, shapes, strict=True)], 1)
    begin = sum(size for size, _ in shapes[: distributed.get_rank(group)])
    place = _OwnSamples(begin, begin + own.shape[1], own.shape[2])
    return [whole.to(each.dtype) for whole, each in zip(joined, columns, strict=True)], place


class _OwnValues(torch.autograd.Function):
    """Values of the own samples; the gradient is that of all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, place: _OwnSamples, group: Any) -> Tensor:
        ctx.place, ctx.group, ctx.shape = place, group, values.shape
        return values[:, place.begin : place.end, : place.width].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        place: _OwnSamples = ctx.place
        whole = grad.new_zeros(ctx.shape)
        whole[:, place.begin : place.end, : place.width] = grad
        distributed.all_reduce(whole, group=ctx.group)
        return whole, None, None


def own_values(values: Sequence[Tensor], place: _OwnSamples, group: Any) -> list[Tensor]:
    """Return the own part [B, L] of each of some values [sum of B, largest L], which all ranks have.

    Every rank must run the backward pass of the result, or none.
    """
    # Together, so that each rank has one exchange in the backward pass, whichever values its loss reads.
    own: Tensor = _OwnValues.apply(torch.stack(list(values)), place, group)  # type: ignore[no-untyped-call]
    return list(own.unbind())
