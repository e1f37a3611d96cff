"""Where the nodes of a row lie, and the columns that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.pack.child_order import arrange, node_tiles
from treepack.pack.plan.plan import Plan
from treepack.trajectory import Int32, Int64
from treepack.trie.trie import Trie


def unordered_tiles(trie: Trie, plan: Plan) -> int:
    """Partial tiles of all rows if the children in them came as the trie has them, not as `layout.arrange` has them."""
    layout = RowPlacer(trie)
    total = 0
    for members in plan.members():
        nodes = layout.nodes(members)
        ends = np.concatenate([[0], np.cumsum(layout.lengths[nodes])])
        stops = ends[np.searchsorted(nodes, trie.node_end[nodes])]
        total += node_tiles(ends[:-1], stops, int(ends[-1]))[0]
    return total


@dataclass(frozen=True, slots=True)
class PlacedNodes:
    """The nodes of a row in its order: node i owns the row's tokens `begin[i] .. begin[i + 1] - 1`.

    Its subtree ends at token `end[i]`. `members` are the row's trajectories by where they end, `ends_at` the places of
    their last nodes, and `source` the position in `trie.tokens` of every row token.
    """

    nodes: Int64
    begin: Int64
    end: Int64
    members: Int64
    ends_at: Int64
    source: Int64


class RowPlacer:
    """The columns that follow from the nodes of a row."""

    def __init__(self, trie: Trie) -> None:
        self.trie = trie
        self.parents = trie.parent.tolist()
        self.lengths = trie.node_length

    def nodes(self, members: Int64) -> Int64:
        """Nodes on the paths of `members`, depth-first as in the trie."""
        found: set[int] = set()
        for node in self.trie.end_node[members].tolist():
            while node >= 0 and node not in found:
                found.add(node)
                node = self.parents[node]
        return np.array(sorted(found), np.int64)

    def placed(self, members: Int64) -> PlacedNodes:
        trie, nodes = self.trie, self.nodes(members)
        up = trie.parent[nodes]
        sizes = self.lengths[nodes]
        begin, end = arrange(sizes, np.where(up < 0, -1, np.searchsorted(nodes, up)))
        order = np.argsort(begin)
        place = np.zeros(len(nodes), np.int64)
        place[order] = np.arange(len(nodes))
        ends_at = place[np.searchsorted(nodes, trie.end_node[members])]
        by_end = np.argsort(ends_at, kind="stable")
        nodes, begin, sizes = nodes[order], np.append(begin[order], sizes.sum()), sizes[order]
        source = np.repeat(trie.node_start[nodes] - begin[:-1], sizes) + np.arange(begin[-1])
        return PlacedNodes(nodes, begin, end[order], members[by_end], ends_at[by_end], source)

    def columns(self, placed: PlacedNodes) -> dict[str, Int32]:
        """The columns but the loss weights and the trajectories' names."""
        trie, begin = self.trie, placed.begin
        sizes = np.diff(begin)
        index = np.arange(begin[-1])
        parent = index - 1
        parent[begin[:-1]] = self._last_tokens_above(placed)
        stop = np.searchsorted(begin, placed.end)
        passing = np.concatenate([[0], np.cumsum(np.bincount(placed.ends_at, minlength=len(sizes)))])
        columns = {
            "input_ids": trie.tokens[placed.source],
            "position_ids": np.repeat(trie.depth[placed.nodes] - begin[:-1], sizes) + index,
            "parent": parent,
            "subtree_end": np.repeat(placed.end, sizes),
            "scale": np.repeat(passing[stop] - passing[:-1], sizes),
            "trajectory_ends": begin[placed.ends_at + 1] - 1,
        }
        return {name: values.astype(np.int32) for name, values in columns.items()}

    def _last_tokens_above(self, placed: PlacedNodes) -> Int64:
        """For each node the row's last token of its parent, -1 at a root."""
        by_id = np.argsort(placed.nodes)
        up = self.trie.parent[placed.nodes]
        above = by_id[np.searchsorted(placed.nodes, np.maximum(up, 0), sorter=by_id)]
        return np.where(up < 0, -1, placed.begin[above + 1] - 1)
