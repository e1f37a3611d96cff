"""Methods that order the leaves and cut the order into rows.

For leaves in any depth-first order, the union of consecutive ones costs the first one's length plus what each later
one does not share with its predecessor. So a cut before leaf k costs exactly what k shares with k - 1, and the total
of all rows is N_tree plus the cost of the cuts.

    leaves   A    B      C      D                 cut before C: the row of C and D pays 4 again
    shares   0    6      4      9
"""

from __future__ import annotations

import bisect
from collections import deque

import numpy as np

from treepack.trajectory import Int64
from treepack.trie import Trie


def leaf_nodes(trie: Trie) -> Int64:
    """Nodes without children, in depth-first order."""
    return np.flatnonzero(trie.node_end == np.arange(1, trie.num_nodes + 1))


def contiguous(trie: Trie, leaves: Int64, capacity: int) -> Int64:
    """Row of each leaf for the best cut of the depth-first order: fewest tokens, then fewest rows. O(leaves).

    The rows that can end at a leaf are a window that only moves forward, so a queue of window minima suffices.
    """
    lengths = trie.path_length[leaves].tolist()
    shared = _shared(trie, leaves).tolist()
    steps = _leaf_steps(trie, leaves).tolist()
    num = len(lengths)
    prefix = np.concatenate([[0], np.cumsum(np.array(lengths) - np.array(shared))]).tolist()
    best = [(0, 0)] + [(0, 0)] * num
    begin = [0] * num
    window: deque[tuple[tuple[int, int], int]] = deque()
    for k in range(num):
        tokens, rows = best[k]
        candidate = (tokens + shared[k], rows + 1)
        if k and steps[k] != steps[k - 1]:
            window.clear()
        while window and window[-1][0] > candidate:
            window.pop()
        window.append((candidate, k))
        while prefix[k + 1] - prefix[window[0][1]] + shared[window[0][1]] > capacity:
            window.popleft()
        best[k + 1], begin[k] = window[0]
    return _rows_of_begins(begin)


def _rows_of_begins(begin: list[int]) -> Int64:
    """Row of each leaf, given where the row that ends at each leaf begins."""
    rows = np.zeros(len(begin), np.int64)
    stop = len(begin)
    while stop:
        start = begin[stop - 1]
        rows[start] += 1
        stop = start
    return np.cumsum(rows) - 1


def deepest_first(trie: Trie, leaves: Int64, capacity: int) -> Int64:
    """Row of each leaf, visiting children by their deepest leaf, deepest first; a new row when the next does not fit.

    Tree Training (arXiv 2511.00413), section 2.2.2, "heuristic algorithm".
    """
    order, shared = _deepest_first_order(trie)
    lengths = trie.path_length
    steps = dict(zip(leaves.tolist(), _leaf_steps(trie, leaves).tolist(), strict=True))
    index = {leaf: i for i, leaf in enumerate(leaves.tolist())}
    rows = np.zeros(len(leaves), np.int64)
    row, used, step = -1, capacity, -1
    for leaf, common in zip(order, shared, strict=True):
        length = int(lengths[leaf])
        if used + length - common > capacity or steps[leaf] != step:
            row, used, common, step = row + 1, 0, 0, steps[leaf]
        used += length - common
        rows[index[leaf]] = row
    return rows


def _deepest_first_order(trie: Trie) -> tuple[list[int], list[int]]:
    """Leaves in that order and the tokens that each shares with the one before it."""
    deepest = trie.path_length.tolist()
    parent, depth = trie.parent.tolist(), trie.depth.tolist()
    children: list[list[int]] = [[] for _ in parent]
    roots: list[int] = []
    for node in range(trie.num_nodes - 1, -1, -1):
        up = parent[node]
        if up >= 0:
            deepest[up] = max(deepest[up], deepest[node])
        (children[up] if up >= 0 else roots).append(node)
    # The first trajectory at or after a root lies in its tree and so tells its training step.
    root_step = dict(zip(roots, trie.step_rank[np.searchsorted(trie.end_node, roots)].tolist(), strict=True))

    def rank(node: int) -> tuple[int, int]:
        return deepest[node], -node

    open_nodes = sorted(roots, key=lambda node: (-root_step[node], *rank(node)))
    order, shared, common = [], [], 0
    while open_nodes:
        node = open_nodes.pop()
        common = min(common, depth[node])
        if children[node]:
            open_nodes.extend(sorted(children[node], key=rank))
        else:
            order.append(node)
            shared.append(common)
            common = deepest[node]
    return order, shared


def _shared(trie: Trie, leaves: Int64) -> Int64:
    """Tokens each leaf shares with the leaf before it in depth-first order: the depth of the node after that leaf."""
    return np.concatenate([[0], trie.depth[leaves[:-1] + 1]])


def _leaf_steps(trie: Trie, leaves: Int64) -> Int64:
    """Rank of the training step of each leaf; it never decreases along the depth-first order."""
    return trie.step_rank[np.searchsorted(trie.end_node, leaves)]


def merge_rows(row_of: Int64, row_tokens: Int64, steps: Int64, capacity: int) -> Int64:
    """Put rows that are not full together, best fit decreasing, as if they shared nothing. O(rows log rows).

    `row_of` and `steps` int64 [num_trajectories], `row_tokens` int64 [num_rows]; returns the new row of each
    trajectory, rows numbered arbitrarily.
    """
    row_step = np.zeros(len(row_tokens), np.int64)
    row_step[row_of] = steps
    target = np.arange(len(row_tokens))
    for step in np.unique(row_step):
        rows = np.flatnonzero(row_step == step)
        rows = rows[np.argsort(-row_tokens[rows], kind="stable")]
        free: list[tuple[int, int]] = []  # (room, row), ascending
        for row, tokens in zip(rows.tolist(), row_tokens[rows].tolist(), strict=True):
            at = bisect.bisect_left(free, (tokens, -1))
            if at < len(free):
                room, into = free.pop(at)
                target[row] = into
            else:
                room, into = capacity, row
            bisect.insort(free, (room - tokens, into))
    return target[row_of]
