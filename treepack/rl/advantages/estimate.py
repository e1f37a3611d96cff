"""Advantages of a trie's trajectories by the name of an estimator, as columns of a new trie.

    Trie, AdvantageOptions --estimate_advantages--> AdvantageEstimates(kept, advantages of trajectories or of tokens)
    Trie, AdvantageEstimates --with_advantages--> Trie     the same rollouts with the column filled in, ready for pack

A group that an estimator cannot use is rejected as a whole and counted under one reason: a reward is missing or not
finite, a single rollout has nothing to be compared with, or all rewards are equal and such groups are rejected. A group
is the rollouts of one `group_id` in one training step; a rollout of several trajectories counts once, and all of them
have its advantage. With `by` "agent", the part of a rollout that one agent made is compared with the parts of agents of
its name. A step is the batch of `reinforce++`, `std="batch"` and `whiten="batch"`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.columns import COMPUTED
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.rl.advantages.advantage_options import TREE, AdvantageOptions
from treepack.rl.advantages.edges import edge_factors
from treepack.rl.advantages.flat import dr_grpo, grpo, reinforce_pp, rloo
from treepack.rl.advantages.gae import gae, is_truncated, state_values, whiten
from treepack.rl.advantages.shaped_rewards import ShapedRewards, shape_rewards
from treepack.rl.advantages.tree import of_trajectories, tree_grpo, tree_grpo_segments, treepo, treerl, treerpo
from treepack.rl.group_tree import group_codes
from treepack.rl.leaf_weights import LeafWeights, required_leaf_weights
from treepack.rl.rollouts import TrieRollouts, by_agent, refuse_split, rollouts_of
from treepack.rl.segment_cuts import span_owners
from treepack.rl.segments import SegmentTree, segment_tree
from treepack.sequences import SpanView
from treepack.trajectory import Float64, Int32, Int64, positions
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.token_values import carried_values
from treepack.trie.trie import Trie, trajectories_of


@dataclass(frozen=True, slots=True)
class AdvantageEstimates:
    """Advantages of the trajectories `kept` (indices into the trie's, ascending), one per trajectory or one per token.

    Either `advantage` is float64 [num_kept], or `per_token` is float64 [trained tokens of all kept trajectories, in
    order]; the other is None. `rejected` counts the rejected groups by reason, `num_groups` the compared groups, and
    `num_rollouts` their rollouts. `tree` is None if the estimator needs no tree. `columns` are further ones of
    `columns.COMPUTED`, float64 like `per_token`. `num_truncated` counts the rollouts whose value after the end was
    used, and `num_overlong` the rollouts that lost reward because of their length. `notes` are sentences for the user.
    """

    kept: Int64
    advantage: Float64 | None
    per_token: Float64 | None
    rejected: Counter[str]
    num_groups: int
    tree: SegmentTree | None
    columns: Mapping[str, Float64] = field(default_factory=dict)
    num_truncated: int = 0
    num_overlong: int = 0
    num_rollouts: int = 0
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> Float64:
        """All advantages, of trajectories or of tokens."""
        values = self.advantage if self.per_token is None else self.per_token
        assert values is not None
        return values


def estimate_advantages(trie: Trie, options: AdvantageOptions) -> AdvantageEstimates:
    """Estimate the advantages of every trajectory of `trie` whose group can be used.

    Raises:
        TreepackError: no group can be used, rewards so large that they overflow, no leaf weights if the options need
            them, no values of a critic if gae needs them, a rollout of several trajectories if the options need a tree,
            or any error of `segment_tree` and `rollouts_of`.
    """
    trie = by_agent(trie) if options.by == "agent" else trie
    rollouts = rollouts_of(trie)
    reward = trie.trajectories["reward"].to_numpy().astype(np.float64)
    groups = group_codes(trie)
    usable, rejected = _usable_groups(reward[rollouts.first], groups[rollouts.first], options)
    kept = np.flatnonzero(usable[groups])
    shaped = shape_rewards(trie, rollouts, options)
    reward = shaped.reward
    if len(kept) == 0:
        reasons = "; ".join(f"{name}: {count} of {len(usable)} groups" for name, count in rejected.items())
        raise TreepackError(
            f"no group is left to compare ({reasons}); give the rollouts rewards, and put all rollouts of one task in "
            "one group"
        )
    largest = float(np.abs(reward[kept]).max())
    # Two rewards differ by at most 2 |R|, and a variance sums n squares of such differences.
    if not math.isfinite(4 * largest * largest * len(kept)):
        raise TreepackError(f"a reward of {largest:g} makes advantages overflow; give rewards nearer to 1")
    if options.estimator in TREE:
        refuse_split(trie, members=kept, what=f"{options.estimator} needs", remedy=_ONE_TRAJECTORY)
    weights = _weights(trie, groups, kept, options)
    # Number the groups, steps and rollouts that remain from 0 again: groups [0, 2, 2] -> [0, 1, 1].
    group = np.unique(groups[kept], return_inverse=True)[1].astype(np.int64)
    step = np.unique(trie.step_rank[kept], return_inverse=True)[1].astype(np.int64)
    # Compare one trajectory of each rollout: rollouts [0, 0, 1] -> once [0, 2], owner [0, 0, 1].
    once, owner = np.unique(rollouts.of_trajectory[kept], return_index=True, return_inverse=True)[1:]
    counted = AdvantageEstimates(kept, None, None, rejected, int(group.max()) + 1, None, num_rollouts=len(once))
    counted = replace(counted, num_overlong=shaped.num_overlong)
    reward = reward[kept]
    if options.estimator == "gae":
        scope = step if options.whiten == "batch" else group
        return _along_paths(trie, rollouts, replace(shaped, reward=reward), scope, counted, options)
    tree = None
    if options.estimator in TREE:
        tree = segment_tree(trie, kept, group, segment=options.segment, min_depth=options.min_depth)
        values = _tree_advantages(tree, reward, step, weights, options)
    else:
        values = _flat_advantages(reward[once], group[once], step[once], weights, options)[owner]
    if tree is None or not options.gives_segments:
        return replace(counted, advantage=values, tree=tree)
    # Segments listed 0 1 2 of a and 3 4 5 of b, trained tokens 2 3 4 of each, segments from 0, 2, 4 -> [1 1 2 4 4 5].
    owner, position = _trained_tokens(trie, kept)
    per_token = values[tree.segment_of(owner, position)]
    columns = {"edge_factors": edge_factors(tree, owner, position, _loss_weights(trie, kept))} if options.edges else {}
    return replace(counted, per_token=per_token, tree=tree, columns=columns)


_ONE_TRAJECTORY = (
    "take grpo, dr-grpo, rloo or reinforce++, or, for conversations, a template that keeps earlier turns "
    "(build-trie --chat-template)"
)


def _along_paths(
    trie: Trie,
    rollouts: TrieRollouts,
    shaped: ShapedRewards,
    scope: Int64,
    counted: AdvantageEstimates,
    options: AdvantageOptions,
) -> AdvantageEstimates:
    """Fill in `counted` by gae; `shaped` has the rewards of its trajectories, and `scope` is that of whitening."""
    kept, reward = counted.kept, shaped.reward
    owner, position = _trained_tokens(trie, kept)
    costs = np.zeros(len(owner))
    if shaped.costs is not None:
        # The costs belong to single tokens, so the reward at the end must not include them.
        every = _trained_tokens(trie, np.arange(trie.num_trajectories))[0]
        costs = shaped.costs[np.isin(every, kept)]
        rollout = rollouts.of_trajectory[kept]
        reward = reward + np.bincount(rollout[owner], costs, len(rollouts.first))[rollout]
    if options.values == "zero":
        value, last = np.zeros(len(owner)), np.zeros(len(kept))
    else:
        value, last = state_values(trie, owner, position, kept)
    found = is_truncated(trie, kept, options.truncated)
    notes = () if found is not None else (_no_truncated_field(options.truncated),)
    truncated = np.zeros(len(kept), np.bool_) if found is None else found
    # Rollouts one after the other, with their trajectories in order: of the trajectories x/1 y x/0, order [2, 0, 1] and
    # final [0, 1], the last trajectory of each rollout.
    rollout = rollouts.of_trajectory[kept]
    order = np.lexsort((rollouts.part[kept], rollout))
    final = order[np.append(rollout[order][1:] != rollout[order][:-1], True)]
    rank = np.empty(len(kept), np.int64)
    rank[order] = np.arange(len(kept))
    tokens = np.argsort(rank[owner], kind="stable")
    sizes = np.bincount(rollout[owner], minlength=len(rollouts.first))[rollout[final]]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    after = np.where(truncated, last, 0.0)[final]
    advantage = np.empty(len(value))
    advantage[tokens] = gae(
        value[tokens], after, reward[final], offsets, costs=costs[tokens], gamma=options.gamma, lam=options.lam
    )
    columns = {"returns": advantage + value}
    if options.values == "column":  # without a critic no old values exist to stay near to
        columns["old_values"] = value
    if not all(np.isfinite(column).all() for column in columns.values()):
        raise TreepackError("values of the critic are so large that the returns overflow; inspect the critic")
    if options.whiten != "none":
        advantage = whiten(advantage, scope[owner], epsilon=options.epsilon)
    num_truncated = int(truncated[final].sum())
    return replace(counted, per_token=advantage, columns=columns, num_truncated=num_truncated, notes=notes)


def _no_truncated_field(key: str) -> str:
    return (
        f"no rollout has the field {key}, so every rollout counts as ended; name the field of limits with --truncated "
        "FIELD, or give --truncated none"
    )


def _usable_groups(reward: Float64, groups: Int64, options: AdvantageOptions) -> tuple[NDArray[np.bool_], Counter[str]]:
    """Mark the groups that can be used, bool [num_groups], and count the others by their first reason.

    `reward` and `groups` belong to the rollouts.
    """
    faults = {"rewards missing": np.bincount(groups, weights=~np.isfinite(reward)) > 0}
    if options.estimator not in ("reinforce++", "gae"):
        faults["a single rollout"] = np.bincount(groups) == 1
    if options.rejects_equal:
        # Compare with any one reward of the group: exact, unlike a variance, which rounding keeps above 0.
        sample = np.zeros(int(groups.max()) + 1)
        sample[groups] = reward
        faults["rewards all equal"] = np.bincount(groups, weights=reward != sample[groups]) == 0
    usable, counts = np.ones(int(groups.max()) + 1, bool), Counter[str]()
    for reason, faulty in faults.items():
        if count := int((usable & faulty).sum()):
            counts[reason] = count
        usable &= ~faulty
    return usable, counts


def _weights(trie: Trie, groups: Int64, kept: Int64, options: AdvantageOptions) -> LeafWeights | None:
    """Return the leaf weights of the trajectories `kept`, 1 if all are equal; None if the options need none."""
    if not options.leaf_weights:
        return None
    refuse_split(trie, what="leaf weights need", remedy="leave out --leaf-weights")
    weights = required_leaf_weights(trie).times_size(groups)
    if options.fallback_leaves:
        weights = weights.with_fallback()
    return LeafWeights(weights.all[kept], weights.before_fallback[kept])


def _flat_advantages(
    reward: Float64, group: Int64, step: Int64, weights: LeafWeights | None, options: AdvantageOptions
) -> Float64:
    weight = None if weights is None else of_trajectories(weights, group)
    if options.estimator == "grpo":
        scope = step if options.std == "batch" else None
        return grpo(reward, group, scope=scope, weight=weight, epsilon=options.epsilon)
    if options.estimator == "reinforce++":
        return reinforce_pp(reward, step, weight=weight, epsilon=options.epsilon)
    return {"dr-grpo": dr_grpo, "rloo": rloo}[options.estimator](reward, group, weight=weight)


def _tree_advantages(
    tree: SegmentTree, reward: Float64, step: Int64, weights: LeafWeights | None, options: AdvantageOptions
) -> Float64:
    """One advantage per listed segment if `options.gives_segments`, else one per trajectory."""
    if options.estimator == "treerpo":
        return treerpo(tree, reward, weights=weights, epsilon=options.epsilon)
    if options.estimator == "treerl":
        return treerl(tree, reward, weights=weights, leaf_scaled=options.leaf_scaled)
    if options.estimator == "tree-grpo":
        function = tree_grpo_segments if options.per_segment else tree_grpo
        return function(tree, reward, weights=weights, epsilon=options.epsilon)
    scope = None
    if options.std == "batch":
        scope = np.zeros(tree.num_groups, np.int64)
        scope[tree.groups] = step
    return treepo(
        tree,
        reward,
        weights=weights,
        scope=scope,
        size_weighted=options.size_weighted,
        reject_subgroups=options.reject_subgroups,
        without_root=options.without_root,
        epsilon=options.epsilon,
    )


def _trained_tokens(trie: Trie, kept: Int64) -> tuple[Int64, Int64]:
    """Return index into `kept` and position of every trained token, in order."""
    # kept [0, 2] with the spans [2, 5) and [2, 4) -> owner [0 0 0 1 1], position [2 3 4 2 3]
    spans = SpanView.of(trie.trajectories)
    owner = span_owners(trie, spans, kept)
    is_kept = owner >= 0
    return np.repeat(owner[is_kept], spans.sizes[is_kept]), positions(spans.starts[is_kept], spans.ends[is_kept])


def _loss_weights(trie: Trie, kept: Int64) -> Float64:
    """Return weight of the trajectory times weight of the span of every trained token, in the same order."""
    spans = SpanView.of(trie.trajectories)
    owner = span_owners(trie, spans, kept)
    is_kept = owner >= 0
    weight = trie.trajectories["weight"].to_numpy()[kept[owner[is_kept]]] * spans.weights[is_kept]
    return np.repeat(weight, spans.sizes[is_kept])


def with_advantages(trie: Trie, estimates: AdvantageEstimates, *, rejected: str = "drop") -> Trie:
    """Replace the columns advantage, advantages and `columns.COMPUTED` of `trie`; `rejected` as in `AdvantageOptions`.

    Columns of an earlier estimator are removed, because returns and factors belong to their advantages. If trajectories
    are dropped, the trie is built again in O(N_flat). Otherwise no token is touched.

    Raises:
        TreepackError: more trained tokens than one list column can have.
    """
    count, kept = trie.num_trajectories, estimates.kept
    known = np.zeros(count, bool)
    known[kept] = True
    scalar, lists = np.zeros(count), pa.nulls(count, pa.list_(pa.float64()))
    no_scalar = np.zeros(count, bool)
    further: dict[str, pa.Array] = {}
    if estimates.per_token is None:
        scalar[kept] = estimates.values
    else:
        # Rejected trajectories keep the scalar 0; the others have a list instead.
        no_scalar = known
        sizes = np.zeros(count, np.int64)
        sizes[kept] = np.bincount(_trained_tokens(trie, kept)[0], minlength=len(kept))
        offsets, missing = _list_offsets(sizes), pa.array(~known)
        lists = pa.ListArray.from_arrays(offsets, estimates.per_token, mask=missing)
        further = {
            name: pa.ListArray.from_arrays(offsets, values, mask=missing) for name, values in estimates.columns.items()
        }
    columns = {name: trie.trajectories[name] for name in trie.trajectories.column_names if name not in _COMPUTED}
    columns |= {"advantage": pa.array(scalar, mask=no_scalar), "advantages": lists, **further}
    fields = schema.trajectory_columns(columns)
    filled = replace(trie, trajectories=pa.Table.from_arrays([columns[name] for name in fields.names], schema=fields))
    if rejected == "zero" or known.all():
        return filled
    rollouts = zip(known.tolist(), trajectories_of(filled), strict=True)
    fewer = build_trie((rollout for is_known, rollout in rollouts if is_known), share=trie.share)
    return replace(fewer, token_values=carried_values(filled, fewer))


_COMPUTED = frozenset(column.stored for column in COMPUTED)


def _list_offsets(sizes: Int64) -> Int32:
    """Return the Arrow offsets of lists of these sizes: [2, 0, 3] -> [0, 2, 2, 5]."""
    total = int(sizes.sum())
    # Arrow's list offsets are int32.
    if total > np.iinfo(np.int32).max:
        raise TreepackError(f"{total:,} trained tokens are too many for one trie directory; write several")
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
