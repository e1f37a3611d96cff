"""The launches of tree convolutions, for `recurrent_ahead_of_time`: K is the number of taps, V that of channels."""

from __future__ import annotations

import torch

from support.attention_trees import star
from treepack.attention.kernel_launch import KernelLaunch
from treepack.recurrent.convolution import build_taps
from treepack.recurrent.kernels.convolution import (
    ConvolutionGradients,
    ConvolutionInputs,
    convolution_launch,
    distant_launch,
    input_launch,
    partial_sums,
    weight_launch,
)


def launches(dtype: torch.dtype, keys: int, values: int) -> dict[str, KernelLaunch]:
    """Return the launches of a convolution with silu and bias over a prompt and two answers."""
    taps = build_taps(star(8, 2, 8), keys)
    count = taps.ancestors.shape[1]
    x, out, do, dx = (torch.empty(count, values, dtype=dtype) for _ in range(4))
    parts = partial_sums(count)
    gradients = ConvolutionGradients(
        do=do,
        inner=torch.empty(count, values),
        distant=torch.empty(len(taps.targets), values),
        dx=dx,
        dweights=torch.empty(parts, keys, values),
        dbias=torch.empty(parts, values),
    )
    inputs = ConvolutionInputs(x, torch.empty(keys, values), torch.empty(values, dtype=dtype), True, taps)
    return {
        "forward": convolution_launch(inputs, out),
        "weight": weight_launch(inputs, gradients),
        "distant": distant_launch(inputs, gradients),
        "input": input_launch(inputs, gradients),
    }
