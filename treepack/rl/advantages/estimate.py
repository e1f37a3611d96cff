"""Advantages by an estimator's name, for the trajectories of a trie, as columns of a new one.

    Trie, AdvantageOptions --estimate_advantages--> Estimates(kept, advantage of each trajectory or each trained token)
    Trie, Estimates --with_advantages--> Trie      the same rollouts with the column filled in, ready for pack and train

Groups that an estimator cannot use are left out whole, each for a reason that is counted: a reward that is missing or
not finite, a single trajectory where trajectories are compared, equal rewards where those are to be rejected. A group
is the trajectories of one `group_id` in one training step; a step is the batch of `reinforce++` and `std="batch"`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.columns import SpanView
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.rl.advantages.flat import EPSILON, dr_grpo, grpo, reinforce_pp, rloo
from treepack.rl.advantages.tree import tree_grpo, tree_grpo_segments, treepo, treerl, treerpo
from treepack.rl.segments import SegmentTree, segment_tree
from treepack.trajectory import Float64, Int32, Int64, positions
from treepack.trie.build import build_trie
from treepack.trie.trie import Trie, trajectories_of

FLAT = ("grpo", "dr-grpo", "rloo", "reinforce++")
TREE = ("treepo", "treerpo", "tree-grpo", "treerl")
ESTIMATORS = (*FLAT, *TREE)
REJECTED = ("drop", "zero")

# Options that only some estimators have.
_OWN = {
    "std": ("grpo", "treepo"),
    "size_weighted": ("treepo",),
    "reject_subgroups": ("treepo",),
    "without_root": ("treepo",),
    "per_segment": ("tree-grpo",),
    "leaf_scaled": ("treerl",),
    "segment": TREE,
    "min_depth": TREE,
}


@dataclass(frozen=True)
class AdvantageOptions:
    """An estimator and its variants.

    `segment` and `min_depth` say what the tree's nodes are, see `segments.segment_tree`. `std` "batch" takes the
    standard deviation over the training step instead of the group. `per_segment` is `tree_grpo_segments`; the others
    are arguments of the estimators. `reject_equal` leaves out groups whose rewards are all equal; None is as the paper
    has it, so treepo does (equation 5) and the others give them 0. `rejected` "drop" leaves the trajectories of groups
    that cannot be used out of the trie, "zero" keeps them with an advantage of 0.
    """

    estimator: str
    segment: str = "auto"
    min_depth: int = 0
    std: str = "group"
    size_weighted: bool = False
    reject_subgroups: bool = False
    without_root: bool = False
    per_segment: bool = False
    leaf_scaled: bool = False
    reject_equal: bool | None = None
    rejected: str = "drop"
    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        for name, known in (("estimator", ESTIMATORS), ("std", ("group", "batch")), ("rejected", REJECTED)):
            if getattr(self, name) not in known:
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        for name, estimators in _OWN.items():
            if self.estimator not in estimators and getattr(self, name) != getattr(type(self), name):
                raise TreepackError(f"{name} is an option of {', '.join(estimators)}; {self.estimator} has none")
        if self.min_depth < 0:
            raise TreepackError(f"min_depth is {self.min_depth}; expected 0 or a number of tokens")
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise TreepackError(f"epsilon is {self.epsilon}; expected 0 or a small positive number")

    @property
    def gives_segments(self) -> bool:
        """Whether advantages belong to segments, and so to tokens, rather than to whole trajectories."""
        return self.estimator in ("treerpo", "treerl") or self.per_segment

    @property
    def rejects_equal(self) -> bool:
        return self.estimator == "treepo" if self.reject_equal is None else self.reject_equal


@dataclass(frozen=True, slots=True)
class Estimates:
    """Advantages of the trajectories `kept` (indices into the trie's, ascending), one number each or one per token.

    `advantage` is float64 [num_kept], or None if `per_token` holds them: float64, the trained tokens of all kept
    trajectories one after the other, in order. `rejected` counts the groups left out by reason, `num_groups` those
    compared; `tree` is None where the estimator needs none.
    """

    kept: Int64
    advantage: Float64 | None
    per_token: Float64 | None
    rejected: Counter[str]
    num_groups: int
    tree: SegmentTree | None

    @property
    def values(self) -> Float64:
        """All advantages, whichever they belong to."""
        found = self.advantage if self.per_token is None else self.per_token
        assert found is not None
        return found


def group_codes(trie: Trie) -> Int64:
    """Code of each trajectory's group, its `group_id` in its training step, from 0; int64 [num_trajectories]."""
    names = trie.trajectories["group_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    keys = trie.step_rank * (int(names.max(initial=0)) + 1) + names
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)


def estimate_advantages(trie: Trie, options: AdvantageOptions) -> Estimates:
    """Advantages of every trajectory of `trie` whose group can be used.

    Raises:
        TreepackError: no group can be used, rewards so large that they overflow, or what `segment_tree` refuses.
    """
    reward = trie.trajectories["reward"].to_numpy().astype(np.float64)
    groups = group_codes(trie)
    usable, rejected = _usable(reward, groups, options)
    kept = np.flatnonzero(usable[groups])
    if len(kept) == 0:
        reasons = "; ".join(f"{name}: {count}" for name, count in rejected.items())
        raise TreepackError(
            f"no group is left to compare ({reasons}); give the rollouts rewards, and those of one task one group"
        )
    largest = float(np.abs(reward[kept]).max())
    if not math.isfinite(4 * largest * largest * len(kept)):
        raise TreepackError(f"a reward of {largest:g} makes advantages overflow; give rewards nearer to 1")
    reward, group = reward[kept], np.unique(groups[kept], return_inverse=True)[1].astype(np.int64)
    step = np.unique(trie.step_rank[kept], return_inverse=True)[1].astype(np.int64)
    tree = None
    if options.estimator in TREE:
        tree = segment_tree(trie, kept, group, segment=options.segment, min_depth=options.min_depth)
    values = _flat(reward, group, step, options) if tree is None else _from_tree(tree, reward, step, options)
    per_token = _of_tokens(trie, kept, tree, values) if tree is not None and options.gives_segments else None
    return Estimates(
        kept=kept,
        advantage=values if per_token is None else None,
        per_token=per_token,
        rejected=rejected,
        num_groups=int(group.max()) + 1,
        tree=tree,
    )


def _usable(reward: Float64, groups: Int64, options: AdvantageOptions) -> tuple[NDArray[np.bool_], Counter[str]]:
    """Whether each group can be used, and how many cannot for which reason, each counted once."""
    faults = {"rewards missing": np.bincount(groups, weights=~np.isfinite(reward)) > 0}
    if options.estimator != "reinforce++":
        faults["a single trajectory"] = np.bincount(groups) == 1
    if options.rejects_equal:
        some = np.zeros(int(groups.max()) + 1)
        some[groups] = reward
        faults["rewards all equal"] = np.bincount(groups, weights=reward != some[groups]) == 0
    usable, counts = np.ones(int(groups.max()) + 1, bool), Counter[str]()
    for reason, faulty in faults.items():
        if found := int((usable & faulty).sum()):
            counts[reason] = found
        usable &= ~faulty
    return usable, counts


def _flat(reward: Float64, group: Int64, step: Int64, options: AdvantageOptions) -> Float64:
    if options.estimator == "grpo":
        return grpo(reward, group, scope=step if options.std == "batch" else None, epsilon=options.epsilon)
    if options.estimator == "reinforce++":
        return reinforce_pp(reward, step, epsilon=options.epsilon)
    return {"dr-grpo": dr_grpo, "rloo": rloo}[options.estimator](reward, group)


def _from_tree(tree: SegmentTree, reward: Float64, step: Int64, options: AdvantageOptions) -> Float64:
    """One advantage per listed segment if `options.gives_segments`, else one per trajectory."""
    if options.estimator == "treerpo":
        return treerpo(tree, reward, epsilon=options.epsilon)
    if options.estimator == "treerl":
        return treerl(tree, reward, leaf_scaled=options.leaf_scaled)
    if options.estimator == "tree-grpo":
        return (tree_grpo_segments if options.per_segment else tree_grpo)(tree, reward, epsilon=options.epsilon)
    scope = None
    if options.std == "batch":
        scope = np.zeros(tree.num_groups, np.int64)
        scope[tree.groups] = step
    return treepo(
        tree,
        reward,
        scope=scope,
        size_weighted=options.size_weighted,
        reject_subgroups=options.reject_subgroups,
        without_root=options.without_root,
        epsilon=options.epsilon,
    )


def _of_tokens(trie: Trie, kept: Int64, tree: SegmentTree, of_segment: Float64) -> Float64:
    """The advantage of its segment for every trained token of the trajectories `kept`."""
    owner, at = _trained(trie, kept)
    return of_segment[tree.segment_of(owner, at)]


def _trained(trie: Trie, kept: Int64) -> tuple[Int64, Int64]:
    """Index into `kept` and position of every trained token, in order."""
    spans = SpanView.of(trie.trajectories)
    index = np.full(trie.num_trajectories, -1)
    index[kept] = np.arange(len(kept))
    owner = np.repeat(index, np.diff(spans.offsets))
    mine = owner >= 0
    sizes = spans.sizes[mine]
    if len(sizes) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.repeat(owner[mine], sizes), positions(spans.starts[mine], spans.ends[mine])


def with_advantages(trie: Trie, estimates: Estimates, *, rejected: str = "drop") -> Trie:
    """`trie` with the columns advantage and advantages replaced; `rejected` as in `AdvantageOptions`.

    O(N_flat) where trajectories are dropped, for the trie is then built again; else no token is touched.
    """
    count, kept = trie.num_trajectories, estimates.kept
    known = np.zeros(count, bool)
    known[kept] = True
    scalar, lists = np.zeros(count), pa.nulls(count, pa.list_(pa.float64()))
    none = np.zeros(count, bool)
    if estimates.per_token is None:
        scalar[kept] = estimates.values
    else:
        none = known
        sizes = np.zeros(count, np.int64)
        sizes[kept] = np.bincount(_trained(trie, kept)[0], minlength=len(kept))
        lists = pa.ListArray.from_arrays(_offsets(sizes), estimates.per_token, mask=pa.array(~known))
    table: pa.Table = trie.trajectories
    for name, column in (("advantage", pa.array(scalar, mask=none)), ("advantages", lists)):
        field = schema.TRAJECTORIES.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, column)
    filled = replace(trie, trajectories=table)
    if rejected == "zero" or known.all():
        return filled
    rollouts = zip(known.tolist(), trajectories_of(filled), strict=True)
    return build_trie((rollout for wanted, rollout in rollouts if wanted), share=trie.share)


def _offsets(sizes: Int64) -> Int32:
    total = int(sizes.sum())
    if total > np.iinfo(np.int32).max:
        raise TreepackError(f"{total:,} trained tokens are too many for one trie directory; write several")
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
