"""Options of advantages: an estimator and its variants.

This file imports no numerical library, so that the command line can take its options from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from treepack.errors import TreepackError
from treepack.option_fields import check_options, option, read_counts

# Names of the command line: estimators of groups (flat.py), of the tree (tree.py) and of a critic's values (gae.py).
FLAT = ("grpo", "dr-grpo", "rloo", "reinforce++")
TREE = ("treepo", "treerpo", "tree-grpo", "treerl")
ESTIMATORS = (*FLAT, *TREE, "gae")

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
    "by": FLAT,
    "values": ("gae",),
    "gamma": ("gae",),
    "lam": ("gae",),
    "whiten": ("gae",),
    "truncated": ("gae",),
}


# Added to deviations, as verl does: it limits the quotient if a deviation is tiny and is invisible if it is about 1.
EPSILON = 1e-6
GAMMA, LAMBDA = 1.0, 0.95
TRUNCATED_KEY = "finish"  # the field that `treepack rollout` writes


@dataclass(frozen=True)
class AdvantageOptions:
    """An estimator and its variants. Options that the estimator does not have are refused."""

    estimator: str  # one of `ESTIMATORS`
    by: str = option(
        "rollout",
        "grpo, dr-grpo, rloo, reinforce++: compare whole rollouts, or the parts of rollouts whose agents have the same "
        "name.",
        choices=("rollout", "agent"),
    )
    segment: str = option(
        "auto",
        "Where the nodes of the tree start. recorded: token offsets in the metadata; turn: runs of trained tokens; "
        "node: branches of the trie; N: every N tokens; auto: recorded if there are offsets, else node. Within the "
        "prompt of a continuation, turn and N cut as in the rollout that it continues.",
    )
    min_depth: int = option(0, "Number of tokens after the root in which no segment starts.")
    std: str = option(
        "group",
        "grpo, treepo: standard deviation over the group, or over all groups of the training step.",
        choices=("group", "batch"),
    )
    size_weighted: bool = option(False, "treepo: weight subgroups by their size (equation 6).")
    reject_subgroups: bool = option(False, "treepo: omit subgroups of equal rewards (equation 7).")
    without_root: bool = option(False, "treepo: omit the group itself.")
    per_segment: bool = option(False, "tree-grpo: compare each segment with its siblings.")
    leaf_scaled: bool = option(False, "treerl: divide by the square root of a segment's number of trajectories.")
    edges: bool = option(
        False,
        "treerpo, treerl, tree-grpo --per-segment: also write the factors that train --denominator edge needs.",
    )
    # "zero" takes every value as 0.
    values: str = option(
        "column",
        "gae: values of treepack critic, or 0 everywhere, for the returns that a first critic is trained with.",
        choices=("column", "zero"),
    )
    gamma: float = option(GAMMA, "gae: discount per trained token.")
    lam: float = option(LAMBDA, "gae: share of later differences; 1 gives the discounted reward minus the value.")
    whiten: str = option(
        "none",
        "gae: standardise the advantages, not the returns, over the group or the training step.",
        choices=("none", "group", "batch"),
    )
    # The `key` of `gae.is_truncated`.
    truncated: str = option(
        TRUNCATED_KEY,
        "gae: field of a record or its metadata that is true, or the name of a limit such as length, if a limit cut "
        "off the rollout; the value after its last token is then added.",
    )
    kl_in_reward: float = option(
        0.0,
        "Subtract this times the KL divergence from the reference, whose log-probabilities the rollouts have, from the "
        "reward of a rollout, or with gae from that of each token.",
        minimum=0,
    )
    kl_estimator: str = option("k1", "Estimator of --kl-in-reward.", choices=("k1", "k2", "k3"))
    overlong: tuple[int, int] | None = option(
        None,
        "Subtract from the reward of a rollout with more than LENGTH - BUFFER tokens from its first trained one on: 1 "
        "from LENGTH tokens on, and less within the buffer (DAPO).",
    )
    # None follows the papers: treepo rejects (equation 5).
    reject_equal: bool | None = option(
        None,
        "Reject or keep groups whose rewards are all equal; default: treepo rejects them, the others give them 0.",
    )
    rejected: str = option(
        "drop",
        "Drop the trajectories of rejected groups, or keep them with an advantage of 0.",
        choices=("drop", "zero"),
    )
    # The recorded leaf weights before the first fallback; the published estimators do not use them.
    leaf_weights: bool = option(
        False, "Weigh means and deviations by the leaf weights of sampled trees, which removes their bias."
    )
    # With the weights of all leaves, which leaves a part of the bias.
    fallback_leaves: bool = option(False, "With --leaf-weights: count the leaves that a fallback added, too.")
    epsilon: float = option(EPSILON, "Added to standard deviations.")

    def __post_init__(self) -> None:
        """Check every value and name the option that is wrong."""
        if self.estimator not in ESTIMATORS:
            raise TreepackError(f"estimator is {self.estimator!r}; expected one of {', '.join(ESTIMATORS)}")
        check_options(self)
        for name, estimators in _ESTIMATORS_OF_OPTION.items():
            if self.estimator not in estimators and getattr(self, name) != getattr(type(self), name):
                raise TreepackError(f"{name} is an option of {', '.join(estimators)}; {self.estimator} has none")
        if self.overlong is not None:
            read_counts(self, "overlong")
            if len(self.overlong) != 2 or not 1 <= self.overlong[1] <= self.overlong[0]:
                shown = ",".join(map(str, self.overlong))
                raise TreepackError(f"overlong is {shown}; expected LENGTH,BUFFER with 1 <= BUFFER <= LENGTH")
        if self.kl_estimator != "k1" and not self.kl_in_reward:
            raise TreepackError("kl_estimator belongs to kl_in_reward; give that too, or neither")
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
