r"""Tree attention in simple code for any device: the twin that every faster backend is tested against.

    token q may see token k   <=>   start[q] <= k <= q < subtree_end[k]        start[q] = 0 without a window

             k: 0 1 2 3 4        row   0 1 2 3 4      tree   0 - 1 - 2
    q = 0       x                subtree_end                      \
        1       x x                    5 3 3 5 5              3 - 4
        2       x x x
        3       x . . x          tokens 3 and 4 follow token 0 and do not see 1 and 2
        4       x . . x x

In: query [B, H, T, D], key and value [B, H_kv, T, D], subtree_end [B, T]; out: [B, H, T, D_v]. Queries are processed
`QUERIES` at a time, with a mask over the keys that any of these queries sees: by torch's SDPA, or by plain products
where SDPA lacks an option. `interface` registers the result for models.

A rectangle has the queries of the tokens first ... T - 1 only, and the keys and values of all T tokens. Its output is
the same rows of the square, the lines q = first ... of the picture.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treepack.errors import TreepackError

# Queries per call of SDPA: the mask and the scores of a call have at most 512 x T elements per row and head, not T x T.
QUERIES = 512


def visible_pairs(subtree_end: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the mask as bool [B, T (query), T (key)], from subtree_end and the first visible tokens, int [B, T]."""
    # [5 3 3 5 5] -> the picture of the header
    index = torch.arange(subtree_end.shape[-1], device=subtree_end.device)
    query, key = index[None, :, None], index[None, None, :]
    seen = (key <= query) & (query < subtree_end[:, None, :])
    return seen if start is None else seen & (start[:, :, None] <= key)


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    subtree_end: Tensor,
    *,
    scale: float | None = None,
    start: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Compute softmax attention over the visible pairs, in float64 for float64 and in float32 otherwise.

    Args:
        query: [B, H, T - first, D], of the last tokens of the row.
        key: [B, H_kv, T, D]; H is a multiple of H_kv, and query head h reads head h // (H / H_kv).
        value: [B, H_kv, T, D_v].
        subtree_end: int [B, T]; one past the last token of each token's subtree.
        scale: factor of the scores, D**-0.5 by default.
        start: int [B, T], the first token that each token sees (`reach.first_visible`); None for all ancestors.
        sinks: [H], one more score per head that takes its share of the softmax and has no value.
        softcap: scores become softcap * tanh(score / softcap).
        first: the token of the first query; the tokens before it are only keys and values.

    Returns:
        [B, H, T - first, D_v] in the dtype of `value`.

    Raises:
        TreepackError: if the shapes do not fit.
    """
    check_shapes(query, key, value, subtree_end, first)
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.shape[1] // key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    keys = key.to(work).repeat_interleave(groups, dim=1)
    values = value.to(work).repeat_interleave(groups, dim=1)
    blocks = []
    for number, part in enumerate(torch.split(query.to(work), QUERIES, dim=2)):
        begin = first + number * QUERIES
        last = begin + part.shape[2]
        # Keys that some query of some row may see. Queries 4 and 5 of subtree_end [6 6 4 4 6 6] -> near [0 1 4 5]
        near = (subtree_end[:, :last] > begin).any(dim=0).nonzero().squeeze(-1)
        at = torch.arange(begin, last, device=query.device)[:, None]
        # [keys] and [queries, 1] and [B, 1, keys] -> [B, queries, keys]
        seen = (near <= at) & (at < subtree_end[:, None, near])
        if start is not None:
            seen = seen & (start[:, begin:last, None] <= near)
        near_keys, near_values, mask = keys[:, :, near], values[:, :, near], seen[:, None]
        if sinks is None and softcap is None:
            blocks.append(scaled_dot_product_attention(part, near_keys, near_values, attn_mask=mask, scale=factor))
        else:
            blocks.append(_softmax(part @ near_keys.mT * factor, mask, sinks, softcap) @ near_values)
    return torch.cat(blocks, dim=2).to(value.dtype)


def _softmax(scores: Tensor, seen: Tensor, sinks: Tensor | None, softcap: float | None) -> Tensor:
    """Return the weights [B, H, queries, keys] of scores of that shape, `seen` [B, 1, queries, keys]."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    # [H] -> [B, H, queries, 1], an extra column that is dropped after the softmax
    column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def check_shapes(query: Tensor, key: Tensor, value: Tensor, subtree_end: Tensor, first: int = 0) -> None:
    """Check that the tensors are one self-attention over the rows that `subtree_end` describes.

    Args:
        query: [B, H, T - first, D].
        key, value: [B, H_kv, T, D] and [B, H_kv, T, D_v].
        subtree_end: int [B, T].
        first: the token of the first query.

    Raises:
        TreepackError: if they are not.
    """
    length = key.shape[-2]
    if not 0 <= first < max(length, 1):
        raise TreepackError(f"attention: first is {first} and the row has {length} tokens; pass 0 to {length - 1}")
    if first and query.shape[-2] != length - first:
        raise TreepackError(
            f"attention: query has {query.shape[-2]} tokens, key has {length} and first is {first}; "
            f"pass the queries of the last {length - first} tokens"
        )
    if query.shape[-2] != length - first or key.shape[:-1] != value.shape[:-1]:
        raise TreepackError(
            f"attention: query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not "
            "share their tokens; call the model without a cache"
        )
    if query.shape[1] % key.shape[1]:
        raise TreepackError(
            f"attention: {query.shape[1]} query heads are not a multiple of {key.shape[1]} key heads; "
            "pass the same number of query heads for every key head"
        )
    expected = (query.shape[0], length)
    if tuple(subtree_end.shape) != expected or subtree_end.is_floating_point():
        raise TreepackError(
            f"attention: subtree_end is {subtree_end.dtype} {tuple(subtree_end.shape)}; expected integers "
            f"{expected}, one per token of the row"
        )
