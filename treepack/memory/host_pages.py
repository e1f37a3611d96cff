"""Pages of host memory in which tensors wait, and the copies between a device and the pages.

    PagePool    pages of one size, which are pinned once and serve tensors of all lengths
    PageCopies  copies in order: on a stream of a GPU, or at once on a CPU
    HostRows    a column of equal rows in pages, written and read from any row on

    tensor of 40 MiB -> 16 | 16 | 8 MiB in three pages of 16 MiB

All copies of a GPU run on one stream, one after another. So a page may be given back while its last copy is still
waiting: the next copy into it starts after that one. `offload` has the tensors of a model's layers in pages, and
`carry.offload` the keys and values of rows in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

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


class PageCopies(Protocol):
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
        """Let the current stream wait; the CPU continues."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def _run(self, copy: Callable[[Any, Any], None], source: Any, target: Any) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy(source, target)
        return self._stream.record_event()


def copies_of(device: torch.device) -> PageCopies:
    """Return the usual copies of a device."""
    return StreamCopies(device) if device.type == "cuda" else HostCopies()


def copy_out(flat: Tensor, pages: list[Tensor]) -> None:
    """Copy uint8 [n] into pages."""
    for page, part in zip(pages, torch.split(flat, len(pages[0])), strict=True):
        page[: len(part)].copy_(part, non_blocking=True)


def copy_back(pages: list[Tensor], flat: Tensor) -> None:
    """Copy pages into uint8 [n]."""
    for page, part in zip(pages, torch.split(flat, len(pages[0])), strict=True):
        part.copy_(page[: len(part)], non_blocking=True)


class PagePool:
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


class HostRows:
    """Rows of equal width in pages of host memory, written and read from any row on."""

    def __init__(self, pages: PagePool, copies: PageCopies, width: int) -> None:
        """Start without pages of the pool `pages`; `width` is the bytes of a row."""
        self._pool, self._copies, self._width = pages, copies, width
        self._per_page = pages.size // width
        assert self._per_page > 0, f"a row of {width} bytes is longer than a page"
        self._pages: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages."""
        return len(self._pages) * self._pool.size

    def write(self, rows: Tensor, begin: int) -> Any:
        """Start to copy uint8 [n, width] to the rows from `begin` on; return the event of the last copy."""
        while len(self._pages) * self._per_page < begin + len(rows):
            self._pages += self._pool.take(self._pool.size)
        event = None
        for part, pages in self._parts(rows, begin):
            event = self._copies.to_pages(part, pages)
        return event

    def read(self, rows: Tensor, begin: int) -> Any:
        """Start to copy the rows from `begin` on to uint8 [n, width]; return the event of the last copy."""
        event = None
        for part, pages in self._parts(rows, begin):
            event = self._copies.to_tensor(pages, part)
        return event

    def _parts(self, rows: Tensor, begin: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield bytes of `rows`, and the pages of them: up to the first border of a page, and from there on."""
        per, width, end = self._per_page, self._width, begin + len(rows)
        # 4 rows per page, rows 3 to 10 -> row 3 in page 0 | rows 4 to 10 in pages 1 and 2
        border = min(end, -(-begin // per) * per)
        if border > begin:
            yield rows[: border - begin].view(-1), [self._pages[begin // per][begin % per * width : per * width]]
        if end > border:
            pages = self._pages[border // per : -(-end // per)]
            yield rows[border - begin :].view(-1), [page[: per * width] for page in pages]

    def __del__(self) -> None:
        """Give the pages back."""
        self._pool.give(self._pages)


def raw(rows: Tensor) -> Tensor:
    """Return dense rows [n, width] as uint8 [n, bytes]."""
    return rows.view(torch.uint8)
