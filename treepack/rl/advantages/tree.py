"""Advantages from the tree: the rewards below a node, compared with the rewards beside it or above it.

    SegmentTree, reward float64 [n] --treepo | tree_grpo--> float64 [n], one per trajectory
                                    --treerpo | tree_grpo_segments | treerl--> float64 [num_segments], one per segment

        [1 2] -+- [3 4] -+- [5]      a  reward 1      subgroups: all of a, b, c at [1 2]; a and b at [3 4]
               |         '- [6]      b  reward 0      treepo compares in both, tree_grpo in the deepest and the group
               '- [8 9]              c  reward 0      docs/tree-rl.md has every estimator on this tree in numbers

A segment's advantage applies to its trained tokens. An only child continues the segment above it: nothing was sampled
beside it, so both have the same advantage. Below a root, this is the advantage of the root. Deviations and `epsilon`
are defined in `advantages.flat`. In a star, whose trajectories share only their root, treepo and treerpo are grpo,
tree_grpo is twice grpo, and treerl is twice dr_grpo.

With `weights` of the leaves (`leaf_weights`), means and deviations over trajectories are weighted. The leaves of a
fallback then count only in a node with fewer than two other leaves. Numbers of trajectories stay numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treepack.rl.advantages.advantage_options import EPSILON
from treepack.rl.advantages.flat import deviations, divide_by_deviation, grpo, magnitudes, means
from treepack.rl.leaf_weights import LeafWeights
from treepack.rl.segments import SegmentTree
from treepack.trajectory import Float64, Int64


def treepo(
    tree: SegmentTree,
    reward: Float64,
    *,
    weights: LeafWeights | None = None,
    scope: Int64 | None = None,
    size_weighted: bool = False,
    reject_subgroups: bool = False,
    without_root: bool = False,
    epsilon: float = EPSILON,
) -> Float64:
    """Mean over the nested subgroups of a trajectory of its reward minus the subgroup's mean: TreePO, equation 5.

        G_j   = the trajectories that pass through node j, with j any node above the last segment of trajectory i
        A_ij  = R_i - mean of R over G_j
        A_i   = sum_j A_ij / (|J| std)            equation 5
        A_i   = sum_j |G_j| A_ij / (std sum_j |G_j|)     equation 6, `size_weighted`

    The std is taken over all A_ij of the group, following the superscript G of equation 5. (Equations 6 and 7 have
    J - 1 there, and the text names no other deviation.) With `scope` int64 [num_groups], it is taken over the A_ij of
    all groups of one scope, which is the global variance of the text. J counts depths, so the same trajectories at two
    depths count twice.

    A subgroup of one trajectory compares nothing and is not in J. `reject_subgroups` also removes subgroups of equal
    rewards (equation 7 is this together with `size_weighted`), and `without_root` removes the group itself (section
    4.2). A trajectory without any subgroup has 0.
    """
    sizes, averages, spread = _reward_statistics(tree, reward, weights)
    # One pair (trajectory i, node j) for each A_ij. In the header: owner [0 0 1 1 2], node [0 1 0 1 0].
    above = _inner_segments(tree)
    owner, node = tree.owner[above], tree.node[above]
    counted = sizes[node] > 1
    if reject_subgroups:
        counted &= spread[node] > 0
    if without_root:
        counted &= node >= tree.num_groups
    owner, node = owner[counted], node[counted]

    # apart [num_pairs] is A_ij: 2/3 and 1/2 for a, -1/3 and -1/2 for b, -1/3 for c.
    apart = reward[owner] - averages[node]
    weight = sizes[node].astype(np.float64) if size_weighted else np.ones(len(node))
    count = tree.num_trajectories
    total = np.bincount(owner, weights=weight, minlength=count)
    pooled = np.bincount(owner, weights=weight * apart, minlength=count)
    average = np.divide(pooled, total, out=np.zeros(count), where=total > 0)

    group = tree.groups
    part = group if scope is None else scope[group]
    weight_of_pair = None if weights is None else of_trajectories(weights, group)[owner]
    deviation = deviations(apart, part[owner], magnitudes(reward, part), weight_of_pair)
    return divide_by_deviation(average, deviation[part], epsilon=epsilon)


def treerpo(
    tree: SegmentTree, reward: Float64, *, weights: LeafWeights | None = None, epsilon: float = EPSILON
) -> Float64:
    """Value of a segment compared with its siblings: TreeRPO in the form of TRACE, equations 45 and 46.

    The value of a leaf is its reward, the value of any other node the mean of its children. The advantage of a child is
    its value minus the mean of its parent's children, over their standard deviation. Roots have 0.

    A mean over children weighs each by 1 / forks, which is what leaf weights do. So with `weights`, only children that
    a fallback added are left out: of the value if another child remains, and of the comparison if two others do.
    """
    value = _backed_up_values(tree, reward, None if weights is None else _counted_children(tree, weights, at_least=1))
    child = np.flatnonzero(tree.parent >= 0)
    parent = tree.parent[child]
    magnitude = magnitudes(reward, tree.groups)[_roots(tree)]
    # The mean of the children of a node is the node's own value.
    mean, counted = value, None
    if weights is not None:
        counted = _counted_children(tree, weights, at_least=2)[child]
        mean = means(value[child], parent, counted)
    deviation = deviations(value[child], parent, magnitude[: tree.num_inner], counted)
    advantage = np.zeros(len(value))
    advantage[child] = divide_by_deviation(value[child] - mean[parent], deviation[parent], epsilon=epsilon)
    return advantage[chain_heads(tree)[tree.node]]


def tree_grpo(
    tree: SegmentTree, reward: Float64, *, weights: LeafWeights | None = None, epsilon: float = EPSILON
) -> Float64:
    """Reward compared with trajectories of the same prefix, plus with the whole group: Tree-GRPO, TRACE equation 48.

    Both terms are a reward less a mean, over a standard deviation. The second term is `grpo`. The first term compares
    the trajectories through the deepest prefix that this trajectory shares with any other.
    """
    sizes, averages, spread = _reward_statistics(tree, reward, weights)
    above = _inner_segments(tree)
    above = above[sizes[tree.node[above]] > 1]
    deepest = tree.groups.copy()
    # Segments are listed root first and numpy keeps the last value written, so the deepest shared node remains.
    deepest[tree.owner[above]] = tree.node[above]
    intra = divide_by_deviation(reward - averages[deepest], spread[deepest], epsilon=epsilon)
    return intra + _group_term(tree, reward, weights, epsilon)


def tree_grpo_segments(
    tree: SegmentTree, reward: Float64, *, weights: LeafWeights | None = None, epsilon: float = EPSILON
) -> Float64:
    """Same as `tree_grpo`, but with a first term per segment, among the trajectories through its parent.

    So every segment is compared with the other samples from the place where it branched off. A root is compared with
    nothing.
    """
    _, averages, spread = _reward_statistics(tree, reward, weights)
    apart = np.zeros(len(tree.owner))
    # Parent of the first node of the chain of only children, -1 for a root and for a chain that starts at a root.
    branch = tree.parent[chain_heads(tree)[tree.node]]
    later = np.flatnonzero(branch >= 0)
    parent = branch[later]
    apart[later] = divide_by_deviation(reward[tree.owner[later]] - averages[parent], spread[parent], epsilon=epsilon)
    return apart + _group_term(tree, reward, weights, epsilon)[tree.owner]


def _group_term(tree: SegmentTree, reward: Float64, weights: LeafWeights | None, epsilon: float) -> Float64:
    weight = None if weights is None else of_trajectories(weights, tree.groups)
    return grpo(reward, tree.groups, weight=weight, epsilon=epsilon)


def treerl(
    tree: SegmentTree, reward: Float64, *, weights: LeafWeights | None = None, leaf_scaled: bool = False
) -> Float64:
    """Value of a segment minus that of its root, plus its value minus that of its parent: TreeRL (arXiv 2506.11902).

    The value of a node is the mean reward of the trajectories through it. The first term is therefore the global
    advantage and the second the local one; a root has 0. `leaf_scaled` divides by the square root of the number of
    these trajectories, the weight by which the paper compensates that a shared segment is trained once per trajectory.
    """
    sizes, averages, _ = _reward_statistics(tree, reward, weights, at_least=1)
    value = np.concatenate([averages, reward])
    size = np.concatenate([sizes, np.ones(len(reward), np.int64)])
    up = np.where(tree.parent < 0, np.arange(len(value)), tree.parent)
    advantage = 2 * value - value[_roots(tree)] - value[up]
    if leaf_scaled:
        advantage /= np.sqrt(size)
    # Already 0 in exact arithmetic; set it so that no rounding remains.
    advantage[: tree.num_groups] = 0.0
    per_segment: Float64 = advantage[chain_heads(tree)[tree.node]]
    return per_segment


def _roots(tree: SegmentTree) -> Int64:
    """Root of each node, int64 [num_nodes]."""
    roots = np.zeros(len(tree.parent), np.int64)
    roots[tree.node] = tree.groups[tree.owner]
    return roots


def chain_heads(tree: SegmentTree) -> Int64:
    """Return the head of each node's chain of only children: the nearest node, itself included, with siblings, or the
    root; int64 [num_nodes].
    """
    # d has the chain 0 - 1 - 2 - 3, and e leaves it after the root: parent [-1 0 1 2 0] -> heads [0 1 1 1 4].
    children = np.bincount(tree.parent[tree.parent >= 0], minlength=len(tree.parent))
    only = (tree.parent >= 0) & (children[tree.parent] == 1)
    heads = np.where(only, tree.parent, np.arange(len(tree.parent)))
    while not np.array_equal(heads, further := heads[heads]):
        heads = further
    return heads


def _inner_segments(tree: SegmentTree) -> NDArray[np.intp]:
    """Indices of the listed segments that are not the last of their trajectory, root first."""
    # node [0 1 2 | 0 1 3 | 0 4], num_inner 2 -> [0 1 | 3 4 | 6]
    return np.flatnonzero(tree.node < tree.num_inner)


def of_trajectories(weights: LeafWeights, group: Int64) -> Float64:
    """Return the weight of each trajectory in comparisons within its `group`, float64 [num_trajectories]."""
    return weights.of_pairs(np.arange(len(group)), group, at_least=2)


def _reward_statistics(
    tree: SegmentTree, reward: Float64, weights: LeafWeights | None, *, at_least: int = 2
) -> tuple[Int64, Float64, Float64]:
    """Number, mean and standard deviation of the rewards of the trajectories through each inner node.

    Mean and deviation are weighted, by `weights.of_pairs` with `at_least`.
    """
    # The header: numbers [3 2], means [1/3 1/2], deviations [0.577 0.707] of the nodes [1 2] and [3 4].
    above = _inner_segments(tree)
    owner, node = tree.owner[above], tree.node[above]
    weight = None if weights is None else weights.of_pairs(owner, node, at_least=at_least)
    magnitude = magnitudes(reward, tree.groups)[_roots(tree)[: tree.num_inner]]
    mean = means(reward[owner], node, weight)
    return np.bincount(node), mean, deviations(reward[owner], node, magnitude, weight)


def _counted_children(tree: SegmentTree, weights: LeafWeights, *, at_least: int) -> Float64:
    """Return 1 for each node that counts among its parent's children, else 0; float64 [num_nodes].

    Children with leaves from before the first fallback count, or all children if there are fewer than `at_least`.
    """
    counted = np.bincount(tree.node, weights.before_fallback[tree.owner] > 0) > 0
    child = tree.parent >= 0
    few = np.bincount(tree.parent[child], counted[child], minlength=tree.num_inner) < at_least
    return np.where(child & few[tree.parent], 1.0, counted.astype(np.float64))


def _backed_up_values(tree: SegmentTree, reward: Float64, counted: Float64 | None = None) -> Float64:
    """Value of each node: the reward of a leaf, else the mean of the children, level by level from the deepest.

    `counted` float64 [num_nodes] is 1 for the children that count, 0 for the others; None counts all.
    """
    # The header: leaves [1 0 0], then [3 4] = (1 + 0) / 2, then the root (1/2 + 0) / 2 -> [1/4 1/2 1 0 0].
    value = np.concatenate([np.zeros(tree.num_inner), reward])
    weight = np.ones(len(value)) if counted is None else counted
    child = tree.parent >= 0
    count = np.bincount(tree.parent[child], weight[child], minlength=tree.num_inner)
    # Leaves are at any depth, so their rewards are added first; inner nodes then add their values level by level.
    leaves = weight[tree.num_inner :] * reward
    total = np.bincount(tree.parent[tree.num_inner :], leaves, minlength=tree.num_inner)
    starts = tree.level_start.tolist()
    for level in range(len(starts) - 2, -1, -1):
        a, b = starts[level], starts[level + 1]
        value[a:b] = total[a:b] / count[a:b]
        if level:
            above = starts[level - 1]
            total[above:a] += np.bincount(tree.parent[a:b] - above, weight[a:b] * value[a:b], minlength=a - above)
    return value
