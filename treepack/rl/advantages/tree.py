"""Advantages from the tree: the rewards below a node against those beside or above it.

    SegmentTree, reward float64 [n] --treepo | tree_grpo--> float64 [n], one per trajectory
                                    --treerpo | tree_grpo_segments | treerl--> float64 [num_segments], one per segment

A segment's advantage is for its trained tokens. An only child goes on with the segment above it: nothing was sampled
beside it, so it has the same advantage, and below a root that of the root. Deviations and `epsilon` are those of
`advantages_flat`. In a star, where trajectories share their root alone: treepo and treerpo are grpo, tree_grpo is twice
grpo, treerl twice dr_grpo.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treepack.rl.advantages.flat import EPSILON, deviations, grpo, magnitudes, means, scaled
from treepack.rl.segments import SegmentTree
from treepack.trajectory import Float64, Int64


def treepo(
    tree: SegmentTree,
    reward: Float64,
    *,
    scope: Int64 | None = None,
    size_weighted: bool = False,
    reject_subgroups: bool = False,
    without_root: bool = False,
    epsilon: float = EPSILON,
) -> Float64:
    """Mean over the nested subgroups of a trajectory of its reward less the subgroup's mean: TreePO, equation 5.

        G_j   = the trajectories that pass through node j, for every node above the last segment of trajectory i
        A_ij  = R_i - mean of R over G_j
        A_i   = sum_j A_ij / (|J| std)            equation 5
        A_i   = sum_j |G_j| A_ij / (std sum_j |G_j|)     equation 6, `size_weighted`

    std is over all A_ij of the group, as the superscript G of equation 5 says (equations 6 and 7 have J - 1 there and
    the text names no other deviation); or, with `scope` int64 [num_groups], over those of all groups of one scope, as
    the text's global variance does. J counts depths, so the same trajectories at two depths count twice. Subgroups of
    one trajectory compare nothing and are not in J; nor are those of equal rewards with `reject_subgroups` (equation 7
    is both, this and `size_weighted`), nor the group itself with `without_root` (section 4.2). A trajectory without any
    subgroup has 0.
    """
    sizes, averages, spread = _below(tree, reward)
    above = _above(tree)
    owner, node = tree.owner[above], tree.node[above]
    counted = sizes[node] > 1
    if reject_subgroups:
        counted &= spread[node] > 0
    if without_root:
        counted &= node >= tree.num_groups
    owner, node = owner[counted], node[counted]

    apart = reward[owner] - averages[node]
    weight = sizes[node].astype(np.float64) if size_weighted else np.ones(len(node))
    count = tree.num_trajectories
    total = np.bincount(owner, weights=weight, minlength=count)
    pooled = np.bincount(owner, weights=weight * apart, minlength=count)
    average = np.divide(pooled, total, out=np.zeros(count), where=total > 0)

    group = tree.groups
    part = group if scope is None else scope[group]
    deviation = deviations(apart, part[owner], magnitudes(reward, part))
    return scaled(average, deviation[part], epsilon=epsilon)


def treerpo(tree: SegmentTree, reward: Float64, *, epsilon: float = EPSILON) -> Float64:
    """Value of a segment against its siblings': TreeRPO as TRACE has it, equations 45 and 46.

    A leaf is worth its reward, any other node the mean of its children. Each child's advantage is its value less the
    mean of the children of its parent, over their standard deviation. Roots have 0.
    """
    value = _backed_up(tree, reward)
    child = np.flatnonzero(tree.parent >= 0)
    parent = tree.parent[child]
    within = magnitudes(reward, tree.groups)[_roots(tree)]
    deviation = deviations(value[child], parent, within[: tree.num_inner])
    advantage = np.zeros(len(value))
    advantage[child] = scaled(value[child] - value[parent], deviation[parent], epsilon=epsilon)
    return advantage[_branched(tree)[tree.node]]


def tree_grpo(tree: SegmentTree, reward: Float64, *, epsilon: float = EPSILON) -> Float64:
    """Reward against the trajectories of the same prefix, plus against all of the group: Tree-GRPO, TRACE equation 48.

    Both terms are a reward less a mean over a standard deviation. The second is `grpo`; the first is taken among the
    trajectories that share the deepest of its prefixes that any other shares.
    """
    sizes, averages, spread = _below(tree, reward)
    above = _above(tree)
    above = above[sizes[tree.node[above]] > 1]
    deepest = tree.groups.copy()
    deepest[tree.owner[above]] = tree.node[above]  # listed root first, so the last written is the deepest
    intra = scaled(reward - averages[deepest], spread[deepest], epsilon=epsilon)
    return intra + grpo(reward, tree.groups, epsilon=epsilon)


def tree_grpo_segments(tree: SegmentTree, reward: Float64, *, epsilon: float = EPSILON) -> Float64:
    """As `tree_grpo`, with the first term taken segment by segment, among the trajectories through its parent.

    So every segment is compared with what else was sampled where it branched off, and a root with nothing.
    """
    _, averages, spread = _below(tree, reward)
    apart = np.zeros(len(tree.owner))
    branched = tree.parent[_branched(tree)[tree.node]]
    later = np.flatnonzero(branched >= 0)
    parent = branched[later]
    apart[later] = scaled(reward[tree.owner[later]] - averages[parent], spread[parent], epsilon=epsilon)
    return apart + grpo(reward, tree.groups, epsilon=epsilon)[tree.owner]


def treerl(tree: SegmentTree, reward: Float64, *, leaf_scaled: bool = False) -> Float64:
    """Value of a segment less that of its root plus less that of its parent: TreeRL (arXiv 2506.11902).

    A node is worth the mean reward of the trajectories through it, so the first term is its global and the second its
    local advantage; a root has 0. `leaf_scaled` divides by the square root of their number, the paper's weight against
    training a shared segment once per trajectory.
    """
    sizes, averages, _ = _below(tree, reward)
    value = np.concatenate([averages, reward])
    size = np.concatenate([sizes, np.ones(len(reward), np.int64)])
    up = np.where(tree.parent < 0, np.arange(len(value)), tree.parent)
    advantage = 2 * value - value[_roots(tree)] - value[up]
    if leaf_scaled:
        advantage /= np.sqrt(size)
    advantage[: tree.num_groups] = 0.0
    found: Float64 = advantage[_branched(tree)[tree.node]]
    return found


def _roots(tree: SegmentTree) -> Int64:
    """Root of each node."""
    roots = np.zeros(len(tree.parent), np.int64)
    roots[tree.node] = tree.groups[tree.owner]
    return roots


def _branched(tree: SegmentTree) -> Int64:
    """For each node the one it goes on from through only children: the nearest that has siblings, or the root."""
    children = np.bincount(tree.parent[tree.parent >= 0], minlength=len(tree.parent))
    only = (tree.parent >= 0) & (children[tree.parent] == 1)
    found = np.where(only, tree.parent, np.arange(len(tree.parent)))
    while not np.array_equal(found, further := found[found]):
        found = further
    return found


def _above(tree: SegmentTree) -> NDArray[np.intp]:
    """The listed segments that are not the last of their trajectory: its predecessors, root first."""
    return np.flatnonzero(tree.node < tree.num_inner)


def _below(tree: SegmentTree, reward: Float64) -> tuple[Int64, Float64, Float64]:
    """Number, mean and standard deviation of the rewards of the trajectories through each inner node."""
    above = _above(tree)
    owner, node = tree.owner[above], tree.node[above]
    within = magnitudes(reward, tree.groups)[_roots(tree)[: tree.num_inner]]
    return np.bincount(node), means(reward[owner], node), deviations(reward[owner], node, within)


def _backed_up(tree: SegmentTree, reward: Float64) -> Float64:
    """Value of each node: its reward at a leaf, else the mean of its children, level by level from the deepest."""
    value = np.concatenate([np.zeros(tree.num_inner), reward])
    child = tree.parent >= 0
    count = np.bincount(tree.parent[child], minlength=tree.num_inner)
    total = np.bincount(tree.parent[tree.num_inner :], weights=reward, minlength=tree.num_inner)
    starts = tree.level_start.tolist()
    for level in range(len(starts) - 2, -1, -1):
        a, b = starts[level], starts[level + 1]
        value[a:b] = total[a:b] / count[a:b]
        if level:
            above = starts[level - 1]
            total[above:a] += np.bincount(tree.parent[a:b] - above, weights=value[a:b], minlength=a - above)
    return value
