"""The order of children inside a row, so that the attention kernel meets few partial tiles.

    depth-first, as the trie has it                 largest child first

    trunk a, branch x, trunk b, branch y, c         trunk a, b, c, branch y, branch x
    end:  c        x         c        y  c          end:   x     y  c       y         x

Any order of children and of trees is a valid row and holds the same tokens. The kernel works on tiles of `BLOCK`
queries by `BLOCK` keys. Let low and high be the least and greatest `subtree_end` over the keys of a block; below the
diagonal the tiles from low to high are partial, those before low full, those from high on empty, and the tile on the
diagonal is partial. So a block costs what its own ends differ by. Where a short branch comes first, its block also
holds trunk that all of the rest of the row can see; with the largest child first, the ends of neighbouring tokens of a
trunk differ only by the branch between them.
"""

from __future__ import annotations

import numpy as np

from treepack.trajectory import Int32, Int64

BLOCK = 128
CANDIDATES = 24  # small siblings among which a filling is sought


def tile_counts(subtree_end: Int32 | Int64) -> tuple[int, int]:
    """Partial and full tiles of a row whose tokens have these `subtree_end`; the row is padded to whole blocks."""
    num = len(subtree_end)
    starts = np.arange(0, num, BLOCK)
    low = np.minimum.reduceat(subtree_end, starts).astype(np.int64)
    high = np.maximum.reduceat(subtree_end, starts).astype(np.int64)
    return _counted(low, high)


def _counted(low: Int64, high: Int64) -> tuple[int, int]:
    """Partial and full tiles, given the least and greatest `subtree_end` of each block of keys."""
    below = np.arange(1, len(low) + 1)
    full = np.maximum(low // BLOCK - below, 0)
    touched = np.maximum(-(-high // BLOCK) - below, 0)
    return int((touched - full).sum()) + len(low), int(full.sum())


def node_tiles(begin: Int64, end: Int64, num_tokens: int) -> tuple[int, int]:
    """As `tile_counts`, for nodes in the order of the row that begin at `begin` and whose subtrees end at `end`."""
    starts = np.arange(0, num_tokens, BLOCK)
    first = np.searchsorted(begin, starts, side="right") - 1
    stop = np.searchsorted(begin, starts + BLOCK, side="left")
    # reduceat takes the ranges between entries in turn: every second one is a block's. The entry more ends the last.
    ranges = np.stack([first, stop], axis=1).ravel()
    ends = np.append(end, 0)
    return _counted(np.minimum.reduceat(ends, ranges)[::2], np.maximum.reduceat(ends, ranges)[::2])


def arrange(size: Int64, parent: Int64) -> tuple[Int64, Int64]:
    """Where each node of a row and its subtree's end lie; int64 [nodes] each, nodes given depth-first.

    The order with the largest child first and the others aligned, or the given order if that has no more partial tiles.
    """
    begin = np.concatenate([[0], np.cumsum(size)[:-1]])
    num_tokens = int(begin[-1] + size[-1])
    subtree = np.array(_subtree_sizes(size.tolist(), parent.tolist()), np.int64)
    end = begin + subtree
    if num_tokens <= BLOCK:
        return begin, end
    other = np.array(_aligned_begins(size.tolist(), parent.tolist(), subtree.tolist()), np.int64)
    order = np.argsort(other)
    other_end = other + subtree
    if node_tiles(other[order], other_end[order], num_tokens) < node_tiles(begin, end, num_tokens):
        return other, other_end
    return begin, end


def _subtree_sizes(size: list[int], parent: list[int]) -> list[int]:
    """Tokens of the subtree of each node."""
    total = size.copy()
    for node in range(len(total) - 1, 0, -1):
        if parent[node] >= 0:
            total[parent[node]] += total[node]
    return total


def _aligned_begins(size: list[int], parent: list[int], subtree: list[int]) -> list[int]:
    """Where each node begins; roots are children of one node of no tokens."""
    children: dict[int, list[int]] = {}
    for node, above in enumerate(parent):
        children.setdefault(above, []).append(node)
    begin = [0] * len(size)
    open_nodes = [(-1, 0)]
    while open_nodes:
        node, at = open_nodes.pop()
        for child in _aligned(children[node], subtree, at):
            begin[child] = at
            if child in children:
                open_nodes.append((child, at + size[child]))
            at += subtree[child]
    return begin


def _aligned(siblings: list[int], subtree: list[int], at: int) -> list[int]:
    """Siblings in their order from token `at` on: the largest, then the others so that large ones begin with a block.

    A subtree that begins inside a block makes that block partial for all of its own length; so small siblings are
    chosen that fill the block up before the next large one.
    """
    if len(siblings) == 1:
        return siblings
    waiting = sorted(siblings, key=lambda node: (subtree[node], -node))
    ordered = [waiting.pop()]
    at += subtree[ordered[0]]
    while waiting and subtree[waiting[-1]] >= BLOCK:
        filling = _filling([subtree[node] for node in waiting[:-1][:CANDIDATES]], at % BLOCK)
        if filling is None:
            chosen = [waiting.pop(0)]  # the smallest pays least
        else:
            chosen = [waiting.pop(i) for i in filling]
            chosen.append(waiting.pop())
        ordered += chosen
        at += sum(subtree[node] for node in chosen)
    return ordered + waiting[::-1]


def _filling(sizes: list[int], used: int) -> list[int] | None:
    """Indices, descending, of sizes that end on a whole block if `used` tokens of one are taken; None if none do."""
    whole = (1 << BLOCK) - 1
    reached = [1 << used]  # bit r: some of the sizes so far end r tokens into a block
    for size in sizes:
        if reached[-1] & 1:
            break
        turned = reached[-1] << size % BLOCK
        reached.append(reached[-1] | (turned | turned >> BLOCK) & whole)
    if not reached[-1] & 1:
        return None
    chosen, rest = [], 0
    for i in range(len(reached) - 2, -1, -1):
        if not reached[i] >> rest & 1:
            chosen.append(i)
            rest = (rest - sizes[i]) % BLOCK
    return chosen
