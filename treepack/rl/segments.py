"""The tree that a group of rollouts was sampled as: segments cut out of a trie, and which trajectories share them.

    trie, group of each trajectory --cuts.find_cuts--> where segments start --segment_tree--> SegmentTree

        prompt | s1      | s2            cuts of trajectory a: 3, 7      nodes: root = the group [prompt]
        1 2 3  | 4 5 6 7 | 8 9      a                                           n    = [4 5 6 7], shared by a and b
        1 2 3  | 4 5 6 7 | 5 5 5    b    cuts of c: 3                    leaves: a [8 9]   b [5 5 5]   c [6 6]
        1 2 3  | 6 6                c

Two trajectories share a segment if they are the same token for token up to its end and were cut at the same places.
The last segment of a trajectory is its own, a leaf, even if another has the same tokens: it was sampled twice. So a
group whose trajectories are cut once, after the prompt, is a star.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.rl.group_tree import NodePaths, node_paths
from treepack.rl.segment_cuts import Cuts, find_cuts
from treepack.trajectory import Int64
from treepack.trie.trie import Trie


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
        turn       at each run of trained tokens; in the prompt of a continuation, as in the rollout it continues
        node       where trajectories of the group branch in the trie
        a number   every so many tokens, from the first one on its path that the group trains
        auto       recorded where there are any, else node

    Segments that start less than `min_depth` tokens after the first one are not cut off: what branches there is
    compared in the node above.

    Raises:
        TreepackError: an unknown `segment`, no or faulty recorded offsets, or a trie that shares nothing.
    """
    if trie.share == "none" and trie.num_trajectories > 1:
        raise TreepackError("the trie was built with --share none and has no branches; build it with --share group")
    paths = node_paths(trie)
    segment, owner, start = find_cuts(trie, paths, members, group, segment=segment)
    first = np.full(len(members), np.iinfo(np.int64).max)
    np.minimum.at(first, owner, start)
    kept = (start == first[owner]) | (start - first[owner] >= min_depth)
    uncut = np.flatnonzero(np.bincount(owner, minlength=len(members)) == 0)
    owner, start = np.concatenate([owner[kept], uncut]), np.concatenate([start[kept], np.zeros_like(uncut)])
    order = np.lexsort((start, owner))
    return _merged(trie, paths, members, group, Cuts(segment, owner[order], start[order]))


def _merged(trie: Trie, paths: NodePaths, members: Int64, group: Int64, cuts: Cuts) -> SegmentTree:
    """The tree of segments that start at `cuts`, ascending, each trajectory's first after its root."""
    segment, owner, start = cuts
    num_groups = int(group.max(initial=-1)) + 1
    last = np.append(owner[1:] != owner[:-1], True)
    shared = np.flatnonzero(~last)
    # A shared segment ends where the next one starts; the trie position of its last token is the whole prefix.
    final = start[shared + 1] - 1
    holder = paths.holding(trie.end_node[members][owner[shared]].astype(np.int64), final)
    position = np.full(len(owner), -1)
    position[shared] = trie.node_start[holder] + final - trie.depth[holder]
    begin = np.searchsorted(owner, np.arange(len(members)))
    # Where the first segment starts, too: ends alone do not say it, and later starts follow from the ends.
    first = start[begin[owner]]
    _, rank = np.unique(position * (int(first.max(initial=0)) + 1) + first, return_inverse=True)
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
