"""The launches of the output kernels in their shapes for GPUs other than Hopper."""

from __future__ import annotations

import torch

from support.output_launches import build
from treepack.attention.kernel_launch import KernelLaunch
from treepack.recurrent.kernels.outputs import PORTABLE


def launches(dtype: torch.dtype, keys: int, values: int) -> dict[str, KernelLaunch]:
    """Return the launches of all kernels."""
    return build(dtype, keys, values, PORTABLE)
