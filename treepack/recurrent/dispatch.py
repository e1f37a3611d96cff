"""Choice of the code that computes a recurrent layer or a convolution.

    torch     plain torch (`twin`, `convolution`): any device and precision
    fla       flash-linear-attention, level by level of the tree (`levels`): GPUs
    triton    own kernels (`kernels`): GPUs, and the CPU in Triton's interpreter

`auto` takes the first in `AUTO` that has no obstacle. `use_implementation` sets another one, for all models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from treepack.attention.dispatch import Schedules
from treepack.recurrent import convolution, twin
from treepack.recurrent.chunks import build_chunks
from treepack.recurrent.convolution import build_taps

NAMES = ("torch", "fla", "triton")
AUTO = {"cuda": ("fla", "triton", "torch")}

_wanted = "auto"


@contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Compute all recurrent layers by the implementation `name` inside the block: one of `NAMES`, or auto."""
    global _wanted
    before, _wanted = _wanted, name
    try:
        yield
    finally:
        _wanted = before


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, schedules: Schedules) -> Tensor:
    """Return the convolution of the tokens of a tree; arguments as in `convolution.convolve`."""
    width = weight.shape[-1]
    taps = schedules.table(("taps", width), lambda end: build_taps(end, width))
    # flash-linear-attention has no convolution on trees, so `fla` takes the own kernels too.
    if x.dtype != torch.float64 and (_wanted == "triton" or (_wanted != "torch" and x.is_cuda)):
        from treepack.recurrent.kernels.convolution import triton_convolve

        return triton_convolve(x, weight, bias, activation, taps)
    return convolution.convolve(x, weight, bias, activation, taps)


def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, schedules: Schedules) -> Tensor:
    """Return the outputs of the tokens of a tree, [N, H, V]; arguments as in `twin.scan`, N tokens of all rows."""
    return twin.scan(q, k, v, g, beta, schedules.table("chunks", build_chunks))
