"""The options of an advantage estimator: its name, its variants, and which option belongs to which estimator."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treepack.errors import TreepackError
from treepack.rl.advantages.flat import EPSILON
from treepack.rl.advantages.gae import GAMMA, LAMBDA, TRUNCATED_KEY, VALUES_CHOICES, WHITEN_CHOICES

# Names of the command line: estimators of groups (flat.py), of the tree (tree.py) and of a critic's values (gae.py).
FLAT = ("grpo", "dr-grpo", "rloo", "reinforce++")
TREE = ("treepo", "treerpo", "tree-grpo", "treerl")
ESTIMATORS = (*FLAT, *TREE, "gae")
REJECTED_CHOICES = ("drop", "zero")

# Options that only some estimators have. They are refused for the others, because they would have no effect.
_ESTIMATORS_OF_OPTION = {
    "std": ("grpo", "treepo"),
    "size_weighted": ("treepo",),
    "reject_subgroups": ("treepo",),
    "without_root": ("treepo",),
    "per_segment": ("tree-grpo",),
    "leaf_scaled": ("treerl",),
    "segment": TREE,
    "min_depth": TREE,
    "edges": ("treerpo", "tree-grpo", "treerl"),
    "leaf_weights": (*FLAT, *TREE),
    "values": ("gae",),
    "gamma": ("gae",),
    "lam": ("gae",),
    "whiten": ("gae",),
    "truncated": ("gae",),
}


@dataclass(frozen=True)
class AdvantageOptions:
    """An estimator and its variants; docs/tree-rl.md describes them.

    Raises:
        TreepackError: an unknown or impossible value, or an option that the estimator does not have.
    """

    estimator: str
    # Which nodes of the tree are segments, and the depth in tokens from which on there are segments; see
    # `segments.segment_tree`.
    segment: str = "auto"
    min_depth: int = 0
    # "group" takes the standard deviation over the group, "batch" over the training step.
    std: str = "group"
    # Arguments of `treepo` with these names.
    size_weighted: bool = False
    reject_subgroups: bool = False
    without_root: bool = False
    # Take `tree_grpo_segments`, which gives each segment an advantage, in place of `tree_grpo`.
    per_segment: bool = False
    # The argument of `treerl` with this name.
    leaf_scaled: bool = False
    # Reject groups whose rewards are all equal. None follows the papers: treepo rejects them (equation 5), the others
    # give them 0.
    reject_equal: bool | None = None
    # "drop" removes the trajectories of rejected groups from the trie, "zero" keeps them with an advantage of 0.
    rejected: str = "drop"
    # Added to standard deviations before dividing by them.
    epsilon: float = EPSILON
    # Weigh means and deviations over the trajectories of a sampled tree by their recorded leaf weights, which are those
    # before the first fallback. The published estimators do not.
    leaf_weights: bool = False
    # Take the weights of all leaves instead, so that the leaves of a fallback count too; a part of the bias remains.
    fallback_leaves: bool = False
    # Also write the factors of the tree's edges, which the denominator edge of the losses needs; `edges.edge_factors`.
    edges: bool = False
    # Values of the critic: "column" reads them, and "zero" takes 0 everywhere: the returns of a first critic.
    values: str = "column"
    # Discount and lambda of `gae`.
    gamma: float = GAMMA
    lam: float = LAMBDA
    # Whiten the advantages of gae, but not the returns, over the "group" or the training step ("batch").
    whiten: str = "none"
    # The `key` of `gae.is_truncated`.
    truncated: str = TRUNCATED_KEY

    def __post_init__(self) -> None:
        """Check every value and name the option that is wrong."""
        choices = {"estimator": ESTIMATORS, "std": ("group", "batch"), "rejected": REJECTED_CHOICES}
        for name, known in (choices | {"whiten": WHITEN_CHOICES, "values": VALUES_CHOICES}).items():
            if getattr(self, name) not in known:
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        for name, estimators in _ESTIMATORS_OF_OPTION.items():
            if self.estimator not in estimators and getattr(self, name) != getattr(type(self), name):
                raise TreepackError(f"{name} is an option of {', '.join(estimators)}; {self.estimator} has none")
        if self.fallback_leaves and not self.leaf_weights:
            raise TreepackError("fallback_leaves selects among leaf weights; give --leaf-weights too, or neither")
        if self.edges and not self.gives_segments:
            raise TreepackError("edges needs an advantage per segment; give --per-segment too, or omit --edges")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise TreepackError(f"{name} is {getattr(self, name)}; expected a number from 0 to 1")
        if self.min_depth < 0:
            raise TreepackError(f"min_depth is {self.min_depth}; expected 0 or a number of tokens")
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise TreepackError(f"epsilon is {self.epsilon}; expected 0 or a small positive number")

    @property
    def gives_segments(self) -> bool:
        """True if advantages belong to segments, and so to tokens, instead of whole trajectories."""
        return self.estimator in ("treerpo", "treerl") or self.per_segment

    @property
    def rejects_equal(self) -> bool:
        return self.estimator == "treepo" if self.reject_equal is None else self.reject_equal
