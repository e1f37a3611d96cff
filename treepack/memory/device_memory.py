"""The memory of a device: the bytes that are free, and the bytes that a computation needs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from treepack.memory.budget import available_memory


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still allocate on a device, on a CPU by `available_memory`."""
    if device.type != "cuda":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that torch has taken from the device and does not use.
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


@dataclass(frozen=True)
class MemoryMeter:
    """The memory of a device in bytes, and a clock.

    Attributes:
        allocated: returns the bytes of tensors.
        peak: returns their maximum since the last `reset`.
        reset: starts a new maximum.
        free: returns the bytes that may still be allocated.
        total: bytes of the device.
        clock: returns seconds, after the device has finished all work.
    """

    allocated: Callable[[], int]
    peak: Callable[[], int]
    reset: Callable[[], None]
    free: Callable[[], int] = available_memory
    total: int = 0
    clock: Callable[[], float] = time.perf_counter


def gpu_meter(device: torch.device) -> MemoryMeter:
    """Return the memory of tensors on a GPU, as torch counts it, and a clock that waits for the GPU."""

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return MemoryMeter(
        lambda: torch.cuda.memory_allocated(device),
        lambda: torch.cuda.max_memory_allocated(device),
        lambda: torch.cuda.reset_peak_memory_stats(device),
        lambda: free_memory(device),
        torch.cuda.get_device_properties(device).total_memory,
        clock,
    )


@dataclass(frozen=True)
class StepMemory:
    """The memory of the device on which a run computes its steps.

    `needed` is the peak of its plan in bytes beside weights, gradients and optimiser, 0 if it was not measured, and
    `excess` the bytes by which measured steps exceeded it. `record` has JSON values about the forecast for run.json.
    `forecast` returns the peak of a different plan for rows of some tokens (None: the trained rows), None if unknown.
    """

    meter: MemoryMeter
    needed: int = 0
    excess: int = 0
    record: dict[str, Any] = field(default_factory=dict)
    forecast: Callable[[Any, int | None], int | None] = lambda *_: None

    @property
    def margin(self) -> int:
        """Bytes that stay free for fragments and the error of the estimate: 8 % of the device."""
        return int(0.08 * self.meter.total)


@torch.no_grad()  # with gradients, to_local returns a view, whose memory cannot be replaced
def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, which is the tensor itself unless FSDP2 shards it."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def update_bytes(model: Any, *, state_bytes: float, gradients: bool = True) -> int:
    """Return the bytes of gradients and of an optimiser's states, of `state_bytes` per trained weight, on this rank.

    Gradients that exist do not count, nor any without `gradients`.
    """
    total = 0.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            own = local_part(parameter)
            total += own.numel() * ((own.element_size() if gradients and parameter.grad is None else 0) + state_bytes)
    return math.ceil(total)
