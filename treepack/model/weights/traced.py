"""Tensors without memory that record the parts of other tensors they consist of.

    a = Traced.whole("a", (2, 3), torch.float32)
    b = Traced.whole("b", (2, 3), torch.float32)
    torch.cat([a, b])[1:3].boxes
        TracedBox("a", source=((1, 2), (0, 3)), axes=(0, 1), start=(0, 0))    row 1 of a is row 0
        TracedBox("b", source=((0, 1), (0, 3)), axes=(0, 1), start=(1, 0))    row 0 of b is row 1

A function that only cuts, joins, permutes and casts tensors, such as the conversion of a checkpoint, runs on them as on
real ones. Every other operation makes the elements of its results unknown. `weights.conversion` runs transformers' own
conversions this way, so that weights can be read and written in parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Ranges = tuple[tuple[int, int], ...]  # first and one past the last index in each dimension


@dataclass(frozen=True)
class TracedBox:
    """A box of the tensor `name`, and its place in a traced tensor.

    Attributes:
        name: name of the tensor that has the elements.
        source: the box, in each dimension of that tensor.
        axes: for each dimension of the traced tensor, the matching dimension of the tensor `name`; None if there is
            none, and then the box has length 1. Dimensions of `name` that are not listed have length 1 in `source`.
        start: the index in the traced tensor at which the box begins, in each dimension.
    """

    name: str
    source: Ranges
    axes: tuple[int | None, ...]
    start: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(stop - first for first, stop in self.source)

    @property
    def target(self) -> Ranges:
        """The box in the traced tensor."""
        # source ((0, 2), (4, 9)), axes (None, 1, 0), start (7, 0, 0) -> ((7, 8), (0, 5), (0, 2))
        lengths = [1 if axis is None else self.source[axis][1] - self.source[axis][0] for axis in self.axes]
        return tuple((first, first + length) for first, length in zip(self.start, lengths, strict=True))

    def within(self, window: Ranges) -> TracedBox | None:
        """Return the part of the box inside a window of the traced tensor, or None; `start` counts from the window."""
        source, start = list(self.source), []
        for axis, (first, stop), (low, high) in zip(self.axes, self.target, window, strict=True):
            # box [4, 9) in the window [6, 20): source [0, 5) -> [2, 5), start 4 -> 0
            begin, end = max(first, low), min(stop, high)
            if begin >= end:
                return None
            if axis is not None:
                origin = source[axis][0] - first
                source[axis] = (origin + begin, origin + end)
            start.append(begin - low)
        return replace(self, source=tuple(source), start=tuple(start))

    def put(self, stored: Any, tensor: Tensor) -> None:
        """Copy the box from `stored`, a tensor or a slice object of safetensors, into its place in `tensor`."""
        place = tensor[tuple(slice(first, stop) for first, stop in self.target)]
        place.copy_(self.take(stored).to(tensor.device))  # moved before it is cast: most files have 16 bits per element

    def take(self, stored: Any) -> Tensor:
        """Return the elements of the box from `stored`, as in `put`, in the shape that they have in the target."""
        index = tuple(slice(first, stop) for first, stop in self.source)
        values = stored[index] if index else stored[...]
        # Dimensions of `stored` that `axes` lists, in their order there; all others are 1 long.
        # shape [5, 1, 2], axes (None, 2, 0) -> listed [2, 0] -> [2, 5] -> [1, 2, 5]
        listed = [axis for axis in self.axes if axis is not None]
        others = [axis for axis in range(values.ndim) if axis not in listed]
        taken: Tensor = values.permute(listed + others).reshape([stop - first for first, stop in self.target])
        return taken


class TracedTensor(Tensor):
    """A tensor that has only shape, dtype and `boxes`; `boxes` is None if an operation computed its elements."""

    boxes: tuple[TracedBox, ...] | None

    @staticmethod
    def __new__(cls, boxes: Iterable[TracedBox] | None, shape: Sequence[int], dtype: torch.dtype) -> TracedTensor:
        made: TracedTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        made.boxes = None if boxes is None else tuple(boxes)
        return made

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> TracedTensor:
        """Return the tensor `name` itself."""
        ranges = tuple((0, size) for size in shape)
        axes = tuple(range(len(shape)))
        boxes = [TracedBox(name, ranges, axes, (0,) * len(shape))] if math.prod(shape) else []
        return cls(boxes, shape, dtype)

    @property
    def is_known(self) -> bool:
        """True if the boxes give every element."""
        # Boxes of one tensor never overlap, because nothing adds a box at a place that has one.
        return self.boxes is not None and sum(box.num_elements for box in self.boxes) == self.numel()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TracedTensor({list(self.shape)}, boxes={self.boxes})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_traced = all(isinstance(each, TracedTensor) and each.boxes is not None for each in tensors)
        operation = _OPERATIONS.get(func.overloadpacket) if is_traced else None
        results = NotImplemented if operation is None else operation(*args, **kwargs)
        return _run_unknown(func, args, kwargs) if results is NotImplemented else results


def _run_unknown(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation for the shapes of its results alone; the elements of the results are unknown."""

    def without_elements(value: Any) -> Any:
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value

    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    results = func(*tree_map(without_elements, args), **tree_map(without_elements, kwargs))
    if func._schema.is_mutable:  # such as mul_: its result is its first argument
        for each in args:
            if isinstance(each, TracedTensor):
                each.boxes = None
        return args[0]
    return tree_map(
        lambda each: TracedTensor(None, each.shape, each.dtype) if isinstance(each, Tensor) else each, results
    )


# Each function below has the arguments of the operation of torch, and returns NotImplemented if it cannot trace it.


def _same(tensor: TracedTensor, **_: Any) -> TracedTensor:
    return TracedTensor(tensor.boxes, tensor.shape, tensor.dtype)


def _cast(tensor: TracedTensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    dtype = dtype or tensor.dtype
    # A box is copied with one cast, so a cast in between must not round.
    if dtype != tensor.dtype and torch.promote_types(tensor.dtype, dtype) != dtype:
        return NotImplemented
    return TracedTensor(tensor.boxes, tensor.shape, dtype)


def _boxes(tensor: TracedTensor) -> tuple[TracedBox, ...]:
    assert tensor.boxes is not None
    return tensor.boxes


def _cut(tensor: TracedTensor, dim: int, first: int, stop: int) -> TracedTensor:
    """Return the indices from `first` to `stop` of the dimension `dim`."""
    window = [(0, size) for size in tensor.shape]
    window[dim] = (first, stop)
    parts = [part for box in _boxes(tensor) if (part := box.within(tuple(window))) is not None]
    return TracedTensor(parts, [high - low for low, high in window], tensor.dtype)


def _permute(tensor: TracedTensor, order: Sequence[int]) -> TracedTensor:
    """Return the tensor with dimension i of the result taken from dimension order[i]; all dimensions are listed."""
    parts = [
        replace(box, axes=tuple(box.axes[i] for i in order), start=tuple(box.start[i] for i in order))
        for box in _boxes(tensor)
    ]
    return TracedTensor(parts, [tensor.shape[i] for i in order], tensor.dtype)


def _transpose(tensor: TracedTensor, dim0: int, dim1: int) -> TracedTensor:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(tensor, order)


def _squeeze(tensor: TracedTensor, dim: int | Sequence[int] | None = None) -> TracedTensor:
    dims = [dim] if isinstance(dim, int) else range(tensor.ndim) if dim is None else dim
    dropped = {each % tensor.ndim for each in dims}
    return _permute(tensor, [i for i in range(tensor.ndim) if tensor.shape[i] != 1 or i not in dropped])


def _unsqueeze(tensor: TracedTensor, dim: int) -> TracedTensor:
    dim %= tensor.ndim + 1
    parts = [
        replace(
            box,
            axes=(*box.axes[:dim], None, *box.axes[dim:]),
            start=(*box.start[:dim], 0, *box.start[dim:]),
        )
        for box in _boxes(tensor)
    ]
    return TracedTensor(parts, [*tensor.shape[:dim], 1, *tensor.shape[dim:]], tensor.dtype)


def _slice(tensor: TracedTensor, dim: int = 0, first: int | None = None, stop: int | None = None, step: int = 1) -> Any:
    if step != 1:
        return NotImplemented
    dim %= tensor.ndim
    first, stop, _ = slice(first, stop).indices(tensor.shape[dim])
    return _cut(tensor, dim, first, max(first, stop))


def _select(tensor: TracedTensor, dim: int, index: int) -> TracedTensor:
    dim, index = dim % tensor.ndim, index % tensor.shape[dim]
    return _squeeze(_cut(tensor, dim, index, index + 1), dim)


def _split_with_sizes(tensor: TracedTensor, sizes: Sequence[int], dim: int = 0) -> list[TracedTensor]:
    # sizes 1, 3 -> [0, 1), [1, 4)
    stops = list(itertools.accumulate(sizes))
    return [_cut(tensor, dim % tensor.ndim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _split(tensor: TracedTensor, size: int, dim: int = 0) -> list[TracedTensor]:
    # 7 rows in parts of 3 -> 3, 3, 1
    length = tensor.shape[dim]
    return _split_with_sizes(tensor, [min(size, length - first) for first in range(0, length, size)], dim)


def _unbind(tensor: TracedTensor, dim: int = 0) -> list[TracedTensor]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> Any:
    first = tensors[0]
    if any((tensor.ndim, tensor.dtype) != (first.ndim, first.dtype) for tensor in tensors):
        return NotImplemented
    dim %= first.ndim
    parts, length = [], 0
    for tensor in tensors:
        for box in _boxes(tensor):
            start = (*box.start[:dim], box.start[dim] + length, *box.start[dim + 1 :])
            parts.append(replace(box, start=start))
        length += tensor.shape[dim]
    return TracedTensor(parts, [*first.shape[:dim], length, *first.shape[dim + 1 :]], first.dtype)


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> Any:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._to_copy: _cast,
    torch.ops.aten.alias: _same,
    torch.ops.aten.cat: _cat,
    torch.ops.aten.clone: _same,
    torch.ops.aten.detach: _same,
    torch.ops.aten.permute: lambda tensor, order: _permute(tensor, [dim % tensor.ndim for dim in order]),
    torch.ops.aten.select: _select,
    torch.ops.aten.slice: _slice,
    torch.ops.aten.split: _split,
    torch.ops.aten.split_with_sizes: _split_with_sizes,
    torch.ops.aten.squeeze: _squeeze,
    torch.ops.aten.stack: _stack,
    torch.ops.aten.t: lambda tensor: _transpose(tensor, 0, -1),
    torch.ops.aten.transpose: _transpose,
    torch.ops.aten.unbind: _unbind,
    torch.ops.aten.unsqueeze: _unsqueeze,
}
