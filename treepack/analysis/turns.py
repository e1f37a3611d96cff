"""The turns in a trie of whole trajectories: what a sample for each turn would be, without making those samples.

    tokens  p p A A u B B u u    turns end at 4 and 7     samples  p p A A
    spans       ---   ---                                                        p p A A u B B

A trained span ends a turn; spans that touch are one turn. The sample of a turn is the path to its end, so all samples
of a trajectory lie on the path to its last turn: the trie of all samples is that of the trajectories cut there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from treepack.columns import SpanView
from treepack.files import schema
from treepack.trajectory import Int32, Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns by trajectory and then by place, int64 [num_turns]: whose each is, and how many tokens it ends behind."""

    owner: Int64
    ends: Int64

    def within(self, limit: int) -> Turns:
        """Those whose samples have at most `limit` tokens."""
        kept = self.ends <= limit
        return Turns(self.owner[kept], self.ends[kept])


def turns_of(trie: Trie) -> Turns:
    """The turns of the trajectories of `trie`."""
    spans = SpanView.of(trie.trajectories)
    owner = np.repeat(np.arange(trie.num_trajectories), np.diff(spans.offsets))
    is_end = np.ones(len(owner), np.bool_)
    is_end[:-1] = (owner[1:] != owner[:-1]) | (spans.starts[1:] != spans.ends[:-1])
    return Turns(owner[is_end], spans.ends[is_end].astype(np.int64))


def cut_to_turns(trie: Trie, turns: Turns) -> Trie:
    """`trie` with every trajectory cut behind the last of its `turns`, and without those that have none.

    It is `trie` itself if that changes nothing. What is known per trained token is left out of the table. O(N_tree),
    and a Python step for each node and each trajectory.
    """
    last = np.zeros(trie.num_trajectories, np.int64)
    np.maximum.at(last, turns.owner, turns.ends)
    if np.array_equal(last, trie.lengths):
        return trie
    kept = np.flatnonzero(last)
    last = last[kept]
    (node, stop), place = _segments(trie, _nodes_at(trie, trie.end_node[kept], last), last)
    first = np.diff(node, prepend=-1) > 0
    start = np.where(first, trie.depth[node], np.concatenate([[0], stop[:-1]]))
    source = np.repeat(trie.node_start[node] + start - trie.depth[node], stop - start)
    begin = np.concatenate([[0], np.cumsum(stop - start)]).astype(np.int64)
    source += np.arange(begin[-1]) - np.repeat(begin[:-1], stop - start)
    latest = np.zeros(trie.num_nodes, np.int64)
    latest[node] = np.arange(len(node))  # the last segment of each node, which its children hang below
    up = trie.parent[node]
    parent = np.where(first, np.where(up < 0, -1, latest[up]), np.arange(len(node)) - 1)
    heads, run_of = _runs(parent, place)
    parent = np.where(parent[heads] < 0, -1, run_of[parent[heads]])
    place = run_of[place]
    order = np.argsort(place, kind="stable")
    node_end, passing = _subtrees(parent, place)
    return Trie(
        tokens=trie.tokens[source],
        node_start=np.append(begin[heads], begin[-1]),
        node_end=node_end.astype(np.int32),
        parent=parent.astype(np.int32),
        depth=start[heads],
        num_passing=passing.astype(np.int32),
        end_node=place[order].astype(np.int32),
        trajectories=_cut_table(trie, kept[order], last[order], place[order], parent),
        share=trie.share,
    )


def _runs(parent: Int64, place: Int64) -> tuple[Int64, Int64]:
    """The first segments of nodes, and the node of each segment: one with a single child and no end goes on in it."""
    num_children = np.bincount(parent[parent >= 0], minlength=len(parent))
    goes_on = (num_children == 1) & (np.bincount(place, minlength=len(parent)) == 0)
    is_head = (parent < 0) | ~goes_on[parent]
    return np.flatnonzero(is_head), np.cumsum(is_head) - 1


def _nodes_at(trie: Trie, ends: Int32, last: Int64) -> Int64:
    """The node on the path to each of `ends` that holds token number `last`, counted from 1."""
    parent, depth = trie.parent.tolist(), trie.depth.tolist()
    found = []
    for node, size in zip(ends.tolist(), last.tolist(), strict=True):
        while depth[node] >= size:
            node = parent[node]
        found.append(node)
    return np.array(found, np.int64)


def _segments(trie: Trie, at: Int64, last: Int64) -> tuple[tuple[Int64, Int64], Int64]:
    """Old node and last depth of every new node, depth-first, and the new node at which each trajectory ends."""
    needed = np.zeros(trie.num_nodes, np.bool_)
    needed[at] = True
    inner = np.zeros(trie.num_nodes, np.bool_)
    for node, up in zip(range(trie.num_nodes - 1, -1, -1), reversed(trie.parent.tolist()), strict=True):
        if needed[node] and up >= 0:
            needed[up] = inner[up] = True
    whole = np.flatnonzero(inner)
    radix = int(trie.path_length.max()) + 1
    ends = at * radix + last
    keys = np.unique(np.concatenate([ends, whole * radix + trie.path_length[whole]]))
    return (keys // radix, keys % radix), np.searchsorted(keys, ends)


def _subtrees(parent: Int64, place: Int64) -> tuple[Int64, Int64]:
    """The end of each node's subtree, and how many trajectories, which end at `place`, pass through it."""
    node_end = list(range(1, len(parent) + 1))
    passing = np.bincount(place, minlength=len(parent)).tolist()
    for node, up in zip(range(len(parent) - 1, -1, -1), reversed(parent.tolist()), strict=True):
        if up >= 0:
            node_end[up] = max(node_end[up], node_end[node])
            passing[up] += passing[node]
    return np.array(node_end), np.array(passing)


def _cut_table(trie: Trie, kept: Int64, last: Int64, place: Int64, parent: Int64) -> pa.Table:
    """Rows `kept` of the table of `trie`, their trained spans cut behind `last` tokens."""
    table = trie.trajectories.take(pa.array(kept))
    spans = SpanView.of(table)
    owner = np.repeat(np.arange(len(kept)), np.diff(spans.offsets))
    inside = spans.ends <= last[owner]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[inside], minlength=len(kept)))]).astype(np.int32)
    parts = [pa.array(values[inside]) for values in (spans.starts, spans.ends, spans.weights)]
    new = {
        "tree_id": pa.array((np.cumsum(parent < 0) - 1)[place], pa.int32()),
        "node_id": pa.array(place, pa.int32()),
        "num_tokens": pa.array(last, pa.int32()),
        "trained": pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(parts, fields=list(schema.SPAN))),
    }
    per_token = ("advantages", "sampling_logprobs", "old_logprobs", "ref_logprobs")
    new |= {name: pa.nulls(len(kept), schema.TRAJECTORIES.field(name).type) for name in per_token}
    columns = [new.get(name, table[name]) for name in schema.TRAJECTORIES.names]
    return pa.Table.from_arrays(columns, schema=schema.TRAJECTORIES)
