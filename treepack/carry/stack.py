"""Keys and values of a path, carried from piece to piece, and the sums of their gradients.

    a layer's keys and values [1, H_kv, n, D] of the piece --CarriedStack.joined--> of the stack and the piece

One buffer of keys and one of values per layer hold the stack, and the piece that runs after it. A layer writes the
keys and values of its tokens there and attends to all of them; nothing is concatenated. In the backward pass, the
gradients of carried keys and values are added to sums in float32, or in float64 for float64. When their piece is
popped, these sums are added to the gradients of the piece. Each place of a sum has one owner at a time, and all
additions have one order, so two runs agree in every bit.

Layers beyond the budget of GPU memory wait in host memory (`offload`), with equal results in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from treepack.attention.autograd import is_recomputing
from treepack.carry.offload import BufferSlot, CarryMemory, HostLayer, HostStaging, LayerBuffer, LayerShape
from treepack.carry.pieces import PiecePass, RowPlan, align
from treepack.errors import TreepackError
from treepack.memory.host_pages import CarriedBytes


class CarriedStack:
    """The carried tensors of all layers for one row; a model gets it as its argument `carry`.

    `enter` a pass, run the model, and `leave` the pass after its backward. A layer is known by its module.
    """

    def __init__(self, plan: RowPlan, memory: CarryMemory, *, num_layers: int, with_gradients: bool) -> None:
        """Start with an empty stack, whose buffers are made when a layer first needs them.

        Args:
            plan: the passes of the row.
            memory: the budget, and pages of host memory.
            num_layers: the layers with attention.
            with_gradients: True if backward passes will run.
        """
        self._places, self._carried = plan.places, plan.carried if with_gradients else 0
        self._memory, self._num_layers, self._with_gradients = memory, num_layers, with_gradients
        self._layers: dict[Hashable, _ResidentLayer | _OffloadedLayer] = {}
        self._staging = HostStaging(memory, self._places, self._carried)
        self._seen: set[Hashable] = set()
        self._now: PiecePass | None = None
        # The carried states of recurrent layers, a `states.States`.
        self.states: Any = None

    @property
    def first(self) -> int:
        """The number of places before the piece that runs now."""
        assert self._now is not None, "a layer ran outside of a pass"
        return self._now.first

    @property
    def num_bytes(self) -> CarriedBytes:
        """The bytes of all buffers and pages."""
        resident = sum(x.buffer.num_bytes for x in self._layers.values() if isinstance(x, _ResidentLayer))
        gpu, host = self._staging.num_bytes
        return CarriedBytes(resident + gpu, host)

    def enter(self, now: PiecePass) -> None:
        """Start a pass: the layers that run next compute its piece."""
        self._now = now
        self._seen.clear()
        for layer in self._layers.values():
            layer.enter(now)
        self._staging.enter(now)

    def leave(self) -> None:
        """End the pass, after its backward if it has one."""
        now, self._now = self._now, None
        for layer in self._layers.values():
            if self._memory.poisons and now is not None and now.kind != "push" and isinstance(layer, _ResidentLayer):
                layer.buffer.poison(now.first)

    def joined(self, module: Hashable, key: Tensor, value: Tensor) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        """Give a block the keys and values of the stack, followed by the keys and values of the piece.

        Args:
            module: the attention module of the layer.
            key: [1, H_kv, n, D] of the n tokens of the piece.
            value: [1, H_kv, n, D_v].

        Returns:
            a context of [1, H_kv, first + n, D] and [1, H_kv, first + n, D_v], views of buffers. Functions inside the
            block may save them for the backward pass; they must not be used otherwise after it.

        Raises:
            TreepackError: the layer runs twice in a pass, or the batch has several rows.
        """
        now = self._now
        assert now is not None, "a layer ran outside of a pass"
        if len(key) != 1:
            raise TreepackError(f"carry: a batch of {len(key)} rows runs in pieces; pass one row at a time")
        if not is_recomputing():
            if module in self._seen:
                raise TreepackError(
                    f"carry: {type(module).__name__} runs twice in one forward pass; train this model without --carry"
                )
            self._seen.add(module)
        if now.kind == "bundle" and now.first == 0:
            return nullcontext((key, value))
        layer = self._layers.get(module)
        if layer is None:
            layer = self._layers[module] = self._make(LayerShape.of(key, value))
        return layer.joined(key, value, now)

    def _make(self, shape: LayerShape) -> _ResidentLayer | _OffloadedLayer:
        """Return the next layer of the forward pass, on the GPU or in host memory."""
        budget, size = self._memory.budget.stack, shape.num_bytes(self._places, self._carried)
        number, index = num_offloaded(budget, size, self._num_layers), len(self._layers)
        # Spread evenly, so that as many layers as possible compute during each copy: 2 of 5 -> layers 2 and 4
        if (index + 1) * number // self._num_layers > index * number // self._num_layers:
            return _OffloadedLayer(self._staging, self._staging.add(shape), with_gradients=self._with_gradients)
        return _ResidentLayer(LayerBuffer(shape, self._places, self._carried))


def num_offloaded(budget: int | None, size: int, num_layers: int) -> int:
    """Return how many layers of `size` bytes wait in host memory; with any, two buffers serve them on the GPU."""
    if budget is None or num_layers * size <= budget:
        return 0
    return num_layers - max(0, budget // size - 2)


class _ResidentLayer:
    """A layer whose carried tensors stay on the GPU."""

    def __init__(self, buffer: LayerBuffer) -> None:
        self.buffer, self.shape = buffer, buffer.shape

    def enter(self, now: PiecePass) -> None:
        """Clear the sums of a piece that is pushed."""
        if now.kind == "push":
            for sums in self.buffer.sums:
                sums[now.first : now.first + now.size] = 0

    @contextmanager
    def joined(self, key: Tensor, value: Tensor, now: PiecePass) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the keys and values of the stack and the piece."""
        yield _join(key, value, self, self.buffer, now)

    def add(self, now: PiecePass, add: Callable[[LayerBuffer], None]) -> None:
        """Add gradients to the sums."""
        add(self.buffer)


class _OffloadedLayer:
    """A layer whose carried tensors wait in host memory."""

    def __init__(self, staging: HostStaging, layer: HostLayer, *, with_gradients: bool) -> None:
        self._staging, self._layer, self._with_gradients = staging, layer, with_gradients
        self.shape = layer.shape

    def enter(self, now: PiecePass) -> None:
        """Leave the layer to `HostStaging.enter`."""

    @contextmanager
    def joined(self, key: Tensor, value: Tensor, now: PiecePass) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the stack and the piece; tensors of the stack that the block saves are fetched again in the backward."""
        with_graph = self._with_gradients and now.kind != "push" and torch.is_grad_enabled()
        slot = self._staging.open(self._layer, in_backward=is_recomputing(), with_graph=with_graph)
        keys, values = _join(key, value, self, slot.buffer, now)
        slot.has_piece = True
        if now.kind == "push":
            self._staging.write_piece(self._layer, slot, _padded(now))
        # Under other hooks, for example of a checkpoint, the tensors are computed again and used at once.
        if not with_graph or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            yield keys, values
            return
        with saved_tensors_hooks(_PackingHook(self, slot, (key.detach(), value.detach()), now), _unpack):
            yield keys, values

    def add(self, now: PiecePass, add: Callable[[LayerBuffer], None]) -> None:
        """Add gradients to the sums, and send them back."""
        slot = self._staging.open(self._layer, in_backward=True)
        add(slot.buffer)
        self._staging.write_sums(self._layer, slot)

    def restore(self, piece: tuple[Tensor, Tensor], now: PiecePass) -> LayerBuffer:
        """Return a buffer with the stack and `piece`, its keys and values [1, H_kv, n, D], in the backward pass."""
        slot = self._staging.open(self._layer, in_backward=True)
        if not slot.has_piece:
            slot.buffer.write(*piece, now.first, _padded(now))
            slot.has_piece = True
        return slot.buffer


class _PackingHook:
    """The hook that replaces tensors in a slot's memory, which other layers will use, by a way to get them again."""

    def __init__(self, layer: _OffloadedLayer, slot: BufferSlot, piece: tuple[Tensor, Tensor], now: PiecePass) -> None:
        self._layer, self._piece, self._now = layer, piece, now
        self._memory = [rows.untyped_storage().data_ptr() for rows in slot.buffer.keys_values]

    def __call__(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        memory = tensor.untyped_storage().data_ptr()
        if memory not in self._memory:
            return tensor.detach()
        layer, piece, now, which = self._layer, self._piece, self._now, self._memory.index(memory)
        view = tensor.size(), tensor.stride(), tensor.storage_offset()
        return lambda: layer.restore(piece, now).keys_values[which].as_strided(*view)


def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


def _padded(now: PiecePass) -> int:
    """Return the end of the piece's places and of the zeros after them."""
    return align(now.first + now.size)


def _join(
    key: Tensor, value: Tensor, layer: _ResidentLayer | _OffloadedLayer, buffer: LayerBuffer, now: PiecePass
) -> tuple[Tensor, Tensor]:
    keys, values = _JoinKeys.apply(key, value, layer, buffer, now)  # type: ignore[no-untyped-call]
    return keys, values


class _JoinKeys(torch.autograd.Function):
    """Write keys and values after the stack; in the backward, divide the gradients between the stack and the piece."""

    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,
        value: Tensor,
        layer: _ResidentLayer | _OffloadedLayer,
        buffer: LayerBuffer,
        now: PiecePass,
    ) -> tuple[Tensor, Tensor]:
        ctx.layer, ctx.now = layer, now
        buffer.write(key, value, now.first, _padded(now))
        end = now.first + key.shape[2]
        keys, values = (buffer.heads(rows)[:, :, :end] for rows in buffer.keys_values)
        return keys, values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grads_of_piece: list[Tensor] = []

        def add(buffer: LayerBuffer) -> None:
            assert len(buffer.sums[0]), "a backward pass ran on a stack without gradients"
            grads_of_piece.extend(
                _divide(grad, buffer.heads(sums), ctx.now) for grad, sums in zip(grads, buffer.sums, strict=True)
            )

        ctx.layer.add(ctx.now, add)
        return grads_of_piece[0], grads_of_piece[1], None, None, None


def _divide(grad: Tensor, sums: Tensor, now: PiecePass) -> Tensor:
    """Add the carried part of a gradient to its sums; return the part of the piece, with its sums if it is popped."""
    first = now.first
    sums[:, :, :first] += grad[:, :, :first]
    piece = grad[:, :, first:]
    if now.kind != "pop":
        return piece
    return (piece + sums[:, :, first : first + now.size]).to(grad.dtype)
