"""Loss weights and terms of rows.

    loss_weight[j] = sum over the trajectories of the row that train token j of factor * span weight

A term is one (trajectory, trained token) pair; rows have terms if any trajectory of the trie has a reward, an advantage
or log-probabilities. Temperatures alone make no terms: without one of these, no loss depends on them. Returns and
factors of edges exist only beside advantages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from treepack.columns import COLUMNS, MAKES_TERMS, Column
from treepack.errors import TreepackError
from treepack.pack.placement import PlacedNodes
from treepack.pack.row import RowTerms
from treepack.rl.group_tree import group_codes
from treepack.rl.rollout_parts import rollout_codes, rollout_numbers, rollout_parts, rollout_places
from treepack.sequences import SpanView, values_of
from treepack.trajectory import Float64, Int32, Int64, positions
from treepack.trie.nodes import paths
from treepack.trie.storage import ArrayStorage, PageReleaser
from treepack.trie.trie import Trie


@dataclass(frozen=True)
class WholeTrie:
    """Facts of a whole trie that the rows of one of its slices need.

    Attributes:
        columns: columns of the trajectories that have a value in any slice, and "weight" if a weight of any slice is
            not 1; they determine the columns of all rows.
        group_weights: for each trajectory of the slice, the sum of `trained_weights` over its whole group, float64
            [num_trajectories]; only for normalize "group".
        times_trained: how many trajectories of the whole trie train each token of the slice, int32 [N_tree of the
            slice]; only for semantics "once".
    """

    columns: frozenset[str]
    group_weights: Float64 | None = None
    times_trained: Int32 | None = None

    @property
    def has_terms(self) -> bool:
        """True if the rows have terms."""
        return not self.columns.isdisjoint(MAKES_TERMS)


def trajectory_factors(trie: Trie, *, normalize: str, group_weights: Float64 | None = None) -> Float64:
    """Return the factor of all loss weights of each trajectory, float64 [num_trajectories].

    Let w be the weight of a trajectory and s the sum of its span weights over its trained tokens. The factor is:

        token        w                            every trained token has equal weight
        trajectory   w / s                        every trajectory counts w, however long it is
        group        w / (sum of w s in group)    every (step, group) has equal weight

    `group_weights` are these sums for each trajectory if `trie` is a slice of the trie that contains the groups.

    Raises:
        TreepackError: weights that are so large or small that they overflow.
    """
    sums = _span_sums(trie)
    weight = trie.trajectories["weight"].to_numpy()
    if normalize == "token":
        factors = np.asarray(weight)
    elif normalize == "trajectory":
        factors = _ratio(weight, sums)
    elif group_weights is not None:
        factors = _ratio(weight, group_weights)
    else:
        group = group_codes(trie)
        factors = _ratio(weight, np.bincount(group, weights=weight * sums).astype(np.float64)[group])
    if not np.isfinite(factors * sums).all():
        name = trie.trajectories["trajectory_id"][int((~np.isfinite(factors * sums)).argmax())].as_py()
        raise TreepackError(f"trajectory {name}: its loss weights overflow; give weights nearer to 1")
    return factors


def has_weights(trajectories: pa.Table) -> bool:
    """Return True if the weight of any trajectory is not 1."""
    return bool((trajectories["weight"].to_numpy() != 1).any())


def trained_weights(trie: Trie) -> Float64:
    """Return w s of each trajectory, see `trajectory_factors`; float64 [num_trajectories]."""
    return np.asarray(trie.trajectories["weight"].to_numpy() * _span_sums(trie), np.float64)


def _span_sums(trie: Trie) -> Float64:
    spans = SpanView.of(trie.trajectories)
    return spans.total(spans.weights * spans.sizes)


def _ratio(a: Float64, b: Float64) -> Float64:
    with np.errstate(over="ignore"):
        return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def times_trained(trie: Trie) -> Int32:
    """Return how many trajectories of the whole trie train each of its tokens, int32 [N_tree]; mapped if it is large.

    Raises:
        TreepackError: the disk fails.
    """
    return stored_times_trained(trie)[0]


def stored_times_trained(trie: Trie) -> tuple[Int32, ArrayStorage]:
    """Return `times_trained`, and the storage with its map."""
    counts: Int32
    counts, storage = trie.storage.zeros(trie.tokens_tree, np.int32)
    spans = SpanView.of(trie.trajectories)
    releaser = PageReleaser(storage)
    for i, path in enumerate(paths(trie.end_node, trie.node_start, trie.depth)):
        starts, ends, _ = spans[i]
        counts[path[positions(starts, ends)]] += 1
        releaser.count(len(path))
    return counts, storage


class RowWeights:
    """Loss weights and terms of the rows of one trie; `storage` has the maps of the trie and of its counts."""

    def __init__(self, trie: Trie, *, normalize: str, semantics: str, whole: WholeTrie | None = None) -> None:
        self.trie = trie
        self.spans = SpanView.of(trie.trajectories)
        group_weights = None if whole is None else whole.group_weights
        self.factors = trajectory_factors(trie, normalize=normalize, group_weights=group_weights)
        self.counts: Int32 | None = None
        self.storage = trie.storage
        if semantics == "once" and whole is not None:
            self.counts = whole.times_trained
        elif semantics == "once":
            self.counts, self.storage = stored_times_trained(trie)
        table = trie.trajectories
        views = {column: values_of(table, column) for column in COLUMNS}
        self.values = {column: view for column, view in views.items() if not view.is_missing}
        rewards = trie.trajectories["reward"]
        known = rewards.null_count < trie.num_trajectories
        self.rewards = rewards.to_numpy() if known else None
        self.rollouts = rollout_codes(table)
        self.parts = None if self.rollouts is None else rollout_parts(table)
        ids = table["trajectory_id"]
        self.rollout_numbers = None if self.rollouts is None else rollout_numbers(table, ids.to_pylist())
        self.has_terms = known or any(column.makes_terms for column in self.values)
        weighted = has_weights(table)
        if whole is not None:
            self.has_terms, weighted = whole.has_terms, "weight" in whole.columns
        self.weights = np.asarray(table["weight"].to_numpy()) if weighted else None

    def of(self, nodes: PlacedNodes) -> tuple[Float64, RowTerms | None]:
        """Return `loss_weight`, float64 [num_tokens], and the terms of the row's trajectories."""
        loss_weight = np.zeros(len(nodes.source), np.float64)
        tokens: list[Int64] = []
        weights: list[Float64] = []
        for i, index, weight in self._pairs(nodes):
            if self.counts is not None:
                weight = weight / self.counts[nodes.source[index]]
            weight = weight * self.factors[i]
            loss_weight[index] += weight
            if self.has_terms:
                tokens.append(index)
                weights.append(weight)
        return loss_weight, self._terms(nodes.members, tokens, weights) if self.has_terms else None

    def _rollouts(self, members: Int64) -> Int32 | None:
        if self.rollouts is None or self.parts is None:
            return None
        return rollout_places(self.rollouts[members], self.parts[members])

    def _pairs(self, nodes: PlacedNodes) -> Iterator[tuple[int, Int64, Float64]]:
        """Yield each trajectory with the row indices and span weights of its trained tokens."""
        to_ends = paths(nodes.ends_at, nodes.begin, self.trie.depth[nodes.nodes])
        for i, path in zip(nodes.members.tolist(), to_ends, strict=True):
            starts, ends, weights = self.spans[i]
            yield i, path[positions(starts, ends)], np.repeat(weights, ends - starts)

    def _terms(self, members: Int64, tokens: list[Int64], weights: list[Float64]) -> RowTerms:
        sizes = [len(index) for index in tokens]

        def gather(column: Column) -> Any:
            views = self.values[column]
            return column.kind.join(
                [column.kind.filled(views[i], n) for i, n in zip(members.tolist(), sizes, strict=True)]
            )

        return RowTerms(
            token=np.concatenate(tokens).astype(np.int32),
            trajectory=np.repeat(np.arange(len(members), dtype=np.int32), sizes),
            weight=np.concatenate(weights),
            reward=None if self.rewards is None else self.rewards[members],
            rollout=self._rollouts(members),
            rollout_number=None if self.rollout_numbers is None else self.rollout_numbers[members],
            trajectory_weight=None if self.weights is None else self.weights[members],
            **{column.name: gather(column) for column in self.values},
        )
