"""Figures of a run: tokens decoded, their share against independent sampling, and means by leaf weights.

All means are per rollout: a tree of n leaves counts n times. With `m` the mean of a tree that `weights_of_leaves`
estimates,

    mean = sum(n * m) / sum(n)          saved = 1 - decoded / sum(n * m)     m: decoded tokens of an independent rollout
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from treepack.rollout.tree import Tree, TreeNode, weights_of_leaves


@dataclass(frozen=True, slots=True)
class RolloutMeans:
    """A mean over rollouts, estimated in three ways.

    `before_fallback` is without bias, `all_leaves` has the bias that a fallback leaves, and `unweighted` has that of
    plain means. All three are equal for independent sampling.
    """

    before_fallback: float
    all_leaves: float
    unweighted: float


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """Figures of the trees that a run has added to its file.

    Attributes:
        num_queries: trees added.
        num_before: trees that were in the file before.
        num_removed: lines of an incomplete tree that were removed from the file.
        num_rollouts: leaves.
        num_fallback: leaves that a fallback added.
        finished: leaves by the reason for which their path ended.
        requests: requests to the engine that were answered.
        tokens_decoded: tokens sampled.
        tokens_prefilled: tokens sent, once for each request.
        tokens_cached: of those, tokens whose keys came from the engine's cache; None if it does not report them.
        length: mean decoded tokens of a rollout, None without a rollout.
        reward: mean reward of the rollouts that have one, None if none has.
        is_pass_rate: all rewards are 0 or 1.
        seconds: duration of the run.
    """

    num_queries: int
    num_before: int
    num_removed: int
    num_rollouts: int
    num_fallback: int
    finished: dict[str, int]
    requests: int
    tokens_decoded: int
    tokens_prefilled: int
    tokens_cached: int | None
    length: RolloutMeans | None
    reward: RolloutMeans | None
    is_pass_rate: bool
    seconds: float

    @property
    def saved(self) -> float | None:
        """Estimated share of the tokens that independent rollouts, as many, would have decoded in addition."""
        if self.length is None:
            return None
        return 1 - self.tokens_decoded / (self.num_rollouts * self.length.before_fallback)


@dataclass(slots=True)
class TreeTally:
    """Sums over trees, from which a summary is made."""

    num_trees: int = 0
    num_fallback: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    decoded: int = 0
    prefilled: int = 0
    cached: int | None = None
    is_pass_rate: bool = True
    _lengths: list[tuple[int, RolloutMeans]] = field(default_factory=list)
    _rewards: list[tuple[int, RolloutMeans]] = field(default_factory=list)

    def add(self, tree: Tree) -> None:
        """Add the figures of one tree."""
        usage, (weights, before) = tree.usage, weights_of_leaves(tree)
        self.num_trees += 1
        self.num_fallback += sum(any(node.is_fallback for node in leaf.path()) for leaf in tree.leaves)
        self.finished.update(leaf.finish or "" for leaf in tree.leaves)
        self.requests += usage.requests
        self.decoded += usage.decoded
        self.prefilled += usage.prefilled
        if usage.cached is not None:
            self.cached = (self.cached or 0) + usage.cached
        lengths = np.array([_decoded(leaf) for leaf in tree.leaves], np.float64)
        self._lengths.append((len(lengths), _means(lengths, before, weights)))
        has_reward = np.array([leaf.reward is not None for leaf in tree.leaves])
        rewards = np.array([leaf.reward for leaf in tree.leaves if leaf.reward is not None], np.float64)
        # Without a leaf from before the fallback, which cannot be, or whose weight is 0, a mean has no estimate.
        if before[has_reward].sum() > 0:
            self._rewards.append((len(rewards), _means(rewards, before[has_reward], weights[has_reward])))
            self.is_pass_rate &= bool(np.isin(rewards, (0, 1)).all())

    def summary(self, *, num_before: int, num_removed: int, seconds: float) -> RolloutSummary:
        """Return the figures of all trees so far."""
        return RolloutSummary(
            num_queries=self.num_trees,
            num_before=num_before,
            num_removed=num_removed,
            num_rollouts=sum(count for count, _ in self._lengths),
            num_fallback=self.num_fallback,
            finished=dict(sorted(self.finished.items())),
            requests=self.requests,
            tokens_decoded=self.decoded,
            tokens_prefilled=self.prefilled,
            tokens_cached=self.cached,
            length=_mean_of(self._lengths),
            reward=_mean_of(self._rewards),
            is_pass_rate=self.is_pass_rate and bool(self._rewards),
            seconds=seconds,
        )


def _decoded(leaf: TreeNode) -> int:
    return sum(len(node.tokens) for node in leaf.path()[1:])


def _means(values: np.ndarray, before: np.ndarray, weights: np.ndarray) -> RolloutMeans:
    return RolloutMeans(
        before_fallback=float(values @ before / before.sum()),
        all_leaves=float(values @ weights / weights.sum()),
        unweighted=float(values.mean()),
    )


def _mean_of(means: list[tuple[int, RolloutMeans]]) -> RolloutMeans | None:
    """Return the mean of `means` of trees, each with the number of its leaves; None if they have no leaves."""
    total = sum(count for count, _ in means)
    if total == 0:
        return None
    names = ("before_fallback", "all_leaves", "unweighted")
    return RolloutMeans(**{name: sum(count * getattr(each, name) for count, each in means) / total for name in names})
