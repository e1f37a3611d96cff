"""Check packed rows: every invariant of each row, the totals, and that no trajectory is lost.

    check_row        one row against the definition, from its own columns alone
    check_packed     all rows; with a trie, also that each trajectory comes back exactly once with its loss weights

It shares no code with the functions that made the rows, except the definition of loss weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.columns import LOGPROBS, SpanView, list_values, temperatures_of
from treepack.errors import TreepackError
from treepack.files.manifest import Manifest
from treepack.pack.row import Row, RowTerms, row_counts, row_totals
from treepack.pack.weights import times_trained, trajectory_factors
from treepack.trajectory import Float64, Int32, Int64
from treepack.trie.trie import Trie


def check_row(row: Row, *, capacity: int) -> None:
    """Check one row: nesting, parents, positions, scale, weights and terms.

    Raises:
        TreepackError: naming the row, the column and the token.
    """
    num = row.num_tokens
    index = np.arange(num, dtype=np.int32)
    if not 0 < num <= capacity:
        raise TreepackError(f"row {row.row_id}: has {num} tokens; expected 1 to {capacity}")
    for name in ("position_ids", "parent", "subtree_end", "scale", "loss_weight"):
        if len(getattr(row, name)) != num:
            raise TreepackError(f"row {row.row_id}: {name} has {len(getattr(row, name))} values for {num} tokens")
    _expect(row, "subtree_end", (row.subtree_end > index) & (row.subtree_end <= num))
    _expect(row, "parent", row.parent == _nearest(row))
    up = row.parent >= 0
    _expect(row, "subtree_end", ~up | (row.subtree_end <= row.subtree_end[row.parent]))
    _expect(row, "position_ids", row.position_ids == np.where(up, row.position_ids[row.parent] + 1, 0))
    if len(row.trajectory_groups) != len(row.trajectory_ids) or len(row.trajectory_ends) != len(row.trajectory_ids):
        raise TreepackError(
            f"row {row.row_id}: trajectory_ids, trajectory_groups and trajectory_ends differ in length; "
            "pack the trie again"
        )
    if not ((row.trajectory_ends >= 0) & (row.trajectory_ends < num)).all():
        raise TreepackError(f"row {row.row_id}: trajectory_ends points outside the row; pack the trie again")
    # Trajectories that end before each token: ends at 3 and 5 of 6 tokens -> [0, 0, 0, 0, 1, 1, 2]. A subtree has the
    # difference between its end and its start: token 0 with subtree_end 6 -> 2, token 2 with subtree_end 4 -> 1.
    ends = np.concatenate([[0], np.cumsum(np.bincount(row.trajectory_ends, minlength=num))])
    _expect(row, "scale", row.scale == ends[row.subtree_end] - ends[:-1])
    _expect(row, "scale", row.scale > 0)
    _expect(row, "loss_weight", np.isfinite(row.loss_weight) & (row.loss_weight >= 0) & (up | (row.loss_weight == 0)))
    if row.terms is not None:
        _check_terms(row, row.terms)


def _check_terms(row: Row, terms: RowTerms) -> None:
    sizes = {
        len(values)
        for field in fields(terms)
        if field.name != "trajectory_rewards" and (values := getattr(terms, field.name)) is not None
    }
    if terms.trajectory_rewards is not None and len(terms.trajectory_rewards) != len(row.trajectory_ids):
        raise TreepackError(f"row {row.row_id}: trajectory_rewards needs one value per trajectory; pack the trie again")
    inside = _all_below(terms.token, row.num_tokens) and _all_below(terms.trajectory, len(row.trajectory_ids))
    if len(sizes) != 1 or not inside:
        raise TreepackError(f"row {row.row_id}: its terms point outside the row; pack the trie again")
    # The sums add up in another order than those of the packer: rounding of float64, 1e-16 for each of up to 1e4 terms.
    sums = np.bincount(terms.token, weights=terms.weight, minlength=row.num_tokens).astype(np.float64)
    _expect(row, "term_weight", _almost_equal(sums, row.loss_weight))
    if terms.temperature is not None and ((terms.temperature < 0) | np.isinf(terms.temperature)).any():
        raise TreepackError(f"row {row.row_id}: term_temperature has an impossible value; pack the trie again")


def _all_below(values: Int32, limit: int) -> bool:
    return bool(values.min(initial=0) >= 0 and values.max(initial=-1) < limit)


def _almost_equal(a: Float64, b: Float64) -> NDArray[np.bool_]:
    """Return True for each pair of values that are equal up to rounding."""
    # np.isclose takes ten times as long as ==, and weights usually add up in the order of the packer.
    equal = a == b
    return equal if equal.all() else np.isclose(a, b, rtol=1e-12, atol=0)


def _expect(row: Row, column: str, good: np.ndarray) -> None:
    if not good.all():
        token = int((~good).argmax())
        raise TreepackError(f"row {row.row_id}: {column} is wrong at token {token}; pack the trie again")


def _nearest(row: Row) -> Int64:
    """Return for each token the nearest token before it whose subtree contains it, -1 if there is none.

    It is the token just before, or an ancestor of that token, because subtrees nest.
    """
    # A run is a maximal piece with one end. Its tokens are the nearest of each other, and a token that follows the end
    # of one of them follows the end of all. subtree_end [6, 6, 4, 4, 6, 6] -> runs start at [0, 2, 4] and end at
    # [6, 4, 6]; the run at 4 starts after the end of the run at 2, so its nearest token is the one above that run.
    ends = row.subtree_end
    starts = np.concatenate([[0], np.flatnonzero(ends[1:] != ends[:-1]) + 1])
    run_ends = ends[starts].tolist()
    token_above = (starts - 1).tolist()  # of the first token of each run
    run_above = list(range(-1, len(starts) - 1))  # the run of that token
    for run in (np.flatnonzero(ends[starts[1:] - 1] <= starts[1:]) + 1).tolist():
        start, other = int(starts[run]), run - 1
        while other >= 0 and run_ends[other] <= start:
            token_above[run] = token_above[other]
            other = run_above[other]
        run_above[run] = other
    nearest = np.arange(-1, row.num_tokens - 1)
    nearest[starts] = token_above
    return nearest


class _RowPaths:
    """Paths of one row. They consist of runs: consecutive tokens whose parent is the token before."""

    def __init__(self, row: Row) -> None:
        self.parent = row.parent
        # parent [-1, 0, 1, 2, 1, 4] -> runs start at [0, 4]; the path to token 5 is [4, 5] after [0, 1].
        self.starts = np.flatnonzero(row.parent != np.arange(-1, row.num_tokens - 1))
        self.starts = np.union1d(self.starts, [0])

    def to(self, end: int) -> Int64:
        pieces = []
        while end >= 0:
            start = int(self.starts[np.searchsorted(self.starts, end, side="right") - 1])
            pieces.append(np.arange(start, end + 1))
            end = int(self.parent[start])
        return np.concatenate(pieces[::-1])


def checked_rows(rows: Iterable[Row], manifest: Manifest, trie: Trie | None) -> Iterator[Row]:
    """Yield each of `rows` after checking it; at the end, check that none is missing.

    The rows must give back each trajectory of `trie` exactly once, with its tokens, weights and terms; trajectories
    that are too long must already be cut or left out of `trie`. The totals and `max_token_id` of `manifest` must match
    the rows, and each `row_id` must be the place of its row.

    Raises:
        TreepackError: naming the row, trajectory or total.
    """
    counted: Counter[str] = Counter()
    max_token_id = 0
    expected = None if trie is None else _Expected(trie, manifest)
    for number, row in enumerate(rows):
        if row.row_id != number:
            raise TreepackError(f"row {number}: has the row_id {row.row_id}; expected its place; pack the trie again")
        check_row(row, capacity=manifest["capacity"])
        max_token_id = max(max_token_id, int(row.input_ids.max()))
        if expected is not None:
            expected.check(row)
        counted.update(row_counts(row))
        yield row
    if not counted["num_rows"]:
        raise TreepackError("contains no row; pack the trie again")
    check_totals(manifest["totals"], row_totals(counted, capacity=manifest["capacity"]))
    check_max_token_id(manifest, max_token_id)
    if expected is not None:
        expected.finish()


def check_packed(rows: Iterable[Row], manifest: Manifest, trie: Trie | None) -> None:
    """Check all `rows`; see `checked_rows`."""
    for _ in checked_rows(rows, manifest, trie):
        pass


def check_totals(stored: dict[str, Any], counted: dict[str, float]) -> None:
    """Check the totals of a manifest against the totals of its files.

    Raises:
        TreepackError: naming the total.
    """
    # Ratios of another program may differ by rounding.
    for name, value in counted.items():
        recorded = stored.get(name)
        # An integer that is equal needs no rounding, and one that is not may be too large for a float.
        is_close = isinstance(recorded, float) and math.isclose(recorded, value, rel_tol=1e-9, abs_tol=1e-12)
        if recorded != value and not is_close:
            raise TreepackError(f"the files give {name} = {value}, the manifest lists {recorded}; write it again")


def check_max_token_id(manifest: Manifest, largest: int) -> None:
    """Check the largest token id that a manifest lists against the largest one of its files.

    Raises:
        TreepackError: they differ. Training would read beyond the embeddings of a model that seems to fit.
    """
    if manifest["max_token_id"] != largest:
        raise TreepackError(
            f"the files give max_token_id = {largest}, the manifest lists {manifest['max_token_id']}; write it again"
        )


class _Expected:
    """The trajectories of a trie that the rows have not given back yet."""

    def __init__(self, trie: Trie, manifest: Manifest) -> None:
        options = manifest["options"]
        ids = trie.trajectories["trajectory_id"].to_pylist()
        self.index = {name: i for i, name in enumerate(ids)}
        self.spans = SpanView.of(trie.trajectories)
        self.factors = trajectory_factors(trie, normalize=options["normalize"])
        self.steps = trie.trajectories["step"].to_pylist()
        self.groups = trie.trajectories["group_id"].to_pylist()
        self.rewards = trie.trajectories["reward"].to_pylist()
        self.counts = times_trained(trie) if options["semantics"] == "once" else None
        self.trie = trie
        self.waiting = set(ids)
        table = trie.trajectories
        per_token, scalar = list_values(table, "advantages"), table["advantage"].to_pylist()
        # `treepack logprobs` replaces these columns, so they differ from those of the trie.
        computed = {f"{name}_logprobs" for name in manifest.get("logprobs") or ()}
        self.values = {name.removesuffix("s"): list_values(table, name) for name in LOGPROBS if name not in computed}
        self.values["advantage"] = [a if b is None else b for a, b in zip(scalar, per_token, strict=True)]
        self.values["temperature"] = temperatures_of(table)

    def check(self, row: Row) -> None:
        paths = _RowPaths(row)
        own_terms = [] if row.terms is None else _terms_of_each(row.terms, len(row.trajectory_ids))
        weights = np.zeros(row.num_tokens)
        for order, (name, end) in enumerate(zip(row.trajectory_ids, row.trajectory_ends.tolist(), strict=True)):
            if name not in self.waiting:
                known = "a second time" if name in self.index else "which the trie does not have"
                raise TreepackError(f"row {row.row_id}: holds trajectory {name} {known}; pack the trie again")
            self.waiting.discard(name)
            i = self.index[name]
            path = paths.to(end)
            named = (row.step, row.trajectory_groups[order]) == (self.steps[i], self.groups[i])
            if not (named and np.array_equal(row.input_ids[path], self.trie.tokens[_forest_positions(self.trie, i)])):
                raise TreepackError(f"row {row.row_id}: trajectory {name} differs from the trie's; pack the trie again")
            self._add(weights, path, i)
            if row.terms is not None:
                self._check_values(row, order, own_terms[order], path, i)
        _expect(row, "loss_weight", _almost_equal(weights, row.loss_weight))

    def _add(self, weights: np.ndarray, path: Int64, i: int) -> None:
        for start, end, weight in zip(*(part.tolist() for part in self.spans[i]), strict=True):
            share = self.factors[i] * weight
            if self.counts is not None:
                share = share / self.counts[_forest_positions(self.trie, i)[start:end]]
            weights[path[start:end]] += share

    def _check_values(self, row: Row, order: int, mine: Int64 | slice, path: Int64, i: int) -> None:
        """Check the terms `mine` of the row's trajectory number `order`, which is the trie's `i`, token by token."""
        terms = row.terms
        assert terms is not None
        prefix = f"row {row.row_id}: trajectory {row.trajectory_ids[order]}"
        starts, ends, _ = self.spans[i]
        trained = path[np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])]
        if not np.array_equal(terms.token[mine], trained):
            raise TreepackError(f"{prefix} has terms that are not its trained tokens; pack the trie again")
        reward = None if terms.trajectory_rewards is None else float(terms.trajectory_rewards[order])
        if (None if reward is None or math.isnan(reward) else reward) != self.rewards[i]:
            raise TreepackError(f"{prefix} has another reward than in the trie; pack the trie again")
        for name, values in self.values.items():
            stored, known = getattr(terms, name), values[i]
            if stored is None and known is None:
                continue
            expected = np.broadcast_to(np.nan if known is None else known, len(trained))
            if stored is None or not np.array_equal(stored[mine], expected, equal_nan=True):
                raise TreepackError(f"{prefix} has another term_{name} than in the trie; pack the trie again")

    def finish(self) -> None:
        if self.waiting:
            raise TreepackError(
                f"trajectory {min(self.waiting)} and {len(self.waiting) - 1} more are in no row; pack the trie again"
            )


def _terms_of_each(terms: RowTerms, num_trajectories: int) -> list[Int64] | list[slice]:
    """Return the indices of the terms of each trajectory of a row, in their order."""
    order = np.argsort(terms.trajectory, kind="stable") if (np.diff(terms.trajectory) < 0).any() else None
    # Sorted trajectories [0, 0, 2] of 3 -> bounds [0, 2, 2, 3].
    owners = terms.trajectory if order is None else terms.trajectory[order]
    bounds = np.searchsorted(owners, np.arange(num_trajectories + 1)).tolist()
    slices = [slice(a, b) for a, b in pairwise(bounds)]
    return slices if order is None else [order[each] for each in slices]


def _forest_positions(trie: Trie, i: int) -> Int64:
    """Return the position in `trie.tokens` of every token of trajectory `i`."""
    pieces, node = [], int(trie.end_node[i])
    while node >= 0:
        pieces.append(np.arange(trie.node_start[node], trie.node_start[node + 1]))
        node = int(trie.parent[node])
    return np.concatenate(pieces[::-1])
