"""Place the nodes of a row, and compute the columns that follow from their places.

    nodes [7 8] [1 2] [3 4]      begin   0  2  4  6      the first token of each node, and the end of the row
                                 end     6  4  6         one past the last token of each subtree

Every column is then a value per node, repeated over the node's tokens, plus the token's index.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from treepack.pack.child_order import arrange, node_tiles
from treepack.trajectory import Int32, Int64

if TYPE_CHECKING:
    from treepack.pack.plan.plan import Plan
    from treepack.trie.trie import Trie


class _TokenNodes(Protocol):
    """The fields of a `Trie` that place the nodes of its rows."""

    @property
    def tokens(self) -> Int32: ...
    @property
    def node_start(self) -> Int64: ...
    @property
    def parent(self) -> Int32: ...
    @property
    def depth(self) -> Int64: ...
    @property
    def end_node(self) -> Int32: ...


def unordered_tiles(trie: Trie, plan: Plan) -> int:
    """Return the partial tiles of all rows if children kept the order of the trie, instead of that of `arrange`."""
    placer = RowPlacer(trie)
    return sum(unordered_tiles_of_row(*placer.unordered_row(trie, members)) for members in plan.members())


def unordered_tiles_of_row(offsets: Int64, stops: Int64) -> int:
    """Return the partial tiles of a row, from the result of `RowPlacer.unordered_row`."""
    return node_tiles(offsets[:-1], stops, int(offsets[-1]))[0]


@dataclass(frozen=True, slots=True)
class PlacedNodes:
    """The nodes of a row, in the order of the row; all arrays are int64.

    Attributes:
        nodes: index in the trie of each node.
        begin: [nodes + 1]; node i owns the row's tokens `begin[i] .. begin[i + 1] - 1`.
        end: one past the last row token of the subtree of each node.
        members: trajectories of the row, sorted by the place of their last node.
        ends_at: place in `nodes` of the last node of each member.
        source: position in `trie.tokens` of each row token.
    """

    nodes: Int64
    begin: Int64
    end: Int64
    members: Int64
    ends_at: Int64
    source: Int64


class RowPlacer:
    """Placement of the nodes in all rows of one trie."""

    def __init__(self, trie: _TokenNodes) -> None:
        self.trie = trie
        # Integers of array.array are read faster than numpy's, and need 4 bytes instead of 36 in a list.
        self.parents = array("i", trie.parent.astype(np.int32, copy=False).tobytes())
        self.lengths = np.diff(trie.node_start)

    def nodes(self, members: Int64) -> Int64:
        """Return the nodes on the paths of `members`, in the depth-first order of the trie."""
        visited: set[int] = set()
        for node in self.trie.end_node[members].tolist():
            while node >= 0 and node not in visited:
                visited.add(node)
                node = self.parents[node]
        return np.array(sorted(visited), np.int64)

    def unordered_row(self, trie: Trie, members: Int64) -> tuple[Int64, Int64]:
        """Return the row that keeps the order of `trie`, which is the trie of this placer.

        Returns:
            the first token of each node and the number of tokens, int64 [nodes + 1], and the subtree ends, int64
            [nodes].
        """
        nodes = self.nodes(members)
        # Nodes of 2, 2 and 2 tokens -> offsets [0, 2, 4, 6]; a subtree that ends before trie node n ends at its offset.
        offsets = np.concatenate([[0], np.cumsum(self.lengths[nodes])])
        return offsets, offsets[np.searchsorted(nodes, trie.node_end[nodes])]

    def place(self, members: Int64) -> PlacedNodes:
        """Return the nodes of the row that contains the trajectories `members`, in the order of the row."""
        trie, nodes = self.trie, self.nodes(members)
        up = trie.parent[nodes]
        sizes = self.lengths[nodes]
        # Parents as places in `nodes`: trie nodes [3, 5, 9] with parents [-1, 3, 3] -> [-1, 0, 0].
        begin, end = arrange(sizes, np.where(up < 0, -1, np.searchsorted(nodes, up)))
        order = np.argsort(begin)
        # The inverse of a permutation: order [0, 2, 1] -> place [0, 2, 1]; order [2, 0, 1] -> place [1, 2, 0].
        place = np.zeros(len(nodes), np.int64)
        place[order] = np.arange(len(nodes))
        ends_at = place[np.searchsorted(nodes, trie.end_node[members])]
        by_end = np.argsort(ends_at, kind="stable")
        nodes, begin, sizes = nodes[order], np.append(begin[order], sizes.sum()), sizes[order]
        # Row tokens of node i are consecutive in the trie too: node_start 40, begin 2, size 3 -> 38 + [2, 3, 4].
        source = np.repeat(trie.node_start[nodes] - begin[:-1], sizes) + np.arange(begin[-1])
        return PlacedNodes(nodes, begin, end[order], members[by_end], ends_at[by_end], source)

    def columns(self, nodes: PlacedNodes, index_type: type[np.signedinteger[Any]] = np.int32) -> dict[str, Any]:
        """Return the columns that are integers, all except the loss weights and the names of trajectories.

        input_ids, position_ids and parent are of `index_type`: int32 as in files, or int64, which torch indexes with.
        """
        trie, begin = self.trie, nodes.begin
        sizes = np.diff(begin)
        # The type of the result from the start saves a pass over the tokens for each column.
        index = np.arange(begin[-1], dtype=index_type)
        # The parent is the token before, except for the first token of a node: [-1, 0, 1, 2, 3, 4] with
        # begin [0, 2, 4] and last tokens above [-1, 1, 1] -> [-1, 0, 1, 2, 1, 4].
        parent = index - index_type(1)
        parent[begin[:-1]] = self._last_tokens_above(nodes)
        # A node counts the trajectories that end in its subtree: ends_at [1, 2] -> passing [0, 0, 1, 2] -> the root
        # passing[3] - passing[0] = 2, the branches 1 each.
        stop = np.searchsorted(begin, nodes.end)
        passing = np.concatenate([[0], np.cumsum(np.bincount(nodes.ends_at, minlength=len(sizes)))])

        def repeat(values: Int64, kind: type[np.signedinteger[Any]] = np.int32) -> Any:
            return np.repeat(values.astype(kind), sizes)

        return {
            "input_ids": trie.tokens[nodes.source].astype(index_type, copy=False),
            "position_ids": repeat(trie.depth[nodes.nodes] - begin[:-1], index_type) + index,
            "parent": parent,
            "subtree_end": repeat(nodes.end),
            "scale": repeat(passing[stop] - passing[:-1]),
            "trajectory_ends": (begin[nodes.ends_at + 1] - 1).astype(np.int32),
        }

    def _last_tokens_above(self, nodes: PlacedNodes) -> Int64:
        """Return for each node the last row token of its parent, -1 at a root."""
        # `nodes` is not sorted, so parents are looked up through its sorted order: nodes [0, 4, 1], whose parents are
        # [-1, 0, 0] -> by_id [0, 2, 1], above [0, 0, 0]. With begin [0, 2, 5, 9] the last token above is [-1, 1, 1].
        by_id = np.argsort(nodes.nodes)
        up = self.trie.parent[nodes.nodes]
        above = by_id[np.searchsorted(nodes.nodes, np.maximum(up, 0), sorter=by_id)]
        return np.where(up < 0, -1, nodes.begin[above + 1] - 1)
