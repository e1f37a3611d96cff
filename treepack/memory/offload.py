"""Tensors that wait in host memory between the forward and the backward pass of a row.

    forward     layer 0       layer 1       layer 2          put(tensor) -> Offloaded
                | copy 0      | copy 1      | copy 2         copies run on a stream of their own
    backward    layer 2       layer 1       layer 0          offloaded() -> the tensor, equal in every bit
                | fetch 1     | fetch 0                      each layer fetches the tensors of the layer before it

A tensor stays on the GPU until its copy is complete, and the tensors of the newest layer stay until a newer layer
comes: the backward pass starts with them, and nothing waits. A tensor is cut into pages of one size, which are pinned
once and serve rows of all lengths.

    tensor of 40 MiB -> 16 | 16 | 8 MiB in three pages of 16 MiB

All copies run on one stream, one after another. So a page may be given back while its last copy is still waiting: the
next copy into it starts after that one. On a CPU the same code copies at once, into ordinary memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

# Bytes of a page. torch rounds pinned memory up to a power of two, which would waste a third of a buffer of 1.5 GiB. A
# copy of this size takes 0.3 ms over PCIe 5, a launch 5 us.
PAGE = 16 << 20


class CarriedBytes(NamedTuple):
    """Bytes on the GPU and in host memory."""

    gpu: int
    host: int

    def plus(self, other: CarriedBytes) -> CarriedBytes:
        """Return the sum of each."""
        return CarriedBytes(self.gpu + other.gpu, self.host + other.host)

    def most(self, other: CarriedBytes) -> CarriedBytes:
        """Return the maximum of each."""
        return CarriedBytes(max(self.gpu, other.gpu), max(self.host, other.host))


class Copies(Protocol):
    """Copies between tensors of the device and pages, in order; `flat` is uint8 [n], and the pages have room for it."""

    def to_pages(self, flat: Tensor, pages: list[Tensor]) -> Any:
        """Copy after all work that the device was given before; return an event, which `wait` takes."""

    def to_tensor(self, pages: list[Tensor], flat: Tensor) -> Any:
        """Copy back, in the same way."""

    def wait(self, event: Any) -> None:
        """Make all work that the device is given from now on wait for a copy."""


class HostCopies:
    """Copies on the CPU: each is complete when the method returns."""

    def to_pages(self, flat: Tensor, pages: list[Tensor]) -> None:
        """Copy now."""
        copy_out(flat, pages)

    def to_tensor(self, pages: list[Tensor], flat: Tensor) -> None:
        """Copy now."""
        copy_back(pages, flat)

    def wait(self, event: None) -> None:
        """Return: the copy is complete."""


class StreamCopies:
    """Copies on a stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_pages(self, flat: Tensor, pages: list[Tensor]) -> Any:
        """Copy when the current stream has computed `flat`, which must stay alive until the event is waited for."""
        return self._run(copy_out, flat, pages)

    def to_tensor(self, pages: list[Tensor], flat: Tensor) -> Any:
        """Copy when the current stream no longer uses the memory of `flat`, which may have had another owner."""
        return self._run(copy_back, pages, flat)

    def wait(self, event: Any) -> None:
        """Let the current stream wait; the CPU goes on."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def _run(self, copy: Callable[[Any, Any], None], source: Any, target: Any) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy(source, target)
        return self._stream.record_event()


def copy_out(flat: Tensor, pages: list[Tensor]) -> None:
    """Copy uint8 [n] into pages."""
    for page, part in zip(pages, torch.split(flat, len(pages[0])), strict=True):
        page[: len(part)].copy_(part, non_blocking=True)


def copy_back(pages: list[Tensor], flat: Tensor) -> None:
    """Copy pages into uint8 [n]."""
    for page, part in zip(pages, torch.split(flat, len(pages[0])), strict=True):
        part.copy_(page[: len(part)], non_blocking=True)


class Pages:
    """A pool of pages of host memory, pinned if a GPU copies them; it grows and never shrinks."""

    def __init__(self, *, pinned: bool, size: int = PAGE) -> None:
        """Start without pages."""
        self.size, self.count = size, 0
        self._pinned = pinned
        self._free: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, in use or free."""
        return self.size * self.count

    @property
    def num_free(self) -> int:
        """Number of pages that nothing uses."""
        return len(self._free)

    def reserve(self, count: int) -> None:
        """Make pages until the pool has `count`; pinning takes about a third of a second for each GiB."""
        while self.count < count:
            self._free.append(self._make())

    def take(self, num_bytes: int) -> list[Tensor]:
        """Return pages, uint8 [size] each, with room for `num_bytes`."""
        return [self._free.pop() if self._free else self._make() for _ in range(-(-num_bytes // self.size))]

    def give(self, pages: list[Tensor]) -> None:
        """Take pages back; copies that were started before may still use them."""
        self._free += pages

    def _make(self) -> Tensor:
        self.count += 1
        return torch.empty(self.size, dtype=torch.uint8, pin_memory=self._pinned)


class Offload:
    """The tensors of a model's layers that wait in host memory, and the pages in which they wait."""

    def __init__(self, device: torch.device, *, pages: Pages | None = None, copies: Copies | None = None) -> None:
        """Start without tensors.

        Args:
            device: device of the layers.
            pages: a pool; by default a new one, pinned if the device is a GPU.
            copies: by default those of the device.
        """
        on_gpu = device.type == "cuda"
        self.device = device
        self.pages = Pages(pinned=on_gpu) if pages is None else pages
        self.copies: Copies = copies or (StreamCopies(device) if on_gpu else HostCopies())
        self._layer = _Layer(None)
        # Tensors that are still on the device. Weak, because one that nobody needs any more must give its pages back.
        self._staying: deque[weakref.ref[Offloaded]] = deque()

    def next_layer(self) -> None:
        """Begin the tensors of the next layer of a forward pass."""
        self._layer = _Layer(self._layer)

    def put(self, tensor: Tensor) -> Offloaded:
        """Start to copy a tensor to host memory; nobody may write to it from now on."""
        offloaded = Offloaded(self, self._layer, tensor)
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

        Other tensors among the arguments stay where they are, because layers share them.
        """
        # Not the tensor itself, which the hooks would keep alive.
        identity = _identity(states)
        self.next_layer()

        def pack(tensor: Tensor) -> Tensor | Offloaded:
            return self.put(tensor) if _identity(tensor) == identity else tensor

        # torch saves the inputs under these hooks, and everything inside under its own.
        with saved_tensors_hooks(pack, _unpack):
            return checkpoint(function, states, *arguments, use_reentrant=False, **options)


class Offloaded:
    """A tensor that waits in host memory; a call returns it on its device, with the same strides.

    The pages are given back when this object is dropped: by the graph of a layer after its backward pass, or by an
    error.
    """

    def __init__(self, offload: Offload, layer: _Layer, tensor: Tensor) -> None:
        """Start the copy; see `Offload.put`."""
        self._offload, self._layer = offload, layer
        # Dimensions by descending stride, so that the bytes are those of the memory without gaps:
        # [B, H, T, D] in memory [B, T, H, D] -> order (0, 2, 1, 3)
        self._order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        dense = tensor.detach().permute(self._order).contiguous()
        self._shape, self._dtype = dense.shape, dense.dtype
        # uint8 [n]; None while the tensor is only in host memory.
        self._flat: Tensor | None = dense.view(-1).view(torch.uint8)
        self._pages = offload.pages.take(len(self._flat))
        self._event = offload.copies.to_pages(self._flat, self._pages) if self._pages else None

    def __call__(self) -> Tensor:
        """Return the tensor, and start to fetch those of the layer before it."""
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


class _Layer:
    """The offloaded tensors of one layer, and a weak reference to the layer before it."""

    def __init__(self, before: _Layer | None) -> None:
        self.tensors: list[weakref.ref[Offloaded]] = []
        # A layer lives as long as its tensors.
        self.before: Callable[[], _Layer | None] = (lambda: None) if before is None else weakref.ref(before)
        # Number of tensors of the layer before it, which the next tensors of this one replace on the device.
        self.size = 0 if before is None else len(before.tensors)


def _identity(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _unpack(packed: Tensor | Offloaded) -> Tensor:
    return packed() if isinstance(packed, Offloaded) else packed
