"""Launches of the state kernels and of the sums of decays, to be compiled by `recurrent_ahead_of_time`."""

from __future__ import annotations

import torch

from support.attention_trees import ends_of
from treepack.attention.kernel_launch import KernelLaunch
from treepack.recurrent.chunks import build_chunks
from treepack.recurrent.kernels import decays, states
from treepack.recurrent.kernels.state_shapes import state_configs

HEADS, GROUP = 4, 2


def launches(dtype: torch.dtype, keys: int, values: int) -> dict[str, KernelLaunch]:
    """Return the launches of one layer with the delta rule, and of the forward and the backward of one without."""
    chunks = build_chunks(ends_of((70, -1), (3, 0), (5, 0)), order="levels")
    count, stage = len(chunks.end), chunks.stages[1]
    q, k = (torch.empty(count, HEADS // GROUP, keys, dtype=dtype) for _ in range(2))
    u, do, new, du = (torch.empty(count, HEADS, values, dtype=dtype) for _ in range(4))
    h = torch.empty(len(chunks.begin), HEADS, keys, values, dtype=dtype)
    a, buffer = torch.empty(count, HEADS), torch.empty(2, HEADS, keys, values)
    shapes = state_configs(k)
    made = {
        "decays": decays.decay_sum_launch(a, a, chunks, reverse=False),
        "sum": states.run_sum_launch(buffer, chunks, stage),
    }
    for name, w in {"": torch.empty(count, HEADS, keys, dtype=dtype), " without delta rule": None}.items():
        forward = states.ForwardOperands(k, u, w, a, h, new, buffer)
        backward = states.BackwardOperands(q, k, w, a, do, u, h, du, buffer)
        made[f"forward{name}"] = states.run_forward_launch(forward, chunks, stage, shapes.forward)
        made[f"backward{name}"] = states.run_backward_launch(backward, chunks, stage, shapes.backward)
    return made
