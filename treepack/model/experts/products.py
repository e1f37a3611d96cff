"""Grouped products in torch: each expert multiplies its block of rows.

    multiply  x [S, K], w [E, K, N] -> [S, N]       out[s] = x[s] @ w[expert of s]
    outer     a [S, M], b [S, N]    -> [E, M, N]    out[e] = sum over the rows s of e of a[s] outer b[s]

`ends` int32 [E] is one past the last row of each expert. bfloat16 on a GPU goes through torch's grouped product. All
other dtypes and devices take a loop over experts, which is exact in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from treepack.model.experts.weights import cast_weight

_ALIGNMENT = 8  # bfloat16 elements in 16 bytes: the strides that torch's grouped product can read


def _multiply(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Return out[s] = x[s] @ w[e] for the rows s of each expert e: [S, K], [E, K, N] -> [S, N] in the dtype of `x`."""
    if _is_native(x, *w.shape[1:]):
        return grouped_mm(x, w, offs=ends)
    out = x.new_empty(len(x), w.shape[2])
    for expert, rows in _groups(ends):
        torch.mm(x[rows], w[expert], out=out[rows])
    return out


def _outer_products(a: Tensor, b: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return out[e] = a[rows of e].T @ b[rows of e]: [S, M], [S, N] -> [E, M, N] in `dtype`, 0 without rows."""
    if _is_native(a, a.shape[1], b.shape[1]):
        return grouped_mm(a.t(), b, offs=ends).to(dtype)
    out = a.new_zeros(len(ends), a.shape[1], b.shape[1], dtype=dtype)
    for expert, rows in _groups(ends):
        out[expert] = a[rows].t() @ b[rows]
    return out


def _is_native(x: Tensor, *sizes: int) -> bool:
    if not (x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)):
        return False
    return len(x) > 0 and all(size % _ALIGNMENT == 0 for size in sizes)


def _groups(ends: Tensor) -> list[tuple[int, slice]]:
    # ends [2, 2, 5] -> [(0, 0:2), (2, 2:5)]; an expert without rows is left out
    stops = ends.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *stops[:-1]], stops, strict=True)) if b > a]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        # The weight is saved, not its cast: a sharded weight is freed after the layer and gathered again for backward.
        ctx.save_for_backward(x, weight, ends)
        ctx.transposed = transposed
        w = cast_weight(weight, x.dtype)
        return _multiply(x, w if transposed else w.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            w = cast_weight(weight, grad.dtype)
            x_grad = _multiply(grad, w.transpose(1, 2) if ctx.transposed else w, ends)
        if ctx.needs_input_grad[1]:
            a, b = (x, grad) if ctx.transposed else (grad, x)
            weight_grad = _outer_products(a, b, ends, weight.dtype)
        return x_grad, weight_grad, None, None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    """Return the rows of each expert times its weights: [S, N].

    Args:
        x: [S, K] in the dtype of the products.
        weight: [E, N, K], or with `transposed` [E, K, N], in any dtype; its gradient is in the same one.
        ends: int32 [E], one past the last row of each expert.
        transposed: True if `weight` is [E, K, N].
    """
    apply: Any = _GroupedLinear.apply
    out: Tensor = apply(x, weight, ends, transposed)
    return out
