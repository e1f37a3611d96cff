"""Inputs between NaN, and new tensors full of NaN: a read outside of the row or a missing write shows in results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def surrounded(x: Tensor) -> Tensor:
    """Return `x` [B, H, T, D] as a view into a NaN buffer [B, T + 2, H + 1, D + 16]."""
    batch, heads, length, width = x.shape
    buffer = torch.full((batch, length + 2, heads + 1, width + 16), torch.nan, dtype=x.dtype, device=x.device)
    # [B, T + 2, H + 1, D + 16] -> [B, T, H, D] -> [B, H, T, D], NaN before and after every token, head and element
    view = buffer[:, 1:-1, 1:, :width].transpose(1, 2)
    view.copy_(x)
    return view


def poisoned_empty() -> Callable[..., Tensor]:
    """Return a `torch.empty` whose floating-point tensors are filled with NaN."""
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        tensor: Tensor = empty(*args, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    return poisoned
