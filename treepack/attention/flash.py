"""Tree attention through FlexAttention's FlashAttention-4 backend: the block lists of `flex`, another kernel.

Same inputs and outputs as `flex`, in bfloat16 and float16 on Hopper and Blackwell, if flash-attn-4 is installed. That
library takes block lists only in fixed tile sizes: 128 keys, and 128 queries on Hopper or 256 on Blackwell, because
there a thread block works on two tiles of queries at a time. For head dimensions above 128 its backward tiles are
narrower than 128 keys, so it refuses these lists.

Its backward sums dq in the order in which blocks finish, so two runs may differ in the last bits.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from treepack.attention.flex import attend_blocks, build_block_mask, fused_kernel
from treepack.attention.reference import check_shapes

MAX_HEAD_DIM = 128  # of the backward; see the header


@functools.cache
def has_flash_attention_4() -> bool:
    """Return True if flash-attn-4 can be imported; an older flash-attn has no `flash_attn.cute`."""
    try:
        return find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def build_flash_mask(subtree_end: Tensor) -> BlockMask:
    """Return `flex.build_block_mask` of `subtree_end` [B, T], in the tile sizes of the GPU that contains it."""
    # Capability 9 is Hopper; 10 and 11 are Blackwell.
    major, _ = torch.cuda.get_device_capability(subtree_end.device)
    return build_block_mask(subtree_end, query_block=128 if major == 9 else 256)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    subtree_end: Tensor,
    *,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute softmax attention over the visible pairs.

    Args:
        query, key, value, subtree_end, scale: as in `reference.reference_attention`, bfloat16 or float16.
        block_mask: `build_flash_mask(subtree_end)`; a caller with many layers builds it once.

    Returns:
        [B, H, T, D_v] in the dtype of the inputs.

    Raises:
        TreepackError: if the shapes do not fit.
    """
    check_shapes(query, key, value, subtree_end)
    mask = build_flash_mask(subtree_end) if block_mask is None else block_mask
    return attend_blocks(fused_kernel("FLASH"), query, key, value, mask, scale)[0]
