"""The launches of the output kernels on a few tokens, to be compiled for Hopper by `recurrent_ahead_of_time`."""

from __future__ import annotations

import torch

from treepack.attention.kernel_launch import KernelLaunch
from treepack.recurrent.chunks import build_chunks
from treepack.recurrent.kernels.outputs import (
    FLOAT32,
    HOPPER,
    OutputConfigs,
    OutputOperands,
    gradient_products_launch,
    local_launch,
    outputs_launch,
)

TOKENS, KEY_HEADS, HEADS = 128, 2, 4


def launches(dtype: torch.dtype, keys: int, values: int) -> dict[str, KernelLaunch]:
    """Return the launches of all kernels."""
    return build(dtype, keys, values, FLOAT32 if dtype == torch.float32 else HOPPER)


def build(dtype: torch.dtype, keys: int, values: int, configs: OutputConfigs) -> dict[str, KernelLaunch]:
    """Return the launches of all kernels in the shapes `configs`; that of `products` with and without delta rule."""
    chunks = build_chunks(torch.full((1, TOKENS), TOKENS))
    key = torch.empty(TOKENS, KEY_HEADS, keys, dtype=dtype)
    value, result = torch.empty(TOKENS, HEADS, values, dtype=dtype), torch.empty(TOKENS, HEADS, keys, dtype=dtype)
    state = torch.empty(len(chunks.begin), HEADS, keys, values, dtype=dtype)
    a = torch.empty(TOKENS, HEADS)
    operands = OutputOperands(key, key, a, chunks)
    incoming = {"do": value, "dh": state, "du": value}
    results = {"dq": result, "dk": result, "dw": result, "da": a[..., None]}
    made = {
        "outputs": outputs_launch(operands, value, state, value, configs.outputs),
        "local": local_launch(operands, value, value, configs.local),
    }
    for name, delta in (("products", True), ("products without delta rule", False)):
        made[name] = gradient_products_launch(operands, value, state, incoming, results, configs.products, delta=delta)
    return made
