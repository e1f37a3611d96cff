"""Check packed rows: every invariant of each row, the totals, and that no trajectory is lost.

    check_row        one row against the definition, from its columns alone
    check_packed     all rows; with a trie, also that each trajectory comes back exactly once with its loss weights

It shares no code with the functions that made the rows, except the definition of loss weights. `expected` compares rows
with a trie.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.columns import COLUMNS
from treepack.errors import TreepackError
from treepack.files.manifest import Manifest
from treepack.pack.expected import ExpectedTrajectories
from treepack.pack.row import Row, RowTerms, row_counts, row_totals
from treepack.pack.row_shape import check_shape
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie


def check_row(row: Row, *, capacity: int) -> None:
    """Check one row: nesting, parents, positions, scale, weights and terms.

    Raises:
        TreepackError: naming the row, the column and the token.
    """
    num = row.num_tokens
    if not 0 < num <= capacity:
        raise TreepackError(f"row {row.row_id}: has {num} tokens; expected 1 to {capacity}")
    check_shape(row)
    _expect(row, "parent", row.parent == _nearest(row))
    up = row.parent >= 0
    _expect(row, "subtree_end", ~up | (row.subtree_end <= row.subtree_end[row.parent]))
    _expect(row, "position_ids", row.position_ids == np.where(up, row.position_ids[row.parent] + 1, 0))
    # Trajectories that end before each token: ends at 3 and 5 of 6 tokens -> [0, 0, 0, 0, 1, 1, 2]. A subtree has the
    # difference between its end and its start: token 0 with subtree_end 6 -> 2, token 2 with subtree_end 4 -> 1.
    ends = np.concatenate([[0], np.cumsum(np.bincount(row.trajectory_ends, minlength=num))])
    _expect(row, "scale", row.scale == ends[row.subtree_end] - ends[:-1])
    _expect(row, "loss_weight", np.isfinite(row.loss_weight) & (row.loss_weight >= 0) & (up | (row.loss_weight == 0)))
    if row.terms is not None:
        _check_terms(row, row.terms)


def _check_terms(row: Row, terms: RowTerms) -> None:
    if (weights := terms.trajectory_weight) is not None and not ((weights >= 0) & np.isfinite(weights)).all():
        raise TreepackError(f"row {row.row_id}: trajectory_weights has an impossible value; pack the trie again")
    # The packer adds up in another order: rounding of float64, 1e-16 for each of up to 1e4 terms.
    sums = np.bincount(terms.token, weights=terms.weight, minlength=row.num_tokens).astype(np.float64)
    _expect(row, "term_weight", _almost_equal(sums, row.loss_weight))
    ids_of_terms = row.input_ids[terms.token]
    for column in COLUMNS:
        values = getattr(terms, column.name)
        if column.wrong is not None and values is not None and column.wrong(values, ids_of_terms).any():
            raise TreepackError(f"row {row.row_id}: {column.packed} has an impossible value; pack the trie again")
    ids, logprobs = terms.teacher_topk_ids, terms.teacher_topk_logprobs
    if ids is not None and logprobs is not None and not np.array_equal(ids.sizes, logprobs.sizes):
        raise TreepackError(
            f"row {row.row_id}: term_teacher_topk_ids and term_teacher_topk_logprobs differ in length; write them again"
        )
    missing = [np.True_ if values is None else np.isnan(values) for values in (terms.returns, terms.old_values)]
    if (missing[0] & ~missing[1]).any():
        raise TreepackError(f"row {row.row_id}: has term_old_value without term_return; pack the trie again")


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
    """Return for each token the nearest token before it whose subtree contains it, or -1.

    It is the token just before, or an ancestor of that token, because subtrees nest.
    """
    # A run is a maximal range with one end. Its tokens are the nearest of each other, and a token that follows the end
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
    expected = None if trie is None else ExpectedTrajectories(trie, manifest)
    for number, row in enumerate(rows):
        if row.row_id != number:
            raise TreepackError(f"row {number}: has the row_id {row.row_id}; expected its place; pack the trie again")
        check_row(row, capacity=manifest["capacity"])
        max_token_id = max(max_token_id, int(row.input_ids.max()))
        if expected is not None:
            _expect(row, "loss_weight", _almost_equal(expected.check(row), row.loss_weight))
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
    # Ratios that a different program wrote may differ by rounding.
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
