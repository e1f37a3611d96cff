"""Tensors that wait in host memory between the forward and the backward pass of a row.

    forward     layer 0       layer 1       layer 2          put(tensor) -> OffloadedTensor
                | copy 0      | copy 1      | copy 2         copies run on a stream of their own
    backward    layer 2       layer 1       layer 0          offloaded() -> the tensor, equal in every bit
                | fetch 1     | fetch 0                      each layer fetches the tensors of the layer before it

A tensor stays on the GPU until its copy is complete, and the tensors of the newest layer stay until a newer layer
comes: the backward pass starts with them, and nothing waits. `host_pages` has the pages and the copies. On a CPU the
same code copies at once, into ordinary memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from treepack.memory.host_pages import PageCopies, PagePool, copies_of


class LayerOffload:
    """The tensors of a model's layers that wait in host memory, and the pages in which they wait."""

    def __init__(
        self, device: torch.device, *, pages: PagePool | None = None, copies: PageCopies | None = None
    ) -> None:
        """Start without tensors.

        `pages` is by default a new pool, pinned if `device` is a GPU, and `copies` are `copies_of(device)`.
        """
        self.device = device
        self.pages = PagePool(pinned=device.type == "cuda") if pages is None else pages
        self.copies = copies or copies_of(device)
        self._layer = _LayerTensors(None)
        # Tensors that are still on the device. Weak, because an unused one must give its pages back.
        self._staying: deque[weakref.ref[OffloadedTensor]] = deque()

    def next_layer(self) -> None:
        """Begin the tensors of the next layer of a forward pass."""
        self._layer = _LayerTensors(self._layer)

    def put(self, tensor: Tensor) -> OffloadedTensor:
        """Start to copy a tensor to host memory; it must not be written from now on."""
        offloaded = OffloadedTensor(self, self._layer, tensor)
        self._layer.tensors.append(weakref.ref(offloaded))
        self._staying.append(weakref.ref(offloaded))
        # Layers with input, output and log-sum-exp: when input 5 comes, input 4 leaves, and outputs 4 still stay.
        while len(self._staying) > max(self._layer.size, len(self._layer.tensors)):
            oldest = self._staying.popleft()()
            if oldest is not None:
                oldest.leave()
        return offloaded

    def checkpoint(self, function: Callable[..., Any], states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Return function(states, ...), and compute it again in the backward pass; `states` waits in host memory.

        Other tensors among the arguments stay on the device, because layers share them.
        """
        # Not the tensor itself, which the hooks would keep alive.
        identity = _identity(states)
        self.next_layer()

        def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
            return self.put(tensor) if _identity(tensor) == identity else tensor

        # torch saves the inputs under these hooks, and everything inside under the hooks of `checkpoint`.
        with saved_tensors_hooks(pack, _unpack):
            return checkpoint(function, states, *arguments, use_reentrant=False, **options)


class OffloadedTensor:
    """A tensor that waits in host memory; a call returns it on its device, with the same strides.

    The pages are given back when this object is dropped: by the graph of a layer after its backward pass, or by an
    error.
    """

    def __init__(self, offload: LayerOffload, layer: _LayerTensors, tensor: Tensor) -> None:
        """Start the copy; see `LayerOffload.put`."""
        self._offload, self._layer = offload, layer
        # Dimensions by descending stride, so that the bytes are in the order of the memory, without gaps:
        # [B, H, T, D] in memory [B, T, H, D] -> order (0, 2, 1, 3)
        self._order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        dense = tensor.detach().permute(self._order).contiguous()
        self._shape, self._dtype = dense.shape, dense.dtype
        # uint8 [n]; None while the tensor is only in host memory.
        self._flat: Tensor | None = dense.view(-1).view(torch.uint8)
        self._pages = offload.pages.take(len(self._flat))
        self._event = offload.copies.to_pages(self._flat, self._pages) if self._pages else None

    def __call__(self) -> Tensor:
        """Return the tensor, and start to fetch the tensors of the layer before it."""
        self.fetch()
        earlier = self._layer.before()
        for each in () if earlier is None else earlier.tensors:
            other = each()
            if other is not None:
                other.fetch()
        assert self._flat is not None
        if self._pages:
            self._offload.copies.wait(self._event)
        dense = self._flat.view(self._dtype).view(self._shape)
        # (0, 2, 1, 3) -> the inverse (0, 2, 1, 3); (2, 0, 1) -> (1, 2, 0)
        return dense.permute(sorted(range(len(self._order)), key=self._order.__getitem__))

    def fetch(self) -> None:
        """Start to copy the tensor back to its device, unless it is there."""
        if self._flat is None:
            num_bytes = prod(self._shape) * self._dtype.itemsize
            self._flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._offload.device)
            self._event = self._offload.copies.to_tensor(self._pages, self._flat)

    def leave(self) -> None:
        """Free the memory on the device when the copy is complete."""
        if self._flat is not None and self._pages:
            self._offload.copies.wait(self._event)
            self._flat = None

    def __del__(self) -> None:
        """Give the pages back, and free the memory on the device when its copy is complete."""
        pages = getattr(self, "_pages", None)  # absent if memory ran out in `__init__`
        if pages:
            self.leave()
            self._offload.pages.give(pages)


class _LayerTensors:
    """The offloaded tensors of one layer, and a weak reference to the layer before it."""

    def __init__(self, before: _LayerTensors | None) -> None:
        self.tensors: list[weakref.ref[OffloadedTensor]] = []
        # A layer lives as long as its tensors.
        self.before: Callable[[], _LayerTensors | None] = (lambda: None) if before is None else weakref.ref(before)
        # Number of tensors of the layer before it, which the next tensors of this one replace on the device.
        self.size = 0 if before is None else len(before.tensors)


def _identity(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _unpack(packed: Tensor | OffloadedTensor) -> Tensor:
    return packed() if isinstance(packed, OffloadedTensor) else packed
