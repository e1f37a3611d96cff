"""Queries and keys of length one, as the gated delta rule takes them.

    y = scale x r        r = 1 / sqrt(|x|^2 + epsilon)
    dx = scale r (dy - x r^2 (x dy))

Between forward and backward only x and r are in memory, not the float32 values in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_EPSILON = 1e-6  # that of transformers and of flash-linear-attention


def normalise(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return `x` [..., K] divided by its Euclidean norm over K, times `scale`; float64 of float64, else float32."""
    y: Tensor = _NormaliseRows.apply(x, scale)  # type: ignore[no-untyped-call]
    return y


class _NormaliseRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        r = torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPSILON)
        ctx.save_for_backward(x, r)
        ctx.scale = scale
        return wide * (scale * r)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, r = ctx.saved_tensors
        (dy,) = gradients
        wide = x.to(r.dtype)
        along = (wide * dy).sum(-1, keepdim=True)
        return ((dy - wide * (r.square() * along)) * (ctx.scale * r)).to(x.dtype), None
