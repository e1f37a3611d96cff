"""Selection of the queries to roll out next: the k queries with a pass rate nearest to 0.5 (PROS, section 4).

    QueryCounts --with_queries--> QueryCounts               add queries, original and derived ones
    QueryCounts, rewards --forget_and_add--> QueryCounts    passed, tried <- lambda * old + new, at every training step
    QueryCounts, log-odds --nearest--> k queries

        A query passes 1 of 1 rollouts in step 0 and 0 of 1 in step 1. With lambda = 0.5:

        passed    0  ->  0.5 * 0 + 1 = 1  ->  0.5 * 1 + 0 = 0.5
        tried     0  ->  0.5 * 0 + 1 = 1  ->  0.5 * 1 + 1 = 1.5

The state is one Parquet file with a row per query (`schema.QUERIES`). Its metadata contains format, version and number
of updates. The estimate of pass rates is `pass_rates.estimate`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files.directory import finished_file
from treepack.files.remote.address import AnyPath
from treepack.files.remote.cache import local_copy
from treepack.files.schema import QUERIES, SELECTION_FORMAT, SELECTION_VERSION
from treepack.trajectory import Float64, Int64

# A query with fewer remembered rollouts counts as untried: at a factor of 0.9, one rollout after 132 steps. Without a
# limit, every query would stay in the sampler for ever, with counts that change nothing.
_MIN_ROLLOUTS = 1e-6


@dataclass(frozen=True, slots=True)
class QueryCounts:
    """Counts of n queries, sorted by id.

    `query_id` is an Arrow array of strings. `parent` int64 [n] is the index of the query from which each one is
    derived, -1 for an original query. `passed` <= `tried` float64 [n] are numbers of rollouts, in which old rollouts
    count less. `num_updates` is the number of training steps, and `steps` has the given numbers of steps,
    ascending.
    """

    query_id: pa.Array
    parent: Int64
    passed: Float64
    tried: Float64
    num_updates: int
    steps: tuple[int, ...] = ()

    @property
    def num_queries(self) -> int:
        return len(self.parent)

    @property
    def parent_id(self) -> pa.Array:
        """Id of each query's parent, null for an original one."""
        return self.query_id.take(pa.array(self.parent, mask=self.parent < 0))


def empty_state() -> QueryCounts:
    """Return a state without queries."""
    return QueryCounts(pa.array([], pa.string()), np.zeros(0, np.int64), np.zeros(0), np.zeros(0), 0)


def indices_of(state: QueryCounts, query_id: pa.Array) -> Int64:
    """Return the index of each query of `query_id` in the state, -1 if it is not there; int64 [len(query_id)]."""
    indices: Int64 = pc.index_in(query_id, value_set=state.query_id).fill_null(-1).to_numpy().astype(np.int64)
    return indices


def with_queries(
    state: QueryCounts, query_id: Sequence[str], parent_id: Sequence[str | None]
) -> tuple[QueryCounts, int]:
    """Add queries to `state`, and return it with the number of new ones. A `parent_id` of None is an original query.

    Raises:
        TreepackError: a parent that is missing or derived itself, or a query with several parents.
    """
    parent_of: dict[str, str | None] = {}
    for query, parent in zip(query_id, parent_id, strict=True):
        if parent_of.setdefault(query, parent) != parent:
            raise _several_parents(query, parent, parent_of[query])
    names, parents = pa.array(parent_of.keys(), pa.string()), pa.array(parent_of.values(), pa.string())
    at = indices_of(state, names)
    known = np.flatnonzero(at >= 0)
    for i, old_parent in zip(known.tolist(), state.parent_id.take(pa.array(at[known])).to_pylist(), strict=True):
        if parents[i].as_py() != old_parent:
            raise _several_parents(names[i].as_py(), parents[i].as_py(), old_parent)
    # Append first, then look parents up: a query and its parent may arrive together.
    new = pa.array(np.flatnonzero(at < 0))
    joined = QueryCounts(
        pa.concat_arrays([state.query_id, names.take(new)]),
        np.concatenate([state.parent, np.full(len(new), -1)]),
        np.concatenate([state.passed, np.zeros(len(new))]),
        np.concatenate([state.tried, np.zeros(len(new))]),
        state.num_updates,
        state.steps,
    )
    above = indices_of(joined, parents.take(new))
    derived = parents.take(new).is_valid().to_numpy(zero_copy_only=False)
    joined.parent[state.num_queries :] = above
    for i in np.flatnonzero(derived & ((above < 0) | (joined.parent[above] >= 0)))[:1].tolist():
        fault = "is not known" if above[i] < 0 else "is derived itself"
        query, parent = names.take(new)[i].as_py(), parents.take(new)[i].as_py()
        raise TreepackError(f"the group {parent}, parent of the query {query}, {fault}; add the original query")
    return _sort_by_id(joined), len(new)


def _several_parents(query: str, parent: str | None, old: str | None) -> TreepackError:
    return TreepackError(f"the query {query} has the parent {parent} here and {old} before; give each query one parent")


def _sort_by_id(state: QueryCounts) -> QueryCounts:
    order: Int64 = pc.sort_indices(state.query_id).to_numpy().astype(np.int64)
    # place is the inverse of order, which renumbers parents: ids [q, q~1, a], order [2, 0, 1] -> place [1, 2, 0].
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    parent = state.parent[order]
    return QueryCounts(
        state.query_id.take(pa.array(order)),
        np.where(parent < 0, -1, place[parent]),
        state.passed[order],
        state.tried[order],
        state.num_updates,
        state.steps,
    )


def forget_and_add(
    state: QueryCounts,
    query: Int64,
    success: NDArray[np.bool_],
    *,
    step: Int64 | None = None,
    weight: Float64 | None = None,
    forgetting: float,
) -> QueryCounts:
    """Count the rollouts of one training step, or of several steps in order, and return the new state.

    At each step, the counts of every query are multiplied by `forgetting`, the lambda in (0, 1] of PROS, section 4, and
    then the new rollouts are added. `query` int64 [m] is the query of each rollout, `success` bool [m] its outcome,
    `step` int64 [m] its training step as a rank from 0, and `weight` float64 [m] how many rollouts it counts as, None
    for one (`effective_counts`).

    Raises:
        TreepackError: a factor outside (0, 1].
    """
    if not 0 < forgetting <= 1:
        raise TreepackError(f"forgetting is {forgetting}; expected a factor in (0, 1], where 1 forgets nothing")
    ranks = np.zeros(len(query), np.int64) if step is None else step
    num_steps = int(ranks.max(initial=0)) + 1
    # All steps at once: rollouts of ranks [0, 1, 2] with factor 0.5 weigh [0.25, 0.5, 1], and old counts 0.125.
    new = forgetting ** (num_steps - 1.0 - ranks) * (1.0 if weight is None else weight)
    size, old = state.num_queries, forgetting**num_steps
    tried = old * state.tried + np.bincount(query, weights=new, minlength=size)
    passed = old * state.passed + np.bincount(query, weights=new * success, minlength=size)
    remembered = tried >= _MIN_ROLLOUTS
    return replace(
        state,
        # Both sums round separately, so passed may be above tried in the last digit.
        passed=np.where(remembered, np.minimum(passed, tried), 0.0),
        tried=np.where(remembered, tried, 0.0),
        num_updates=state.num_updates + num_steps,
    )


def effective_counts(weight: Float64, part: Int64) -> Float64:
    """Return how many independent rollouts each leaf of a tree counts as, float64 [m], from its `weight`.

    The leaves of a `part` (int64 [m], one group in one step) count together as (sum w)^2 / sum w^2 rollouts, the number
    of rollouts of equal weight whose mean has the same variance if leaves are independent. Siblings are correlated, so
    it is still too large. It is divided among the leaves by their weights, so a pass rate is the weighted one.
    """
    # weights [1/2, 1/4, 1/4] -> 1 / (6 / 16) = 2.67 rollouts -> [1.33, 0.67, 0.67]
    total = np.bincount(part, weights=weight)
    squares = np.bincount(part, weights=weight**2)
    per_weight = np.divide(total, squares, out=np.zeros_like(total), where=squares > 0)
    return weight * per_weight[part]


def nearest(log_odds: Float64, k: int, *, seed: int = 0) -> Int64:
    """Return the `k` queries whose pass rate is nearest to 0.5, nearest first; `seed` orders equal ones.

    |sigmoid(x) - 1/2| increases with |x|, so these are the log-odds nearest to 0. O(n log n).

    Raises:
        TreepackError: there are fewer than `k`.
    """
    if not 1 <= k <= len(log_odds):
        raise TreepackError(f"k is {k}; expected 1 to {len(log_odds)}, the number of queries")
    # log_odds [3, -0.2, 0.1], k = 2 -> [2, 1]
    ties = np.random.default_rng(seed).permutation(len(log_odds))
    order: Int64 = np.lexsort((ties, np.abs(log_odds)))[:k].astype(np.int64)
    return order


def write_state(state: QueryCounts, path: AnyPath) -> None:
    """Write `state` over an old one; equal states give equal bytes, and a failed write leaves the old file.

    Whoever reads a state and writes it again needs its lock, or counts of concurrent processes are lost.

    Raises:
        TreepackError: the disk fails.
    """
    columns = [state.query_id, state.parent_id, pa.array(state.passed), pa.array(state.tried)]
    about: dict[str, Any] = {"format": SELECTION_FORMAT, "version": SELECTION_VERSION, "num_updates": state.num_updates}
    about |= {"steps": list(state.steps)} if state.steps else {}
    table = pa.Table.from_arrays(columns, schema=QUERIES.with_metadata({b"treepack": json.dumps(about).encode()}))
    with finished_file(path, overwrite=True) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def read_state(path: AnyPath) -> QueryCounts:
    """Read a file that `write_state` wrote.

    Raises:
        TreepackError: no such file, another format or version, or damaged content.
    """
    path = local_copy(path)
    if not path.exists():
        raise TreepackError(f"{path}: no such file; make a state with treepack select update")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            about = json.loads((file.schema_arrow.metadata or {}).get(b"treepack", b"{}"))
            _check_version(about, path)
            table = file.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise TreepackError(
            f"{path}: is not a state of treepack select ({reason}); make one with treepack select update"
        ) from error
    try:
        table = table.cast(QUERIES)
    except (pa.ArrowException, ValueError) as error:
        raise TreepackError(
            f"{path}: is damaged (it has the columns {table.column_names}); make it again with treepack select update"
        ) from error
    return replace(_state_of(table, int(about["num_updates"]), path), steps=tuple(map(int, about.get("steps", ()))))


def _check_version(about: dict[str, object], path: Path) -> None:
    if about.get("format") != SELECTION_FORMAT:
        raise TreepackError(f"{path}: is not a state of treepack select; make one with treepack select update")
    if (version := about.get("version")) != SELECTION_VERSION:
        raise TreepackError(
            f"{path}: has {SELECTION_FORMAT} version {version}; this treepack reads version {SELECTION_VERSION}, so "
            "use the treepack that wrote it or make it again with treepack select update"
        )


def _state_of(table: pa.Table, num_updates: int, path: Path) -> QueryCounts:
    """Build the state from its columns and check them.

    Raises:
        TreepackError: columns that contradict each other.
    """
    query_id, parent_id = table["query_id"].combine_chunks(), table["parent_id"].combine_chunks()
    passed, tried = table["passed"].to_numpy(), table["tried"].to_numpy()
    parent = pc.index_in(parent_id, value_set=query_id, skip_nulls=True).fill_null(-1).to_numpy().astype(np.int64)
    faults = {
        "a query is there twice": len(pc.unique(query_id)) < len(query_id),
        "counts are not 0 <= passed <= tried": not ((passed >= 0) & (passed <= tried) & np.isfinite(tried)).all(),
        "a parent is missing": bool((parent < 0).sum() > parent_id.null_count),
        # Two levels only: parents of parents would not fit the model of pass_rates.
        "a parent is derived itself": bool((parent[parent[parent >= 0]] >= 0).any()),
    }
    for fault, is_present in faults.items():
        if is_present:
            raise TreepackError(f"{path}: is damaged ({fault}); make it again with treepack select update")
    return QueryCounts(query_id, parent, passed, tried, num_updates)
