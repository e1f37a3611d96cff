"""Launches of the kernels of the delta rule inside chunks, to be compiled by `recurrent_ahead_of_time`."""

from __future__ import annotations

import torch

from support.attention_trees import chain
from treepack.attention.kernel_launch import KernelLaunch
from treepack.recurrent.chunks import build_chunks
from treepack.recurrent.kernels.delta_rule import (
    FLOAT32,
    HOPPER,
    DeltaRuleConfigs,
    DeltaRuleGradients,
    DeltaRuleOperands,
    delta_products_launch,
    gradient_launch,
    inverse_launch,
)

HEADS, GROUP = 4, 2


def launches(dtype: torch.dtype, keys: int, values: int) -> dict[str, KernelLaunch]:
    """Return the launches of one layer on Hopper."""
    return build(dtype, keys, values, FLOAT32 if dtype == torch.float32 else HOPPER)


def build(dtype: torch.dtype, keys: int, values: int, configs: DeltaRuleConfigs) -> dict[str, KernelLaunch]:
    """Return the launches in the shapes `configs`."""
    chunks = build_chunks(chain(70))
    count = len(chunks.end)
    k = torch.empty(count, HEADS // GROUP, keys, dtype=dtype)
    v, u, du, dv = (torch.empty(count, HEADS, values, dtype=dtype) for _ in range(4))
    w, dw, dk = (torch.empty(count, HEADS, keys, dtype=dtype) for _ in range(3))
    inverse = torch.empty(count, HEADS, 64, dtype=dtype)
    beta, a, dbeta, da = (torch.empty(count, HEADS) for _ in range(4))
    operands = DeltaRuleOperands(k, v, beta, a, chunks)
    gradients = DeltaRuleGradients(dw, du, dk, dv, dbeta, da)
    return {
        "inverse": inverse_launch(operands, inverse, configs.inverse),
        "products": delta_products_launch(operands, inverse, w, u, configs.products),
        "backward": gradient_launch(operands, inverse, gradients, configs.backward),
    }
