"""The turns in a trie of whole trajectories, and the trie of one sample for each turn, without making the samples.

    tokens  p p A A u B B u u    turns end at 4 and 7     samples  p p A A
    spans       ---   ---                                          p p A A u B B

A trained span ends a turn; spans that touch are one turn. The sample of a turn is the path to its end, so the last
sample of a trajectory contains all others: the trie of all samples is the trie of the trajectories cut there.

A turn of a search tree is a turn of every path through it, but the model wrote it once: `distinct` counts it once. Two
turns are the same if their record, their tokens and the start of their trained tokens are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.files import schema
from treepack.sequences import SpanView, take_rows, text_codes
from treepack.trajectory import Int32, Int64
from treepack.trie.trie import Trie

# Columns of the trajectories from which rows are planned and their work is counted.
_PLANNED = frozenset("trajectory_id group_id step tree_id node_id num_tokens trained weight".split())


@dataclass(frozen=True, slots=True)
class SortedTurns:
    """Turns sorted by trajectory and place: trajectory `owner` of each, and its trained tokens [start, end).

    All int64 [num_turns]. The sample of a turn has `ends` tokens.
    """

    owner: Int64
    starts: Int64
    ends: Int64

    def within(self, limit: int) -> SortedTurns:
        """Return the turns whose samples have at most `limit` tokens."""
        return self._select(self.ends <= limit)

    def distinct(self, trie: Trie) -> SortedTurns:
        """Return the turns of `trie` without the ones that an earlier path of the same record has too.

        O(num_turns log num_turns).
        """
        records = text_codes(trie.trajectories["source"])[self.owner]
        # Turns of a record with one trajectory are distinct. Owners [0, 0, 1, 2] of the records [5, 5, 5, 6]
        # -> the first turn of each owner [0, 2, 3] -> records [5, 5, 6] -> record 5 has two trajectories.
        one_turn = np.unique(self.owner, return_index=True)[1]
        several = np.flatnonzero((np.bincount(records[one_turn]) > 1)[records])
        nodes = _nodes_at(trie, trie.end_node[self.owner[several]], self.ends[several])
        # Sorted by all four numbers, equal turns follow each other, the first of them first: lexsort is stable.
        places = (records[several], nodes, self.starts[several], self.ends[several])
        order = np.lexsort(places)
        repeats = np.ones(max(len(order) - 1, 0), np.bool_)
        for column in places:
            repeats &= column[order][1:] == column[order][:-1]
        is_new = np.ones(len(self.owner), np.bool_)
        is_new[several[order[1:][repeats]]] = False
        return self._select(is_new)

    def _select(self, mask: NDArray[np.bool_]) -> SortedTurns:
        return SortedTurns(self.owner[mask], self.starts[mask], self.ends[mask])


def turns_of(trie: Trie) -> SortedTurns:
    """Return the turns of the trajectories of `trie`."""
    spans = SpanView.of(trie.trajectories)
    owner = np.repeat(np.arange(trie.num_trajectories), np.diff(spans.offsets))
    touches = (owner[1:] == owner[:-1]) & (spans.starts[1:] == spans.ends[:-1])
    # owner [0, 0, 1], starts [2, 5, 2], ends [4, 7, 3] -> touches [0, 0]; with starts [2, 4, 2] -> touches [1, 0],
    # so the first span begins a turn that ends with the second one: is_start [1, 0, 1], is_end [0, 1, 1]
    is_start, is_end = np.append(True, ~touches)[: len(owner)], np.append(~touches, True)[: len(owner)]
    starts, ends = spans.starts[is_start].astype(np.int64), spans.ends[is_end].astype(np.int64)
    return SortedTurns(owner[is_end], starts, ends)


def cut_to_turns(trie: Trie, turns: SortedTurns) -> Trie:
    """Return `trie` with every trajectory cut after the last of its `turns`; drop trajectories without turns.

    If nothing changes, return `trie` itself. Else all token ids are 0 and take no memory, and the table has only the
    columns that plans need. O(num_nodes).
    """
    last = np.zeros(trie.num_trajectories, np.int64)
    np.maximum.at(last, turns.owner, turns.ends)
    if np.array_equal(last, trie.lengths):
        return trie
    kept = np.flatnonzero(last)
    last = last[kept]
    segments, end_of = _segments(trie, _nodes_at(trie, trie.end_node[kept], last), last)
    parent = _parents(trie, segments)
    heads, merged = _merge_chains(parent, end_of)
    parent, end_of = np.where(parent[heads] < 0, -1, merged[parent[heads]]), merged[end_of]
    order = np.argsort(end_of, kind="stable")
    # A segment is on the path of all that follow it in its old node and below. Old nodes [0, 0, 2] whose subtrees end
    # at node 3 -> the subtrees of the segments end at segment 3; with heads [0, 2] -> new nodes end at [2, 2].
    node_end = np.searchsorted(heads, np.searchsorted(segments.node, trie.node_end[segments.node]))[heads]
    # Trajectories that end before each node: the difference between the end and the start of a subtree passes through.
    ends = np.concatenate([[0], np.cumsum(np.bincount(end_of, minlength=len(heads)))])
    begin = np.concatenate([[0], np.cumsum(segments.stop - segments.start)]).astype(np.int64)
    return Trie(
        tokens=np.broadcast_to(np.int32(0), int(begin[-1])),
        node_start=np.append(begin[heads], begin[-1]),
        node_end=node_end.astype(np.int32),
        parent=parent.astype(np.int32),
        depth=segments.start[heads],
        num_passing=(ends[node_end] - ends[:-1]).astype(np.int32),
        end_node=end_of[order].astype(np.int32),
        trajectories=_cut_table(trie, kept[order], last[order], end_of[order], parent),
        share=trie.share,
        storage=trie.storage,
    )


@dataclass(frozen=True, slots=True)
class _NodeSegments:
    """Segments of the old nodes, depth-first: tokens `start .. stop - 1` of the path to the end of the old `node`.

    All are int64 [segments]. A node of 5 tokens with a cut after 3 of them has two segments.
    """

    node: Int64
    start: Int64
    stop: Int64


def _parents(trie: Trie, segments: _NodeSegments) -> Int64:
    """Return the segment above each segment, -1 for roots."""
    # node [0, 0, 2]: segment 1 is below 0, in the same node, and segment 2 below the last one of its parent node.
    num = len(segments.node)
    last_of = np.zeros(trie.num_nodes, np.int64)
    last_of[segments.node] = np.arange(num)
    up = trie.parent[segments.node]
    is_first = np.diff(segments.node, prepend=-1) > 0
    return np.where(is_first, np.where(up < 0, -1, last_of[up]), np.arange(num) - 1)


def _merge_chains(parent: Int64, end_of: Int64) -> tuple[Int64, Int64]:
    """Merge each segment that has exactly one child and no trajectory end into that child.

    `end_of` are the segments of the ends.

    Returns:
        The head segment of every merged node, and the merged node of every segment.
    """
    num_children = np.bincount(parent[parent >= 0], minlength=len(parent))
    continues = (num_children == 1) & (np.bincount(end_of, minlength=len(parent)) == 0)
    # parent [-1, 0, 1, 1], ends at [2, 3] -> continues [1, 0, 0, 0] -> is_head [1, 0, 1, 1] -> merged [0, 0, 1, 2]
    is_head = (parent < 0) | ~continues[parent]
    return np.flatnonzero(is_head), np.cumsum(is_head) - 1


def _nodes_at(trie: Trie, ends: Int32, last: Int64) -> Int64:
    """Return the node on the path to each of `ends` that contains token number `last`, counted from 1."""
    nodes = ends.astype(np.int64)
    # One step up for all paths that have not arrived, until all have.
    above = np.flatnonzero(trie.depth[nodes] >= last)
    while len(above):
        nodes[above] = trie.parent[nodes[above]]
        above = above[trie.depth[nodes[above]] >= last[above]]
    return nodes


def _segments(trie: Trie, at: Int64, last: Int64) -> tuple[_NodeSegments, Int64]:
    """Return the segments of the cut trajectories, and the segment with which each trajectory ends.

    Trajectory i ends after `last[i]` tokens, in the old node `at[i]`.
    """
    # A node with children on cut paths is needed whole; the others are needed up to the cuts in them.
    # Cuts in the nodes before each: cuts in nodes [1, 1, 3] -> [0, 0, 2, 2, 3]. Node 0 with the subtree 0 .. 3 has
    # 3 - 0 cuts below it.
    cuts = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=trie.num_nodes))])
    whole = np.flatnonzero(cuts[trie.node_end] > cuts[1:])
    radix = int(trie.path_length.max()) + 1
    # (node, depth) as one sorted key. radix 10, cuts at (0, 2) and (2, 5), whole node (0, 3) -> keys [2, 3, 25]
    ends = at * radix + last
    keys = np.unique(np.concatenate([ends, whole * radix + trie.path_length[whole]]))
    node, stop = keys // radix, keys % radix
    # node [0, 0, 2] of depths 0 and 3, stop [2, 3, 5] -> start [0, 2, 3]
    start = np.where(np.diff(node, prepend=-1) > 0, trie.depth[node], np.concatenate([[0], stop[:-1]]))
    return _NodeSegments(node, start, stop), np.searchsorted(keys, ends)


def _cut_table(trie: Trie, kept: Int64, last: Int64, end_of: Int64, parent: Int64) -> pa.Table:
    """Return the rows `kept` of the table of `trie`, their trained spans cut after `last` tokens."""
    columns = pa.schema([field for field in schema.TRAJECTORIES if field.name in _PLANNED])
    table = take_rows(trie.trajectories.select(columns.names), kept)
    spans = SpanView.of(table)
    owner = np.repeat(np.arange(len(kept)), np.diff(spans.offsets))
    inside = spans.ends <= last[owner]
    # A cut is at the end of a turn, so every span is inside or outside as a whole. Ends [4, 7] of trajectory 0 and [3]
    # of trajectory 1, cut after 4 and 3 tokens: owner [0, 0, 1] -> inside [1, 0, 1] -> offsets [0, 1, 2].
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[inside], minlength=len(kept)))]).astype(np.int32)
    parts = [pa.array(values[inside]) for values in (spans.starts, spans.ends, spans.weights)]
    new = {
        "tree_id": pa.array((np.cumsum(parent < 0) - 1)[end_of], pa.int32()),
        "node_id": pa.array(end_of, pa.int32()),
        "num_tokens": pa.array(last, pa.int32()),
        "trained": pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(parts, fields=list(schema.SPAN))),
    }
    values = [new[name] if name in new else table[name] for name in columns.names]
    return pa.Table.from_arrays(values, schema=columns)
