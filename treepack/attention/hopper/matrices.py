"""Tensors as the matrices that the copy engine (TMA) reads: descriptors, and steps between heads.

x [B, H, T, D] --matrix_arguments--> {"q_descriptor": ..., "q_at": ...}                      whole heads
                                     {"q_first": ..., "q_second": ..., "q_at": ...}          heads in parts
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def matrix_arguments(name: str, x: Tensor, rows: int, parts: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the arguments that a kernel needs to copy `rows` tokens of a head of `x` at a time.

    Args:
        name: prefix of the arguments.
        x: [B, H, T, D] in bfloat16 or float16.
        rows: tokens of one copy.
        parts: widths of the parts of a head, one or two that add up to D; None for kernels of whole heads.
    """
    x, shape, at = _as_matrix(x)
    strides = [x.stride(2), 1]
    widths = (x.shape[-1],) if parts is None else parts
    descriptors = [TensorDescriptor(x, shape, strides, [rows, width], _layout(width)) for width in widths]
    if parts is None:
        return {f"{name}_descriptor": descriptors[0], f"{name}_at": at}
    first, second = descriptors if len(descriptors) == 2 else (descriptors[0], None)
    return {f"{name}_first": first, f"{name}_second": second, f"{name}_at": at}


@functools.cache
def _layout(width: int) -> NVMMASharedLayout:
    # Rows of 64 and more elements are swizzled in 128 bytes, of 32 in 64, of 16 in 32.
    return NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=2)


def _as_matrix(x: Tensor) -> tuple[Tensor, list[int], tuple[int, int, int]]:
    """Return x [B, H, T, D], the shape of the matrix that it is to the copy engine, and the steps between heads.

    The copy engine reads a matrix, and zeros beyond its edges. The rows of the matrix are tokens; the heads follow one
    another either as rows or as columns. Token t of head h of batch row b starts at row b * batch + h * head + t and at
    column h * column, with (batch, head, column) the third result. A tensor that has neither form is copied first.
    """
    # [B, H, T, D] in memory, 2 x 3 x 100 x 64: heads are rows,    matrix [600, 64],  steps (300, 100, 0)
    # [B, T, H, D] in memory, 2 x 100 x 3 x 64: heads are columns, matrix [200, 192], steps (100, 0, 64)
    batch, heads, length, width = x.shape
    of_batch, of_head, of_token, step = x.stride()
    aligned = x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:3])
    rows_apart = step == 1 and of_token >= width and aligned
    below = of_head == length * of_token and (batch == 1 or of_batch == heads * of_head)
    beside = (heads - 1) * of_head + width <= of_token and (batch == 1 or of_batch == length * of_token)
    if rows_apart and below:
        return x, [batch * heads * length, width], (heads * length, length, 0)
    if rows_apart and beside:
        shape = [batch * length, (heads - 1) * of_head + width]
        return x, shape, (length if batch > 1 else 0, 0, of_head)
    return _as_matrix(torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x))
