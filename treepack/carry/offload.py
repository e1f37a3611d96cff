"""Carried tensors past a budget of GPU memory: they wait in host memory, and come to the GPU a layer at a time.

    layer        0       1       2       3       4          layers 1, 3 and 4 wait in host memory
    buffer               A               B       A          two buffers on the GPU serve all of them
    copies       fetch 1         fetch 3 fetch 4            each is fetched while earlier layers compute

A buffer has the stack of one layer and, after it, the piece that runs. When a buffer gets its next layer, the graph of
the last one keeps only the keys and values of the piece; in the backward pass, the stack is fetched again, with the
sums of gradients, in the opposite order of layers. Sums go back to host memory after the addition.

All copies run on one stream (`memory.host_pages`), so a copy finds what earlier copies wrote. The current stream waits
for the last copy of a buffer before it touches the buffer. On a CPU the same code copies at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from treepack.carry.pieces import PiecePass
from treepack.memory.device_memory import free_memory
from treepack.memory.host_pages import CarriedBytes, HostRows, PageCopies, PagePool, copies_of, raw

# Bytes of a page. The last page of a layer's column is partly empty, so these pages are smaller than the pages of
# checkpoints (`memory.host_pages.PAGE`).
_COLUMN_PAGE = 4 << 20


@dataclass(frozen=True)
class CarryBudget:
    """Bytes that carried tensors may have; None removes the limit."""

    stack: int | None = None  # keys, values and sums of gradients on the GPU; layers beyond it wait in host memory
    outputs: int | None = None  # outputs of trunk on the GPU, which are kept until the pop
    host_outputs: int | None = None  # further outputs, in host memory; outputs beyond it are computed again


class CarryMemory:
    """The budget of carried tensors, and the pages of host memory that serve all rows of a run."""

    def __init__(
        self,
        device: torch.device,
        budget: CarryBudget = CarryBudget(),
        *,
        pages: PagePool | None = None,
        copies: PageCopies | None = None,
    ) -> None:
        """Start without pages.

        `pages` is by default a new pool, pinned if `device` is a GPU, and `copies` are `copies_of(device)`.
        """
        self.device, self.budget = device, budget
        self.pages = PagePool(pinned=device.type == "cuda", size=_COLUMN_PAGE) if pages is None else pages
        self.copies = copies or copies_of(device)
        # Tests set it: memory that must not be read is filled with NaN.
        self.poisons = False

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory, in use or free."""
        return self.pages.num_bytes

    def rows(self, width: int) -> HostRows:
        """Return an empty column of rows of `width` bytes."""
        return HostRows(self.pages, self.copies, width)


def spare_memory(device: torch.device, room: int | None = None, host: int | None = None) -> CarryMemory | None:
    """Return memory of carried tensors by `room` bytes, or the free memory, of a GPU; None on a CPU.

    Keys and values get half of it, and other layers wait on the host. Outputs of trunk get a quarter, and `host` bytes
    there. The rest is for a piece. The budget changes no result.
    """
    if device.type != "cuda":
        return None
    room = max(0, free_memory(device) if room is None else room)
    return CarryMemory(device, CarryBudget(room // 2, room // 4, host))


@dataclass(frozen=True)
class LayerShape:
    """Heads, widths and types of a layer's keys and values."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> LayerShape:
        """Return the shape of keys [1, H_kv, n, D] and values [1, H_kv, n, D_v]."""
        return cls(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers in a row of keys, and in a row of values."""
        return self.heads * self.key_width, self.heads * self.value_width

    @property
    def sums_dtype(self) -> torch.dtype:
        """The type of sums of gradients."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def num_bytes(self, places: int, carried: int) -> int:
        """Return the bytes of keys and values of `places` tokens and of the sums of `carried` tokens."""
        return sum(self.widths) * (places * self.dtype.itemsize + carried * self.sums_dtype.itemsize)


class LayerBuffer:
    """Keys and values [places, H_kv * D] of one layer, and the sums [carried, H_kv * D] of their gradients.

    Tokens are rows of memory, so a part of the stack is one piece of memory. `heads` is the view that attention reads.
    """

    def __init__(self, shape: LayerShape, places: int, carried: int) -> None:
        """Make a buffer of zeros; without sums if `carried` is 0."""
        # Zeros, because attention reads places that were never written, under a mask.
        device, types = shape.device, (shape.dtype, shape.sums_dtype)
        self.shape = shape
        self.keys_values = [torch.zeros((places, width), dtype=types[0], device=device) for width in shape.widths]
        self.sums = [torch.zeros((carried, width), dtype=types[1], device=device) for width in shape.widths]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return sum(x.numel() * x.element_size() for x in (*self.keys_values, *self.sums))

    def heads(self, rows: Tensor) -> Tensor:
        """Return rows [n, H_kv * D] as [1, H_kv, n, D]."""
        return rows.view(1, len(rows), self.shape.heads, -1).transpose(1, 2)

    def write(self, key: Tensor, value: Tensor, first: int, padded: int) -> None:
        """Write the keys and values [1, H_kv, n, D] of a piece to the places from `first` on, and zeros to `padded`."""
        end = first + key.shape[2]
        for rows, values in zip(self.keys_values, (key, value), strict=True):
            self.heads(rows)[:, :, first:end] = values
            # Attention reads whole blocks: the places up to the next one must be finite numbers.
            rows[end:padded] = 0

    def poison(self, first: int) -> None:
        """Fill everything from place `first` on with NaN."""
        for rows in (*self.keys_values, *self.sums):
            rows[first:] = float("nan")


@dataclass
class HostLayer:
    """The columns of a layer in host memory: keys, values, and the sums of their gradients.

    It has the sums of the first `sums_end` places; all other sums are zero.
    """

    index: int
    shape: LayerShape
    keys_values: list[HostRows]
    sums: list[HostRows]
    sums_end: int = 0


@dataclass
class BufferSlot:
    """A buffer, the layer and pass that it serves now, and the last copy that reads or writes it."""

    buffer: LayerBuffer
    layer: HostLayer | None = None
    has_piece: bool = False
    has_sums: bool = False
    # Places whose sums are zero, but not yet in the buffer.
    places_to_clear: slice = field(default_factory=lambda: slice(0, 0))
    event: Any = None


class HostStaging:
    """The layers in host memory, and the buffers on the GPU to which they come in turn."""

    def __init__(self, memory: CarryMemory, places: int, carried: int) -> None:
        """Start without layers; `carried` is 0 without gradients."""
        self._memory, self._places, self._carried = memory, places, carried
        self._layers: list[HostLayer] = []
        self._slots: dict[LayerShape, list[BufferSlot]] = {}
        # The slot that was handed out last: work that reads it may still be on its way.
        self._current: BufferSlot | None = None
        self._now: PiecePass | None = None

    @property
    def num_bytes(self) -> CarriedBytes:
        """Bytes of buffers, and of pages."""
        buffers = [slot.buffer.num_bytes for slots in self._slots.values() for slot in slots]
        pages = [rows.num_bytes for layer in self._layers for rows in (*layer.keys_values, *layer.sums)]
        return CarriedBytes(sum(buffers), sum(pages))

    def add(self, shape: LayerShape) -> HostLayer:
        """Add the next layer of the forward pass."""
        keys_values, sums = (
            [self._memory.rows(width * dtype.itemsize) for width in shape.widths]
            for dtype in (shape.dtype, shape.sums_dtype)
        )
        self._layers.append(HostLayer(len(self._layers), shape, keys_values, sums if self._carried else []))
        return self._layers[-1]

    def enter(self, now: PiecePass) -> None:
        """Start a pass, and the copies of its first layer."""
        self._now, self._current = now, None
        for slot in self._all_slots():
            slot.layer = None
        for layer in self._layers:
            if now.kind == "push":
                layer.sums_end = min(layer.sums_end, now.first)
        if self._layers and now.first:
            self._fetch(self._layers[0], with_sums=False)

    def open(self, layer: HostLayer, *, in_backward: bool, with_graph: bool = False) -> BufferSlot:
        """Return the slot with the stack of a layer, and start to fetch the layer that follows.

        Args:
            layer: the layer.
            in_backward: True if layers run in the opposite order; then sums of gradients come too.
            with_graph: True if the backward pass follows and begins with the last layer.
        """
        slot = self._fetch(layer, with_sums=in_backward)
        self._await(slot)
        for sums in slot.buffer.sums if in_backward else ():
            sums[slot.places_to_clear] = 0
        if in_backward:
            slot.places_to_clear = slice(0, 0)
        self._current = slot
        following = layer.index + (-1 if in_backward else 1)
        if following == len(self._layers):
            if with_graph:
                self._fetch(layer, with_sums=True)
        elif following >= 0:
            self._fetch(self._layers[following], with_sums=in_backward)
        return slot

    def write_piece(self, layer: HostLayer, slot: BufferSlot, end: int) -> None:
        """Start to copy the places from the piece's first to `end` to host memory."""
        assert self._now is not None
        piece = slice(self._now.first, end)
        for column, rows in zip(layer.keys_values, slot.buffer.keys_values, strict=True):
            slot.event = column.write(raw(rows[piece]), piece.start)

    def write_sums(self, layer: HostLayer, slot: BufferSlot) -> None:
        """Start to copy the sums of the stack to host memory."""
        assert self._now is not None
        first = self._now.first
        for column, rows in zip(layer.sums, slot.buffer.sums, strict=True):
            slot.event = column.write(raw(rows[:first]), 0)
        layer.sums_end = first

    def _fetch(self, layer: HostLayer, *, with_sums: bool) -> BufferSlot:
        """Return the slot of a layer; start the copies that it needs and does not have yet."""
        now = self._now
        assert now is not None, "a layer ran outside of a pass"
        slot = next((slot for slot in self._all_slots() if slot.layer is layer), None)
        if slot is None:
            slot = self._free_slot(layer.shape)
            slot.layer, slot.has_piece, slot.has_sums = layer, False, False
            for column, rows in zip(layer.keys_values, slot.buffer.keys_values, strict=True):
                slot.event = column.read(raw(rows[: now.first]), 0) or slot.event
        if with_sums and not slot.has_sums:
            # The pop of a piece needs the sums of that piece too.
            end = now.first + (now.size if now.kind == "pop" else 0)
            known = min(layer.sums_end, end)
            for column, rows in zip(layer.sums, slot.buffer.sums, strict=True):
                slot.event = column.read(raw(rows[:known]), 0) or slot.event
            slot.has_sums, slot.places_to_clear = True, slice(known, end)
        return slot

    def _free_slot(self, shape: LayerShape) -> BufferSlot:
        """Return a slot that no running work reads, with room for a layer of that shape; there are two at most."""
        slots = self._slots.setdefault(shape, [])
        for slot in slots:
            if slot is not self._current:
                if self._memory.poisons:
                    self._await(slot)
                    slot.buffer.poison(0)
                return slot
        slots.append(BufferSlot(LayerBuffer(shape, self._places, self._carried)))
        return slots[-1]

    def _await(self, slot: BufferSlot) -> None:
        if slot.event is not None:
            self._memory.copies.wait(slot.event)
            slot.event = None

    def _all_slots(self) -> list[BufferSlot]:
        return [slot for slots in self._slots.values() for slot in slots]

    def __del__(self) -> None:
        """Wait for all copies, whose buffers are freed now."""
        for slot in self._all_slots():
            self._await(slot)
