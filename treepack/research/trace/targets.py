"""Anchors of a tree of rollouts: the share of successes below each, and the anchors with both outcomes.

    Trie --anchors--> TurnPrefixes           every prefix from which a rollout could be continued, and its tree
    rewards, LeafWeights --recursive_targets--> share of successes below each node of a SegmentTree
    rewards --effective_ratio--> share of anchors with both outcomes below them
    predicted, target --spearman--> rank correlation of a predictor

An anchor is a prompt, or a prefix after some turns of a rollout: TRACE (arXiv 2606.11119), section 2.2. The leaves of a
tree that was sampled by forks are weighted (`leaf_weights`), because a plain share of them is biased.

        7 | 1 2 | 3 4 | 5    a  success      anchors: the prompt [7], target 1/2, with both outcomes; [7 1 2] and
        7 | 6 2 | 8          b  failure      [7 1 2 3 4] of a, target 1; [7 6 2] of b, target 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treepack.errors import TreepackError, install_hint
from treepack.rl.group_tree import group_codes
from treepack.rl.leaf_weights import LeafWeights
from treepack.rl.rollouts import refuse_split
from treepack.rl.segments import SegmentTree, segment_tree
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class TurnPrefixes:
    """The prefixes of rollouts after each turn but the last: TRACE, equation 7.

    The arrays have one entry per occurrence, by trajectory and turn, all int64 [num_anchors]: the index of its
    `trajectory` in the trie, the number `turn` of segments (turns) after the prompt, from 1, the number of tokens
    `num_tokens`, and its `node` in `tree`. Occurrences in several trajectories may share a node. `group` int64
    [num_trajectories] is the group of each trajectory, which is also its root in `tree`.
    """

    # The rollouts of the header: trajectory [0 0 1], turn [1 2 1], num_tokens [3 5 3], group [0 0].
    tree: SegmentTree
    group: Int64
    trajectory: Int64
    turn: Int64
    num_tokens: Int64
    node: Int64


def anchors(trie: Trie, *, segment: str = "turn") -> TurnPrefixes:
    """List the prefixes of all trajectories of `trie`; `segment` is that of `segments.segment_tree`.

    Raises:
        TreepackError: a rollout of several trajectories, or any error of `segment_tree`.
    """
    refuse_split(
        trie,
        what="prefixes of rollouts need",
        remedy="for conversations, take a template that keeps earlier turns (build-trie --chat-template)",
    )
    group = group_codes(trie)
    tree = segment_tree(trie, np.arange(trie.num_trajectories), group, segment=segment)
    # Number the segments of each trajectory from 0, the root: owner [0 0 0 0 1 1 1] -> turn [0 1 2 3 0 1 2].
    begin = np.searchsorted(tree.owner, np.arange(trie.num_trajectories))
    turn = np.arange(len(tree.owner)) - begin[tree.owner]
    followed = np.append(tree.owner[1:] == tree.owner[:-1], False)
    at = np.flatnonzero((turn > 0) & followed)
    # A prefix ends before the next segment, so that start is its number of tokens.
    return TurnPrefixes(tree, group, tree.owner[at], turn[at], tree.start[at + 1], tree.node[at])


def binary_rewards(trie: Trie) -> Float64:
    """Return the reward of each trajectory, 0 or 1, float64 [num_trajectories].

    Raises:
        TreepackError: a reward is missing or another number.
    """
    reward: Float64 = trie.trajectories["reward"].to_numpy().astype(np.float64)
    wrong = np.flatnonzero((reward != 0) & (reward != 1))
    if len(wrong):
        value = reward[wrong[0]]
        fault = "no reward" if np.isnan(value) else f"the reward {str(value).removesuffix('.0')}"
        raise TreepackError(
            f"{trie.source(wrong[0])}: has {fault}; TRACE needs 0 for failure or 1 for success in every rollout, so "
            "write one of them there and build the trie again"
        )
    return reward


def recursive_targets(tree: SegmentTree, reward: Float64, weights: LeafWeights | None) -> tuple[Float64, Int64]:
    """Return the share of successes among the trajectories below each node, and their number: TRACE, equation 18.

    The paper averages children bottom up, weighted by their numbers of leaves, which equals the mean over all leaves.
    With `weights`, of the trajectories of the tree, it is the weighted mean of the leaves from before the first
    fallback, or of all leaves below a node if a fallback added all of them. The results are float64 and int64
    [num_nodes of `tree`]; the leaves, which are the trajectories, come last. `reward` is float64 [num_trajectories].
    """
    # The list has each inner node once per trajectory below it, so counting and summing the list needs no recursion.
    inner = tree.node < tree.num_inner
    owner, node = tree.owner[inner], tree.node[inner]
    passing = np.bincount(node, minlength=tree.num_inner)
    size, value = passing, reward[owner]
    if weights is not None:
        weight = weights.of_pairs(owner, node)
        size, value = np.bincount(node, weights=weight, minlength=tree.num_inner), weight * value
    total = np.bincount(node, weights=value, minlength=tree.num_inner)
    targets = np.concatenate([total / size, reward])
    return targets, np.concatenate([passing, np.ones(tree.num_trajectories, np.int64)])


class _EffectiveRatio(NamedTuple):
    """Share of rollouts below anchors with both outcomes (`of_rollouts`, equation 20), and share of such anchors.

    Leaf weights count in `of_rollouts`; every anchor counts once in `of_anchors`, and any leaf may give it its second
    outcome. Both are 0 without an anchor.
    """

    of_rollouts: float
    of_anchors: float
    num_anchors: int


def effective_ratio(anchor: Int64, reward: Float64, weight: Float64 | None = None) -> _EffectiveRatio:
    """Share of anchors that have both a success and a failure below them: TRACE, equations 20 and 21.

    `anchor` int64 (codes from 0), `reward` and `weight` float64 (None for equal ones), all [num_pairs]: one pair for
    each rollout below each anchor. For the prompts of a batch, `of_anchors` is equation 21.
    """
    # anchor [0, 0, 1, 1, 1], reward [1, 0, 1, 1, 1]: 1 of 2 anchors is mixed, with 2 of 5 rollouts -> (0.4, 0.5, 2)
    count = np.bincount(anchor)
    successes = np.bincount(anchor, weights=reward)
    known = count > 0
    both = (successes > 0) & (successes < count)
    size = count if weight is None else np.bincount(anchor, weights=weight)
    num_anchors = int(known.sum())
    if num_anchors == 0:
        return _EffectiveRatio(0.0, 0.0, 0)
    return _EffectiveRatio(float(size[both].sum()) / float(size.sum()), float(both.sum()) / num_anchors, num_anchors)


def effective_ratios(
    prefixes: TurnPrefixes, reward: Float64, weights: LeafWeights | None
) -> dict[str, _EffectiveRatio]:
    """`effective_ratio` of the prompts ("root") and of the prefixes that two or more trajectories share ("prefix").

    `weights` are as in `recursive_targets`, times the number of rollouts of each group, so that groups count by it.
    """
    tree = prefixes.tree
    passing = np.bincount(tree.node, minlength=len(tree.parent))
    shared = (tree.node >= tree.num_groups) & (passing[tree.node] > 1)
    scaled = None if weights is None else weights.times_size(prefixes.group)

    def ratio(owner: Int64, anchor: Int64) -> _EffectiveRatio:
        weight = None if scaled is None else scaled.of_pairs(owner, anchor)
        return effective_ratio(anchor, reward[owner], weight)

    return {
        "root": ratio(np.arange(len(reward)), prefixes.group),
        "prefix": ratio(tree.owner[shared], tree.node[shared]),
    }


class RankCorrelation(NamedTuple):
    """Spearman's `rho` of `num_pairs` pairs and its `p_value`; None if either side is constant.

    `num_unpredicted` counts the targets without a prediction, which are not among the pairs.
    """

    rho: float | None
    p_value: float | None
    num_pairs: int
    num_unpredicted: int = 0


def spearman(predicted: Float64, target: Float64) -> RankCorrelation:
    """Rank correlation of predicted values and targets: TRACE, equation 22.

    Raises:
        TreepackError: scipy is not installed.
    """
    # Two pairs always have the correlation 1 or -1, with no p-value.
    count = len(target)
    if count < 3 or np.ptp(predicted) == 0 or np.ptp(target) == 0:
        return RankCorrelation(None, None, count)
    try:
        from scipy.stats import spearmanr
    except ImportError as error:
        raise TreepackError(f"rank correlations need scipy; {install_hint('stats')}") from error
    result = spearmanr(predicted, target)
    return RankCorrelation(float(result.statistic), float(result.pvalue), count)
