"""Ranges of nodes or trajectories, for passes over a trie that is larger than the memory.

    for first, end in ranges_of_trajectories(trie): ...      trajectories [first, end) have about RANGE_TOKENS tokens

The mapped pages that a pass has touched are released after each range.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from treepack.trajectory import Int64
from treepack.trie.trie import Trie

# 16 MB of token ids, or a few of these for the columns of trajectories: large enough that numpy needs all of the time.
RANGE_TOKENS = 1 << 22


def ranges_of_nodes(trie: Trie) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, end) of nodes that own at least `RANGE_TOKENS` tokens; the last one may own fewer."""
    yield from _release_after_each(trie, ranges(trie.node_start, RANGE_TOKENS))


def ranges_of_trajectories(trie: Trie) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, end) of trajectories that have at least `RANGE_TOKENS` tokens, counted one by one."""
    yield from _release_after_each(trie, ranges(np.concatenate([[0], np.cumsum(trie.lengths)]), RANGE_TOKENS))


def ranges(offsets: Int64, limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, end) of items that reach `limit` together; `offsets` int64 [num_items + 1] are their sizes.

    The size of a range exceeds `limit` by less than an item.
    """
    # Sizes [3, 4, 9, 1], offsets [0, 3, 7, 16, 17], limit 6 -> cuts 2 and 3, at or after 6 and 12 -> (0, 2), (2, 3).
    cuts = np.searchsorted(offsets, np.arange(limit, offsets[-1], limit))
    yield from pairwise(np.unique(np.concatenate([[0], cuts, [len(offsets) - 1]])).tolist())


def max_token_id(trie: Trie) -> int:
    """Return the largest token id of a trie."""
    return max(
        int(trie.tokens[trie.node_start[a] : trie.node_start[b]].max(initial=0)) for a, b in ranges_of_nodes(trie)
    )


def _release_after_each(trie: Trie, each: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for own in each:
        yield own
        trie.storage.release()
