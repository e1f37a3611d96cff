"""Certified lower bounds on the tokens of all rows of a tree: no plan of any method can need fewer."""

from __future__ import annotations

from treepack.plan.problem import Tree


def recursive_bound(tree: Tree, capacity: int) -> int:
    """Fewest tokens that rows of `capacity` can hold for `tree`, by counting from the leaves up. O(nodes).

    A row that passes through node u has `capacity - (depth[u] + size[u])` tokens left for what is below it. If
    everything below u needs at least D tokens in total, then at least ceil(D / left) rows pass through u, at least as
    many as through any child, and each of them pays u once.
    """
    demand = [0] * tree.num_nodes  # tokens needed strictly below each node
    times = [1] * tree.num_nodes  # rows that must pass through it
    parent, sizes, ends = tree.parent.tolist(), tree.size.tolist(), (tree.depth + tree.size).tolist()
    for node in range(tree.num_nodes - 1, -1, -1):
        if demand[node]:
            times[node] = max(times[node], -(-demand[node] // (capacity - ends[node])))
        up = parent[node]
        if up >= 0:
            demand[up] += demand[node] + sizes[node] * times[node]
            times[up] = max(times[up], times[node])
    return int(demand[0] + sizes[0] * times[0])
