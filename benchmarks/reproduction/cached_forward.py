"""The forward passes of the decoder: prompts into keys and values, and one token more with a cache of them.

    prefill      ids [P, N], padded at the end -> keys and values [P, H_kv, N, D] of each layer
    next_logits  token [B] at position [B] -> its keys and values are written to the cache, logits [B, V]

They run the modules of a model of Qwen3's or Llama's shape, so they see its weights as they are at the moment. Every
operation of `next_logits` has shapes that depend on nothing but B and T, so a CUDA graph can repeat it.

W width, H query heads, H_kv heads of keys, G = H / H_kv, D head width, T size of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def make_cache(causal: Any, rows: int, size: int) -> Tensor:
    """Return zeros for keys and values [layers, 2, rows, H_kv, size, D] on the model's device."""
    config = causal.config
    shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, size, head_width(config))
    # Masked positions have weight 0, which only finite values make 0.
    return torch.zeros(shape, dtype=causal.dtype, device=causal.device)


def head_width(config: Any) -> int:
    """Return the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def prefill(causal: Any, ids: Tensor, write: Callable[[int, Tensor, Tensor], None]) -> None:
    """Compute prompts and hand keys and values [P, H_kv, N, D] of each layer to `write(layer, keys, values)`.

    `ids` int64 [P, N] are padded at the end with any token: no token sees what comes after it.
    """
    model = causal.model
    x = model.embed_tokens(ids)  # [P, N, W]
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    cos, sin = (part[:, :, None] for part in model.rotary_emb(x, positions))  # [1, N, 1, D]
    for number, layer in enumerate(model.layers):
        q, k, v = (part.transpose(1, 2) for part in _projected(layer, x, cos, sin))  # [P, heads, N, D]
        write(number, k, v)
        if number + 1 == len(model.layers):
            return  # nothing but keys and values is wanted
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.self_attn.scaling)
        x = _after_attention(layer, x, attended.transpose(1, 2).flatten(2))


def next_logits(causal: Any, cache: Tensor, token: Tensor, position: Tensor) -> Tensor:
    """Append a token to each row and return its logits, float32 [B, V].

    Args:
        causal: the model.
        cache: keys and values [layers, 2, B, H_kv, T, D]; positions before `position` are filled.
        token: int64 [B].
        position: int64 [B], below T.
    """
    model = causal.model
    x = model.embed_tokens(token)  # [B, W]
    # [B, 1, D] each, the same for all heads
    cos, sin = model.rotary_emb(x[:, None], position[:, None])
    hidden = torch.arange(cache.shape[4], device=token.device) > position[:, None]  # [B, T]
    for layer, (keys, values) in zip(model.layers, cache, strict=True):
        q, k, v = _projected(layer, x, cos, sin)  # [B, heads, D]
        at = position[:, None, None, None].expand(-1, k.shape[1], 1, k.shape[2])
        keys.scatter_(2, at, k[:, :, None])
        values.scatter_(2, at, v[:, :, None])
        # Query heads j * G .. j * G + G - 1 read the keys of head j: [B, H, D] -> [B, H_kv, G, D].
        q = q.view(len(q), k.shape[1], -1, q.shape[2])
        scores = (q @ keys.transpose(2, 3)).float() * layer.self_attn.scaling  # [B, H_kv, G, T]
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1).to(values.dtype)
        x = _after_attention(layer, x, (weights @ values).flatten(1))
    return causal.lm_head(model.norm(x)).float()  # type: ignore[no-any-return]


def _projected(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [..., heads, D] of hidden states [..., W]; cos and sin are [..., 1, D]."""
    attention = layer.self_attn
    h = layer.input_layernorm(x)
    q, k, v = (
        project(h).unflatten(-1, (-1, attention.head_dim))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    # Llama does not normalise queries and keys.
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _after_attention(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    x = x + layer.self_attn.o_proj(attended)
    return x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[no-any-return]
