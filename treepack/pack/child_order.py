"""Order the children inside a row so that the attention kernel has few partial tiles.

    depth-first, as in the trie                     largest child first

    trunk a, branch x, trunk b, branch y, c         trunk a, b, c, branch y, branch x
    end:  c        x         c        y  c          end:   x     y  c       y         x

Any order of children and of trees gives a valid row with the same tokens. The kernel works on tiles of `BLOCK` queries
by `BLOCK` keys. Let low and high be the minimum and maximum `subtree_end` over the keys of a block. Below the diagonal,
the tiles before low are full, the tiles from low to high are partial, and the tiles after high are empty. The tile on
the diagonal is partial. So the cost of a block is high - low. If a short branch comes first, its block also contains
trunk that the whole rest of the row can see. With the largest child first, the ends of neighbouring tokens of a trunk
differ only by the branch between them.

`placement.py` calls `arrange` for each row; the counts are for the statistics of `pack`.
"""

from __future__ import annotations

import numpy as np

from treepack.trajectory import Int32, Int64

BLOCK = 128  # side of a tile of the attention kernels, in tokens
_CANDIDATES = 24  # small siblings from which a filling is made; each is one shift of `BLOCK` bits


def tile_counts(subtree_end: Int32 | Int64) -> tuple[int, int]:
    """Return the partial and full tiles of a row, padded to whole blocks, from the `subtree_end` of its tokens."""
    num = len(subtree_end)
    starts = np.arange(0, num, BLOCK)
    low = np.minimum.reduceat(subtree_end, starts).astype(np.int64)
    high = np.maximum.reduceat(subtree_end, starts).astype(np.int64)
    return _count_tiles(low, high)


def _count_tiles(low: Int64, high: Int64) -> tuple[int, int]:
    """Return the partial and full tiles, from the minimum and maximum `subtree_end` of each block of keys."""
    # BLOCK 4, low [9, 9, 9], high [10, 9, 10]: below the diagonal the blocks of keys touch [2, 1, 0] tiles, of which
    # [1, 0, 0] are full. So 2 partial tiles are there and 3 on the diagonal -> (5, 1).
    below = np.arange(1, len(low) + 1)
    full = np.maximum(low // BLOCK - below, 0)
    touched = np.maximum(-(-high // BLOCK) - below, 0)
    return int((touched - full).sum()) + len(low), int(full.sum())


def node_tiles(begin: Int64, end: Int64, num_tokens: int) -> tuple[int, int]:
    """Return the same as `tile_counts`, from the first token and the subtree end of each node in row order."""
    # begin [0, 3, 9], 10 tokens, BLOCK 4 -> starts [0, 4, 8]; nodes of block 1: first 1, stop 2; of block 2: 1 and 3.
    starts = np.arange(0, num_tokens, BLOCK)
    first = np.searchsorted(begin, starts, side="right") - 1
    stop = np.searchsorted(begin, starts + BLOCK, side="left")
    # reduceat takes the range from each entry to the next one, so every second result belongs to a block:
    # ranges [0, 2, 1, 2, 1, 3] -> ends[0:2], unused, ends[1:2], unused, ends[1:3]. `ends` has an extra entry, because
    # the last stop is the number of nodes, which is not a valid index without it.
    ranges = np.stack([first, stop], axis=1).ravel()
    ends = np.append(end, 0)
    return _count_tiles(np.minimum.reduceat(ends, ranges)[::2], np.maximum.reduceat(ends, ranges)[::2])


def arrange(size: Int64, parent: Int64) -> tuple[Int64, Int64]:
    """Return the first token and the subtree end of each node in the best order of children; int64 [nodes] each.

    `size` and `parent` describe the nodes in depth-first order. The order has the largest child first and the others
    aligned to blocks. If that does not save partial tiles, the order stays as it is.
    """
    # size [3, 6, 1], parent [-1, 0, 0] -> begin [0, 3, 9], subtree [10, 6, 1], end [10, 9, 10]
    begin = np.concatenate([[0], np.cumsum(size)[:-1]])
    num_tokens = int(begin[-1] + size[-1])
    subtree = np.array(_subtree_sizes(size.tolist(), parent.tolist()), np.int64)
    end = begin + subtree
    # One block has one tile whatever the order.
    if num_tokens <= BLOCK:
        return begin, end
    other = np.array(_align_begins(size.tolist(), parent.tolist(), subtree.tolist()), np.int64)
    order = np.argsort(other)
    other_end = other + subtree
    if node_tiles(other[order], other_end[order], num_tokens) < node_tiles(begin, end, num_tokens):
        return other, other_end
    return begin, end


def _subtree_sizes(size: list[int], parent: list[int]) -> list[int]:
    """Return the tokens of the subtree of each node."""
    total = size.copy()
    for node in range(len(total) - 1, 0, -1):
        if parent[node] >= 0:
            total[parent[node]] += total[node]
    return total


def _align_begins(size: list[int], parent: list[int], subtree: list[int]) -> list[int]:
    """Return the first token of each node; roots are the children of a node -1 without tokens."""
    children: dict[int, list[int]] = {}
    for node, above in enumerate(parent):
        children.setdefault(above, []).append(node)
    begin = [0] * len(size)
    open_nodes = [(-1, 0)]
    while open_nodes:
        node, at = open_nodes.pop()
        for child in _align(children[node], subtree, at):
            begin[child] = at
            if child in children:
                open_nodes.append((child, at + size[child]))
            at += subtree[child]
    return begin


def _align(siblings: list[int], subtree: list[int], at: int) -> list[int]:
    """Order siblings: the largest first, at token `at`, then the others so that large ones begin with a block.

    If a subtree begins inside a block, this block is partial along the whole length of the subtree. So before the next
    large sibling, small siblings fill up the block.
    """
    if len(siblings) == 1:
        return siblings
    waiting = sorted(siblings, key=lambda node: (subtree[node], -node))
    ordered = [waiting.pop()]
    at += subtree[ordered[0]]
    while waiting and subtree[waiting[-1]] >= BLOCK:
        filling = _filling([subtree[node] for node in waiting[:-1][:_CANDIDATES]], at % BLOCK)
        if filling is None:
            chosen = [waiting.pop(0)]  # the smallest sibling is partial along the shortest way
        else:
            chosen = [waiting.pop(i) for i in filling]
            chosen.append(waiting.pop())
        ordered += chosen
        at += sum(subtree[node] for node in chosen)
    return ordered + waiting[::-1]


def _filling(sizes: list[int], used: int) -> list[int] | None:
    """Return indices, descending, of sizes that fill the rest of a block exactly, or several blocks.

    The block already contains `used` tokens. The result is None if no subset fills it. Subset sums modulo `BLOCK` are
    the bits of one integer.
    """
    # BLOCK 4, used 3, sizes [1, 2]: bits 0b1000 -> with the 1 also 0b1 -> bit 0 is set, so [0] fills the block.
    whole = (1 << BLOCK) - 1
    reached = [1 << used]  # bit r: some of the sizes so far end r tokens into a block
    for size in sizes:
        if reached[-1] & 1:
            break
        # Rotate by `size`: bit 3 of 4, size 2 -> bit 5 -> bit 1
        rotated = reached[-1] << size % BLOCK
        reached.append(reached[-1] | (rotated | rotated >> BLOCK) & whole)
    if not reached[-1] & 1:
        return None
    chosen, rest = [], 0
    for i in range(len(reached) - 2, -1, -1):
        if not reached[i] >> rest & 1:
            chosen.append(i)
            rest = (rest - sizes[i]) % BLOCK
    return chosen
