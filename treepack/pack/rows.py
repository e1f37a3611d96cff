"""A plan becomes rows: every per-token column of the packed format, and the loss weights.

    Trie, Plan --pack_rows--> Row, Row, ...

A row lists its nodes depth-first, with the children of each in the order of `layout.py`. Then every column but the
loss weights is a formula over the row's nodes, spread over their tokens; the loss weights are added up trajectory by
trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.columns import SpanView, list_values
from treepack.errors import TreepackError
from treepack.pack.child_order import arrange, node_tiles, tile_counts
from treepack.pack.plan.planning import Plan
from treepack.trajectory import Float32, Float64, Int32, Int64, Tokens, Trajectory, positions
from treepack.trie.build import Trie, build_trie, paths, trajectories_of

SEMANTICS = ("branch", "once")
NORMALIZE = ("token", "trajectory", "group")
TOO_LONG = ("error", "drop", "truncate")
LOGPROBS = ("sampling_logprobs", "old_logprobs", "ref_logprobs")


@dataclass(frozen=True, slots=True)
class Terms:
    """(trajectory, trained token) pairs of a row; one entry per pair in every array, or None where nothing is known.

    `trajectory_rewards` has one entry per trajectory. NaN stands for the missing values of single trajectories.
    """

    token: Int32
    trajectory: Int32
    weight: Float64
    advantage: Float64 | None
    sampling_logprob: Float32 | None
    old_logprob: Float32 | None
    ref_logprob: Float32 | None
    entropy: Float32 | None
    trajectory_rewards: Float64 | None


@dataclass(frozen=True, slots=True)
class Row:
    """One training row; the fields are the columns of `schema.ROWS`, per-token ones of length `num_tokens`."""

    row_id: int
    step: int | None
    input_ids: Int32
    position_ids: Int32
    parent: Int32
    subtree_end: Int32
    scale: Int32
    loss_weight: Float64
    trajectory_ids: list[str]
    trajectory_groups: list[str]
    trajectory_ends: Int32
    terms: Terms | None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_pairs(self) -> int:
        return int(self.position_ids.sum(dtype=np.int64)) + self.num_tokens

    @property
    def total_weight(self) -> float:
        return float(self.loss_weight.sum())

    @property
    def tiles(self) -> tuple[int, int]:
        """Partial and full tiles of its attention mask; see `layout.py`."""
        return tile_counts(self.subtree_end)


def row_counts(row: Row) -> dict[str, int]:
    """What a row adds to the counts of its directory."""
    tiles_partial, tiles_full = row.tiles
    return {
        "num_rows": 1,
        "num_trajectories": len(row.trajectory_ids),
        "num_pairs": row.num_pairs,
        "tokens_packed": row.num_tokens,
        "tokens_flat": int(row.scale.sum(dtype=np.int64)),
        "tiles_partial": tiles_partial,
        "tiles_full": tiles_full,
    }


def row_totals(counted: Counter[str], *, capacity: int) -> dict[str, float]:
    """Summed `row_counts` with the ratios that follow: token_ratio N_pack / N_flat, err = 1 - token_ratio, fill."""
    ratio = counted["tokens_packed"] / counted["tokens_flat"]
    fill = counted["tokens_packed"] / (counted["num_rows"] * capacity)
    return {**counted, "token_ratio": ratio, "err": 1 - ratio, "fill": fill}


def fit_capacity(trie: Trie, capacity: int, *, too_long: str) -> tuple[Trie, Counter[str]]:
    """Drop or truncate trajectories longer than `capacity`; what happened is counted.

    Truncation keeps the first `capacity` tokens; a trajectory that has no trained token left is dropped.

    Raises:
        TreepackError: nothing is left, or an unknown choice.
    """
    if too_long not in TOO_LONG:
        raise TreepackError(f"too_long is {too_long!r}; expected one of {', '.join(TOO_LONG)}")
    counts: Counter[str] = Counter()
    if too_long == "error" or not (trie.lengths > capacity).any():
        return trie, counts
    kept = []
    for trajectory, length in zip(trajectories_of(trie), trie.lengths.tolist(), strict=True):
        if length <= capacity:
            kept.append(trajectory)
        elif too_long == "drop":
            counts["dropped: longer than the capacity"] += 1
        elif (shorter := _truncated(trajectory, capacity)) is None:
            counts["dropped: no trained token within the capacity"] += 1
        else:
            kept.append(shorter)
            counts["truncated to the capacity"] += 1
            counts["tokens cut off"] += length - capacity
    if not kept:
        raise TreepackError(f"no trajectory fits the capacity of {capacity}; raise the capacity")
    return build_trie(kept, share=trie.share), counts


def _truncated(trajectory: Trajectory, capacity: int) -> Trajectory | None:
    content = trajectory.content
    assert isinstance(content, Tokens)
    kept = content.starts < capacity
    if not kept.any():
        return None
    num_trained = int((positions(content.starts, content.ends) < capacity).sum())
    per_token = {name: getattr(content, name) for name in ("advantages", *LOGPROBS)}
    cut = {name: None if values is None else values[:num_trained] for name, values in per_token.items()}
    shorter = Tokens(
        content.tokens[:capacity],
        content.starts[kept],
        np.minimum(content.ends[kept], capacity).astype(np.int32),
        content.span_weights[kept],
        **cut,
    )
    return replace(trajectory, content=shorter)


def trajectory_factors(trie: Trie, *, normalize: str) -> Float64:
    """Factor of all loss weights of each trajectory, float64 [num_trajectories].

    With w the trajectory's own weight and s the sum of its span weights over its trained tokens:

        token        w                            every trained token counts alike
        trajectory   w / s                        every trajectory counts alike
        group        w / (sum of w s in group)    every (step, group) counts alike

    Raises:
        TreepackError: weights so large or small that they overflow.
    """
    spans = SpanView.of(trie.trajectories)
    sums = spans.total(spans.weights * spans.sizes)
    weight = trie.trajectories["weight"].to_numpy()
    if normalize == "token":
        factors = np.asarray(weight)
    elif normalize == "trajectory":
        factors = _ratio(weight, sums)
    else:
        keys = list(zip(trie.step_rank.tolist(), trie.trajectories["group_id"].to_pylist(), strict=True))
        index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        group = np.array([index[key] for key in keys])
        factors = _ratio(weight, np.bincount(group, weights=weight * sums)[group])
    if not np.isfinite(factors * sums).all():
        name = trie.trajectories["trajectory_id"][int((~np.isfinite(factors * sums)).argmax())].as_py()
        raise TreepackError(f"trajectory {name}: its loss weights overflow; give weights nearer to 1")
    return factors


def _ratio(a: Float64, b: Float64) -> Float64:
    with np.errstate(over="ignore"):
        return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def times_trained(trie: Trie) -> Int32:
    """How many trajectories of the whole trie train each of its tokens, int32 [N_tree]."""
    counts = np.zeros(trie.tokens_tree, np.int32)
    spans = SpanView.of(trie.trajectories)
    for i, path in enumerate(paths(trie.end_node, trie.node_start, trie.depth)):
        starts, ends, _ = spans[i]
        counts[path[positions(starts, ends)]] += 1
    return counts


def pack_rows(trie: Trie, plan: Plan, *, semantics: str = "branch", normalize: str = "token") -> Iterator[Row]:
    """Yield the rows of `plan` in order.

    `semantics` "branch" lets every trajectory that trains a token count there; "once" divides each one's weight by
    the number of trajectories of the whole trie that train it, so a shared token counts once. `normalize` is
    described at `trajectory_factors`. The loss of a set of rows is their weighted sum over their total weight.

    Raises:
        TreepackError: an unknown option.
    """
    for name, value, known in (("semantics", semantics, SEMANTICS), ("normalize", normalize, NORMALIZE)):
        if value not in known:
            raise TreepackError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    layout = _Layout(trie)
    weights = _Weights(trie, normalize=normalize, semantics=semantics)
    steps = trie.trajectories["step"].to_pylist()
    ids = trie.trajectories["trajectory_id"].to_pylist()
    groups = trie.trajectories["group_id"].to_pylist()
    for row_id, members in enumerate(plan.members()):
        placed = layout.placed(members)
        columns = layout.columns(placed)
        loss_weight, terms = weights.of(placed)
        yield Row(
            row_id=row_id,
            step=steps[members[0]],
            loss_weight=loss_weight,
            terms=terms,
            trajectory_ids=[ids[i] for i in placed.members.tolist()],
            trajectory_groups=[groups[i] for i in placed.members.tolist()],
            **columns,
        )


def unordered_tiles(trie: Trie, plan: Plan) -> int:
    """Partial tiles of all rows if the children in them came as the trie has them, not as `layout.arrange` has them."""
    layout = _Layout(trie)
    total = 0
    for members in plan.members():
        nodes = layout.nodes(members)
        ends = np.concatenate([[0], np.cumsum(layout.lengths[nodes])])
        stops = ends[np.searchsorted(nodes, trie.node_end[nodes])]
        total += node_tiles(ends[:-1], stops, int(ends[-1]))[0]
    return total


@dataclass(frozen=True, slots=True)
class _Placed:
    """The nodes of a row in its order: node i owns the row's tokens `begin[i] .. begin[i + 1] - 1`.

    Its subtree ends at token `end[i]`. `members` are the row's trajectories by where they end, `ends_at` the places of
    their last nodes, and `source` the position in `trie.tokens` of every row token.
    """

    nodes: Int64
    begin: Int64
    end: Int64
    members: Int64
    ends_at: Int64
    source: Int64


class _Layout:
    """The columns that follow from the nodes of a row."""

    def __init__(self, trie: Trie) -> None:
        self.trie = trie
        self.parents = trie.parent.tolist()
        self.lengths = trie.node_length

    def nodes(self, members: Int64) -> Int64:
        """Nodes on the paths of `members`, depth-first as in the trie."""
        found: set[int] = set()
        for node in self.trie.end_node[members].tolist():
            while node >= 0 and node not in found:
                found.add(node)
                node = self.parents[node]
        return np.array(sorted(found), np.int64)

    def placed(self, members: Int64) -> _Placed:
        trie, nodes = self.trie, self.nodes(members)
        up = trie.parent[nodes]
        sizes = self.lengths[nodes]
        begin, end = arrange(sizes, np.where(up < 0, -1, np.searchsorted(nodes, up)))
        order = np.argsort(begin)
        place = np.zeros(len(nodes), np.int64)
        place[order] = np.arange(len(nodes))
        ends_at = place[np.searchsorted(nodes, trie.end_node[members])]
        by_end = np.argsort(ends_at, kind="stable")
        nodes, begin, sizes = nodes[order], np.append(begin[order], sizes.sum()), sizes[order]
        source = np.repeat(trie.node_start[nodes] - begin[:-1], sizes) + np.arange(begin[-1])
        return _Placed(nodes, begin, end[order], members[by_end], ends_at[by_end], source)

    def columns(self, placed: _Placed) -> dict[str, Int32]:
        """The columns but the loss weights and the trajectories' names."""
        trie, begin = self.trie, placed.begin
        sizes = np.diff(begin)
        index = np.arange(begin[-1])
        parent = index - 1
        parent[begin[:-1]] = self._last_tokens_above(placed)
        stop = np.searchsorted(begin, placed.end)
        passing = np.concatenate([[0], np.cumsum(np.bincount(placed.ends_at, minlength=len(sizes)))])
        columns = {
            "input_ids": trie.tokens[placed.source],
            "position_ids": np.repeat(trie.depth[placed.nodes] - begin[:-1], sizes) + index,
            "parent": parent,
            "subtree_end": np.repeat(placed.end, sizes),
            "scale": np.repeat(passing[stop] - passing[:-1], sizes),
            "trajectory_ends": begin[placed.ends_at + 1] - 1,
        }
        return {name: values.astype(np.int32) for name, values in columns.items()}

    def _last_tokens_above(self, placed: _Placed) -> Int64:
        """For each node the row's last token of its parent, -1 at a root."""
        by_id = np.argsort(placed.nodes)
        up = self.trie.parent[placed.nodes]
        above = by_id[np.searchsorted(placed.nodes, np.maximum(up, 0), sorter=by_id)]
        return np.where(up < 0, -1, placed.begin[above + 1] - 1)


class _Weights:
    """Loss weights and terms of rows."""

    def __init__(self, trie: Trie, *, normalize: str, semantics: str) -> None:
        self.trie = trie
        self.spans = SpanView.of(trie.trajectories)
        self.factors = trajectory_factors(trie, normalize=normalize)
        self.counts = times_trained(trie) if semantics == "once" else None
        self.values = {name: _known(trie, name) for name in ("advantages", *LOGPROBS)}
        rewards = trie.trajectories["reward"]
        known = rewards.null_count < trie.num_trajectories
        self.rewards = rewards.to_numpy() if known else None
        self.has_terms = known or any(values is not None for values in self.values.values())

    def of(self, placed: _Placed) -> tuple[Float64, Terms | None]:
        """`loss_weight` float64 [num_tokens] and the terms of the row's trajectories."""
        loss_weight = np.zeros(len(placed.source), np.float64)
        tokens: list[Int64] = []
        weights: list[Float64] = []
        for i, index, weight in self._pairs(placed):
            if self.counts is not None:
                weight = weight / self.counts[placed.source[index]]
            weight = weight * self.factors[i]
            loss_weight[index] += weight
            if self.has_terms:
                tokens.append(index)
                weights.append(weight)
        return loss_weight, self._terms(placed.members, tokens, weights) if self.has_terms else None

    def _pairs(self, placed: _Placed) -> Iterator[tuple[int, Int64, Float64]]:
        """Each trajectory with the row indices and span weights of its trained tokens."""
        to_ends = paths(placed.ends_at, placed.begin, self.trie.depth[placed.nodes])
        for i, path in zip(placed.members.tolist(), to_ends, strict=True):
            starts, ends, weights = self.spans[i]
            yield i, path[positions(starts, ends)], np.repeat(weights, ends - starts)

    def _terms(self, members: Int64, tokens: list[Int64], weights: list[Float64]) -> Terms:
        sizes = [len(index) for index in tokens]

        def gather(name: str) -> Float64 | None:
            values = self.values[name]
            if values is None:
                return None
            parts = [values[i] for i in members.tolist()]
            return np.concatenate(
                [
                    np.full(n, np.nan) if part is None else np.broadcast_to(part, n)
                    for part, n in zip(parts, sizes, strict=True)
                ]
            )

        sampling, old, ref = (None if (v := gather(name)) is None else v.astype(np.float32) for name in LOGPROBS)
        return Terms(
            token=np.concatenate(tokens).astype(np.int32),
            trajectory=np.repeat(np.arange(len(members), dtype=np.int32), sizes),
            weight=np.concatenate(weights),
            advantage=gather("advantages"),
            sampling_logprob=sampling,
            old_logprob=old,
            ref_logprob=ref,
            entropy=None,
            trajectory_rewards=None if self.rewards is None else self.rewards[members],
        )


def _known(trie: Trie, name: str) -> list[NDArray[Any] | None] | None:
    """Per-trajectory values of a per-token column, a scalar advantage standing for all tokens; None if all missing."""
    table: pa.Table = trie.trajectories
    values = list_values(table, name)
    if name == "advantages":
        scalars = table["advantage"].to_pylist()
        values = [np.array(s) if v is None and s is not None else v for v, s in zip(values, scalars, strict=True)]
    return None if all(value is None for value in values) else values
