"""Launches of the kernels of the delta rule for GPUs other than Hopper, to be compiled by `recurrent_ahead_of_time`."""

from __future__ import annotations

import torch

from support.delta_rule_launches import build
from treepack.attention.kernel_launch import KernelLaunch
from treepack.recurrent.kernels.delta_rule import FLOAT32, PORTABLE


def launches(dtype: torch.dtype, keys: int, values: int) -> dict[str, KernelLaunch]:
    """Return the launches of one layer."""
    return build(dtype, keys, values, FLOAT32 if dtype == torch.float32 else PORTABLE)
