"""What a tree of rollouts says of its anchors: how often each led to success, and where outcomes differ.

    Trie --anchors--> Anchors         every prefix from which a rollout could be continued, and the tree they are in
    rewards --recursive_targets--> share of successes below each node of a SegmentTree; trie_targets: of a Trie
    rewards --effective_ratio--> how many anchors have both outcomes below them
    predicted, target --spearman--> how well a predictor ranks them

An anchor is a prompt or a prefix after some turns of a rollout, TRACE (arXiv 2606.11119), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treepack.errors import TreepackError
from treepack.rl.advantages.estimate import group_codes
from treepack.rl.segments import SegmentTree, segment_tree
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class Anchors:
    """The prefixes of rollouts after each turn but the last: TRACE, equation 7.

    One entry per occurrence, by trajectory and turn, all int64 [num_anchors]: the index of its `trajectory` in the
    trie, how many segments (turns) it holds besides the prompt, `turn` from 1, and how many tokens, `num_tokens`; its
    `node` in `tree`, which occurrences in several trajectories share. `group` int64 [num_trajectories] is the group of
    each trajectory and so its root in `tree`.
    """

    tree: SegmentTree
    group: Int64
    trajectory: Int64
    turn: Int64
    num_tokens: Int64
    node: Int64


def anchors(trie: Trie, *, segment: str = "turn") -> Anchors:
    """The prefixes of all trajectories of `trie`; `segment` as in `segments.segment_tree`.

    Raises:
        TreepackError: what `segment_tree` refuses.
    """
    group = group_codes(trie)
    tree = segment_tree(trie, np.arange(trie.num_trajectories), group, segment=segment)
    begin = np.searchsorted(tree.owner, np.arange(trie.num_trajectories))
    turn = np.arange(len(tree.owner)) - begin[tree.owner]
    followed = np.append(tree.owner[1:] == tree.owner[:-1], False)
    at = np.flatnonzero((turn > 0) & followed)
    return Anchors(tree, group, tree.owner[at], turn[at], tree.start[at + 1], tree.node[at])


def binary_rewards(trie: Trie) -> Float64:
    """Reward of each trajectory, 0 or 1, float64 [num_trajectories].

    Raises:
        TreepackError: a reward is missing or another number.
    """
    reward: Float64 = trie.trajectories["reward"].to_numpy().astype(np.float64)
    wrong = np.flatnonzero((reward != 0) & (reward != 1))
    if len(wrong):
        source = trie.trajectories["source"][int(wrong[0])].as_py()
        found = reward[wrong[0]]
        said = "no reward" if np.isnan(found) else f"the reward {found:g}"
        raise TreepackError(f"{source}: has {said}; TRACE needs 0 for failure or 1 for success in every rollout")
    return reward


def recursive_targets(tree: SegmentTree, reward: Float64) -> tuple[Float64, Int64]:
    """Share of successes among the trajectories below each node, and their number: TRACE, equation 18.

    The paper averages children weighted by how many leaves each has, bottom up, which is the mean over the leaves.
    Float64 and int64 [num_nodes of `tree`], its leaves, the trajectories, last. `reward` float64 [num_trajectories].
    """
    inner = tree.node < tree.num_inner
    owner, node = tree.owner[inner], tree.node[inner]
    passing = np.bincount(node, minlength=tree.num_inner)
    total = np.bincount(node, weights=reward[owner], minlength=tree.num_inner)
    targets = np.concatenate([total / passing, reward])
    return targets, np.concatenate([passing, np.ones(tree.num_trajectories, np.int64)])


def trie_targets(trie: Trie, reward: Float64) -> Float64:
    """Share of successes among the trajectories through each node of `trie`: TRACE, equation 18.

    Float64 [num_nodes]. Nodes of the trie are runs of tokens, which groups may share and which are not cut by turns.
    """
    ends = np.searchsorted(trie.end_node, np.arange(trie.num_nodes + 1))
    sums = np.concatenate([[0.0], np.cumsum(reward)])[ends]
    shares: Float64 = (sums[trie.node_end] - sums[:-1]) / trie.num_passing
    return shares


class EffectiveRatio(NamedTuple):
    """`of_rollouts`: share of rollouts below anchors with both outcomes, equation 20; `of_anchors`: share of anchors.

    Both are 0 where there is no anchor.
    """

    of_rollouts: float
    of_anchors: float
    num_anchors: int


def effective_ratio(anchor: Int64, reward: Float64) -> EffectiveRatio:
    """How many anchors have both a success and a failure below them: TRACE, equations 20 and 21.

    `anchor` int64 (codes from 0) and `reward` float64, both [num_pairs]: one pair for each rollout below each anchor.
    For the prompts of a batch, `of_anchors` is equation 21.
    """
    count = np.bincount(anchor)
    successes = np.bincount(anchor, weights=reward)
    known = count > 0
    both = (successes > 0) & (successes < count)
    num_anchors, num_pairs = int(known.sum()), int(count.sum())
    if num_anchors == 0:
        return EffectiveRatio(0.0, 0.0, 0)
    return EffectiveRatio(float(count[both].sum()) / num_pairs, float(both.sum()) / num_anchors, num_anchors)


def effective_ratios(found: Anchors, reward: Float64) -> dict[str, EffectiveRatio]:
    """`effective_ratio` of the prompts, "root", and of the prefixes that two or more trajectories share, "prefix"."""
    tree = found.tree
    passing = np.bincount(tree.node, minlength=len(tree.parent))
    shared = (tree.node >= tree.num_groups) & (passing[tree.node] > 1)
    return {
        "root": effective_ratio(found.group, reward),
        "prefix": effective_ratio(tree.node[shared], reward[tree.owner[shared]]),
    }


class Correlation(NamedTuple):
    """Spearman's `rho` of `num_pairs` pairs and its `p_value`; None where either side is constant.

    `num_unpredicted` counts the targets that nothing was predicted for, which are not among the pairs.
    """

    rho: float | None
    p_value: float | None
    num_pairs: int
    num_unpredicted: int = 0


def spearman(predicted: Float64, target: Float64) -> Correlation:
    """Rank correlation of predicted values and targets: TRACE, equation 22.

    Raises:
        TreepackError: scipy is not installed.
    """
    count = len(target)
    if count < 3 or np.ptp(predicted) == 0 or np.ptp(target) == 0:
        return Correlation(None, None, count)
    try:
        from scipy.stats import spearmanr
    except ImportError as error:
        raise TreepackError("rank correlations need scipy; install it with: pip install 'treepack[stats]'") from error
    found = spearmanr(predicted, target)
    return Correlation(float(found.statistic), float(found.pvalue), count)
