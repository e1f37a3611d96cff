r"""How far back a layer sees: sliding windows and chunks on trees, as one integer per token.

A window or a chunk bounds positions on a path. Along a path the indices of tokens grow with their positions, so that a
bound on positions is a bound on indices: the whole mask is

    token q sees token k   <=>   start[q] <= k <= q < subtree_end[k]

             position   start, window 2   start, chunk 2
    0 - 1 - 2    0 1 2      0 0 1             0 0 2           start[q] is the ancestor of q (or q itself) at the
     \           |          |                 |               position max(0, position - 1), or at the first position
      3 - 4      1 2        0 3               0 4             of its chunk

In: subtree_end int [B, T]. Out: start int32 [B, T]; None if every path fits into one window or chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from treepack.errors import TreepackError


class KeyReach(NamedTuple):
    """The keys that a query sees on its path.

    kind    "window": the query and the `size` - 1 tokens before it. "chunk": the query and the tokens before it in its
            chunk, if every path is divided into chunks of `size` tokens from its first token on.
    size    tokens, at least 1
    """

    kind: str
    size: int


def depths(subtree_end: Tensor) -> Tensor:
    """Return the number of ancestors of every token, int64 [B, T], from subtree_end [B, T]."""
    # Token k adds 1 to the tokens after it, up to the end of its subtree.
    # subtree_end 5 3 3 5 5: +1 at 1 2 3 4 5, -1 at 5 3 3 5 5 -> steps 0 1 1 -1 1 -> depths 0 1 2 1 2
    batch, length = subtree_end.shape
    steps = torch.ones(batch, length + 1, dtype=torch.int64, device=subtree_end.device)
    steps[:, 0] = 0
    steps.scatter_add_(1, subtree_end.long(), -torch.ones_like(steps[:, :length]))
    return steps.cumsum(1)[:, :length]


def first_visible(subtree_end: Tensor, reach: KeyReach | None) -> Tensor | None:
    """Return the first token that each token may see, int32 [B, T]; None if a token sees all of its ancestors.

    Args:
        subtree_end: int [B, T], one past the last token of each token's subtree. Subtrees nest.
        reach: None for layers without a window.

    Raises:
        TreepackError: if the kind is not "window" or "chunk", or the size is below 1.
    """
    if reach is None:
        return None
    if reach.kind not in ("window", "chunk") or reach.size < 1:
        raise TreepackError(
            f"attention: the reach is a {reach.kind} of {reach.size} tokens; expected a window or chunk of at least 1"
        )
    depth = depths(subtree_end)
    if depth.numel() == 0 or int(depth.max()) < reach.size:  # the longest path fits
        return None
    first = (depth - (reach.size - 1)).clamp(min=0) if reach.kind == "window" else depth // reach.size * reach.size
    # In depth-first order, the ancestor of q at some depth is the last token of that depth that is not after q. So the
    # tokens are sorted by depth, then index, and the place of (first, q) in that order is looked up:
    # depths 0 1 2 1 2 -> keys 0 6 8 12 14 (tokens 0 1 3 2 4); q = 4, first = 1 -> key 9 -> place 2, token 3
    length = depth.shape[1]
    index = torch.arange(length, device=depth.device)
    keys, order = (depth * length + index).sort(dim=1)
    places = torch.searchsorted(keys, first * length + index, right=True) - 1
    return order.gather(1, places).to(torch.int32)
