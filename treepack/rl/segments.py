"""The tree that a group of rollouts was sampled as: segments cut out of a trie, and which trajectories share them.

    trie, group of each trajectory --cuts--> where segments start --segment_tree--> SegmentTree

        prompt | s1      | s2            cuts of trajectory a: 3, 7      nodes: root = the group [prompt]
        1 2 3  | 4 5 6 7 | 8 9      a                                           n    = [4 5 6 7], shared by a and b
        1 2 3  | 4 5 6 7 | 5 5 5    b    cuts of c: 3                    leaves: a [8 9]   b [5 5 5]   c [6 6]
        1 2 3  | 6 6                c

Two trajectories share a segment if they are the same token for token up to its end and were cut at the same places.
The last segment of a trajectory is its own, a leaf, even if another has the same tokens: it was sampled twice. So a
group whose trajectories are cut once, after the prompt, is a star.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.columns import SpanView
from treepack.errors import TreepackError
from treepack.readers.fields import METADATA_DICTS
from treepack.trajectory import Int64
from treepack.trie import Trie

SEGMENTS = ("auto", "recorded", "turn", "node")
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SegmentTree:
    """The segments of `num_trajectories` trajectories, and the nodes they are.

    Nodes 0 .. num_groups - 1 are the roots, one per group; then come the shared segments, level by level; node
    `num_inner + i` is the last segment of trajectory i. `parent` int64 [num_nodes] is -1 at a root. `level_start`
    int64 [num_levels + 1] are the offsets of the levels among the inner nodes. Three arrays list the segments of every
    trajectory, in order and the root first: its `owner`, the token it starts with, and the `node` it is. `segment` is
    how they were cut: what was asked for, and what "auto" found.
    """

    segment: str
    num_groups: int
    num_inner: int
    parent: Int64
    level_start: Int64
    owner: Int64
    start: Int64
    node: Int64

    @property
    def num_trajectories(self) -> int:
        return len(self.parent) - self.num_inner

    @property
    def groups(self) -> Int64:
        """Group, that is root, of each trajectory: the node of its first listed segment."""
        return self.node[np.searchsorted(self.owner, np.arange(self.num_trajectories))]

    @property
    def num_subgroups(self) -> int:
        """Shared segments below the roots through which two or more trajectories pass."""
        passing = np.bincount(self.node, minlength=self.num_inner)[self.num_groups : self.num_inner]
        return int((passing > 1).sum())

    def segment_of(self, trajectory: Int64, position: Int64) -> Int64:
        """Index into the listed segments of the one that holds token `position` of each `trajectory`; both int64 [n].

        Pairs must ascend by trajectory and position.
        """
        span = int(max(self.start.max(initial=0), position.max(initial=0))) + 1
        return np.searchsorted(self.owner * span + self.start, trajectory * span + position, side="right") - 1


def segment_tree(trie: Trie, members: Int64, group: Int64, *, segment: str = "auto", min_depth: int = 0) -> SegmentTree:
    """The tree of the trajectories `members` of `trie` (ascending), whose groups are `group`, codes from 0.

    `segment` says where segments start:

        recorded   at the token offsets under "segments" in the metadata of each trajectory
        turn       at each run of trained tokens
        node       where trajectories of the group branch in the trie
        a number   every so many tokens, from the first trained one on
        auto       recorded where there are any, else node

    Segments that start less than `min_depth` tokens after the first one are not cut off: what branches there is
    compared in the node above.

    Raises:
        TreepackError: an unknown `segment`, no or faulty recorded offsets, or a trie that shares nothing.
    """
    if trie.share == "none" and trie.num_trajectories > 1:
        raise TreepackError("the trie was built with --share none and has no branches; build it with --share group")
    found, owner, start = _cuts(trie, members, group, segment=segment)
    first = np.full(len(members), np.iinfo(np.int64).max)
    np.minimum.at(first, owner, start)
    kept = (start == first[owner]) | (start - first[owner] >= min_depth)
    uncut = np.flatnonzero(np.bincount(owner, minlength=len(members)) == 0)
    owner, start = np.concatenate([owner[kept], uncut]), np.concatenate([start[kept], np.zeros_like(uncut)])
    order = np.lexsort((start, owner))
    return _merged(trie, members, group, owner[order], start[order], segment=found)


def _cuts(trie: Trie, members: Int64, group: Int64, *, segment: str) -> tuple[str, Int64, Int64]:
    """How segments were cut, their owners (indices into `members`) and start tokens, each trajectory's distinct."""
    if segment.isdecimal() and 0 < int(segment) <= MAX_SIZE:
        return segment, *_every(trie, members, int(segment))
    if segment not in SEGMENTS:
        raise TreepackError(f"segment is {segment!r}; expected {', '.join(SEGMENTS)} or a number of tokens")
    if segment == "turn":
        return segment, *_turns(trie, members)
    recorded = None if segment == "node" else _recorded(trie, members)
    if recorded is not None:
        return "recorded", *recorded
    if segment == "recorded":
        raise TreepackError("no trajectory has 'segments' in its metadata; record them or give another --segment")
    return "node", *_branchings(trie, members, group)


def _first_trained(trie: Trie, members: Int64) -> Int64:
    """First trained token of each trajectory, its length if it has none."""
    spans = SpanView.of(trie.trajectories)
    found = trie.lengths.copy()
    some = np.flatnonzero(np.diff(spans.offsets))
    found[some] = spans.starts[spans.offsets[some]]
    return found[members]


def _every(trie: Trie, members: Int64, size: int) -> tuple[Int64, Int64]:
    first = _first_trained(trie, members)
    counts = -((first - trie.lengths[members]) // size)
    owner = np.repeat(np.arange(len(members)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, first[owner] + number * size


def _turns(trie: Trie, members: Int64) -> tuple[Int64, Int64]:
    spans = SpanView.of(trie.trajectories)
    of_span = np.repeat(np.arange(trie.num_trajectories), np.diff(spans.offsets))
    opens = np.ones(len(of_span), bool)
    opens[1:] = (of_span[1:] != of_span[:-1]) | (spans.starts[1:] != spans.ends[:-1])
    index = np.full(trie.num_trajectories, -1)
    index[members] = np.arange(len(members))
    opens &= index[of_span] >= 0
    return index[of_span[opens]], spans.starts[opens].astype(np.int64)


def _recorded(trie: Trie, members: Int64) -> tuple[Int64, Int64] | None:
    """The offsets in the metadata of all trajectories, or None if none has any."""
    table: pa.Table = trie.trajectories.take(pa.array(members))
    named = pc.match_substring(table["metadata"], '"segments"').to_numpy()
    if not named.any():
        return None
    rows = table.select(["metadata", "source"]).to_pylist()
    found = [_offsets(row["metadata"]) for row in rows]
    if all(offsets is None for offsets in found):  # the word stands somewhere else in the metadata
        return None
    for row, offsets, length in zip(rows, found, trie.lengths[members].tolist(), strict=True):
        if fault := _fault(offsets, length):
            raise TreepackError(
                f"{row['source']}: {fault}; expected the ascending token offsets of its segments, or --segment node"
            )
    starts = np.array([offset for offsets in found for offset in offsets], np.int64)
    return np.repeat(np.arange(len(members)), [len(offsets) for offsets in found]), starts


def _offsets(metadata: str) -> Any:
    fields = orjson.loads(metadata)
    nested = [fields[name] for name in sorted(METADATA_DICTS) if isinstance(fields.get(name), dict)]
    return next((held["segments"] for held in (fields, *nested) if "segments" in held), None)


def _fault(offsets: Any, length: int) -> str | None:
    if offsets is None:
        return "its metadata has no 'segments' and that of other trajectories has"
    if not isinstance(offsets, list) or not offsets or any(type(offset) is not int for offset in offsets):
        return "'segments' is no list of integers"
    if any(a >= b for a, b in itertools.pairwise(offsets)):
        return "'segments' does not ascend"
    if not 0 < offsets[0] <= offsets[-1] < length:
        return f"'segments' leaves 1 .. {length - 1}, the tokens after the first"
    return None


class _Ancestors:
    """Jumps of 1, 2, 4, ... nodes towards the root of a trie: searches up a path in O(log depth)."""

    def __init__(self, trie: Trie) -> None:
        self.path_length = trie.path_length
        jump = np.where(trie.parent < 0, np.arange(trie.num_nodes), trie.parent)
        self.jumps = [jump]
        while not np.array_equal(jump, further := jump[jump]):
            jump = further
            self.jumps.append(jump)

    def holding(self, node: Int64, offset: Int64) -> Int64:
        """The node on the path to each `node` that holds the path's token `offset`, counted from 0."""
        for jump in reversed(self.jumps):
            above = jump[node]
            node = np.where(self.path_length[above] > offset, above, node)
        return node

    def common(self, a: Int64, b: Int64) -> Int64:
        """The lowest common ancestor of `a` <= `b`, in depth-first order; some other node of b's path if none."""
        for jump in reversed(self.jumps):
            above = jump[b]
            b = np.where(above > a, above, b)
        return np.where(b > a, self.jumps[0][b], b)


def _branchings(trie: Trie, members: Int64, group: Int64) -> tuple[Int64, Int64]:
    """Cuts where two or more trajectories of a group go on differently in the trie.

    The nodes where trajectories of a group end and the common ancestors of neighbours among them are the group's own
    tree. Of these the ones with several children branch; the others are where a trajectory ends inside another.
    """
    ancestors, tree = _Ancestors(trie), trie.tree_id.astype(np.int64)
    end = trie.end_node[members].astype(np.int64)
    ends = np.unique(group * trie.num_nodes + end)
    g, node = np.divmod(ends, trie.num_nodes)
    near = (g[1:] == g[:-1]) & (tree[node[1:]] == tree[node[:-1]])
    meets = ancestors.common(node[:-1][near], node[1:][near])
    keys = np.unique(np.concatenate([ends, g[1:][near] * trie.num_nodes + meets]))
    g, node = np.divmod(keys, trie.num_nodes)
    near = (g[1:] == g[:-1]) & (tree[node[1:]] == tree[node[:-1]])
    up = np.full(len(keys), -1)
    meets = ancestors.common(node[:-1][near], node[1:][near])
    up[1:][near] = np.searchsorted(keys, g[1:][near] * trie.num_nodes + meets)
    branches = np.bincount(up[up >= 0], minlength=len(keys)) > 1
    while (idle := (up >= 0) & ~branches[up]).any():
        up[idle] = up[up[idle]]

    found_owner, found_start = [], []
    at, owner = up[np.searchsorted(keys, group * trie.num_nodes + end)], np.arange(len(members))
    while (inside := at >= 0).any():
        at, owner = at[inside], owner[inside]
        found_owner.append(owner)
        found_start.append(trie.path_length[node[at]])
        at = up[at]
    apart = np.flatnonzero(_in_several_trees(tree[end], group)[group])  # no common first token, so an empty root
    return np.concatenate([apart, *found_owner]), np.concatenate([np.zeros_like(apart), *found_start])


def _in_several_trees(tree: Int64, group: Int64) -> NDArray[np.bool_]:
    """Whether the trajectories of each group lie in more than one tree, bool [num_groups]."""
    some = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
    some[group] = tree
    return np.bincount(group, weights=some[group] != tree) > 0


def _merged(trie: Trie, members: Int64, group: Int64, owner: Int64, start: Int64, *, segment: str) -> SegmentTree:
    """The tree of segments that start at `start`, ascending by `owner`, each trajectory's first after its root."""
    num_groups = int(group.max(initial=-1)) + 1
    last = np.append(owner[1:] != owner[:-1], True)
    shared = np.flatnonzero(~last)
    # A shared segment ends where the next one starts; the trie position of its last token is the whole prefix.
    final = start[shared + 1] - 1
    holder = _Ancestors(trie).holding(trie.end_node[members][owner[shared]].astype(np.int64), final)
    position = np.full(len(owner), -1)
    position[shared] = trie.node_start[holder] + final - trie.depth[holder]
    begin = np.searchsorted(owner, np.arange(len(members)))
    # Where the first segment starts, too: ends alone do not say it, and later starts follow from the ends.
    first = start[begin[owner]]
    _, rank = np.unique(np.stack([position, first]), axis=1, return_inverse=True)
    rank = rank.reshape(-1)
    counts = np.bincount(owner, minlength=len(members))
    node, parents, level_start = np.zeros(len(owner), np.int64), [np.full(num_groups, -1)], [0, num_groups]
    active, above, level = np.arange(len(members)), group.astype(np.int64), 0
    while True:
        inner = counts[active] > level + 1
        active, above = active[inner], above[inner]
        if len(active) == 0:
            break
        entry = begin[active] + level
        keys, place = np.unique(above * len(owner) + rank[entry], return_inverse=True)
        parents.append(keys // len(owner))
        above = level_start[-1] + place
        node[entry] = above
        level_start.append(level_start[-1] + len(keys))
        level += 1
    num_inner = level_start[-1]
    ends = begin + counts - 1
    node[ends] = num_inner + np.arange(len(members))
    parents.append(np.where(counts > 1, node[ends - 1], group))
    return SegmentTree(
        segment=segment,
        num_groups=num_groups,
        num_inner=num_inner,
        parent=np.concatenate(parents),
        level_start=np.array(level_start),
        owner=np.insert(owner, begin, np.arange(len(members))),
        start=np.insert(start, begin, 0),
        node=np.insert(node, begin, group),
    )
