"""Attention over the pages of transformers' cache by the flash kernel that PyTorch contains, without another package.

    queries [1, H, T, D] of R requests, keys and values of their pages [K, H_kv, D] --> [1, T, H, D]

transformers' own choice without the package flash-attn is one dense product of all queries with the keys of all
requests, and a mask that limits each request to its keys: work and memory grow with the square of the number of
requests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treepack.model.layers import head_widths

# The manager of transformers builds no mask for implementations with "flash" in the name. A 2 or 3 would make it look
# for the functions of the package flash-attn.
NAME = "treepack_paged_flash"


def takes(config: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernel can run a model with this text configuration."""
    # Without a type of each layer, a window is that of all layers.
    windowed = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    types = set(getattr(config, "layer_types", None) or [windowed])
    is_plain = types == {"full_attention"} and not getattr(config, "attn_logit_softcapping", None)
    # Models with v_head_dim have values and keys of different dimensions.
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and is_plain
        and getattr(config, "v_head_dim", None) is None
        and all(width % 8 == 0 and width <= 256 for width in head_widths(config))
    )


def register_local_attention() -> None:
    """Make the implementation known to transformers by its `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _paged_flash)
    # Some versions put this in front of the names of all implementations that read pages.
    AttentionInterface.register(f"paged|{NAME}", _paged_flash)


def _paged_flash(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Write the new keys and values [1, H_kv, T, D] to the cache, and attend to all keys of each query's request.

    `options` are the manager's: cumulative lengths of the requests in queries and keys, and indices of their pages.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    if "max_length_q" in options:
        # [1, H_kv, K, D] -> [K, H_kv, D]
        key, value = (part.squeeze(0).transpose(0, 1) for part in cache.update(key, value, layer, options))
        longest_q, longest_k = options["max_length_q"], options["max_length_k"]
    else:
        key, value = cache.update(key, value, layer, options["read_index"], options["write_index"])
        longest_q, longest_k = options["max_seqlen_q"], options["max_seqlen_k"]
    lengths_k = options["cu_seq_lens_k"]
    if isinstance(lengths_k, dict):
        lengths_k, longest_k = lengths_k["full_attention"], longest_k["full_attention"]
    out, *_ = torch.ops.aten._flash_attention_forward(
        query.squeeze(0).transpose(0, 1).contiguous(),
        key.contiguous(),
        value.contiguous(),
        options["cu_seq_lens_q"].to(torch.int32),
        lengths_k.to(torch.int32),
        longest_q,
        longest_k,
        0.0,
        True,  # causal: the last query of a request sees all of its keys
        False,
        scale=scaling,
    )
    return out.unsqueeze(0), None
