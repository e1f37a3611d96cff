"""Keys and values of a path, carried from piece to piece, and the sums of their gradients.

    a layer's keys and values [1, H_kv, n, D] of the piece --Stack.join--> those of the stack and the piece

One buffer of keys and one of values per layer hold the stack, and the piece that runs behind it. A layer writes the
keys and values of its tokens there and attends to all of them; nothing is concatenated. In the backward pass, the
gradients of carried keys and values are added to sums in float32, or in float64 for float64. When their piece is
popped, these sums are added to its own gradients. Each place of a sum has one owner at a time, and all additions have
one order, so two runs agree in every bit.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treepack.attention.autograd import is_recomputing
from treepack.carry.pieces import ALIGNMENT, Pass, RowPlan
from treepack.errors import TreepackError


@dataclass(frozen=True)
class Carried:
    """The carried tensors of one layer.

    keys, values            [1, H_kv, places, D or D_v] in the dtype of the layer
    key_sums, value_sums    [1, H_kv, carried, D or D_v] in float32 or float64: sums of gradients; None without a graph
    """

    keys: Tensor
    values: Tensor
    key_sums: Tensor | None
    value_sums: Tensor | None


class Stack:
    """The carried tensors of all layers for one row; a model gets it as its argument `carry`.

    `enter` a pass, run the model, and `leave` the pass after its backward. A layer is known by its module.
    """

    def __init__(self, plan: RowPlan, *, with_gradients: bool) -> None:
        """Start with an empty stack, whose buffers are made when a layer first needs them.

        Args:
            plan: the passes of the row.
            with_gradients: whether backward passes will run.
        """
        self._places, self._carried = plan.places, plan.carried
        self._with_gradients = with_gradients
        self._layers: dict[Hashable, Carried] = {}
        self._seen: set[Hashable] = set()
        self._now: Pass | None = None

    @property
    def first(self) -> int:
        """The number of places before the piece that runs now."""
        assert self._now is not None, "a layer ran outside of a pass"
        return self._now.first

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        tensors = [x for layer in self._layers.values() for x in vars(layer).values() if x is not None]
        return sum(x.numel() * x.element_size() for x in tensors)

    def enter(self, now: Pass) -> None:
        """Start a pass: the layers that run next are those of its piece."""
        self._now = now
        self._seen.clear()
        if now.kind == "push" and self._with_gradients:
            for layer in self._layers.values():
                _clear_sums(layer, now)

    def leave(self) -> None:
        """End the pass, after its backward if it has one."""
        self._now = None

    def join(self, place: Hashable, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the stack, followed by those of the piece.

        Args:
            place: the attention module of the layer.
            key: [1, H_kv, n, D] of the n tokens of the piece.
            value: [1, H_kv, n, D_v].

        Returns:
            [1, H_kv, first + n, D] and [1, H_kv, first + n, D_v], views of the layer's buffers.

        Raises:
            TreepackError: the layer runs twice in a pass, or the batch has several rows.
        """
        now = self._now
        assert now is not None, "a layer ran outside of a pass"
        if len(key) != 1:
            raise TreepackError(f"carry: a batch of {len(key)} rows runs in pieces; pass one row at a time")
        if not is_recomputing():
            if place in self._seen:
                raise TreepackError(
                    f"carry: {type(place).__name__} runs twice in one forward pass; train this model without --carry"
                )
            self._seen.add(place)
        layer = self._layers.get(place)
        if layer is None:
            layer = self._layers[place] = self._make(key, value)
        joined: tuple[Tensor, Tensor] = _Join.apply(key, value, layer, now)  # type: ignore[no-untyped-call]
        return joined

    def _make(self, key: Tensor, value: Tensor) -> Carried:
        # Zeros, because attention reads places that nobody has written, under a mask.
        keys, values = (x.new_zeros((1, x.shape[1], self._places, x.shape[3])) for x in (key, value))
        if not self._with_gradients:
            return Carried(keys, values, None, None)
        sums = torch.float64 if key.dtype == torch.float64 else torch.float32
        shapes = [(1, x.shape[1], self._carried, x.shape[3]) for x in (key, value)]
        return Carried(keys, values, *(key.new_zeros(shape, dtype=sums) for shape in shapes))


class _Join(torch.autograd.Function):
    """Write keys and values behind the stack; in the backward, divide the gradients between the stack and the piece."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, layer: Carried, now: Pass) -> tuple[Tensor, Tensor]:
        ctx.layer, ctx.now = layer, now
        end = now.first + key.shape[2]
        # Attention reads whole blocks: the places up to the next one must be finite numbers.
        padded = -(-end // ALIGNMENT) * ALIGNMENT
        for buffer, own in ((layer.keys, key), (layer.values, value)):
            buffer[:, :, now.first : end] = own
            buffer[:, :, end:padded] = 0
        return layer.keys[:, :, :end], layer.values[:, :, :end]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, key_grad: Tensor, value_grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        layer, now = ctx.layer, ctx.now
        own = [_divide(grad, sums, now) for grad, sums in ((key_grad, layer.key_sums), (value_grad, layer.value_sums))]
        return own[0], own[1], None, None


def _divide(grad: Tensor, sums: Tensor | None, now: Pass) -> Tensor:
    """Add the carried part of a gradient to its sums; return the part of the piece, with its sums if it is popped."""
    assert sums is not None, "a backward pass ran on a stack without gradients"
    first = now.first
    sums[:, :, :first] += grad[:, :, :first]
    own = grad[:, :, first:]
    if now.kind != "pop":
        return own
    return (own + sums[:, :, first : first + now.size]).to(grad.dtype)


def _clear_sums(layer: Carried, now: Pass) -> None:
    for sums in (layer.key_sums, layer.value_sums):
        if sums is not None:
            sums[:, :, now.first : now.first + now.size] = 0
