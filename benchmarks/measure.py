"""Common functions of the benchmarks: the commit, device and allocator of a run, and seconds of a call."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def commit() -> str:
    """Return the short name of the commit, with "-dirty" if files have changed, or "unknown" outside of a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def device_name(*, dry: bool) -> str:
    """Return the name of the GPU, or "CPU" in a dry run."""
    import torch

    return "CPU" if dry else str(torch.cuda.get_device_name())


def alloc_retries() -> int:
    """Return how many times the allocator gave all free blocks back because none was large enough."""
    import torch

    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def seconds_of(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the seconds of one call by the clock; the device is idle before and after."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def product_rate(device: torch.device) -> float:
    """Return the operations per second of 8192 x 8192 x 8192 products of random bfloat16: the median of 20."""
    import torch

    size = 8192 if device.type == "cuda" else 128
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [seconds_of(device, lambda: a @ b) for _ in range(23)][3:]
    return float(2 * size**3 / statistics.median(times))
