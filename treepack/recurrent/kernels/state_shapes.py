"""Shapes of the kernels in `states`: columns of a state per program, warps and pipeline stages.

The columns of a state do not depend on each other, so any shape gives the same bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

_MIN_BLOCK = 16  # columns of a product


class StateConfig(NamedTuple):
    """Shape of a kernel: columns of the state per program, warps, pipeline stages."""

    block_v: int
    num_warps: int
    num_stages: int


class _StateConfigs(NamedTuple):
    """Shapes of the two kernels."""

    forward: StateConfig
    backward: StateConfig


# Not measured. Each key is the largest K that its entry takes. HALF, for bfloat16 and float16, spills nothing on sm_90;
# K = V = 128 needs 97 KiB of shared memory forward and 137 backward, 85 and 117 with 32 columns. Of three stages, the
# first loads the number and the first token of a chunk, the second its tensors, so that neither waits for the other.
HALF = {
    128: _StateConfigs(StateConfig(64, 4, 3), StateConfig(64, 4, 3)),
    256: _StateConfigs(StateConfig(32, 4, 3), StateConfig(32, 4, 3)),
}
# For float32, whose exact products the matrix units do not compute: a thread spills at most 370 bytes at 128, and with
# the delta rule 10 KB at 256.
FLOAT32 = {
    128: _StateConfigs(StateConfig(16, 8, 1), StateConfig(16, 8, 1)),
    256: _StateConfigs(StateConfig(16, 8, 1), StateConfig(16, 8, 1)),
}


def state_configs(k: Tensor) -> _StateConfigs:
    """Return the shapes of the kernels for the dtype and the width of keys [N, Hk, K]."""
    table = FLOAT32 if k.dtype == torch.float32 else HALF
    return next(configs for limit, configs in table.items() if k.shape[2] <= limit)


def narrow_config(config: StateConfig, columns: int, multiprocessors: int) -> StateConfig:
    """Return the shape for a launch that computes `columns` columns of states, all runs and heads together.

    If so few columns leave half of the multiprocessors idle, each program has half of its columns, and takes less time
    for each chunk. The columns have the same bits.
    """
    # 32 heads of 128 columns: one run is 64 programs of 64 columns, or 128 of 32 on 132 multiprocessors; two runs are
    # 128 programs of 64 columns
    block = max(_MIN_BLOCK, config.block_v // 2)
    return config._replace(block_v=block) if columns <= block * multiprocessors else config


@functools.cache
def _count_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 0 on the CPU, where programs run one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def choose_shape(config: StateConfig, runs: int, h: Tensor) -> StateConfig:
    """Return the shape for a stage of `runs` runs, with states like `h` [C, H, K, V]."""
    return narrow_config(config, runs * h.shape[1] * h.shape[3], _count_multiprocessors(h.device))
