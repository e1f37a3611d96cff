"""Weights of experts in the dtype of the products, cast once per optimiser step.

    with cast_once():                 all rows of one optimiser step, forward and backward
        cast_weight(weight, bf16)     the first call casts and keeps the result
        cast_weight(weight, bf16)     later calls return it, in recomputed layers too
    optimiser.step()                  the casts are freed

Without the block every call casts, which is always correct. The block must not update the weights; an update that
increases the version counter of a tensor is noticed, and the weight is cast again. Do not use the block with sharded
weights: they exist only while a layer runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

# (address, shape, dtype of the cast) of a weight -> the weight, its version when it was cast, the cast. The weight is
# kept so that no other tensor can have its address.
_Kept: TypeAlias = dict[tuple[int, torch.Size, torch.dtype], tuple[Tensor, int, Tensor]]

# The casts of the open block. A global, not a context variable: layers are recomputed in the threads of autograd.
_kept: _Kept | None = None


@contextmanager
def cast_once(*, keep: bool = True) -> Iterator[None]:
    """Keep the casts of parameters during the block; with `keep` False, or inside another block, change nothing."""
    global _kept
    if _kept is not None or not keep:
        yield
        return
    _kept = {}
    try:
        yield
    finally:
        _kept = None


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight` in `dtype`, detached; the weight itself if it has the dtype."""
    if weight.dtype == dtype:
        return weight.detach()
    key = weight.data_ptr(), weight.shape, dtype
    if _kept is not None and key in _kept:
        source, version, cast = _kept[key]
        if source._version == version:
            return cast
    cast = weight.detach().to(dtype)
    # Only parameters: other tensors are made again for every call, and keeping them would fill the memory.
    if _kept is not None and isinstance(weight, nn.Parameter):
        _kept[key] = weight.detach(), weight._version, cast
    return cast
