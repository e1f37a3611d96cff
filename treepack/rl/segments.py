"""The tree that a group of rollouts was sampled as: segments cut out of a trie, and the trajectories that share them.

    trie, group of each trajectory --segment_cuts.find_cuts--> starts of segments --segment_tree--> SegmentTree

        prompt | s1      | s2            cuts of trajectory a: 3, 7      nodes: root = the group [prompt]
        1 2 3  | 4 5 6 7 | 8 9      a                                           n    = [4 5 6 7], shared by a and b
        1 2 3  | 4 5 6 7 | 5 5 5    b    cuts of c: 3                    leaves: a [8 9]   b [5 5 5]   c [6 6]
        1 2 3  | 6 6                c

Two trajectories share a segment if their tokens are equal up to the end of it and they have the same cuts so far. The
last segment of a trajectory is a separate leaf, even if another trajectory has the same tokens, because it
was sampled twice. If the sampler recorded ids of the segments, a shared segment must also have the same id, so that two
samples of the same tokens are two nodes. A group whose trajectories have one cut each, after the prompt, is a star.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.rl.group_tree import NodePaths, node_paths, token_places
from treepack.rl.segment_cuts import SegmentCuts, find_cuts
from treepack.trajectory import Int64
from treepack.trie.route_symbols import splits_by_routes
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class SegmentTree:
    """The segments of `num_trajectories` trajectories, and the tree node of each segment.

    Nodes 0 .. num_groups - 1 are the roots, one per group. The shared segments follow, level by level. Node
    `num_inner + i` is the last segment of trajectory i. `parent` int64 [num_nodes] is -1 at a root. `level_start`
    int64 [num_levels + 1] are the offsets of the levels among the inner nodes. Three arrays, int64 [num_segments], list
    the segments of every trajectory in order, the root first: the trajectory (`owner`), the first token (`start`) and
    the `node`. `segment` is the method that cut them: the requested one, or the one that "auto" chose.
    """

    # With the trajectories of the header sorted as b, a, c:
    #     owner [0 0 0 1 1 1 2 2]     start [0 3 7 0 3 7 0 3]     node [0 1 2 0 1 3 0 4]
    #     parent [-1 0 1 1 0]         num_inner 2: the root and n      level_start [0 1 2]
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
        """Group of each trajectory, which is also its root: the node of its first listed segment."""
        return self.node[np.searchsorted(self.owner, np.arange(self.num_trajectories))]

    @property
    def num_subgroups(self) -> int:
        """Number of shared segments below the roots that belong to two or more trajectories."""
        passing = np.bincount(self.node, minlength=self.num_inner)[self.num_groups : self.num_inner]
        return int((passing > 1).sum())

    def segment_of(self, trajectory: Int64, position: Int64) -> Int64:
        """Return the index of the listed segment that contains token `position` of each `trajectory`; both int64 [n].

        Pairs must ascend by trajectory and position.
        """
        # One number for owner and start makes one ascending array. Tokens 2 and 7 of b, 6 of a and 3 of c are in the
        # listed segments [0, 2, 4, 7].
        span = int(max(self.start.max(initial=0), position.max(initial=0))) + 1
        return np.searchsorted(self.owner * span + self.start, trajectory * span + position, side="right") - 1


def segment_tree(trie: Trie, members: Int64, group: Int64, *, segment: str = "auto", min_depth: int = 0) -> SegmentTree:
    """Build the tree of the trajectories `members` of `trie` (ascending), whose groups are `group`, codes from 0.

    `segment` selects the tokens where segments start:

        recorded   the token offsets under "segments" in the metadata of each trajectory, with the ids in "segment_ids"
                   if there are any
        turn       each run of trained tokens; in the prompt of a continuation, the cuts of the rollout it continues
        node       the branches of the group's trajectories in the trie
        a number   every so many tokens, from the first token on the path that the group trains
        auto       recorded if there are any, else node

    A segment that starts less than `min_depth` tokens after the first one is not cut off. Trajectories that branch
    there are compared in the node above.

    Raises:
        TreepackError: unknown `segment`, recorded offsets or ids missing or malformed, or a trie that shares nothing or
            splits where recorded routes differ.
    """
    if trie.share == "none" and trie.num_trajectories > 1:
        raise TreepackError("the trie was built with --share none and has no branches; build it with --share group")
    if splits_by_routes(trie):
        raise TreepackError(
            "the trie splits where recorded routes differ, which are not branches of sampling; build it with "
            "--route-conflicts first, or take an estimator without a tree"
        )
    paths = node_paths(trie)
    segment, owner, start, sample = find_cuts(trie, paths, members, group, segment=segment)
    # First cut of each member; the cuts come in any order, so take a minimum by owner.
    first = np.full(len(members), np.iinfo(np.int64).max)
    np.minimum.at(first, owner, start)
    deep = (start == first[owner]) | (start - first[owner] >= min_depth)
    # A member without cuts is one segment from token 0, its leaf, and its root segment is empty: owner [0, 0, 2] of 3
    # members -> uncut [1].
    uncut = np.flatnonzero(np.bincount(owner, minlength=len(members)) == 0)
    owner, start = np.concatenate([owner[deep], uncut]), np.concatenate([start[deep], np.zeros_like(uncut)])
    order = np.lexsort((start, owner))
    if sample is not None:
        sample = np.concatenate([sample[deep], np.zeros_like(uncut)])[order]
    return _build_tree(trie, paths, members, group, SegmentCuts(segment, owner[order], start[order], sample))


def _build_tree(trie: Trie, paths: NodePaths, members: Int64, group: Int64, cuts: SegmentCuts) -> SegmentTree:
    """Build the tree of segments from `cuts`, ascending; the first cut of each trajectory is the end of its root."""
    segment, owner, start, sample = cuts
    num_groups = int(group.max(initial=-1)) + 1
    # The cuts of b, a, c in the header: owner [0 0 1 1 2], start [3 7 3 7 3] -> last [F T F T T], shared [0 2].
    last = np.append(owner[1:] != owner[:-1], True)
    shared = np.flatnonzero(~last)
    # A shared segment ends before the next cut, here at token 6. The place of this token in the trie identifies the
    # whole prefix: a and b have it in common, so both get the same position.
    final = start[shared + 1] - 1
    position = np.full(len(owner), -1)
    position[shared] = token_places(trie, paths, members[owner[shared]], final)
    begin = np.searchsorted(owner, np.arange(len(members)))
    # Equal ends are not enough: cut at 2 and 5 or at 3 and 5, the segments up to 5 differ. So the key also contains the
    # first cut. Later cuts need no place in the key, because each one follows from the end of the segment before.
    # The header: position [6 -1 6 -1 -1], first [3 3 3 3 3] -> keys [27 -1 27 -1 -1] -> rank [1 0 1 0 0].
    first = start[begin[owner]]
    _, rank = np.unique(position * (int(first.max(initial=0)) + 1) + first, return_inverse=True)
    if sample is not None:
        # Equal tokens that were sampled twice have two ids: rank [1 0 1], sample [4 2 5] -> keys [10 2 11] -> [1 0 2].
        _, rank = np.unique(rank * (int(sample.max(initial=0)) + 1) + sample, return_inverse=True)
    counts = np.bincount(owner, minlength=len(members))
    node, parents, level_start = np.zeros(len(owner), np.int64), [np.full(num_groups, -1)], [0, num_groups]
    active, above, level = np.arange(len(members)), group.astype(np.int64), 0
    while True:
        # Trajectories whose segment at this level is shared, not their leaf: [0 1] (b and a) at level 0, then none.
        inner = counts[active] > level + 1
        active, above = active[inner], above[inner]
        if len(active) == 0:
            break
        entry = begin[active] + level
        # Segments are the same node if both parent and rank agree: the distinct keys are the nodes of the level.
        keys, place = np.unique(above * len(owner) + rank[entry], return_inverse=True)
        parents.append(keys // len(owner))
        above = level_start[-1] + place
        node[entry] = above
        level_start.append(level_start[-1] + len(keys))
        level += 1
    num_inner = level_start[-1]
    ends = begin + counts - 1
    node[ends] = num_inner + np.arange(len(members))
    # A leaf is below the segment before it, or below its root if it is the only segment: parents [1 1 0] of b, a, c.
    parents.append(np.where(counts > 1, node[ends - 1], group))
    return SegmentTree(
        segment=segment,
        num_groups=num_groups,
        num_inner=num_inner,
        parent=np.concatenate(parents),
        level_start=np.array(level_start),
        # List the root before the cuts of each trajectory: starts [3 7 3 7 3] -> [0 3 7 0 3 7 0 3].
        owner=np.insert(owner, begin, np.arange(len(members))),
        start=np.insert(start, begin, 0),
        node=np.insert(node, begin, group),
    )
