"""The memory of a device: the bytes that are free, and the bytes that a computation needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from treepack.memory.budget import available_memory


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still allocate on a device; for a CPU see `available_memory`."""
    if device.type != "cuda":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that torch has taken from the device and does not use.
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


@dataclass(frozen=True)
class MemoryMeter:
    """The memory of a device in bytes: `allocated` now, `peak` since the last `reset`."""

    allocated: Callable[[], int]
    peak: Callable[[], int]
    reset: Callable[[], None]

    def peak_of(self, run: Callable[[], Any]) -> int:
        """Run a function; return the most bytes that it added at any time."""
        self.reset()
        before = self.allocated()
        run()
        return self.peak() - before


def gpu_meter(device: torch.device) -> MemoryMeter:
    """Return the memory of tensors on a GPU, as torch counts it."""
    return MemoryMeter(
        lambda: torch.cuda.memory_allocated(device),
        lambda: torch.cuda.max_memory_allocated(device),
        lambda: torch.cuda.reset_peak_memory_stats(device),
    )
