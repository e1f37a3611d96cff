"""Certified lower bounds on N_pack: no plan of any method can need fewer tokens."""

from __future__ import annotations

from treepack.trie import Trie


def recursive_bound(trie: Trie, capacity: int) -> int:
    """Fewest tokens that rows of `capacity` can hold for `trie`, by counting from the leaves up. O(nodes).

    A row that passes through node u has `capacity - path_length[u]` tokens left for what is below it. If everything
    below u needs at least D tokens in total, then at least ceil(D / left) rows pass through u, at least as many as
    through any child, and each of them pays u once.
    """
    demand = [0] * trie.num_nodes  # tokens needed strictly below each node
    times = [1] * trie.num_nodes  # rows that must pass through it
    parent, sizes, ends = trie.parent.tolist(), trie.node_length.tolist(), trie.path_length.tolist()
    total = 0
    for node in range(trie.num_nodes - 1, -1, -1):
        if demand[node]:
            times[node] = max(times[node], -(-demand[node] // (capacity - ends[node])))
        paid = sizes[node] * times[node]
        up = parent[node]
        if up < 0:
            total += demand[node] + paid
        else:
            demand[up] += demand[node] + paid
            times[up] = max(times[up], times[node])
    return total
